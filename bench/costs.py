"""Costs of a Jacobian other than its arithmetic: growth with P, memory, launch overhead, first calls.

python bench/costs.py                 everything, about two minutes
python bench/costs.py --cpu-time      CPU time on one core, for a machine that is in use
"""

import argparse
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import taichi as ti
from programs import make_soft_spheres
from report import describe, markdown_table, write_report
from timing import time_first, time_in_turn

from taichi_ext import Jacobian, jacobian, vjp

SETTINGS = {"offline_cache": False, "log_level": ti.ERROR}
MEBIBYTE = 2**20


def growth(counts=(4, 8, 16, 32, 64), clock=time.perf_counter, seconds=2.0, **size) -> tuple[list[tuple], float]:
    """Time of J over that of the primal for N soft spheres: (P, primal, J) in seconds, and the exponent against P."""
    rows = []
    for count in counts:
        program = make_soft_spheres(count, **size)
        plan = Jacobian(program.kernel, program.params, program.outputs)
        out = np.empty(program.jacobian_shape, np.float32)
        calls = {"primal": partial(_run_and_wait, program.kernel), "jacobian": partial(plan, out=out)}
        first = {name: time_first(call, clock) for name, call in calls.items()}
        timings = time_in_turn(calls, first, seconds, clock)
        rows.append((program.point.size, timings["primal"].median, timings["jacobian"].median))
    columns, primal, jac = np.log(np.array(rows)).T
    return rows, float(np.polyfit(columns, jac - primal, 1)[0])


def overhead(calls: int = 1000, clock=time.perf_counter) -> dict[str, float]:
    """Seconds per call on a scalar field of 4 by 4 parameters: the launch alone, as there is nothing to compute."""
    x, y = ti.field(ti.f32, shape=4), ti.field(ti.f32, shape=4)

    @ti.kernel
    def square():
        for i in y:
            y[i] = x[i] * x[i]

    @ti.kernel
    def square_jacobian(jac: ti.types.ndarray(dtype=ti.f32, ndim=2)):
        for i in y:
            y[i] = x[i] * x[i]
            for k in range(4):
                jac[i, k] = 0.0
            jac[i, i] = 2.0 * x[i]

    x.from_numpy(np.arange(4, dtype=np.float32))
    plan = Jacobian(square, x, y)
    out = np.empty((4, 4), np.float32)
    methods = {
        "primal": partial(_run_and_wait, square),
        "hand-derived": partial(square_jacobian, out),
        "prepared, out=": partial(plan, out=out),
        "jacobian, out=": partial(jacobian, square, x, y, out=out),
    }
    for call in methods.values():
        call()
    np.testing.assert_allclose(out, np.diag([0.0, 2.0, 4.0, 6.0]))
    seconds = {name: [] for name in methods}
    for _ in range(calls):
        for name, call in methods.items():
            seconds[name].append(time_first(call, clock))
    return {name: median(values) for name, values in seconds.items()}


def stores(count: int = 20_000) -> dict[str, float]:
    """How many times as long as alone Python's loop ``z[i] = y[i]`` takes in a pipeline, in CPU time."""
    x, y, z, loss = (ti.field(ti.f32, shape=n) for n in (2, count, count, 1))
    spent: list[float] = []

    @ti.kernel
    def spread():
        for i in y:
            y[i] = x[i % 2] * i

    @ti.kernel
    def add_up():
        for i in z:
            loss[0] += z[i]

    def pipeline():
        spread()
        start = time.process_time()
        for i in range(count):
            z[i] = y[i]
        spent.append(time.process_time() - start)
        add_up()

    found = {}
    for _ in range(3):
        pipeline()
    plain = min(spent)
    for name, call in (
        ("jacobian", lambda: jacobian(pipeline, x, loss, mode="forward")),
        ("vjp", lambda: vjp(pipeline, x, loss, np.ones(1))),
    ):
        for which in ("first", "later"):
            spent.clear()
            call()
            found[f"{name}, {which} call"] = spent[0] / plain  # a first call may run the pipeline again
    return found


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def print_memory(count: int) -> None:
    """Peak of a process that runs the primal and holds J, then that of the same process computing J."""
    ti.init(arch=ti.cpu, **SETTINGS)
    program = make_soft_spheres(count)
    _run_and_wait(program.kernel)
    out = np.ones(program.jacobian_shape, np.float32)
    before = peak_memory()
    Jacobian(program.kernel, program.params, program.outputs)(out=out)
    print(before, peak_memory(), out.nbytes)


def memory(count: int = 64) -> tuple[int, int, int]:
    """Bytes: peak with the primal and J's array, peak after J was computed, J itself; in a process of its own."""
    command = [sys.executable, __file__, "--memory-of", str(count)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    before, after, size = (int(word) for word in lines[-1].split())
    return before, after, size


def _run_and_wait(kernel) -> None:
    kernel()
    ti.sync()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of the process on one core")
    parser.add_argument("--markdown", type=Path, help="put the figures in this file")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.memory_of:
        print_memory(options.memory_of)
        return
    settings, clock, clock_name = dict(SETTINGS), time.perf_counter, "wall time"
    if options.cpu_time:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        settings["cpu_max_num_threads"] = 1
        clock, clock_name = time.process_time, "CPU time on one core"
    ti.init(arch=ti.cpu, **settings)
    text = report(clock)
    print(text)
    if options.markdown:
        write_report(options.markdown, "costs", f"{describe(clock_name)}\n\n{text}")


def report(clock) -> str:
    """All costs as Markdown."""
    rows, exponent = growth(clock=clock)
    cells = [[str(p), f"{primal * 1e3:.3g}", f"{jac * 1e3:.3g}", f"{jac / primal:.2f}"] for p, primal, jac in rows]
    launches = [[name, f"{seconds * 1e6:.0f}"] for name, seconds in overhead(clock=clock).items()]
    before, after, size = (number / MEBIBYTE for number in memory())
    return "\n\n".join(
        [
            "Soft spheres, 320 x 240 pixels:",
            markdown_table(["P", "primal, ms", "`taichi_ext`, ms", "ratio"], cells),
            f"A fit gives a ratio in proportion to P^{exponent:.2f}{': it does not grow' if exponent < 0.05 else ''}.",
            "Launch of a kernel with 4 parameters and 4 outputs:",
            markdown_table(["", "µs"], launches),
            "20,000 stores of Python in a pipeline, `z[i] = y[i]`, times as long as alone:",
            markdown_table(["", "ratio"], [[name, f"{ratio:.1f}"] for name, ratio in stores().items()]),
            f"Peak memory at P = 256, J of {size:.0f} MiB: {before:.1f} MiB for a process that ran the primal and "
            f"holds an array for J, {after:.1f} MiB\nafter it computed J.",
        ]
    )


if __name__ == "__main__":
    main()
