"""Python numbers that kernels read, as parameters: every way to reach them, and what is refused."""

import dataclasses
import textwrap
import types

import constant_modules
import numpy as np
import pytest
import taichi as ti
from constant_modules import force
from differences import integers, outputs, scalars
from kernel_texts import kernels_of
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import DerivativeWarning, InvalidArgumentError, Jacobian, UnsupportedError, check_jacobian, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

X = np.array([0.5, 1.0, 2.0])
gravity = 3.0
whole = 2
single = np.float32(1.5)
count = 3
wind = ti.Vector([1.0, -2.0])
pair = (0.5, 4.0)
options = types.SimpleNamespace(inner=types.SimpleNamespace(rate=1.25))
holder = ti.math.vec3(1.0, 2.0, 3.0)
data = {"rate": 2.0}
spring_type = ti.types.struct(k=ti.f64, pull=ti.types.vector(2, ti.f64), n=ti.i32)
spring = spring_type(k=2.0, pull=[1.0, 3.0], n=2)
before = 2 * gravity  # an ordinary number: computed before any kernel


def agrees(kernel, params, y, **kwargs):
    report = check_jacobian(kernel, params, y, **kwargs)
    assert report, str(report)
    return jacobian(kernel, params, y, **kwargs)


@pytest.mark.sweep
class TestGlobals:
    def test_vectors_and_tuples(self):
        x, y = scalars(X), outputs(3)

        @ti.kernel
        def k():
            for i in y:
                v = ti.Vector([gravity, pair[0]]) * x[i] + wind
                y[i] = v.dot(ti.Vector(pair)) + wind.y * wind[0] + holder.z * x[i] + holder.norm()

        J = agrees(k, ["gravity", "wind", "pair", "holder"], y)
        assert J[1].shape == (3, 2)
        assert J[2].shape == (3, 2)
        assert_allclose(J[0], pair[0] * X)
        parts = jacobian(k, ["gravity", "wind", "pair", "holder"], y, chunk_size=3)
        for part, full in zip(parts, J):
            assert_array_equal(part, full)

    def test_locals_branches_loops_and_functions(self):
        x, y = scalars(X), outputs(3)

        @ti.func
        def bend(a, b):
            return a * b * gravity

        def bent(a):
            return bend(a, gravity)

        @ti.kernel
        def k():
            for i in y:
                h = gravity
                g = 2 * gravity
                if x[i] > 0.75:
                    h *= x[i]
                for j in range(count):
                    h += bend(2 * gravity, x[i]) * j
                y[i] = h * g + bent(x[i]) + x[i] ** whole
                y[i] += (gravity if x[i] > 1.5 else 2.0) + ti.max(gravity, x[i])

        agrees(k, ["gravity", x], y)
        assert_array_equal(jacobian(k, "gravity", y, tangents="dense"), jacobian(k, "gravity", y))


@dataclasses.dataclass
class Material:
    stiffness: float = 2.0
    direction: tuple = (1.0, 3.0)


class Computed:
    def __getattr__(self, name):
        if name == "strength":
            return 2 * gravity
        raise AttributeError(name)


@ti.data_oriented
class Solver:
    mass = 2.0

    def __init__(self):
        self.x, self.y = scalars(X), outputs(3)
        self.dt, self.r = 0.5, 3.0
        self.material = Material()
        self.computed = Computed()

    @property
    def twice(self):
        return 2 * self.dt

    def chosen(self, a):
        return a * (1.0 if self.dt > 0 else 2.0)

    @ti.func
    def moved(self, a):
        return a * self.dt * self.mass

    @ti.kernel
    def step(self):
        for i in self.y:
            d = ti.Vector(self.material.direction)
            self.y[i] = self.moved(self.x[i]) * self.r + self.twice + self.material.stiffness * d[1] * d[0]

    @ti.kernel
    def by_choice(self):
        for i in self.y:
            self.y[i] = self.chosen(self.x[i]) + self.dt

    @ti.kernel
    def by_getattr(self):
        for i in self.y:
            self.y[i] = self.computed.strength * self.x[i] + gravity


