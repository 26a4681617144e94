"""Arguments that functions take by reference: locals, expressions, entries of fields."""

import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars, vector_outputs, vectors

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.23, 0.9]


def test_arguments_by_reference():
    x, y, v = scalars(FIVE), outputs(6), vectors([[0.3, 0.8]])

    @ti.func
    def f(a: ti.template(), w: ti.template(), field: ti.template()):
        a = a * w.x + field[0]
        w *= a
        w.y += field[1]
        field[2] = a * field[0]

    @ti.func
    def twice(a: ti.template(), b):
        for _ in range(2):
            f(a, b, y)

    @ti.kernel
    def k():
        for _ in range(1):
            y[0] = x[3]
            y[1] = x[4]
            s, w = x[0], v[0]
            f(s, w, y)
            y[3] = s * w.x * w.y
            f(y[3], w, y)
            twice(s, w)
            y[4] = s * y[2]
            y[5] = w.norm()

    check_jacobian(k, [x, v], y)


@pytest.mark.sweep
def test_expressions_by_reference_inside_and_outside_of_blocks():
    x, y = scalars([0.9, 0.8, 0.3]), outputs(10)

    @ti.func
    def conditional(a: ti.template(), b: ti.template()):
        return (a * b if a > 0.5 else (ti.sin(b) if b > 0.2 else a)) + (b * a if b > a else a * a) * a

    @ti.func
    def branch(a: ti.template()):
        r = 0.0
        if a > 0.5:
            r = a * a
        return r + a * a * 2.0

    @ti.func
    def loops(a: ti.template(), b: ti.template()):
        r = a * b
        for j in range(2):
            r += a * a * j
        s = a * r
        while s < 3.0:
            s += a * b + 1.0
        return s + a * b

    @ti.kernel
    def k():
        y[9] = conditional(x[0] * x[1], x[2] * x[0])
        for i in range(3):
            y[i] = conditional(x[i] * x[0] + x[1], x[1] * x[i])
            y[3 + i] = branch(x[i] * x[2]) + branch(x[0] * x[1])
            y[6 + i] = loops(x[i] * x[0], x[2] + x[i])

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_entries_by_reference_inside_and_outside_of_blocks():
    x, y, v = scalars([0.9, 0.8, 0.3]), outputs(8), vectors([[0.9, 0.8], [0.3, 0.4]])
    w = vector_outputs(2, 4)

    @ti.func
    def change(a: ti.template(), c):
        if c > 0.85:
            a = c * 2.0
        a += c * x[1]
        for j in range(2):
            a *= c
        a = a + x[2]

    @ti.func
    def change_vector(a: ti.template(), b: ti.template()):
        if b.x > 0.5:
            a = b * 2.0
        # not a += b.yx * a.x: after a whole store in a block, Taichi 1.7.4 loses the new a.x of a plain kernel
        a *= b.yx + 1.0
        a.x *= b.y
        for j in range(2):
            a.y += b.x * j
        return a.norm()

    @ti.kernel
    def k():
        for i in range(2):
            m = i
            if i == 1:
                m = 3
            change(y[m], x[i])
            change(y[m + 4], x[2])
            w[1 + i].x += change_vector(w[m], v[i])
            u = v[0]
            w[1 + i].y += change_vector(u, v[1] * 2.0) * u.x

    check_jacobian(k, [x, v], [y, w])


@pytest.mark.sweep
def test_an_entry_by_reference_whose_index_changes():
    """Taichi evaluates the index anew at each use."""
    x, y = scalars([0.9, 0.8, 0.3]), outputs(4)

    @ti.func
    def f(a: ti.template(), m: ti.template()):
        a = x[0] * 3.0
        m = 2  # noqa: F841
        a = a + x[1]

    @ti.kernel
    def k():
        for _ in range(1):
            m = 0
            f(y[m], m)

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_an_expression_by_reference_is_evaluated_at_each_use():
    x, y = scalars([0.9, 0.8, 0.3]), outputs(2)

    @ti.func
    def f(a: ti.template(), s: ti.template()):
        before = a
        s = s + x[1]
        return a * s + before

    @ti.func
    def stored(a: ti.template()):
        before = a
        y[1] = x[2] * 2.0
        return a * before

    @ti.kernel
    def k():
        for _ in range(1):
            s = x[0]
            y[0] = f(s * 2.0, s)
            y[1] = x[0]
            y[0] += stored(y[1] * 3.0)

    check_jacobian(k, x, y)
