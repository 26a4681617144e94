"""A signed distance under a camera and a light: its silhouette and its hard shadow move with the right derivative.

Two balls that are blended into one body float above a floor.  The silhouette is the level of the camera's ray, and the
border of the shadow is that of the ray from the floor to the light (``ray_level``).  ``layers`` puts the shadow over
the floor and the body over both.  Plain autodiff sees no edge and would give 0.

    python examples/signed_distance.py [--samples 20] [--output signed_distance.png]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotting
import taichi as ti
from compare import Comparison
from supersampling import SupersampledAtEdges, differences, mean_derivative, relative

from taichi_ext import Jacobian, layers, ray_level

WIDTH, HEIGHT, FOCAL = 64, 48, 60.0
PARAMETERS = ("x1", "y1", "r1", "x2", "r2", "light x")
SCENE = np.array([-0.45, 0.25, 0.75, 0.65, 0.6, 2.0])
STEPS = np.array([0.06, 0.06, 0.06, 0.06, 0.06, 0.3])
FLOOR, DISTANCE = 1.1, 5.0  # y of the floor, which points down, and z of the body
BLEND = 0.6
LIT, DARK, BODY = 0.9, 0.3, 0.6


@ti.data_oriented
class Scene(SupersampledAtEdges):
    """The image with ``layers``, and supersampled."""

    def __init__(self) -> None:
        self.p = ti.field(ti.f64, shape=len(PARAMETERS))
        self.image = ti.field(ti.f64, shape=(WIDTH, HEIGHT))
        self.p.from_numpy(SCENE)

    @ti.func
    def distance(self, p):
        """Two balls; where they are close, the smaller distance is blended."""
        one = (p - ti.Vector([self.p[0], self.p[1], DISTANCE])).norm() - self.p[2]
        two = (p - ti.Vector([self.p[3], -0.2, DISTANCE + 0.3])).norm() - self.p[4]
        near = ti.max(BLEND - abs(one - two), 0.0) / BLEND
        return ti.min(one, two) - near * near * BLEND / 4

    @ti.func
    def ray(self, x, y):
        return ti.Vector([(x - 0.5 * WIDTH) / FOCAL, (y - 0.5 * HEIGHT) / FOCAL + 0.55, 1.0]).normalized()

    @ti.func
    def part(self, n, x, y):
        """Level and brightness of the shadow on the floor and of the body."""
        ray = self.ray(x, y)
        start = ti.Vector([0.0, -2.2, 0.5])
        if n == 0:
            start += (FLOOR - start.y) / ray.y * ray  # where the ray meets the floor
            ray = (ti.Vector([self.p[5], -4.0, 2.0]) - start).normalized()
        return ray_level(self.distance, start, ray, 0.0, 9.0), ti.select(n == 0, DARK, BODY)

    @ti.kernel
    def render(self):
        for i, j in self.image:
            self.image[i, j] = layers(self.part, 2, LIT, at=(i, j))

    @ti.func
    def at(self, x, y):
        value = LIT
        for n in range(2):
            level, own = self.part(n, x, y)
            if level > 0:
                value = own
        return value


def draw(path: Path, scene: Scene, found: list[tuple[np.ndarray, np.ndarray]]) -> None:
    if (figure := plotting.new_figure(14, 6)) is None:
        return
    panels = figure.subplots(2, 4)
    scene.render()
    image = scene.image.to_numpy()
    scene.supersample()
    plotting.show(panels[0, 0], image[:, ::-1], "image", cmap="gray")
    error = (image - scene.image.to_numpy())[:, ::-1]
    plotting.show(panels[1, 0], error, "image - supersampled", plotting.signed_scale(0.02))
    for axes, k in zip(panels.T[1:], (1, 2, 5), strict=True):
        mean, exact = found[k]
        scale = plotting.signed_scale(np.abs(exact).max())
        plotting.show(axes[0], mean[:, ::-1], f"∂image / ∂({PARAMETERS[k]})", scale)
        drawn = plotting.show(axes[1], exact[:, ::-1], "finite differences", scale)
        plotting.color_bar(figure, drawn, list(axes), "per unit")
    plotting.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    made = plotting.parser("A signed distance and its shadow.", "signed_distance.png")
    made.add_argument("--samples", type=int, default=20, help="per pixel and axis (default: %(default)s)")
    options = plotting.parse(made, arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"A body and its shadow in {WIDTH} x {HEIGHT} pixels")
    scene = Scene()
    scene.samples = options.samples
    plan, found = Jacobian(scene.render, scene.p, scene.image), []
    for k, step in enumerate(STEPS):  # J, averaged over the step of the differences, and those
        exact = differences(scene.supersample, scene.p, scene.image, k, step)
        found.append((mean_derivative(plan, scene.p, k, step, nodes=10), exact))
    off = [relative(mean, exact) for mean, exact in found]
    print(f"       by {'':<27}" + "".join(f"{name:>8}" for name in PARAMETERS))
    print(f"       {'pixels (L2, %)':<30}" + "".join(f"{100 * e:>8.2f}" for e in off))
    compared.holds("each pixel agrees to 6 %, as shadows bend within a pixel", max(off) < 0.06)
    sums = np.array([[mean.sum(), exact.sum(), np.abs(exact).sum()] for mean, exact in found])
    worst = np.max(np.abs(sums[:, 0] - sums[:, 1]) / sums[:, 2])
    compared.holds("the sum of the image agrees to 1 %", worst < 0.01, f"off by {100 * worst:.2f} % at most")
    draw(options.output, scene, found)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
