"""A cloth that falls, by implicit steps: the matrix of each step is the sparse Jacobian of its forces.

Springs along and across the cells pull at the two nodes at their ends, so the rows of J are shared by many
iterations. Each step solves (m - h^2 df/dx - h df/dv) dv = h (f + h df/dx v) with scipy.

    python examples/cloth.py --output cloth.png
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotting
import scipy.sparse as sparse
import taichi as ti
from compare import Comparison
from scipy.sparse.linalg import spsolve

from taichi_ext import Jacobian, check_jacobian

N, STEPS, H = 16, 25, 0.02  # nodes on a side; steps, and seconds of each
MASS, STIFFNESS, DAMPING, GRAVITY = 0.02, 400.0, 0.05, 9.81


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
        self.ends, self.rest = ti.Vector.field(2, ti.i32, len(self.pairs)), ti.field(ti.f64, len(self.pairs))
        self.ends.from_numpy(self.pairs)
        i, j = np.mgrid[:n, :n] / n
        self.start = np.stack([i, 0 * i, j], axis=-1).reshape(-1, 3)
        self.x.from_numpy(self.start)
        self.rest.from_numpy(self.lengths())
        self.free = np.delete(np.arange(3 * n * n).reshape(-1, 3), [0, n - 1], 0).ravel()  # all but two corners

    @ti.kernel
    def forces(self):
        for i in self.x:
            self.force[i] = ti.Vector([0.0, -MASS * GRAVITY, 0.0]) - DAMPING * MASS * self.v[i]
        for e in self.ends:
            a, b = self.ends[e][0], self.ends[e][1]
            d = self.x[b] - self.x[a]
            along = d.normalized()
            pull = (STIFFNESS * (d.norm() - self.rest[e]) + DAMPING * along.dot(self.v[b] - self.v[a])) * along
            self.force[a] += pull
            self.force[b] -= pull

    def lengths(self) -> np.ndarray:
        return np.linalg.norm(np.diff(self.x.to_numpy()[self.pairs], axis=1)[:, 0], axis=-1)


def step(cloth: Cloth, plan: Jacobian, h: float) -> None:
    """One implicit step of the nodes that are free."""
    by_x, by_v = plan()
    f, v, free = cloth.force.to_numpy().ravel(), cloth.v.to_numpy().ravel(), cloth.free
    matrix = (MASS * sparse.eye_array(len(v), format="csr") - h * h * by_x - h * by_v)[free][:, free]
    v[free] += spsolve(matrix.tocsc(), (h * (f + h * (by_x @ v)))[free])
    cloth.v.from_numpy(v.reshape(-1, 3))
    cloth.x.from_numpy(cloth.x.to_numpy() + h * v.reshape(-1, 3))


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "cloth.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    cloth = Cloth()
    plan = Jacobian(cloth.forces, [cloth.x, cloth.v], cloth.force, format="csr")
    compared = Comparison(f"A cloth of {N} x {N} nodes, {len(cloth.pairs)} springs, {STEPS} implicit steps")
    cloth.x.from_numpy(cloth.start + 0.01 * np.random.default_rng(0).standard_normal(cloth.start.shape))
    by_x, _ = plan()
    report = check_jacobian(cloth.forces, [cloth.x, cloth.v], cloth.force, format="csr", most_entries=60)
    compared.holds("J agrees with central differences", report, str(report))
    compared.holds("J has the blocks of the springs and no other entry", by_x.nnz == 9 * (N * N + 2 * len(cloth.pairs)))
    explicit = 2 / np.sqrt(np.abs(np.linalg.eigvalsh(by_x.toarray())).max() / MASS)

    cloth.x.from_numpy(cloth.start)
    shapes = [cloth.start]
    for _ in range(STEPS):
        step(cloth, plan, H)
        shapes.append(cloth.x.to_numpy())
    longest = (cloth.lengths() / cloth.rest.to_numpy()).max()
    compared.holds("the fall is stable: no spring is twice as long as at rest", longest < 2, f"{longest:.2f} times")
    print(f"       steps of {H * 1e3:.0f} ms; explicit ones could be {explicit * 1e3:.1f} ms long")
    if (figure := plotting.new_figure(9, 4.4)) is not None:
        draw(figure, cloth, shapes[:: STEPS // 3], by_x)
        plotting.save(figure, options.output)
    return compared.exit_code


def draw(figure: Any, cloth: Cloth, shapes: list[np.ndarray], by_x: sparse.csr_array) -> None:
    from matplotlib.collections import LineCollection

    left, right = figure.subplots(1, 2, width_ratios=(1.4, 1))
    left.set_title(f"every {STEPS // 3} steps of {H * 1e3:.0f} ms", fontsize=10)
    for n, x in enumerate(shapes):
        across = x @ np.array([[0.35, 0.15], [0, 1], [1, 0]])  # seen from the side and above
        right_of, above = 1.5 * (n % 2), -1.4 * (n // 2)
        left.add_collection(LineCollection(across[cloth.pairs] + [right_of, above], color=plotting.BLUE, linewidth=0.5))
        left.text(right_of + 0.1, above + 0.25, f"{n * (STEPS // 3) * H:.2f} s", fontsize=9)
    left.set(xticks=[], yticks=[], aspect="equal", xlim=(-0.2, 3.0), ylim=(-2.8, 0.5))
    right.spy(by_x, markersize=0.3, color=plotting.BLUE)
    right.set_title("∂force / ∂x: entries that are not zero", fontsize=10)
    right.set(xlabel="entry of x", ylabel="entry of force")
    right.tick_params(top=False, labeltop=False, labelbottom=True)


if __name__ == "__main__":
    sys.exit(main())
