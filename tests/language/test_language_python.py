"""Calls in kernels, and plain Python functions: Taichi runs them while it compiles, and so does the engine, on its values."""

import functools

import helper_functions
import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, check_refused, outputs, scalars
from kernel_texts import func_of, kernel_of, kernels_of
from numpy.testing import assert_allclose

from taichi_ext import UnsupportedError, boundary_gradient, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

X = np.array([0.7, 1.3, 2.1])
OFFSET = 0.25

cube = func_of("return v * v * v", "v")


class Complex:
    """A class with operators of its own. Its objects hold numbers, and no values of the kernel."""

    def __init__(self, re, im=0.0):
        self.re = re
        self.__im = im

    @property
    def im(self):
        return self.__im

    def __add__(self, other):
        return Complex(self.re + other.re, self.im + other.im)

    def __mul__(self, other):
        if not isinstance(other, Complex):
            return Complex(self.re * other, self.im * other)
        return Complex(self.re * other.re - self.im * other.im, self.re * other.im + self.im * other.re)

    __rmul__ = __mul__

    def __neg__(self):
        return Complex(-self.re, -self.im)

    def __eq__(self, other):  # so that it has no hash
        return self is other

    def __call__(self, w):
        return self.re * w + self.im

    @staticmethod
    def of_angle(v):
        return Complex(ti.cos(v), ti.sin(v))

    @classmethod
    def unit(cls, v):
        return cls.of_angle(v) * 2.0


def decorator(f):
    @functools.wraps(f)
    def around(*args):
        return f(*args) + 1.0

    return around


@decorator
def decorated(v):
    return v * 5.0


MADE = kernels_of(
    """
with_default(v, a=2.0, *, b=3.0): return v * a + b
recursive(v, n=4): return v if n == 0 else recursive(v * 1.5, n - 1) * v
with_loop:
    total = 0.0
    for k in range(4):
        if k % 2 == 0:
            total = total + v**k
        else:
            total = total - ti.cos(k * v)
    return total
with_comprehension:
    table = {n: c * v for n, c in enumerate([1.0, 2.0, 3.0])}
    return sum([table[n] for n in table if n > 0]) * sum(c for c in (v, 1.0))
with_closure:
    factor = v * 2
    def inner(w):
        nonlocal factor
        factor = factor + w
        return factor * w
    return inner(v) + inner(1.0)
with_vector:
    a = ti.Vector([v, 2.0, v * v])
    b = a + ti.Vector([1.0, v, 0.0])
    return a.dot(b) + ti.Vector.norm(b) + a[1:].sum() + (a @ b)
with_choice: return ti.select(v > 1.0, v * v, ti.max(v, 0.9)) + (v if v else 0.0) * (not v)
with_builtins:
    pairs = list(zip([v, 1.0], (2.0, v), strict=True))
    return abs(-v) + pow(v, 2) + sum(p[0] * p[1] for p in pairs) + len(pairs) + v * max([1, 2]) * min(3, 2)
with_numpy:
    weights = np.array([[1.0, 2.0], [3.0, 4.0]])
    product = weights * v
    return product[1, 0]
with_class:
    z = Complex(v, 1.0)
    w = -z * z + 2.0 * Complex.unit(v)
    w.re = w.re + v
    return w.re * w.im + z(v)
with_updates:
    values = [v, 2.0]
    values[0] += v
    return values[0]
with_super: return super().shape(v)
""",
    decorator="",
    arguments="(v)",
    Complex=Complex,
)
NOT_TAKEN = [f"with_{name}" for name in "numpy class updates super".split()]
FUNCTIONS = {
    **{name: f for name, f in MADE.items() if name not in NOT_TAKEN},
    "decorated": decorated,
    "func": lambda v: cube(v) + 1,
    "partial": functools.partial(MADE["with_default"], a=0.5, b=2.0),
    "callable": Complex(3.0, 1.0),
    "bound": Complex(2.0, 1.0).__call__,
    "module": helper_functions.scaled,
    "lambda": lambda v: v * OFFSET,
    "taichi": ti.exp,
}
REFUSED = (*map(MADE.get, NOT_TAKEN), Complex, Complex.of_angle, lambda v: (lambda w: w * w)(v))


@pytest.mark.parametrize("function", REFUSED)
def test_functions_that_need_ti_func(function):
    """More of Python than operators, subscripts, attributes and calls on values of the kernel."""
    x, y = scalars(X), outputs(3)
    k = kernel_of("for i in x: y[i] = function(x[i])", x=x, y=y, function=function)
    with pytest.raises(UnsupportedError, match="@ti.func|stands where a number is expected") as caught:
        jacobian(k, x, y)
    assert "y[i] = function(x[i])" in str(caught.value)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(3))
