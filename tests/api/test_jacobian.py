"""The contract of ``jacobian``: what may be given, and the shape, type and structure of the result."""

from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import taichi as ti
from captured_warnings import no_warnings
from devices import real
from differences import outputs, read, scalars, vectors, write
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import InvalidArgumentError, hessian, jacobian, newton, value_and_jacobian

pytestmark = pytest.mark.usefixtures("ti64")

Pair = namedtuple("Pair", "first second")


# --- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.double_only("two types of real numbers")
def test_dtype_is_that_of_the_output():
    x32, x64 = scalars([0.3], ti.f32), scalars([0.7])
    y32, y64 = outputs(1, dtype=ti.f32), outputs(1)
    k = kernel_of(
        "y32[0] = ti.cast(x64[0] * x32[0], ti.f32); y64[0] = x64[0] * x32[0]", y32=y32, y64=y64, x64=x64, x32=x32
    )

    (single_by_32, single_by_64), (double_by_32, double_by_64) = jacobian(k, [x32, x64], [y32, y64])
    assert {single_by_32.dtype, single_by_64.dtype} == {np.dtype(np.float32)}
    assert {double_by_32.dtype, double_by_64.dtype} == {np.dtype(np.float64)}
    assert_allclose(double_by_64, [[np.float32(0.3)]], rtol=1e-15)
    assert_allclose(double_by_32, [[0.7]], rtol=1e-15)
    assert_allclose([single_by_32, single_by_64], [[[0.7]], [[0.3]]], rtol=1e-6)


def test_half_precision_is_a_type_too():
    x, y = ti.field(ti.f16, shape=2), ti.field(ti.f16, shape=1)
    write(x, np.array([1.5, 2.0], np.float16))
    k = kernel_of("y[0] = x[0] * x[1]", y=y, x=x)
    result = jacobian(k, x, y)
    assert result.dtype == np.float16
    assert_allclose(result, [[2.0, 1.5]], rtol=1e-3)


# --- structures -------------------------------------------------------------------------------------------------------


@pytest.fixture
def squares():
    x, v = scalars([0.3, 0.5]), vectors([[0.2, 0.4]])
    y, z = outputs(2), outputs(3)

    @ti.kernel
    def k():
        for i in range(2):
            y[i] = x[i] ** 2 + v[0][i]
        for i in range(3):
            z[i] = x[0] * v[0][1] * i

    return k, x, v, y, z


def expected_squares(x, v):
    a, b = read(x), read(v)[0]
    numbers = np.arange(3.0)
    return {
        ("y", "x"): np.diag(2 * a),
        ("y", "v"): np.eye(2)[:, None, :],
        ("z", "x"): np.outer(numbers, [b[1], 0.0]),
        ("z", "v"): np.outer(numbers, [0.0, a[0]])[:, None, :],
    }


def test_nested_structures_and_named_tuples(squares):
    k, x, v, y, z = squares
    true = expected_squares(x, v)
    found = jacobian(k, Pair({"inner": [x]}, v), ({"all": Pair(y, [z])},))
    assert type(found) is tuple
    by_y, (by_z,) = found[0]["all"]
    assert isinstance(found[0]["all"], Pair)
    assert isinstance(by_y, Pair)
    assert_allclose(by_y.first["inner"][0], true["y", "x"])
    assert_allclose(by_y.second, true["y", "v"])
    assert_allclose(by_z.first["inner"][0], true["z", "x"])
    assert_allclose(by_z.second, true["z", "v"])


def test_an_output_may_be_named_twice(squares):
    k, x, _, y, _ = squares
    first, second = jacobian(k, x, [y, y])
    assert_array_equal(first, second)
    first[0, 0] = 7.0
    assert second[0, 0] != 7.0


@pytest.mark.sweep
@pytest.mark.cpu_only("140 arrays in one loop, for which other devices need not have buffers")
def test_more_outputs_than_taichi_takes_arguments():
    """Each has an array of tangents, and Taichi's own launch lets 64 arguments through."""
    x, outs = scalars([0.3, 0.7]), [outputs() for _ in range(70)]
    k = kernel_of("for n in ti.static(range(70)): outs[n][None] = x[n % 2] ** 2 * n", outs=outs, x=x)
    for n, row in enumerate(jacobian(k, x, outs)):
        expected = np.zeros(2)
        expected[n % 2] = 2 * n * [0.3, 0.7][n % 2]
        assert_allclose(row, expected, rtol=1e-6)


