"""Slots of a sparse Jacobian in loops whose number of iterations is only known at run time.

A *counter* counts the runs of a block in such a loop, separately for each iteration of the outer loops with known
numbers of iterations. The kernel takes the starts of the slots of each of these iterations, and returns the number of
slots it needed. If there is no room for a slot yet, it is written to a place that is never read; then the host makes
room and launches the kernel again. From the next launch on, the same numbers fit at once.

A parallel loop over ranges that are only known at run time is *open*: the kernel takes the number of iterations that
there is room for, and returns the actual number.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Literal

from taichi_ext.analysis.affine import atom_value, source_of
from taichi_ext.analysis.loops import Loop, ranges
from taichi_ext.differentiate.facts.facts import PassState
from taichi_ext.differentiate.forms.entry_sites import Axis, Site
from taichi_ext.differentiate.forms.forms import Scope
from taichi_ext.program import I32, Container, For, Read, Statement, Value, While, values_of
from taichi_ext.program.build import Coefficient, add, cast, element, literal, multiply, operation, select
from taichi_ext.program.keys import SiteArray


@dataclass(frozen=True)
class Around:
    """The loops around a place: those with known numbers of iterations, and the first one that has a counter."""

    axes: tuple[Axis, ...]
    opened: int | None  # the number of the open loop, if the first of them is one
    counted: Loop | None


@dataclass
class _Open:
    """The current open loop: the number of iterations with room, and the start of each variable."""

    number: int
    room: Value
    firsts: list[Value]
    lengths: list[Value]  # of all variables but the first


@dataclass(frozen=True)
class Counter:
    """A counter of a loop: its number, the local with the next slot, the end of the slots, the last slot of all."""

    number: int
    following: Read
    end: Value
    last: Value


@dataclass
class _Counted:
    """The current loop with counters."""

    counters: list[Counter] = field(default_factory=list)
    slots: dict[Scope, tuple[int, Value]] = field(default_factory=dict)  # of this run, with their counters


class Counts:
    """The counters of one walk."""

    def __init__(self, walk: PassState) -> None:
        self.walk = walk
        self.builder = walk.builder
        self.planned = walk.plan.columns.counters
        self._open: dict[Statement, _Open] = {}
        self._counted: dict[Statement, _Counted] = {}
        self._count = 0

    # --- loops

    def before(self, s: For | While) -> None:
        """Emit the statements before a loop."""
        if not self.planned.get(s):
            return
        loop = self.walk.facts.loops[s]
        if loop.is_parallel:
            self._begin_open(s)
            return
        around = self._here()
        counted = self._counted[s] = _Counted()
        for _ in range(self.planned[s]):
            number = self._next()
            offsets = self._array(number, "offsets")
            place = self.builder.keep(self.number(around), "place")
            slot = self.builder.declare("slot", element(offsets, place))
            end = self.builder.keep(element(offsets, add(place, 1)), "end")
            last = self.builder.keep(element(offsets, self._length(around)), "last")
            counted.counters.append(Counter(number, slot, end, last))

    def after(self, s: For | While) -> None:
        """Emit the statements after a loop."""
        counted = self._counted.get(s)
        if counted is None:
            return
        place = self.builder.keep(self.number(self._here()), "place")
        for counter in counted.counters:
            self.builder.assign(element(self._array(counter.number, "counts"), place), counter.following)

    def forget_unused(self, sites: list[Site]) -> None:
        """At the end of a walk, drop the counters of slots that only earlier walks wrote."""
        used = {site.around.opened for site in sites} | {site.around.counter for site in sites}
        for s, planned in list(self.planned.items()):
            counters = self._counted[s].counters if s in self._counted else ()
            numbers = [self._open[s].number] if s in self._open else [counter.number for counter in counters]
            self.planned[s] = min(planned, len(used.intersection(numbers)))

    def _begin_open(self, s: For | While) -> None:
        assert isinstance(s, For)
        primal = self.walk.expressions.primal
        bounds = [[cast(primal(b) if isinstance(b, Value) else b, I32) for b in pair] for pair in ranges(s)]
        number = self._next()
        array = self._array(number, "lengths")
        firsts = [self.builder.keep(first, "first") for first, _ in bounds]
        lengths = [operation("max", 0, operation("sub", b, a)) for (_, b), a in zip(bounds, firsts, strict=True)]
        others = [self.builder.keep(length, "length") for length in lengths[1:]]
        self._open[s] = _Open(number, self.builder.keep(element(array, 0), "room"), firsts, others)
        self.builder.assign(element(array, 1), functools.reduce(multiply, others, lengths[0]))

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _array(self, number: int, what: Literal["lengths", "offsets", "counts"]) -> Container:
        return self.walk.arguments.find(SiteArray(number, what), f"{what}_{number}", I32)

    # --- places

    def around(self, loops: tuple[Loop, ...]) -> Around | None:
        """Facts about some loops; None if one of them cannot be counted."""
        axes: list[Axis] = []
        opened = None
        for loop in loops:
            bounds = self._bounds(loop)
            if bounds is not None:
                axes += [Axis(v, first, end) for v, (first, end) in zip(loop.atoms, bounds, strict=True)]
            elif not loop.is_parallel:
                return Around(tuple(axes), opened, loop)
            elif self._is_range(loop) and loop.statement in self._open:
                opened = self._open[loop.statement].number
            elif self._is_range(loop):
                self._decide(loop.statement, 1)
                return Around((), None, None)
            else:
                return None
        return Around(tuple(axes), opened, None)

    def _here(self) -> Around:
        """The loops around a loop with counters; their numbers of iterations are known."""
        around = self.around(self.walk.cursor.loops)
        assert around is not None
        return around

    def _bounds(self, loop: Loop) -> tuple[tuple[int, int], ...] | None:
        """The domain of a loop, or a domain that contains it."""
        changes = any(source_of(a) in self.walk.facts.changed for a in loop.atoms)
        if not loop.atoms or changes or loop.bounds is not None:
            return None if changes or not loop.atoms else loop.bounds
        s = loop.statement
        extent = self.walk.facts.seeds.extents.get(s.domain[0]) if s.kind in ("field", "grouped") else None  # type: ignore[union-attr]
        return None if extent is None else extent.bounds

    def _is_range(self, loop: Loop) -> bool:
        s = loop.statement
        if not isinstance(s, For) or any(v in self.walk.facts.changed for v in s.variables):
            return False
        if s.kind == "range":
            return len(s.domain) <= 2
        # Taichi reads the ends of ti.ndrange again in each iteration
        ends = (value.contents for value in values_of(s))
        read = {memory for end in ends for memory in (*end.locals, *end.containers)}
        return s.kind in ("ndrange", "grouped ndrange") and not read & s.written

    def _decide(self, s: Statement, count: int) -> None:
        if count > self.planned.get(s, 0):
            self.planned[s] = count

    def is_partial(self, loops: tuple[Loop, ...]) -> bool:
        """Whether a loop may skip some of the iterations with room."""
        return any(loop.bounds is None and self._bounds(loop) is not None for loop in loops)

    def number(self, around: Around) -> Coefficient:
        """The number of the iteration, among those of the loops with known numbers of iterations."""
        number: Coefficient = 0
        opened = self._opened(around)
        if opened is not None:
            indices = [cast(atom_value(a), I32) for a in self.walk.cursor.loops[0].atoms]
            for index, first, length in zip(indices, opened.firsts, [1, *opened.lengths], strict=True):
                number = add(multiply(number, length), operation("sub", index, first))
        for axis in around.axes:
            index = cast(atom_value(axis.variable), I32)
            number = add(multiply(number, axis.length), add(index, -axis.first))
        if opened is None:
            return number
        return operation("min", number, self._length(around))

    def _opened(self, around: Around) -> _Open | None:
        """The open loop around a place."""
        return next((o for o in self._open.values() if o.number == around.opened), None)

    def _length(self, around: Around) -> Coefficient:
        """The number of such iterations, or of those with room."""
        length: Coefficient = math.prod(axis.length for axis in around.axes)
        opened = self._opened(around)
        return length if opened is None else multiply(opened.room, length)

    def slot(self, around: Around) -> tuple[int, Value, bool]:
        """The counter of this block, the slot of its current run, and whether an earlier statement has the same one."""
        assert around.counted is not None
        counted = self._counted.setdefault(around.counted.statement, _Counted())
        block = self.walk.cursor.block
        if block in counted.slots:
            return *counted.slots[block], True
        n = len(counted.slots)
        self._decide(around.counted.statement, n + 1)
        if n >= len(counted.counters):  # the next walk has one
            counted.slots[block] = (-1, literal(0, I32))
            return -1, literal(0, I32), False
        counter = counted.counters[n]
        following = counter.following
        slot = self.builder.keep(select(operation("lt", following, counter.end), following, counter.last), "slot")
        self.builder.assign(following, add(following, 1))
        counted.slots[block] = (counter.number, slot)
        return counter.number, slot, False
