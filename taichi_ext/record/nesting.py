"""Loops in a rewritten tree: their bounds, and those over several dimensions run row by row."""

from __future__ import annotations

import ast
import copy
import math
from dataclasses import dataclass
from typing import Any

from taichi_ext.record.parallel_loops import count_pieces


@dataclass
class LoopNode:
    """A loop in a tree, and how it was written: in a static loop it is visited again, with another domain."""

    node: ast.For
    target: ast.expr
    iterable: ast.expr
    body: list[Any]

    @property
    def is_over_range(self) -> bool:
        """Whether it is written as one over ``range`` or ``ti.ndrange``."""
        function = self.iterable.func if isinstance(self.iterable, ast.Call) else None
        return getattr(function, "attr", getattr(function, "id", "")) in ("range", "ndrange")

    def restore(self) -> None:
        """Make the loop what it was."""
        self.node.target, self.node.iter, self.node.body = self.target, self.iterable, self.body


def loops_by_number(tree: ast.Module) -> dict[int, LoopNode]:
    """The loops of a rewritten kernel by the numbers that they announce."""
    found = {}
    for node in ast.walk(tree):
        first = node.body[0] if isinstance(node, ast.For) else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Call):
            called = first.value.func
            if isinstance(called, ast.Attribute) and called.attr == "enter" and first.value.args:
                loop = LoopNode(node, node.target, node.iter, node.body)  # type: ignore[attr-defined]
                found[first.value.args[0].value] = loop  # type: ignore[attr-defined]
    return found


def plain_bound(bound: ast.expr) -> ast.expr | None:
    """What tells a rewritten bound of a loop and can be evaluated once more; None where that is not certain.

    That is a constant, a name, an attribute, or ``x.shape[0]``, for which the tracer is asked.
    """
    if isinstance(bound, ast.Call) and isinstance(bound.func, ast.Attribute):
        inner = bound.args[0] if bound.args else None
        if bound.func.attr in ("primal", "bound") and inner is not None:
            return plain_bound(inner)
        if bound.func.attr != "load" or not isinstance(inner, ast.Attribute) or inner.attr != "shape":
            return None
        size = copy.deepcopy(bound)
        assert isinstance(size.func, ast.Attribute)
        size.func.attr, size.args[0] = "size", size.args[0].value  # type: ignore[attr-defined]
        return size if plain_bound(inner.value) is not None else None
    return copy.deepcopy(bound) if isinstance(bound, (ast.Constant, ast.Name, ast.Attribute)) else None


def nest_loop(node: ast.For, shape: tuple[int, ...], pieces: int) -> None:
    """Make ``for i, j in field`` a loop over pieces of rows that runs a loop over j, where that is the same."""
    names = index_names(node, shape)
    if len(shape) < 2 or not names:
        return
    own = _prefix(names)
    lines = [
        f"for {own}piece in range({shape[0] * pieces}):",
        f"    {names[0]} = {_index(own, f'{own}piece // {pieces}')}",
    ]
    first, end = (_index(own, f"({own}piece % {pieces}{plus}) * {shape[1]} // {pieces}") for plus in ("", " + 1"))
    lines.append(f"    for {names[1]} in range({first}, {end}):")
    for depth, (name, n) in enumerate(zip(names[2:], shape[2:], strict=True), 2):
        lines.append(f"{'    ' * depth}for {name} in range({n}):")
    lines.append("    " * len(names) + "pass")
    _replace(node, lines, own)