# --- arguments --------------------------------------------------------------------------------------------------------


def test_numpy_scalars_and_arrays_are_taken_where_taichi_takes_them():
    y = outputs(1)
    k = kernel_of("y[0] = a * v[0] * v[1] * n", "a: ti.f64, v: ti.types.vector(2, ti.f64), n: ti.i32", y=y)
    args = [np.float64(2.0), np.array([3.0, 5.0]), np.int32(7)]  # a list, too
    by_a, by_v = jacobian(k, ["a", "v"], y, args=args)
    assert_allclose(by_a, [105.0])
    assert_allclose(by_v, [[70.0, 42.0]])


def test_return_value_beside_fields():
    x, y = scalars([0.3, 0.5]), outputs(1)
    k = kernel_of("k() -> ti.f64: y[0] = x[0] * 2; return x[1] * y[0]", y=y, x=x)
    value, result = value_and_jacobian(k, x)
    assert value == pytest.approx(0.3)
    assert_allclose(result, [1.0, 0.6])
    assert_allclose(jacobian(k, x, y), [[2.0, 0.0]])


# --- methods ----------------------------------------------------------------------------------------------------------


@ti.data_oriented
class Spring:
    def __init__(self, stiffness):
        self.stiffness = stiffness
        self.position = ti.field(ti.f64, shape=2)
        self.force = ti.field(ti.f64, shape=2)
        write(self.position, np.array([0.3, 0.5]))

    @ti.kernel
    def pull(self, rest: ti.f64):
        for i in self.force:
            self.force[i] = self.law(self.position[i] - rest)

    @ti.func
    def law(self, extension):
        return self.stiffness * extension**2

    @staticmethod
    @ti.kernel
    def power(source: ti.template(), target: ti.template(), a: ti.f64):
        for i in source:
            target[i] = source[i] ** a

    def pull_twice(self, rest):
        self.pull(rest)
        for i in range(2):
            self.pull(rest + 0.1 * i)


def test_methods_of_two_objects():
    soft, stiff = Spring(1.0), Spring(10.0)
    for spring in (soft, stiff, soft):
        by_position, by_rest = jacobian(spring.pull, [spring.position, "rest"], spring.force, args=(0.1,))
        slope = 2 * spring.stiffness * (np.array([0.3, 0.5]) - 0.1)
        assert_allclose(by_position, np.diag(slope))
        assert_allclose(by_rest, -slope)
        assert_allclose(read(spring.force), spring.stiffness * np.array([0.04, 0.16]))


@pytest.mark.taichi_only("Quadrants calls no kernel that is a static method")
def test_static_method():
    spring = Spring(3.0)
    by_source, by_a = jacobian(
        spring.power, [spring.position, "a"], spring.force, args=(spring.position, spring.force, 2.0)
    )
    assert_allclose(by_source, np.diag([0.6, 1.0]))
    assert_allclose(by_a, np.array([0.09, 0.25]) * np.log([0.3, 0.5]))


# --- the value --------------------------------------------------------------------------------------------------------


def test_value_and_jacobian_has_the_structure_of_the_outputs(squares):
    k, x, v, y, z = squares
    values, result = value_and_jacobian(k, x, {"y": y, "rest": [z]})
    assert_allclose(values["y"], np.array([0.09, 0.25]) + [0.2, 0.4])
    assert_allclose(values["rest"][0], 0.3 * 0.4 * np.arange(3))
    assert_allclose(result["y"], expected_squares(x, v)["y", "x"])
    assert_array_equal(values["y"], read(y))


def test_value_of_an_array_is_a_copy():
    k = kernel_of("for i in o: o[i] = a[i] ** 2", "a: A1, o: A1")
    a, o = real([2.0, 3.0]), real(np.zeros(2))
    value, result = value_and_jacobian(k, a, o, args=(a, o))
    assert_allclose(result, np.diag([4.0, 6.0]))
    o.fill(0)
    assert_array_equal(value, [4.0, 9.0])


# --- out --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def product():
    x, y = scalars([0.3, 0.5]), outputs(3)
    k = kernel_of("for i in y: y[i] = x[0] * x[1] * i", y=y, x=x)
    return k, x, y, np.outer(np.arange(3.0), [0.5, 0.3])


