"""Operators, vectors, locals and names in kernels, the order of evaluation, and constructs that have one test each."""

import operator
from pathlib import Path

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import check_jacobian, matrices, matrix_outputs, outputs, scalars
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal
from taichi.lang import matrix_ops
from taichi.math import vec3
from taichi_program import share_program

from taichi_ext import InvalidArgumentError, Jacobian, jacobian

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


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 3])
def test_methods_of_matrices(size):
    values = np.add.outer(np.arange(size), 2.0 * np.arange(size)) * 0.1 + np.diag(1.0 + np.arange(size)) + 0.05
    values[0, -1] -= 0.4
    x, y, z = matrices([values]), matrix_outputs(size, size, 3), outputs(10)

    @ti.kernel
    def k():
        a = x[0]
        z[0] = a.determinant()
        z[1] = a.trace()
        z[2] = a.norm() + a.norm_sqr()
        z[3] = a.norm_inv() + a.norm(1e-2)
        z[4] = a.sum()
        z[5] = a.max()
        z[6] = a.min()
        z[7] = a.any() * a[0, 0] + a.all() * a[0, 0]
        z[8] = a.n * a.m * a[0, 0]
        z[9] = x[0].determinant() * x[0].trace()
        y[0] = a.inverse()
        y[1] = a.transpose()
        y[2] = a.cast(ti.f64) @ a

    check_jacobian(k, x, [y, z])


@pytest.mark.taichi_only("the names of Taichi")
def test_every_public_method_of_vectors_and_matrices_is_tested():
    here = Path(__file__)
    source = here.read_text(encoding="utf-8") + here.with_name("test_programs.py").read_text(encoding="utf-8")
    helpers = {"E", "Matrix", "Vector", "func", "pyfunc", "static", "template", "preconditions", "ops_mod", "matmul"}
    helpers |= {"arg_at", "arg_foreach_check", "assert_list", "assert_tensor", "assert_vector", "check_matmul"}
    helpers |= {"check_transpose", "dim_lt", "is_int_const", "same_shapes", "square_matrix"}
    for name in set(dir(matrix_ops)) - helpers:
        if not name.startswith("_"):
            assert f".{name}(" in source, name


@pytest.mark.sweep
def test_terms_that_come_after_a_loop_are_none_in_it():
    """Else two locals that are given to each other take a slot more in each walk, without an end."""
    x, y = scalars(np.linspace(0.3, 1.2, 40)), outputs(4)

    @ti.kernel
    def k():
        for i in range(4):
            best = 1e9
            second = 1e9
            for j in range(40):
                d = (x[j] - 0.253 * i - 0.26) ** 2
                if d < best:
                    second = best
                    best = d
                elif d < second:
                    second = d
            best += x[0] * second
            y[i] = best * 2.0 + second

    dense = check_jacobian(k, x, y)
    plan = Jacobian(k, x, y, format="csr")
    assert_allclose(plan().toarray(), dense, rtol=1e-9)
    assert "local best" in plan.explain()
    assert "1 fixed columns and 2 indexed columns" in plan.explain()


@pytest.mark.chosen_only("rows are multiplied as they are: zero times infinity is NaN", "--tangents")
def test_a_constant_local_next_to_an_infinite_factor():
    x, y, z, w = scalars([0.7, 1.2, 0.4]), outputs(3), outputs(3), scalars([np.inf, np.inf, -1.0])

    @ti.kernel
    def k():
        for i in range(3):
            factor = 1.0
            y[i] = factor * w[i]
            if w[i] > 0.0:
                factor = x[i]
            z[i] = factor * x[2]

    J = jacobian(k, x, [y, z])
    np.testing.assert_array_equal(J[0], np.zeros((3, 3)))
    np.testing.assert_array_equal(J[1], [[0.4, 0.0, 0.7], [0.0, 0.4, 1.2], [0.0, 0.0, 1.0]])


