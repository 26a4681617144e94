"""Random numbers, and other results that a second run would not give: they are recorded as an iteration runs forward.

Its adjoint reads them again. Calls that append to lists, or ask for their length, have such results, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import taichi_ext.program as ir
from taichi_ext.adjoint.normal import running_number
from taichi_ext.adjoint.tapes import converted
from taichi_ext.analysis.draws import is_draw
from taichi_ext.analysis.loops import trips
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import I32, Container, Local, Read, Value
from taichi_ext.program.build import Coefficient, add, cast, element, literal, multiply, operation

Bounds = tuple[tuple[int, int], ...]
_UNKNOWN = (
    "What is drawn or appended here is recorded for the adjoint, and how often the loop runs is not known before. Take "
    "a for loop over as many iterations as there may be, with a break, or draw numbers into a field before the loop."
)


def recorded_draws(
    loop: ir.For | None, body: ir.Body, bounds: Bounds | None, reserve: Callable[[ir.Type, int], tuple[Container, int]]
) -> tuple[ir.Body, ir.Body] | None:
    """The body of a stage that records its draws, and that which reads them; None where nothing is drawn.

    Args:
        loop: the parallel loop of the stage; None for statements of one thread.
        body: in normal form.
        bounds: the ranges of its variables.
        reserve: room for some numbers of a type: an array, and the first of its entries.

    Raises:
        UnsupportedError: the number of draws is not known before the kernel runs.
    """
    counts = _counts(body)
    if not counts:
        return None
    if loop is not None and bounds is None:
        raise UnsupportedError(f"{ir.cited(loop.place)}{_UNKNOWN}")
    number = literal(0, I32) if loop is None or bounds is None else number_of(loop, bounds)
    iterations = math.prod(b - a for a, b in bounds or ())
    recording, reading = body, body
    for dtype, most in sorted(counts.items(), key=lambda item: item[0].name):
        drawn = Local("drawn", I32, (), "user")
        array, start = reserve(dtype, most * iterations)
        log = _Log(dtype, array, add(multiply(number, most), start), drawn)
        begin = ir.Declare(drawn, (literal(0, I32),))
        recording = (begin, *ir.mapped(recording, log.recorded))
        reading = (begin, *ir.mapped(reading, log.read))
    return recording, reading


@dataclass(frozen=True)
class _Log:
    """Where results of one type are recorded: an array, the first entry of an iteration, how many it has drawn."""

    dtype: ir.Type
    array: Container
    first: Coefficient
    drawn: Local

    def _places(self, local: Local) -> list[ir.Load]:
        """Where the next numbers are, as many as a local has."""
        end = add(self.first, Read(self.drawn))
        return [element(self.array, add(end, n)) for n in range(math.prod(local.shape))]

    def _count(self, local: Local) -> ir.Assign:
        return ir.Assign(Read(self.drawn), operation("add", Read(self.drawn), math.prod(local.shape)))

    def recorded(self, s: ir.Statement) -> ir.Body:
        """A statement that also records its results."""
        made: list[ir.Statement] = [s]
        for local in _results(s):
            if local.dtype == self.dtype:
                entries = (Read(local, index) for index in product(*map(range, local.shape)))
                both = zip(self._places(local), entries, strict=True)
                made += [*(ir.Assign(to, cast(x, to.dtype)) for to, x in both), self._count(local)]
        return tuple(made)

    def read(self, s: ir.Statement) -> ir.Body:
        """A statement whose results are read."""
        own = [local for local in _results(s) if local.dtype == self.dtype]
        others = tuple([local for local in _results(s) if local.dtype != self.dtype])
        made: list[ir.Statement] = [replace(s, results=others)] if isinstance(s, ir.Effect) else [s] * (not own)
        for local in own:
            values = tuple([converted(place, self.dtype) for place in self._places(local)])
            made += [ir.Declare(local, values, place=s.place), self._count(local)]
        return tuple(made)


def _results(s: ir.Statement) -> tuple[Local, ...]:
    return ir.declared(s) if isinstance(s, ir.Effect) or is_draw(s) else ()


def _counts(body: ir.Body) -> Counter[ir.Type]:
    """The most numbers of each type that a block draws."""
    counts: Counter[ir.Type] = Counter()
    for s, times in ir.inherited(body, 1, _repeated):
        for local in _results(s):
            if times is None:
                raise UnsupportedError(f"{ir.cited(s.place)}{_UNKNOWN}")
            counts[local.dtype] += times * math.prod(local.shape)
    return +counts


def _repeated(s: ir.Statement, around: int | None) -> int | None:
    most = trips(s)
    return None if around is None or most is None else around * most


def number_of(loop: ir.For, bounds: Bounds) -> Value:
    """The number of an iteration of a parallel loop."""
    variables: list[Value] = [
        Read(v, (n,) if v.shape else ()) for v in loop.variables for n in range(math.prod(v.shape))
    ]
    return running_number(variables, [end - first for first, end in bounds], [first for first, _ in bounds])
