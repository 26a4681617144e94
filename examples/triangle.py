"""A triangle's area with respect to its corners: levels joined by a minimum, and sides that are clipped to the pixel.

The derivative of a triangle's area by a corner is half the opposite side, turned.  With the minimum of three half-plane
levels the pixels at the corners are divided, right to a few hundredths; with ``segment_edge`` all of them are exact.

    python examples/triangle.py [--samples 64] [--output triangle.png]

The picture needs ``python -m pip install '.[plot]'``; the figures are printed without it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotting
import taichi as ti
from compare import Comparison
from supersampling import differences, mean_derivative, relative

from taichi_ext import Jacobian, segment_edge, step

WIDTH, HEIGHT = 64, 48
CORNERS = np.array([[6.317, 5.142], [56.213, 13.718], [20.642, 41.357]])  # round to the left
STEP = 0.2
SHOWN = (1, 0)  # the corner and the coordinate of the picture
DETAIL = (slice(46, 62), slice(7, 23))


@ti.data_oriented
class Triangle:
    """The image in the two ways, and supersampled."""

    def __init__(self) -> None:
        self.corners = ti.Vector.field(2, ti.f64, shape=3)
        self.image = ti.field(ti.f64, shape=(WIDTH, HEIGHT))
        self.samples = 64
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

    @ti.kernel
    def minimum(self):
        for i, j in self.image:
            px = float(i)
            py = float(j)
            self.image[i, j] = step(self.level(px, py), at=(px, py))

    @ti.kernel
    def segments(self):
        for i, j in self.image:
            px = float(i)
            py = float(j)
            moving = 0.0  # its value is 0
            for n in ti.static(range(3)):
                moving += segment_edge(self.corners[n], self.corners[(n + 1) % 3], 1.0, at=(px, py))
            self.image[i, j] = moving + ti.select(self.level(px, py) > 0, 1.0, 0.0)

    @ti.kernel
    def sample(self, n: ti.i32):
        """The mean of n x n samples in each pixel."""
        for i, j in self.image:
            total = 0.0
            for a, b in ti.ndrange(n, n):
                if self.level(i - 0.5 + (a + 0.5) / n, j - 0.5 + (b + 0.5) / n) > 0:
                    total += 1.0
            self.image[i, j] = total / n**2

    def supersample(self) -> None:
        self.sample(self.samples)


def plan(triangle: Triangle, name: str) -> Jacobian:
    """The prepared Jacobian of one of the ways, by all corners."""
    return Jacobian(getattr(triangle, name), triangle.corners, triangle.image)


def by_corners(triangle: Triangle, name: str) -> np.ndarray:
    """d area / d corners, shape (3, 2)."""
    return plan(triangle, name)().sum((0, 1))


def closed_form(corners: np.ndarray = CORNERS) -> np.ndarray:
    """d area / d corner i = 1/2 (y of i+1 - y of i+2, x of i+2 - x of i+1)."""
    after, before = np.roll(corners, -1, axis=0), np.roll(corners, -2, axis=0)
    return 0.5 * np.stack([after[:, 1] - before[:, 1], before[:, 0] - after[:, 0]], axis=1)


def corner_errors(computed: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """For each corner the length of the error, relative to that of the derivative."""
    return np.linalg.norm(computed - expected, axis=1) / np.linalg.norm(expected, axis=1)


def column_images(triangle: Triangle) -> dict[str, np.ndarray]:
    """d pixel / d one coordinate of a corner, all averaged over the step of the differences."""
    ways = {
        name: mean_derivative(plan(triangle, name), triangle.corners, SHOWN, STEP) for name in ("minimum", "segments")
    }
    return ways | {"differences": differences(triangle.supersample, triangle.corners, triangle.image, SHOWN, STEP)}


def draw(path: Path, triangle: Triangle, images: dict[str, np.ndarray], gradient: np.ndarray) -> None:
    figure = plotting.new_figure(13, 5.8)
    if figure is None:
        return
    figure.suptitle("A triangle and its corners: a minimum of levels, and sides clipped to the pixel", fontsize=14)
    panels = figure.subplots(2, 4)
    triangle.supersample()
    plotting.show(panels[0, 0], triangle.image.to_numpy(), "∂area / ∂corners[n], as arrows", cmap="gray")
    for (x, y), arrow in zip(CORNERS, gradient, strict=True):
        tip = (x + 0.3 * arrow[0], y + 0.3 * arrow[1])
        panels[0, 0].annotate(
            "", xy=tip, xytext=(x, y), arrowprops={"color": plotting.ORANGE, "width": 2, "headwidth": 8}
        )
    plotting.frame(panels[0, 0], DETAIL)
    panels[0, 0].set(xlim=(-12.5, 72.5), ylim=(-10.5, 58.5), facecolor="black")
    exact = images["differences"]
    limit = np.abs(exact).max()
    for column, (name, image) in enumerate(images.items(), 1):
        scale = plotting.signed_scale(limit)
        drawn = plotting.show(panels[0, column], image, f"∂image / ∂corners[1].x: {name}", scale)
    plotting.color_bar(figure, drawn, panels[0, 3], "per pixel")
    plotting.show_detail(panels[1, 0], triangle.image.to_numpy(), "detail of the image", DETAIL, cmap="gray")
    errors = [images[name] - exact for name in ("minimum", "segments")]
    small = plotting.signed_scale(max(np.abs(error[DETAIL]).max() for error in errors))
    details = (
        (errors[0], "detail: minimum - differences", small),
        (errors[1], "detail: segments - differences", small),
        (exact, "detail: differences", plotting.signed_scale(limit)),
    )
    for axes, (image, title, scale) in zip(panels[1, 1:], details, strict=True):
        drawn = plotting.show_detail(axes, image, title, DETAIL, scale)
        if axes is not panels[1, 1]:
            plotting.color_bar(figure, drawn, axes, "per pixel")
    plotting.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """The derivative of the area compared with the closed form, every pixel with differences, and the picture."""
    made = plotting.parser("A triangle's area by its corners.", "triangle.png")
    made.add_argument(
        "--samples", type=int, default=64, help="per pixel and axis, of differences (default: %(default)s)"
    )
    options = plotting.parse(made, arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"A triangle in {WIDTH} x {HEIGHT} pixels, by the positions of its corners")
    triangle = Triangle()
    triangle.samples = options.samples
    expected, gradient = closed_form(), by_corners(triangle, "segments")
    compared.numbers("d area / d corners, segment_edge for each side", gradient, expected, rtol=1e-10)
    minimum = by_corners(triangle, "minimum")
    errors = corner_errors(minimum, expected)
    compared.holds(
        "d area / d corners, a minimum of levels, agrees to 5 %",
        errors.max() < 0.05,
        "off by " + ", ".join(f"{100 * error:.1f} %" for error in errors),
    )
    images = column_images(triangle)
    exact = images["differences"]
    off = relative(images["segments"], exact)
    compared.holds(
        "segment_edge in every pixel agrees with finite differences to 2 %", off < 0.02, f"L2: {100 * off:.2f} %"
    )
    worse = relative(images["minimum"], exact)
    compared.holds("a minimum of levels is further off", worse > off, f"L2: {100 * worse:.2f} %")
    draw(options.output, triangle, images, gradient)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
