"""Smaller programs that fail in the same way."""

import ast
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from program_model import Program


def reduce_program(program: Program, fails: Callable[[Program], bool], limit: int = 400) -> Program:
    """Leave out statements and replace expressions by their parts as long as the program fails."""
    tries = 0
    for cuts in (_statement_cuts, _expression_cuts, _statement_cuts, _expression_cuts):
        position = 0
        while tries < limit:
            candidates = cuts(ast.parse(program.text), position)
            if candidates is None:
                break
            for text in candidates:
                tries += 1
                if fails(replace(program, text=text)):
                    program = replace(program, text=text)
                    break
            else:
                position += 1
    return program


def _statement_cuts(tree: ast.Module, position: int) -> list[str] | None:
    """Texts without statement number ``position``, or with its body in its place; None beyond the last."""
    blocks = [
        (n, attribute)
        for n in ast.walk(tree)
        for attribute in ("body", "orelse")
        if isinstance(getattr(n, attribute, None), list)
    ]
    places = [(n, attribute, i) for n, attribute in blocks for i in range(len(getattr(n, attribute)))]
    if position >= len(places):
        return None
    node, attribute, i = places[position]
    statements = getattr(node, attribute)
    old = list(statements)
    statement = old[i]
    if isinstance(statement, ast.Pass):
        return []
    replacements: list[list[ast.stmt]] = [[]]
    if not isinstance(statement, ast.FunctionDef):
        replacements += [getattr(statement, b) for b in ("body", "orelse") if getattr(statement, b, None)]
    texts = []
    for replacement in replacements:
        statements[:] = [*old[:i], *replacement, *old[i + 1 :]]
        if not statements and attribute == "body":
            statements.append(ast.Pass())
        texts.append(ast.unparse(tree) + "\n")
    return texts


def _expression_cuts(tree: ast.Module, position: int) -> list[str] | None:
    """Texts in which expression number ``position`` is replaced by one of its operands; None beyond the last."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.expr)]
    if position >= len(nodes):
        return None
    target = nodes[position]
    texts = []
    for part in _operands(target):
        other = _Replaced(target, part).visit(copy.deepcopy(tree, {id(target): target}))
        texts.append(ast.unparse(ast.fix_missing_locations(other)) + "\n")
    return texts


def _operands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_module = isinstance(node.func.value, ast.Name)
        return node.args if is_module else [*node.args, node.func.value]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return [ast.Constant(0.7)]
    return []


class _Replaced(ast.NodeTransformer):
    def __init__(self, target: ast.expr, part: ast.expr) -> None:
        self.target, self.part = target, part

    def visit(self, node: ast.AST) -> Any:
        return self.part if node is self.target else super().visit(node)
