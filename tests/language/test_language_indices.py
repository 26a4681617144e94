"""Indices: integer locals that change, arithmetic, aliases of entries, stores that may meet."""

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.2, 0.9]


@pytest.mark.sweep
def test_integer_locals_reassigned_and_used_as_indices():
    x, y = scalars([1.3, 0.4, 0.7, 0.2]), outputs(4)

    @ti.kernel
    def k():
        for i in range(4):
            m = i
            a = x[m]
            m = (m + 1) % 4
            b = x[m]
            n = m
            m += 1
            c = x[n] * x[m % 4]
            for j in range(3):
                n = (n + m) % 4
                c += x[n] * a
                m = n
            y[n] += a * b * c * x[m]

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_index_carried_through_a_loop():
    x, y = scalars(FIVE), outputs(5)
    link = ti.field(ti.i32, shape=5)
    link.from_numpy(np.array([3, 4, 1, 2, 0], dtype=np.int32))

    @ti.kernel
    def k():
        for i in range(5):
            at = i
            value = x[at]
            previous = at
            for _ in range(3):
                at = link[at]
                value = value * x[at] + x[previous]
                previous = at
            low, high = 0, 4
            while high - low > 1:
                middle = (low + high) // 2
                if x[middle] * 0.0 + middle < i:
                    low = middle
                else:
                    high = middle
                value += x[middle]
            y[i] = value * x[low] + x[high]

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_index_arithmetic():
    x, y = scalars(np.linspace(0.1, 0.9, 30)), outputs(4)

    @ti.kernel
    def k(n: ti.i32):
        for i in range(4):
            for j in range(3):
                y[i] += x[i * 2 - j + 3] * x[(i + 1) * 4 + j] + x[i * n + j] * x[i // 2 * 2]
                y[i] += x[n * n - i] * x[(i * j) % 7] - x[-(-i)] * x[j + i] * x[i + j]
                m = i * 3
                p = m - j * 2 + 5
                y[i] += x[p + m] * x[p] - x[m]

    check_jacobian(k, x, y, args=(3,))


@pytest.mark.sweep
def test_index_arithmetic_that_wraps():
    x, y = scalars(np.linspace(0.1, 0.9, 300)), outputs(3)

    @ti.kernel
    def k():
        for i in range(3):
            m = ti.cast(130 + i, ti.u8)
            n = ti.cast(i - 1, ti.i64)
            y[i] = x[m + m] * x[m] + x[n + 1] * x[m - ti.cast(1, ti.u8)]

    check_jacobian(k, x, y)


def test_fields_in_python_containers():
    a, b, y, z = scalars([0.3, 0.8]), scalars([0.5, 0.6]), outputs(2), outputs(2)
    fields = [a, b]
    table = {"p": a, "q": [b, y]}

    @ti.kernel
    def k():
        for i in range(2):
            y[i] = fields[0][i] * fields[1][1 - i]
            for f in ti.static(fields):
                y[i] += f[i] * f[0]
            for n, f in ti.static(enumerate(fields)):
                z[i] += f[i] * n
            z[i] += table["p"][i] * table["q"][0][i]

    check_jacobian(k, fields, [y, z])


@pytest.mark.sweep
def test_five_loops_deep():
    x, y = scalars([0.3, 0.8, 0.5]), outputs(2)

    @ti.kernel
    def k():
        for i in range(2):
            s = x[i]
            for a in range(2):
                t = s
                for b in range(2):
                    u = t * x[a]
                    for c in range(2):
                        w = u + x[b] * s
                        for d in range(2):
                            w = w * x[c] + 0.1 * u
                            if d == i:
                                break
                            s += w * 0.1
                            for e in range(2):
                                t += w * x[e] * 0.1
                        u = w
                    t = t * 0.5 + u
                s = t
            y[i] = s

    check_jacobian(k, x, y)


def test_a_sum_of_zero_tangents_stays_zero_through_a_square_root():
    n = 30
    x, zero, y = scalars(np.linspace(0.3, 0.8, n)), scalars([0.0]), outputs(3)

    @ti.kernel
    def k():
        for i in range(3):
            acc = 0.0
            for j in range(n):
                acc += x[j] * zero[0]
            r = ti.sqrt(acc) + x[i]
            y[i] = r * x[0] + ti.sqrt(acc) * r + (ti.sqrt(acc) if x[0] < 1.0 else 0.0)

    expected = np.zeros((3, n))
    for i in range(3):
        expected[i, i] += x[0]
        expected[i, 0] += x[i]
    check_jacobian(k, x, y, expected=expected)


def test_vectors_of_indices():
    x, y = scalars([[1.3, 0.4], [0.7, 0.2]]), outputs(4)

    @ti.kernel
    def k():
        for i in range(4):
            p = ti.Vector([i // 2, i % 2])
            a = x[p]
            p[0] = 1 - p[0]
            b = x[p] * a
            p += 1
            p = p % 2
            q = p
            p.x = 0
            y[i] = b * x[p] + x[p[1], q[0]] + x[q] * x[ti.Vector([1, 0])]

    check_jacobian(k, x, y)


def test_grouped_indices_changed():
    x, y = scalars([1.3, 0.4, 0.7]), outputs(3)

    @ti.kernel
    def k():
        for I in ti.grouped(y):
            a = x[I]
            J = I
            J[0] = 2 - J[0]
            y[I] = a * x[J] + x[2 - I]
            I[0] = 1
            y[J] += x[I] * x[J]

    check_jacobian(k, x, y)


def test_the_same_entry_by_two_indices():
    x, y = scalars([1.3, 0.4, 0.7]), outputs(9)

    @ti.kernel
    def k():
        for i, j in ti.ndrange(3, 3):
            y[i * 3 + j] = x[i] * x[j] + ti.sin(x[i]) * x[(i + j) % 3] - x[j] ** 2 * x[2 - i]

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_stores_to_entries_that_may_be_the_same():
    x, y = scalars([1.3, 0.4, 0.7]), outputs(3)

    @ti.kernel
    def k():
        for _ in range(1):
            for i in range(3):
                y[i] = x[i]
            for i in range(3):
                for j in range(3):
                    a = y[i]
                    y[j] = a * y[j] + x[i]
                    y[i] += a * y[j] * x[j]
                    y[(i * j) % 3] *= x[0]

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_parameters_changed_in_place_through_aliases():
    x = scalars([1.3, 0.4, 0.7])

    @ti.kernel
    def k():
        for _ in range(1):
            for i in range(3):
                for j in range(3):
                    a = x[i]
                    b = x[j]
                    x[j] = a * x[j] + x[i]
                    x[i] += a * b * 0.1
                    x[(i + j) % 3], x[i] = x[i], x[j] * 0.1 + a

    check_jacobian(k, x, x)


@pytest.mark.sweep
def test_a_row_captured_before_its_field_changes():
    x, y, z = scalars(FIVE), outputs(5), outputs(5)

    @ti.kernel
    def k():
        for _ in range(1):
            for i in range(5):
                z[i] = x[i] * x[0]
            for i in range(5):
                old = z[i]
                other = z[(i + 1) % 5]
                z[i] = x[1]
                z[(i + 1) % 5] += old
                y[i] = old * other + z[i]
                for j in range(2):
                    z[j] = z[j] * other
                    old = old + z[j]
                y[i] += old

    check_jacobian(k, x, [y, z])
