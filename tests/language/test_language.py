"""Operators in kernels, the order in which Taichi evaluates an expression, and constructs that have one test each."""

import operator

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars
from kernel_texts import kernel_of

from taichi_ext import InvalidArgumentError, jacobian

pytestmark = pytest.mark.usefixtures("ti64")


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


def test_an_atomic_product_outside_of_loops():
    x, y = scalars([1.3, 0.4, 0.7, 0.23, 0.9]), scalars([1.5])

    @ti.kernel
    def k():
        ti.atomic_mul(y[0], x[0])  # Taichi 1.7.4 aborts the process on it, so that there are no differences to compare

    np.testing.assert_array_equal(jacobian(k, x, y), [[1.5, 0.0, 0.0, 0.0, 0.0]])
    assert y[0] == pytest.approx(1.5 * 1.3, rel=1e-6)


@pytest.mark.sweep
def test_a_struct_field_with_integers_means_its_real_members():
    vec2, matrix = ti.types.vector(2, ti.f64), ti.types.matrix(2, 2, ti.f64)
    Tag, Mixed = ti.types.struct(id=ti.i32), ti.types.struct(n=ti.i32, v=vec2, m=matrix, s=ti.f32)
    x, y = ti.types.struct(a=ti.f64, n=ti.i32, inner=Mixed, tag=Tag).field(shape=2), outputs(2)
    x.a.from_numpy(np.array([0.3, 0.8]))
    x.n.from_numpy(np.array([2, 5]))
    x.inner.v.from_numpy(np.array([[0.5, 0.2], [1.1, 0.4]]))

    @ti.kernel
    def k():
        for i in range(2):
            s = x[i].inner.m.trace() + x[i].inner.s
            y[i] = x[i].a ** 2 * x[i].n + x[i].inner.v.sum() * x[i].a + s + x[i].tag.id

    J = jacobian(k, x, y)
    assert set(J) == {"a", "inner"} and set(J["inner"]) == {"v", "m", "s"}
    a, v = x.a.to_numpy(), x.inner.v.to_numpy()
    np.testing.assert_allclose(J["a"], np.diag(2 * a * [2, 5] + v.sum(1)), rtol=1e-12)
    np.testing.assert_allclose(J["inner"]["v"], np.einsum("ij,k->ijk", np.diag(a), np.ones(2)), rtol=1e-12)
    with pytest.raises(InvalidArgumentError, match="real numbers"):
        jacobian(k, x.n, y)
    with pytest.raises(InvalidArgumentError, match="real numbers"):
        jacobian(k, x.tag, y)


def test_ranges_with_steps_are_taichis_own_errors():
    x, y = scalars([1.3, 0.4, 0.7, 0.2, 0.9]), outputs(1)
    k = kernel_of("for i in range(0, 5, 2): y[0] += x[i]", y=y, x=x)
    with pytest.raises(ti.TaichiCompilationError, match="Range should have 1 or 2 arguments"):
        k()

    with pytest.raises(ti.TaichiCompilationError, match="Range should have 1 or 2 arguments"):
        jacobian(k, x, y)
