"""Scopes and unrolling: sibling blocks, static loops, lists, copies of locals."""

import pytest
import taichi as ti
import taichi.math as tm
from differences import check_jacobian, outputs, scalars, vector_outputs, vectors

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.2, 0.9]


@pytest.mark.sweep
def test_names_of_sibling_scopes():
    x, y = scalars([1.3, 0.4, 0.7]), outputs(3)

    @ti.kernel
    def k():
        for i in range(3):
            if i == 0:
                t = x[0] * x[1]
                t += x[2]
                y[i] = t
            elif i == 1:
                t = 3.0
                y[i] = t * x[1]
            else:
                t = 1
                for u in range(2):
                    t += u
                y[i] = t * x[0]
        for i in range(3):
            t = tm.vec2(x[i], x[0])
            y[i] += t.norm()

    check_jacobian(k, x, y)


def test_names_declared_anew_in_each_iteration():
    x, y = scalars(FIVE), outputs(5)

    @ti.kernel
    def k():
        for i in range(5):
            s = 0.0
            for j in range(i + 1):
                t = 0.0
                if j % 2 == 1:
                    t = x[j] * x[i]
                v = tm.vec2(0.0)
                for l in range(2):
                    t += x[l]
                    v[l] += t
                s += t * v.x + v.y
            y[i] = s

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_several_statements_on_one_line():
    x, y = scalars([1.3, 0.4, 0.7]), outputs(3)

    # fmt: off
    @ti.kernel
    def k():
        for i in range(3):
            a = x[i]; b = a * x[0]; a = b * x[1]; y[i] = a + b  # noqa: E702
            if i > 0: c = x[0]; c *= a; y[i] += c  # noqa: E701, E702
            for j in range(2): d = x[j]; d *= b; y[i] += d; b = d  # noqa: E701, E702
    # fmt: on

    check_jacobian(k, x, y)


def test_branches_that_set_different_locals():
    x, y = scalars(FIVE), outputs(5)

    @ti.kernel
    def k():
        for i in range(5):
            a = x[0]
            b = x[i]
            c = 0.0
            v = tm.vec2(a, b)
            if x[i] > 0.5:
                a = b * x[1]
                if x[i] > 0.8:
                    c = a
                    v = tm.vec2(c, x[2])
                else:
                    v.x = a * c
                    b = v.y
            elif i == 1:
                c = b
                v *= c
            else:
                pass
            if c == 0.0:
                c = v.x * v.y
            y[i] = a * b + c + v.sum()

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_static_unrolling():
    x, y = scalars(FIVE), outputs(5)

    @ti.kernel
    def k():
        for i in range(5):
            a = x[i]
            b = x[0]
            for j in ti.static(range(3)):
                t = a * x[j]
                if ti.static(j != 1):
                    a = t + b
                else:
                    b = t
                if a > 1.0:
                    c = a
                    a = b
                    b = c * x[j + 1]
                for l in range(2):
                    s = a
                    a = s * 0.5 + x[l] * b
                    for m in ti.static(range(2)):
                        b += s * x[m] * 0.1
                v = tm.vec2(a, t)
                for m in ti.static(range(2)):
                    v[m] *= v[1 - m]
                a += v.x * 0.1
            y[i] = a + b

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_static_loops_over_values():
    x, y = scalars(FIVE), outputs(3)
    numbers = [2.0, 3.0]

    @ti.kernel
    def k():
        s = 0.0
        for c in ti.static(numbers):
            for i, d in ti.static(enumerate([0.5, 1.5, 2.5])):
                s += c * x[i] * d * s + x[i]
        y[0] = s
        for i, j in ti.static(ti.ndrange(2, (1, 3))):
            y[1] += x[i] * x[j]
        for I in ti.static(ti.grouped(ti.ndrange(2, 2))):
            y[2] += x[I[0]] * x[I[1] + 1] ** 2
        for a, b in ti.static(zip([0, 1], [2, 3])):
            y[2] *= x[a] + x[b]
        for i in ti.static(range(5)):
            if ti.static(i == 3):
                break
            if ti.static(i == 1):
                continue
            y[1] *= x[i]

    check_jacobian(k, x, y)


def test_lists_and_comprehensions():
    x, y = scalars(FIVE), outputs(4)

    @ti.kernel
    def k():
        items = [x[0] * x[1], x[2], 3.0]
        y[0] = items[0] * items[1] + items[2]
        squares = [x[i] * x[i] for i in range(5)]
        y[1] = squares[0] + squares[4] * squares[1]
        nested = [[x[i] * x[j] for j in range(2)] for i in range(3) if i != 1]
        y[2] = nested[1][0] * nested[0][1]
        table = {"a": x[0], "b": x[1] * x[0]}
        y[3] = table["a"] * table["b"]
        items[0] = x[3]
        items[1] += x[4]
        y[3] += items[0] * items[1]

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_aliases_of_locals_are_copies():
    x, y, v = scalars(FIVE), outputs(4), vectors([[0.3, 0.8], [0.5, 0.2]])
    w = vector_outputs(2, 2)

    @ti.kernel
    def k():
        a = x[0] * x[1]
        b = a
        a *= 2.0
        y[0] = a * b
        b += a
        y[1] = a + b * b
        p = v[0]
        q = p
        p.x = q.y * a
        q *= p
        w[0] = p
        w[1] = q * p
        r = w[0]
        w[0] = v[1]
        y[2] = r.dot(w[0])
        c = y[0]
        y[0] = x[4]
        y[3] = c * y[0]

    check_jacobian(k, [x, v], [y, w])
