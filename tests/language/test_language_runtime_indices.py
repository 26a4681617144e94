"""Entries of vectors and matrices by run-time indices, of locals and of fields."""

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

pytestmark = pytest.mark.usefixtures("ti64")

VALUES = [0.3, 0.8, -0.5, 1.1]
MATRIX = [[1.3, 0.2, -0.4], [0.1, 0.9, 0.7], [-0.3, 0.6, 1.8]]


# --- run-time indices -------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_indices_that_are_named_after_a_local_whose_tangent_they_reach():
    x, y = scalars(VALUES), outputs(3)

    @ti.kernel
    def k(n: ti.i32):
        for i in range(3):
            s = x[0]
            v = ti.Vector([0.7, s, s])
            index = n % 4
            for j in range(2):
                s += x[index] * x[1]
            y[i] += v[n % 3] * s

    check_jacobian(k, x, y, args=(1,))


def test_runtime_indices_of_local_vectors():
    x, y = scalars(VALUES), outputs(6)

    @ti.kernel
    def k():
        for n in range(1):
            v = ti.Vector([x[0], x[1], x[2], x[3]])
            for i in range(4):
                v[i] = v[i] * x[3 - i] + v[(i + 1) % 4]
            for i in range(3):
                v[i + 1] += v[i] * x[i]
                v[3 - i] *= x[0]
                v[i] -= 0.1 * v[i]
            s = 0.0
            for i in range(4):
                for j in range(i):
                    s += v[i] * v[j]
            y[0] = s
            for i in range(4):
                y[i + 1] = v[i]
            m = 2
            t = v[m]
            v[m] = x[0]
            m = 1
            v[m], v[m + 1] = v[m + 1] * t, v[m]
            y[5] = v[m] * v[2] + t

    check_jacobian(k, x, y)


def test_runtime_indices_of_local_matrices():
    x, y = scalars(VALUES), outputs(4)

    @ti.kernel
    def k():
        for n in range(1):
            a = ti.Matrix([[x[0], x[1]], [x[2], x[3]]])
            b = ti.Matrix.zero(ti.f64, 2, 2)
            for i in range(2):
                for j in range(2):
                    for l in range(2):
                        b[i, j] += a[i, l] * a[l, j]
                    b[i, j] = b[i, j] * 0.5 + x[i]
                    a[j, i] = b[i, j] - a[i, j]
            for i in range(2):
                for j in range(2):
                    y[i * 2 + j] = a[i, j] * b[j, i]

    check_jacobian(k, x, y)


@pytest.mark.sweep
@pytest.mark.parametrize("count", [4, 40], ids=["short rows", "long rows"])
def test_a_matrix_filled_entry_by_entry(count):
    x, y = scalars(np.linspace(0.3, 1.2, count)), outputs(4)

    @ti.kernel
    def k():
        for n in range(4):
            m = ti.Matrix.zero(ti.f64, 3, 3)
            m[0, 0] = x[0] * x[n]
            m[0, 1] = x[1] + x[count - 1]
            m[1, 1] = 2.0
            m[0, n % 2] = x[2]
            if n > 1:
                m[2, 0] = x[2]
                m[0, 1] = x[n] * m[2, 0]
            m[2, 0] += x[3]
            m[0, 0] = x[3]
            m[n % 3, 2 - n % 2] += m[0, n % 2] * x[1]
            m[2, 2] = x[1] * m[0, 1]
            for i in range(3):
                m[1, 2] = m[i, 0] * x[i]
                m[i, 1] = m[1, 2] + m[i, 1]
            s = 0.0
            for i, j in ti.ndrange(3, 3):
                s += m[i, j] * m[j, i]
            y[n] = s

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_runtime_index_of_a_vector_that_is_also_used_as_a_whole():
    x, y = scalars(VALUES), outputs(5)

    @ti.kernel
    def k():
        for n in range(2):
            v = tm.vec3(x[0], x[1], x[2])
            w = v
            for i in range(3):
                v[i] *= w[2 - i]
                w = v.cross(w) + x[3]
                if i == n:
                    w.xy = v.yz
                v += w[i]
            y[n] = v.norm() + w.dot(v)
            u = v
            v[n] = 0.0
            y[2 + n] = (u - v)[n] * u[2]
        y[4] = x[0]

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_runtime_index_of_a_result():
    x, y = vectors([[0.3, 0.8, 0.5], [1.4, 0.6, 0.9]]), outputs(3)

    @ti.kernel
    def k():
        for i in range(3):
            y[i] = (x[0] * x[1])[i] + x[1].cross(x[0])[2 - i] * x[0][i] + x[i % 2][i]

    check_jacobian(k, x, y)


