"""Least squares over shards whose workers are killed, and what a second worker gains.

python bench/shards.py            20 iterations of examples/sharded_calibration.py, a worker killed in each
python bench/shards.py --times    four large shards on one worker and on two: wall time, so on an idle machine
"""

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import time
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


def large(number: int) -> tuple[Any, ...]:
    """A shard that takes about a second."""
    p, y, r = np.zeros(PARAMS), np.random.default_rng(number).standard_normal(ROWS), np.zeros(ROWS)
    return waves, p, r, (p, y, r)


def pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def killed_workers() -> bool:
    """Whether the digits are those of a serial run."""
    shards = [(image,) for image in range(sharded_calibration.IMAGES)]
    options = {"start": sharded_calibration.start(), "format": "csr", "init": {"default_fp": ti.f64}}
    # a loss of residuals smaller than the noise, which takes so many iterations
    options |= {"ftol": 0.0, "xtol": 0.0, "gtol": 0.0, "max_nfev": ITERATIONS + 1, "loss": "cauchy", "f_scale": 0.02}
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


def times() -> None:
    """Seconds of the normal equations of four shards, each median of three."""
    shards, at = [(k,) for k in range(4)], np.linspace(0.1, 1.0, PARAMS)
    found: dict[int, float] = {}
    for workers in (1, 2):
        with pool(workers) as executor:
            seconds = []
            for _ in range(4):  # the first call makes the shards
                began = time.perf_counter()
                normal_equations(large, shards=shards, at=at, executor=executor)
                seconds.append(time.perf_counter() - began)
        found[workers] = statistics.median(seconds[1:])
    print(f"one worker {found[1]:.2f} s, two {found[2]:.2f} s: {found[1] / found[2]:.2f} times as fast")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", action="store_true", help="what a second worker gains")
    if parser.parse_args().times:
        times()
        return 0
    return 0 if killed_workers() else 1


if __name__ == "__main__":
    raise SystemExit(main())