def test_guarded_columns_stay_within_j():
    """Where the guard does not hold, nothing is added: not to -0.0 either, which would become 0.0."""
    x, y = scalars([0.3, 0.8, 1.4]), outputs(6)

    @ti.kernel
    def branch():
        for i in range(6):
            t = 0.5
            if i < 3:
                t = x[i]
            y[i] = t * t

    chosen = kernel_of("for i in range(6): y[i] = ti.select(i < 3, x[i], 0.5) ** 2", y=y, x=x)
    for kernel in (branch, chosen):
        memory = real(np.full(54, -0.0))
        J = jacobian(kernel, x, y, out=memory[18:36].reshape(6, 3))
        assert_allclose(J, np.diag([0.6, 1.6, 2.8, 0, 0, 0])[:, :3])
        assert np.signbit(memory[36:]).all()
        assert np.signbit(memory[:18]).all()


X = [1.3, 0.4, 0.7]


def test_an_array_argument_that_is_a_parameter():
    y = outputs(3)
    k = kernel_of("for i in y: y[i] = _shadow0[i] * _ad * _shadow0[0]", "_shadow0: A, _ad: ti.f64", y=y)
    a = np.array(X)
    expected = 0.5 * (1.3 * np.eye(3) + np.outer(a, [1.0, 0.0, 0.0]))
    assert_allclose(jacobian(k, a, y, args=(a, 0.5)), expected)
    assert_allclose(jacobian(k, "_ad", y, args=(a, 0.5)), a * 1.3)


_ad = 3.0
_shadow0 = 0.25


@ti.func
def scaled(a):
    _value1 = _ad * a
    return _value1 * _shadow0 * a


def test_globals_and_inlined_functions():
    x, y = scalars(X), outputs(3)
    k = kernel_of(
        "for i in x: tm = ti.Vector([x[i], 2.0]); y[i] = scaled(x[i]) * _shadow0 - _ad * x[0] + tm.x * tm.norm()",
        **{"x": x, "y": y, "_shadow0": _shadow0, "_ad": _ad, "scaled": scaled},  # tm: a module outside of the kernel
    )

    check_jacobian(k, x, y)


WIDTH, HEIGHT, FOCAL = 640, 480, 400.0
START = np.array([10.1, 10.1, 10.1, 100.1])


def test_sums_of_columns_and_pixels_that_miss_the_sphere():
    params, depths = scalars(START), ti.field(ti.f64, (WIDTH, HEIGHT))
    rays = ti.Vector.field(3, ti.f64, (WIDTH, HEIGHT))
    x, y = np.mgrid[:WIDTH, :HEIGHT].astype(np.float64)
    ray = np.stack([(x - WIDTH / 2) / FOCAL, (y - HEIGHT / 2) / FOCAL, np.ones_like(x)], axis=-1)
    ray /= np.linalg.norm(ray, axis=-1, keepdims=True)
    rays.from_numpy(ray)

    @ti.func
    def depth_of(ray):
        r = params[0]
        centre = vec3(params[1], params[2], params[3])
        tc = centre.dot(ray) * ray
        d = centre - tc
        depth = 0.0
        if r > d.norm():
            depth = tc.norm() - ti.sqrt(r * r - d.norm_sqr())
        else:
            depth = 0.0
        return depth

    trace = kernel_of(
        "for i, j in depths: depths[i, j] = depth_of(rays[i, j])", depths=depths, depth_of=depth_of, rays=rays
    )
    J = jacobian(trace, params, depths)
    assert_allclose(J.sum(axis=(0, 1)), [-10500.16, 474.597, 474.597, 5872.767], rtol=1e-6)
    d = START[1:] - (ray @ START[1:])[..., None] * ray
    inside = (d**2).sum(axis=-1) < START[0] ** 2
    assert_array_equal(J[~inside], 0.0)
    assert (J[inside, 0] != 0).all()


@pytest.mark.double_only("two types of real numbers")
def test_double_fields_among_single_locals():
    """A float64 field gets float64 tangents, also where the literals of the program are float32."""
    share_program()  # with the defaults of Taichi, until the end of this module
    x, y, z = scalars([1.3, 0.4, 0.7, 0.23, 0.9]), outputs(5), outputs(5)

    @ti.kernel
    def k():
        for i in range(5):
            y[i] = x[i] * x[0] * 3.0 + ti.sin(x[i])
            s = x[i] * 2.0
            for j in range(3):
                s = s * x[j] + x[i]
            z[i] = s

    J = check_jacobian(k, x, [y, z])
    assert J[0].dtype == J[1].dtype == np.float64
