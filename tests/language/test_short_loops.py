"""Parallel loops of too few iterations for all threads, which Taichi runs on one thread and a Jacobian on all."""

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, integers, outputs, scalars, vector_outputs
from kernel_texts import kernel_of, kernels_of

from taichi_ext import Jacobian

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.cpu_only("loops are spread over the threads of a CPU")]

X = [0.3, 0.8, 0.5]


KERNELS = """
    three_indices:
        for i, j, k in ti.ndrange(3, 2, 4):
            s = 0.0
            for n in range(3):
                s += x[n] * x[(i + n) % 3] * (j + k)
            z[i, j, k] = s * s
    read_in_another_loop:
        for i in y:
            for n in range(3):
                y[i] += x[n] * i
        for i in v:
            for n in range(12):
                v[i] += y[n] * i
    shared_sum:
        for i in y:
            for n in range(3):
                y[0] += x[n] * i
    recursion:
        for i in range(12):
            for n in range(2):
                y[i] = y[ti.max(i - 1, 0)] * x[0] + x[n]
    turned:
        for i, j in ti.ndrange(2, 2):
            for n in range(2):
                z[i, j, 0] = x[n] * (i + 1)
                z[j, i, 0] = x[n] * (j + 2)
    atomics:
        for i in y:
            for n in range(3):
                k = ti.atomic_add(p[0], 1)
                y[i] = x[n] * k
    without_loops: for i in y: y[i] = ti.exp(x[0] * i)
"""


def make_kernels(x, y, z, v, p):
    """Kernels with a loop in a parallel loop, by name."""
    return kernels_of(KERNELS, x=x, y=y, z=z, v=v, p=p)


SPREAD = {"three_indices": 1, "read_in_another_loop": 2}
STAY = "shared_sum recursion turned atomics without_loops".split()


spread_only = pytest.mark.chosen_only("loops are spread over threads of a CPU", "--by-column")


@pytest.mark.mostly_sweep("without_loops")
@pytest.mark.parametrize("name", [*(pytest.param(name, marks=spread_only) for name in SPREAD), *STAY])
@pytest.mark.chosen_only("what it looks at is that of one run", "--chunk-size")
def test_kernels(name):
    x, y, z, v, p = scalars(X), outputs(12), outputs(3, 2, 4), vector_outputs(2, 7), ti.field(ti.i32, 1)
    kernels = make_kernels(x, y, z, v, p)
    assert set(kernels) == {*SPREAD, *STAY}
    written = {"three_indices": [z], "read_in_another_loop": [v], "turned": [z]}.get(name, [y])
    check_jacobian(kernels[name], x, written, state=[p, y, z, v])
    plan = Jacobian(kernels[name], x, written)
    plan()
    assert plan.explain().count("spread over all threads") == SPREAD.get(name, 0)


@pytest.mark.mostly_sweep("511-True")
@pytest.mark.chosen_only("what it looks at is that of one run", "--chunk-size", "--by-column")
@pytest.mark.parametrize(("size", "is_serial"), [(1, True), (511, True), (512, True), (513, False)])
def test_loops_of_one_thread_are_serial(size, is_serial):
    x, y, z = scalars(np.linspace(0.2, 0.9, 7)), outputs(size), outputs(size)

    @ti.kernel
    def k():
        for i in y:
            if i % 5 == 3:
                continue
            y[i] = ti.floor(i / 2) * x[i % 7] ** 2 + z[(i + 1) % size]

    check_jacobian(k, x, y, state=[y, z])
    plan = Jacobian(k, x, y)
    plan()
    assert ("serialize=True" in plan.source) == is_serial


@pytest.mark.mostly_sweep("7-serialize=True")
@pytest.mark.parametrize(("end", "text"), [(7, "serialize=True"), (700, "i = flat + -1")])
def test_loops_that_begin_below_zero(end, text):
    """A condition keeps them within the fields; as the loop stands, LLVM reads far outside of them."""
    y, w = scalars([0.5] * 4), ti.field(ti.f64, (2, 4))

    @ti.kernel
    def k():
        for i in range(-1, end):
            if i >= 0 and i < 4:
                y[i] += w[1, i] + y[i] * 0.5

    run = lambda: (k(), k())
    plan = Jacobian(run, y, y, tangents="dense")
    np.testing.assert_allclose(plan(), 2.25 * np.eye(4), rtol=1e-14)
    assert text in plan.source


def test_many_iterations_stay_parallel():
    """Of one index: only loops over several indices are cut into rows."""
    x, y, at = scalars(X), outputs(520), integers(np.arange(520)[::-1])
    check_jacobian(kernel_of("for i in y: y[at[i]] = x[0] * ti.round(0.01 * i) + x[1]", x=x, y=y, at=at), x, y)
