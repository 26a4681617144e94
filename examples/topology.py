"""Topology optimisation of a cantilever: the gradient of the compliance goes through SciPy's sparse solver.

The displacements u solve K(rho) u = f.  `custom_root` gives them the derivative of this equation, so the compliance f u
has a gradient.  It has to agree with the adjoint by hand (Sigmund, A 99 line topology optimization code, 2001).

    python examples/topology.py --output topology.png
"""

import sys
from collections.abc import Sequence

import numpy as np
import plotting
import scipy.sparse as sparse
import taichi as ti
from compare import Comparison
from scipy.ndimage import uniform_filter
from scipy.sparse.linalg import spsolve

from taichi_ext import custom_root, value_and_gradient

NX, NY, FRACTION, PENALTY, LEAST, STEPS = 60, 20, 0.4, 3.0, 1e-3, 30
CORNERS = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])  # of an element, counterclockwise


def element_stiffness(poisson: float = 0.3) -> np.ndarray:
    """The 8 x 8 stiffness of a square of plane stress with Young's modulus 1, by Gauss's rule with 2 x 2 points."""
    D = np.array([[1, poisson, 0], [poisson, 1, 0], [0, 0, (1 - poisson) / 2]]) / (1 - poisson**2)
    K = np.zeros((8, 8))
    for s, t in np.array([[x, y] for x in (-1, 1) for y in (-1, 1)]) / np.sqrt(12) + 0.5:
        slopes = (2 * CORNERS - 1) * (1 - np.abs(CORNERS - [s, t]))[:, ::-1]  # of the four shape functions, by x and y
        B = np.zeros((3, 8))
        (B[0, ::2], B[1, 1::2]), (B[2, 1::2], B[2, ::2]) = slopes.T, slopes.T
        K += B.T @ D @ B / 4
    return K


@ti.data_oriented
class Cantilever:
    """A beam of NX x NY squares: the left side is held, the middle of the right side pulled down."""

    def __init__(self) -> None:
        node = np.arange((NX + 1) * (NY + 1)).reshape(NX + 1, NY + 1)
        nodes = np.stack([node[x : NX + x, y : NY + y].ravel() for x, y in CORNERS], 1)
        entries = np.stack([2 * nodes, 2 * nodes + 1], 2).reshape(-1, 8)
        count = 2 * node.size
        self.rho, self.u, self.residual, self.force = (ti.field(ti.f64, n) for n in (NX * NY, count, count, count))
        self.held, self.entries, self.K = ti.field(ti.i32, count), ti.field(ti.i32, entries.shape), element_stiffness()
        self.element, self.compliance = ti.field(ti.f64, (8, 8)), ti.field(ti.f64, ())
        self.element.from_numpy(self.K)
        self.entries.from_numpy(entries.astype(np.int32))
        self.force[2 * int(node[NX, NY // 2]) + 1] = -1.0
        self.held.from_numpy((np.arange(count) < 2 * (NY + 1)).astype(np.int32))
        self.solve = custom_root(self.solve_by_scipy, self.equilibrium, self.u, self.residual)

    def solve_by_scipy(self) -> None:
        entries, free = self.entries.to_numpy(), np.flatnonzero(self.held.to_numpy() == 0)
        places = np.repeat(entries, 8, 1).ravel(), np.tile(entries, (1, 8)).ravel()
        K = sparse.csc_array((np.outer(LEAST + (1 - LEAST) * self.rho.to_numpy() ** PENALTY, self.K).ravel(), places))
        u = np.zeros(K.shape[0])
        u[free] = spsolve(K[free][:, free], self.force.to_numpy()[free])
        self.u.from_numpy(u)

    @ti.kernel
    def equilibrium(self):
        for n in self.residual:
            self.residual[n] = self.u[n] if self.held[n] else -self.force[n]
        for e in self.rho:
            modulus = LEAST + (1 - LEAST) * self.rho[e] ** PENALTY
            for a, b in ti.ndrange(8, 8):
                if not self.held[self.entries[e, a]]:
                    self.residual[self.entries[e, a]] += modulus * self.element[a, b] * self.u[self.entries[e, b]]

    @ti.kernel
    def work(self):
        self.compliance[None] = 0.0
        for n in self.u:
            self.compliance[None] += self.force[n] * self.u[n]

    def run(self) -> None:
        self.solve()
        self.work()

    def gradient_by_hand(self) -> np.ndarray:
        u = self.u.to_numpy()[self.entries.to_numpy()]
        return -PENALTY * (1 - LEAST) * self.rho.to_numpy() ** (PENALTY - 1) * np.einsum("ea,ab,eb->e", u, self.K, u)


def moved(rho: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """A step of the optimality criteria at constant volume, for a gradient that is smoothed over 3 x 3 elements."""
    smooth, low, high = uniform_filter((rho * gradient).reshape(NX, NY), 3).ravel(), 0.0, 1e6
    while high - low > 1e-6 * high:
        price = (low + high) / 2
        found = np.sqrt(np.maximum(-smooth, 0) * rho / price).clip(rho - 0.2, rho + 0.2).clip(0.01, 1)
        low, high = (price, high) if found.mean() > FRACTION else (low, price)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "topology.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    beam, history = Cantilever(), []
    beam.rho.fill(FRACTION)
    compared = Comparison(f"A cantilever of {NX} x {NY} elements, {beam.u.shape[0]} displacements, {STEPS} steps")
    for n in range(STEPS):
        value, gradient = value_and_gradient(beam.run, beam.rho, beam.compliance)
        history.append(float(value))
        if n in (0, STEPS - 1):
            compared.numbers(f"gradient in step {n}", gradient, beam.gradient_by_hand(), atol=1e-8)
        beam.rho.from_numpy(moved(beam.rho.to_numpy(), gradient))
    compared.holds("compliance falls", history[-1] < 0.6 * history[0], f"{history[0]:.1f} to {history[-1]:.1f}")
    if (figure := plotting.new_figure(7, 2.8)) is not None:
        axes = figure.subplots(subplot_kw={"title": f"density after {STEPS} steps", "xticks": [], "yticks": []})
        axes.imshow(beam.rho.to_numpy().reshape(NX, NY).T, cmap="gray_r", origin="lower", vmin=0, vmax=1)
        plotting.save(figure, options.output)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
