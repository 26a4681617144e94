"""Many calls from many threads, many calls of one plan, many new kernels: all results are right, and memory stays.

    python tests/oracles/stress_calls.py                    # 8 threads x 1000 calls, 20000 calls, 3000 new kernels: some 15 minutes
    python tests/oracles/stress_calls.py threads --count 200
    python tests/oracles/stress_calls.py kernels --plain    # what new kernels cost in Taichi alone, without a Jacobian

Every result is compared with a closed form. The resident memory (of Linux) is read after a first part of the calls and at
the end, after a collection of garbage. The exit status is 1 if a result is wrong or memory grows by more than the bounds below.
"""

import argparse
import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import taichi as ti

from taichi_ext import Jacobian, jacobian, value_and_jacobian

A1 = ti.types.ndarray(ti.f64, ndim=1)
THREADS = 8
COUNTS = {"threads": 1000, "calls": 20000, "kernels": 3000}  # calls of each thread, calls, kernels
WARM_UP = 0.2  # the part of the calls before memory is read
PER_FIRST_CALL = 25  # of so many calls of a thread, one is the first call of a new kernel
MOST_PER_CALL = 100  # bytes
# bytes; Taichi keeps each kernel until its program ends: 114 kB of the plain one here, 156 kB of one that is written like
# the kernel with tangents; 5 kB are Python objects, as of the plain one
MOST_PER_KERNEL = 250_000


