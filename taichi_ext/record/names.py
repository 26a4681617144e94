"""Generated names in rewritten kernels: such as no user can write, and readable where their text is shown."""

from __future__ import annotations

import ast
import copy

TRACER = "<ad>"  # what the tracer is called


def names_in(tree: ast.AST) -> set[str]:
    """The names of variables in a tree, those of arguments included."""
    nodes = list(ast.walk(tree))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.arg for n in nodes if isinstance(n, ast.arg)}


def readable_text(tree: ast.Module, taken: set[str]) -> str:
    """A rewritten tree as Python that can be read: ``<ad>`` as ``_ad``, with more underscores where that is taken."""
    readable = {}
    for name in names_in(tree) - taken:
        shown = "_" + name.strip("<>")
        while shown in taken:
            shown = "_" + shown
        readable[name] = shown
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = readable.get(node.id, node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # what ``let`` assigns
            node.value = readable.get(node.value, node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, tuple):
            node.value = tuple(readable.get(name, name) for name in node.value)
    return ast.unparse(tree)
