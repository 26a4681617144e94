"""Drop statements that compute unused values."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import taichi_ext.program as ir
from taichi_ext.simplify.usage import position_locals


def without_dead_code(body: ir.Body) -> ir.Body:
    """The block without locals that are never used, and without branches and loops that are empty."""
    needed = needed_locals(body)

    def change(s: ir.Statement) -> ir.Statement | ir.Body:
        if _defined(s) is not None and not _defined(s) & needed:  # type: ignore[operator]
            return ()
        if isinstance(s, ir.Boundary) and s.inner:
            return _with_used_tangents(s, needed)
        if isinstance(s, ir.If) and not s.then and not s.orelse and s.contents.is_pure:
            return ()
        return () if isinstance(s, ir.For) and not s.body else s

    return ir.mapped(body, change)


def needed_locals(body: ir.Body) -> set[ir.Local]:
    """The locals on which anything depends that a program does."""
    sources: dict[ir.Local, list[ir.Value]] = defaultdict(list)
    pending: list[ir.Value] = []
    for s in ir.statements(body):
        defined = _defined(s)
        if defined is None:
            pending += ir.values_of(s)
        else:
            values = ir.values_of(_with_used_tangents(s, set())) if isinstance(s, ir.Boundary) else ir.values_of(s)
            values += [s.target] if isinstance(s, ir.Atomic) else []  # its result is the value before
            for local in defined:
                sources[local] += values
            for name, locals_ in (s.inner if isinstance(s, ir.Boundary) else {}).items():
                for local in locals_:
                    sources[local] += s.sources(name)  # type: ignore[union-attr]
    needed = position_locals(body)
    pending += [v for local in needed for v in sources.pop(local, ())]
    while pending:
        for local in pending.pop().contents.locals - needed:
            needed.add(local)
            pending += sources.pop(local, ())
    return needed


def _defined(s: ir.Statement) -> set[ir.Local] | None:
    """The locals that are all that a statement is for; None for any other statement."""
    if isinstance(s, ir.Declare) and s.contents.is_pure:
        return {s.local}
    if isinstance(s, (ir.Assign, ir.Update)) and isinstance(s.target, ir.Read) and s.value.contents.is_pure:
        return {s.target.local}
    if isinstance(s, ir.Atomic) and isinstance(s.target, ir.Read) and s.value.contents.is_pure:
        return {s.target.local} if s.result is None else {s.target.local, s.result}
    return set(s.results) if isinstance(s, (ir.Call, ir.Boundary)) and s.contents.is_pure else None


def _with_used_tangents(s: ir.Boundary, needed: set[ir.Local]) -> ir.Boundary:
    """The application of a rule without the tangents that the rule does not use."""
    unused = {name for name, locals_ in s.inner.items() if needed.isdisjoint(locals_)}
    given = {name: group for name, group in s.given.items() if name not in unused}
    return replace(s, given=given, inner={name: locals_ for name, locals_ in s.inner.items() if name not in unused})
