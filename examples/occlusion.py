"""Two overlapping discs, one of them tilted: ``nearest`` shares each pixel between them, nested edges only nearly.

The image has three edges: the rim of each disc, where it is not hidden, and the line along which the leaning disc
passes through the other one.  The derivative of every pixel by the centres, the radii and the depth of the upright disc
is compared with finite differences of a supersampled image.

    python examples/occlusion.py [--samples 48] [--output occlusion.png]

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

from taichi_ext import Jacobian, edge, nearest

WIDTH, HEIGHT = 160, 120
PARAMETERS = ("x1", "y1", "r1", "x2", "y2", "r2", "depth1")
CROSSING = np.array([62.217, 57.733, 33.413, 92.642, 66.381, 37.178, -12.0])
FIRST, SECOND, NOTHING = 0.4, 1.0, 0.1  # colours
LEAN = (0.6, 0.3)  # depth of the second disc per pixel from its centre
STEP = 0.25
WAYS = {"render": "nearest", "edges": "nested edges, antialiased", "hard_edges": "nested edges, hard"}
DETAIL = (slice(46, 82), slice(66, 96))  # where all three edges meet, for the picture


@ti.data_oriented
class Discs:
    """The image with ``nearest``, with nested edges, antialiased or not, and supersampled without any."""

    def __init__(self) -> None:
        self.p = ti.field(ti.f64, shape=len(PARAMETERS))
        self.image = ti.field(ti.f64, shape=(WIDTH, HEIGHT))
        self.samples = 48
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
        """Level, depth and colour of a disc."""
        first, second, order = self.levels(px, py)
        level, depth, colour = first, self.p[6], FIRST
        if n == 1:
            level, depth, colour = second, self.p[6] + order, SECOND
        return level, depth, colour

    @ti.kernel
    def render(self):
        for i, j in self.image:
            self.image[i, j] = nearest(self.surface, 2, NOTHING, at=(float(i), float(j)))

    @ti.func
    def nested(self, px, py, antialias: ti.template()):
        x = px  # variables of its own, from which the levels are computed
        y = py
        first, second, order = self.levels(x, y)
        nearer = edge(order, FIRST, SECOND, at=(x, y), antialias=antialias)
        on_first = edge(second, nearer, FIRST, at=(x, y), antialias=antialias)
        behind = edge(second, SECOND, NOTHING, at=(x, y), antialias=antialias)
        return edge(first, on_first, behind, at=(x, y), antialias=antialias)

    @ti.kernel
    def edges(self):
        for i, j in self.image:
            self.image[i, j] = self.nested(float(i), float(j), True)

    @ti.kernel
    def hard_edges(self):
        for i, j in self.image:
            self.image[i, j] = self.nested(float(i), float(j), False)

    @ti.kernel
    def sample(self, n: ti.i32):
        """The mean of n x n samples in each pixel."""
        for i, j in self.image:
            total = 0.0
            for a, b in ti.ndrange(n, n):
                first, second, order = self.levels(i - 0.5 + (a + 0.5) / n, j - 0.5 + (b + 0.5) / n)
                if first > 0 and (second <= 0 or order > 0):
                    total += FIRST
                elif second > 0:
                    total += SECOND
                else:
                    total += NOTHING
            self.image[i, j] = total / n**2

    def supersample(self) -> None:
        self.sample(self.samples)


def plan(discs: Discs, name: str = "render") -> Jacobian:
    return Jacobian(getattr(discs, name), discs.p, discs.image)


def expected(discs: Discs) -> np.ndarray:
    """Finite differences of the supersampled image by every parameter, shape (WIDTH, HEIGHT, 7)."""
    columns = range(len(PARAMETERS))
    return np.stack([differences(discs.supersample, discs.p, discs.image, k, STEP) for k in columns], axis=-1)


def computed(discs: Discs, name: str = "render") -> np.ndarray:
    """J of one of the ways, averaged over the steps of the differences."""
    derivative = plan(discs, name)
    return np.stack([mean_derivative(derivative, discs.p, k, STEP) for k in range(len(PARAMETERS))], axis=-1)


def columns_off(J: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """The error (L2) of each column."""
    return np.array([relative(J[..., k], reference[..., k]) for k in range(J.shape[-1])])


def within(disc: Sequence[float]) -> np.ndarray:
    """The pixels that a disc covers entirely."""
    x, y = np.mgrid[:WIDTH, :HEIGHT]
    return np.hypot(x - disc[0], y - disc[1]) < disc[2] - 1


def compare_order(compared: Comparison, discs: Discs) -> None:
    """One disc wholly before the other: the hidden part of a rim has no derivative, and neither has the depth."""
    derivative = plan(discs)
    for name, depth, near, far in (("first", -100.0, 0, 3), ("second", 100.0, 3, 0)):
        discs.p[6] = depth
        J = derivative()
        hidden = J[within(CROSSING[near : near + 3])][:, far : far + 3]
        shown = np.abs(J[..., far : far + 3]).max()
        compared.holds(f"the {name} disc in front hides the other's rim", np.abs(hidden).max() < 1e-12 < shown)
        compared.holds("  and the depth has no influence", not J[..., 6].any())
    discs.p.from_numpy(CROSSING)


def off_where_edges_coincide(discs: Discs, name: str) -> float:
    """The error by the first disc's radius, where the second disc is just behind it: all of the rim is double."""
    discs.p.from_numpy(np.array([*CROSSING[:3], *CROSSING[:3], -100.0]))
    J = mean_derivative(plan(discs, name), discs.p, 2, STEP)
    off = relative(J, differences(discs.supersample, discs.p, discs.image, 2, STEP))
    discs.p.from_numpy(CROSSING)
    return off


