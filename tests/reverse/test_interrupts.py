"""Errors and interrupts on the way back, threads, many calls, and programs that end."""

import gc
import tracemalloc

import numpy as np
import pytest
import taichi as ti
from kernel_texts import kernel_of
from many_threads import in_threads
from numpy.testing import assert_allclose, assert_array_equal
from reverse_calls import Prepared
from taichi_program import share_program

from taichi_ext import UnsupportedError
from taichi_ext.runtime.reverse.backward import Backward

N = 6


def simulation():
    x, y = ti.field(ti.f64, shape=N), ti.field(ti.f64, shape=N)

    @ti.kernel
    def step():
        for i in x:
            y[i] += x[i] * x[(i + 1) % N]
        for i in x:
            x[i] = ti.sin(y[i])

    def run():
        for _ in range(10):
            step()

    reset = lambda: (x.from_numpy(np.linspace(0.2, 0.9, N)), y.fill(0.1))
    return x, y, run, reset


@pytest.fixture(scope="module")
def simulated():
    share_program(default_fp=ti.f64)
    return simulation()


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize("max_memory", [None, 500])
@pytest.mark.parametrize("at", range(0, 10, 3))
def test_an_interrupt_leaves_the_state_and_the_next_call(simulated, monkeypatch, max_memory, at):
    x, y, run, reset = simulated
    prepared = Prepared(run, [x], [x])
    reset()
    (whole,) = prepared(max_memory=max_memory)
    state = x.to_numpy(), y.to_numpy()
    original, count = Backward.event, 0

    def interrupted(self, event):
        nonlocal count
        count += 1
        if count == at + 1:
            raise KeyboardInterrupt
        original(self, event)

    reset()
    with monkeypatch.context() as patched:
        patched.setattr(Backward, "event", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepared(max_memory=max_memory)
    assert_array_equal((x.to_numpy(), y.to_numpy()), state)
    reset()
    assert_array_equal(prepared(max_memory=max_memory)[0], whole)


def test_a_pipeline_that_cannot_be_followed_leaves_everything_as_it_was(simulated):
    x, y, run, reset = simulated
    halves = kernel_of("for i in a: a[i] *= 0.5", "a: ti.types.ndarray(dtype=ti.f32, ndim=1)")
    doubles = kernel_of("for i in a: a[i] *= 0.5", "a: A1")
    memory = np.ones(4)
    mixed = lambda: (run(), doubles(memory), halves(memory.view(np.float32)))
    reset()
    with pytest.raises(UnsupportedError, match="types"):
        Prepared(mixed, [x], [x])()
    assert_array_equal(x.to_numpy(), np.linspace(0.2, 0.9, N))
    assert_array_equal(memory, 1)


@pytest.mark.sweep
def test_threads_share_a_prepared_form(simulated):
    x, y, run, reset = simulated
    args = [(np.linspace(0.1, 0.5, N) * (k + 1), np.zeros(N)) for k in range(4)]
    square = kernel_of("for i in a: b[i] += a[i] ** 2", "a: A1, b: A1")
    twice = lambda a, b: (square(a, b), square(b, b))
    prepared = Prepared(twice, ["a"], ["b"], args[0])
    found = {}

    def call(k):
        found[k] = prepared(None, args[k])[0]

    in_threads(call, 4)
    for k, (a, _) in enumerate(args):
        assert_allclose(found[k][0], 2 * a + 4 * a**3, rtol=1e-12)


@pytest.mark.sweep
def test_many_calls_keep_no_memory(simulated):
    x, _, run, reset = simulated
    prepared = Prepared(run, [x], [x])
    sizes = []
    for count in (20, 100):
        for _ in range(count):
            reset()
            prepared()
        gc.collect()
        tracemalloc.start()
        for _ in range(20):
            reset()
            prepared()
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert max(sizes) < 100_000