def nest_pieces(node: ast.For, shape: tuple[int, ...], length: int) -> None:
    """Make a loop one over pieces of so many of the last index, which it tells the tracer."""
    *outer, last = names = index_names(node, shape)
    own = _prefix(names)
    pieces = -(-shape[-1] // length)
    lines = [f"for {own}piece in range({count_pieces(shape, length)}):"]
    inner = pieces * math.prod(shape[:-1])
    for n, (name, size) in enumerate(zip(outer, shape, strict=False)):
        inner //= size
        lines.append(f"    {name} = " + _index(own, f"{own}piece // {inner}" + (f" % {size}" if n else "")))
    lines.append(f"    {own}first = " + _index(own, f"{own}piece % {pieces} * {length}"))
    lines.append(f"    {own}end = {own}ad.begin_piece({', '.join([*outer, f'{own}first'])})")
    lines += [f"    for {last} in range({own}first, {own}end):", "        pass", f"    {own}ad.end_piece()"]
    _replace(node, lines, own)


def spread_loop(node: ast.For, shape: tuple[int, ...], pieces: int) -> None:
    """Make a loop over fewer indices than pieces one over pieces, each of one index or none."""
    names = index_names(node, shape)
    own = _prefix(names)
    first, end = (_index(own, f"({own}piece{plus}) * {math.prod(shape)} // {pieces}") for plus in ("", " + 1"))
    lines = [f"for {own}piece in range({pieces}):", f"    for {own}flat in range({first}, {end}):"]
    for n, name in enumerate(names):
        lines.append(f"        {name} = " + _index(own, f"{own}flat // {math.prod(shape[n + 1 :])} % {shape[n]}"))
    _replace(node, lines, own)


def flatten_loop(node: ast.For, shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
    """Make a loop over all indices from an offset on one over a single range."""
    names = index_names(node, shape)
    own = _prefix(names)
    lines = [f"for {own}flat in range({math.prod(shape)}):"]
    for n, (name, first) in enumerate(zip(names, offset or (0,) * len(shape), strict=True)):
        place = f"{own}flat // {math.prod(shape[n + 1 :])} % {shape[n]}"
        lines.append(f"    {name} = " + _index(own, f"{place} + {first}"))
    _replace(node, lines, own)


def _index(own: str, text: str) -> str:
    """An index of the type that loops have, whatever integers are by default."""
    return f"{own}ad.index({text})"


def _prefix(names: list[str]) -> str:
    """What the names of other variables begin with: no name of the user's is as long."""
    return "_" * (1 + max(map(len, names)))


def index_names(node: ast.For, shape: tuple[int, ...]) -> list[str]:
    """The loop variables, one per dimension; none where the loop cannot be nested."""
    targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
    names = [e.id for e in targets if isinstance(e, ast.Name)]
    if len(set(names)) != len(shape) or (len(shape) == 1 and _is_grouped(node.iter)):
        return []
    if any(_has_break(statement) for statement in node.body):
        return []  # a parallel loop cannot be left, which Taichi says; an inner one could
    if any(_assigns(statement, set(names)) for statement in node.body):
        return []  # the variables of ti.ndrange can be assigned, those of range cannot
    return names


def _is_grouped(iterable: ast.expr) -> bool:
    """Whether a loop has one variable for all indices: it is over a call that is no range."""
    return isinstance(iterable, ast.Call) and getattr(iterable.func, "id", "") != "range"


def _replace(node: ast.For, lines: list[str], own: str) -> None:
    """Put another loop in the place of a loop: its innermost loop gets the body.

    Variables that begin with ``own`` get names that no variable of a kernel can have.
    """
    (new,) = ast.parse("\n".join(lines)).body
    assert isinstance(new, ast.For)
    for child in ast.walk(new):
        ast.copy_location(child, node)
        if isinstance(child, ast.Name) and child.id.startswith(own):
            child.id = f"<{child.id.removeprefix(own)}>"
    innermost = [child for child in ast.walk(new) if isinstance(child, ast.For)][-1]
    innermost.body = [*(s for s in innermost.body if not isinstance(s, ast.Pass)), *node.body]
    node.target, node.iter, node.body = new.target, new.iter, new.body


def _assigns(statement: ast.AST, names: set[str]) -> bool:
    """Whether a rewritten statement may assign a name, which it holds as a constant."""
    constants = (n.value for n in ast.walk(statement) if isinstance(n, ast.Constant))
    return any(c in names if isinstance(c, str) else isinstance(c, tuple) and names & set(c) for c in constants)


def _has_break(node: ast.AST) -> bool:
    """Whether a statement leaves the loop that it stands in."""
    if isinstance(node, (ast.For, ast.While)):
        return False
    return isinstance(node, ast.Break) or any(_has_break(child) for child in ast.iter_child_nodes(node))
