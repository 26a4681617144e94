"""Parallel loops whose iterations go through their inner loops together, in lanes; rows and sparse entries."""

import inspect

import numpy as np
import pytest
import taichi as ti
from differences import central_differences, check_jacobian, integers, outputs, scalars, vector_outputs
from forced_lanes import force_lanes
from kernel_texts import kernel_of, kernels_of, names_of
from numpy.testing import assert_allclose
from taichi_program import initialise, share_program

from taichi_ext import Jacobian, jacobian
from taichi_ext.schedule import lanes as schedule_lanes

pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.cpu_only("loops run in lanes where rows come one after the other in memory"),
]

X = [0.3, 0.8, 0.5]


@pytest.fixture(autouse=True)
def lanes(monkeypatch):
    """Four iterations at a time."""
    return force_lanes(monkeypatch, LANES_OF_FLOAT64=4)


@pytest.mark.mostly_sweep("shape7")
@pytest.mark.parametrize("shape", [(1,), (3,), (4,), (5,), (8,), (11,), (513,), (2, 4), (3, 7), (2, 2, 5)])
def test_rows_of_any_length(shape, lanes):
    x, y = scalars(X), outputs(*shape)

    @ti.kernel
    def k():
        for I in ti.grouped(y):
            j = I[I.n - 1]
            s, t = 0.0, 1.0
            for n in range(3):
                s += t * ti.exp(-x[n] * (j % 7) * 0.1)
                t *= 1.0 - 0.1 * x[n]
            y[I] = s + x[0] * I[0]

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_kernels_that_differ_in_their_functions_alone(lanes):
    """Taichi keeps compiled kernels by a key that may lack their functions, and ran those of the first kernel."""
    y = outputs(8)

    def made(x, count):
        @ti.kernel
        def k():
            for j in y:
                s = 0.0
                for n in range(count):
                    s += ti.sin(x[n] * (j + 1))
                y[j] = s

        return k

    a, b = scalars(X), scalars([0.7, 0.2, 0.9])
    kernels = [(made(x, count), x, count) for x in (a, b) for count in (2, 3)]
    for k, x, count in kernels:
        j = np.arange(1.0, 9.0)[:, None]
        expected = j * np.cos(x.to_numpy() * j) * (np.arange(3) < count)
        plan = Jacobian(k, x, y)
        np.testing.assert_allclose(plan(), expected, rtol=1e-12)
        assert "@ti.real_func" in plan.source


def test_a_body_takes_numbers_and_arrays_from_the_kernel(lanes):
    """A function of a body is given the kernel's arguments, and locals from before the loop."""
    x, y = np.array(X), np.zeros((2, 11))
    weights = np.linspace(0.1, 0.9, 22).reshape(2, 11)

    @ti.kernel
    def k(
        x: ti.types.ndarray(dtype=ti.f64, ndim=1),
        y: ti.types.ndarray(dtype=ti.f64, ndim=2),
        w: ti.types.ndarray(dtype=ti.f64, ndim=2),
        factor: ti.f64,
        power: ti.i32,
    ):
        scale = factor * x[1]
        for i, j in y:
            s = 0.0
            for n in range(power):
                s += ti.sin(x[n] * w[i, j]) * scale
            y[i, j] = s + factor

    plan = Jacobian(k, x, y, args=(x, y, weights, 1.5, 3))
    w = weights[..., None]
    terms = np.sin(x * w)
    expected = 1.5 * x[1] * np.cos(x * w) * w + 1.5 * terms.sum(-1, keepdims=True) * [0, 1, 0]
    np.testing.assert_allclose(plan(), expected, rtol=1e-12)
    assert "@ti.real_func" in plan.source


@pytest.mark.mostly_sweep("shape1")
@pytest.mark.parametrize("shape", [(8,), (2, 11)])
def test_rows_are_copied_behind_the_loop_that_stores_them(shape, lanes):
    x, y = scalars(np.linspace(0.2, 0.8, 9)), outputs(*shape)

    @ti.kernel
    def k():
        for I in ti.grouped(y):
            left, total = 1.0, 0.0
            for n in range(9):
                passed = ti.exp(-x[n] * (I[I.n - 1] + 1) * 0.1)
                total += left * (1.0 - passed) * (n + 1 + I[0])
                left *= passed
            y[I] = total

    check_jacobian(k, x, y)
    plan = Jacobian(k, x, y)
    plan()
    assert "for number in range(9)" in plan.source


