"""Long simulations in little memory: what is kept, which snapshots are placed, and that the gradient is the same."""

import functools
import gc
import itertools
import tracemalloc

import numpy as np
import pytest
import taichi as ti
from kernel_texts import kernel_of
from numpy.testing import assert_array_equal
from reverse_calls import Prepared
from taichi_program import share_program

from taichi_ext.errors import InvalidArgumentError
from taichi_ext.runtime.reverse.schedule import longest, split

N = 12
STEP_BYTES = 8 * N  # that one step overwrites and its adjoint reads


@pytest.fixture(scope="module")
def chain():
    """A simulation in place: its run, its state, and the loss."""
    share_program(default_fp=ti.f64)
    u, v, c = (ti.field(ti.f64, shape=N) for _ in range(3))
    loss = ti.field(ti.f64, shape=())
    c.from_numpy(np.linspace(0.5, 1.5, N))
    push = kernel_of(
        "for i in u: v[i] += 0.1 * (u[(i + 1) % N] + u[(i - 1) % N] - (2 + c[i]) * u[i])", u=u, v=v, N=N, c=c
    )
    move = kernel_of("for i in u: u[i] += 0.1 * v[i]", u=u, v=v)
    measure = kernel_of("for i in u: loss[None] += u[i] ** 2", u=u, loss=loss)

    def run(steps):
        measure()
        for _ in range(steps):
            push()
            move()
        measure()

    def reset():
        u.from_numpy(np.linspace(-1, 1, N))
        v.fill(0)
        loss[None] = 0

    return run, u, v, c, loss, reset


def gradient(chain, steps, **options):
    run, u, v, c, loss, reset = chain
    reset()
    (found,), how = Prepared(run, [c], [loss], (steps,)).products(None, (steps,), **options)
    return found[0], how, np.concatenate([u.to_numpy(), v.to_numpy(), [loss[None]]])


@pytest.mark.mostly_sweep("8", "20", "45")
@pytest.mark.parametrize("kept", [3, 8, 20, 45])
def test_the_gradient_is_the_same_to_the_bit(chain, kept):
    whole, how, state = gradient(chain, 50)
    assert how.repeated == how.snapshots == 0
    state_bytes = 2 * STEP_BYTES + 8
    found, how, after = gradient(chain, 50, max_memory=2 * state_bytes + kept * STEP_BYTES)
    assert_array_equal(found, whole)
    assert_array_equal(after, state)
    assert how.peak <= 2 * state_bytes + kept * STEP_BYTES
    assert how.repeated > 0
    assert how.snapshots


def test_what_a_run_keeps_is_freed_at_its_end(chain):
    """Nothing of it waits for the garbage collector, which does not see how much memory arrays take."""
    run, _, _, c, loss, reset = chain
    reset()
    prepared = Prepared(run, [c], [loss], (200,))
    prepared.products(None, (200,))
    gc.disable()
    tracemalloc.start()
    try:
        prepared.products(None, (200,))
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert peak > 200 * STEP_BYTES
    assert left < peak / 5


@pytest.mark.sweep
def test_four_thousand_steps_in_the_memory_of_twenty(chain):
    run, u, v, c, loss, reset = chain
    limit = 20 * (2 * STEP_BYTES + 8)  # 20 states
    found, how, _ = gradient(chain, 4_000, max_memory=limit)
    assert how.peak <= limit
    assert how.snapshots <= 20
    assert how.launches == 8_002
    # each step is run so often at most, beside the first time
    assert how.repeated <= 6 * how.launches
    direction = np.cos(np.arange(N))
    values = []
    for sign in (1, -1):
        reset()
        c.from_numpy(np.linspace(0.5, 1.5, N) + sign * 1e-6 * direction)
        run(4_000)
        values.append(loss[None])
    c.from_numpy(np.linspace(0.5, 1.5, N))
    assert found @ direction == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4)


def test_the_memory_that_there_is_holds_snapshots(chain):
    limit = 20 * (2 * STEP_BYTES + 8)
    _, how, _ = gradient(chain, 300, max_memory=limit)
    assert 10 <= how.snapshots <= 20
    assert limit / 2 <= how.peak <= limit
    assert how.repeated <= 3 * how.launches


def test_a_launch_that_is_given_its_step_keeps_rows_alone(chain):
    x, c = ti.field(ti.f64, (21, N)), chain[3]
    step = kernel_of("for i in c: x[t + 1, i] = ti.sin(x[t, i]) + c[i] * x[t, (i + 1) % N]", "t: int", x=x, c=c, N=N)
    _, how = Prepared(lambda: [step(t) for t in range(20)], [c], [x]).products()
    assert how.peak < 2 * 21 * STEP_BYTES


def test_too_little_memory_for_one_step(chain):
    run, u, v, c, loss, reset = chain
    reset()
    before = u.to_numpy()
    with pytest.raises(InvalidArgumentError, match="max_memory=300 is too little .* needs \\d+ bytes"):
        Prepared(run, [c], [loss], (40,))(None, (40,), max_memory=300)
    assert_array_equal(u.to_numpy(), before)
    assert loss[None] == 0


def test_progress_tells_of_the_way_back(chain):
    told = []
    gradient(chain, 20, max_memory=900, advance=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (42, 42)


@functools.cache
def least(length, slots):
    """The units that are run forward to go back over some from a stored state, each of them once more for itself."""
    if length <= 1:
        return length
    if not slots:
        return length * (length + 1) // 2
    return min(m + least(length - m, slots - 1) + least(m, slots) for m in range(1, length))


@functools.cache
def by_split(length, slots):
    if length <= 1 or not slots:
        return least(length, slots)
    m = split(length, slots)
    return m + by_split(length - m, slots - 1) + by_split(m, slots)


def test_splits_are_the_best_ones():
    for length, slots in itertools.product(range(2, 60), range(1, 8)):
        assert by_split(length, slots) == least(length, slots), (length, slots)


def test_the_longest_run_by_repetitions():
    assert [longest(2, r) for r in range(5)] == [1, 4, 10, 20, 35]
