"""A Voronoi diagram of 3 x 3 cells, fitted to a picture: ``layers`` shares each pixel between its cells.

Gauss-Newton with small damping on the whole image.  The target is supersampled, so the fit also shows how exact the
areas of the cells are.

    python examples/voronoi_fit.py --output voronoi_fit.png
"""

import sys
from collections.abc import Sequence

import numpy as np
import picture_fits
import plotting
import taichi as ti

from taichi_ext import layers

GRID = np.stack(np.meshgrid([8, 24, 40], [6, 18, 30], indexing="ij"), -1).reshape(-1, 2)


@ti.data_oriented
class Voronoi(picture_fits.Picture):
    """Nine cells: positions and brightness."""

    @ti.func
    def cell(self, n, x, y):
        return 1.0, ti.sqrt((x - self.p[3 * n]) ** 2 + (y - self.p[3 * n + 1]) ** 2), self.p[3 * n + 2]

    @ti.func
    def at(self, x, y):
        value = 0.0
        least = 1e9
        for n in range(9):
            _, depth, own = self.cell(n, x, y)
            if depth < least:
                least = depth
                value = own
        return value

    @ti.kernel
    def render(self):
        for i, j in self.image:
            self.image[i, j] = layers(self.cell, 9, 0.0, at=(i, j), order="depth")


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "voronoi_fit.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    generator = np.random.default_rng(3)
    sites = np.column_stack([GRID + generator.uniform(-3, 3, (9, 2)), generator.uniform(0.1, 1, 9)])
    start = np.column_stack([sites[:, :2] + generator.uniform(-2, 2, (9, 2)), generator.uniform(0.4, 0.6, 9)])
    return picture_fits.run("A Voronoi diagram", Voronoi(sites), start, 12, "cell[4].x", options.output)


if __name__ == "__main__":
    sys.exit(main())
