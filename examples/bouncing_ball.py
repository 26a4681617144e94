"""A ball that bounces: its height with respect to the height that it fell from, and to how well it bounces.

The time of each impact is computed within the step, and the rest of the step runs behind it.  So autodiff is exact.
A simulation that turns the speed around at the end of the step does not know that an impact from a greater height
comes later.

    python examples/bouncing_ball.py [--output bouncing_ball.png]

The picture needs ``python -m pip install '.[plot]'``; the figures are printed without it.
"""

import sys
from collections.abc import Sequence

import numpy as np
import plotting
import taichi as ti
from compare import Comparison, complex_steps, errors_of_columns, percents

from taichi_ext import Jacobian

STEPS, DT, GRAVITY = 170, 0.01, 9.81
PARAMETERS = ("height", "bounce")
VALUES = np.array([1.0, 0.8])
EXACT, LATE = "impacts within a step", "impacts at the end of a step"
TIMES = DT * np.arange(1, STEPS + 1)


@ti.data_oriented
class Ball:
    """The height of the ball at the end of each step."""

    def __init__(self) -> None:
        self.p = ti.field(ti.f64, shape=len(VALUES))
        self.y = ti.field(ti.f64, shape=STEPS)
        self.p.from_numpy(VALUES)

    @ti.kernel
    def fall(self, is_exact: ti.template()):
        for _ in range(1):
            y = self.p[0]
            v = 0.0
            for n in range(STEPS):
                left = DT
                if y + v * left - 0.5 * GRAVITY * left**2 < 0:
                    if ti.static(is_exact):
                        time = (v + ti.sqrt(v * v + 2 * GRAVITY * y)) / GRAVITY  # y + v t - g t^2 / 2 = 0
                        v = -self.p[1] * (v - GRAVITY * time)
                        y = 0.0
                        left -= time
                    else:
                        v = -self.p[1] * v
                y += v * left - 0.5 * GRAVITY * left**2
                v -= GRAVITY * left
                self.y[n] = y


def height(time: float, start: complex, bounce: complex) -> complex:
    """The height at a time, in closed form."""
    speed = np.sqrt(2 * GRAVITY * start)
    impact = speed / GRAVITY
    if time < impact.real:
        return start - 0.5 * GRAVITY * time**2
    speed *= bounce
    while time > (impact + 2 * speed / GRAVITY).real:
        impact += 2 * speed / GRAVITY
        speed *= bounce
    return speed * (time - impact) - 0.5 * GRAVITY * (time - impact) ** 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Derivatives in both ways, compared with the closed form."""
    output = plotting.parse(plotting.parser(__doc__.splitlines()[0], "bouncing_ball.png"), arguments).output
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"A ball that bounces, {STEPS} steps, by {' and '.join(PARAMETERS)}")
    ball, expected = Ball(), complex_steps(height, TIMES, VALUES)
    J = {
        name: Jacobian(ball.fall, ball.p, ball.y, args=(is_exact,))()
        for name, is_exact in ((LATE, False), (EXACT, True))
    }
    compared.numbers("height at all times", ball.y.to_numpy(), [height(t, *VALUES).real for t in TIMES], atol=1e-9)
    compared.numbers("its derivatives", J[EXACT], expected, rtol=1e-9, atol=1e-7)
    off = errors_of_columns(J[LATE], expected)
    compared.holds("not if the ball turns at the end of a step", off.max() > 0.5, f"off by {percents(off)}")
    derivatives = {name: J[name][:, 0] for name in (EXACT, LATE)}
    ylabels = ["height", "d height / d first height"]
    plotting.draw_motion(output, TIMES, ball.y.to_numpy(), derivatives, "A ball that bounces", ylabels)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
