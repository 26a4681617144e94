"""A map of wave speeds from recordings at the edge: gradients through 300 time steps that overwrite their state.

A pulse runs through a square with a hidden disc in which waves are faster.  Receivers along two sides record it.  The
speeds of all 2,304 cells are found from the recordings by L-BFGS, with the gradient in reverse mode.  ``--memory``
limits what is kept for the way back: the gradient is the same, and takes longer.

    python examples/wave_speeds.py --output wave_speeds.png
    python examples/wave_speeds.py --memory 1000000
"""

import sys
import time
from collections.abc import Sequence

import numpy as np
import plotting
import taichi as ti
from compare import Comparison
from scipy.optimize import minimize

from taichi_ext import value_and_gradient

N, STEPS = 48, 300
COURANT = 0.4  # cells that a wave of speed 1 crosses in a step
ITERATIONS = 15


@ti.data_oriented
class Medium:
    """Waves in N x N cells; ``speeds`` are those relative to the surroundings."""

    def __init__(self) -> None:
        self.speeds = ti.field(ti.f64, shape=(N, N))
        self.waves = [ti.field(ti.f64, shape=(N, N)) for _ in range(3)]
        self.recorded = ti.field(ti.f64, shape=(STEPS, 2 * N))
        self.data = ti.field(ti.f64, shape=(STEPS, 2 * N))
        self.misfit = ti.field(ti.f64, shape=())

    @ti.kernel
    def step(self, new: ti.template(), now: ti.template(), old: ti.template(), t: int):
        for i, j in new:
            last = N - 1
            around = now[max(i - 1, 0), j] + now[min(i + 1, last), j] + now[i, max(j - 1, 0)] + now[i, min(j + 1, last)]
            new[i, j] = 2 * now[i, j] - old[i, j] + (COURANT * self.speeds[i, j]) ** 2 * (around - 4 * now[i, j])
        for k in range(N):
            self.recorded[t, k] = now[k, N - 2]
            self.recorded[t, N + k] = now[N - 2, k]

    @ti.kernel
    def pulse(self, now: ti.template(), old: ti.template()):
        for i, j in now:
            now[i, j] = ti.exp(-((i - 6.0) ** 2 + (j - 6.0) ** 2) / 6)
            old[i, j] = now[i, j]

    @ti.kernel
    def compare(self):
        for t, k in self.recorded:
            self.misfit[None] += 0.5 * (self.recorded[t, k] - self.data[t, k]) ** 2

    def run(self) -> None:
        """The recordings, and how far they are from the data."""
        old, now, new = self.waves
        self.pulse(now, old)
        for t in range(STEPS):
            self.step(new, now, old, t)
            old, now, new = now, new, old
        self.misfit[None] = 0.0
        self.compare()

    def gradient(self, speeds: np.ndarray, max_memory: int | None = None) -> tuple[float, np.ndarray]:
        """The misfit for these speeds, and its gradient."""
        self.speeds.from_numpy(speeds.reshape(N, N))
        value, found = value_and_gradient(self.run, self.speeds, self.misfit, max_memory=max_memory)
        return float(value), np.asarray(found, np.float64).reshape(-1)


def hidden() -> np.ndarray:
    i, j = np.mgrid[:N, :N]
    return 1 + 0.25 * np.exp(-((((i - 28) ** 2 + (j - 26) ** 2) / 80) ** 2))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = plotting.parser(str(__doc__).split("\n", 1)[0], "wave_speeds.png")
    parser.add_argument("--memory", type=int, default=None, help="bytes kept for the way back")
    options = plotting.parse(parser, arguments)
    ti.init(arch=ti.cpu, log_level=ti.ERROR)
    medium, comparison = Medium(), Comparison("Wave speeds from recordings")
    medium.speeds.from_numpy(hidden())
    medium.run()
    medium.data.copy_from(medium.recorded)

    start = np.ones(N * N)
    medium.gradient(start)  # which compiles
    times = [time.perf_counter()]
    whole = medium.gradient(start)[1]
    times.append(time.perf_counter())
    short = medium.gradient(start, 800_000)[1]
    times.append(time.perf_counter())
    print(f"gradient by {N * N} speeds: {times[1] - times[0]:.3f} s, in 0.8 MB {times[2] - times[1]:.3f} s")
    comparison.numbers("gradient in little memory", short, whole, rtol=1e-9, atol=1e-12)
    direction = np.random.default_rng(0).standard_normal(N * N)
    values = [medium.gradient(start + sign * 1e-6 * direction)[0] for sign in (1, -1)]
    comparison.numbers("along a direction, by differences", whole @ direction, (values[0] - values[1]) / 2e-6)

    first = medium.gradient(start)[0]
    fit = minimize(medium.gradient, start, (options.memory,), "L-BFGS-B", jac=True, options={"maxiter": ITERATIONS})
    comparison.holds("a fit", fit.fun < 0.1 * first, f"misfit {first:.3f} -> {fit.fun:.4f} in {fit.nit} iterations")
    figure = plotting.new_figure(8, 3.2)
    if figure is not None:
        for n, (title, values) in enumerate((("hidden", hidden()), ("found", fit.x.reshape(N, N)))):
            axes = figure.add_subplot(1, 2, n + 1)
            shown = axes.imshow(values, vmin=0.9, vmax=1.3, cmap="viridis")
            axes.set_title(f"{title} speeds")
            figure.colorbar(shown, ax=axes)
        figure.savefig(options.output, dpi=110)
    return comparison.exit_code


if __name__ == "__main__":
    sys.exit(main())
