"""Fields placed by hand, filled early, and overwritten: three kernels that move particles and measure their mean.

``x[p] += v``, ``x_avg += x[p] / n``, ``loss = |x_avg - target|`` with fields that are placed in ``ti.root`` by hand,
``v`` assigned before anything else is placed, and no ``needs_grad``, ``lazy_grad`` or ``.grad`` anywhere.

    python examples/placed_fields.py --output placed_fields.png
"""

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotting
import taichi as ti
from compare import Comparison

from taichi_ext import DerivativeWarning, value_and_jacobian

VELOCITY, TARGET, PARTICLES = [2.0, 1.0, 3.0], [0.5, 0.5, 0.5], 2
EXPECTED_LOSS = 2.958040
EXPECTED_GRADIENT = [0.507093, 0.169031, 0.845154]


@ti.data_oriented
class Particles:
    """Particles that share one velocity."""

    def __init__(self, dtype: Any = ti.f64) -> None:
        self.n = PARTICLES
        self.v = ti.Vector.field(3, dtype)
        ti.root.place(self.v)
        self.v[None] = VELOCITY  # assigned before the other fields exist
        self.x = ti.Vector.field(3, dtype)
        self.x_avg = ti.Vector.field(3, dtype)
        self.loss = ti.field(dtype)
        ti.root.dense(ti.i, self.n).place(self.x)
        ti.root.place(self.x_avg, self.loss)

    @ti.kernel
    def move(self):
        for p in self.x:
            self.x[p] += self.v[None]

    @ti.kernel
    def average(self):
        for p in self.x:
            self.x_avg[None] += self.x[p] / self.n

    @ti.kernel
    def measure(self):
        self.loss[None] = (self.x_avg[None] - ti.Vector(TARGET)).norm()

    def run(self) -> None:
        self.move()
        self.average()
        self.measure()


@ti.data_oriented
class OwnVelocities(Particles):
    """The same with a velocity per particle, which the driver sets by a kernel before it is used."""

    def __init__(self, dtype: Any = ti.f64) -> None:
        self.n = PARTICLES
        self.x, self.v = ti.Vector.field(3, dtype), ti.Vector.field(3, dtype)
        self.x_avg, self.loss = ti.Vector.field(3, dtype), ti.field(dtype)
        ti.root.dense(ti.i, self.n).place(self.x, self.v)
        ti.root.place(self.x_avg, self.loss)

    @ti.kernel
    def set_velocities(self):
        for p in self.v:
            self.v[p] = ti.Vector(VELOCITY)

    @ti.kernel
    def move(self):
        for p in self.x:
            self.x[p] += self.v[p]

    def run(self) -> None:
        self.set_velocities()
        super().run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Both programs, compared with the expected numbers."""
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "placed_fields.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison("Particles on fields placed by hand")
    program = Particles()
    values, J = value_and_jacobian(program.run, program.v, {"loss": program.loss, "x_avg": program.x_avg})
    compared.numbers("loss", values["loss"], EXPECTED_LOSS, rtol=1e-6)
    compared.numbers("d loss / d v", J["loss"], EXPECTED_GRADIENT, rtol=2e-6)
    compared.numbers("d x_avg / d v", J["x_avg"], np.eye(3), rtol=1e-12)
    if (figure := plotting.new_figure(6, 2.8)) is not None:
        left, right = figure.subplots(1, 2)
        right.bar(["x", "y", "z"], J["loss"], color=plotting.BLUE)
        right.set_title("∂loss / ∂v", fontsize=10)
        right.set_xlabel("entry of v")
        drawn = plotting.show_matrix(left, J["x_avg"], "∂x_avg / ∂v")
        left.set(xlabel="entry of v", ylabel="entry of x_avg", xticks=range(3), yticks=range(3))
        left.set(xticklabels="xyz", yticklabels="xyz")
        plotting.color_bar(figure, drawn, left, "derivative")
        plotting.save(figure, options.output)

    program = OwnVelocities()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values, gradient = value_and_jacobian(program.run, program.v, program.loss)
    compared.numbers("loss, velocities set by the driver", values, EXPECTED_LOSS, rtol=1e-6)
    compared.numbers("d loss / d (v before it was overwritten)", gradient, np.zeros((PARTICLES, 3)))
    said = [str(w.message) for w in caught if issubclass(w.category, DerivativeWarning)]
    compared.holds("a warning says that v is overwritten", any("overwritten" in text for text in said), " ".join(said))
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