class TestAttributes:
    @pytest.mark.sweep
    def test_members_of_structs(self):
        x, y = scalars(X), outputs(3)
        both = ti.Struct(spring=spring, rest=0.5)
        springs = [spring, spring_type(k=7.0, pull=[1.0, 3.0], n=1)]

        @ti.func
        def strength(s, a):
            return s.k * a + s.pull.dot(s.pull)

        def rest():
            return both

        @ti.kernel
        def k():
            copied = spring
            copied.k *= both.rest
            for i in y:
                y[i] = spring.k**2 * x[i] + strength(spring, x[i]) + copied.k * spring.pull.y
                for s in ti.static(springs):
                    y[i] += strength(s, 2 * x[i]) + s.k
                for _ in ti.static(range(spring.n)):
                    y[i] += strength(rest().spring, 1.0) * both.spring.k

        J = agrees(k, ["spring.k", "spring.pull", "both.rest"], y)
        assert_allclose(J[0], 4 * X + X + 1.5 + 2 * X + 1 + 2 * (2 * 2.0 + 10.0))
        assert_allclose(J[2], [2.0 * 3.0] * 3)
        assert_allclose(jacobian(k, "both.spring.k", y), J[0])  # the same struct
        assert (spring.k, spring.pull.to_list()) == (
            2.0,
            [1.0, 3.0],
        )  # a vector that is assigned to is changed in place

    def test_structs_that_are_passed(self):
        x, y = scalars(X), outputs(3)

        @ti.kernel
        def by_template(s: ti.template()):
            for i in y:
                y[i] = s.k * x[i] + spring.k

        @ti.kernel
        def by_value(s: spring_type):
            for i in y:
                y[i] = s.k * x[i] + spring.k

        def run():
            by_value(spring)

        assert_allclose(agrees(by_template, "spring.k", y, args=(spring,)), X + 1)
        for kernel, args in ((by_value, (spring,)), (run, ())):
            with pytest.raises(UnsupportedError, match="struct whose member 'k' is a parameter"):
                jacobian(kernel, "spring.k", y, args=args)

    def test_a_number_that_is_passed_beside_one_that_is_read(self):
        x, y = scalars(X), outputs(3)

        @ti.kernel
        def k(h: ti.f64):
            for i in y:
                y[i] = h * gravity * x[i]

        def run():
            k(x[0] * x[1])

        agrees(run, [x, "gravity"], y)

    @pytest.mark.sweep
    def test_what_the_python_code_of_a_pipeline_reads(self):
        x, y = scalars(X), outputs(3)
        s, dt = Solver(), 0.5
        dt_of = types.SimpleNamespace(dt=2.0)

        @ti.kernel
        def k(h: ti.f64):
            for i in y:
                y[i] = h * dt * x[i] * gravity

        def passed():
            return dt

        def run():
            k(passed())

        def others():
            k(dt_of.dt)
            s.step()

        with pytest.warns(DerivativeWarning, match="dt\\) is read by the Python code of .*passed, too"):
            assert_allclose(jacobian(run, "dt", y), 0.5 * X * gravity)
        jacobian(run, "gravity", y)  # warnings are errors in these tests
        jacobian(others, "dt", y)
        jacobian(others, "s.r", s.y)

        def by_attribute():
            s.step()
            k(s.r)

        with pytest.warns(DerivativeWarning, match="s.r\\) is read by the Python code of .*by_attribute, too"):
            jacobian(by_attribute, "s.r", s.y)


