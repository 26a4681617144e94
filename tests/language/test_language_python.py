"""Plain Python functions in kernels: Taichi runs them while it compiles, and so does the engine, on its values."""

import functools

import helper_functions
import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, check_refused, outputs, scalars
from kernel_texts import func_of, kernel_of, kernels_of

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
