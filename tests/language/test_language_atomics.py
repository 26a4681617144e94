"""Atomic operations on locals and fields, their results, in parallel and serial loops."""

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars

from taichi_ext import jacobian

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.23, 0.9]


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
