"""Derivatives of the user's own in ``kernel.grad()``: it takes and refuses what ``jacobian`` does."""

import numpy as np
import pytest
import taichi as ti
import taichi.math as tm
from differences import read, write
from numpy.testing import assert_allclose, assert_array_equal
from reverse_mode import check_transpose, gradient, gradient_field

from taichi_ext import (
    InvalidRuleError,
    UnsupportedError,
    boundary_gradient,
    jacobian,
    mark,
    registry,
    replace_gradient,
    stop_gradient,
)

pytestmark = pytest.mark.usefixtures("ti64")

X = np.array([0.3, 0.6, 0.72, 1.2])
Pair = ti.types.struct(a=ti.f64, b=ti.f64)
Other = ti.types.struct(a=ti.f64, c=ti.f64)


@pytest.fixture(autouse=True)
def empty_registry():
    registry.clear()
    yield
    registry.clear()


@ti.func
def square(a):
    return a * a


def entrywise(function, dtype=ti.f64, values=X):
    """x, y and a kernel that computes y from x, entry by entry."""
    x, y = gradient_field(values, dtype=dtype), gradient_field(np.zeros(len(values)), dtype=dtype)

    @ti.kernel
    def k():
        for i in x:
            y[i] = function(x[i], i)

    return k, x, y


def check(function, expected, dtype=ti.f64, values=X):
    """J and the gradient of a function of a number against its derivative, a closed form."""
    k, x, y = entrywise(function, dtype, values)
    rtol = 1e-12 if dtype == ti.f64 else 1e-5
    J = check_transpose(k, x, y, rtol=rtol)
    assert_allclose(J, np.diag(expected), rtol=rtol, atol=0)


def check_refused(function, match):
    """Both modes raise before anything is stored."""
    k, x, y = entrywise(function)
    for launch in (k.grad, lambda: jacobian(k, x, y)):
        with pytest.raises((InvalidRuleError, UnsupportedError), match=match) as error:
            launch()
        assert "test_reverse_rules.py" in str(error.value)
        assert "line" in str(error.value)
    assert_array_equal(read(y), np.zeros(4))


# --- operations that Taichi's own reverse mode lacks ------------------------------------------------------------------


def test_rounded_values():
    """``ti.round`` and ``ti.tan`` are refused by Taichi's reverse mode; ties are rounded away from 0, as Taichi does."""
    values = np.array([0.5, -0.5, 1.5, 2.5, -0.3, 0.49999999999999994, 4503599627370497.0, 1e17])

    @ti.func
    def straight_through(a, i):
        return replace_gradient(ti.round(a), 3.0 * a)

    check(straight_through, np.full(8, 3.0), values=values)
    k, x, y = entrywise(straight_through, values=values)
    k()
    plain = read(y)
    gradient(k, x, y, np.ones(8))
    k.grad()
    assert_array_equal(read(y), plain)

    @ti.func
    def beside(a, i):
        return stop_gradient(ti.round(3.0 * a)) * a + ti.round(a) * a + ti.tan(a) * float(~i)

    whole = np.arange(4)
    check(beside, np.round(3 * X) + np.round(X) - (whole + 1) / np.cos(X) ** 2)


@pytest.mark.sweep
def test_rounded_vectors_and_structs_and_several_values():
    @ti.func
    def vectors(a, i):
        v = replace_gradient(ti.round(ti.Vector([a, 3.0 * a])), ti.Vector([a, 3.0 * a]))
        return v[0] + 2.0 * v.y

    @ti.func
    def structs(a, i):
        pair = replace_gradient(Pair(a=ti.floor(a), b=2.0), Pair(a=a * a, b=a))
        return pair.a + 3.0 * pair.b

    @ti.func
    def several(a, i):
        p, q = replace_gradient((ti.ceil(a), ti.cast(ti.cast(a, ti.i32), ti.f64)), (a, 2.0 * a))
        return p + q

    check(vectors, np.full(4, 7.0))
    check(structs, 2 * X + 3)
    check(several, np.full(4, 3.0))


def test_bits():
    @ti.func
    def f(a, i):
        bits = ti.cast(ti.bit_cast(a, ti.i64) % 7, ti.f64)
        return a * stop_gradient(bits) + a * ti.cast(tm.popcnt(i), ti.f64)

    check(f, X.view(np.int64) % 7 + np.array([0, 1, 1, 2]))


