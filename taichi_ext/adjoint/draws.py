"""Random numbers: the draws of each iteration are recorded as it runs forward, and read again by its adjoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import taichi_ext.program as ir
from taichi_ext.analysis.draws import is_draw
from taichi_ext.differentiate.forms.build import Coefficient, add, element, literal, multiply, operation, subtract
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import I32, Const, Container, Local, Read, Value

Bounds = tuple[tuple[int, int], ...]


def recorded_draws(
    loop: ir.For | None, body: ir.Body, bounds: Bounds | None, reserve: Callable[[ir.Type, int], Container]
) -> tuple[ir.Body, ir.Body] | None:
    """The body of a stage that records its draws, and that which reads them; None where nothing is drawn.

    Args:
        loop: the parallel loop of the stage; None for statements of one thread.
        body: in normal form.
        bounds: the ranges of its variables.
        reserve: gives an array of this type with room for this many numbers.

    Raises:
        UnsupportedError: the number of draws is not known before the kernel runs.
    """
    counts = _counts(body, 1)
    if not counts:
        return None
    if loop is not None and bounds is None:
        raise UnsupportedError(f"{ir.cited(loop.place)}The number of random numbers that this loop draws is not known.")
    number = literal(0, I32) if loop is None or bounds is None else _number(loop, bounds)
    iterations = math.prod(b - a for a, b in bounds or ())
    recording, reading = body, body
    for dtype, most in sorted(counts.items(), key=lambda item: item[0].name):
        array, drawn = reserve(dtype, most * iterations), Local("drawn", I32, (), "user")
        place = element(array, add(multiply(number, most), Read(drawn)))
        count = ir.Assign(Read(drawn), operation("add", Read(drawn), 1))

        def recorded(
            s: ir.Statement, dtype: ir.Type = dtype, place: ir.Load = place, count: ir.Assign = count
        ) -> ir.Body:
            is_own = isinstance(s, ir.Declare) and is_draw(s) and s.local.dtype == dtype
            return (s, ir.Assign(place, Read(s.local)), count) if is_own else (s,)  # type: ignore[attr-defined]

        def read(s: ir.Statement, dtype: ir.Type = dtype, place: ir.Load = place, count: ir.Assign = count) -> ir.Body:
            is_own = isinstance(s, ir.Declare) and is_draw(s) and s.local.dtype == dtype
            return (replace(s, values=(place,)), count) if is_own else (s,)  # type: ignore[call-arg]

        begin = ir.Declare(drawn, (literal(0, I32),))
        recording = (begin, *ir.mapped(recording, recorded))
        reading = (begin, *ir.mapped(reading, read))
    return recording, reading


def _counts(body: ir.Body, times: int) -> Counter[ir.Type]:
    """The most numbers of each type that a block draws."""
    found: Counter[ir.Type] = Counter()
    for s in body:
        if isinstance(s, ir.Declare) and is_draw(s):
            found[s.local.dtype] += times
        for inner in ir.bodies(s):
            trips = _trips(s)
            counts = _counts(inner, times * (1 if trips is None else trips))
            if counts and trips is None:
                raise UnsupportedError(
                    f"{ir.cited(s.place)}The number of random numbers that this loop draws is not known."
                )
            found += counts
    return found


def _trips(s: ir.Statement) -> int | None:
    """The most iterations of a statement; None if they are not known."""
    if isinstance(s, ir.For) and all(isinstance(x, Const) for x in s.domain):
        return max(0, s.domain[1].value - s.domain[0].value)
    return 1 if isinstance(s, ir.If) else None


def _number(loop: ir.For, bounds: Bounds) -> Value:
    """The number of an iteration of a parallel loop."""
    variables: list[Value] = [
        Read(v, (n,) if v.shape else ()) for v in loop.variables for n in range(math.prod(v.shape))
    ]
    found: Coefficient = 0
    for v, (first, end) in zip(variables, bounds, strict=True):
        found = add(multiply(found, end - first), subtract(v, first))
    return found if isinstance(found, Value) else literal(found, I32)
