"""Pictures of shapes that are fitted to a target: a Voronoi diagram of 3 x 3 cells, and a Bezier stroke.

Gauss-Newton with small damping on the whole image.  The target is supersampled, so the fit also shows how exact the
areas are that ``layers`` and ``nearest`` give to each shape.

    python examples/picture_fits.py [--output picture_fits.png]

The picture needs ``python -m pip install '.[plot]'``; the figures are printed without it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotting
import taichi as ti
from compare import Comparison
from supersampling import differences, mean_derivative, relative

from taichi_ext import Jacobian, layers, nearest, stop_gradient

WIDTH, HEIGHT = 48, 36
STEPS = 20
STROKE = np.array([6.3, 7.2, 22.1, 38.4, 41.2, 9.7, 3.4])  # three control points, and half the width
STEP = 0.25  # of the differences
GRID = np.stack(np.meshgrid([8, 24, 40], [6, 18, 30], indexing="ij"), -1).reshape(-1, 2)


@ti.data_oriented
class Picture:
    """An image of ``p``, with edges and supersampled; the classes below say what it shows."""

    def __init__(self, p: np.ndarray) -> None:
        self.p = ti.field(ti.f64, shape=p.size)
        self.image = ti.field(ti.f64, shape=(WIDTH, HEIGHT))
        self.set(p)

    def set(self, p: np.ndarray) -> None:
        self.p.from_numpy(p.ravel())

    @ti.kernel
    def sample(self, n: ti.i32):
        for i, j in self.image:
            total = 0.0
            for a, b in ti.ndrange(n, n):
                total += self.at(i - 0.5 + (a + 0.5) / n, j - 0.5 + (b + 0.5) / n) / n**2
            self.image[i, j] = total

    def supersample(self) -> None:
        self.sample(24)


@ti.data_oriented
class Voronoi(Picture):
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
            self.image[i, j] = nearest(self.cell, 9, 0.0, at=(i, j))


@ti.data_oriented
class Stroke(Picture):
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


def fit(picture: Picture, target: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, Jacobian]:
    """Gauss-Newton, damped as long as the residual is large; the residual (L2) by step."""
    derivative = Jacobian(picture.render, picture.p, picture.image)
    guess, residuals = start.ravel().copy(), []
    for _ in range(STEPS):
        picture.set(guess)
        J = derivative().reshape(-1, guess.size)
        residual = (picture.image.to_numpy() - target).ravel()
        residuals.append(np.linalg.norm(residual))
        damping = 1e-2 * residuals[-1] ** 2 / len(residual) * np.trace(J.T @ J)
        step = np.linalg.solve(J.T @ J + damping * np.eye(guess.size), J.T @ residual)
        guess = guess - np.clip(step, -3, 3)
    picture.set(guess)
    return np.array(residuals), derivative


def draw(path: Path, shown: list[tuple[str, list[tuple[str, np.ndarray, bool]]]]) -> None:
    figure = plotting.new_figure(17, 7)
    if figure is None:
        return
    figure.suptitle("Pictures of shapes, fitted to a target", fontsize=14)
    panels = figure.subplots(2, 5)
    for row, (name, images) in zip(panels, shown, strict=True):
        limit = max(np.abs(image).max() for _, image, is_signed in images if is_signed)
        for axes, (title, image, is_signed) in zip(row, images, strict=True):
            scale: Any = plotting.signed_scale(limit) if is_signed else None
            drawn = plotting.show(axes, image, f"{name}: {title}", scale, cmap="RdBu_r" if is_signed else "gray")
        plotting.color_bar(figure, drawn, row[-1], "brightness per pixel")
    plotting.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Both fits, a column of both Jacobians compared with differences, and the picture."""
    made = plotting.parser("A Voronoi diagram and a Bezier stroke, fitted to a target.", "picture_fits.png")
    options = plotting.parse(made, arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"Pictures of {WIDTH} x {HEIGHT} pixels")
    generator = np.random.default_rng(3)
    sites = np.column_stack([GRID + generator.uniform(-3, 3, (9, 2)), generator.uniform(0.1, 1, 9)])
    moved = np.column_stack([sites[:, :2] + generator.uniform(-2, 2, (9, 2)), generator.uniform(0.4, 0.6, 9)])
    bent = STROKE + np.array([2.0, -1.5, -4.0, -3.0, 1.5, 2.0, 0.8])
    shown = []
    for name, picture, truth, start in (
        ("Voronoi diagram", Voronoi(sites), sites.ravel(), moved.ravel()),
        ("Bezier stroke", Stroke(STROKE), STROKE, bent),
    ):
        picture.supersample()
        target = picture.image.to_numpy()
        picture.set(start)
        picture.render()
        first = picture.image.to_numpy()
        residuals, derivative = fit(picture, target, start)
        found = picture.p.to_numpy()
        picture.render()
        fitted = picture.image.to_numpy()
        off = np.abs(found - truth).max()
        compared.holds(
            f"{name}: all parameters agree to 0.1 pixels", off < 0.1, f"off by {off:.3f}; residual {residuals[-1]:.1e}"
        )
        picture.set(truth)
        k = 12 if name.startswith("V") else 2
        mean = mean_derivative(derivative, picture.p, k, STEP)
        exact = differences(picture.supersample, picture.p, picture.image, k, STEP)
        compared.holds(
            f"{name}: each pixel of a column agrees to 4 %",
            relative(mean, exact) < 0.04,
            f"L2: {100 * relative(mean, exact):.2f} %, differences of 24 x 24 samples",
        )
        images = [("target", target, False), ("start", first, False), ("fit", fitted, False)]
        shown.append((name, [*images, ("derivative", mean, True), ("differences", exact, True)]))
    draw(options.output, shown)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
