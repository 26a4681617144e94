"""Atomic operations on locals and fields, their results, in parallel and serial loops."""

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars

from taichi_ext import Jacobian, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.23, 0.9]


@pytest.mark.sweep
def test_extrema_into_fields():
    x, y = scalars(FIVE), outputs(4)
    y.from_numpy(np.array([-10.0, 10.0, 0.0, 0.5]))

    @ti.kernel
    def k():
        for i in range(5):
            ti.atomic_max(y[0], x[i] * x[2])
            ti.atomic_min(y[1], x[i] + x[0])
            ti.atomic_max(y[2], -x[i])
            ti.atomic_min(y[3], x[i])

    check_jacobian(k, [x, y], y)


@pytest.mark.sweep
def test_results_that_do_not_depend_on_the_order_in_parallel():
    x, y, n = scalars(FIVE), outputs(1), ti.field(ti.i32, shape=())
    z = outputs(5)

    @ti.kernel
    def k():
        n[None] = 0
        for i in range(5):
            slot = ti.atomic_add(n[None], 1)
            z[slot] = x[i] * x[0]
        for i in range(5):
            y[0] += z[i]

    check_jacobian(k, x, y)
    J = jacobian(k, x, z)
    np.testing.assert_allclose(J.sum(axis=0), [sum(FIVE) + FIVE[0], *[FIVE[0]] * 4], rtol=1e-12)


@pytest.mark.sweep
def test_atomics_on_integers_beside_tangents():
    x, y, n = scalars(FIVE), outputs(5), ti.field(ti.i32, shape=3)

    def run():
        n.fill(0)
        launch()

    @ti.kernel
    def launch():
        for i in range(5):
            ti.atomic_or(n[0], 1 << i)
            ti.atomic_max(n[1], i)
            c = 0
            for j in range(i):
                was = ti.atomic_add(c, j)
                y[i] += x[was % 5] * x[c % 5]
        y[0] = x[0] * n[0] * n[1]

    check_jacobian(run, x, y)


@pytest.mark.sweep
@pytest.mark.parametrize("by", ["iteration", "inner loop"])
def test_atomic_products_in_memory(by):
    x, y, z = scalars(FIVE), scalars([1.5, 2.5]), scalars([0.0] * 5)

    @ti.kernel
    def k():
        for i in range(5):
            if ti.static(by == "iteration"):
                z[i] += ti.atomic_mul(y[i % 2], x[i])
            else:
                for j in range(3):
                    ti.atomic_mul(y[1], x[i] + x[j])

    check_jacobian(k, x, [y, z] if by == "iteration" else y)


@pytest.mark.sweep
def test_atomic_products_next_to_tangents():
    x, y, n, last = scalars(FIVE), outputs(1), ti.field(ti.i32, shape=()), scalars([0.0] * 5)

    def run():
        n.fill(1)
        launch()

    @ti.kernel
    def launch():
        for i in range(5):
            ti.atomic_mul(n[None], i % 2 + 1)
            last[i] = ti.atomic_max(y[0], x[i])  # which makes the loop serial: Taichi aborts on atomic_mul there

    J = jacobian(run, x, y)
    np.testing.assert_array_equal(J, [[1.0, 0.0, 0.0, 0.0, 0.0]])
    assert n[None] == 4


def test_an_atomic_product_outside_of_loops():
    x, y = scalars(FIVE), scalars([1.5])

    @ti.kernel
    def k():
        ti.atomic_mul(y[0], x[0])  # Taichi 1.7.4 aborts the process on it, so that there are no differences to compare

    np.testing.assert_array_equal(jacobian(k, x, y), [[1.5, 0.0, 0.0, 0.0, 0.0]])
    assert y[0] == pytest.approx(1.5 * FIVE[0], rel=1e-6)


@pytest.mark.sweep
def test_loops_are_serial_only_where_iterations_meet():
    x, y, z, total = scalars(FIVE[:3]), outputs(3), outputs(3), outputs(1)

    @ti.kernel
    def private():
        for i in x:
            old = ti.atomic_add(y[i], x[i])
            z[i] = old + ti.atomic_max(y[i], 2.0 * x[i])

    @ti.kernel
    def shared():
        for i in x:
            z[i] = ti.atomic_add(total[0], x[i])

    for k, is_serial in ((private, False), (shared, True)):
        plan = Jacobian(k, x, z)
        plan()
        assert ("runs serially" in plan.explain()) == is_serial
    check_jacobian(private, x, [y, z])
    check_jacobian(shared, x, [z, total])
