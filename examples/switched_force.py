"""A force that is switched on at a place (a Heaviside force): its path by speed, place and size.

The particle flies freely up to the place and is slowed down behind it.  The step in which it crosses the place is cut
there, so autodiff is exact.  A simulation that looks at the place once a step has the derivative 0 with respect to it.

    python examples/switched_force.py [--output switched_force.png]

The picture needs ``python -m pip install '.[plot]'``; the figures are printed without it.
"""

import sys
from collections.abc import Sequence

import numpy as np
import plotting
import taichi as ti
from compare import Comparison, complex_steps, errors_of_columns, percents

from taichi_ext import Jacobian

STEPS, DT = 150, 0.02
PARAMETERS = ("speed", "place", "force")
VALUES = np.array([1.3, 1.0, 0.4])  # the mass is 1
EXACT, LATE = "switched on within a step", "switched on at the start of a step"
TIMES = DT * np.arange(1, STEPS + 1)


@ti.data_oriented
class Particle:
    """The positions of the particle at the end of each step."""

    def __init__(self) -> None:
        self.p = ti.field(ti.f64, shape=len(VALUES))
        self.x = ti.field(ti.f64, shape=STEPS)
        self.p.from_numpy(VALUES)

    @ti.kernel
    def fly(self, is_exact: ti.template()):
        for _ in range(1):
            x = 0.0
            v = self.p[0]
            for n in range(STEPS):
                left = DT
                if ti.static(is_exact) and x < self.p[1] and x + v * left > self.p[1]:
                    left -= (self.p[1] - x) / v  # behind the place
                    x = self.p[1]
                force = -self.p[2] if x >= self.p[1] else 0.0
                x += v * left + 0.5 * force * left**2
                v += force * left
                self.x[n] = x


def position(time: float, speed: complex, place: complex, force: complex) -> complex:
    """The position at a time, in closed form."""
    behind = time - place / speed
    return speed * time if behind.real < 0 else speed * time - 0.5 * force * behind**2


def main(arguments: Sequence[str] | None = None) -> int:
    """Derivatives in both ways, compared with the closed form."""
    output = plotting.parse(plotting.parser(__doc__.splitlines()[0], "switched_force.png"), arguments).output
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"A force that is switched on at a place, {STEPS} steps, by {', '.join(PARAMETERS)}")
    particle, expected, J = Particle(), complex_steps(position, TIMES, VALUES), {}
    for name, is_exact in ((LATE, False), (EXACT, True)):
        J[name] = Jacobian(particle.fly, particle.p, particle.x, args=(is_exact,))()
    way = [position(t, *VALUES).real for t in TIMES]
    compared.numbers("position at all times", particle.x.to_numpy(), way, atol=1e-9)
    compared.numbers("its derivatives", J[EXACT], expected, rtol=1e-9, atol=1e-9)
    off = errors_of_columns(J[LATE], expected)
    compared.holds("not if the place is looked at once a step", off.max() > 0.5, f"off by {percents(off)}")
    title = "A particle that is slowed down behind a place"
    derivatives = {name: J[name][:, 1] for name in (EXACT, LATE)}
    plotting.draw_motion(output, TIMES, np.array(way), derivatives, title, ["position", "d position / d place"])
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
