"""The stiffness and the drag of a cloth, from its motion: gradients through 100 implicit steps, each solved by Newton.

A step of backward Euler solves ``m (x - old - h v) = h^2 force(x)`` for the new positions.  `custom_root` gives them
the derivative of this equation: the gradient of the misfit costs one linear solution a step, and nothing of Newton's
iterations is kept.  L-BFGS then finds the parameters that the motion was made with.

    python examples/cloth_calibration.py --output cloth_calibration.png
"""

import sys
from collections.abc import Sequence

import numpy as np
import plotting
import taichi as ti
from compare import Comparison
from scipy.optimize import minimize

from taichi_ext import Jacobian, custom_root, value_and_gradient

N, STEPS, H, TRUE, START = 4, 100, 0.02, (60.0, 0.8), (40.0, 0.4)


@ti.data_oriented
class Cloth:
    """A net of N x N nodes with springs along its threads, held at two corners; gravity pulls."""

    def __init__(self) -> None:
        node = np.arange(N * N).reshape(N, N)
        ends = [(node[:-1], node[1:]), (node[:, :-1], node[:, 1:]), (node[:-1, :-1], node[1:, 1:])]
        springs = np.concatenate([np.stack([a.ravel(), b.ravel()], 1) for a, b in ends]).astype(np.int32)
        self.params, self.misfit = ti.field(ti.f64, 2), ti.field(ti.f64, ())
        self.rest, self.x, self.v, self.old, self.residual = (ti.Vector.field(3, ti.f64, N * N) for _ in range(5))
        self.ends, self.held = ti.Vector.field(2, ti.i32, len(springs)), ti.field(ti.i32, N * N)
        self.path, self.seen = (ti.Vector.field(3, ti.f64, (STEPS, N * N)) for _ in range(2))
        self.ends.from_numpy(springs)
        self.rest.from_numpy(np.stack([node.ravel() // N, node.ravel() % N, 0 * node.ravel()], 1) / (N - 1.0))
        self.held[0] = self.held[N - 1] = 1
        self.matrix = Jacobian(self.balance, self.x, self.residual, format="csr")
        self.step = custom_root(self.newton, self.balance, self.x, self.residual)

    @ti.kernel
    def balance(self):
        for i in self.x:
            self.residual[i] = self.x[i] - self.old[i]
            if not self.held[i]:
                self.residual[i] *= 1 + H * self.params[1]
                self.residual[i] -= H * self.v[i] + H**2 * ti.math.vec3(0.0, 0.0, -5.0)
        for s in self.ends:
            a, b = self.ends[s][0], self.ends[s][1]
            length, along = (self.rest[b] - self.rest[a]).norm(), self.x[b] - self.x[a]
            pull = H**2 * self.params[0] * (1 - length / along.norm()) * along
            if not self.held[a]:
                self.residual[a] -= pull
            if not self.held[b]:
                self.residual[b] += pull

    def newton(self) -> None:
        for _ in range(20):
            step = np.linalg.solve(self.matrix().toarray(), -self.residual.to_numpy().ravel())  # J, then the residual
            self.x.from_numpy(self.x.to_numpy() + step.reshape(-1, 3))
            if np.abs(step).max() < 1e-10:
                return

    @ti.kernel
    def begin(self):
        self.misfit[None] = 0.0
        for i in self.x:
            self.x[i], self.v[i] = self.rest[i], ti.math.vec3(0.0)

    @ti.kernel
    def keep(self):
        for i in self.x:
            self.old[i] = self.x[i]

    @ti.kernel
    def finish(self, n: int):
        for i in self.x:
            self.v[i], self.path[n, i] = (self.x[i] - self.old[i]) / H, self.x[i]
            self.misfit[None] += 0.5 * (self.x[i] - self.seen[n, i]).norm_sqr()

    def run(self) -> None:
        self.begin()
        for n in range(STEPS):
            self.keep()
            self.step()
            self.finish(n)


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "cloth_calibration.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    cloth = Cloth()
    cloth.params.from_numpy(np.array(TRUE))
    cloth.run()
    cloth.seen.copy_from(cloth.path)

    def misfit(logs: np.ndarray) -> tuple[float, np.ndarray]:
        cloth.params.from_numpy(np.exp(logs))
        value, gradient = value_and_gradient(cloth.run, cloth.params, cloth.misfit)
        return float(value), gradient * np.exp(logs)

    compared = Comparison(f"A cloth of {N} x {N} nodes, {cloth.ends.shape[0]} springs, {STEPS} implicit steps")
    start = np.log(START)
    expected = [(misfit(start + shift)[0] - misfit(start - shift)[0]) / 2e-5 for shift in 1e-5 * np.eye(2)]
    compared.numbers("gradient", misfit(start)[1], expected)
    fit = minimize(misfit, start, jac=True, method="L-BFGS-B", tol=1e-9)
    compared.numbers(f"stiffness and drag after {fit.nfev} runs", np.exp(fit.x), TRUE, rtol=1e-4)
    if (figure := plotting.new_figure(6, 3)) is not None:
        axes, (seen, fitted) = figure.subplots(), (field.to_numpy()[:, -1, 2] for field in (cloth.seen, cloth.path))
        axes.plot(H * np.arange(STEPS), seen, color=plotting.ORANGE, linewidth=3, label="seen")
        axes.plot(H * np.arange(STEPS), fitted, "--", color=plotting.BLUE, label="fitted")
        axes.set(xlabel="time (s)", ylabel="height of a free corner")
        axes.legend()
        plotting.save(figure, options.output)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
