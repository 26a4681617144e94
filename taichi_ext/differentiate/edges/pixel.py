"""How an edge crosses a pixel: length of the chord, covered area, averages.

For a unit square pixel and an edge that is straight across it, with s = phi / g the signed distance of the pixel centre
in pixels, g = |grad phi|, n the unit normal, a = max |n_i|, b = min |n_i|, hi = (a + b) / 2, lo = (a - b) / 2, the edge
has in the pixel the length

    kappa(s) = 1 / a for |s| <= lo,  (hi - |s|) / (a b) for lo < |s| < hi,  0 beyond,

and the covered area is C(s) = 1/2 + integral of kappa from 0 to s: exact for straight edges.
"""

from __future__ import annotations

from collections.abc import Sequence

from taichi_ext.differentiate.forms.build import Coefficient
from taichi_ext.differentiate.forms.formula import Formula, Term
from taichi_ext.program import Value

_TINY = 1e-20
_NARROW = 0.02  # a pixel seen exactly along an axis counts as turned by this much, where a formula divides by b


class Pixel:
    """How a level crosses a unit square pixel: everything that the formulas above need."""

    def __init__(self, formula: Formula, level: Value, gradient: tuple[Coefficient, Coefficient]) -> None:
        f = self.formula = formula
        self.level = f.term(level)
        gx, gy = (f.term(abs(c)) if isinstance(c, (int, float)) else f.abs(c).kept("slope") for c in gradient)
        self.g = f.sqrt(gx * gx + gy * gy).kept("g")
        self.is_flat = (self.g < _TINY).kept("is_flat")
        self.safe_g = f.select(self.is_flat, 1, self.g).kept("safe")
        self.a = f.select(self.is_flat, self.safe_g, f.max(gx, gy) / self.safe_g).kept("a")
        self.b = (f.min(gx, gy) / self.safe_g).kept("b")

    def chord(self) -> Term:
        """Kappa / g: the length of the edge in the pixel, per unit of level."""
        f, a, b = self.formula, self.a, self.b
        distance = (f.abs(self.level) / self.safe_g).kept("distance")
        hi, lo = ((a + b) * 0.5).kept("hi"), ((a - b) * 0.5).kept("lo")
        slanted = (hi - distance) / (a * f.max(b, _TINY**0.5))
        between = f.select(distance < hi, f.min(slanted, 1 / a), 0)
        # an edge along the border of two pixels is shared by them
        tie = f.select(distance.equals(lo) & distance.equals(hi), 0.5 / a, 1 / a)
        kappa = f.select(distance <= lo, tie, between)
        return f.select(self.is_flat, 0, kappa / self.safe_g).kept("chord")

    def area(self) -> Term:
        """C: the covered area."""
        f, a, b = self.formula, self.a, self.b
        s = (self.level / self.safe_g).kept("s")
        distance = f.abs(s).kept("distance")
        hi, lo = ((a + b) * 0.5).kept("hi"), ((a - b) * 0.5).kept("lo")
        rest = f.max(hi - distance, 0).kept("rest")
        beyond = lo / a + (b * b - rest * rest) / (2 * a * f.max(b, _TINY**0.5))
        within = f.min(beyond, 0.5)
        half = f.select(distance <= lo, distance / a, f.select(distance >= hi, 0.5, within)).kept("half")
        hard = f.select(self.level > 0, 1, 0)
        return f.select(self.is_flat, hard, 0.5 + f.select(s < 0, -half, half)).kept("area")

    def half_inverse_root(self) -> Term:
        """The average over the pixel of level ** -0.5 / 2 where level > 0."""
        f, d, g, a = self.formula, self.level, self.safe_g, self.a
        b = f.max(self.b, _NARROW * a).kept("b")
        hi, lo = ((a + b) * 0.5).kept("hi"), ((a - b) * 0.5).kept("lo")

        def power(z: Term) -> Term:
            positive = f.max(z, 0).kept("z")
            return positive * f.sqrt(positive)

        second = power(d + g * hi) - power(d + g * lo) - power(d - g * lo) + power(d - g * hi)
        average = (2.0 / 3.0) * second / (a * b * g * g)
        is_far = f.operation("logical_or", self.is_flat, d > 4 * (a + b) * g).kept("is_far")
        root = f.sqrt(f.select(is_far & (d > 0), d, 1))
        point = f.select(d > 0, 0.5 / root, 0)
        return f.select(is_far, point, average).kept("mean")


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
