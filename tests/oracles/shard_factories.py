"""Factories of shards that worker processes import: a decay observed in pieces, each with its own way to fail."""

import functools
import os
import signal
from pathlib import Path

import numpy as np
import taichi as ti
from kernel_texts import kernel_of

from taichi_ext import custom_root

TRUTH = np.array([2.5, 1.3, 0.3])


@ti.kernel
def compare(
    p: ti.types.ndarray(), q: ti.types.ndarray(), t: ti.types.ndarray(), y: ti.types.ndarray(), r: ti.types.ndarray()
):
    for i in range(r.shape[0]):
        r[i] += p[0] * ti.exp(-p[1] * t[i]) + q[None] - y[i]


def data(number, count):
    """Times, and values with some noise."""
    rng = np.random.default_rng(number)
    t = rng.uniform(0.0, 3.0, count)
    return t, TRUTH[0] * np.exp(-TRUTH[1] * t) + TRUTH[2] + 0.01 * rng.standard_normal(count)


def decay(number, count, what="", folder=""):
    """A shard with the fault ``what``."""
    marker = Path(folder, f"seen-{number}")
    if what == "always killed" or (what == "killed once" and not marker.exists()):
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exits":
        os._exit(3)
    if what == "raises":
        raise ZeroDivisionError("no data")
    if folder:
        Path(folder, f"{os.getpid()}-{number}").touch()
    t, y = data(number, count)
    if what == "nan":
        y[1] = np.nan
    p, q, r = np.zeros(2 if what != "shape" else 4), np.zeros(()), np.zeros(count)
    if what == "one object":
        return compare
    params = {"p": p, "q": q} if what != "structure" else [p, q]
    return compare, params, r, (p, q, t, y, r)


@ti.kernel
def add_squares(p: ti.types.ndarray(), q: ti.types.ndarray(), t: ti.types.ndarray(), y: ti.types.ndarray()) -> ti.f64:
    total = ti.f64(0.0)
    ti.loop_config(serialize=True)
    for i in range(t.shape[0]):
        total += (p[0] * ti.exp(-p[1] * t[i]) + q[None] - y[i]) ** 2
    return total


def misfit(number, count, what="", folder=""):
    """The same shard as an energy, which the kernel returns."""
    _, params, _, (p, q, t, y, _) = decay(number, count, what, folder)
    return add_squares, params, None, (p, q, t, y)


def started(number, count):
    """A shard that starts Taichi itself, as a user's module does."""
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR, cpu_max_num_threads=1)
    p, r = ti.field(ti.f64, 2), ti.field(ti.f64, count)

    @ti.kernel
    def residuals():
        for i in r:
            t = 0.01 * (number * count + i)
            r[i] = p[0] * ti.exp(-p[1] * t) - 2.0 * ti.exp(-0.7 * t)

    return residuals, p, r


@functools.cache
def shared_program(token):
    """Fields, kernels and a list that all shards of a call use, as those of a user's module are."""
    a, b, energy = (ti.field(ti.f64, ()) for _ in range(3))
    r, time, shape = (ti.field(ti.f64, 30) for _ in range(3))  # numbers written in kernels are float32 in a worker
    height, told = ti.field(ti.i32, ()), [0]
    time.from_numpy(0.1 * np.arange(30))
    shape.from_numpy(np.exp(-0.07 * np.arange(30)))

    @ti.kernel
    def add_residuals():
        for i in r:
            r[i] += a[None] * ti.exp(-b[None] * time[i]) - height[None] * shape[i]

    move = kernel_of("for i in r: r[i] += by * shape[i]", "by: ti.f64", r=r, shape=shape)

    @ti.kernel
    def add_energy():
        ti.loop_config(serialize=True)
        for i in r:
            energy[None] += r[i] ** 2

    def both():
        add_residuals()
        add_energy()

    def from_list():
        height[None] = 0
        move(float(told[0]))
        add_residuals()

    return {"a": a, "b": b}, r, energy, height, told, {"kernel": add_residuals, "energy": both, "list": from_list}


def shared(number, token, what="kernel"):
    """A shard whose factory stores its data where those of the other shards were: the best params are 2 and 0.7."""
    params, r, energy, height, told, kernels = shared_program(token)
    height[None] = number + 1
    told[0] = -number - 1
    return kernels[what], params, energy if what == "energy" else r


def threads(number):
    """A shard whose J is the number of threads of its Taichi program."""
    p, r = ti.field(ti.f64, 1), ti.field(ti.f64, 1)
    count = ti.cfg.cpu_max_num_threads
    scale = kernel_of("r[0] = p[0] * count", r=r, p=p, count=count)
    return scale, p, r


not_a_function = 3

cubic = kernel_of("for i in x: r[i] = p[0] * x[i] + x[i] ** 3 - p[1] * b[i]", "p: A, b: A, x: A, r: A")


@ti.kernel
def sum_squares(x: ti.types.ndarray(), total: ti.types.ndarray()):
    total[0] = 0.0
    for i in x:
        total[0] += x[i] ** 2


def cubic_roots(p, b):
    """The roots ``x`` of ``p[0] x + x^3 = p[1] b``, real or complex."""
    x = np.zeros_like(p[1] * b)
    for _ in range(80):
        x = x - (p[0] * x + x**3 - p[1] * b) / (p[0] + 3 * x**2)
    return x


def loads(number):
    return np.random.default_rng(number).standard_normal(5)


def root_squares(number):
    """A shard whose energy is the sum of squared roots, which Python finds."""
    b, p, x, r, total = loads(number), np.zeros(2), np.zeros(5), np.zeros(5), np.zeros(1)

    def solve(p, b, x, r):
        x[:] = cubic_roots(p, b)

    root = custom_root(solve, cubic, x, r)

    def run(p, b, x, r, total):
        root(p, b, x, r)
        sum_squares(x, total)

    return run, p, total, (p, b, x, r, total)