def test_random_numbers_are_refused():
    """They would be others than in the launch of the kernel."""

    @ti.func
    def f(a, i):
        return a * stop_gradient(ti.random())

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

    @ti.kernel
    def in_place():
        for i in x:
            x[i] = stop_gradient(2.0) * x[i] ** 2

    @ti.kernel
    def summed():
        for i in x:
            y[i] += stop_gradient(2.0) * x[i]
        for i in x:
            z[i] = y[i] ** 2

    @ti.kernel
    def of_a_neighbour():
        for i in range(3):
            y[i] = stop_gradient(2.0) * x[i]
            z[i] = y[i + 1] * x[i]

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
    for kernel, name in ((in_place, "x"), (summed, "y"), (of_a_neighbour, "y"), (before_it_is_stored, "y")):
        with pytest.raises(UnsupportedError, match=rf"the kernel reads and writes {name}.*vjp"):
            kernel.grad()


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["while", "break", "continue"])
def test_loops_around_a_rule_that_end_when_the_kernel_runs(kind):
    """Three steps ``a <- a + 0.5 a^2``."""

    @boundary_gradient(square, name="half")
    def _(d_a, auto):
        return 0.5 * auto

    @ti.func
    def steps(a, i):
        if ti.static(kind == "while"):
            n = 0
            while n < 3:
                a += 0.5 * square(a)
                n += 1
        else:
            for n in range(4):
                if n == 3:
                    if ti.static(kind == "break"):
                        break
                    else:
                        continue
                a += 0.5 * square(a)
        return a

    a, slope = X, 1.0
    for _ in range(3):
        a, slope = a + 0.5 * a**2, slope * (1 + 0.5 * a)  # half of autodiff's slope
    check(steps, slope)


# --- values and their gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cast", "comparison", "literal", "vector", "one of several"])
def test_integers_take_no_gradient(kind):
    """The derivative of the surrogate would be lost without a word."""

    @ti.func
    def f(a, i):
        if ti.static(kind == "cast"):
            return float(replace_gradient(ti.cast(a, ti.i32), a))
        if ti.static(kind == "comparison"):
            return float(replace_gradient(a > 0.5, a))
        if ti.static(kind == "literal"):
            return float(replace_gradient(1, a))
        if ti.static(kind == "vector"):
            return float(replace_gradient(ti.cast(ti.Vector([a, a]), ti.i32), ti.Vector([a, a])).sum())
        p, q = replace_gradient((a, i), (a, a))
        return p * q

    check_refused(f, r"replace_gradient: the value is of type (i32|u1).*float\(n\)")


@pytest.mark.parametrize("kind", ["vector", "length", "struct", "text"])
def test_surrogates_of_another_shape(kind):
    @ti.func
    def f(a, i):
        if ti.static(kind == "vector"):
            return replace_gradient(ti.Vector([a, a]), a)[0]
        if ti.static(kind == "length"):
            return replace_gradient(ti.Vector([a, a]), ti.Vector([a, a, a]))[0]
        if ti.static(kind == "struct"):
            return replace_gradient(Pair(a=a, b=a), Other(a=a, c=a)).b
        return replace_gradient(a, "text")

    check_refused(f, "replace_gradient: the value has shape .*, the surrogate .*same shape")


def test_stopped_integers():
    @ti.func
    def f(a, i):
        pair = stop_gradient(ti.Vector([i, 2]))
        return a * stop_gradient(i) + a * float(stop_gradient(a > 0.5)) + pair[1] * a

    check(f, np.arange(4) + (X > 0.5) + 2)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [ti.f32, ti.f64])
def test_products_of_stopped_values(dtype):
    @ti.func
    def power(a):
        return a * a

    @boundary_gradient(power)
    def _(a, d_a, out):
        return d_a * out * a

    @ti.func
    def f(a, i):
        return power(a) * stop_gradient(a) * stop_gradient(a)

    values = np.array([0.3, 1.6, 7.2, 1200.0])
    check(f, values**5, dtype, values)


