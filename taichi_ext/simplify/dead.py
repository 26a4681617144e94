"""Statements that compute what nothing uses are dropped."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from taichi_ext.program import (
    Assign,
    Atomic,
    Body,
    Boundary,
    Call,
    Declare,
    For,
    If,
    Local,
    Read,
    Statement,
    Update,
    Value,
    mapped,
    statements,
    values_of,
)
from taichi_ext.simplify.usage import position_locals


def without_dead_code(body: Body) -> Body:
    """The block without locals that are never used, and without branches and loops that are empty."""
    needed = needed_locals(body)

    def change(s: Statement) -> Statement | Body:
        if _defined(s) is not None and not _defined(s) & needed:  # type: ignore[operator]
            return ()
        if isinstance(s, Boundary) and s.inner:
            return _with_used_tangents(s, needed)
        if isinstance(s, If) and not s.then and not s.orelse and s.contents.is_pure:
            return ()
        return () if isinstance(s, For) and not s.body else s

    return mapped(body, change)


def needed_locals(body: Body) -> set[Local]:
    """The locals on which anything depends that a program does."""
    sources: dict[Local, list[Value]] = defaultdict(list)
    pending: list[Value] = []
    for s in statements(body):
        defined = _defined(s)
        if defined is None:
            pending += values_of(s)
        else:
            values = values_of(_with_used_tangents(s, set())) if isinstance(s, Boundary) else values_of(s)
            values += [s.target] if isinstance(s, Atomic) else []  # its result is the value before
            for local in defined:
                sources[local] += values
            for name, locals_ in (s.inner if isinstance(s, Boundary) else {}).items():
                for local in locals_:
                    sources[local] += s.sources(name)  # type: ignore[union-attr]
    needed = position_locals(body)
    pending += [v for local in needed for v in sources.pop(local, ())]
    while pending:
        for local in pending.pop().contents.locals - needed:
            needed.add(local)
            pending += sources.pop(local, ())
    return needed


def _defined(s: Statement) -> set[Local] | None:
    """The locals that are all that a statement is for; None for any other statement."""
    if isinstance(s, Declare) and s.contents.is_pure:
        return {s.local}
    if isinstance(s, (Assign, Update)) and isinstance(s.target, Read) and s.value.contents.is_pure:
        return {s.target.local}
    if isinstance(s, Atomic) and isinstance(s.target, Read) and s.value.contents.is_pure:
        return {s.target.local} if s.result is None else {s.target.local, s.result}
    return set(s.results) if isinstance(s, (Call, Boundary)) and s.contents.is_pure else None


def _with_used_tangents(s: Boundary, needed: set[Local]) -> Boundary:
    """The application of a rule without the tangents that the rule does not use."""
    unused = {name for name, locals_ in s.inner.items() if needed.isdisjoint(locals_)}
    given = {name: group for name, group in s.given.items() if name not in unused}
    return replace(s, given=given, inner={name: locals_ for name, locals_ in s.inner.items() if name not in unused})
