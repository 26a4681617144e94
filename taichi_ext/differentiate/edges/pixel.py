"""How a side of a polygon crosses a pixel."""

from __future__ import annotations

from collections.abc import Sequence

from taichi_ext.differentiate.forms.formula import Formula, Term
from taichi_ext.program import Value

_TINY = 1e-20


def segment_partials(formula: Formula, start: Sequence[Value], end: Sequence[Value], at: Sequence[Term]) -> list[Term]:
    """Partials of the boundary term by start x, y and end x, y, for a jump of 1."""
    f = formula
    x0, y0, x1, y1 = (f.term(v) for v in (*start, *end))
    dx, dy = (x1 - x0).kept("dx"), (y1 - y0).kept("dy")
    first, last = f.term(0.0), f.term(1.0)  # Liang and Barsky: the part of the side, from 0 to 1, that is in the pixel
    for delta, distance in ((dx, at[0] - x0), (dy, at[1] - y0)):
        distance = distance.kept("distance")
        is_parallel = (f.abs(delta) < _TINY).kept("is_parallel")
        safe = f.select(is_parallel, 1, delta).kept("safe")
        one, other = ((distance - 0.5) / safe).kept("one"), ((distance + 0.5) / safe).kept("other")
        misses = is_parallel & (f.abs(distance) > 0.5)
        entered = f.select(is_parallel, first, f.max(first, f.min(one, other)))
        last = f.select(is_parallel, f.select(misses, first, last), f.min(last, f.max(one, other))).kept("last")
        first = entered.kept("first")
    last = f.max(first, last).kept("last")
    by_end = ((last * last - first * first) * 0.5).kept("by_end")
    by_start = ((last - first) - by_end).kept("by_start")
    # outward normal times length, for an inside to the left
    return [(dy * by_start).kept(), (-(dx * by_start)).kept(), (dy * by_end).kept(), (-(dx * by_end)).kept()]
