"""A cloth that falls, by implicit steps: the matrix of each step is the sparse Jacobian of its forces.

Springs along and across the cells pull at the two nodes at their ends, so the rows of J are shared by many
iterations. Each step solves (m - h^2 df/dx - h df/dv) dv = h (f + h df/dx v) with scipy.

    python examples/cloth.py --output cloth.png
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotting
import scipy.sparse as sparse
import taichi as ti
from compare import Comparison
from scipy.sparse.linalg import spsolve

from taichi_ext import Jacobian

N = 16  # nodes on a side
MASS, STIFFNESS, DAMPING, GRAVITY = 0.02, 400.0, 0.05, 9.81
H = 0.02
STEPS = 25


def springs(n: int) -> np.ndarray:
    """The two nodes of each spring: along the sides and the diagonals of the cells."""
    number = np.arange(n * n).reshape(n, n)
    pairs = [(number[1:], number[:-1]), (number[:, 1:], number[:, :-1])]
    pairs += [(number[1:, 1:], number[:-1, :-1]), (number[1:, :-1], number[:-1, 1:])]
    return np.concatenate([np.stack([a.ravel(), b.ravel()], axis=1) for a, b in pairs]).astype(np.int32)


@ti.data_oriented
class Cloth:
    """A square cloth that hangs from two corners."""

    def __init__(self, n: int = N) -> None:
        self.pairs = springs(n)
        self.x, self.v, self.force = (ti.Vector.field(3, ti.f64, n * n) for _ in range(3))
        self.ends = ti.Vector.field(2, ti.i32, len(self.pairs))
        self.rest = ti.field(ti.f64, len(self.pairs))
        self.ends.from_numpy(self.pairs)
        i, j = np.mgrid[:n, :n]
        self.start = np.stack([i / n, 0 * i, j / n], axis=-1).reshape(-1, 3).astype(np.float64)
        self.x.from_numpy(self.start)
        across = self.start[self.pairs[:, 0]] - self.start[self.pairs[:, 1]]
        self.rest.from_numpy(np.linalg.norm(across, axis=1))
        self.free = np.ones((n * n, 3), bool)
        self.free[[0, n - 1]] = False  # two corners hang

    @ti.kernel
    def forces(self):
        for i in self.x:
            self.force[i] = ti.Vector([0.0, -MASS * GRAVITY, 0.0]) - DAMPING * MASS * self.v[i]
        for e in self.ends:
            a, b = self.ends[e][0], self.ends[e][1]
            d = self.x[b] - self.x[a]
            length = d.norm()
            along = d / length
            pull = (STIFFNESS * (length - self.rest[e]) + DAMPING * along.dot(self.v[b] - self.v[a])) * along
            self.force[a] += pull
            self.force[b] -= pull

    def energy(self) -> float:
        """Kinetic energy, that of the springs, and that of the height."""
        x, v = self.x.to_numpy(), self.v.to_numpy()
        length = np.linalg.norm(x[self.pairs[:, 0]] - x[self.pairs[:, 1]], axis=1)
        stretched = 0.5 * STIFFNESS * ((length - self.rest.to_numpy()) ** 2).sum()
        return 0.5 * MASS * (v**2).sum() + stretched + MASS * GRAVITY * x[:, 1].sum()


def step(cloth: Cloth, plan: Jacobian, h: float) -> tuple[sparse.csr_array, np.ndarray, np.ndarray]:
    """One implicit step; returns the matrix, the right-hand side and the solution of the nodes that are free."""
    by_x, by_v = plan()
    f, v = cloth.force.to_numpy().ravel(), cloth.v.to_numpy().ravel()
    free = np.flatnonzero(cloth.free)
    matrix = (MASS * sparse.eye_array(len(v), format="csr") - h * h * by_x - h * by_v)[free][:, free]
    right = (h * (f + h * (by_x @ v)))[free]
    dv = spsolve(matrix.tocsc(), right)
    v[free] += dv
    v[~cloth.free.ravel()] = 0
    cloth.v.from_numpy(v.reshape(-1, 3))
    cloth.x.from_numpy(cloth.x.to_numpy() + h * v.reshape(-1, 3))
    return matrix, right, dv


def stiffness(cloth: Cloth) -> np.ndarray:
    """df/dx of the springs without their damping, block by block, as a person derives it: (3n, 3n)."""
    x, rest = cloth.x.to_numpy(), cloth.rest.to_numpy()
    found = np.zeros((len(x), 3, len(x), 3))
    for (a, b), r in zip(cloth.pairs, rest, strict=True):
        d = x[b] - x[a]
        length = np.linalg.norm(d)
        outer = np.outer(d, d) / length**2
        block = STIFFNESS * (outer + (1 - r / length) * (np.eye(3) - outer))
        for one, other, sign in ((a, a, -1), (a, b, 1), (b, a, 1), (b, b, -1)):
            found[one, :, other] += sign * block
    return found.reshape(3 * len(x), 3 * len(x))


def main(arguments: Sequence[str] | None = None) -> int:
    """The matrix compared with a hand-derived one, then a fall in steps that are longer than explicit ones could be."""
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "cloth.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    cloth = Cloth()
    plan = Jacobian(cloth.forces, [cloth.x, cloth.v], cloth.force, format="csr")
    size = 3 * N * N
    compared = Comparison(f"A cloth of {N} x {N} nodes, {len(cloth.pairs)} springs, {STEPS} implicit steps")
    rng = np.random.default_rng(0)
    cloth.x.from_numpy(cloth.start + 0.01 * rng.standard_normal(cloth.start.shape))
    by_x, by_v = plan()
    expected = stiffness(cloth)
    compared.numbers("df/dx at rest (by hand)", by_x.toarray(), expected, rtol=1e-10, atol=1e-10)
    blocks = 9 * (N * N + 2 * len(cloth.pairs))
    compared.holds(
        "J has the blocks of the springs and no other entry", by_x.nnz == blocks, f"{by_x.nnz} of {size**2} entries"
    )
    direction, h = rng.standard_normal(cloth.start.shape), 1e-6
    ends = []
    for sign in (1, -1):
        cloth.v.from_numpy(sign * h * direction)
        cloth.forces()
        ends.append(cloth.force.to_numpy().ravel())
    cloth.v.fill(0)
    along = (ends[0] - ends[1]) / (2 * h)
    compared.numbers("df/dv along a direction (differences)", by_v @ direction.ravel(), along, rtol=1e-6, atol=1e-8)

    cloth.x.from_numpy(cloth.start)
    energies, worst, shapes = [cloth.energy()], 0.0, [cloth.start]
    start = time.perf_counter()
    for _ in range(STEPS):
        matrix, right, dv = step(cloth, plan, H)
        worst = max(worst, float(np.abs(matrix @ dv - right).max() / np.abs(right).max()))
        energies.append(cloth.energy())
        shapes.append(cloth.x.to_numpy())
    seconds = time.perf_counter() - start
    compared.holds("every system is solved", worst < 1e-9, f"largest residual {worst:.1e}")
    compared.holds(
        "the energy falls and stays finite", bool(np.isfinite(energies).all() and energies[-1] < energies[0]),
        f"from {energies[0]:.3f} to {energies[-1]:.3f} J",
    )  # fmt: skip
    explicit = 2 / np.sqrt(np.abs(np.linalg.eigvalsh(expected)).max() / MASS)
    print(
        f"  time: {seconds / STEPS * 1e3:.1f} ms a step of {H * 1e3:.0f} ms; explicit steps could be "
        f"{explicit * 1e3:.1f} ms long"
    )
    if (figure := plotting.new_figure(9, 4.4)) is not None:
        draw(figure, cloth, shapes[:: STEPS // 3], by_x)
        plotting.save(figure, options.output)
    return compared.exit_code


def draw(figure: Any, cloth: Cloth, shapes: list[np.ndarray], by_x: sparse.csr_array) -> None:
    """The cloth on its way, from the side, and the pattern of df/dx."""
    from matplotlib.collections import LineCollection

    left, right = figure.subplots(1, 2, width_ratios=(1.4, 1))
    for n, x in enumerate(shapes):
        across = x @ np.array([[0.35, 0.15], [0, 1], [1, 0]])  # seen from the side and above
        right_of, above = 1.5 * (n % 2), -1.4 * (n // 2)
        left.add_collection(LineCollection(across[cloth.pairs] + [right_of, above], color=plotting.BLUE, linewidth=0.5))
        left.text(right_of + 0.1, above + 0.25, f"{n * (STEPS // 3) * H:.2f} s", fontsize=9)
    left.set(xticks=[], yticks=[], aspect="equal")
    left.set_title(f"every {STEPS // 3} steps of {H * 1e3:.0f} ms", fontsize=10)
    left.autoscale()
    left.set_ylim(top=0.5)
    right.spy(by_x, markersize=0.3, color=plotting.BLUE)
    right.set_title("df/dx: entries that are not zero", fontsize=10)
    right.tick_params(labelsize=8, colors=plotting.GREY, top=False, labeltop=False, labelbottom=True)


if __name__ == "__main__":
    sys.exit(main())