@pytest.mark.mostly_sweep("4-0")
@pytest.mark.parametrize(("count", "bits"), [(4, 0), (5, 1), (16, 3), (17, 7)])
def test_llvm_knows_the_range_of_a_stretch(count, bits, lanes):
    """The bits that numbers of stretches of four iterations have."""
    x, y = scalars(X), outputs(count)

    @ti.kernel
    def k():
        for j in y:
            s = 0.0
            for n in range(3):
                s += ti.exp(-x[n] * j * 0.1)
            y[j] = s

    check_jacobian(k, x, y)
    plan = Jacobian(k, x, y)
    plan()
    assert f"stretch & {bits}" in plan.source
    assert lanes


KERNELS = """
    sums_in_memory:
        for i, j in y:
            y[i, j] = 0.5
            for n in range(3):
                y[i, j] += x[n] * w[i, j]
            z[i, j].y -= x[0]
    steps_in_place:
        for i, j in y:
            y[i, j] = w[i, j] * x[0]
            for n in range(3):
                y[i, j] = y[i, j] * x[n] + y[i, j] * y[i, j]
            y[i, j] += 1.0
"""


def kernels_in_lanes(x, y, z):
    """Kernels with what a body in lanes may have, by name."""
    w = scalars(np.linspace(0.2, 0.9, 22).reshape(2, 11))
    return kernels_of(KERNELS, x=x, y=y, z=z, w=w)


@pytest.mark.parametrize("name", names_of(KERNELS))
def test_bodies(name, lanes):
    x, y, z = scalars(X), outputs(2, 11), vector_outputs(2, 2, 11)
    kernels = kernels_in_lanes(x, y, z)
    check_jacobian(kernels[name], x, [y, z] if "z[i" in inspect.getsource(kernels[name]) else y)
    assert lanes[-1], lanes.reasons


