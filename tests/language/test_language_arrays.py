"""Arrays as params and outputs, and precision of the result."""

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import check_jacobian, outputs, scalars
from numpy.testing import assert_allclose

from taichi_ext import jacobian

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.23, 0.9]
vec2 = ti.types.vector(2, ti.f64)
array1 = ti.types.ndarray(dtype=ti.f64, ndim=1)


# --- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_numpy_arrays():
    a, b = real(FIVE), real(np.zeros(5))
    x = scalars([0.7])

    @ti.kernel
    def k(p: array1, q: array1, s: ti.f64):
        for i in range(5):
            q[i] = p[i] * p[4 - i] * s + x[0]
            q[i] += p[i]

    J = check_jacobian(k, [a, x], b, args=(a, b, 0.5))
    named = jacobian(k, {"p": "p", "s": "s"}, "q", args=(a, b, 0.5))
    assert_allclose(named["p"], J[0], rtol=1e-12)
    assert_allclose(named["s"], a * a[::-1], rtol=1e-12)


@pytest.mark.sweep
def test_taichi_arrays_of_vectors():
    a, b = ti.ndarray(vec2, shape=3), ti.ndarray(ti.f64, shape=(3, 2))
    a.from_numpy(np.array([[0.3, 0.8], [0.5, 1.1], [0.7, 0.2]]))

    @ti.kernel
    def k(p: ti.types.ndarray(dtype=vec2, ndim=1), q: ti.types.ndarray(dtype=ti.f64, ndim=2)):
        for i in p:
            q[i, 0] = p[i].dot(p[2 - i])
            q[i, 1] = p[i].x * q[i, 0] + p.shape[0]

    check_jacobian(k, a, b, args=(a, b))


@pytest.mark.cpu_only("a GPU gets a copy of the host's array for each argument")
def test_one_array_for_two_arguments():
    a = real(FIVE)

    @ti.kernel
    def k(p: array1, q: array1):
        for _ in range(1):
            for i in range(4):
                q[i + 1] = p[i] * q[i + 1]

    check_jacobian(k, a, a, args=(a, a))


# --- precision --------------------------------------------------------------------------------------------------------


def test_single_precision_fields_and_arguments():
    x, y = scalars([0.5, 0.75], ti.f32), outputs(3, dtype=ti.f32)

    @ti.kernel
    def k(a: ti.f32):
        s = x[0]
        ti.loop_config(serialize=True)
        for i in range(3):
            s = s * x[1] + a * i
            y[i] = s * s

    J = jacobian(k, [x, "a"], y, args=(0.25,))
    d, s, tangents = np.array([1.0, 0.0, 0.0]), 0.5, []
    for i in range(3):
        d = d * 0.75 + np.array([0.0, s, i])
        s = s * 0.75 + 0.25 * i
        tangents.append(2 * s * d)
    assert J[0].dtype == J[1].dtype == np.float32
    assert_allclose(J[0], np.array(tangents)[:, :2], rtol=1e-5)
    assert_allclose(J[1], np.array(tangents)[:, 2], rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.double_only("two types of real numbers")
def test_double_output_of_single_parameters():
    x, y = scalars([0.5, 0.75], ti.f32), outputs(2)

    @ti.kernel
    def k():
        y[0] = ti.cast(x[0], ti.f64) * x[1]
        y[1] = x[0] * x[1] * x[0]

    J = check_jacobian(k, x, y, expected=[[0.75, 0.5], [0.75, 0.25]], rtol=1e-7)
    assert J.dtype == np.float64
