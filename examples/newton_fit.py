"""A fit whose residuals stay large: steps with the Hessian of half their squares, and Gauss-Newton's with JtJ.

Distances to five beacons, measured with errors, give a position (x, y) and an offset of the clock. Gauss-Newton leaves
out r H(r), so that with large r each step gains a constant factor, while each step of Newton doubles the digits.

    python examples/newton_fit.py --output newton_fit.png
"""

import sys
from collections.abc import Callable, Sequence

import numpy as np
import plotting
import taichi as ti
from compare import Comparison

from taichi_ext import value_and_jacobian, value_gradient_and_hessian

BEACONS = np.array([[0.0, 0.0], [4.0, 0.5], [1.0, 3.5], [-2.0, 2.0], [2.5, -2.0]])
ERRORS = np.array([-0.8, 0.8, 0.9, -0.5, -1.0])  # of distances of 1 to 4
TRUE, START = np.array([1.2, 0.8, 0.3]), np.array([0.4, -0.6, 0.0])

ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
p, beacon, measured = ti.field(ti.f64, 3), ti.Vector.field(2, ti.f64, 5), ti.field(ti.f64, 5)
residual, cost = ti.field(ti.f64, 5), ti.field(ti.f64, ())
beacon.from_numpy(BEACONS)
measured.from_numpy(np.linalg.norm(BEACONS - TRUE[:2], axis=1) + TRUE[2] + ERRORS)


@ti.func
def misfit(i):
    return (ti.Vector([p[0], p[1]]) - beacon[i]).norm() + p[2] - measured[i]


@ti.kernel
def residuals():
    for i in residual:
        residual[i] = misfit(i)


@ti.kernel
def half_squares():
    for i in residual:
        cost[None] += 0.5 * misfit(i) ** 2


def gauss_newton() -> tuple[np.ndarray, np.ndarray]:
    """The gradient and JtJ."""
    r, J = value_and_jacobian(residuals, p, residual)
    return J.T @ r, J.T @ J


def newton() -> tuple[np.ndarray, np.ndarray]:
    """The gradient and H."""
    cost[None] = 0.0
    return value_gradient_and_hessian(half_squares, p, cost)[1:]


def run(system: Callable[[], tuple[np.ndarray, np.ndarray]], steps: int) -> list[np.ndarray]:
    """The points of full steps from the start."""
    points = [START]
    for _ in range(steps):
        p.from_numpy(points[-1])
        gradient, matrix = system()
        points.append(points[-1] - np.linalg.solve(matrix, gradient))
    return points


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "newton_fit.png"), arguments)
    runs = {"Gauss-Newton": run(gauss_newton, 40), "Newton": run(newton, 10)}
    best = runs["Newton"].pop()
    errors = {name: [np.linalg.norm(q - best) for q in points] for name, points in runs.items()}
    p.from_numpy(best)
    gradient, H = newton()
    JtJ = gauss_newton()[1]
    rate = np.abs(np.linalg.eigvals(np.eye(3) - np.linalg.solve(JtJ, H))).max()  # of Gauss-Newton near the minimum
    compared = Comparison("A position from five distances with errors of 0.5 to 1")
    compared.holds("Newton ends at a minimum", np.abs(gradient).max() < 1e-12 and np.linalg.eigvalsh(H)[0] > 0)
    found = (errors["Gauss-Newton"][16] / errors["Gauss-Newton"][12]) ** 0.25
    compared.numbers("each step of Gauss-Newton gains the factor of its theory", found, rate, rtol=0.05)
    needed = {name: next(n for n, e in enumerate(line) if e < 1e-10) for name, line in errors.items()}
    compared.holds("Newton needs fewer steps for 10 digits", needed["Newton"] < needed["Gauss-Newton"], str(needed))
    if (figure := plotting.new_figure(6, 4)) is not None:
        axes = figure.subplots()
        plotting.convergence(axes, "a fit with large residuals", {n: [np.array(e)] for n, e in errors.items()})
        axes.set(xlabel="step", ylabel="distance from the minimum")
        plotting.save(figure, options.output)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
