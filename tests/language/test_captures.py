"""Python values that kernels name: Taichi compiles them in once; where they have changed since, J is refused."""

import math
import types

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars
from numpy.testing import assert_allclose
from runtimes import RUNTIME

from taichi_ext import Jacobian, UnsupportedError, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

CHANGED = r'File ".*test_captures.py", line \d+, in \w+:\n.*\n.*{} has changed from {} to {} since .* was compiled'
scale = 2.0
settings = types.SimpleNamespace(scale=2.0, half=0.5)


def changed(name, before, now):
    return pytest.raises(UnsupportedError, match=CHANGED.format(name, before, now))


@ti.data_oriented
class Stepper:
    def __init__(self):
        self.x, self.y = scalars([1.0, 1.0, 1.0]), outputs(3)
        self.dt, self.r = 1.0, 3.0
        self.options = types.SimpleNamespace(dt=1.0)

    @ti.kernel
    def step(self):
        for i in self.y:
            self.y[i] += self.dt * self.x[i]

    @ti.kernel
    def overwrite(self):
        for i in self.y:
            self.y[i] = self.dt * self.x[i]

    @ti.kernel
    def swizzle(self):
        for i in self.y:
            self.y[i] = self.r * self.x[i]

    @ti.kernel
    def nested(self):
        for i in self.y:
            self.y[i] = self.options.dt * self.x[i]

    @ti.func
    def slope(self, i):
        return self.dt * self.x[i]

    @ti.kernel
    def by_function(self):
        for i in self.y:
            self.y[i] = self.slope(i)


class TestBetweenLaunches:
    @pytest.mark.mostly_sweep("by_function")
    @pytest.mark.parametrize("name", ["step", "overwrite", "by_function"])
    def test_attribute(self, name):
        s = Stepper()

        def run():
            for n in range(4):
                s.dt = float(n + 1)
                getattr(s, name)()

        with changed(r"self\.dt", 1.0, 2.0):
            jacobian(run, s.x, s.y)

    def test_other_values_may_change(self):
        s = Stepper()
        s.frame = 0

        def run():
            for n in range(4):
                s.frame = n
                s.dt = 1.5 - 0.5  # the same again
                s.step()

        assert_allclose(jacobian(run, s.x, s.y), 4 * np.eye(3))

    @pytest.mark.parametrize("is_decorated", [False, True])
    def test_properties_of_subclasses(self, is_decorated):
        """Taichi takes a property from the class that is decorated, whatever a subclass without kernels has."""

        class Doubled(Halved):
            @property
            def factor(self):
                return 4.0 * super().factor

        s = (ti.data_oriented(Doubled) if is_decorated else Doubled)()
        s.step()
        is_own = is_decorated or RUNTIME == "quadrants"  # which asks the object
        assert_allclose(s.y.to_numpy(), [2.0, 4.0] if is_own else [0.5, 1.0], rtol=1e-12)
        check_jacobian(s.step, s.x, s.y)


@ti.data_oriented
class Halved:
    def __init__(self):
        self.x, self.y = scalars([1.0, 2.0]), outputs(2)

    @property
    def factor(self):
        return 0.5

    @ti.kernel
    def step(self):
        for i in self.x:
            self.y[i] = self.factor * self.x[i]