def resident() -> int:
    """Bytes of memory that this process has in use."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


@ti.kernel
def area(width: ti.f64, height: ti.f64) -> ti.f64:
    return width * width * height


@ti.kernel
def scaled(a: A1, factor: ti.f64, o: A1):
    for i in a:
        o[i] = factor * a[i] * a[0]


@ti.kernel
def square(a: A1, b: A1):
    for i in a:
        b[i] = a[i] * a[i]


def pipeline(a: np.ndarray, factor: float, c: np.ndarray) -> None:
    b = np.zeros_like(a)
    square(a, b)
    scaled(b, factor, c)


def new_kernel(x: Any, y: Any, factor: float) -> Any:
    """A kernel that Taichi has not compiled yet."""

    @ti.kernel
    def k():
        for i in x:
            y[i] = factor * x[i] ** 2

    return k


class Work:
    """The calls of one thread, each with arguments of its own."""

    def __init__(self, number: int, shared: Any) -> None:
        self.number = number
        self.shared = shared  # a prepared Jacobian of all threads
        self.x, self.y = ti.field(ti.f64, 3), ti.field(ti.f64, 3)

    def call(self, n: int) -> None:
        """The n-th call; raises an AssertionError where the result is not that of its arguments."""
        if n % PER_FIRST_CALL == self.number:
            self.first(1.0 + n)
            return
        kinds = (self.plan, self.prepared, self.arrays, self.fields, self.chain)
        kinds[(n + self.number) % len(kinds)](1.0 + self.number + n / 8)

    def plan(self, w: float) -> None:
        value, J = value_and_jacobian(area, ["width", "height"], args=(w, 5.0))
        np.testing.assert_allclose([value, *J], [5 * w * w, 10 * w, w * w])

    def prepared(self, w: float) -> None:
        np.testing.assert_allclose(self.shared(args=(w, 5.0)), [10 * w, w * w])
        np.testing.assert_allclose(self.shared.value(), 5 * w * w)

    def arrays(self, w: float) -> None:
        a, o = np.arange(1.0, 4.0 + self.number), np.zeros(3 + self.number)
        values, (by_a, by_factor) = value_and_jacobian(scaled, ["a", "factor"], o, args=(a, w, o))
        expected = np.diag(np.full(a.size, w))
        expected[:, 0] += w * a
        np.testing.assert_allclose(by_a, expected)
        np.testing.assert_allclose(by_factor, a)
        np.testing.assert_allclose(values, w * a)

    def fields(self, w: float) -> None:
        self.x.fill(w)
        self.x[1] = 2.0
        J = jacobian(self.kernel, self.x, self.y)
        np.testing.assert_allclose(J, np.diag([2 * w, 4.0, 2 * w]))

    def chain(self, w: float) -> None:
        a, c = np.arange(1.0, 4.0), np.zeros(3)
        J = jacobian(pipeline, a, c, args=(a, w, c), chunk_size=None if self.number % 2 else 2)
        expected = 2 * w * np.diag(a)
        expected[:, 0] += 2 * w * a**2
        np.testing.assert_allclose(J, expected)
        np.testing.assert_allclose(c, w * a**2)

    def first(self, factor: float) -> None:
        self.kernel = new_kernel(self.x, self.y, 1.0)
        self.x.fill(3.0)
        J = jacobian(new_kernel(self.x, self.y, factor), self.x, self.y)
        np.testing.assert_allclose(J, np.diag(np.full(3, 6.0 * factor)))
        np.testing.assert_allclose(self.y.to_numpy(), np.full(3, 9.0 * factor))


def threads(count: int, is_plain: bool) -> bool:
    """All threads at once; they take turns much more often than usual."""
    shared = Jacobian(area, ["width", "height"], args=(1.0, 5.0))
    works = [Work(number, shared) for number in range(THREADS)]
    ti.sync()
    for work in works:
        work.kernel = new_kernel(work.x, work.y, 1.0)
    errors: list[str] = []
    together = threading.Barrier(THREADS)

    def run(work: Work) -> None:
        together.wait()
        for n in range(count):
            try:
                work.call(n)
            except Exception as error:
                errors.append(f"thread {work.number}, call {n}: {type(error).__name__}: {str(error)[:500]}")

    started = [threading.Thread(target=run, args=(work,)) for work in works]
    sys.setswitchinterval(1e-5)
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    print(f"{THREADS} threads x {count} calls: {len(errors)} wrong", *errors[:5], sep="\n")
    return not errors


def grows(name: str, count: int, most: int, run: Callable[[int], None]) -> bool:
    """Whether memory grows by no more than ``most`` bytes with each of the later calls; prints by how much."""
    early = int(count * WARM_UP)
    for n in range(early):
        run(n)
    before = resident()
    for n in range(early, count):
        run(n)
    growth = (resident() - before) / (count - early)
    print(f"{count} {name}: all right, {growth:.0f} bytes more for each (at most {most})")
    return growth <= most


def calls(count: int, is_plain: bool) -> bool:
    """The calls of one thread but the first calls of kernels."""
    work = Work(0, Jacobian(area, ["width", "height"], args=(1.0, 5.0)))
    work.kernel = new_kernel(work.x, work.y, 1.0)
    kinds = (work.plan, work.prepared, work.arrays, work.fields, work.chain)
    return grows("calls", count, MOST_PER_CALL, lambda n: kinds[n % len(kinds)](1.0 + n % 100))


def kernels(count: int, is_plain: bool) -> bool:
    """A new kernel for each call, or for each launch."""
    x, y = ti.field(ti.f64, 3), ti.field(ti.f64, 3)
    x.fill(3.0)

    def run(n: int) -> None:
        kernel = new_kernel(x, y, n + 0.5)
        if is_plain:
            kernel()
        else:
            J = jacobian(kernel, x, y)
            np.testing.assert_allclose(J, np.diag(np.full(3, 6 * (n + 0.5))))
        np.testing.assert_allclose(y.to_numpy(), np.full(3, 9 * (n + 0.5)))

    return grows("new kernels", count, MOST_PER_KERNEL, run)


PARTS: dict[str, Callable[[int, bool], bool]] = {"threads": threads, "calls": calls, "kernels": kernels}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument("--count", type=int, help="calls of each thread, calls, or kernels")
    parser.add_argument("--plain", action="store_true", help="new kernels without their Jacobians")
    options = parser.parse_args()
    is_right = True
    for name in options.parts or PARTS:
        ti.init(arch=ti.cpu, default_fp=ti.f64, offline_cache=False, log_level=ti.ERROR)
        start, started = time.process_time(), time.time()
        is_right &= PARTS[name](options.count or COUNTS[name], options.plain)
        print(f"    {time.process_time() - start:.0f} CPU seconds, {time.time() - started:.0f} s", flush=True)
        ti.reset()
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
