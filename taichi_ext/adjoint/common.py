"""Costly values that a block computes more than once have one name, and so one place for their adjoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

import taichi_ext.program as ir
from taichi_ext.adjoint.costly import is_costly
from taichi_ext.analysis.same_values import ValueNumbers
from taichi_ext.program import Local, Op, Read, Value
from taichi_ext.simplify.usage import assigned_locals

_LAZY = ("ifte", "logical_and", "logical_or")


def with_common_values(body: ir.Body) -> ir.Body:
    """A block in normal form, in which common values are declared before they are first used."""
    return _Common(frozenset(assigned_locals(body))).block(body, {})


class _Common:
    """``assigned`` are the locals that change."""

    def __init__(self, assigned: Set[Local]) -> None:
        self._assigned, self._numbers = assigned, ValueNumbers()

    def block(self, body: ir.Body, names: dict[int, Read]) -> ir.Body:
        """A block; ``names`` are the values that have a name where it stands."""
        values = (v for s in ir.statements(body) for v in ir.values_of(s))
        counts = Counter(self._numbers.of(n) for v in values for n in ir.walk(v) if isinstance(n, Op))
        known, made = dict(names), list[ir.Statement]()

        def change(v: Value) -> Value:
            if not isinstance(v, Op) or v.name in _LAZY:
                return v
            number = self._numbers.of(v)
            if number not in known:
                new = ir.with_children(v, change)
                if counts[number] < 2 or not self._is_fixed(v):
                    return new
                local = Local("common", v.dtype, (), "temporary")
                made.append(ir.Declare(local, (new,), place=v.place))
                known[number] = Read(local)
            return known[number]

        for s in body:
            s = ir.with_values(s, change)
            made.append(ir.with_blocks(s, lambda block: self.block(block, known)))
        return tuple(made)

    def _is_fixed(self, v: Value) -> bool:
        """Whether a value is costly and the same wherever it is computed."""
        contents = v.contents
        is_same = contents.is_pure and not contents.containers and self._assigned.isdisjoint(contents.locals)
        return is_same and is_costly(v) and not any(isinstance(n, Read) and n.index for n in ir.walk(v))
