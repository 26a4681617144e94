"""Which locals and containers the statements of a program read and write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import taichi_ext.program as ir


def assigned_locals(body: ir.Body) -> set[ir.Local]:
    """Locals that change after their declaration."""
    targets = (s.target for s in ir.statements(body) if isinstance(s, ir.Store))
    return {target.local for target in targets if isinstance(target, ir.Read)}


def all_values(statement: ir.Statement) -> list[ir.Value]:
    """All nodes in the expressions of a statement, without those in its blocks."""
    return [node for value in ir.values_of(statement) for node in ir.walk(value)]


def read_counts(body: ir.Body) -> Counter[ir.Local]:
    """How often each local is read; a node that occurs twice counts twice."""
    return Counter(n.local for s in ir.statements(body) for n in all_values(s) if isinstance(n, ir.Read))


def kept_locals(body: ir.Body) -> set[ir.Local]:
    """Locals with respect to which a boundary differentiates: positions of pixels, tangents of rules."""
    inner = {local for s in _boundaries(body) for locals_ in s.inner.values() for local in locals_}
    return inner | position_locals(body)


def position_locals(body: ir.Body) -> set[ir.Local]:
    """Locals that hold the positions of pixels."""
    values = (e for s in _boundaries(body) for e in getattr(s.given.get("at"), "entries", ()))
    return {local for e in values for local in e.contents.locals}


def _boundaries(body: ir.Body) -> Iterator[ir.Boundary]:
    return (s for s in ir.statements(body) if isinstance(s, ir.Boundary))


def written_memory(statement: ir.Statement) -> set[ir.Local | ir.Container]:
    """The locals and containers that a statement writes to, blocks in it included."""
    found: set[ir.Local | ir.Container] = set()
    if isinstance(statement, ir.Store):
        found.add(statement.target.memory)
    elif isinstance(statement, ir.Effect):
        found |= set(statement.writes)
        if statement.function == "stop_grad":  # values read before it have a tangent
            found |= {a for a in statement.args if isinstance(a, ir.Container)}
    return found.union(*(written_memory(inner) for body in ir.bodies(statement) for inner in body))
