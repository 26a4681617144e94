"""Vectors and matrices in kernels: constructors, entries, swizzles, slices, operators, methods."""

from pathlib import Path

import numpy as np
import pytest
import taichi as ti
import taichi.math as tm
from differences import check_jacobian, matrices, matrix_outputs, outputs, scalars, vector_outputs, vectors
from numpy.testing import assert_allclose, assert_array_equal
from taichi.lang import matrix_ops

from taichi_ext import jacobian

pytestmark = pytest.mark.usefixtures("ti64")

VALUES = [0.3, 0.8, -0.5, 1.1]


# --- constructors -----------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_vectors_from_scalars():
    x, y = scalars(VALUES), vector_outputs(3, 8)
    vec = ti.types.vector(3, ti.f64)
    single = ti.types.vector(3, ti.f32)

    @ti.kernel
    def k():
        y[0] = ti.Vector([x[0], x[1], x[2]])
        y[1] = tm.vec3(x[0], x[1] * x[0], 1.0)
        y[2] = vec(x[3], 2, x[0])
        y[3] = vec(x[3])
        y[4] = tm.vec3(tm.vec2(x[0], x[1]), x[2]) + vec([x[0], x[1], x[2]])
        y[5] = ti.Vector([x[0], 1, 2.0], dt=ti.f64) * ti.Vector([0, x[1], x[2]])
        y[6] = single(x[0], x[1], x[2]) * 2.0
        y[7] = ti.Vector([x[i] * i for i in range(3)])

    step = np.zeros((8, 3, 4))
    p = VALUES
    for j in range(3):
        step[0, j, j] = 1
        step[3, j, 3] = 1
        step[6, j, j] = 2
        step[7, j, j] = j
    step[1, 0, 0], step[1, 1, 0], step[1, 1, 1] = 1, p[1], p[0]
    step[2, 0, 3], step[2, 2, 0] = 1, 1
    step[4] = 2 * step[0]
    step[5, 1, 1], step[5, 2, 2] = 1, 2
    check_jacobian(k, x, y, expected=step)


# --- entries, swizzles, slices ----------------------------------------------------------------------------------------


# --- operators and methods --------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 3])
def test_methods_of_matrices(size):
    values = np.add.outer(np.arange(size), 2.0 * np.arange(size)) * 0.1 + np.diag(1.0 + np.arange(size)) + 0.05
    values[0, -1] -= 0.4
    x, y, z = matrices([values]), matrix_outputs(size, size, 3), outputs(10)

    @ti.kernel
    def k():
        a = x[0]
        z[0] = a.determinant()
        z[1] = a.trace()
        z[2] = a.norm() + a.norm_sqr()
        z[3] = a.norm_inv() + a.norm(1e-2)
        z[4] = a.sum()
        z[5] = a.max()
        z[6] = a.min()
        z[7] = a.any() * a[0, 0] + a.all() * a[0, 0]
        z[8] = a.n * a.m * a[0, 0]
        z[9] = x[0].determinant() * x[0].trace()
        y[0] = a.inverse()
        y[1] = a.transpose()
        y[2] = a.cast(ti.f64) @ a

    check_jacobian(k, x, [y, z])


@pytest.mark.taichi_only("the names of Taichi")
def test_every_public_method_of_vectors_and_matrices_is_tested():
    here = Path(__file__)
    source = here.read_text(encoding="utf-8") + here.with_name("test_programs.py").read_text(encoding="utf-8")
    helpers = {"E", "Matrix", "Vector", "func", "pyfunc", "static", "template", "preconditions", "ops_mod", "matmul"}
    helpers |= {"arg_at", "arg_foreach_check", "assert_list", "assert_tensor", "assert_vector", "check_matmul"}
    helpers |= {"check_transpose", "dim_lt", "is_int_const", "same_shapes", "square_matrix"}
    for name in set(dir(matrix_ops)) - helpers:
        if not name.startswith("_"):
            assert f".{name}(" in source, name


@pytest.mark.sweep
def test_atan2_of_vectors_is_that_of_taichi():
    """Taichi 1.7.4 computes it in float32, whatever the type; the state is that of a plain run, the derivative exact."""
    x, y = vectors([[0.3, 0.7]]), vector_outputs(2, 1)

    @ti.kernel
    def k():
        for i in x:
            y[i] = ti.atan2(x[i], 2.0 * x[i].yx)

    k()
    plain = y.to_numpy()
    J = jacobian(k, x, y)[0, :, 0]
    assert_array_equal(y.to_numpy(), plain)
    a, b = 0.3, 0.7
    first = np.array([2 * b, -2 * a]) / (a**2 + 4 * b**2)
    second = np.array([-2 * b, 2 * a]) / (b**2 + 4 * a**2)
    assert_allclose(J, [first, second], rtol=1e-12)
