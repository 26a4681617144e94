"""Operators in kernels, and the order in which Taichi evaluates an expression."""

import operator

import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars

pytestmark = pytest.mark.usefixtures("ti64")


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*Calling non-taichi function")
def test_operators_as_functions():
    x, y = scalars([1.3, 0.45]), outputs(8)
    plus = operator.add

    @ti.kernel
    def k():
        a, b = x[0], x[1]
        y[0] = plus(a, b) * operator.sub(a, b)
        y[1] = operator.mul(a, operator.truediv(a, b))
        y[2] = operator.mod(a, b) + operator.floordiv(a, b)
        y[3] = operator.pow(a, b) + operator.neg(a)
        if operator.lt(b, a):
            y[4] = operator.mul(a, 2)

    check_jacobian(k, x, y)


# --- order of evaluation ----------------------------------------------------------------------------------------------


@pytest.mark.cpu_only("shaders print elsewhere")
def test_print_and_assert(capfd):
    x, y = scalars([0.3, 0.8]), outputs(1)

    @ti.kernel
    def k():
        a = x[0] * x[1]
        print("a", a, "x", x[0], f"sum {a + x[1]} and {x[0]:.3f}", f"{a} {x[1]}", sep=" ", end="!\n")
        assert a > 0.0
        assert a > 0.0 and x[1] > a, "message"  # noqa: PT018
        assert a < x[1], f"a is {a}"
        assert x[0] < 5.0, "x is %f" % x[0]  # noqa: UP031
        y[0] = a * x[0]
        print(ti.Vector([a, x[0]]), y[0])

    check_jacobian(k, x, y)
    ti.sync()
    assert "sum 1.04" in capfd.readouterr().out


def test_docstrings_pass_and_bare_expressions():
    x, y = scalars([0.3, 0.8]), outputs(1)

    @ti.kernel
    def k():
        """A kernel."""
        x[0] * 2.0
        x[1]
        if x[0] > 0.1:
            pass
        else:
            ...
        y[0] = x[0] * x[1]

    check_jacobian(k, x, y)