class TestBetweenEvaluations:
    @pytest.mark.mostly_sweep("step")
    @pytest.mark.parametrize("name", ["step", "overwrite", "by_function"])
    def test_attribute(self, name):
        s = Stepper()
        kernel = getattr(s, name)
        plan = Jacobian(kernel, s.x, s.y)
        for _ in range(3):
            assert_allclose(plan(), np.eye(3))
        assert_allclose(jacobian(kernel, s.x, s.y), np.eye(3))
        s.dt = 2.0
        for call in (plan, lambda: jacobian(kernel, s.x, s.y), lambda: Jacobian(kernel, [s.x], s.y)()):
            with changed(r"self\.dt", 1.0, 2.0):
                call()
        s.dt = 1.0
        assert_allclose(plan(), np.eye(3))

    def test_other_kinds_of_names(self):
        s = Stepper()
        assert_allclose(jacobian(s.swizzle, s.x, s.y), 3 * np.eye(3))
        s.r = 4.0
        with changed("r", 3.0, 4.0):
            jacobian(s.swizzle, s.x, s.y)
        assert_allclose(jacobian(s.nested, s.x, s.y), np.eye(3))
        s.options = types.SimpleNamespace(dt=1.0)  # another object, which means the same
        assert_allclose(jacobian(s.nested, s.x, s.y), np.eye(3))
        s.options = types.SimpleNamespace(dt=5.0)
        with changed(r"self\.options\.dt", 1.0, 5.0):
            jacobian(s.nested, s.x, s.y)

    @pytest.mark.filterwarnings("ignore:.*Calling non-taichi function")
    def test_globals_and_closures(self, monkeypatch):
        x, y, factor = scalars([1.0, 1.0, 1.0]), outputs(3), 1.0

        def doubled(a):
            return a / settings.half

        @ti.func
        def scaled(a):
            return settings.scale * a

        @ti.kernel
        def k():
            for i in y:
                y[i] = scale * x[i] + factor * scaled(x[i]) + doubled(x[i])

        for _ in range(3):
            assert_allclose(jacobian(k, x, y), 6 * np.eye(3))
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "scale", 7.0)
            with changed("scale", 2.0, 7.0):
                jacobian(k, x, y)
        with monkeypatch.context() as patch:
            patch.setattr(settings, "scale", 7.0)
            with changed(r"settings\.scale", 2.0, 7.0):
                jacobian(k, x, y)
        with monkeypatch.context() as patch:
            patch.setattr(settings, "half", 0.25)
            with changed(r"settings\.half", 0.5, 0.25):
                jacobian(k, x, y)
        assert_allclose(jacobian(k, x, y), 6 * np.eye(3))
        factor = 5.0
        with changed("factor", 1.0, 5.0):
            jacobian(k, x, y)


@ti.func
def square(a):
    return a * a


@ti.func
def cube(a):
    return a * a * a


@ti.func
def law_of_cube(_, a):
    return a * a * a


def multiplied(field):
    @ti.func
    def f(a, i):
        return a * field[i]

    return f


def scaled_by(number):
    def f(a):
        return a * number

    return f


@ti.data_oriented
class Law:
    def __init__(self, factor):
        self.factor = factor

    @ti.func
    def apply(self, a):
        return self.factor * a


@ti.data_oriented
class Capturing:
    """One kernel that names every kind of value."""

    shared = 2.0

    def __init__(self):
        self.x, self.y, self.table = scalars([1.0, 2.0, 3.0]), outputs(3), scalars([2.0, 3.0, 4.0])
        self.number, self.flag, self.text, self.real = 2.0, True, "a", ti.f64
        self.vector, self.matrix = ti.Vector([1.0, 2.0]), ti.Matrix([[1.0, 2.0]])
        self.pair, self.weights, self.options = (1.0, 2.0), [1.0, 2.0], {"a": 2.0}
        self.numbers, self.nested, self.walked = np.array([1.0, 2.0]), ([1.0, 2.0],), [1.0, 2.0]
        self.member = ti.types.struct(a=ti.f64, b=ti.f64)(a=1.0, b=2.0)
        self.fields, self.named = [self.table], {"a": self.table}
        self.law, self.bound, self.inner, self.functions = square, Law(2.0).apply, Law(2.0), [square]
        self.closed, self.python, self.sine = multiplied(self.table), scaled_by(2.0), ti.sin
        self.parts, self.passed = [types.SimpleNamespace(rate=2.0)], types.SimpleNamespace(rate=2.0)
        self.long = [2.0] * 2000

    @ti.func
    def own(self, a):
        return a * a

    @ti.func
    def rated(self, part: ti.template(), a):
        return part.rate * a

    @ti.kernel
    def k(self):
        for i in self.x:
            a = self.x[i]
            b = self.number * a + self.shared * a + ti.cast(1.5, self.real) * a + self.table[i] * a
            b += self.vector[1] * a + self.matrix[0, 1] * a + self.pair[1] * a + self.weights[1] * a
            b += self.options["a"] * a + self.numbers[1] * a + self.nested[0][1] * a + self.member.b * a
            b += self.fields[0][i] * a + self.named["a"][i] * a + self.law(a) + self.bound(a) + self.inner.apply(a)
            b += self.functions[0](a) + self.closed(a, i) + self.python(a) + self.sine(a) + self.own(a)
            b += self.parts[0].rate * a + self.rated(self.passed, a) + self.long[0] * a
            for w in ti.static(self.walked):
                b += w * a
            if ti.static(self.flag and self.text == "a"):
                b += a
            self.y[i] = b


