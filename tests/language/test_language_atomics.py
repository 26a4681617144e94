"""Atomic operations on locals and fields, their results, in parallel and serial loops."""

import numpy as np
import pytest
import taichi as ti
from differences import scalars

from taichi_ext import jacobian

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.23, 0.9]


def test_an_atomic_product_outside_of_loops():
    x, y = scalars(FIVE), scalars([1.5])

    @ti.kernel
    def k():
        ti.atomic_mul(y[0], x[0])  # Taichi 1.7.4 aborts the process on it, so that there are no differences to compare

    np.testing.assert_array_equal(jacobian(k, x, y), [[1.5, 0.0, 0.0, 0.0, 0.0]])
    assert y[0] == pytest.approx(1.5 * FIVE[0], rel=1e-6)
