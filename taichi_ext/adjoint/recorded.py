"""Costly values of inner loops that a run forward hands to its way back in memory, in place of computing them again.

In ``for i: for k in range(64): a += (1 - a) * (1 - ti.exp(-depth(i, k)))`` the way back needs each ``exp``, for which
it would compute all of ``depth`` again. So such a loop has a second form, in which it stores each of these values to an
array, and in which its adjoint loads them. There is one where

* every iteration computes the value once, whatever the numbers are: it stands under no condition, in loops that run to
  their end over ranges that are known. So entries that are loaded have been stored, and their number is known before;
* it costs more to compute than to load, with what it is computed from, and there are enough of them to make up for
  what the array costs in each launch;
* the adjoint does not go through neighbouring iterations together, whose entries are far apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import taichi_ext.program as ir
from taichi_ext.adjoint.costly import cost_of, is_costly_operation
from taichi_ext.adjoint.draws import number_of
from taichi_ext.analysis.loops import Extents, leaves, loop_bounds
from taichi_ext.program import Container, Load, Local, Op, Read, Value
from taichi_ext.program.build import Coefficient, add, element, multiply

LEAST_COST = 12  # of a value
LEAST_ENTRIES = 1 << 15
_MOST_ENTRIES = 1 << 31


def with_recorded(loop: ir.For, extents: Extents) -> tuple[ir.For, dict[Local, Load]] | None:
    """A parallel loop with names for costly values, and the entries that hold them; None where nothing is recorded."""
    bounds = loop_bounds(loop, extents)
    if bounds is None or leaves(loop.body):
        return None
    visit = _Visit(extents)
    made = visit.block(loop.body, number_of(loop, bounds), math.prod(end - first for first, end in bounds), False)
    return (replace(loop, body=made), visit.places) if visit.places else None


def with_stores(body: ir.Body, places: Mapping[Local, Load], arrays: Collection[Container]) -> ir.Body:
    """The same loop, which stores values to these arrays."""

    def stored(s: ir.Statement) -> ir.Body:
        place = places.get(s.local) if isinstance(s, ir.Declare) else None
        is_stored = place is not None and place.container in arrays
        return (s, ir.Assign(place, Read(s.local))) if is_stored else (s,)  # type: ignore[arg-type, attr-defined]

    return ir.mapped(body, stored)


@dataclass(eq=False)
class _Visit:
    """Names values; ``costs``: of locals, with what they are computed from."""

    extents: Extents
    places: dict[Local, Load] = field(default_factory=dict)
    costs: dict[Local, int] = field(default_factory=dict)

    def block(self, body: ir.Body, number: Coefficient, count: int, is_inner: bool) -> ir.Body:
        """A block that runs so often, each time with another number."""
        made: list[ir.Statement] = []
        for s in body:
            if isinstance(s, (ir.Declare, ir.Assign, ir.Update)):
                if is_inner and LEAST_ENTRIES <= count < _MOST_ENTRIES:
                    s = ir.with_values(s, lambda v: self._named(v, made, number, count))
                target = s.local if isinstance(s, ir.Declare) else s.target.memory  # type: ignore[attr-defined]
                if isinstance(target, Local):
                    before = self.costs.get(target, 0) if isinstance(s, ir.Update) else 0
                    self.costs[target] = before + sum(map(self._cost, ir.values_of(s)))
            elif isinstance(s, ir.For) and not leaves(s.body):
                bounds = loop_bounds(s, self.extents)
                size = 0 if bounds is None else math.prod(end - first for first, end in bounds)
                if bounds is not None and size:
                    place = add(multiply(number, size), number_of(s, bounds))
                    s = replace(s, body=self.block(s.body, place, count * size, True))
            made.append(s)
        return tuple(made)

    def _named(self, v: Value, made: list[ir.Statement], number: Coefficient, count: int) -> Value:
        if not isinstance(v, Op) or v.name in ir.LAZY:
            return v
        v = ir.with_children(v, lambda x: self._named(x, made, number, count))
        if not is_costly_operation(v) or not v.dtype.is_real or self._cost(v) < LEAST_COST:
            return v
        local = Local("kept", v.dtype, (), "temporary")
        made.append(ir.Declare(local, (v,), place=v.place))
        self.costs[local] = 1
        array = Container(f"recorded_{len(self.places)}", v.dtype, 1, is_argument=True, shape=(count,))
        self.places[local] = element(array, number)
        return Read(local)

    def _cost(self, v: Value) -> int:
        return cost_of(v) + sum(self.costs.get(local, 0) for local in v.contents.locals)
