"""Vectors and matrices in kernels: constructors, entries, swizzles, slices, operators, methods."""

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
MATRIX = [[1.3, 0.2, -0.4], [0.1, 0.9, 0.7], [-0.3, 0.6, 1.8]]


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


@pytest.mark.sweep
def test_matrices_from_scalars_rows_and_columns():
    x, y = scalars(VALUES), matrix_outputs(2, 2, 8)
    mat = ti.types.matrix(2, 2, ti.f64)

    @ti.kernel
    def k():
        a, b, c, d = x[0], x[1], x[2], x[3]
        u, v = tm.vec2(a, b), tm.vec2(c, d * a)
        y[0] = ti.Matrix([[a, b], [c, d]])
        y[1] = tm.mat2(a, b * c, c, d)
        y[2] = mat(a, 1, 2, d)
        y[3] = mat([[a, b * b], [c, d]])
        y[4] = ti.Matrix.rows([u, v])
        y[5] = ti.Matrix.cols([u, v])
        y[6] = tm.mat2(u, v)
        y[7] = ti.Matrix([[x[i] * x[j] for j in range(2)] for i in range(2)])

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_constant_constructors():
    x, y, z = scalars(VALUES), matrix_outputs(3, 3, 4), vector_outputs(3, 3)

    @ti.kernel
    def k():
        y[0] = ti.Matrix.identity(ti.f64, 3) * x[0]
        y[1] = ti.Matrix.diag(3, x[1])
        y[2] = ti.Matrix.one(ti.f64, 3, 3) * x[2] + ti.Matrix.zero(ti.f64, 3, 3)
        y[3] = tm.eye(3) * x[1] @ ti.Matrix.diag(3, x[0])
        z[0] = ti.Vector.zero(ti.f64, 3) + x[0]
        z[1] = ti.Vector.one(ti.f64, 3) * x[1]
        z[2] = ti.Vector.unit(3, 1, ti.f64) * x[2]

    check_jacobian(k, x, [y, z])


