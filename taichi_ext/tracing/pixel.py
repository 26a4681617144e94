"""How an edge crosses a pixel: length of the chord, covered area, averages, as expressions in a kernel.

For a unit square pixel and an edge that is straight across it, with s = phi / g the signed distance of the pixel centre
in pixels, g = |grad phi|, n the unit normal, a = max |n_i|, b = min |n_i|, hi = (a + b) / 2, lo = (a - b) / 2, the edge
has in the pixel the length

    kappa(s) = 1 / a for |s| <= lo,  (hi - |s|) / (a b) for lo < |s| < hi,  0 beyond,

and the covered area is C(s) = 1/2 + integral of kappa from 0 to s: exact for straight edges.
"""

from __future__ import annotations

from typing import Any

from taichi_ext import backend
from taichi_ext.backend import ops
from taichi_ext.derivative.linear_form import as_expression

_TINY = 1e-20
_NARROW = 0.02  # a pixel seen exactly along an axis counts as turned by this much, where a formula divides by b


class Pixel:
    """How a level crosses a unit square pixel: everything that the formulas above need, as expressions."""

    def __init__(self, level: Any, gradient: tuple[Any, Any]) -> None:
        dtype = backend.dtype_of(level)
        self.level = level
        gx, gy = (ops.abs(as_expression(c, dtype)) for c in gradient)
        self.g = backend.variable(ops.sqrt(gx * gx + gy * gy))
        self.is_flat = backend.variable(self.g < _TINY)
        safe = ops.select(self.is_flat, self.g * 0 + 1, self.g)
        self.safe_g = backend.variable(safe)
        self.a = backend.variable(ops.select(self.is_flat, safe, ops.max(gx, gy) / safe))
        self.b = backend.variable(ops.min(gx, gy) / safe)

    def chord(self) -> Any:
        """Kappa / g: the length of the edge in the pixel, per unit of level."""
        a, b = self.a, self.b
        distance = backend.variable(ops.abs(self.level) / self.safe_g)
        hi, lo = (a + b) * 0.5, (a - b) * 0.5
        slanted = (hi - distance) / (a * ops.max(b, _TINY**0.5))
        between = ops.select(distance < hi, ops.min(slanted, 1 / a), a * 0)
        # an edge along the border of two pixels is shared by them
        tie = ops.select((distance == lo) & (distance == hi), 0.5 / a, 1 / a)
        kappa = ops.select(distance <= lo, tie, between)
        return backend.variable(ops.select(self.is_flat, a * 0, kappa / self.safe_g))

    def area(self) -> Any:
        """C: the covered area."""
        a, b = self.a, self.b
        s = backend.variable(self.level / self.safe_g)
        distance = backend.variable(ops.abs(s))
        hi, lo = (a + b) * 0.5, (a - b) * 0.5
        rest = ops.max(hi - distance, a * 0)
        beyond = lo / a + (b * b - rest * rest) / (2 * a * ops.max(b, _TINY**0.5))
        within = ops.min(beyond, a * 0 + 0.5)
        half = ops.select(distance <= lo, distance / a, ops.select(distance >= hi, a * 0 + 0.5, within))
        hard = ops.select(self.level > 0, a * 0 + 1, a * 0)
        return backend.variable(ops.select(self.is_flat, hard, 0.5 + ops.select(s < 0, -half, half)))

    def half_inverse_root(self) -> Any:
        """The average over the pixel of level ** -0.5 / 2 where level > 0."""
        d, g, a = self.level, self.safe_g, self.a
        b = backend.variable(ops.max(self.b, _NARROW * a))
        hi, lo = (a + b) * 0.5, (a - b) * 0.5

        def power(z: Any) -> Any:
            positive = ops.max(z, z * 0)
            return positive * ops.sqrt(positive)

        second = power(d + g * hi) - power(d + g * lo) - power(d - g * lo) + power(d - g * hi)
        average = (2.0 / 3.0) * second / (a * b * g * g)
        is_far = self.is_flat | (d > 4 * (a + b) * g)
        root = ops.sqrt(ops.select(is_far & (d > 0), d, a * 0 + 1))
        point = ops.select(d > 0, 0.5 / root, a * 0)
        return backend.variable(ops.select(is_far, point, average))


def segment_partials(start: Any, end: Any, jump: Any, at: Any) -> list[Any]:
    """Partials of the boundary term by start x, y and end x, y."""
    x0, y0, x1, y1 = start[0], start[1], end[0], end[1]
    dx, dy = backend.variable(x1 - x0), backend.variable(y1 - y0)
    first, last = dx * 0, dx * 0 + 1  # Liang and Barsky: the part of the side, from 0 to 1, that is in the pixel
    for delta, distance in ((dx, at[0] - x0), (dy, at[1] - y0)):
        is_parallel = ops.abs(delta) < _TINY
        safe = ops.select(is_parallel, delta * 0 + 1, delta)
        one, other = (distance - 0.5) / safe, (distance + 0.5) / safe
        misses = is_parallel & (ops.abs(distance) > 0.5)
        first = ops.select(is_parallel, first, ops.max(first, ops.min(one, other)))
        last = ops.select(is_parallel, ops.select(misses, first, last), ops.min(last, ops.max(one, other)))
    first, last = backend.variable(first), backend.variable(ops.max(first, last))
    by_end = backend.variable((last * last - first * first) * 0.5)
    by_start = backend.variable((last - first) - by_end)
    # outward normal times length, for an inside to the left
    return [jump * (dy * by_start), jump * (-dx * by_start), jump * (dy * by_end), jump * (-dx * by_end)]
