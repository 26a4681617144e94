"""Which locals and containers the statements of a program read and write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import taichi_ext.program as ir


def assigned_locals(body: Iterable[ir.Statement]) -> set[ir.Local]:
    """Locals that change after their declaration."""
    return {memory for s in body for memory in s.written if isinstance(memory, ir.Local)}


def written_locals(s: ir.Statement) -> tuple[ir.Local, ...]:
    """The locals that a statement itself declares or changes."""
    target = s.target.memory if isinstance(s, ir.Store) else None
    return (*((target,) if isinstance(target, ir.Local) else ()), *ir.declared(s))


def changed_locals(s: ir.Statement) -> frozenset[ir.Local]:
    """The locals that are all that a statement changes; none if it changes anything else."""
    if isinstance(s, ir.Store):
        return frozenset(written_locals(s) if isinstance(s.target, ir.Read) else ())
    return frozenset(ir.declared(s) if isinstance(s, (ir.Declare, ir.Call, ir.Boundary)) else ())


def all_values(statement: ir.Statement) -> list[ir.Value]:
    """All nodes in the expressions of a statement, without those in its blocks."""
    return [node for value in ir.values_of(statement) for node in ir.walk(value)]


def accesses(s: ir.Statement) -> list[ir.Load]:
    """The entries of containers that a statement reads and stores, without those of its blocks."""
    targets = [s.target] if isinstance(s, ir.Store) else []
    return [v for v in (*targets, *all_values(s)) if isinstance(v, ir.Load)]


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