@pytest.mark.sweep
def test_zero_is_filled_later():
    x, y = scalars(VALUES), outputs(3)

    @ti.kernel
    def k():
        v = ti.Vector.zero(ti.f64, 4)
        m = ti.Matrix.zero(ti.f64, 2, 2)
        for i in ti.static(range(4)):
            v[i] = x[i] * x[0]
            m[i // 2, i % 2] = v[i] + x[3]
        y[0] = v.sum() * v[2]
        y[1] = m.determinant()
        v.fill(x[1])
        m.fill(v[0] * 2.0)
        y[2] = v[3] * m[1, 0] * m.trace()

    check_jacobian(k, x, y)


# --- entries, swizzles, slices ----------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_entries_read_and_written():
    x, y, m = scalars(VALUES), vector_outputs(3, 3), matrix_outputs(2, 2, 2)

    @ti.kernel
    def k():
        v = tm.vec3(x[0], x[1], x[2])
        v[0] = v[1] * v[2]
        v[1] += v[0]
        v[2] *= v[1]
        v[0], v[1] = v[1], v[0] * v[2]
        y[0] = v
        y[1][0] = v[2]
        y[1][1] += v[1] * v[0]
        y[1].z = y[1][0] * y[1].y
        a = ti.Matrix([[x[0], x[1]], [x[2], x[3]]])
        a[0, 1] -= a[1, 1] * a[1, 0]
        a[1, 0] /= a[0, 1]
        a[1, 1] **= 2
        m[0] = a
        m[1][0, 1] = a[0, 0]
        m[1][1, 1] -= a[1, 0] * m[1][0, 1]
        y[2] = tm.vec3(a[0, 1], m[0][1, 0] * a[1, 1], v[0])

    check_jacobian(k, x, [y, m])


@pytest.mark.sweep
def test_swizzles():
    x, y, z = vectors([[0.3, 0.8, -0.5, 1.1], [0.7, -0.2, 0.4, 0.9]]), vector_outputs(4, 6), vector_outputs(2, 3)

    @ti.kernel
    def k():
        v, w = x[0], x[1]
        y[0] = v.wzyx * w.xxyy
        y[1] = v.rgba + w.stpq.qpts
        z[0] = v.xy * w.zw + v.yy
        v.xy = v.yx
        y[2] = v
        v.zw += w.xy * v.x
        v.xyz *= w.zyx
        v.w -= v.x
        v.yx = tm.vec2(w.x, v.w)
        y[3] = v
        v.yz = 2.0 * w.x
        v.xw *= v.y
        y[4] = v
        y[5].xz = v.wy
        y[5].y = v.x * y[5].z
        y[5].yw += v.zx
        z[1].yx = z[0].xy
        z[2] = x[0].xw * x[1].yz

    check_jacobian(k, x, [y, z])


@pytest.mark.sweep
def test_slices():
    x, m = vectors([[0.3, 0.8, -0.5, 1.1]]), matrices([MATRIX])
    y, z, w = vector_outputs(3, 4), outputs(5), matrix_outputs(2, 2, 1)

    @ti.kernel
    def k():
        v = x[0]
        a = m[0]
        y[0] = v[1:]
        y[1] = v[:3] * v[1:4]
        y[2] = a[:, 1] * a[2, :]
        y[3] = a[0, :] + a[:, 0]
        z[0] = v[:3:2].sum() * v[0]
        z[1] = v[1:3].norm()
        w[0] = a[:2, 1:] @ a[1:, :2]
        z[2] = m[0][1, :].dot(a[:, 2])
        z[3] = a[::2, ::2].determinant()

    check_jacobian(k, [x, m], [y, z, w])


# --- operators and methods --------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_operators_on_vectors():
    x, y = vectors([[0.3, 0.8], [1.4, 0.6]]), vector_outputs(2, 9)

    @ti.kernel
    def k():
        u, v = x[0], x[1]
        y[0] = u + v * u - v / u
        y[1] = -u * 2 + 3.0 / v - 1 + u * v[0]
        y[2] = u**v + v**2 + 2**u
        y[3] = v % u + v // u
        y[4] = (u < v) * u + ti.select(u > 0.4, u, v)
        y[5] = max(u, v) - min(u, 0.4) + abs(u - v)
        u += v
        u *= 2.0
        u -= v * u
        v /= u
        v **= 2
        y[6] = u + v
        u += u[0]
        v = u + v
        v %= 0.7
        y[7] = u * v
        v -= v[1]
        u //= 0.3
        y[8] = u + v

    check_jacobian(k, x, y)


def test_operators_on_matrices():
    x, m = vectors([[0.3, 0.8]]), matrices([[[1.3, 0.2], [0.1, 0.9]], [[0.4, -0.7], [0.6, 1.8]]])
    y, n = vector_outputs(2, 3), matrix_outputs(2, 2, 6)

    @ti.kernel
    def k():
        u, a, b = x[0], m[0], m[1]
        y[0] = a @ u + u @ b
        y[1] = (a @ b) @ (u + (a - b) @ u)
        n[0] = a @ b + a * b - b / 2.0
        n[1] = a * u[0] + 1
        a = a @ b
        u = a @ u
        n[2] = a
        a = a @ a
        b += a
        b *= 0.1
        n[3] = b
        n[4] = a.transpose() @ b - b.transpose() * a
        n[5] = u.outer_product(x[0]) @ a
        y[2] = -a @ u

    check_jacobian(k, [x, m], [y, n])


@pytest.mark.sweep
def test_methods_of_vectors():
    x, y, z, n = vectors([[0.3, 0.8, 0.5], [1.4, 0.6, 0.9]]), vector_outputs(3, 5), outputs(14), matrix_outputs(3, 3, 1)

    @ti.kernel
    def k():
        u, v = x[0], x[1]
        z[0] = u.dot(v)
        z[1] = u.norm()
        z[2] = u.norm(1e-3)
        z[3] = u.norm_sqr()
        z[4] = u.norm_inv() + v.norm_inv(1e-2)
        z[5] = u.sum()
        z[6] = u.max()
        z[7] = u.min()
        z[8] = u.any() * u[0] + u.all() * v[0]
        z[9] = u.n * u[0]
        z[10] = u.xy.cross(v.xy)
        z[11] = (u - v).norm() * (u + v).normalized().dot(u.normalized(1e-3))
        z[12] = len(u) * u[2] + u.get_shape()[0] * v[1]
        z[13] = x[0].dot(x[1]) * x[0].norm()
        y[0] = u.cross(v)
        y[1] = u.normalized()
        y[2] = v.normalized(1e-3)
        y[3] = u.cast(ti.f64) * v.cast(ti.i32)
        y[4] = x[0].cross(x[1]).normalized()
        n[0] = u.outer_product(v)

    check_jacobian(k, x, [y, z, n])


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
    with open(__file__, encoding="utf-8") as file:
        source = file.read()
    helpers = {"E", "Matrix", "Vector", "func", "pyfunc", "static", "template", "preconditions", "ops_mod", "matmul"}
    helpers |= {"arg_at", "arg_foreach_check", "assert_list", "assert_tensor", "assert_vector", "check_matmul"}
    helpers |= {"check_transpose", "dim_lt", "is_int_const", "same_shapes", "square_matrix"}
    for name in set(dir(matrix_ops)) - helpers:
        if not name.startswith("_"):
            assert f".{name}(" in source, name


@pytest.mark.sweep
def test_rectangular_matrices():
    x, v = matrices([[[0.3, 0.8, 0.5], [1.4, 0.6, -0.9]]]), vectors([[0.7, 0.2]])
    y, z, m = vector_outputs(3, 2), vector_outputs(2, 2), matrix_outputs(2, 2, 1)

    @ti.kernel
    def k():
        a = x[0]
        y[0] = a.transpose() @ v[0]
        y[1] = v[0] @ a
        z[0] = a @ a[0, :]
        m[0] = a @ a.transpose()
        z[1] = tm.vec2(a.n * a[1, 2], a.m * a[0, 1])

    check_jacobian(k, [x, v], [y, z, m])


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


@pytest.mark.sweep
def test_stores_to_slices():
    x, y = scalars([0.3, 0.8, -0.5, 1.1]), matrix_outputs(3, 3, 1)
    z, u = vector_outputs(3, 2), matrix_outputs(2, 3, 1)

    @ti.kernel
    def k():
        for i in range(1):
            c = ti.Matrix([[x[0], x[1], x[2]], [x[3], x[0] * x[1], 1.0], [2.0, x[2], x[3] * x[2]]])
            c[1, :] = ti.Vector([1.0, x[0], 2.0])
            c[:, 0] = ti.Vector([5.0, 6.0, 7.0]) * x[1]
            c[0:2, 1:3] += x[2]
            c[2, :] *= x[3]
            c[0:2, 0:2] = c[1:3, 1:3]
            v = ti.Vector([1.0, x[0], 3.0])
            v[0:2] = v[1:3] * x[0]
            if x[0] > 0:
                c[:, 1] -= c[:, 0]
            y[i] = c
            z[0][1:3] = v[0:2]
            z[1][0:2] -= x[3]
            u[0][1, :] = c[0, :]

    check_jacobian(k, x, [y, z, u])
