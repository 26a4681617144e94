"""Ranges, ndranges, while loops, break and continue."""

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import check_jacobian, outputs, scalars

from taichi_ext import Jacobian, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.2, 0.9]


def integer(value):
    field = ti.field(ti.i32, shape=())
    field[None] = value
    return field


# --- ranges -----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_ranges_with_bounds():
    x, y, n = scalars(FIVE), outputs(6), integer(4)

    @ti.kernel
    def k():
        for i in range(1, 4):
            y[0] += x[i] * x[0]
        for i in range(-2, 2):
            y[1] += x[i + 2] * i
        for i in range(n[None]):
            y[2] += x[i] * x[i]
        for i in range(n[None] - 2, n[None] + 1):
            y[3] += x[i] * x[0]
        m = n[None]
        for i in range(m, m):
            y[4] += x[i]
        for i in range(3, 1):
            y[4] += x[i]
        for i in range(ti.cast(x[0] * 3.1, ti.i32)):
            for j in range(i, m):
                for l in range(j + 1, 5):
                    y[5] += x[i] * x[j] * x[l]
        y[4] += x[0]

    check_jacobian(k, x, y)


def test_ranges_with_steps_are_taichis_own_errors():
    x, y = scalars(FIVE), outputs(1)

    @ti.kernel
    def k():
        for i in range(0, 5, 2):
            y[0] += x[i]

    with pytest.raises(ti.TaichiCompilationError, match="Range should have 1 or 2 arguments"):
        k()

    with pytest.raises(ti.TaichiCompilationError, match="Range should have 1 or 2 arguments"):
        jacobian(k, x, y)


def test_static_ranges_with_steps():
    x, y = scalars(FIVE), outputs(2)

    @ti.kernel
    def k():
        for i in ti.static(range(4, -1, -2)):
            y[0] = y[0] * x[i] + x[i]
        for i in ti.static(range(0, 5, 3)):
            y[1] += x[i] * x[1]

    check_jacobian(k, x, y)


def test_serial_order():
    """Outermost loops made serial, so that an iteration may use what the one before stored."""
    x, y, z = scalars(FIVE), outputs(6), outputs(5)

    @ti.kernel
    def k():
        ti.loop_config(serialize=True)
        for i in range(5):
            y[i + 1] = y[i] * 0.5 + x[i] * x[0]
            if y[i + 1] > 1.5:
                break
        ti.loop_config(serialize=True)
        for i in range(5):
            if i == 2:
                continue
            z[i] = z[i - 1] + y[i] if i > 0 else x[0]

    check_jacobian(k, x, [y, z])


@pytest.mark.sweep
def test_loop_options():
    x, y = scalars(FIVE), outputs(5)

    @ti.kernel
    def k():
        ti.loop_config(block_dim=32)
        for i in range(5):
            y[i] = x[i] * x[0]
        ti.loop_config(parallelize=2)
        for i in y:
            y[i] *= x[1]

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_ndranges():
    x, y = scalars(np.arange(1.0, 13.0).reshape(3, 4) / 7.0), outputs(3, 4)
    n = integer(3)

    @ti.kernel
    def k():
        for i, j in ti.ndrange(3, 4):
            y[i, j] = x[i, j] * x[0, 0]
        for i, j in ti.ndrange((1, 3), (0, n[None])):
            y[i, j] += x[i - 1, j] * x[i, 3 - j]
        for i in ti.ndrange(3):
            y[i, i] *= x[2, i]
        for I in ti.grouped(ti.ndrange(3, (1, 4))):
            y[I] += x[I] * x[I[0], I[1] - 1] + x[I - ti.Vector([0, 1])] * I[0]
        for _ in range(1):
            for i, j in ti.ndrange(2, (1, 3)):
                if i == j:
                    continue
                y[0, 0] = y[0, 0] * x[i, j] + y[i, j]
                for I in ti.grouped(ti.ndrange(2, 2)):
                    if I[0] > I[1]:
                        continue
                    y[I] += 0.1 * x[I + 1] * y[i, j]
        for i, j, l in ti.ndrange(2, 2, (1, 3)):
            y[2, 3] += x[i, j] * x[j, l]

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_loops_over_shapes():
    x, y = scalars(np.arange(1.0, 7.0).reshape(2, 3) / 3.0), outputs(2, 3)

    @ti.kernel
    def k():
        for i, j in ti.ndrange(x.shape[0], x.shape[1]):
            y[i, j] = x[i, j] * x[0, j] / x.shape[1]
        for i, j in ti.ndrange(*x.shape):
            y[i, j] += x[1 - i, j]
        for I in ti.grouped(x):
            y[I] *= x[I[0], (I[1] + 1) % 3]
        for i, j in x:
            y[i, j] -= x[i, 0] * j

    check_jacobian(k, x, y)


