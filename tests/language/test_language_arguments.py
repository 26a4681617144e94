"""Params and outputs: shapes, structures, value arguments, return values."""

import numpy as np
import pytest
import taichi as ti
import taichi.math as tm
from differences import (
    check_jacobian,
    matrices,
    matrix_outputs,
    outputs,
    scalars,
    vector_outputs,
    vectors,
)
from numpy.testing import assert_allclose

from taichi_ext import jacobian, value_and_jacobian

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
def test_fields_of_many_dimensions():
    x, y = scalars(np.arange(1.0, 25.0).reshape(2, 3, 4) / 7.0), outputs(3, 2)

    @ti.kernel
    def k():
        for i, j, l in x:
            y[j, i] += x[i, j, l] ** 2 * x[0, 0, l]

    J = check_jacobian(k, x, y)
    assert J.shape == (3, 2, 2, 3, 4)


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


@pytest.mark.sweep
def test_structures_of_params_and_outputs():
    a, b, y, z = scalars([0.3, 0.8]), scalars([0.5]), outputs(2), outputs(1)

    @ti.kernel
    def k():
        for i in range(2):
            y[i] = a[i] * b[0]
            z[0] += a[i] ** 2

    J = jacobian(k, {"a": a, "rest": (b,)}, {"image": y, "loss": [z]})
    assert set(J) == {"image", "loss"}
    assert isinstance(J["loss"], list)
    assert isinstance(J["image"]["rest"], tuple)
    assert_allclose(J["image"]["a"], np.diag([0.5, 0.5]))
    assert_allclose(J["image"]["rest"][0], [[0.3], [0.8]])
    z.fill(0)
    value, J = value_and_jacobian(k, [a], {"loss": z})
    assert_allclose(value["loss"], [0.73])
    assert_allclose(J["loss"][0], [[0.6, 1.6]])


def test_no_dimensions():
    x, y = scalars(0.7), outputs()

    @ti.kernel
    def k():
        y[None] = ti.sin(x[None]) * x[None]

    J = check_jacobian(k, x, y)
    assert J.shape == ()


def test_one_component_fields():
    x, y = vectors([[0.7], [0.3]]), vector_outputs(1, 2)

    @ti.kernel
    def k():
        for i in range(2):
            y[i] = x[i] * x[0][0]

    check_jacobian(k, x, y)


def test_a_component_of_a_vector_field():
    x, y = vectors([[0.3, 0.8], [0.5, 1.1]]), outputs(2)
    first, second = x.get_scalar_field(0), x.get_scalar_field(1)

    # Taichi 1.7.4 reads garbage where a kernel names a component as first[i] and another as x[i].y
    @ti.kernel
    def k():
        for i in range(2):
            y[i] = first[i] * second[i] + first[1 - i] ** 2

    @ti.kernel
    def in_place():
        for i in range(2):
            first[i] = second[i] * first[i]
            first[i] += first[i] * second[i]
            second[i] *= first[i]

    check_jacobian(k, x, y)
    check_jacobian(in_place, x, x)


# --- value arguments --------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_scalar_arguments():
    x, y = scalars(FIVE), outputs(5)

    @ti.kernel
    def k(a: ti.f64, n: ti.i32, b: ti.f64):
        for i in range(5):
            y[i] = x[i] * a**n + b * b * x[0]
            for _ in range(n):
                y[i] *= a

    def f(*args):
        k(*args)
        return y.to_numpy()

    args = (1.3, 2, 0.7)
    J = jacobian(k, {"a": "a", "b": "b", "x": x}, y, args=args)
    assert_allclose(J["a"], differences_by_argument(f, args, 0), rtol=1e-6)
    assert_allclose(J["b"], differences_by_argument(f, args, 2), rtol=1e-6)
    check_jacobian(k, x, y, args=args)
    check_jacobian(k, x, y, args=(0.4, 0, 2.0))


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


@pytest.mark.sweep
def test_template_arguments():
    x, z, y = scalars(FIVE), scalars(FIVE[::-1]), outputs(5)

    @ti.kernel
    def k(a: ti.template(), b: ti.template(), n: ti.template()):
        for i in a:
            b[i] = a[i] ** n * a[0]

    check_jacobian(k, x, y, args=(x, y, 2))
    check_jacobian(k, z, y, args=(z, y, 3))

    def twice():
        k(x, z, 2)
        k(z, y, 3)

    check_jacobian(twice, x, y, state=[z])


# --- return values ----------------------------------------------------------------------------------------------------


def test_returned_scalar():
    x = scalars(FIVE)

    @ti.kernel
    def k(a: ti.f64) -> ti.f64:
        s = 0.0
        for i in range(5):
            s += x[i] * x[i] * a
        return s * x[0]

    value, J = value_and_jacobian(k, ["a", x], args=(0.7,))
    p = np.array(FIVE)
    assert_allclose(value, 0.7 * (p @ p) * p[0], rtol=1e-12)
    assert_allclose(J[0], (p @ p) * p[0], rtol=1e-12)
    assert_allclose(J[1], 0.7 * (2 * p * p[0] + (p @ p) * np.eye(5)[0]), rtol=1e-12)
    assert J[0].shape == ()
    assert J[1].shape == (5,)


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


@pytest.mark.sweep
def test_a_return_value_beside_fields():
    x, y = scalars(FIVE[:2]), outputs(2)

    @ti.kernel
    def k() -> ti.f64:
        y[0] = x[0] * x[1]
        return y[0] * 2.0

    assert_allclose(jacobian(k, x), [0.8, 2.6], rtol=1e-12)
    assert_allclose(jacobian(k, x, y), [[0.4, 1.3], [0, 0]], rtol=1e-12)
