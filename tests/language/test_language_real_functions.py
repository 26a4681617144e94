"""Real functions: early returns, loops, arguments by reference, recursion."""

import pytest
import taichi as ti
import taichi.math as tm
from differences import check_jacobian, check_refused, outputs, scalars

from taichi_ext import UnsupportedError, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.23, 0.9]


@pytest.mark.sweep
def test_real_functions():
    x, y = scalars(FIVE), outputs(6)

    @ti.real_func
    def f(a: ti.f64, b: ti.f64) -> ti.f64:
        return a * a * b

    @ti.real_func
    def pair(a: ti.f64, n: ti.i32) -> (ti.f64, ti.f64):
        b = a
        for _ in range(n):
            b *= 1.1 * a
        return b * n, a + f(a, b)

    @ti.real_func
    def vector(v: tm.vec2) -> tm.vec2:
        return v * v.x

    @ti.real_func
    def store(i: ti.i32, a: ti.f64):
        y[i] = a * 2.0

    @ti.real_func
    def change(a: ti.ref(ti.f64), b: ti.f64):
        a = a * b
        a += b

    @ti.kernel
    def k():
        y[0] = f(x[0], x[1]) + f(f(x[2], x[3]), 2.0)
        p, q = pair(x[0], 3)
        y[1] = p * q
        y[2] = vector(tm.vec2(x[0], x[1])).y
        store(3, x[3] * x[4])
        s = x[0] * x[1]
        change(s, x[2])
        y[4] = s
        y[5] = f(x[0] * 3, 2)

    check_jacobian(k, x, y)


@pytest.mark.sweep
def test_real_functions_that_return_early():
    x, y = scalars(FIVE), outputs(5)

    @ti.real_func
    def first(a: ti.f64, b: ti.f64) -> ti.f64:
        if a > 1.0:
            return a * b
        s = b
        for j in range(50):
            s = s * a + b
            if j > 3 and s < 0.5:
                return a * s * j
            elif j == 9:
                break
        while s > 0.1:
            s *= 0.5
            if s < 0.2:
                return s * s
        return b

    @ti.kernel
    def k():
        for i in range(5):
            y[i] = first(x[i], x[(i + 1) % 5]) + first(x[0], x[i])

    check_jacobian(k, x, y)


def test_loops_in_real_functions_are_serial():
    x, y = scalars([1.3, 0.4]), outputs(1)

    @ti.real_func
    def f(a: ti.f64, b: ti.f64) -> ti.f64:
        s = a
        for j in range(3000):
            s = ti.sin(s * 3.0 + b * j * 0.01) * 0.3 + s * 0.5
        return s

    @ti.kernel
    def k():
        y[0] = f(x[0], x[1])

    check_jacobian(k, x, y)


def test_recursion_decided_at_run_time_is_refused():
    x, y = scalars([1.3]), outputs(1)

    @ti.real_func
    def f(a: ti.f64, n: ti.i32) -> ti.f64:
        r = 1.0
        if n > 0:
            r = a * f(a, n - 1)
        return r

    @ti.kernel
    def k():
        y[0] = f(x[0], 3)

    check_refused(k, x, y, "f(a, n - 1)")
    with pytest.raises(UnsupportedError) as caught:
        jacobian(k, x, y)
    assert str(caught.value).count("f(a, n - 1)") <= 2  # not once for each level
