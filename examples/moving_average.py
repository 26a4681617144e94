"""A recursion with a counter: the exponentially weighted moving average of a series, and its gradient.

``tape[i] = 0.5 tape[i - 1] + 0.5 data[i]``: each entry is read back right after it is written, and in the first kernel
the index i comes from an integer field that the kernel itself increments.  Taichi's reverse mode gives zeros there
(taichi-dev/taichi issue 2425).

    python examples/moving_average.py --output moving_average.png
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotting
import taichi as ti
from compare import Comparison

from taichi_ext import value_and_jacobian

DATA = np.random.RandomState(0).standard_normal((1, 2))  # one series of two values
EXPECTED_LOSS = 1.170951
EXPECTED_GRADIENT = [[1.082105, 1.082105]]


@ti.data_oriented
class MovingAverage:
    """The fields and kernels for series in the rows of ``data``; the loss is the sum of the squared last averages."""

    def __init__(self, data: np.ndarray, dtype: Any = ti.f64) -> None:
        self.rows, self.length = data.shape
        self.data = ti.field(dtype, shape=data.shape)
        self.tape = ti.field(dtype, shape=data.shape)
        self.loss = ti.field(dtype, shape=())
        self.counter = ti.field(ti.i32, shape=self.rows)
        self.order = ti.field(ti.i32, shape=self.length)
        self.data.from_numpy(data.astype(np.float32 if dtype == ti.f32 else np.float64))
        self.order.from_numpy(np.arange(self.length, dtype=np.int32))

    @ti.kernel
    def average_by_counter(self):
        """The index is what the counter of the row says; the kernel moves it on."""
        for row in range(self.rows):
            self.tape[row, 0] = self.data[row, 0]
            self.counter[row] = 1
            for _ in range(1, self.length):
                i = self.counter[row]
                self.tape[row, i] = 0.5 * self.tape[row, i - 1] + 0.5 * self.data[row, i]
                self.counter[row] += 1

    @ti.kernel
    def average_by_order(self):
        """The index is read from a field that stays as it is."""
        for row in range(self.rows):
            self.tape[row, 0] = self.data[row, 0]
            for n in range(1, self.length):
                i = self.order[n]
                self.tape[row, i] = 0.5 * self.tape[row, i - 1] + 0.5 * self.data[row, i]

    @ti.kernel
    def sum_of_squares(self):
        self.loss[None] = 0.0
        for row in range(self.rows):
            self.loss[None] += self.tape[row, self.length - 1] ** 2

    def run_by_counter(self) -> None:
        self.average_by_counter()
        self.sum_of_squares()

    def run_by_order(self) -> None:
        self.average_by_order()
        self.sum_of_squares()


def main(arguments: Sequence[str] | None = None) -> int:
    """Both kernels, compared with the expected loss and gradient."""
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "moving_average.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison("Exponentially weighted moving average, loss = last average squared")
    for name in ("run_by_counter", "run_by_order"):
        program = MovingAverage(DATA)
        loss, gradient = value_and_jacobian(getattr(program, name), program.data, program.loss)
        compared.numbers(f"{name}: loss", loss, EXPECTED_LOSS, rtol=1e-6)
        compared.numbers(f"{name}: d loss / d data", gradient, EXPECTED_GRADIENT, rtol=1e-6)
    if (figure := plotting.new_figure(8, 3.2)) is not None:
        series = np.cumsum(np.random.RandomState(1).standard_normal((1, 40)), axis=1)
        longer = MovingAverage(series)
        averages, J = value_and_jacobian(longer.average_by_order, longer.data, longer.tape)
        left, right = figure.subplots(1, 2)
        left.plot(series[0], "o", color=plotting.GREY, markersize=3, label="series")
        left.plot(averages[0], color=plotting.BLUE, label="moving average")
        left.set(xlabel="entry", ylabel="value")
        left.legend(fontsize=9)
        drawn = plotting.show_matrix(right, J[0, :, 0, :], "d average / d series")
        right.set(xlabel="entry of the series", ylabel="entry of the average")
        plotting.color_bar(figure, drawn, right, "weight")
        plotting.save(figure, options.output)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
