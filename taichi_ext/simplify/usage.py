"""Which locals and containers the statements of a program read and write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from taichi_ext.program import (
    Assign,
    Atomic,
    Body,
    Boundary,
    Container,
    Effect,
    Load,
    Local,
    Read,
    Statement,
    Update,
    Value,
    bodies,
    statements,
    values_of,
    walk,
)


def assigned_locals(body: Body) -> set[Local]:
    """Locals that change after their declaration."""
    return {s.target.local for s in statements(body) if isinstance(s, Store) and isinstance(s.target, Read)}


Store = (Assign, Update, Atomic)


def all_values(statement: Statement) -> list[Value]:
    """All nodes in the expressions of a statement, without those in its blocks."""
    return [node for value in values_of(statement) for node in walk(value)]


def read_counts(body: Body) -> Counter[Local]:
    """How often each local is read; a node that occurs twice counts twice."""
    return Counter(n.local for s in statements(body) for n in all_values(s) if isinstance(n, Read))


def kept_locals(body: Body) -> set[Local]:
    """Locals with respect to which a boundary differentiates: positions of pixels, tangents of rules."""
    inner = {local for s in _boundaries(body) for locals_ in s.inner.values() for local in locals_}
    return inner | position_locals(body)


def position_locals(body: Body) -> set[Local]:
    """Locals that hold the positions of pixels."""
    values = (e for s in _boundaries(body) for e in getattr(s.given.get("at"), "entries", ()))
    return {local for e in values for local in e.contents.locals}


def _boundaries(body: Body) -> Iterator[Boundary]:
    return (s for s in statements(body) if isinstance(s, Boundary))


def written_memory(statement: Statement) -> set[Local | Container]:
    """The locals and containers that a statement writes to, blocks in it included."""
    found: set[Local | Container] = set()
    if isinstance(statement, Store):
        target = statement.target
        found.add(target.container if isinstance(target, Load) else target.local)
    elif isinstance(statement, Effect):
        found |= set(statement.writes)
        if statement.function == "stop_grad":  # what is read before it has a tangent
            found |= {a for a in statement.args if isinstance(a, Container)}
    for body in bodies(statement):
        for inner in body:
            found |= written_memory(inner)
    return found
