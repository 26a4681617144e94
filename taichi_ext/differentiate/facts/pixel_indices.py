"""Replace positions of pixels given by loop indices, ``at=(i, j)``, by real variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import taichi_ext.program as ir

Index = tuple[ir.Local, tuple[int | ir.Value, ...]]


def with_real_positions(program: ir.Program) -> ir.Program:
    """The program in which each such index is a real number too, for real operations: ``i - x``, ``float(i)``."""
    variables = {v for s in ir.statements(program.body) if isinstance(s, ir.For) for v in s.variables}
    boundaries = (s for s in ir.statements(program.body) if isinstance(s, ir.Boundary) and "at" in s.given)
    given = (e for s in boundaries for e in ir.entries(s.given["at"]))
    used = [e for e in given if isinstance(e, ir.Read) and e.local in variables]
    if not used:
        return program
    reals: dict[Index, ir.Read] = {}
    for read in used:
        real = ir.Local(f"{read.local.name}_real", program.default_real)
        reals.setdefault((read.local, read.index), ir.Read(real))

    def change(s: ir.Statement) -> ir.Statement:
        s = ir.with_nodes(s, lambda node: with_real_operands(node, reals))
        if isinstance(s, ir.Boundary) and "at" in s.given:
            at = ir.regrouped(s.given["at"], tuple(_real(e, reals) for e in ir.entries(s.given["at"])))
            return replace(s, given={**s.given, "at": at})
        if not isinstance(s, ir.For):
            return s
        own = [(key, real.local) for key, real in reals.items() if key[0] in s.variables]
        made = (ir.Declare(local, (ir.Op("cast", (ir.Read(*key),), local.dtype),), place=s.place) for key, local in own)
        return replace(s, body=(*made, *s.body))

    return replace(program, body=ir.mapped(program.body, change))


def with_real_operands(value: ir.Value, reals: Mapping[Index, ir.Value]) -> ir.Value:
    """A real operation on real numbers in the place of some indices; other values unchanged."""
    if not isinstance(value, ir.Op) or not value.dtype.is_real:
        return value
    args = tuple([_real(a, reals) for a in value.args])
    if args == value.args:  # values are equal only to themselves
        return value
    if value.name == "cast" and args[0].dtype == value.dtype:
        return args[0]
    return ir.Op(value.name, args, value.dtype, place=value.place)


def _real(value: ir.Value, reals: Mapping[Index, ir.Value]) -> ir.Value:
    known = reals.get((value.local, value.index)) if isinstance(value, ir.Read) else None
    return value if known is None else replace(known, place=value.place) if isinstance(known, ir.Read) else known
