"""Gradients in float32 by four threads, each way to share adjoints, beside those in float64 by one thread.

Races of threads show in programs that run as most do: in lanes of float32, with several threads, on loops that are long
enough for all of them.
"""

import re

import numpy as np
import pytest
import taichi as ti
from kernel_texts import kernel_of
from numpy.testing import assert_allclose
from taichi_program import initialise

from taichi_ext import Jacobian

pytestmark = pytest.mark.sweep


def field(dtype, *shape):
    made = ti.field(dtype, shape)
    numbers = np.random.default_rng(sum(shape)).uniform(0.3, 1.4, shape)
    made.from_numpy(numbers.astype(np.float32))  # the same in both types
    return made


def in_lanes(real):
    """Columns of a matrix in lanes; sums of threads for the other factor."""
    a, b, y, loss = field(real, 64, 40), field(real, 40, 512), field(real, 64, 512), field(real)

    @ti.kernel
    def run():
        for i, j in y:
            s = 0.0
            for d in range(40):
                s += a[i, d] * b[d, j]
            y[i, j] = ti.tanh(0.1 * s)
        for i, j in y:
            loss[None] += y[i, j] ** 2

    return run, [a, b], loss


def thread_sums(real):
    """Many additions to few entries."""
    w, x, loss = field(real, 7), field(real, 300000), field(real)
    run = kernel_of("for i in x: loss[None] += 1e-4 * w[i % 7] * ti.sin(x[i]) * w[(i // 3) % 7]", x=x, loss=loss, w=w)
    return run, [w, x], loss


def thread_sums_of_vectors(real):
    """The same, of entries of vectors, in a loop within the iteration."""
    w, x, loss = ti.Vector.field(3, real, 5), field(real, 6000), field(real)
    w.from_numpy(np.random.default_rng(3).uniform(0.3, 1.4, (5, 3)).astype(np.float32))

    @ti.kernel
    def run():
        for i in x:
            s = 0.0
            for k in range(8):
                s += w[(i + k) % 5].norm_sqr() * ti.cos(x[i] * k)
            loss[None] += s * s

    return run, [w, x], loss


def sums_in_functions(real):
    """The body of a loop in lanes is a function, whose sums are of the thread that calls it."""
    x, y, loss = field(real, 12), field(real, 65536), field(real)

    @ti.kernel
    def run():
        for i in y:
            s = 1.0
            for n in range(12):
                s *= 1.0 - 0.1 * x[n]
            y[i] = s + x[i % 12]
        for i in y:
            loss[None] += 1e-3 * y[i] ** 2

    return run, [x], loss


def colours(real):
    """A stencil, whose pieces run in two colours."""
    u, v, loss = field(real, 96, 96), field(real, 96, 96), field(real)

    @ti.kernel
    def run():
        for i, j in u:
            if 0 < i < 95 and 0 < j < 95:
                v[i, j] = ti.sin(u[i - 1, j] * u[i + 1, j] + u[i, j - 1] * u[i, j + 1])
        for i, j in v:
            loss[None] += v[i, j] ** 2 * u[i, j]

    return run, [u], loss


def sums_over_lanes(real):
    """All pairs."""
    x, f = ti.Vector.field(3, real, 512), ti.Vector.field(3, real, 512)
    m, loss = field(real, 512), field(real)
    x.from_numpy(np.random.default_rng(3).standard_normal((512, 3)).astype(np.float32))

    @ti.kernel
    def run():
        for i in x:
            total = ti.Vector.zero(real, 3)
            for j in range(512):
                d = x[j] - x[i]
                r = d.norm_sqr() + 0.1
                total += m[j] * d / (r * ti.sqrt(r))
            f[i] = total
        for i in x:
            loss[None] += f[i].norm_sqr() * m[i] * 1e-3

    return run, [x, m], loss


def atomics(real):
    """Computed indices: anything may be added to anything."""
    x, y, loss = field(real, 4000), field(real, 4000), field(real)
    near = ti.field(ti.i32, 20000)
    near.from_numpy(np.random.default_rng(4).integers(0, 4000, 20000).astype(np.int32))

    @ti.kernel
    def run():
        for i in y:
            y[i] = 0
        for i in near:
            y[near[i]] += ti.sin(x[near[(i * 7 + 1) % 20000]])
        for i in y:
            loss[None] += y[i] ** 2

    return run, [x], loss


def stacks(real):
    """Numbers on the stack of a thread, in a loop of unknown length, and state in place."""
    x, c, loss = field(real, 4000), field(real, 3), field(real)
    count = ti.field(ti.i32, 4000)
    count.from_numpy((np.arange(4000) % 37).astype(np.int32))

    @ti.kernel
    def run():
        for i in x:
            s = x[i]
            for k in range(count[i]):
                s = ti.sin(s) * c[k % 3] + 0.5 * s
            x[i] = s
        for i in x:
            loss[None] += x[i] ** 2

    return run, [c, x], loss


PROGRAMS = {  # by what stands in the text of the adjoints
    in_lanes: "real_func",
    thread_sums: "own_adj",
    thread_sums_of_vectors: "own_adj",
    sums_in_functions: r"real_func(.|\n)*own_adj",
    colours: "for slot in",
    sums_over_lanes: r"own_adj_\d_m.* \+ total",
    atomics: r"adj_\d_\w+\[[^]]*\] \+= ",
    stacks: "tape_reals",
}


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_gradients(make):
    found = {}
    for real, threads in ((ti.f64, 1), (ti.f32, 4)):
        initialise(default_fp=real, cpu_max_num_threads=threads)
        run, params, loss = make(real)
        start = [p.to_numpy() for p in params]
        plan = Jacobian(run, params, loss, mode="reverse")
        for _ in range(1 if threads == 1 else 5):  # a race is a matter of chance
            loss[None] = 0
            for p, numbers in zip(params, start, strict=True):
                p.from_numpy(numbers)
            found.setdefault(real, []).append([np.asarray(block) for block in plan()])
        text = str(plan.source)
    assert re.search(PROGRAMS[make], text), text
    for again in found[ti.f32]:
        for block, expected in zip(again, found[ti.f64][0], strict=True):
            assert_allclose(block, expected, rtol=2e-3, atol=2e-5 * np.abs(expected).max())