WHOLE = "(whole number|index) is computed here from a Python number"
REFUSED = {  # the kernel, what is said, and the number
    "static": (
        "y[0] = ti.static(2 * gravity) * x[0] + gravity",
        r'(?s)File "<kernels.*", line \d+.*ti.static',
        "gravity",
    ),
    "static choice": ("if ti.static(gravity > 1):\n    y[0] = x[0] + gravity", "ti.static", "gravity"),
    "bound of a loop": ("for i in range(whole):\n    y[i] = x[i] * whole", r'(?s)File ".*bound of a loop', "whole"),
    "index": ("y[1] = x[whole]", WHOLE, "whole"),
    "item": ("y[1] = values[whole] * x[0]", WHOLE, "whole"),
    "int": ("y[1] = int(whole * 1.5)", WHOLE, "whole"),
    "cast": ("y[1] = ti.cast(whole, ti.i32)", WHOLE, "whole"),
    "floor": ("y[1] = ti.floor(whole * 0.5) * x[0]", WHOLE, "whole"),
    "local": ("n = whole\ny[1] = n * x[0]", WHOLE, "whole"),
    "product": ("for i in range(3):\n    y[i] = whole * i * x[0]", WHOLE, "whole"),
    "bits": ("y[1] = (whole << 1) * x[0]", WHOLE, "whole"),
    "store": ("counts[0] = gravity\ny[0] = gravity * x[0]", WHOLE, "gravity"),
    "assignment": ("n = 1\nn = 2 * gravity\ny[0] = gravity * x[n]", WHOLE, "gravity"),
}


class TestRefusals:
    """What depends on such a number in a way that has no derivative is never taken for a constant."""

    @pytest.mark.parametrize("name", REFUSED)
    def test_kernels(self, name):
        body, words, number = REFUSED[name]
        scope = {"x": scalars(X), "y": outputs(3), "counts": integers([0, 0]), "values": [1.0, 2.0, 3.0]}
        table = "k:\n" + textwrap.indent(body, "    ")
        k = kernels_of(table, **scope, gravity=gravity, whole=whole)["k"]
        with pytest.raises(UnsupportedError, match=words):
            jacobian(k, number, scope["y"])

    def test_choices_of_python_functions(self):
        s = Solver()
        with pytest.raises(UnsupportedError, match="A choice is computed here from a Python number"):
            jacobian(s.by_choice, "self.dt", s.y)

    def test_attributes_that_python_computes(self):
        s = Solver()
        with pytest.raises(UnsupportedError, match="__getattr__"):
            jacobian(s.by_getattr, "gravity", s.y)

    def test_what_no_kernel_reads(self):
        x, y = scalars(X), outputs(3)

        @ti.kernel
        def k():
            for i in y:
                y[i] = before * x[i] + single

        with pytest.raises(
            InvalidArgumentError, match=r"gravity\) is not read in .*Numbers that it may read: 'before', 'single'"
        ):
            jacobian(k, [x, "gravity"], y)
        with pytest.raises(InvalidArgumentError, match=r"gravity\) is not read by the kernels.*before"):
            jacobian(lambda: k(), [x, "gravity"], y)

    def test_names_of_something_else(self):
        x, y = scalars(X), outputs(3)

        @ti.kernel
        def k(weight: ti.f64):
            for i in y:
                y[i] = gravity * x[i] * weight

        for name, words in {
            "x": "'x', which is the name of a field; give the object itself",
            "X": "'X', which is the name of an array; pass it as an argument .* or make it a tuple of numbers",
            "data": "'data', which is the name of .*expected a number",
            "options": "expected a number",
            "spring": "a struct; name the members that are meant: spring.k, spring.pull, spring.n",
            "gravitas": "not an argument of .*and no Python number",
            "data['rate']": "not an argument",
            "weight.dt": "'weight' is an argument",
        }.items():
            with pytest.raises(InvalidArgumentError, match=words):
                jacobian(k, name, y, args=(2.0,))
        with pytest.raises(InvalidArgumentError, match="cannot be written"):
            jacobian(k, x, "gravity", args=(2.0,))
        with pytest.raises(InvalidArgumentError, match="given twice"):
            jacobian(k, ["gravity", "gravity"], y, args=(2.0,))

    def test_arguments_come_first(self):
        x, y = scalars(X), outputs(3)

        @ti.kernel
        def k(gravity: ti.f64):
            for i in y:
                y[i] = gravity * x[i]

        assert_allclose(jacobian(k, "gravity", y, args=(2.0,)), X)

        @ti.func
        def falls(a):
            return a * gravity

        @ti.kernel
        def both(gravity: ti.f64):
            for i in y:
                y[i] = gravity * falls(x[i])

        with pytest.raises(UnsupportedError, match="'gravity', which is an argument of the kernel and a Python"):
            jacobian(both, "gravity", y, args=(2.0,))

    def test_two_variables_of_one_name(self):
        x, y = scalars(X), outputs(3)
        pull = 7.0  # another than that of the module

        @ti.kernel
        def k():
            for i in y:
                y[i] = pull * force(x[i])

        with pytest.raises(UnsupportedError, match="another variable than the 'pull' that force"):
            jacobian(k, "pull", y)
        assert_allclose(jacobian(k, f"{constant_modules.__name__}.pull", y), 7 * X)

    def test_numbers_that_cannot_be_set(self):
        x, y = scalars(X), outputs(3)
        frozen = Fixed(2.0)

        @ti.kernel
        def k():
            for i in y:
                y[i] = frozen.rate * x[i]

        assert_allclose(jacobian(k, "frozen.rate", y), X)
        with pytest.raises(InvalidArgumentError, match="'rate' cannot be set"):
            check_jacobian(k, "frozen.rate", y)


