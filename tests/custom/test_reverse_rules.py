"""Derivatives of the user's own in ``kernel.grad()``: it takes and refuses what ``jacobian`` does."""

import numpy as np
import pytest
import taichi as ti
from differences import read, write
from kernel_texts import func_of, kernel_of
from numpy.testing import assert_allclose, assert_array_equal
from reverse_mode import check_transpose, gradient, gradient_field

import taichi_ext as te
from taichi_ext import UnsupportedError, boundary_gradient, jacobian, registry, stop_gradient

pytestmark = pytest.mark.usefixtures("ti64")

X = np.array([0.3, 0.6, 0.72, 1.2])


@ti.func
def square(a):
    return a * a


def entrywise(function, dtype=ti.f64, values=X):
    """x, y and a kernel that computes y from x, entry by entry."""
    x, y = gradient_field(values, dtype=dtype), gradient_field(np.zeros(len(values)), dtype=dtype)
    k = kernel_of("for i in x: y[i] = function(x[i], i)", x=x, y=y, function=function)
    return k, x, y


def check(function, expected, dtype=ti.f64, values=X):
    """J and the gradient of a function of a number against its derivative, a closed form."""
    k, x, y = entrywise(function, dtype, values)
    rtol = 1e-12 if dtype == ti.f64 else 1e-5
    J = check_transpose(k, x, y, rtol=rtol)
    assert_allclose(J, np.diag(expected), rtol=rtol, atol=0)


def test_rounded_values():
    """``ti.round`` and ``ti.tan`` are refused by Taichi's reverse mode; ties are rounded away from 0, as Taichi does."""
    values = np.array([0.5, -0.5, 1.5, 2.5, -0.3, 0.49999999999999994, 4503599627370497.0, 1e17])
    straight_through = func_of("return replace_gradient(ti.round(a), 3.0 * a)", "a, i")
    check(straight_through, np.full(8, 3.0), values=values)
    k, x, y = entrywise(straight_through, values=values)
    k()
    plain = read(y)
    gradient(k, x, y, np.ones(8))
    k.grad()
    assert_array_equal(read(y), plain)
    beside = func_of("return stop_gradient(ti.round(3.0 * a)) * a + ti.round(a) * a + ti.tan(a) * float(~i)", "a, i")
    whole = np.arange(4)
    check(beside, np.round(3 * X) + np.round(X) - (whole + 1) / np.cos(X) ** 2)


def test_random_numbers_are_refused():
    """They would be others than in the launch of the kernel."""
    f = func_of("return a * stop_gradient(ti.random())", "a, i")
    k, x, _ = entrywise(f)
    write(x.grad, np.full(4, 7.0))
    with pytest.raises(UnsupportedError, match=r"k.grad\(\): the kernel draws random numbers.*vjp"):
        k.grad()
    assert_array_equal(read(x.grad), np.full(4, 7.0))


def test_what_a_kernel_reads_and_overwrites():
    """An entry that was stored before it is read is there again; where the kernel has read another number, it raises."""
    x, y, z, loss = (gradient_field(v) for v in (X, np.zeros(4), np.zeros(4), np.zeros(())))

    @ti.kernel
    def in_order():
        for i in x:
            y[i] = stop_gradient(2.0) * x[i] ** 2
            y[i] = y[i] ** 2
            z[i] += y[i] * x[i]
        for i in y:
            loss[None] += y[i] ** 2 + x[i]

    in_place = kernel_of("for i in x: x[i] = stop_gradient(2.0) * x[i] ** 2", x=x)

    @ti.kernel
    def summed():
        for i in x:
            y[i] += stop_gradient(2.0) * x[i]
        for i in x:
            z[i] = y[i] ** 2

    largest = kernel_of("for i in x: ti.atomic_max(y[i], stop_gradient(2.0) * x[i])", x=x, y=y)
    text = "for i in range(3): y[i] = stop_gradient(2.0) * x[i]; z[i] = y[i + 1] * x[i]"
    of_a_neighbour = kernel_of(text, y=y, x=x, z=z)

    @ti.kernel
    def before_it_is_stored():
        for i in x:
            z[i] = y[i] ** 2
        for i in x:
            y[i] = stop_gradient(2.0) * x[i]

    in_order()
    before = read(z)
    write(z.grad, np.ones(4))
    write(loss.grad, 3.0)
    write(y.grad, np.full(4, 5.0))
    write(x.grad, np.zeros(4))
    in_order.grad()
    assert_allclose(read(x.grad), 5 * 16 * X**3 + 20 * X**4 + 3 * (128 * X**7 + 1), rtol=1e-12)  # y = 4 x^4
    assert_array_equal(read(y.grad), np.zeros(4))
    assert_array_equal(read(z.grad), np.ones(4))
    assert_array_equal(read(z), before)
    for kernel, name in (
        (in_place, "x"),
        (summed, "y"),
        (largest, "y"),
        (of_a_neighbour, "y"),
        (before_it_is_stored, "y"),
    ):
        with pytest.raises(UnsupportedError, match=rf"the kernel reads and writes {name}.*vjp"):
            kernel.grad()


