"""Programs in Taichi's own defaults: float32 literals, locals and fields, alone and beside float64 fields."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars
from numpy.testing import assert_allclose

from taichi_ext import jacobian

pytestmark = pytest.mark.usefixtures("ti32")

FIVE = np.array([1.3, 0.4, 0.7, 0.23, 0.9])


def differences(f, x, step=1e-6):
    """Central differences in float64 of a function of NumPy arrays."""
    columns = []
    for i in range(x.size):
        d = np.zeros_like(x)
        d[i] = step
        columns.append((np.asarray(f(x + d)) - np.asarray(f(x - d))) / (2 * step))
    return np.stack(columns, axis=-1)


def test_many_parameters():
    n = 50
    values = np.linspace(0.2, 1.4, n)
    x, y = scalars(values, ti.f32), outputs(3, dtype=ti.f32)

    @ti.kernel
    def k():
        for i in range(3):
            acc = 0.0
            damped = 1.0
            for j in range(n):
                acc += ti.exp(-x[j]) * x[i]
                damped = 0.95 * damped + 0.1 * acc * x[j] ** 2
            y[i] = acc * damped

    def f(x):
        out = []
        for i in range(3):
            acc, damped = 0.0, 1.0
            for j in range(n):
                acc += np.exp(-x[j]) * x[i]
                damped = 0.95 * damped + 0.1 * acc * x[j] ** 2
            out.append(acc * damped)
        return np.array(out)

    assert_allclose(jacobian(k, x, y), differences(f, values), rtol=1e-4, atol=1e-4)


@pytest.mark.double_only("two types of real numbers")
def test_double_fields_among_single_locals():
    """A float64 field gets float64 tangents, also where the literals of the program are float32."""
    x, y, z = scalars(FIVE), outputs(5), outputs(5)

    @ti.kernel
    def k():
        for i in range(5):
            y[i] = x[i] * x[0] * 3.0 + ti.sin(x[i])
            s = x[i] * 2.0
            for j in range(3):
                s = s * x[j] + x[i]
            z[i] = s

    def f(x):
        out = []
        for i in range(5):
            s = x[i] * 2.0
            for j in range(3):
                s = s * x[j] + x[i]
            out.append(s)
        return [*(x * x[0] * 3.0 + np.sin(x)), *out]

    J = jacobian(k, x, [y, z])
    assert J[0].dtype == J[1].dtype == np.float64
    assert_allclose(np.concatenate(J), differences(f, FIVE), rtol=1e-8, atol=1e-9)


def test_single_accumulators_of_double_values():
    x, y = scalars(FIVE), outputs(2)

    @ti.kernel
    def k():
        s = 0.0  # float32 in this program
        for j in range(5):
            s += x[j] * x[0]
        y[0] = s * x[1]
        for _ in range(1):
            t = 1.0
            for j in range(5):
                t *= x[j]
            y[1] = t

    def f(x):
        return [(x * x[0]).sum() * x[1], x.prod()]

    assert_allclose(jacobian(k, x, y), differences(f, FIVE), rtol=1e-5, atol=1e-6)