@dataclasses.dataclass(frozen=True)
class Fixed:
    rate: float


class TestChanges:
    """A kernel keeps the number that it was compiled with, as Taichi's own do."""

    def test_changed_number(self):
        s = Solver()
        plan = Jacobian(s.step, "self.dt", s.y)
        for _ in range(2):
            assert_allclose(plan(), X * 6 + 2)
        s.dt = 0.75
        for call in (plan, lambda: jacobian(s.step, "self.dt", s.y)):
            with pytest.raises(UnsupportedError, match=r"self\.dt has changed from 0\.5 to 0\.75"):
                call()
        s.dt = 0.5
        assert_allclose(plan(), X * 6 + 2)
        s.material.direction = (1.0, 4.0)
        with pytest.raises(UnsupportedError, match=r"self\.material\.direction has changed"):
            jacobian(s.step, "self.material.direction", s.y)

    def test_changed_struct(self):
        x, y = scalars(X), outputs(3)
        soft = spring_type(k=2.0, pull=[1.0, 3.0], n=2)

        @ti.kernel
        def k():
            for i in y:
                y[i] = soft.k * x[i]

        @ti.kernel
        def whole():
            s = soft
            for i in y:
                y[i] = s.pull.x * x[i]

        plan, J = Jacobian(k, x, y), jacobian(whole, x, y)
        assert_allclose(plan(), 2 * np.eye(3))
        soft.k, soft.pull = 3.0, [2.0, 3.0]
        with pytest.raises(UnsupportedError, match=r"soft\.k has changed from 2\.0 to 3\.0"):
            plan()
        with pytest.raises(UnsupportedError, match="soft has changed"):
            jacobian(whole, x, y, chunk_size=2)
        soft.k, soft.pull = 2.0, [1.0, 3.0]
        assert_allclose(plan(), 2 * np.eye(3))
        assert_allclose(jacobian(whole, x, y), J)

    def test_another_owner(self):
        a, b = Solver(), Solver()
        b.y, b.r = a.y, 4.0
        current = a

        def run():
            current.step()

        assert_allclose(jacobian(run, "current.dt", a.y), X * 6 + 2)
        current = b
        assert_allclose(jacobian(run, "current.dt", a.y), X * 8 + 2)