@pytest.mark.mostly_sweep("dtype0")
@pytest.mark.parametrize("dtype", [ti.f32, ti.f64])
def test_stopped_values_are_exact(dtype):
    """Small and large ones, and infinity."""
    smallest, largest = (2.0**-41, 1e38) if dtype == ti.f32 else (1e-138, 1e300)
    values = np.array([smallest, -1 / 3, 2.0**24 + 2, -1e18, 3e19, largest, 0.0, np.inf])
    x, y, z = (gradient_field(v, dtype=dtype) for v in (values, np.zeros(8), np.ones(8)))
    k = kernel_of("for i in x: y[i] = stop_gradient(x[i]) * z[i]", x=x, y=y, z=z)
    gradient(k, z, y, np.ones(8))
    assert_array_equal(read(z.grad), read(x))
    assert_array_equal(read(x.grad), np.zeros(8))


def test_functions_whose_derivative_is_not_in_what_they_return():
    y = gradient_field(np.zeros(4))
    silent = func_of("y[i] = a * a", "a, i", y=y)
    storing = func_of("storing(a, i): y[i] += a; return a * a", y=y)
    for function, match in ((silent, "returns nothing"), (storing, "also stores to y, .* with respect to a")):
        registry.clear()

        @boundary_gradient(function, name="aside")
        def _(d_a):
            return 3.0 * d_a

        k = kernel_of("for i in x: function(x[i], i)", "x: ti.template()", function=function)
        x = gradient_field(X)
        for launch in (lambda k=k, x=x: k.grad(x), lambda k=k, x=x: jacobian(k, x, y, args=(x,))):
            with pytest.raises((te.InvalidRuleError, UnsupportedError), match=rf"The rule 'aside' .*(.|\n)*{match}"):
                launch()
    registry.clear()

    @boundary_gradient(storing)
    def _(auto):
        return 2.0 * auto  # which leaves the arguments their tangents

    both = kernel_of("for i in x: y[i] += storing(x[i], i)", x=x, y=y, storing=storing)
    assert_allclose(check_transpose(both, x, y), np.diag(1 + 4 * X), rtol=1e-12)


@pytest.mark.sweep
def test_refused_rules_leave_the_fields_of_a_tape_alone():
    @boundary_gradient(square)
    def _(d_a):
        return ti.max(d_a, 0.0)

    x, loss = gradient_field(X), ti.field(ti.f64, (), needs_grad=True)
    k = kernel_of("for i in x: loss[None] += square(x[i])", x=x, loss=loss, square=square)
    write(x.grad, np.full(4, 7.0))
    with (
        pytest.raises(UnsupportedError, match="'max' is applied to a tangent"),
        ti.ad.Tape(loss, clear_gradients=False),
    ):
        k()
    assert_array_equal(read(x.grad), np.full(4, 7.0))
    assert_allclose(loss[None], (X * X).sum())