@pytest.mark.mostly_sweep("dtype0")
@pytest.mark.parametrize("dtype", [ti.f32, ti.f64])
def test_stopped_values_are_exact(dtype):
    """Small and large ones, and infinity."""
    smallest, largest = (2.0**-41, 1e38) if dtype == ti.f32 else (1e-138, 1e300)
    values = np.array([smallest, -1 / 3, 2.0**24 + 2, -1e18, 3e19, largest, 0.0, np.inf])
    x, y, z = (gradient_field(v, dtype=dtype) for v in (values, np.zeros(8), np.ones(8)))

    @ti.kernel
    def k():
        for i in x:
            y[i] = stop_gradient(x[i]) * z[i]

    gradient(k, z, y, np.ones(8))
    assert_array_equal(read(z.grad), read(x))
    assert_array_equal(read(x.grad), np.zeros(8))


# --- what rules return ------------------------------------------------------------------------------------------------


def in_a_vector(d_a):
    return ti.Vector([d_a, d_a])


def in_a_matrix(d_a):
    return ti.Matrix([[d_a]])


def twice(d_a):
    return d_a, d_a


def nothing(d_a):
    pass


def text(d_a):
    return "d_a"


def struct(d_a):
    return Pair(a=d_a, b=d_a)


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (in_a_vector, r"a value of shape \(2,\)"),
        (in_a_matrix, r"a value of shape \(1, 1\)"),
        (twice, r"a value of shape \[\(\), \(\)\]"),
        (nothing, "nothing"),
        (text, "a text"),
        (struct, r"a value of shape \{'a': \(\), 'b': \(\)\}"),
    ],
)
def test_returned_values_that_do_not_fit(rule, found):
    boundary_gradient(square, name="misfit")(rule)
    message = rf"The rule 'misfit' \(.*py:{rule.__code__.co_firstlineno}\) returns {found}; the result of 'square'"

    @ti.func
    def f(a, i):
        return square(a)

    check_refused(f, message)


@pytest.mark.sweep
def test_rules_of_integers():
    @ti.func
    def whole(a):
        return ti.cast(3.0 * a, ti.i32)

    @ti.func
    def both(a):
        return ti.cast(3.0 * a, ti.i32), a * a

    @boundary_gradient(whole)
    def _(d_a):
        return 3.0 * d_a

    @boundary_gradient(both)
    def _(auto):
        return auto[0], 5.0 * auto[1]

    @ti.func
    def f(a, i):
        return whole(a) * a

    @ti.func
    def of_both(a, i):
        n, b = both(a)
        return n * b

    check_refused(f, r"returns a tangent for a result of type i32, which has no derivative")
    check(of_both, 10 * X * np.floor(3 * X))


def test_functions_whose_derivative_is_not_in_what_they_return():
    y = gradient_field(np.zeros(4))

    @ti.func
    def silent(a, i):
        y[i] = a * a

    @ti.func
    def storing(a, i):
        y[i] += a
        return a * a

    for function, match in ((silent, "returns nothing"), (storing, "also stores to y, .* with respect to a")):
        registry.clear()

        @boundary_gradient(function, name="aside")
        def _(d_a):
            return 3.0 * d_a

        @ti.kernel
        def k(x: ti.template()):
            for i in x:
                function(x[i], i)

        x = gradient_field(X)
        for launch in (lambda k=k, x=x: k.grad(x), lambda k=k, x=x: jacobian(k, x, y, args=(x,))):
            with pytest.raises((InvalidRuleError, UnsupportedError), match=rf"The rule 'aside' .*(.|\n)*{match}"):
                launch()
    registry.clear()

    @boundary_gradient(storing)
    def _(auto):
        return 2.0 * auto  # which leaves the arguments their tangents

    @ti.kernel
    def both():
        for i in x:
            y[i] += storing(x[i], i)

    assert_allclose(check_transpose(both, x, y), np.diag(1 + 4 * X), rtol=1e-12)


# --- arguments --------------------------------------------------------------------------------------------------------


def test_template_arguments():
    scale = gradient_field(np.array([2.0]))

    @ti.func
    def g(a, is_cubed: ti.template(), count: ti.template(), table: ti.template()):
        return a * a

    @boundary_gradient(g)
    def _(a, is_cubed, count, table, d_a):
        t = d_a
        if ti.static(is_cubed):
            t = 3.0 * a * d_a
        for _ in ti.static(range(count)):
            t += table[0] * d_a
        return t

    @ti.func
    def f(a, i):
        return g(a, True, 2, scale) + g(a, False, 0, scale)

    check(f, 3 * X + 5)


