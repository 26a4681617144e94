"""How the iterations of a parallel loop share the adjoints that they add to.

* An entry that one iteration owns needs no atomics, nor does any entry in a loop of one thread.
* Where a loop adds often to few entries, each thread has sums of its own.
* Where all entries lie within a fixed distance of a loop variable (stencils), the loop runs in *two colours*: the even
  pieces of the range of that variable first, then the odd ones. No two pieces of a colour touch the same entry. A small
  loop is serial: to wake threads twice takes longer.
* Otherwise adjoints are added to atomically.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import taichi_ext.program as ir
from taichi_ext.adjoint.stages import Stage
from taichi_ext.analysis.affine import Atom, IntegerForms
from taichi_ext.analysis.changes import written_containers
from taichi_ext.analysis.loops import loop_bounds, trips
from taichi_ext.program import Container, Load, Local, Value
from taichi_ext.schedule.machine import Machine
from taichi_ext.simplify.usage import accesses, all_values

MOST_OWN = 1 << 24  # numbers in the sums of all threads
LITTLE_WORK = 1 << 16  # loads and operations of a loop that one thread does before two runs of all threads are over
_UNKNOWN_TRIPS = 16

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Contention:
    """How each container's adjoints are added to.

    Attributes:
        free: containers whose entries one iteration owns.
        own: containers of which each thread has sums of its own.
        colours: the number of the loop variable whose range is coloured, and the reach around it.
        is_serial: whether one thread runs the stage.
    """

    free: frozenset[Container]
    own: frozenset[Container]
    colours: tuple[int, int] | None
    is_serial: bool

    def is_atomic(self, c: Container) -> bool:
        """Whether other threads may add to the same entries at the same time."""
        return not (self.is_serial or self.colours is not None or c in self.free or c in self.own)


def bounds_of(stage: Stage, machine: Machine) -> Bounds | None:
    """The ranges of the variables of a parallel loop, where they are known and scalars."""
    if stage.loop is None or any(v.shape for v in stage.loop.variables):
        return None
    bounds = loop_bounds(stage.loop, machine.extents)
    return bounds if bounds is not None and len(bounds) == len(stage.loop.variables) else None


def contention(stage: Stage, sizes: dict[Container, int], machine: Machine) -> Contention:
    """How the adjoints of containers, of these sizes, are added to."""
    if stage.loop is None or machine.threads == 1:
        return Contention(frozenset(), frozenset(), None, True)
    touched = _touched(stage)
    free = _owned(stage, touched)
    stored = written_containers(stage.body, with_effects=False)
    own = {c for c, n in sizes.items() if c not in free | stored and _is_often(stage, c, n * machine.threads, machine)}
    shared = {c for c in sizes if c not in free and c not in own and c in touched}
    colours = _colours(stage, shared, touched, machine) if shared else None
    if colours is not None and not own and _is_little(stage, machine):
        return Contention(frozenset(), frozenset(), None, True)
    return Contention(frozenset(free), frozenset(own), colours, False)


def _touched(stage: Stage) -> dict[Container, list[Load]]:
    """The entries that a stage reads and writes."""
    result: dict[Container, list[Load]] = {}
    for s in ir.statements(stage.body):
        for t in accesses(s):
            result.setdefault(t.container, []).append(t)
    return result


class _Indices:
    """Indices in terms of the variables of a loop."""

    def __init__(self, stage: Stage) -> None:
        assert stage.loop is not None
        self.variables = stage.loop.variables
        self._forms = IntegerForms((replace(stage.loop, body=stage.body),))

    def shift(self, i: Value) -> tuple[Atom, int] | None:
        """The variable and the constant whose sum an index is; None if it is not one."""
        form = self._forms.form(i)
        if form is None or [(atom in self.variables, factor) for atom, factor in form.terms] != [(True, 1)]:
            return None
        return form.terms[0][0], form.constant


def _owned(stage: Stage, touched: dict[Container, list[Load]]) -> set[Container]:
    """The containers of which an iteration touches entries that no other one touches."""
    indices, result = _Indices(stage), set()
    for c, entries in touched.items():
        forms = {tuple(indices.shift(i) for i in t.indices) for t in entries}
        if len(forms) == 1 and {f[0] for f in next(iter(forms)) if f is not None} >= set(indices.variables):
            result.add(c)
    return result


def _is_often(stage: Stage, c: Container, size: int, machine: Machine) -> bool:
    """Whether a loop adds so often that separate sums for each thread are cleared and added up in less time."""
    if size > MOST_OWN:
        return False
    bounds = bounds_of(stage, machine)
    return bounds is None or _additions(stage.body, c, math.prod(b - a for a, b in bounds)) >= 2 * size


def _is_little(stage: Stage, machine: Machine) -> bool:
    """Whether a loop without loops in it is over soon."""
    bounds, inside = bounds_of(stage, machine), ir.statements(stage.body)
    if bounds is None or any(isinstance(s, (ir.For, ir.While)) for s in inside):
        return False
    nodes = (v for s in inside for v in all_values(s))
    counted = sum(isinstance(v, (ir.Op, Load)) and v.dtype.is_real for v in nodes)
    return counted * math.prod(b - a for a, b in bounds) <= LITTLE_WORK


def _additions(body: ir.Body, c: Container, times: int) -> int:
    """How often the adjoint of a block adds to the adjoints of a container."""
    runs = ir.inherited(body, times, lambda s, n: n * (_UNKNOWN_TRIPS if (known := trips(s)) is None else known))
    nodes = ((x, n) for s, n in runs for v in ir.values_of(s) for x in ir.walk(v))
    return sum(n for x, n in nodes if isinstance(x, Load) and x.container is c)


def _colours(
    stage: Stage, shared: Collection[Container], touched: dict[Container, list[Load]], machine: Machine
) -> tuple[int, int] | None:
    """A variable of the loop, and how far from it iterations touch entries, if they do so along one axis each."""
    indices = _Indices(stage)
    if bounds_of(stage, machine) is None:
        return None
    for k, variable in enumerate(indices.variables):
        reaches = [_reach(indices, variable, c, touched[c]) for c in shared]
        known = [r for r in reaches if r is not None]
        if len(known) == len(reaches):
            return k, max(known)
    return None


def _reach(indices: _Indices, variable: Local, c: Container, entries: list[Load]) -> int | None:
    """The greatest distance from a variable at which entries are touched, along the best axis; None: any."""
    axes = []
    for axis in range(c.ndim):
        shifts = [indices.shift(t.indices[axis]) for t in entries]
        if all(s is not None and s[0] is variable for s in shifts):
            axes.append(max(abs(s[1]) for s in shifts if s is not None))
    return min(axes, default=None)
