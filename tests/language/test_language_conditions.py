"""Comparisons, logic and conditional expressions in kernels."""

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import check_jacobian, outputs, scalars
from numpy.testing import assert_allclose

from taichi_ext import jacobian

pytestmark = pytest.mark.usefixtures("ti64")


# --- comparisons and logic --------------------------------------------------------------------------------------------


# --- conditional expressions ------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_conditional_expression_guards_an_index():
    x, y = scalars([0.3, 0.8, 1.4]), outputs(3)

    @ti.kernel
    def k():
        for i in range(3):
            left = x[i - 1] if i > 0 else 0.0
            right = x[i + 1] * x[i] if i + 1 < 3 else x[i]
            y[i] = left * right + (x[i - 1] if i - 1 >= 0 else x[i] * x[i]) - (0.0 if i == 0 else y[i - 1])

    @ti.kernel
    def serial():
        for _ in range(1):
            for i in range(3):
                y[i] = x[i] * (y[i - 1] if i > 0 else 1.0) + (x[i + 1] if i < 2 else x[0])

    check_jacobian(serial, x, y)
    # entries of y read in parallel with their stores would race; only the guards matter here
    y.fill(0)

    @ti.kernel
    def parallel():
        for i in range(3):
            left = x[i - 1] if i > 0 else 0.0
            right = x[i + 1] * x[i] if i + 1 < 3 else x[i]
            y[i] = left * right + (x[i - 1] if i - 1 >= 0 else x[i] * x[i])

    check_jacobian(parallel, x, y)


def test_guarded_columns_stay_within_j():
    """Where the guard does not hold, nothing is added: not to -0.0 either, which would become 0.0."""
    x, y = scalars([0.3, 0.8, 1.4]), outputs(6)

    @ti.kernel
    def branch():
        for i in range(6):
            t = 0.5
            if i < 3:
                t = x[i]
            y[i] = t * t

    @ti.kernel
    def chosen():
        for i in range(6):
            y[i] = ti.select(i < 3, x[i], 0.5) ** 2

    for kernel in (branch, chosen):
        memory = real(np.full(54, -0.0))
        J = jacobian(kernel, x, y, out=memory[18:36].reshape(6, 3))
        assert_allclose(J, np.diag([0.6, 1.6, 2.8, 0, 0, 0])[:, :3])
        assert np.signbit(memory[36:]).all()
        assert np.signbit(memory[:18]).all()


@pytest.mark.sweep
def test_conditional_expression_guards_a_division():
    x, z, y = scalars([0.3, 0.8]), scalars([0.0, 2.0]), outputs(6)

    @ti.kernel
    def k():
        for i in range(2):
            y[i] = x[0] / z[i] if z[i] > 0.0 else x[1]
            y[2 + i] = ti.sqrt(z[i] * x[0]) if z[i] > 0.0 else 0.0
            w = ti.log(x[0] * z[i]) * z[i] if z[i] != 0.0 else 0.0
            y[4 + i] = w * x[1]

    check_jacobian(k, x, y)
    check_jacobian(k, [x, z], y, expected=guarded_division(x.to_numpy(), z.to_numpy()))


def guarded_division(x, z):
    """Closed form of the kernel above; at z = 0 the branch taken does not depend on z."""
    by_x, by_z = np.zeros((6, 2)), np.zeros((6, 2))
    by_x[0, 1] = 1
    by_x[1, 0], by_z[1, 1] = 1 / z[1], -x[0] / z[1] ** 2
    root = np.sqrt(z[1] * x[0])
    by_x[3, 0], by_z[3, 1] = z[1] / (2 * root), x[0] / (2 * root)
    by_x[5] = z[1] / x[0] * x[1], np.log(x[0] * z[1]) * z[1]
    by_z[5, 1] = (np.log(x[0] * z[1]) + 1) * x[1]
    return [[by_x, by_z]]
