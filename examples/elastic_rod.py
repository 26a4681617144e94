"""A rod held at one end and loaded at the other: ``newton`` on the energy of its bending, compared with the elastica.

The energy is 2 EI/ds tan(theta/2)^2 for each corner that turns by theta, and that of stretching. The shape of a thin
rod under a tip load P obeys EI theta'' = P cos(theta) along its length, which SciPy solves.

    python examples/elastic_rod.py --output elastic_rod.png
"""

import sys
from collections.abc import Sequence

import numpy as np
import plotting
import taichi as ti
from compare import Comparison
from scipy.integrate import solve_bvp

from taichi_ext import newton

PARTS, BENDING, STRETCHING = 120, 1.0, 1e6  # of a rod of length 1
LOADS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)

ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
x = ti.Vector.field(2, ti.f64, shape=PARTS + 1)
energy, load = ti.field(ti.f64, shape=()), ti.field(ti.f64, shape=())


@ti.kernel
def rod():
    for i in range(PARTS):
        energy[None] += 0.5 * STRETCHING / PARTS * ((x[i + 1] - x[i]).norm() * PARTS - 1) ** 2
    for i in range(1, PARTS):
        a, b = x[i] - x[i - 1], x[i + 1] - x[i]
        half = a.cross(b) / (a.norm() * b.norm() + a.dot(b))  # tan(theta/2)
        energy[None] += 2 * BENDING * PARTS * half**2
    energy[None] += load[None] * x[PARTS][1]


def elastica(p: float) -> np.ndarray:
    """The tip of a thin rod."""
    s = np.linspace(0, 1, 201)
    found = solve_bvp(
        lambda _, y: np.stack([y[1], p / BENDING * np.cos(y[0])]),
        lambda start, end: np.array([start[0], end[1]]),
        s,
        np.stack([-s, 0 * s - 1]),
        tol=1e-9,
        max_nodes=100_000,
    )
    assert found.success
    fine = np.linspace(0, 1, 4001)
    angle = found.sol(fine)[0]
    return np.array([np.trapezoid(np.cos(angle), fine), np.trapezoid(np.sin(angle), fine)])


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "elastic_rod.png"), arguments)
    compared = Comparison(f"A rod of {PARTS} parts under {len(LOADS)} loads at its tip")
    straight = np.stack([np.linspace(0, 1, PARTS + 1), np.zeros(PARTS + 1)], axis=1)
    x.from_numpy(straight)
    held, shapes = np.arange(PARTS + 1) < 2, [straight]
    for p in LOADS:
        load[None] = p
        result = newton(rod, x, energy, fixed=held, gtol=1e-8)
        shapes.append(x.to_numpy())
        # the first part is held, so half of it does not bend: the error of the shape is of the first order in 1/PARTS
        error = np.abs(shapes[-1][-1] - elastica(p)).max()
        compared.holds(
            f"P = {p}: the tip is where that of the elastica is",
            result.success and error < 1.5 / PARTS,
            f"{len(result.history) - 1} steps, tip {shapes[-1][-1].round(4)}, {error:.1e} off",
        )
    if (figure := plotting.new_figure(6, 4.8)) is not None:
        axes = figure.subplots()
        for p, shape in zip((0.0, *LOADS), shapes, strict=True):
            axes.plot(*shape.T, color=plotting.BLUE if p else plotting.GREY)
            axes.annotate(f"P = {p:g}", shape[-1], xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set(aspect="equal", xlabel="x (lengths of the rod)", ylabel="y (lengths of the rod)", xlim=(-0.05, 1.15))
        plotting.save(figure, options.output)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
