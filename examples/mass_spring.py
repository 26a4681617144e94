"""A mass-spring net, stepped 1000 times in place: where it ends up, with respect to 6 parameters.

The net hangs from two corners and swings.  Positions and velocities are overwritten at every step; there is no tape, so
the memory for the derivative does not depend on the number of steps.  The parameters are stiffness, damping, mass, the
two components of gravity, and the springs' rest length.

    python examples/mass_spring.py --output mass_spring.png
    python examples/mass_spring.py --steps 5000
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotting
import taichi as ti
from compare import Comparison

from taichi_ext import check_jacobian, jacobian

NX, NY = 12, 8
DT = 2e-3
STEPS = 1000
PARAMETERS = ("stiffness", "damping", "mass", "gravity x", "gravity y", "rest length")
START = [60.0, 0.6, 0.2, 0.4, -9.8, 0.95]


@ti.data_oriented
class MassSpringNet:
    """A net of NX x NY masses."""

    def __init__(self, dtype: Any = ti.f64) -> None:
        self.p = ti.field(dtype, shape=len(PARAMETERS))
        self.x = ti.Vector.field(2, dtype, shape=(NX, NY))
        self.v = ti.Vector.field(2, dtype, shape=(NX, NY))
        self.np_dtype = np.float32 if dtype == ti.f32 else np.float64
        self.p.from_numpy(np.array(START, self.np_dtype))
        self.steps = STEPS

    @ti.kernel
    def reset(self):
        for i, j in self.x:
            self.x[i, j] = ti.Vector([1.0 * i, 1.0 * j])
            self.v[i, j] = ti.Vector([0.0, 0.0])

    @ti.kernel
    def push(self):
        """Velocities from the forces of the springs, friction and gravity."""
        for i, j in self.x:
            force = self.p[2] * ti.Vector([self.p[3], self.p[4]])
            for a, b in ti.ndrange((i - 1, i + 2), (j - 1, j + 2)):
                if 0 <= a < NX and 0 <= b < NY and (a != i or b != j):
                    d = self.x[a, b] - self.x[i, j]
                    rest = self.p[5] * ti.sqrt(1.0 * ((a - i) ** 2 + (b - j) ** 2))
                    force += self.p[0] * (d.norm() - rest) * d.normalized()
            force -= self.p[1] * self.v[i, j]
            self.v[i, j] += DT * force / self.p[2]

    @ti.kernel
    def move(self):
        for i, j in self.x:
            if j == NY - 1 and (i == 0 or i == NX - 1):
                self.v[i, j] = ti.Vector([0.0, 0.0])
            self.x[i, j] += DT * self.v[i, j]

    def run(self) -> None:
        self.reset()
        for _ in range(self.steps):
            self.push()
            self.move()


def main(arguments: Sequence[str] | None = None) -> int:
    """The Jacobian of the final positions compared with differences of whole simulations."""
    parser = plotting.parser(__doc__.splitlines()[0], "mass_spring.png")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the simulation (default: %(default)s)")
    options = plotting.parse(parser, arguments)
    steps = options.steps
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"A net of {NX} x {NY} masses, {steps} steps in place, {len(PARAMETERS)} parameters")
    net = MassSpringNet()
    net.steps = steps
    J = jacobian(net.run, net.p, net.x)
    report = check_jacobian(net.run, net.p, net.x)
    compared.holds("J agrees with central differences of whole simulations", report, str(report))
    print("       how far the masses move at most, if a parameter grows by 1 %:")
    for name, value, by in zip(PARAMETERS, START, np.moveaxis(J, -1, 0), strict=True):
        print(f"       {name:<12}{0.01 * abs(value) * np.linalg.norm(by, axis=-1).max():>8.4f}")
    if (figure := plotting.new_figure(9, 5)) is not None:
        x = net.x.to_numpy()
        for k, axes in enumerate(figure.subplots(2, 3, sharex=True, sharey=True).flat):
            axes.plot(*x.reshape(-1, 2).T, ".", color=plotting.GREY, markersize=3)
            axes.quiver(*x.reshape(-1, 2).T, *J[..., k].reshape(-1, 2).T, color=plotting.BLUE, width=0.006)
            axes.set_title(f"∂x / ∂({PARAMETERS[k]})", fontsize=10)
            axes.margins(0.12)
            axes.set_aspect("equal")
        figure.supxlabel("x and y of the masses; arrows are scaled in each panel by itself", fontsize=9)
        plotting.save(figure, options.output)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
