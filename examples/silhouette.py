"""A sphere's depth image: what autodiff misses at the silhouette, and how ``pixel`` adds it.

Differentiating the renderer gives the term inside the sphere, but not the one along its silhouette, where the depth
jumps to 0.  The first alone has the wrong sign in two of three columns of the image's sum.

    python examples/silhouette.py [--output silhouette.png]
"""

import sys
from collections.abc import Sequence

import numpy as np
import plotting
import taichi as ti
from compare import Comparison
from supersampling import differences, mean_derivative, relative

from taichi_ext import Jacobian, pixel

WIDTH, HEIGHT, FOCAL = 640, 480, 400.0
SPHERE = np.array([40.0, 10.0, 10.0, 100.0])  # radius, centre
# Derivatives of the sum of the image by r, cx and cz; that by cy is the one by cx.
EXACT, EXACT_INTERIOR = [330001.413, 18092.290, -66869.220], [-205754.925, 7645.788, 149522.616]
DETAIL, STEP = (slice(476, 512), slice(385, 412)), 0.1  # a piece of the silhouette, for the picture


@ti.data_oriented
class Renderer:
    """The depth along each pixel's ray, 0 where it misses the sphere, in the ways that are compared here."""

    def __init__(self) -> None:
        self.sphere, self.depth = ti.field(ti.f64, shape=4), ti.field(ti.f64, shape=(WIDTH, HEIGHT))
        self.sphere.from_numpy(SPHERE)

    @ti.func
    def hit(self, px, py):
        """The depth of the point nearest to the centre, and the level: the squared half of the chord."""
        ray = ti.Vector([(px - WIDTH / 2) / FOCAL, (py - HEIGHT / 2) / FOCAL, 1.0]).normalized()
        centre = ti.Vector([self.sphere[1], self.sphere[2], self.sphere[3]])
        s = centre.dot(ray)
        return s, self.sphere[0] ** 2 - (s * ray - centre).norm_sqr()

    @ti.func
    def at(self, x, y):
        s, level = self.hit(x, y)
        depth = 0.0
        if level > 0:
            depth = s - ti.sqrt(level)
        return depth

    @ti.kernel
    def autodiff(self):
        for i, j in self.depth:
            self.depth[i, j] = self.at(float(i), float(j))

    @ti.kernel
    def both(self):
        for i, j in self.depth:
            self.depth[i, j] = pixel(self.at, at=(float(i), float(j)), antialias=True)

    @ti.kernel
    def sample(self, n: ti.i32):
        """The mean of n x n samples in each pixel."""
        for i, j in self.depth:
            total = 0.0
            for a, b in ti.ndrange(n, n):
                total += self.at(i - 0.5 + (a + 0.5) / n, j - 0.5 + (b + 0.5) / n)
            self.depth[i, j] = total / n**2

    def supersample(self) -> None:
        self.sample(16)


def plan(renderer: Renderer, name: str) -> Jacobian:
    return Jacobian(getattr(renderer, name), renderer.sphere, renderer.depth)


def boundary_term(sphere: np.ndarray = SPHERE) -> np.ndarray:
    """L times the derivative of the area pi f² r² L / (cz² - r²)^1.5; L is the depth of all of the silhouette."""
    (r, *centre), (cx, _, cz) = sphere, sphere[1:]
    tangent_squared, across = np.dot(centre, centre) - r**2, cz**2 - r**2
    area = np.pi * FOCAL**2 * r**2 * np.sqrt(tangent_squared) / across**1.5
    by_r, by_cx = 2 / r - r / tangent_squared + 3 * r / across, cx / tangent_squared
    return np.sqrt(tangent_squared) * area * np.array([by_r, by_cx, cz / tangent_squared - 3 * cz / across])


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "silhouette.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    renderer = Renderer()
    compared = Comparison(f"Depth of a sphere in {WIDTH} x {HEIGHT} pixels: derivatives of its sum by r, cx and cz")
    plans = {name: plan(renderer, name) for name in ("autodiff", "both")}
    interior, both = (p().sum((0, 1))[[0, 1, 3]] for p in plans.values())
    compared.numbers("autodiff of the renderer, against the exact interior term", interior, EXACT_INTERIOR, rtol=0.06)
    compared.numbers("pixel, against the exact sum of both terms", both, EXACT, rtol=2e-3)
    compared.numbers("  less the exact interior term", both - np.array(EXACT_INTERIOR), boundary_term(), rtol=3e-3)
    images = {name: mean_derivative(p, renderer.sphere, 0, STEP) for name, p in plans.items()}
    images["differences"] = differences(renderer.supersample, renderer.sphere, renderer.depth, 0, STEP)
    off = {name: relative(images[name], images["differences"]) for name in plans}
    compared.holds("∂depth / ∂r of all pixels agrees to 2 %", off["both"] < 0.02, f"{100 * off['both']:.2f} %")
    compared.holds("autodiff misses nearly all of it", off["autodiff"] > 0.9, f"{100 * off['autodiff']:.0f} %")
    if (figure := plotting.new_figure(12, 5.5)) is not None:
        panels = figure.subplots(2, 2)
        depth = renderer.depth.to_numpy()
        shown = plotting.show(panels[0, 0], np.where(depth > 0, depth, np.nan), "depth, detail framed", cmap="viridis")
        plotting.color_bar(figure, shown, panels[0, 0], "depth")
        plotting.frame(panels[0, 0], DETAIL)
        scale = plotting.signed_scale(max(np.abs(image[DETAIL]).max() for image in images.values()), linear=3.0)
        for axes, (name, image) in zip(panels.flat[1:], images.items(), strict=True):
            title = f"∂depth / ∂r: {'pixel' if name == 'both' else name}"
            drawn = plotting.show_detail(axes, image, title, DETAIL, scale)
            plotting.color_bar(figure, drawn, axes, "per unit")
        plotting.save(figure, options.output)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
