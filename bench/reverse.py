"""Gradients of losses, beside the plain run: CPU time of the process, both in one run.

python bench/reverse.py                every program
python bench/reverse.py march MPM      the programs of these names
python bench/reverse.py --memory 19  with at most this many MiB kept for the way back
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import taichi as ti
from report import describe, markdown_table
from reverse_programs import PROGRAMS, LossProgram
from timing import time_first, time_in_turn

from taichi_ext import value_and_gradient

TOLERANCE = 0.02  # of a difference along a random direction, in float32


def gradient_of(program: LossProgram, max_memory: float | None) -> tuple[float, list[np.ndarray]]:
    """The loss and its gradient."""
    program.reset()
    return value_and_gradient(program.run, program.params, program.loss, max_memory=max_memory)


def plain(program: LossProgram) -> None:
    program.reset()
    program.run()
    ti.sync()


def check(program: LossProgram, gradient: list[np.ndarray]) -> None:
    """Raise where the gradient along its own direction is not a difference of losses."""
    norm = float(np.sqrt(sum(float(np.vdot(g, g)) for g in gradient)))
    before = [p.to_numpy() for p in program.params]
    size = float(np.sqrt(sum(float(np.vdot(b, b)) for b in before)))
    step, losses = 1e-2 * size / norm, []
    for sign in (1, -1):
        for p, b, g in zip(program.params, before, gradient, strict=True):
            p.from_numpy((b + sign * step * g).astype(b.dtype))
        plain(program)
        losses.append(float(program.loss[None]))
    for p, b in zip(program.params, before, strict=True):
        p.from_numpy(b)
    np.testing.assert_allclose((losses[0] - losses[1]) / (2 * step), norm**2, rtol=TOLERANCE)


def measure(name: str, max_memory: float | None, seconds: float, clock: Callable[[], float]) -> list[str]:
    """One line of the table."""
    program = PROGRAMS[name]()
    calls = {"plain": partial(plain, program), "gradient": partial(gradient_of, program, max_memory)}
    first = {n: time_first(call, clock) for n, call in calls.items()}
    check(program, gradient_of(program, max_memory)[1])
    timings = time_in_turn(calls, first, seconds, clock)
    a, b = (timings[n].median for n in calls)
    return [name, f"{a * 1e3:.2f}", f"{b * 1e3:.2f}", f"{b / a:.2f}", *(f"{first[n]:.2f}" for n in calls)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(PROGRAMS), help="default: all")
    parser.add_argument("--memory", type=float, help="MiB that a gradient may keep")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each method")
    parser.add_argument("--threads", type=int, default=2, help="of Taichi")
    options = parser.parse_args()
    rows = []
    for name in options.names:
        ti.init(arch=ti.cpu, offline_cache=False, log_level=ti.ERROR, cpu_max_num_threads=options.threads)
        memory = None if options.memory is None else options.memory * 2**20
        rows.append(measure(name, memory, options.seconds, time.process_time))
        print(" ".join(rows[-1]), flush=True)
    print(describe("CPU time of the process, ms; first calls in s", "float32"))
    print(markdown_table(["program", "plain", "gradient", "ratio", "first plain", "first gradient"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