def test_out_numpy_array_that_is_not_contiguous(product):
    k, x, y, true = product
    for out in (real(np.full((2, 3), np.nan)).T, real(np.full((6, 4), np.nan))[::2, 1:3]):
        assert jacobian(k, x, y, out=out) is out
        assert_allclose(out, true)


def test_out_of_components_that_no_kernel_stores():
    x, y, out = scalars([0.3, 0.5]), vectors(np.zeros((2, 2))), real(np.full((2, 2, 2), np.nan))
    jacobian(kernel_of("for i in y: y[i][0] = x[i] ** 2", y=y, x=x), x, y, out=out)
    assert_allclose(out, np.diag([0.6, 1.0])[:, None] * [[1.0], [0.0]], rtol=1e-6)


def test_out_with_an_axis_of_one_entry():
    """Its stride is 0, as NumPy makes it, and no entries share their memory."""
    x, y, out = scalars([0.3, 0.5]), outputs(1), real(np.full(2, np.nan))[None]
    k = kernel_of("y[0] = x[0] * x[1]", y=y, x=x)
    assert jacobian(k, x, y, out=out) is out
    assert_allclose(out, [[0.5, 0.3]])


def test_out_torch_tensor(product):
    torch = pytest.importorskip("torch")
    k, x, y, true = product
    out = torch.from_numpy(real(np.full((3, 2), np.nan)))
    assert jacobian(k, x, y, out=out) is out
    assert_allclose(out.numpy(), true)


def test_out_is_filled_by_name(squares):
    _, x, _, y, _ = squares
    other = outputs(2)
    both = kernel_of("for i in range(2): y[i] = x[i] ** 2; other[i] = x[0] * i", y=y, x=x, other=other)
    out = {"other": real(np.empty((2, 2))), "y": real(np.empty((2, 2)))}
    jacobian(both, x, {"y": y, "other": other}, out=out)
    assert_allclose(out["y"], np.diag([0.6, 1.0]))
    assert_allclose(out["other"], [[0, 0], [1, 0]])


# --- side effects -----------------------------------------------------------------------------------------------------


def test_gradient_flags_change_nothing():
    x, y = ti.field(ti.f64, shape=2, needs_grad=True, needs_dual=True), ti.field(ti.f64, shape=2, needs_grad=True)
    write(x, np.array([0.3, 0.5]))
    write(x.grad, 7.0)
    write(y.grad, 3.0)
    k = kernel_of("for i in x: y[i] = x[0] * x[i]", x=x, y=y)
    assert_allclose(jacobian(k, x, y), [[0.6, 0.0], [0.5, 0.3]])
    assert_array_equal(read(x.grad), 7.0)
    assert_array_equal(read(y.grad), 3.0)
    assert_array_equal(read(x.dual), 0.0)


def test_empty_loop_gives_zero():
    x, y, n = scalars([0.3]), outputs(2), ti.field(ti.i32, shape=())
    k = kernel_of("for i in range(n[None]): y[i] = x[0]", n=n, y=y, x=x)
    n[None] = 0
    assert_array_equal(jacobian(k, x, y), np.zeros((2, 1)))
    n[None] = 2
    assert_array_equal(jacobian(k, x, y), np.ones((2, 1)))


A1 = ti.types.ndarray(ti.f64, ndim=1)


class TestNoEntries:
    """J of arrays without entries has none, of which no warning says that they are zero."""

    @pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"format": "csr"}, {"mode": "reverse"}], ids=str)
    @pytest.mark.parametrize(("rows", "columns"), [(0, 0), (3, 0), (0, 3)])
    def test_jacobian(self, rows, columns, options):
        @ti.kernel
        def double(source: A1, target: A1):
            for i in range(min(rows, columns)):
                target[i] = 2.0 * source[i]
            for i in range(rows):
                target[i] += 1.0
            for i in range(columns):
                source[i] *= 1.0

        a, b = np.ones(columns), np.ones(rows)
        with no_warnings():
            assert jacobian(double, a, b, args=(a, b), **options).shape == (rows, columns)

    @pytest.mark.parametrize("call", [hessian, partial(hessian, format="csr"), newton], ids=["H", "sparse H", "newton"])
    def test_second_derivatives(self, call):
        @ti.kernel
        def energy(x: A1) -> ti.f64:
            total = 0.0
            for i in x:
                total += x[i] ** 2
            return total

        with pytest.raises(InvalidArgumentError, match="params have no entries"):
            call(energy, "x", args=(np.ones(0),))
