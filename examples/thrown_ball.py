"""The flight of a ball with drag, fitted to noisy positions some of which are wrong, by ``least_squares``.

The residuals come from a simulation: a pipeline of kernels that steps the ball and compares it with what was seen.
Unknown are the velocity at the start and the drag.  A robust loss keeps wrong positions from pulling the flight away.
Gravity and the time step are Python numbers that the kernels read: how much the landing depends on them is a Jacobian
by their names.

    python examples/thrown_ball.py --output thrown_ball.png          (needs SciPy: the extra ``scipy``)
"""

import sys
from collections.abc import Sequence

import numpy as np
import plotting
import taichi as ti
from compare import Comparison

from taichi_ext import jacobian, least_squares

STEPS, EVERY = 160, 8
dt, gravity = 0.01, 9.81
TRUE_VELOCITY, TRUE_DRAG = (9.0, 7.0), 0.12


@ti.data_oriented
class Throw:
    """A ball that flies, what is seen of it, and the differences."""

    def __init__(self) -> None:
        self.velocity = ti.Vector.field(2, ti.f64, shape=())
        self.drag = ti.field(ti.f64, shape=())
        self.x = ti.Vector.field(2, ti.f64, shape=())
        self.v = ti.Vector.field(2, ti.f64, shape=())
        self.seen = ti.Vector.field(2, ti.f64, shape=STEPS // EVERY)
        self.residuals = ti.Vector.field(2, ti.f64, shape=STEPS // EVERY)

    @ti.kernel
    def throw(self):
        self.x[None] = ti.Vector([0.0, 1.5])
        self.v[None] = self.velocity[None]

    @ti.kernel
    def step(self):
        v = self.v[None]
        self.v[None] += dt * (ti.Vector([0.0, -gravity]) - self.drag[None] * v.norm() * v)
        self.x[None] += dt * self.v[None]

    @ti.kernel
    def compare(self, n: ti.i32):
        self.residuals[n] = self.x[None] - self.seen[n]

    def fly(self) -> None:
        self.throw()
        for n in range(STEPS):
            self.step()
            if (n + 1) % EVERY == 0:
                self.compare(n // EVERY)


def positions(velocity: np.ndarray, drag: float, dt: float = dt, gravity: float = gravity) -> np.ndarray:
    """The same flight in NumPy, at the times at which it is seen."""
    x, v, found = np.array([0.0, 1.5]), np.array(velocity, float), []
    for n in range(STEPS):
        v = v + dt * (np.array([0.0, -gravity]) - drag * np.linalg.norm(v) * v)
        x = x + dt * v
        if (n + 1) % EVERY == 0:
            found.append(x)
    return np.array(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """The fit compared with SciPy's on a model in NumPy, and the derivatives of the landing with differences."""
    output = plotting.parse(plotting.parser(__doc__.splitlines()[0], "thrown_ball.png"), arguments).output
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison("A thrown ball: velocity and drag from positions of which three are wrong")
    random = np.random.default_rng(3)
    seen = positions(np.array(TRUE_VELOCITY), TRUE_DRAG) + 0.01 * random.standard_normal((STEPS // EVERY, 2))
    seen[[4, 9, 15]] += [[1.0, -2.0], [-1.5, 1.0], [0.5, 2.0]]

    ball = Throw()
    ball.seen.from_numpy(seen)
    ball.velocity[None], ball.drag[None] = [7.0, 7.0], 0.05
    options = {"loss": "soft_l1", "f_scale": 0.03, "xtol": 1e-12, "ftol": 1e-12, "gtol": 1e-12}
    bounds = ([-20.0, 0.0], [20.0, 1.0])
    result = least_squares(ball.fly, [ball.velocity, ball.drag], ball.residuals, bounds=bounds, **options)

    from scipy import optimize

    expected = optimize.least_squares(
        lambda p: (positions(p[:2], p[2]) - seen).reshape(-1),
        [7.0, 7.0, 0.05],
        bounds=([-20.0, -20.0, 0.0], [20.0, 20.0, 1.0]),
        **options,
    )
    compared.numbers("velocity and drag", result.x, expected.x, rtol=1e-5)
    near = np.abs(result.x - [*TRUE_VELOCITY, TRUE_DRAG]).max() < 0.05
    compared.holds("they are near the true ones", near, f"{result.njev} Jacobians, {result.nfev} flights")

    landing = jacobian(ball.fly, ["gravity", "dt"], ball.x)
    for name, J, value in zip(("gravity", "dt"), landing, (gravity, dt), strict=True):
        h = 1e-6 * value
        ends = [positions(result.x[:2], result.x[2], **{name: value + s * h})[-1] for s in (1, -1)]
        compared.numbers(f"d landing / d {name}", J, (ends[0] - ends[1]) / (2 * h), rtol=1e-5)
    if (figure := plotting.new_figure(7, 4)) is not None:
        axes = figure.subplots()
        flights = {"fitted": (result.x, plotting.BLUE, "-"), "start of the fit": ([7.0, 7.0, 0.05], plotting.GREY, ":")}
        for name, (p, color, style) in flights.items():
            axes.plot(*positions(np.array(p[:2]), p[2]).T, style, color=color, label=name)
        axes.plot(*seen.T, "o", color=plotting.ORANGE, markersize=4, label="seen; three of them wrong")
        axes.set(xlabel="distance (m)", ylabel="height (m)", title="A thrown ball with drag")
        axes.legend(fontsize=9, loc="lower left")
        plotting.save(figure, output)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