def test_functions_of_scalars(part):
    functions = list(FUNCTIONS.values())[part::3]
    x, y = scalars(X), outputs(3, len(functions))

    @ti.kernel
    def k():
        for i in x:
            for n in ti.static(range(len(functions))):
                y[i, n] = functions[n](x[i] * x[0]) * x[i]

    check_jacobian(k, x, y)


def test_methods_of_data_oriented_classes():
    x, y = scalars(X), outputs(3)

    class Base:
        def shape(self, v):
            return v * v + self.offset

    @ti.data_oriented
    class Model(Base):
        offset = 0.5

        def shape(self, v):
            return Base.shape(self, v) * 2

        @staticmethod
        def twice(v):
            return v * 2

        @ti.kernel
        def run(self):
            for i in x:
                y[i] = self.shape(x[i]) * self.twice(x[i]) + Model.twice(x[0])

    check_jacobian(Model().run, x, y)


def test_a_rule_holds_within_a_python_function():
    x, y = scalars(X), outputs(3)
    step = func_of("return ti.select(v > 1.0, 1.0, 0.0)", "v")

    @boundary_gradient(step)
    def _(v, d_v):
        return 3.0 * v * d_v

    def stepped(v):
        return step(v) + v

    k = kernel_of("for i in x: y[i] = stepped(x[i])", x=x, y=y, stepped=stepped)
    np.testing.assert_allclose(jacobian(k, x, y), np.diag(3 * X + 1))


def test_functions_without_source_are_refused():
    x, y = scalars(X), outputs(3)
    scope = {}
    exec("def f(v):\n    return v * 2.0", scope)
    f = scope["f"]
    k = kernel_of("for i in x: y[i] = f(x[i])", x=x, y=y, f=f)
    check_refused(k, x, y, "source")


def test_reads_of_functions_without_source_are_refused():
    """They have no argument with a tangent, and read one."""
    x, y = scalars(X), outputs(3)
    entry = func_of("entry(i): return x[i]", x=x)
    scope = {"entry": entry}
    exec("def f(i):\n    return entry(i)", scope)
    f = scope["f"]
    k = kernel_of("for i in x: y[i] = f(i)", x=x, y=y, f=f)
    check_refused(k, x, y, "source")


def test_python_s_own_choices_are_refused():
    x, y = scalars(X), outputs(3)

    def clipped(v):
        return max(v, 1.0)  # Python compares expressions, which are always true

    k = kernel_of("for i in x: y[i] = clipped(x[i])", x=x, y=y, clipped=clipped)
    check_refused(k, x, y, "max", "Taichi's function")


def test_unknown_callables_are_refused_where_they_touch_the_kernel():
    """A function of Taichi's that is in no table, and stores to a field."""
    from taichi.lang import impl

    x, y = scalars(X), outputs(3)
    store = functools.partial(impl.expr_init, 2.0)
    k = kernel_of("for i in x: y[i] = x[i] * store()", x=x, y=y, store=store)
    with pytest.raises(UnsupportedError, match="expr_init"):
        jacobian(k, x, y)


@pytest.mark.sweep
def test_lists_of_the_module_are_not_changed_by_a_record():
    x, y = scalars([0.3, 0.8]), outputs(2)
    known = [1.0]
    k = kernel_of("for i in x: known.append(x[i]); y[i] = x[i] * 2.0", x=x, known=known, y=y)
    with pytest.raises(UnsupportedError, match=r"known.append\(x\[i\]\)"):
        jacobian(k, x, y)
    assert known == [1.0]


FIVE = [1.3, 0.4, 0.7, 0.23, 0.9]


