"""Python values that kernels name: Taichi compiles them in once; where they have changed since, J is refused."""

import gc
import types
import weakref

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars
from numpy.testing import assert_allclose

from taichi_ext import Jacobian, UnsupportedError, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

CHANGED = r'File ".*test_captures.py", line \d+, in \w+:\n.*\n.*{} has changed from {} to {} since .* was compiled'
scale = 2.0
settings = types.SimpleNamespace(scale=2.0)


def changed(name, before, now):
    return pytest.raises(UnsupportedError, match=CHANGED.format(name, before, now))


@ti.data_oriented
class Stepper:
    def __init__(self):
        self.x, self.y = scalars([1.0, 1.0, 1.0]), outputs(3)
        self.dt, self.r = 1.0, 3.0
        self.weights = [1.0, 2.0]
        self.options = types.SimpleNamespace(dt=1.0)
        self.direction = ti.Vector([1.0, 2.0])

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
    def listed(self):
        for i in self.y:
            for w in ti.static(self.weights):
                self.y[i] += w * self.x[i]

    @ti.kernel
    def nested(self):
        for i in self.y:
            self.y[i] = self.options.dt * self.x[i]

    @ti.kernel
    def vector(self):
        for i in self.y:
            self.y[i] = self.direction[1] * self.x[i]

    @ti.func
    def slope(self, i):
        return self.dt * self.x[i]

    @ti.kernel
    def by_function(self):
        for i in self.y:
            self.y[i] = self.slope(i)


class TestBetweenLaunches:
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

    def test_each_object_has_its_own(self):
        a, b = Stepper(), Stepper()
        b.x, b.y, b.dt = a.x, a.y, 3.0

        def run():
            a.step()
            b.step()

        check_jacobian(run, a.x, a.y)


class TestBetweenEvaluations:
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

    def test_globals_and_closures(self, monkeypatch):
        x, y, factor = scalars([1.0, 1.0, 1.0]), outputs(3), 1.0

        @ti.func
        def scaled(a):
            return settings.scale * a

        @ti.kernel
        def k():
            for i in y:
                y[i] = scale * x[i] + factor * scaled(x[i])

        for _ in range(3):
            assert_allclose(jacobian(k, x, y), 4 * np.eye(3))
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "scale", 7.0)
            with changed("scale", 2.0, 7.0):
                jacobian(k, x, y)
        with monkeypatch.context() as patch:
            patch.setattr(settings, "scale", 7.0)
            with changed(r"settings\.scale", 2.0, 7.0):
                jacobian(k, x, y)
        assert_allclose(jacobian(k, x, y), 4 * np.eye(3))
        factor = 5.0
        with changed("factor", 1.0, 5.0):
            jacobian(k, x, y)


class TestPlainKernel:
    """What the plain kernel was compiled with counts, whatever has happened since."""

    @pytest.mark.parametrize("name", ["step", "swizzle", "by_function"])
    def test_number(self, name):
        s = Stepper()
        getattr(s, name)()
        s.dt, s.r = 2.0, 4.0
        with changed("(dt|r)", r"\d.0", r"\d.0"):
            jacobian(getattr(s, name), s.x, s.y)
        s.dt, s.r = 1.0, 3.0
        s.y.fill(0.0)
        check_jacobian(getattr(s, name), s.x, s.y)

    @pytest.mark.parametrize("name", ["listed", "vector"])
    def test_lists_and_vectors(self, name):
        s = Stepper()
        getattr(s, name)()
        s.weights = [1.0, 3.0]
        s.direction = ti.Vector([1.0, 3.0])
        with pytest.raises(UnsupportedError, match=r"self\.(weights|direction) has changed since .* was compiled"):
            jacobian(getattr(s, name), s.x, s.y)
        s.weights[1] = 2.0
        s.direction = ti.Vector([1.0, 2.0])
        check_jacobian(getattr(s, name), s.x, s.y)

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


def test_nothing_is_kept_alive():
    s = Stepper()
    s.step()
    jacobian(s.step, s.x, s.y)
    gone = weakref.ref(s)
    del s
    gc.collect()
    assert gone() is None
