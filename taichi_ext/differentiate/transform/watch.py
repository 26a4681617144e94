"""A differentiated program that counts, by place in the source, values that are not finite and indices out of range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import taichi_ext.program as ir
from taichi_ext.differentiate.facts.decisions import Differentiated
from taichi_ext.program.build import cast, literal

TANGENT_KINDS = frozenset(("partial", "weight", "tangent"))


Number = Callable[[ir.Place | None, bool], int | None]


def watched(d: Differentiated, counts: ir.Container, number: Number) -> ir.Program:
    """The program that counts values with tangents, and parts of tangents, that are not finite.

    It also counts accesses by an index that is out of range.

    Args:
        counts: a field of integers, by the number of a place.
        number: gives the number of a place in the source, for values or for indices; None for a place that is not
            counted.
    """
    active = {*d.active.locals, *d.active.containers, *(c for _, c in d.shadows)}

    def change(s: ir.Statement) -> ir.Statement | ir.Body:
        if isinstance(s, ir.Declare) and s.local.kind == "inside":
            at, is_outside = number(s.place, True), ir.Op("logical_not", (ir.Read(s.local),), ir.U1)
            return s if at is None else (s, _count(is_outside, counts, at, s.place))
        values = [v for v in _watched_values(s, active) if v.dtype.is_real and not isinstance(v, ir.Const)]
        at = number(s.place, False) if values else None
        if at is None:
            return s
        known = {v: ir.Local("watched", v.dtype, (), "kept") for v in values}
        made: list[ir.Statement] = []
        for v, local in known.items():
            made += ir.Declare(local, (v,), place=s.place), _count(_is_not_finite(ir.Read(local)), counts, at, s.place)
        now: dict[ir.Value, ir.Value] = {v: ir.Read(local, place=v.place) for v, local in known.items()}
        return (*made, ir.with_values(s, lambda v: now.get(v, v)))

    body = ir.mapped(d.program.body, change)
    return replace(d.program, body=body, containers=(*d.program.containers, counts))


def _watched_values(s: ir.Statement, active: set[ir.Local | ir.Container]) -> tuple[ir.Value, ...]:
    """The value that a statement stores, if it carries a tangent or is part of one."""
    if isinstance(s, ir.Declare):
        return s.values if s.local in active or s.local.kind in TANGENT_KINDS else ()
    if isinstance(s, ir.Return):
        return tuple(e for group in s.values for e in ir.entries(group))
    if isinstance(s, (ir.Assign, ir.Update)):
        kind = s.target.local.kind if isinstance(s.target, ir.Read) else ""
        return (s.value,) if s.target.memory in active or kind in TANGENT_KINDS else ()
    return ()


def _count(condition: ir.Value, counts: ir.Container, number: int, place: ir.Place | None) -> ir.If:
    """Count how often a condition holds."""
    entry = ir.Load(counts, (literal(number, ir.I32),))
    return ir.If(condition, (ir.Update(entry, "add", literal(1, ir.I32), place=place),), place=place)


def _is_not_finite(x: ir.Value) -> ir.Value:
    """Whether a value is not finite, by its bits: with Taichi's fast_math ``x != x`` may be false."""
    kind, first, mask = (ir.I64, 52, 0x7FF) if x.dtype == ir.F64 else (ir.I32, 23, 0xFF)
    bits = ir.Op("bit_cast", (x if x.dtype == ir.F64 else cast(x, ir.F32),), kind)
    exponent = ir.Op("bit_and", (ir.Op("shift_right", (bits, literal(first, kind)), kind), literal(mask, kind)), kind)
    return ir.Op("eq", (exponent, literal(mask, kind)), ir.U1)