@pytest.mark.sweep
def test_defaults_and_keywords():
    @ti.func
    def g(a, b=2.0, n=3):
        return a * b * n

    @boundary_gradient(g)
    def _(a, b, n, d_a, d_b, d_n):
        return d_a * n + 10.0 * d_b + d_n

    @ti.func
    def f(a, i):
        return g(a) + g(b=2.0 * a, a=1.0) + g(a, n=i)

    check(f, 3 + 20 + np.arange(4))


@pytest.mark.sweep
def test_methods_and_real_functions():
    @ti.data_oriented
    class Program:
        def __init__(self, count):
            self.count = count

        @ti.func
        def f(self, a, i):
            return a * a

    @ti.real_func
    def real(a: ti.f64) -> ti.f64:
        if a > 0.5:
            return a * a
        return a

    @boundary_gradient(Program.f)
    def _(self, a, d_a):
        t = 0.0
        for n in range(self.count):
            t += n * d_a
        return t * a

    @boundary_gradient(real)
    def _(a, d_a):
        return 7.0 * a * d_a

    program = Program(4)

    @ti.func
    def of_both(a, i):
        return program.f(a, i) + real(a)

    check(of_both, 13 * X)


@pytest.mark.sweep
def test_arrays_as_arguments():
    @boundary_gradient("steep")
    def _(auto, by, d_by):
        return 3.0 * auto + by * d_by

    @ti.kernel
    def k(a: ti.types.ndarray(ti.f64, ndim=1), b: ti.types.ndarray(ti.f64, ndim=1), c: ti.f64):
        for i in a:
            b[i] = c * mark("steep", ti.min(a[i], 1.0), by=a[i])

    a, b = (ti.ndarray(ti.f64, 4, needs_grad=True) for _ in range(2))
    a.from_numpy(X)
    b.grad.fill(1.0)
    k.grad(a, b, 2.0)
    expected = 2 * (3 * (X < 1) + X)
    assert_allclose(a.grad.to_numpy(), expected, rtol=1e-12)
    assert_allclose(jacobian(k, "a", "b", args=(X.copy(), np.zeros(4), 2.0)), np.diag(expected), rtol=1e-12)


# --- changes of the registry ------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_rules_that_come_and_go_after_the_kernel_was_compiled():
    @ti.func
    def f(a, i):
        return square(a) + mark("m", a)

    def crooked(d_a):
        return abs(d_a)

    check(f, 2 * X + 1)
    k, x, y = entrywise(f)
    weights = np.ones(4)
    assert_allclose(gradient(k, x, y, weights), 2 * X + 1)
    boundary_gradient(square, name="first")(in_a_vector)
    with pytest.raises(InvalidRuleError, match="'first'"):
        k.grad()
    with registry.disabled("first"):
        assert_allclose(gradient(k, x, y, weights), 2 * X + 1)
    boundary_gradient(square, name="second")(crooked)
    with pytest.raises(UnsupportedError, match=r"'second'.*linear"):
        k.grad()
    registry.clear()
    assert_allclose(gradient(k, x, y, weights), 2 * X + 1)

    @boundary_gradient("m")
    def _(auto):
        return 5.0 * auto

    assert_allclose(gradient(k, x, y, weights), 2 * X + 5)
    assert registry["m"].uses == 1


@pytest.mark.sweep
def test_refused_rules_leave_the_fields_of_a_tape_alone():
    @boundary_gradient(square)
    def _(d_a):
        return ti.max(d_a, 0.0)

    x, loss = gradient_field(X), ti.field(ti.f64, (), needs_grad=True)

    @ti.kernel
    def k():
        for i in x:
            loss[None] += square(x[i])

    write(x.grad, np.full(4, 7.0))
    with (
        pytest.raises(UnsupportedError, match="'max' is applied to a tangent"),
        ti.ad.Tape(loss, clear_gradients=False),
    ):
        k()
    assert_array_equal(read(x.grad), np.full(4, 7.0))
    assert_allclose(loss[None], (X * X).sum())
