"""A differentiated program that counts, by place in the source, what is not finite, and indices that are outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from taichi_ext.differentiate.facts.decisions import Differentiated
from taichi_ext.differentiate.forms.build import cast, literal
from taichi_ext.program import (
    F32,
    F64,
    I32,
    I64,
    U1,
    Assign,
    Body,
    Const,
    Container,
    Declare,
    If,
    Load,
    Local,
    Op,
    Place,
    Program,
    Read,
    Return,
    Statement,
    Update,
    Value,
    entries,
    mapped,
)

TANGENT_KINDS = frozenset(("partial", "weight", "tangent"))


Number = Callable[[Place | None, bool], int | None]


def watched(d: Differentiated, counts: Container, number: Number) -> Program:
    """The program in which each value with a tangent, and each part of a tangent, that is not finite is counted.

    And each access by an index that is outside.

    Args:
        d: a differentiated program.
        counts: a field of integers, by the number of a place.
        number: gives the number of a place in the source, for what is not finite or, if asked, for indices; None for
            one that is not counted.
    """
    active = {*d.active.locals, *d.active.containers, *(c for _, c in d.shadows)}

    def change(s: Statement) -> Statement | Body:
        if isinstance(s, Declare) and s.local.kind == "inside":
            at = number(s.place, True)
            return s if at is None else (s, _count(Op("logical_not", (Read(s.local),), U1), counts, at, s.place))
        values = [v for v in _watched_values(s, active) if v.dtype.is_real and not isinstance(v, Const)]
        at = number(s.place, False) if values else None
        if at is None:
            return s
        known = {v: Local("watched", v.dtype, (), "kept") for v in values}
        counted = (c for v, local in known.items() for c in _counted(v, local, counts, at, s.place))
        return (*counted, _with_known(s, known))

    body = mapped(d.program.body, change)
    return replace(d.program, body=body, containers=(*d.program.containers, counts))


def _watched_values(s: Statement, active: set[Local | Container]) -> tuple[Value, ...]:
    """The value that a statement stores, where it carries a tangent or is part of one."""
    if isinstance(s, Declare):
        return s.values if s.local in active or s.local.kind in TANGENT_KINDS else ()
    if isinstance(s, Return):
        return tuple(e for group in s.values for e in entries(group))
    if isinstance(s, (Assign, Update)):
        place = s.target.local if isinstance(s.target, Read) else s.target.container
        kind = place.kind if isinstance(place, Local) else ""
        return (s.value,) if place in active or kind in TANGENT_KINDS else ()
    return ()


def _with_known(s: Statement, known: dict[Value, Local]) -> Statement:
    """The statement with values that have been computed."""
    now = {v: Read(local, place=v.place) for v, local in known.items()}
    if isinstance(s, Declare):
        return replace(s, values=tuple(now.get(v, v) for v in s.values))
    if isinstance(s, (Assign, Update)):
        return replace(s, value=now.get(s.value, s.value))
    return s


def _counted(value: Value, local: Local, counts: Container, number: int, place: Place | None) -> Body:
    """The value in a local, and a count where it is not finite."""
    return Declare(local, (value,), place=place), _count(_is_not_finite(Read(local)), counts, number, place)


def _count(condition: Value, counts: Container, number: int, place: Place | None) -> If:
    """Count how often a condition holds."""
    entry = Load(counts, (literal(number, I32),))
    return If(condition, (Update(entry, "add", literal(1, I32), place=place),), place=place)


def _is_not_finite(x: Value) -> Value:
    """By its bits, because Taichi's fast_math lets ``x != x`` be false."""
    kind, first, mask = (I64, 52, 0x7FF) if x.dtype == F64 else (I32, 23, 0xFF)
    bits = Op("bit_cast", (x if x.dtype == F64 else cast(x, F32),), kind)
    exponent = Op("bit_and", (Op("shift_right", (bits, literal(first, kind)), kind), literal(mask, kind)), kind)
    return Op("eq", (exponent, literal(mask, kind)), U1)