# --- arguments and results --------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("decorator", [ti.func, ti.real_func])
def test_python_types_as_annotations_convert(decorator):
    """As in Taichi: ``int`` cuts off the fraction of 1.5 and 0.5 times x, ``float`` makes 7 / 2 of 7 // 2, ``bool`` 1 of 0.3."""
    x, y = scalars([1.3, 2.6]), outputs(2)

    @decorator
    def pulse(time: int, place: float) -> float:
        return ti.exp(-(((time - place) / 3.0) ** 2))

    @decorator
    def whole(a: float, b: float) -> int:
        return a * b

    @decorator
    def chosen(flag: bool, a: float) -> float:
        return flag * a

    @ti.kernel
    def k(t: int):
        y[0] = pulse(t + 1.5, x[0]) + chosen(0.3, x[1] * x[1])
        y[1] = x[0] * pulse(t + 0.5 * x[1], 0.25) + whole(x[1], 2) * x[1]

    a, b = 1.3, 2.6
    first, second = np.exp(-(((3 - a) / 3) ** 2)), np.exp(-((2.75 / 3) ** 2))
    rows = [[first * 2 * (3 - a) / 9, 2 * b], [second, 5.0]]
    k(2)
    assert_allclose(y.to_numpy(), [first + b * b, a * second + 5 * b], rtol=1e-6)
    y.fill(0)
    assert_allclose(jacobian(k, x, y, args=(2,)), rows, rtol=1e-6)
    assert_allclose(y.to_numpy(), [first + b * b, a * second + 5 * b], rtol=1e-6)


@pytest.mark.sweep
@pytest.mark.taichi_only("annotations of results that are texts convert results in Quadrants")
def test_matrix_classes_as_annotations_of_results_say_nothing():
    x, y = scalars(FIVE), outputs(2)

    @ti.func
    def both(a, b) -> ti.Vector:
        return ti.Vector([a * b, a + b])

    @ti.func
    def square_matrix(a) -> ti.Matrix:
        return ti.Matrix([[a, a * a], [1.0, 2.0]])

    @ti.func
    def number(a) -> "ti.f32":
        return a * a

    @ti.kernel
    def k():
        v = square_matrix(x[2]) @ both(x[0], x[1])
        y[0] = v[0]
        y[1] = v[1] * number(x[3])

    check_jacobian(k, x, y)


def test_items_of_a_list_at_run_time_are_refused():
    x, y = scalars(FIVE), outputs(2)

    @ti.kernel
    def k():
        items = [x[0], x[1]]
        for i in range(2):
            y[i] = items[i]

    with pytest.raises(ti.TaichiCompilationError):
        k()
    message = r"(?s)test_language_python.py.*line \d+.*items\[i\].*list is indexed at run time"
    with pytest.raises(UnsupportedError, match=message):
        jacobian(k, x, y)


# --- methods ----------------------------------------------------------------------------------------------------------


@ti.data_oriented
class Springs:
    stiffness_scale = 2.0

    def __init__(self, n):
        self.n = n
        self.x = scalars(np.linspace(0.3, 1.1, n))
        self.k = scalars([1.7])
        self.y = outputs(n)
        self.rest = 0.25
        self.offsets = (1, 2)

    @ti.func
    def force(self, i, j):
        d = self.x[i] - self.x[j]
        return -self.k[0] * self.scaled(d - self.rest * self.tension)

    @staticmethod
    @ti.func
    def scaled(a):
        return a * Springs.stiffness_scale

    @property
    def tension(self):
        return 1.5

    @ti.func
    def add(self, i, f):
        self.y[i] += f

    @ti.kernel
    def run(self):
        for i in range(self.n):
            for o in ti.static(self.offsets):
                if i + o < self.n:
                    self.add(i, self.force(i, i + o))
                    self.add(i + o, -self.force(i, i + o) * self.x[0])


class Heavier(Springs):
    @ti.func
    def add(self, i, f):
        self.y[i] += 3.0 * f * self.x[i]


@pytest.mark.mostly_sweep("Springs")
@pytest.mark.parametrize("kind", [Springs, Heavier])
def test_data_oriented_classes(kind):
    s, other = kind(4), kind(3)
    check_jacobian(s.run, [s.x, s.k], s.y)
    check_jacobian(other.run, [other.x, other.k], other.y)
    check_jacobian(s.run, s.k, s.y)
    both = lambda: (s.run(), other.run())
    check_jacobian(both, [s.x, other.k], [s.y, other.y])


def test_recursion_decided_at_run_time_is_refused():
    x, y = scalars([1.3]), outputs(1)

    @ti.real_func
    def f(a: ti.f64, n: ti.i32) -> ti.f64:
        r = 1.0
        if n > 0:
            r = a * f(a, n - 1)
        return r

    k = kernel_of("y[0] = f(x[0], 3)", y=y, f=f, x=x)
    check_refused(k, x, y, "f(a, n - 1)")
    with pytest.raises(UnsupportedError) as caught:
        jacobian(k, x, y)
    assert str(caught.value).count("f(a, n - 1)") <= 2  # not once for each level
