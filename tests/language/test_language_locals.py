"""State carried by locals through loops, and snapshots of it."""

import numpy as np
import pytest
import taichi as ti
import taichi.math as tm
from differences import check_jacobian, outputs, scalars
from numpy.testing import assert_allclose

from taichi_ext import Jacobian, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.2, 0.9]
COUNTS = pytest.mark.parametrize("count", [3, 5, 40], ids=["unrolled rows", "registers", "rows"])


def parameters(count):
    return scalars(np.linspace(0.3, 1.2, count)), outputs(4)


@pytest.mark.sweep
@COUNTS
def test_locals_swapped_in_a_loop(count):
    x, y = parameters(count)

    @ti.kernel
    def k():
        for i in range(4):
            a, b, c = x[0], x[1], x[i % 3]
            for j in range(3 + i):
                a, b = b, a * b
                a, b, c = c, a, b * x[j % count]
            y[i] = a + 2.0 * b + 3.0 * c

    check_jacobian(k, x, y)


@pytest.mark.sweep
@COUNTS
def test_recurrence_with_temporaries(count):
    x, y = parameters(count)

    @ti.kernel
    def k():
        for i in range(4):
            a = x[i % count]
            b = x[(i + 1) % count]
            c = 0.0
            for j in range(5):
                c = a * x[j % count]
                a = b
                b = 0.5 * c + a
                if j == i:
                    continue
                for l in range(3):
                    t = a
                    a = b * 0.5
                    b = t * x[l] + 0.1 * b
                    if l > j:
                        break
                    c += t
            y[i] = a + b * c

    check_jacobian(k, x, y)


@pytest.mark.sweep
@COUNTS
def test_snapshots_of_an_accumulator(count):
    """A local that took on another local's value keeps it when the other changes."""
    x, y = parameters(count)

    @ti.kernel
    def k():
        for i in range(4):
            acc = 0.0
            before = 0.0
            total = 0.0
            for j in range(count):
                before = acc
                acc += x[j] * x[i % count]
                snap = acc
                if j % 3 == 0:
                    acc *= 0.5
                    before = snap * acc
                half = acc
                acc = 0.9 * acc + 0.01 * before
                total += before * acc * 0.1 + snap * 0.3 + half
                snap, half = half, snap
                total -= snap * 0.2 - half * half * 0.01
            y[i] = total + before + acc

    check_jacobian(k, x, y, atol=1e-7)


@pytest.mark.sweep
@COUNTS
def test_snapshots_across_loops(count):
    x, y = parameters(count)

    @ti.kernel
    def k():
        for i in range(4):
            a = x[i % count]
            for j in range(count):
                a += x[j] * 0.1
            first = a
            for j in range(count):
                a = a * 0.9 + x[j] * first * 0.1
            second = a
            third = second
            for j in range(3):
                a *= x[j]
                third = third * a + first
                for l in range(2):
                    second = third
                    first += second * x[l] * 0.1
            y[i] = a + first * second + third

    check_jacobian(k, x, y, atol=1e-7)


@pytest.mark.mostly_sweep("unrolled rows")
@COUNTS
def test_nearest_and_second_nearest(count):
    x, y = parameters(count)

    @ti.kernel
    def k():
        for i in range(4):
            best = 1e9
            second = 1e9
            which = -1
            for j in range(count):
                d = (x[j] - 0.253 * i - 0.26) ** 2
                if d < best:
                    second = best
                    best = d
                    which = j
                elif d < second:
                    second = d
            best += x[0] * second
            y[i] = best * 2.0 + second * x[which]

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_terms_that_come_after_a_loop_are_none_in_it():
    """Else two locals that are given to each other take a slot more in each walk, without an end."""
    x, y = parameters(40)

    @ti.kernel
    def k():
        for i in range(4):
            best = 1e9
            second = 1e9
            for j in range(40):
                d = (x[j] - 0.253 * i - 0.26) ** 2
                if d < best:
                    second = best
                    best = d
                elif d < second:
                    second = d
            best += x[0] * second
            y[i] = best * 2.0 + second

    dense = check_jacobian(k, x, y)
    plan = Jacobian(k, x, y, format="csr")
    assert_allclose(plan().toarray(), dense, rtol=1e-9)
    assert "local best" in plan.explain()
    assert "1 fixed columns and 2 indexed columns" in plan.explain()


@pytest.mark.sweep
@COUNTS
def test_terms_that_come_later_in_a_loop(count):
    x, y = parameters(count)

    @ti.kernel
    def k():
        for i in range(4):
            a = x[i * i % count]
            s = 0.0
            for l in range(3):
                for j in range(2):
                    s += a * x[j]
                if i != 2:
                    a = x[(i + l) % count] * x[(i * i + l) % count]
            y[i] = s + a

    check_jacobian(k, x, y)


