"""Random numbers, and other results that a second run would not give: they are recorded as an iteration runs forward.

Its adjoint reads them again. Calls that append to lists, or ask for their length, have such results, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import taichi_ext.program as ir
from taichi_ext.adjoint.normal import running_number
from taichi_ext.adjoint.tapes import converted
from taichi_ext.analysis.draws import is_draw
from taichi_ext.analysis.loops import trips
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import I32, Container, Local, Read, Value
from taichi_ext.program.build import add, cast, element, literal, multiply, operation

Bounds = tuple[tuple[int, int], ...]


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
        why = "Numbers drawn here are recorded for the adjoint, and how many they are is not known."
        raise UnsupportedError(ir.cited(loop.place) + why)
    number = literal(0, I32) if loop is None or bounds is None else number_of(loop, bounds)
    iterations = math.prod(b - a for a, b in bounds or ())
    recording, reading = body, body
    for dtype, most in sorted(counts.items(), key=lambda item: item[0].name):
        drawn = Local("drawn", I32, (), "user")
        array, start = reserve(dtype, most * iterations)
        place = element(array, add(add(multiply(number, most), Read(drawn)), start))
        count = ir.Assign(Read(drawn), operation("add", Read(drawn), 1))
        begin = ir.Declare(drawn, (literal(0, I32),))
        recording = (begin, *ir.mapped(recording, partial(_recorded, dtype, place, count)))
        reading = (begin, *ir.mapped(reading, partial(_read, dtype, place, count)))
    return recording, reading


def _recorded(dtype: ir.Type, place: ir.Load, count: ir.Assign, s: ir.Statement) -> ir.Body:
    """A statement that also records its results of one type."""
    stores = [
        (ir.Assign(place, cast(Read(local), place.dtype)), count) for local in _results(s) if local.dtype == dtype
    ]
    return (s, *(x for pair in stores for x in pair))


def _read(dtype: ir.Type, place: ir.Load, count: ir.Assign, s: ir.Statement) -> ir.Body:
    """A statement whose results of one type are read."""
    own = [local for local in _results(s) if local.dtype == dtype]
    reads = [(ir.Declare(local, (converted(place, dtype),), place=s.place), count) for local in own]
    others = tuple([local for local in _results(s) if local.dtype != dtype])
    rest = (replace(s, results=others),) if isinstance(s, ir.Effect) else (s,) if others or not own else ()
    return (*rest, *(x for pair in reads for x in pair))


def _results(s: ir.Statement) -> tuple[Local, ...]:
    return ir.declared(s) if isinstance(s, ir.Effect) or is_draw(s) else ()


def _counts(body: ir.Body) -> Counter[ir.Type]:
    """The most numbers of each type that a block draws."""
    found: Counter[ir.Type] = Counter()
    for s, times in ir.inherited(body, 1, _repeated):
        for local in _results(s):
            if local.shape:
                raise UnsupportedError(f"{ir.cited(s.place)}The adjoint of this call is not known.")
            if times is None:
                why = "This is recorded for the adjoint, and how often the loop around it runs is not known."
                raise UnsupportedError(ir.cited(s.place) + why)
            found[local.dtype] += times
    return +found


def _repeated(s: ir.Statement, around: int | None) -> int | None:
    most = trips(s)
    return None if around is None or most is None else around * most


def number_of(loop: ir.For, bounds: Bounds) -> Value:
    """The number of an iteration of a parallel loop."""
    variables: list[Value] = [
        Read(v, (n,) if v.shape else ()) for v in loop.variables for n in range(math.prod(v.shape))
    ]
    return running_number(variables, [end - first for first, end in bounds], [first for first, _ in bounds])
