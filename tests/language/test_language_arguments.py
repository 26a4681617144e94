"""Params and outputs: shapes, structures, value arguments, return values."""

import numpy as np
import pytest
import taichi as ti
import taichi.math as tm
from differences import check_jacobian, matrices, matrix_outputs, outputs, scalars, vector_outputs, vectors
from numpy.testing import assert_allclose

from taichi_ext import jacobian

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.23, 0.9]
vec2 = ti.types.vector(2, ti.f64)
vec3 = ti.types.vector(3, ti.f64)
mat2 = ti.types.matrix(2, 2, ti.f64)


def differences_by_argument(f, args, position, step=1e-6):
    """d f(*args) / d args[position], f giving an array."""
    centre = np.array(args[position], dtype=np.float64)
    result = np.zeros((*np.shape(f(*args)), *centre.shape))
    for index in np.ndindex(centre.shape):
        ends = []
        for sign in (1, -1):
            moved = centre.copy()
            moved[index] += sign * step
            value = float(moved) if centre.ndim == 0 else moved
            ends.append(np.array(f(*args[:position], value, *args[position + 1 :])))
        result[(..., *index)] = (ends[0] - ends[1]) / (2 * step)
    return result


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_fields_of_vectors_and_matrices_by_each_other():
    v, m = vectors([[0.3, 0.8, 0.5], [1.4, 0.6, 0.9]]), matrices(np.arange(1.0, 13.0).reshape(2, 2, 3) / 5.0)
    y, n = vector_outputs(2, 2), matrix_outputs(3, 2, 1)

    @ti.kernel
    def k():
        for i in range(2):
            y[i] = m[i] @ v[i] * v[0].x
            n[0] += v[i].outer_product(m[i] @ v[1 - i])

    J = check_jacobian(k, [v, m], [y, n])
    assert J[0][1].shape == (2, 2, 2, 2, 3)
    assert J[1][0].shape == (1, 3, 2, 2, 3)


# --- value arguments --------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_vector_and_matrix_arguments():
    x, y = scalars(FIVE), vector_outputs(2, 2)

    @ti.kernel
    def k(v: vec3, m: mat2, s: ti.f64):
        w = m @ v.xy * x[0]
        y[0] = w * s
        for i in range(2):
            for j in range(3):
                w += v[j] * m[i, 1] * x[j]
        y[1] = w.yx * v.norm()

    def f(v, m, s):
        k(vec3(*v), mat2(np.asarray(m).tolist()), s)
        return y.to_numpy()

    v, m, s = [0.3, 0.8, 0.5], [[1.0, 0.2], [0.4, 1.5]], 0.7
    J = jacobian(k, ["v", "m", "s", x], y, args=(vec3(*v), mat2(m), s))
    for position in range(3):
        assert_allclose(J[position], differences_by_argument(f, (v, m, s), position), rtol=1e-6, atol=1e-8)
    assert J[0].shape == (2, 2, 3)
    assert J[1].shape == (2, 2, 2, 2)


def test_arguments_passed_on_to_functions():
    y = outputs(2)

    @ti.func
    def f(a, b):
        a *= b
        return a + b

    @ti.kernel
    def k(a: ti.f64, b: ti.f64):
        y[0] = f(a, b) * a
        c = a
        ti.loop_config(serialize=True)
        for _ in range(3):
            c = f(c, b)
        y[1] = c

    def g(*args):
        k(*args)
        return y.to_numpy()

    J = jacobian(k, ("a", "b"), y, args=(1.3, 0.4))
    for position in range(2):
        assert_allclose(J[position], differences_by_argument(g, (1.3, 0.4), position), rtol=1e-6)


# --- return values ----------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_returned_vector_matrix_and_tuple():
    x = scalars(FIVE[:3])

    @ti.kernel
    def vector() -> vec2:
        v = tm.vec2(x[0] * x[1], x[2])
        for i in range(2):
            v += x[i]
        return v * x[0]

    @ti.kernel
    def matrix() -> mat2:
        return ti.Matrix([[x[0], x[1] * x[2]], [x[2] ** 2, 1.0]])

    @ti.kernel
    def pair() -> (ti.f64, ti.f64):
        return x[0] * x[1], x[2] * x[2]

    a, b, c = FIVE[:3]
    s = [a * b + a + b, c + a + b]
    expected = [[s[0] + a * (b + 1), a * (a + 1), 0], [s[1] + a, a, a]]
    assert_allclose(jacobian(vector, x), expected, rtol=1e-12)
    assert_allclose(jacobian(matrix, x), [[[1, 0, 0], [0, c, b]], [[0, 0, 2 * c], [0, 0, 0]]], rtol=1e-12)
    assert_allclose(jacobian(pair, x), [[b, a, 0], [0, 0, 2 * c]], rtol=1e-12)
