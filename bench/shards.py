"""Least squares over shards whose workers are killed, and what a second worker gains.

python bench/shards.py            20 iterations of examples/sharded_calibration.py, a worker killed in each
python bench/shards.py --times    four large shards on one worker and on two, and the memory of this process

Wall times are those of an idle machine. CPU times tell on a busy one what a second worker gains: that of the worker
which has more, and of this process, over that of one worker.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import taichi as ti

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import sharded_calibration

from taichi_ext import least_squares, normal_equations

ITERATIONS = 20
ROWS, PARAMS = 400_000, 40  # of a large shard


@ti.kernel
def waves(p: ti.types.ndarray(), y: ti.types.ndarray(), r: ti.types.ndarray()):
    for i in r:
        total = -y[i]
        for k in range(PARAMS):
            total += p[k] * ti.sin(1e-5 * (k + 1) * i + p[k])
        r[i] = total


def large(number: int, rows: int = ROWS) -> tuple[Any, ...]:
    """A shard that takes about a second."""
    p, y, r = np.zeros(PARAMS), np.random.default_rng(number).standard_normal(rows), np.zeros(rows)
    return waves, p, r, (p, y, r)


def pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def killed_workers() -> bool:
    """Whether the digits are those of a serial run."""
    shards = [(image,) for image in range(sharded_calibration.IMAGES)]
    options = {"start": sharded_calibration.start(), "format": "csr", "init": {"default_fp": ti.f64}}
    # a loss of residuals smaller than the noise, which takes so many iterations
    options |= {"ftol": 0.0, "xtol": 0.0, "gtol": 0.0, "max_iterations": ITERATIONS, "loss": "cauchy", "f_scale": 0.02}
    made: list[ProcessPoolExecutor] = []
    killed: list[int] = []

    def make() -> ProcessPoolExecutor:
        made.append(pool(2))
        return made[-1]

    def kill(line: Any) -> None:
        if line.number < ITERATIONS:
            killed.append(made[-1].submit(os.getpid).result())
            os.kill(killed[-1], signal.SIGKILL)

    found = least_squares(sharded_calibration.view, shards=shards, executor=make, callback=kill, **options)
    here = least_squares(sharded_calibration.view, shards=shards, **options)
    is_same = [a.cost for a in found.history] == [b.cost for b in here.history] and np.array_equal(found.x, here.x)
    print(
        f"{len(found.history) - 1} iterations, {len(set(killed))} workers killed, the same to the last bit: {is_same}"
    )
    return is_same


def cpu_seconds(pool: ProcessPoolExecutor) -> np.ndarray:
    """Of each worker, on Linux."""
    texts = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pool._processes]
    return np.array([int(t[11]) + int(t[12]) for t in texts]) / os.sysconf("SC_CLK_TCK")


def times() -> None:
    """Seconds of the normal equations of four shards, medians of five."""
    shards, at = [(k,) for k in range(4)], np.linspace(0.1, 1.0, PARAMS)
    init = {"cpu_max_num_threads": 1}
    found: dict[int, np.ndarray] = {}
    for workers in (1, 2):
        with pool(workers) as executor:
            seconds = []
            for _ in range(6):  # the first call makes the shards
                began = [time.perf_counter(), time.process_time()]
                cpu = cpu_seconds(executor) if seconds else 0.0
                normal_equations(large, shards=shards, at=at, executor=executor, init=init)
                driver = time.process_time() - began[1]
                seconds.append([time.perf_counter() - began[0], max(cpu_seconds(executor) - cpu) + driver, driver])
        found[workers] = np.median(seconds[1:], axis=0)
    for n, what in enumerate(("wall", "CPU")):
        one, two = found[1][n], found[2][n]
        print(f"{what}: one worker {one:.2f} s, two {two:.2f} s: {one / two:.2f} times as fast")
    print(f"CPU of this process: {1e3 * found[2][2]:.1f} ms")


def memory() -> None:
    """The largest memory of this process for few and for many shards, by Python's count, arrays included."""
    at = np.linspace(0.1, 1.0, PARAMS)
    with pool(2) as executor:
        for count in (8, 8, 64, 512, 2048):
            shards = [(k, 100) for k in range(count)]
            tracemalloc.start()
            normal_equations(large, shards=shards, at=at, executor=executor)
            print(f"{count} shards: {tracemalloc.get_traced_memory()[1] / 1024:.0f} KiB at most")
            tracemalloc.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", action="store_true", help="what a second worker gains, and memory")
    if parser.parse_args().times:
        times()
        memory()
        return 0
    return 0 if killed_workers() else 1


if __name__ == "__main__":
    raise SystemExit(main())