def test_a_local_array_as_a_stack():
    x, y = scalars(VALUES), outputs(2)

    @ti.kernel
    def k():
        for n in range(2):
            stack = ti.Vector.zero(ti.f64, 8)
            top = 0
            for i in range(4):
                stack[top] = x[i]
                top += 1
                if i % 2 == 1:
                    top -= 1
                    right = stack[top]
                    top -= 1
                    left = stack[top]
                    stack[top] = left * right + x[n]
                    top += 1
            total = 1.0
            while top > 0:
                top -= 1
                total *= stack[top]
            y[n] = total

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_sorting_a_local_array():
    x, y = scalars([0.8, 0.3, 1.1, -0.5, 0.6]), outputs(5)

    @ti.kernel
    def k():
        for n in range(1):
            a = ti.Vector.zero(ti.f64, 5)
            for i in range(5):
                a[i] = x[i] * x[i] + x[0]
            for i in range(5):
                for j in range(4 - i):
                    if a[j] > a[j + 1]:
                        a[j], a[j + 1] = a[j + 1], a[j]
            for i in range(5):
                y[i] = a[i]

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_runtime_index_with_many_parameters():
    """More parameters than registers: the local array keeps rows."""
    x, y = scalars(np.linspace(0.2, 1.4, 40)), outputs(4)

    @ti.kernel
    def k():
        for n in range(4):
            a = ti.Vector.zero(ti.f64, 4)
            for i in range(40):
                a[i % 4] = a[i % 4] * 0.9 + x[i] * x[(i + n) % 40]
                if i % 7 == 0:
                    b = a[(i + 1) % 4]
                    a[(i + 1) % 4] = a[i % 4]
                    a[i % 4] = b
            m = n
            first = a[m]
            m = 3 - m
            a[n] += a[m]
            y[n] = first * a[m] + a[n]

    check_jacobian(k, x, y)


# --- fields of vectors and matrices -----------------------------------------------------------------------------------


# Taichi 1.7.4 aborts when a kernel uses a vector of a field both as a whole and by a run-time index.


@pytest.mark.sweep
def test_fields_by_runtime_component():
    x, m = vectors([[0.3, 0.8, 0.5], [1.4, 0.6, 0.9]]), matrices([MATRIX])
    y, n = vector_outputs(3, 2), matrix_outputs(3, 3, 2)

    @ti.kernel
    def k():
        for i in range(2):
            for j in range(3):
                y[i][j] = x[i][j] * x[1 - i][2 - j]
                for l in range(3):
                    n[i][j, l] += m[0][j, l] * y[i][j] + m[0][l, j]
                y[i][(j + i) % 3] *= n[i][j, i]

    check_jacobian(k, [x, m], [y, n])


@pytest.mark.sweep
def test_fields_as_a_whole():
    x, m = vectors([[0.3, 0.8, 0.5], [1.4, 0.6, 0.9]]), matrices([MATRIX])
    y, n = vector_outputs(3, 2), matrix_outputs(3, 3, 2)

    @ti.kernel
    def k():
        for i in range(2):
            n[i] = m[0] * x[i][0]
            y[i] = m[0] @ x[i]
            y[i] += x[1 - i].zxy * m[0][1, 2]
            y[i] *= 2.0
            y[i].xy -= x[i].yz
            n[i] -= n[i] @ m[0]
            n[i][0, 1] *= y[i][2]

    check_jacobian(k, [x, m], [y, n])


@pytest.mark.sweep
def test_vectors_updated_in_place():
    x = vectors([[1.3, 0.4, 0.7], [0.2, 0.5, 0.9]])

    @ti.kernel
    def k():
        for i in ti.static(range(2)):  # in a run-time loop, Taichi 1.7.4 would read stale values of x[0]
            x[i] = x[1 - i].cross(x[i])
            x[i].xy = x[i].yx * x[0].z
            x[i] += x[i][1]
            x[i] *= x[1]
            x[i][2] -= x[0].norm()
            x[0] = x[0][1] * tm.vec3(2.0, 1.0, x[i].x)
            x[i] = x[i] / x[i].norm() + x[1 - i]

    check_jacobian(k, x, x)


@pytest.mark.sweep
def test_a_component_stored_after_the_whole():
    x, y = vectors([[0.3, 0.4, 1.2], [0.5, 0.6, 0.9]]), vector_outputs(3, 2)
    m, n = matrices([MATRIX]), matrix_outputs(3, 3, 1)

    @ti.kernel
    def k():
        for i in range(2):
            y[i] = x[i]
            y[i].x = x[0].y * x[i].x
        n[0][1, 2] = x[0].x
        n[0] = m[0]
        n[0][0, 1] = m[0][1, 0] * x[1].z

    check_jacobian(k, [x, m], [y, n])
