"""A soft bar of neo-Hookean tetrahedra bends under its weight: ``newton`` on the energy alone, without forces.

The energy of a tetrahedron with the deformation gradient F and J = det F is its volume times
mu/2 (tr FtF - 3) - mu log J + lambda/2 (log J)^2; a step that turns a tetrahedron inside out is not valid.

    python examples/elastic_bar.py --output elastic_bar.png
"""

import itertools
import sys
from collections.abc import Sequence

import numpy as np
import plotting
import taichi as ti

from taichi_ext import newton

CELLS = (12, 3, 3)  # of 1/3 each; six tetrahedra in each cell
MU, LAM, WEIGHT = 40.0, 100.0, 1.0

ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
grid = np.stack(np.meshgrid(*(np.arange(n + 1) for n in CELLS), indexing="ij"), axis=-1)
points = grid.reshape(-1, 3) / 3
numbers = np.arange(len(points)).reshape(grid.shape[:3])
tetrahedra = []
for cell in itertools.product(*map(range, CELLS)):
    for order in itertools.permutations(range(3)):  # Kuhn's: along the axes from corner to corner
        corners = np.array([cell] * 4)
        for k, axis in enumerate(order):
            corners[k + 1 :, axis] += 1
        tetrahedra.append([numbers[tuple(c)] for c in corners])
edges = points[np.array(tetrahedra)][:, 1:] - points[np.array(tetrahedra)][:, :1]

count = len(tetrahedra)
x = ti.Vector.field(3, ti.f64, shape=len(points))
corner = ti.Vector.field(4, ti.i32, shape=count)
rest = ti.Matrix.field(3, 3, ti.f64, shape=count)
volume = ti.field(ti.f64, shape=count)
energy = ti.field(ti.f64, shape=())
x.from_numpy(points)
corner.from_numpy(np.array(tetrahedra, np.int32))
rest.from_numpy(np.linalg.inv(edges.transpose(0, 2, 1)))
volume.from_numpy(np.abs(np.linalg.det(edges)) / 6)


@ti.kernel
def elastic():
    for e in corner:
        a, b, c, d = corner[e]
        F = ti.Matrix.cols([x[b] - x[a], x[c] - x[a], x[d] - x[a]]) @ rest[e]
        log = ti.log(F.determinant())
        strain = 0.5 * MU * ((F.transpose() @ F).trace() - 3) - MU * log + 0.5 * LAM * log**2
        energy[None] += volume[e] * (strain + WEIGHT * (x[a] + x[b] + x[c] + x[d])[2] / 4)


def is_valid(at):
    """Whether no tetrahedron is turned inside out."""
    now = at[np.array(tetrahedra)]
    return bool((np.linalg.det((now[:, 1:] - now[:, :1]) @ np.linalg.inv(edges)) > 0).all())


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "elastic_bar.png"), arguments)
    wall = points[:, 0] == 0
    result = newton(elastic, x, energy, fixed=wall, is_valid=is_valid, progress=True)
    print(result.message)
    tip = points[:, 0] == points[:, 0].max()
    print(f"{count} tetrahedra; the end of the bar is {-(x.to_numpy() - points)[tip, 2].mean():.4f} lower")
    pull = result.gradient.reshape(-1, 3)[wall].sum(axis=0)  # of the wall: it carries the weight of the bar
    is_right = result.success and np.allclose(pull, [0, 0, WEIGHT * volume.to_numpy().sum()], atol=1e-6)
    print(f"  {'ok' if is_right else 'FAIL'}  the wall carries {pull[2]:.6f}")
    if (figure := plotting.new_figure(7, 3.6)) is not None:
        axes, side = figure.subplots(), points[:, 1] == 0
        for at, color, label in ((points, plotting.GREY, "at rest"), (x.to_numpy(), plotting.BLUE, "under its weight")):
            lines = at[side][:, [0, 2]].reshape(CELLS[0] + 1, CELLS[2] + 1, 2)
            axes.plot(lines[..., 0], lines[..., 1], color=color)
            axes.plot(lines[..., 0].T, lines[..., 1].T, color=color)
            axes.plot([], [], color=color, label=label)
        axes.set(xlabel="x", ylabel="z", aspect="equal")
        axes.legend(fontsize=9)
        plotting.save(figure, options.output)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