def others():
    """Another value for each attribute of ``Capturing`` that its kernel names."""
    field = scalars([5.0, 6.0, 7.0])
    return {
        "shared": 3.0, "number": 3, "flag": False, "text": "b", "real": ti.i32, "table": field,
        "vector": ti.Vector([1.0, 3.0]), "matrix": ti.Matrix([[1.0, 3.0]]), "pair": (1.0, 3.0), "weights": [1.0, 3.0],
        "options": {"a": 3.0}, "numbers": np.array([1.0, 3.0]), "nested": ([1.0, 3.0],), "walked": [1.0, 2.0, 3.0],
        "member": ti.types.struct(a=ti.f64, b=ti.f64)(a=1.0, b=3.0), "fields": [field], "named": {"a": field},
        "law": cube, "bound": Law(3.0).apply, "inner": Law(3.0), "functions": [cube], "closed": multiplied(field),
        "python": scaled_by(3.0), "sine": ti.cos, "own": cube, "parts": [types.SimpleNamespace(rate=3.0)],
        "passed": types.SimpleNamespace(rate=3.0), "long": [3.0] * 2000,
    }  # fmt: skip


# changes within an object
INSIDE = {
    "vector": lambda s, v: s.vector.__setitem__(1, v),
    "weights": lambda s, v: s.weights.__setitem__(1, v),
    "walked": lambda s, v: s.walked.__setitem__(1, v),
    "options": lambda s, v: s.options.__setitem__("a", v),
    "numbers": lambda s, v: s.numbers.__setitem__(1, v),
    "nested": lambda s, v: s.nested[0].__setitem__(1, v),
    "member": lambda s, v: setattr(s.member, "b", v),
    "inner": lambda s, v: setattr(s.inner, "factor", v),
    "parts": lambda s, v: setattr(s.parts[0], "rate", v),
    "passed": lambda s, v: setattr(s.passed, "rate", v),
}


def noticed():
    return pytest.raises(UnsupportedError, match="has changed (from .* )?since .* was compiled")