@pytest.mark.parametrize("is_own", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_loops_that_stay(is_own, lanes):
    x, y = scalars(X), outputs(2, 11)

    @ti.kernel
    def k():
        for i, j in y:
            s = 0.0
            for n in range(3):
                s += ti.round(0.3 * j) * x[n] if ti.static(is_own) else x[n] * j
            y[i if ti.static(is_own) else 1 - i, j] = s

    check_jacobian(k, x, y)
    assert ("LLVM does not vectorise round" if is_own else "not its own") in lanes.reasons[-1]


@pytest.mark.parametrize(
    "function, most, compiled, has_lanes",
    [(ti.sqrt, 10, 3, False), (ti.tanh, 500, 3, True), (ti.tanh, 100, 3, False), (ti.tanh, 100, 1000, True)],
)
def test_long_bodies_stay(lanes, monkeypatch, function, most, compiled, has_lanes):
    """Functions that are written out, with ``fast_math``, count as what they write."""
    share_program(default_fp=ti.f64, fast_math=True)
    monkeypatch.setattr(schedule_lanes, "MOST_OPERATIONS", most)
    monkeypatch.setattr(schedule_lanes, "COMPILED", compiled)
    x, y = scalars(X), outputs(2, 11)

    @ti.kernel
    def k():
        for i, j in y:
            s = x[0]
            for n in ti.static(range(8)):
                s += function(s * j + n)
            y[i, j] = s

    check_jacobian(k, x, y)
    assert has_lanes or "takes LLVM too long" in lanes.reasons[-1]
    assert bool(lanes[-1]) == has_lanes, lanes.reasons


def test_divisor_from_a_local_array_is_inverted_in_its_lane(lanes):
    x, y = scalars(X), outputs(2, 11)
    text = "for i, j in y: h = ti.Vector([1.5, 0.7, 0.4]); h[j % 3] = x[0] + 1.0; y[i, j] = x[1] / h[1]"
    k = kernel_of(text, y=y, x=x)
    check_jacobian(k, x, y)
    assert lanes[-1] is not None


def test_float64_in_parts_stays(lanes, monkeypatch):
    """LLVM makes no vectors of stretches that end early, nor of choices of entries, where a vector has two numbers."""
    monkeypatch.setattr(schedule_lanes, "VECTORS_OF_FLOAT64", True)
    x, y, z = scalars(X), outputs(2, 11), outputs(2, 12)

    @ti.kernel
    def added():
        for i, j in y:
            for n in range(3):
                y[i, j] += x[n] * j

    @ti.kernel
    def chosen():
        for i, j in z:
            h, s = ti.Vector([0.1, 0.2, 0.3]), x[0]
            for n in range(j % 3):
                h[n] = h[n] * s + x[n]
                s += h[n] * h[1]
            z[i, j] = s + h[0]

    check_jacobian(added, x, y)
    check_jacobian(chosen, x, z)
    assert "rows of float64 that are no multiple of 4" in lanes.reasons[-2]
    assert "some lanes only" in lanes.reasons[-1]


def test_each_loop_has_a_line_on_lanes(lanes):
    x, y, z, n = scalars(X), outputs(20), outputs(20), integers([20])

    @ti.kernel
    def k():
        for i in y:
            y[i] = x[0] * i
        for i in range(n[0]):
            z[i] = x[1] * i

    plan = Jacobian(k, x, [y, z])
    plan()
    said = plan.explain()
    assert "parallel loop 1 runs in lanes, 4 iterations at a time" in said
    assert "parallel loop 2 does not run in lanes: it ends early, or its indices" in said


def random(*shape):
    return np.random.default_rng(3).uniform(0.4, 1.4, shape)


def require_equal(kernel, params, outs):
    found, expected = jacobian(kernel, params, outs, format="csr"), central_differences(kernel, params, outs)
    for row, wanted in zip(found, expected, strict=True):
        for block, dense in zip(row, wanted, strict=True):
            assert_allclose(block.toarray(), dense.reshape(block.shape), rtol=1e-6, atol=1e-7)


def test_entries_of_inner_loops(lanes):
    """An iteration has a slot for each iteration of an inner loop, of which the last one counts."""
    x, w, y = scalars(random(11)), scalars(random(3)), outputs(11)

    @ti.kernel
    def k():
        for i in y:
            for n in range(3):
                y[i] = x[10 - i] * x[i] * w[n]

    require_equal(k, [x, w], [y])
    assert lanes[-1] is not None, lanes.reasons


def test_slots_that_are_counted_are_not_in_lanes(lanes):
    """The place of an entry is only known when the iterations before have been counted."""
    x, first, y = scalars(random(9)), integers(np.arange(10) * 3 // 2), outputs(9)

    @ti.kernel
    def k():
        for i in y:
            n = first[i]
            while n < first[i + 1]:
                y[i] += x[(n + i) % 9] * x[i]
                n += 1

    require_equal(k, [x], [y])
    assert lanes[-1] is None


def test_entries_of_another_iteration_are_not_in_lanes(lanes):
    """Neighbours would add to the same entry at the same time."""
    x, y = scalars(random(9)), outputs(9)
    k = kernel_of("for i in x: y[(i * 3) % 9 // 2] += x[i] * x[i]", x=x, y=y)
    require_equal(k, [x], [y])
    assert lanes[-1] is None


@pytest.mark.mostly_sweep("True")
@pytest.mark.parametrize("is_fast", [True, False])
def test_quotients(is_fast, lanes):
    """By what divides several numbers, or is the same for all lanes; last here, since it is another program."""
    initialise(default_fp=ti.f64, fast_math=is_fast)
    x, y = scalars(X), outputs(2, 12)

    @ti.kernel
    def k():
        for i, j in y:
            s = 0.0
            for n in range(3):
                t = x[n] * j + 1.0
                if j > 3:
                    t += 0.5 * x[0]
                u = ti.sqrt(t) + x[1] ** 3
                s += (1.0 + j * x[0]) / (x[n] * x[n] + 1.0) + x[1] / u + x[2] / u
            y[i, j] = s

    check_jacobian(k, x, y)
    assert lanes[-1], lanes.reasons
