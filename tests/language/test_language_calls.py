"""Functions that kernels call: ti.func, ti.pyfunc, methods, closures, static recursion."""

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, check_refused, outputs, scalars
from kernel_texts import kernel_of
from numpy.testing import assert_allclose

from taichi_ext import UnsupportedError, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

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
    message = r"(?s)test_language_calls.py.*line \d+.*items\[i\].*list is indexed at run time"
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