def draw(path: Path, discs: Discs, J: np.ndarray, reference: np.ndarray) -> None:
    figure = plotting.new_figure(12, 10)
    if figure is None:
        return
    figure.suptitle(
        "Two discs that pass through each other: derivatives of the image with respect to some parameters", fontsize=14
    )
    drawn_ones = [k for k, name in enumerate(PARAMETERS) if name in ("x1", "x2", "depth1")]
    panels = figure.subplots(3, 1 + len(drawn_ones))
    discs.render()
    image = discs.image.to_numpy()
    discs.supersample()
    error = image - discs.image.to_numpy()
    plotting.show(panels[0, 0], image, "image, detail framed", cmap="gray")
    plotting.frame(panels[0, 0], DETAIL)
    largest = float(abs(J - reference)[DETAIL].max())
    small = plotting.signed_scale(largest, largest / 30)
    plotting.show_detail(panels[1, 0], image, "detail of the image", DETAIL, cmap="gray")
    plotting.show_detail(panels[2, 0], error, "image - supersampled", DETAIL, small)
    for n, k in enumerate(drawn_ones):
        rows = (
            (J[..., k], f"d / d {PARAMETERS[k]}: jacobian", plotting.signed_scale(1)),
            (reference[..., k], "finite differences", plotting.signed_scale(1)),
            (J[..., k] - reference[..., k], "their difference", small),
        )
        for axes, (column, title, scale) in zip(panels[:, 1 + n], rows, strict=True):
            drawn = plotting.show_detail(axes, column, title, DETAIL, scale)
            if n == len(drawn_ones) - 1:
                plotting.color_bar(figure, drawn, axes, "brightness per unit")
    plotting.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Every column compared with differences, with and without antialiasing; one disc in front; the picture."""
    made = plotting.parser("Two overlapping discs: occlusion, by nested edges.", "occlusion.png")
    made.add_argument(
        "--samples", type=int, default=48, help="per pixel and axis, of differences (default: %(default)s)"
    )
    options = plotting.parse(made, arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"Two discs in {WIDTH} x {HEIGHT} pixels, {len(PARAMETERS)} parameters")
    discs = Discs()
    discs.samples = options.samples
    reference = expected(discs)
    columns = {name: computed(discs, name) for name in WAYS}
    off = {name: columns_off(J, reference) for name, J in columns.items()}
    print(f"       error of every pixel (L2, %), by  {''.join(f'{name:>8}' for name in PARAMETERS)}")
    for name, title in WAYS.items():
        print(f"       {title:<34}" + "".join(f"{100 * error:>8.2f}" for error in off[name]))
    compared.holds("nearest agrees with finite differences to 2 %", off["render"].max() < 0.02)
    compared.holds("nested edges are further off, where edges cross", (off["edges"] > off["render"]).all())
    compared.holds("  and hard ones even more", (off["hard_edges"] > off["edges"]).all())
    compare_order(compared, discs)
    coinciding = {name: off_where_edges_coincide(discs, name) for name in ("render", "edges")}
    compared.holds(
        "where edges coincide, nearest agrees to 3 %",
        coinciding["render"] < 0.03,
        f"off by {100 * coinciding['render']:.1f} %; nested edges by {100 * coinciding['edges']:.0f} %",
    )
    draw(options.output, discs, columns["render"], reference)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
