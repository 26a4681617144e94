"""Positions of pixels that are given by the indices of their loop, ``at=(i, j)``: real variables take their place."""

from __future__ import annotations

from dataclasses import replace

from taichi_ext.program import (
    Boundary,
    Declare,
    For,
    Local,
    Op,
    Program,
    Read,
    Statement,
    Value,
    entries,
    mapped,
    rebuilt,
    regrouped,
    statements,
    with_values,
)

_Index = tuple[Local, tuple[int | Value, ...]]


def with_real_positions(program: Program) -> Program:
    """The program in which each such index is a real number too, for real operations: ``i - x``, ``float(i)``."""
    variables = {v for s in statements(program.body) if isinstance(s, For) for v in s.variables}
    given = (e for s in statements(program.body) if isinstance(s, Boundary) for e in entries_of_position(s))
    used = [e for e in given if isinstance(e, Read) and e.local in variables]
    if not used:
        return program
    reals: dict[_Index, Local] = {}
    for read in used:
        reals.setdefault((read.local, read.index), Local(f"{read.local.name}_real", program.default_real))

    def real(value: Value) -> Value:
        """The real number of an index; anything else as it is."""
        local = reals.get((value.local, value.index)) if isinstance(value, Read) else None
        return value if local is None else Read(local, place=value.place)

    def operand(value: Value) -> Value:
        if not isinstance(value, Op) or not value.dtype.is_real:
            return value
        new = tuple(map(real, value.args))
        if all(a is b for a, b in zip(new, value.args, strict=True)):
            return value
        if value.name == "cast" and new[0].dtype == value.dtype:
            return new[0]
        return Op(value.name, new, value.dtype, place=value.place)

    def change(s: Statement) -> Statement:
        s = with_values(s, lambda value: rebuilt(value, operand))
        if isinstance(s, Boundary) and "at" in s.given:
            at = s.given["at"]
            s = replace(s, given={**s.given, "at": regrouped(at, tuple(map(real, entries(at))))})
        if isinstance(s, For):
            own = [(key, local) for key, local in reals.items() if key[0] in s.variables]
            made = (Declare(local, (Op("cast", (Read(*key),), local.dtype),), place=s.place) for key, local in own)
            s = replace(s, body=(*made, *s.body))
        return s

    return replace(program, body=mapped(program.body, change))


def entries_of_position(s: Boundary) -> tuple[Value, ...]:
    """The numbers of ``at=``."""
    return entries(s.given["at"]) if "at" in s.given else ()
