"""Two overlapping discs, one of them tilted: ``layers`` shares each pixel between them, nested edges only nearly.

The image has three edges: the visible rim of each disc, and the line along which the tilted disc passes through the
other one.  The derivatives are compared with finite differences of a supersampled image.

    python examples/occlusion.py [--samples 48] [--output occlusion.png]
"""

import sys
from collections.abc import Sequence

import numpy as np
import plotting
import taichi as ti
from compare import Comparison
from supersampling import Supersampled, all_differences, mean_jacobian, relative

from taichi_ext import Jacobian, edge, layers

WIDTH, HEIGHT = 160, 120
PARAMETERS, SHOWN = ("x1", "y1", "r1", "x2", "y2", "r2", "depth1"), ("x1", "x2", "depth1")
CROSSING = np.array([62.217, 57.733, 33.413, 92.642, 66.381, 37.178, -12.0])
FIRST, SECOND, NOTHING = 0.4, 1.0, 0.1  # colours
LEAN, STEPS = (0.6, 0.3), [0.25] * 7  # depth of the second disc per pixel from its centre; steps of the differences
WAYS = {"render": "layers", "edges": "nested edges"}
DETAIL = (slice(46, 82), slice(66, 96))  # where all three edges meet, for the picture


@ti.data_oriented
class Discs(Supersampled):
    """The image with ``layers``, with nested edges, and supersampled without any."""

    def __init__(self) -> None:
        self.p, self.image = ti.field(ti.f64, shape=len(PARAMETERS)), ti.field(ti.f64, shape=(WIDTH, HEIGHT))
        self.p.from_numpy(CROSSING)

    @ti.func
    def levels(self, px, py):
        """Inside the first disc, inside the second, and the first one nearer than the second."""
        first = self.p[2] - ti.sqrt((px - self.p[0]) ** 2 + (py - self.p[1]) ** 2)
        x, y = px - self.p[3], py - self.p[4]
        second = self.p[5] - ti.sqrt(x**2 + y**2)
        return first, second, LEAN[0] * x + LEAN[1] * y - self.p[6]

    @ti.func
    def surface(self, n, px, py):
        first, second, order = self.levels(px, py)
        level, depth, colour = first, self.p[6], FIRST
        if n == 1:
            level, depth, colour = second, self.p[6] + order, SECOND
        return level, depth, colour

    @ti.kernel
    def render(self):
        for i, j in self.image:
            self.image[i, j] = layers(self.surface, 2, NOTHING, at=(float(i), float(j)), order="depth")

    @ti.kernel
    def edges(self):
        for i, j in self.image:
            x, y = float(i), float(j)
            first, second, order = self.levels(x, y)
            nearer = edge(order, FIRST, SECOND, at=(x, y), antialias=True)
            on_first = edge(second, nearer, FIRST, at=(x, y), antialias=True)
            behind = edge(second, SECOND, NOTHING, at=(x, y), antialias=True)
            self.image[i, j] = edge(first, on_first, behind, at=(x, y), antialias=True)

    @ti.func
    def at(self, x, y):
        first, second, order = self.levels(x, y)
        return ti.select(first > 0 and (second <= 0 or order > 0), FIRST, ti.select(second > 0, SECOND, NOTHING))


def plan(discs: Discs, name: str = "render") -> Jacobian:
    return Jacobian(getattr(discs, name), discs.p, discs.image)


def columns(discs: Discs) -> tuple[dict[str, np.ndarray], np.ndarray]:
    exact = all_differences(discs.supersample, discs.p, discs.image, STEPS)
    return {name: mean_jacobian(plan(discs, name), discs.p, STEPS) for name in WAYS}, exact


def main(arguments: Sequence[str] | None = None) -> int:
    made = plotting.parser(__doc__.splitlines()[0], "occlusion.png")
    made.add_argument("--samples", type=int, default=48, help="per pixel and axis (default: %(default)s)")
    options = plotting.parse(made, arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"Two discs in {WIDTH} x {HEIGHT} pixels, {len(PARAMETERS)} parameters")
    discs = Discs()
    discs.samples = options.samples
    J, exact = columns(discs)
    off = {name: np.array([relative(J[name][..., k], exact[..., k]) for k in range(7)]) for name in WAYS}
    print(f"       error of every pixel (L2, %), by  {''.join(f'{name:>8}' for name in PARAMETERS)}")
    for name, title in WAYS.items():
        print(f"       {title:<34}" + "".join(f"{100 * error:>8.2f}" for error in off[name]))
    compared.holds("layers agrees with finite differences to 2 %", off["render"].max() < 0.02)
    compared.holds("nested edges are further off, where edges cross", (off["edges"] > off["render"]).all())
    if (figure := plotting.new_figure(12, 5.5)) is not None:
        panels, scale = figure.subplots(2, 1 + len(SHOWN)), plotting.signed_scale(1)
        discs.p.from_numpy(CROSSING)
        discs.render()
        plotting.show(panels[0, 0], discs.image.to_numpy(), "image, detail framed", cmap="gray")
        plotting.frame(panels[0, 0], DETAIL)
        plotting.show_detail(panels[1, 0], discs.image.to_numpy(), "detail of the image", DETAIL, cmap="gray")
        for axes, name in zip(panels.T[1:], SHOWN, strict=True):
            k = PARAMETERS.index(name)
            plotting.show_detail(axes[0], J["render"][..., k], f"∂image / ∂{name}", DETAIL, scale)
            drawn = plotting.show_detail(axes[1], exact[..., k], "differences", DETAIL, scale)
        plotting.color_bar(figure, drawn, list(panels[:, -1]), "per unit")
        plotting.save(figure, options.output)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
