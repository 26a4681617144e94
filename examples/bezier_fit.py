"""A Bezier stroke, fitted to a picture: a level without a formula, the distance from the nearest place on the curve.

Gauss-Newton with small damping on the whole image.  The nearest place is found by a search that is not differentiated:
at a minimum, moving the place changes nothing.

    python examples/bezier_fit.py --output bezier_fit.png
"""

import sys
from collections.abc import Sequence

import numpy as np
import picture_fits
import plotting
import taichi as ti

from taichi_ext import layers, stop_gradient

STROKE = np.array([6.3, 7.2, 22.1, 38.4, 41.2, 9.7, 3.4])  # three control points, and half the width
BENT = STROKE + np.array([2.0, -1.5, -4.0, -3.0, 1.5, 2.0, 0.8])


@ti.data_oriented
class Stroke(picture_fits.Picture):
    """A quadratic Bezier curve of some width."""

    @ti.func
    def beside(self, t, x, y):
        """From the position to the curve."""
        u = 1 - t
        a, b, c = u * u, 2 * u * t, t * t
        return ti.Vector(
            [a * self.p[0] + b * self.p[2] + c * self.p[4] - x, a * self.p[1] + b * self.p[3] + c * self.p[5] - y]
        )

    @ti.func
    def level(self, n, x, y):
        """Half the width minus the distance; the nearest place on the curve has no tangent, as it is a minimum."""
        best = 0.0
        least = 1e9
        for m in range(25):
            d = stop_gradient(self.beside(m / 24, x, y).norm_sqr())
            if d < least:
                least = d
                best = m / 24
        low, high = ti.max(0.0, best - 1 / 24), ti.min(1.0, best + 1 / 24)
        for _ in range(24):  # thirds
            one, two = low + (high - low) / 3, high - (high - low) / 3
            if stop_gradient(self.beside(one, x, y).norm_sqr()) < stop_gradient(self.beside(two, x, y).norm_sqr()):
                high = two
            else:
                low = one
        return self.p[6] - ti.sqrt(self.beside(0.5 * (low + high), x, y).norm_sqr() + 1e-12), 1.0

    @ti.func
    def at(self, x, y):
        return ti.select(self.level(0, x, y)[0] > 0, 1.0, 0.0)

    @ti.kernel
    def render(self):
        for i, j in self.image:
            self.image[i, j] = layers(self.level, 1, 0.0, at=(i, j))


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "bezier_fit.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    return picture_fits.run("A Bezier stroke", Stroke(STROKE), BENT, 2, "(middle point).x", options.output)


if __name__ == "__main__":
    sys.exit(main())