def partial_writers():
    """Kernels that write some of the entries of y, and which."""
    x, y = scalars([0.3, 0.4, 1.2, 0.5, 0.6]), outputs(5)

    @ti.kernel
    def breaks_before():
        ti.loop_config(serialize=True)
        for i in range(5):
            if x[i] > 1.0:
                break
            y[i] = x[i] * x[0]

    @ti.kernel
    def breaks_after():
        ti.loop_config(serialize=True)
        for i in range(5):
            y[i] = x[i] * x[0]
            if x[i] > 1.0:
                break

    @ti.kernel
    def continues():
        for i in range(5):
            if x[i] > 1.0:
                continue
            y[i] = x[i] * x[0]

    @ti.kernel
    def starts_late():
        for i in range(2, 5):
            y[i] = x[i] * x[0]

    @ti.kernel
    def permutes():
        for i in range(5):
            m = i
            if i > 2:
                m = 4 - i
            y[m] = x[m] * x[0]

    kernels = {
        breaks_before: [0, 1],
        breaks_after: [0, 1, 2],
        continues: [0, 1, 3, 4],
        starts_late: [2, 3, 4],
        permutes: [0, 1, 2],
    }
    return x, y, kernels


@pytest.mark.mostly_sweep("0", "1", "2")
@pytest.mark.parametrize("number", range(5))
def test_entries_that_are_not_written_have_derivative_zero(number):
    x, y, kernels = partial_writers()
    kernel, written = list(kernels.items())[number]
    J = real(np.full((5, 5), 7.0))
    Jacobian(kernel, x, y)(out=J)
    expected = np.zeros((5, 5))
    for i in written:
        expected[i, i] += x[0]
        expected[i, 0] += x[i]
    np.testing.assert_allclose(J, expected, rtol=1e-12)


# --- while, break, continue -------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_while_loops():
    x, y = scalars(FIVE), outputs(5)

    @ti.kernel
    def k():
        for i in range(5):
            s = x[i]
            while True:
                s = s * 1.5 + x[0]
                if s > 20.0:
                    break
            n = 0
            while n < 3:
                n += 1
                if n == 2:
                    continue
                s *= x[n]
                j = 0
                while j < n:
                    s += x[j] * 0.1
                    if s > 5.0:
                        break
                    j += 1
                else_value = s
                s = else_value * 0.9
            while s < 0.0:
                s += 1.0
            y[i] = s

    check_jacobian(k, x, y)


def test_while_at_the_top_level_and_conditions_that_call():
    x, y = scalars([1.3, 0.4]), outputs(2)

    @ti.func
    def square(a):
        t = a * a
        return t

    @ti.kernel
    def k():
        s = x[0]
        while square(s) < 20.0 and not square(x[1]) > 1.0:
            s = s * 1.5 + square(x[1]) * s
        y[0] = s
        while y[1] < 3.0:
            y[1] += s * x[1]

    check_jacobian(k, x, y)


def test_break_and_continue_in_inner_loops():
    x, y = scalars(FIVE), outputs(5)

    @ti.kernel
    def k():
        for i in range(5):
            found = -1.0
            count = 0
            for j in range(5):
                if x[j] < 0.3:
                    continue
                if x[j] < x[i]:
                    found = x[j] * x[i]
                    break
                for a, b in ti.ndrange(2, 2):
                    if a == b:
                        continue
                    found += x[a] * x[b]
                count += 1
            y[i] = found * (count + 1)

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_break_of_a_serial_struct_for():
    x, y = scalars(FIVE), outputs(2)

    @ti.kernel
    def k():
        for _ in range(1):
            s = 1.0
            for i in range(5):
                if i == 3:
                    break
                s = s * x[i] + y[0]
                y[0] += s
            y[1] = s

    check_jacobian(k, x, y)
