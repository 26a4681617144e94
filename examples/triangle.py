"""A triangle's area with respect to its corners: levels joined by a minimum, and sides that are clipped to the pixel.

The derivative of a triangle's area with respect to a corner is half the opposite side, turned.  With the minimum of
three half-plane levels the pixels at the corners are divided; with ``segment_edge`` all of them are exact.

    python examples/triangle.py [--samples 64] [--output triangle.png]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotting
import taichi as ti
from compare import Comparison, percents
from supersampling import Supersampled, differences, mean_derivative, relative

from taichi_ext import Jacobian, edge, segment_edge

WIDTH, HEIGHT = 64, 48
CORNERS = np.array([[6.317, 5.142], [56.213, 13.718], [20.642, 41.357]])  # round to the left
STEP, SHOWN = 0.2, (1, 0)  # of the differences; the corner and the coordinate of the picture
DETAIL = (slice(46, 62), slice(7, 23))


@ti.data_oriented
class Triangle(Supersampled):
    """The image in the two ways, and supersampled."""

    def __init__(self) -> None:
        self.corners = ti.Vector.field(2, ti.f64, shape=3)
        self.image = ti.field(ti.f64, shape=(WIDTH, HEIGHT))
        self.corners.from_numpy(CORNERS)

    @ti.func
    def level(self, px, py):
        """The least distance from the sides' lines, positive inside."""
        least = 1e9
        for n in ti.static(range(3)):
            a = self.corners[n]
            side = self.corners[(n + 1) % 3] - a
            least = ti.min(least, ((py - a.y) * side.x - (px - a.x) * side.y) / side.norm())
        return least

    @ti.func
    def at(self, x, y):
        return ti.select(self.level(x, y) > 0, 1.0, 0.0)

    @ti.kernel
    def minimum(self):
        for i, j in self.image:
            px, py = float(i), float(j)
            self.image[i, j] = edge(self.level(px, py), 1.0, 0.0, at=(px, py))

    @ti.kernel
    def segments(self):
        for i, j in self.image:
            px, py = float(i), float(j)
            moving = 0.0  # its value is 0
            for n in ti.static(range(3)):
                moving += segment_edge(self.corners[n], self.corners[(n + 1) % 3], 1.0, at=(px, py))
            self.image[i, j] = moving + self.at(px, py)


def plan(triangle: Triangle, name: str) -> Jacobian:
    return Jacobian(getattr(triangle, name), triangle.corners, triangle.image)


def closed_form(corners: np.ndarray = CORNERS) -> np.ndarray:
    """d area / d corner i = 1/2 (y of i+1 - y of i+2, x of i+2 - x of i+1)."""
    after, before = np.roll(corners, -1, axis=0), np.roll(corners, -2, axis=0)
    return 0.5 * np.stack([after[:, 1] - before[:, 1], before[:, 0] - after[:, 0]], axis=1)


def draw(path: Path, image: np.ndarray, columns: dict[str, np.ndarray], gradient: np.ndarray) -> None:
    if (figure := plotting.new_figure(12, 6)) is None:
        return
    panels = figure.subplots(2, 3)
    plotting.show(panels[0, 0], image, "∂area / ∂corners[n], as arrows", cmap="gray")
    panels[0, 0].quiver(*CORNERS.T, *gradient.T, color=plotting.ORANGE, angles="xy", scale_units="xy", scale=3)
    panels[0, 0].set(xlim=(-12.5, 72.5), ylim=(-10.5, 58.5), facecolor="black")
    plotting.frame(panels[0, 0], DETAIL)
    exact = columns["differences"]
    shown = {f"∂image / ∂corners[1].x: {name}": column for name, column in columns.items()}
    shown |= {f"detail: {name} - differences": columns[name] - exact for name in ("minimum", "segments")}
    small = max(np.abs(columns[name] - exact)[DETAIL].max() for name in ("minimum", "segments"))
    for axes, (title, column) in zip(panels.flat[1:], shown.items(), strict=True):
        scale = plotting.signed_scale(small if "detail" in title else np.abs(exact).max())
        detail = DETAIL if "detail" in title else (slice(0, WIDTH), slice(0, HEIGHT))
        plotting.color_bar(figure, plotting.show_detail(axes, column, title, detail, scale), axes, "per pixel")
    plotting.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    made = plotting.parser(__doc__.splitlines()[0], "triangle.png")
    made.add_argument("--samples", type=int, default=64, help="per pixel and axis (default: %(default)s)")
    options = plotting.parse(made, arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"A triangle in {WIDTH} x {HEIGHT} pixels, with respect to the positions of its corners")
    triangle, expected = Triangle(), closed_form()
    triangle.samples = options.samples
    minimum, gradient = (plan(triangle, name)().sum((0, 1)) for name in ("minimum", "segments"))
    compared.numbers("∂area / ∂corners, segment_edge for each side", gradient, expected, rtol=1e-10)
    errors = np.linalg.norm(minimum - expected, axis=1) / np.linalg.norm(expected, axis=1)
    compared.holds("∂area / ∂corners, a minimum of levels, agrees to 5 %", errors.max() < 0.05, percents(errors, 2))
    columns = {
        name: mean_derivative(plan(triangle, name), triangle.corners, SHOWN, STEP) for name in ("minimum", "segments")
    }
    exact = differences(triangle.supersample, triangle.corners, triangle.image, SHOWN, STEP)
    off = {name: relative(column, exact) for name, column in columns.items()}
    text = f"L2: {100 * off['segments']:.3f} %"
    compared.holds("segment_edge in every pixel agrees with finite differences to 2 %", off["segments"] < 0.02, text)
    compared.holds("a minimum of levels is further off", off["minimum"] > off["segments"], percents(off.values(), 3))
    draw(options.output, triangle.image.to_numpy(), columns | {"differences": exact}, gradient)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