@pytest.mark.sweep
@COUNTS
def test_an_accumulator_used_after_it_was_stored(count):
    x, y = parameters(count)
    z, w = outputs(4), outputs(4)

    @ti.kernel
    def k():
        for i in range(4):
            acc = 0.0
            other = x[0] * x[1]
            third = 1.0
            for j in range(count):
                acc += x[j] * x[i % count]
                other += x[j] * 0.5
                third += x[j] * other
            y[i] = acc + x[0] * 2.0 + x[i % count]
            z[i] = other
            w[i] = third * 2.0
            z[i] += acc * 3.0 + other + third

    check_jacobian(k, x, [y, z, w])


@pytest.mark.mostly_sweep("rows")
@COUNTS
def test_one_accumulator_stored_to_two_fields(count):
    x, y = parameters(count)
    z = outputs(4)

    @ti.kernel
    def k():
        for i in range(4):
            acc = x[0] * x[1]
            for j in range(count):
                acc += x[j] * x[i % count]
            y[i] = acc + x[1]
            z[i] = acc * 3.0

    check_jacobian(k, x, [y, z])


def test_constant_seeds_and_index_seeds_in_one_local():
    x, y = scalars([0.3, 0.8, 0.5]), outputs(3)

    @ti.kernel
    def k():
        for i in range(3):
            acc = x[0]
            if i > 0:
                acc = x[i]
            acc += x[0] * x[1]
            acc -= x[i] * 0.5
            other = acc
            if i == 1:
                acc = other * x[2 - i]
                other = x[2]
            acc += other
            y[i] = acc

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_inactive_first_then_active():
    x, y = scalars(FIVE), outputs(5)

    @ti.kernel
    def k():
        for i in range(5):
            t = 1.0
            u = t
            w = u * 2.0
            v = tm.vec2(1.0, 2.0)
            z = v
            for j in range(i):
                w = u + t
                z = v * w
                u = t * x[j]
                v = tm.vec2(t, u)
                t = x[i]
            y[i] = t + u * w + z.dot(v)

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_active_first_then_inactive():
    x, y = scalars(FIVE), outputs(5)

    @ti.kernel
    def k():
        for i in range(5):
            t = x[i] * x[0]
            u = t * t
            if i % 2 == 0:
                t = 3.0
            for j in range(2):
                if j == i:
                    u = 1.0
                t *= u
                u = x[j] if i > 2 else 0.5
            y[i] = t * u
            u = 2.0
            y[i] *= u

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_while_with_several_locals():
    x, y = scalars([1.3, 0.4]), outputs(3)

    @ti.kernel
    def k():
        for i in range(3):
            a = x[0]
            b = x[1]
            n = 0
            while a < 20.0 and n < 8:
                b, a = a * 0.5 + b, a * 1.7 + b * b
                n += 1
                if n == 3 + i:
                    break
                if n % 2 == 0:
                    continue
                b *= x[1]
            y[i] = a * b + n

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_newton_iterations():
    x, y = scalars([1.3, 2.4]), outputs(2)

    @ti.kernel
    def k():
        for i in range(2):
            t = x[i] + 1.0
            step = 1.0
            while abs(step) > 1e-12:
                step = (t * t * t - x[i] * x[1]) / (3.0 * t * t)
                t -= step
            y[i] = t

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_early_termination_by_transmittance():
    x, y = scalars([0.9, 0.8, 1.2, 0.3, 0.7, 0.2]), outputs(3)

    @ti.kernel
    def k():
        for i in range(3):
            transmittance = 1.0
            color = 0.0
            depth = 0.0
            for j in range(60):
                alpha = 1.0 - ti.exp(-x[i] * 0.3)
                weight = transmittance * alpha
                color += weight * x[3 + (i + j) % 3]
                depth += weight * j
                transmittance *= 1.0 - alpha
                if transmittance < 0.1:
                    break
            y[i] = color / (1.0 - transmittance) + depth

    check_jacobian(k, x, y)


@pytest.mark.chosen_only("rows are multiplied as they are: zero times infinity is NaN", "--tangents")
def test_a_constant_local_next_to_an_infinite_factor():
    x, y, z, w = scalars([0.7, 1.2, 0.4]), outputs(3), outputs(3), scalars([np.inf, np.inf, -1.0])

    @ti.kernel
    def k():
        for i in range(3):
            factor = 1.0
            y[i] = factor * w[i]
            if w[i] > 0.0:
                factor = x[i]
            z[i] = factor * x[2]

    J = jacobian(k, x, [y, z])
    np.testing.assert_array_equal(J[0], np.zeros((3, 3)))
    np.testing.assert_array_equal(J[1], [[0.4, 0.0, 0.7], [0.0, 0.4, 1.2], [0.0, 0.0, 1.0]])


@pytest.mark.sweep
def test_copies_of_locals_that_change_later():
    x, y = scalars([0.7, 1.2, 0.4]), outputs(3)

    @ti.func
    def blend(a, b, n):
        for j in range(n):
            a, b = a * b, a + x[j]
        return a - b

    @ti.kernel
    def k():
        for i in range(3):
            a, b = x[i], 1.0
            for j in range(3):
                c = blend(a, b, i)
                a += c * b
                if c > 0.0:
                    b = c + a
            y[i] = a * b + blend(b, a, 2)

    check_jacobian(k, x, y)