@pytest.mark.filterwarnings("ignore:.*Calling non-taichi function")
class TestEachKind:
    """A changed value is noticed at each launch, whichever of the two kernels was compiled with the one before."""

    @pytest.mark.sweep
    @pytest.mark.parametrize("is_plain_first", [False, True])
    def test_noticed(self, is_plain_first):
        s = Capturing()
        if is_plain_first:
            s.k()
        plan = Jacobian(s.k, s.x, s.y)
        right = plan()
        for name, other in others().items():
            before = getattr(s, name)
            setattr(s, name, other)
            with noticed():
                plan()
            setattr(s, name, before)
            assert_allclose(plan(), right)
        for name, change in INSIDE.items():
            change(s, 3.0)
            with noticed():
                plan()
            change(s, 2.0)
            assert_allclose(plan(), right)
        del s.own  # which is that of the class again
        assert_allclose(plan(), right)
        Capturing.own, before = law_of_cube, Capturing.own
        with noticed():
            plan()
        Capturing.own = before
        assert_allclose(plan(), right)

    @pytest.mark.sweep
    def test_the_plain_kernel_is_compiled_after_the_change(self):
        """Its values count: the kernel with tangents is compiled again."""
        s = Capturing()
        plan = Jacobian(s.k, s.x, s.y)
        first = plan()
        before = {name: getattr(s, name) for name in ("number", "table", "weights", "law", "own")}
        other = others()
        for name in before:
            setattr(s, name, other[name])
        s.k()
        assert np.all(np.diagonal(plan() - first) > 1.0)
        check_jacobian(s.k, s.x, s.y)
        for name, value in before.items():
            setattr(s, name, value)
        with noticed():
            plan()

    def test_what_the_kernel_does_not_read_may_change(self):
        s = Capturing()
        plan = Jacobian(s.k, s.x, s.y)
        right = plan()
        s.weights[0] = s.options["other"] = s.parts[0].other = 5.0
        s.weights.append(1.0)
        s.parts.append(None)
        s.inner.other = s.law_of_nothing = cube
        s.long[5] = 7.0
        s.parts[0] = types.SimpleNamespace(rate=2.0)
        assert_allclose(plan(), right)


class TestPlainKernel:
    """What the plain kernel was compiled with counts, whatever has happened since."""

    def test_fields(self):
        """The plain kernel goes on with the field that it was compiled with."""
        s = Stepper()
        s.overwrite()
        s.x, s.y = s.y, s.x
        with pytest.raises(UnsupportedError, match=r"self\.[xy] has changed"):
            jacobian(s.overwrite, s.x, s.y)


def power(n, decorate=lambda f: f):
    """A function that has the number in its closure."""

    @decorate
    def f(a):
        return a**n

    return f


@pytest.mark.mostly_sweep("True-func")
@pytest.mark.parametrize("decorate", [ti.func, lambda f: f])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.filterwarnings("ignore:.*Calling non-taichi function")
def test_functions_that_are_replaced(decorate, is_nested):
    """A kernel that has not run plainly would be compiled with the other function."""
    x, y = scalars([1.0, 2.0, 3.0]), outputs(3)
    f = power(2, decorate)

    @ti.func
    def inner(a):
        return f(a)

    g = inner if is_nested else f

    @ti.kernel
    def k():
        for i in x:
            y[i] = g(x[i])

    plan = Jacobian(k, x, y)
    assert_allclose(plan().diagonal(), [2.0, 4.0, 6.0])
    f = g = power(3, decorate)
    if is_nested:
        g = inner
    with pytest.raises(UnsupportedError, match=r"[fg] has changed since .*k was compiled"):
        plan()
    f = power(2, decorate)  # another object that is the same function
    g = inner if is_nested else f
    assert_allclose(plan().diagonal(), [2.0, 4.0, 6.0])


@pytest.mark.parametrize("is_plain_first", [True, False])
@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.filterwarnings("ignore:.*Calling non-taichi function")
def test_functions_of_math_in_a_pipeline(is_plain_first, mode):
    """There, stand-ins that take dual numbers are in the module ``math``."""
    x, y = scalars([1.0, 2.0, 3.0]), outputs(3)

    @ti.kernel
    def k():
        for i in x:
            y[i] += x[i] ** 2 * math.exp(-0.5) * math.hypot(3.0, 4.0)

    def pipeline():
        k()
        k()

    if is_plain_first:
        pipeline()
    expected = 2 * math.exp(-0.5) * 5.0 * np.array([2.0, 4.0, 6.0])
    for _ in range(2):
        assert_allclose(jacobian(pipeline, x, y, mode=mode), np.diag(expected))
        k()
