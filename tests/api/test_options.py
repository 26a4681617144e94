"""Options of the checks and of ``torch_function``: wrong values are refused before anything runs; one matrix."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars
from kernel_texts import func_of, kernel_of
from numpy.testing import assert_allclose, assert_array_equal

import taichi_ext as te
from taichi_ext import (
    InvalidArgumentError,
    Jacobian,
    check_jacobian,
    check_rule,
    jacobian,
    registry,
    torch_function,
    value_and_jacobian,
)

pytestmark = pytest.mark.usefixtures("ti64")

NO_NUMBERS = ["a", -1, np.nan, np.inf, True, [1], 1j, np.ones(2)]


@pytest.fixture
def square():
    x, y = scalars([0.3, 0.5]), outputs(2)
    k = kernel_of("for i in x: y[i] += x[i] ** 2", x=x, y=y)
    yield k, x, y
    assert not y.to_numpy().any(), "something ran"


@pytest.fixture
def clamped():
    clamped = func_of("clamped(a): return ti.max(a, 0.0)")

    @te.boundary_gradient(clamped)
    def _(a, d_a, auto):
        return auto

    yield "clamped"
    registry.remove("clamped")


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("name", ["step", "rtol", "atol"])
def test_numbers_of_check_jacobian(square, name, value):
    with pytest.raises(InvalidArgumentError, match=f"^{name} is .*; expected a "):
        check_jacobian(*square, **{name: value})


def test_zero_as_a_number_of_check_jacobian(square):
    with pytest.raises(InvalidArgumentError, match="step is 0; expected a positive number"):
        check_jacobian(*square, step=0)
    assert check_jacobian(*square, rtol=0, atol=0).rtol == 0


@pytest.mark.parametrize("value", ["a", -1, 0, 2.5, True])
def test_number_of_entries_of_check_jacobian(square, value):
    with pytest.raises(InvalidArgumentError, match="most_entries is .*; expected a whole number of at least 1"):
        check_jacobian(*square, most_entries=value)
    assert check_jacobian(*square, most_entries=np.int64(1)).blocks[0].compared == 2


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_tolerance_of_check_rule(clamped, value):
    with pytest.raises(InvalidArgumentError, match="^rtol is .*; expected a number of at least 0"):
        check_rule(clamped, {"a": [1.0]}, rtol=value)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (None, "inputs is None; expected a dict"),
        ([1.0], "inputs is .* expected a dict"),
        ({"a": [1, 2]}, "inputs has no real numbers"),
        ({"a": ti.f64}, "inputs has no real numbers"),
        ({"a": [[1.0], [1.0, 2.0]]}, r"inputs\['a'\] has rows of different lengths"),
        ({"a": []}, r"inputs\['a'\] is empty"),
        ({"a": [1j]}, r"inputs\['a'\] has complex numbers"),
        ({"a": np.array(["s"])}, r"inputs\['a'\] has elements of type <U1"),
        ({"a": np.ma.ones(2)}, r"inputs\['a'\] is a masked array"),
    ],
)
def test_inputs_of_check_rule(clamped, inputs, words):
    with pytest.raises(InvalidArgumentError, match=words):
        check_rule(clamped, inputs)


def test_options_of_torch_function():
    pytest.importorskip("torch")
    n = ti.field(ti.i32, shape=2)
    k = kernel_of("for i in a: out[i] += a[i] ** 2", "a: A1, out: A1")

    def refused(words, inputs="a", outs="out", kernel=k, **options):
        with pytest.raises(InvalidArgumentError, match=words):
            torch_function(kernel, inputs, outs, **options)

    refused("kernel is the class int", kernel=int)
    refused("kernel is the gradient of a kernel", kernel=k.grad)
    refused("inputs has 'A'.*Did you mean 'a'?", inputs="A")
    refused("inputs has the field n of shape .* of type i32", inputs=n)
    refused("outputs has the field n of shape .* of type i32", outs=n)
    refused("outputs is empty", outs=[])
    refused("shapes is 3; expected a dict", shapes=3)
    refused("shapes is 'out'; expected a dict", shapes="out")
    refused("max_memory is '1GB'", max_memory="1GB")


def test_tensors_of_torch_function_that_are_no_plain_memory():
    torch = pytest.importorskip("torch")
    k = kernel_of("for i in a: out[i] += a[i] ** 2", "a: A, out: A")
    function, ones = torch_function(k, "a", "out"), torch.ones(3, dtype=torch.float64)
    cases = {"on meta": ones.to("meta"), "to_dense": ones.to_sparse(), "bfloat16": ones.bfloat16()}
    cases["only real numbers"] = torch.ones(3, dtype=torch.complex64)
    cases["nested tensor"] = torch.nested.nested_tensor([ones[:1], ones])
    for words, tensor in cases.items():
        with pytest.raises(InvalidArgumentError, match=f"'a' .*{words}"):
            function(tensor)


@pytest.mark.parametrize("value", [3, None, [], object(), np.ones(3)])
def test_path_of_an_export(square, value):
    with pytest.raises(InvalidArgumentError, match="path is .*; expected the path of a file"):
        Jacobian(*square).export(value)


@pytest.mark.parametrize("value", [3, np.ones(3), "args"])
def test_args_of_a_prepared_form_without_arguments(square, value):
    plan = Jacobian(*square)
    with pytest.raises(InvalidArgumentError, match="args is .*; expected a tuple"):
        plan(args=value)


@pytest.mark.parametrize("value", [3, [], {}, np.ones(3)])
def test_names_of_rules(value):
    with pytest.raises(InvalidArgumentError, match="No rule is named"):
        registry.remove(value)


# s, v = (v0, v1) and the 2 x 2 matrix m: 1 + 4 + 4 columns; a has 2 entries, b 1 vector of 3
S, V, M = 1.5, [[2.0, 3.0], [5.0, 7.0]], [[0.5, 0.25], [4.0, 8.0]]
# derived by hand, row by row; columns s, v[0].x, v[0].y, v[1].x, v[1].y, m00, m01, m10, m11
EXPECTED = [
    [2.0, S, 0, 0, 0, 0, 0, 0, 0],  # a[0] = s v[0].x
    [0, 0, 8.0, 0, 0, 0, 0, 0, 3.0],  # a[1] = v[0].y m11
    [0, 0, 0, 4.0, 0, 0, 0, 5.0, 0],  # b.x = v[1].x m10
    [0, 0, 0, 0, 14.0, 0, 0, 0, 0],  # b.y = v[1].y ** 2
    [0, 0, 0, 0, 0, 1.0, 2.0, 0, 0],  # b.z = m00 + 2 m01
]


class Program:
    """A kernel with params and outputs of several shapes."""

    def __init__(self):
        self.s, self.v = ti.field(ti.f64, shape=()), ti.Vector.field(2, ti.f64, shape=2)
        self.m = ti.Matrix.field(2, 2, ti.f64, shape=())
        self.a, self.b = ti.field(ti.f64, shape=2), ti.Vector.field(3, ti.f64, shape=1)
        s, v, m, a, b = self.s, self.v, self.m, self.a, self.b

        @ti.kernel
        def k():
            a[0] = s[None] * v[0].x
            a[1] = v[0].y * m[None][1, 1]
            b[0] = ti.Vector([v[1].x * m[None][1, 0], v[1].y ** 2, m[None][0, 0] + 2 * m[None][0, 1]])

        self.k = k
        s[None] = S
        v.from_numpy(np.array(V))
        m.from_numpy(np.array(M))

    @property
    def call(self):
        return self.k, {"s": self.s, "v": self.v, "m": self.m}, (self.a, self.b)


@pytest.fixture(scope="module")
def program(ti64):
    return Program()


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_sparse(program, kind):
    A = jacobian(*program.call, as_matrix=True, format=kind)
    assert A.format == kind
    assert A.nnz == np.count_nonzero(EXPECTED)
    assert_allclose(A.toarray(), EXPECTED)


def test_prepared_form_and_values(program):
    plan = Jacobian(*program.call, as_matrix=True)
    assert_allclose(plan(), EXPECTED)
    program.s[None] = 3.0
    assert_allclose(plan()[0, 1], 3.0)
    program.s[None] = S
    (a, b), A = value_and_jacobian(*program.call, as_matrix=True)
    assert_allclose(A, EXPECTED)
    assert_allclose(a, [3.0, 24.0])
    assert_allclose(b, [[20.0, 49.0, 1.0]])


def test_out_is_filled(program):
    out = np.full((5, 9), np.nan)
    assert jacobian(*program.call, as_matrix=True, out=out) is out
    assert_allclose(out, EXPECTED)
    strided = np.full((9, 5), np.nan).T
    assert Jacobian(*program.call, as_matrix=True)(out=strided) is strided
    assert_allclose(strided, EXPECTED)
    field = ti.field(ti.f64, (5, 9))
    jacobian(*program.call, as_matrix=True, out=field)
    assert_allclose(field.to_numpy(), EXPECTED)


def test_sparse_out_is_filled(program):
    A = jacobian(*program.call, as_matrix=True, format="csr")
    A.data[:] = np.nan
    assert jacobian(*program.call, as_matrix=True, format="csr", out=A) is A
    assert_allclose(A.toarray(), EXPECTED)
    other = A[:, ::-1].tocsr()
    with pytest.raises(InvalidArgumentError, match="has another pattern than the Jacobian"):
        jacobian(*program.call, as_matrix=True, format="csr", out=other)


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"as_matrix": 1}, "as_matrix is 1; expected True or False"),
        ({"as_matrix": True, "format": "bsr"}, "format='bsr' needs blocks of one size.*format='csr'"),
        ({"as_matrix": True, "out": np.zeros((5, 8))}, r"out has shape \(5, 8\); the Jacobian has \(5, 9\)"),
        ({"as_matrix": True, "out": np.zeros((5, 9), np.float32)}, "out has dtype float32; the Jacobian has float64"),
        (
            {"as_matrix": True, "out": {"s": np.zeros((5, 9))}},
            r"out has the entries out\['s'\]; the result is one array",
        ),
        ({"as_matrix": True, "format": "csr", "out": np.zeros((5, 9))}, "expected a scipy.sparse.csr_array"),
    ],
    ids=["not a bool", "bsr", "shape", "dtype", "structure", "dense for sparse"],
)
def test_bad_input_is_rejected_before_the_launch(program, options, words):
    program.a.fill(-1.0)
    with pytest.raises(InvalidArgumentError, match=words):
        jacobian(*program.call, **options)
    assert_array_equal(program.a.to_numpy(), -1.0)


def test_out_must_not_share_memory_with_an_argument():
    k = kernel_of("for i in y: y[i] = x[0, i] * x[1, i]", "x: A2, y: A1")
    x, y = np.ones((2, 2)), np.zeros(2)
    assert_allclose(jacobian(k, x, y, args=(x, y), as_matrix=True), [[1, 0, 1, 0], [0, 1, 0, 1]])
    memory = np.ones(8)
    x = memory[4:].reshape(2, 2)
    with pytest.raises(InvalidArgumentError, match="out shares memory with"):
        jacobian(k, x, y, args=(x, y), as_matrix=True, out=memory.reshape(2, 4))


def test_return_values_and_types_of_several_outputs():
    x = ti.field(ti.f32, shape=2)
    y, z = ti.field(ti.f32, shape=1), ti.field(ti.f64, shape=1)
    x.from_numpy(np.array([2.0, 3.0], np.float32))
    k = kernel_of("y[0] = x[0] * x[1]; z[0] = x[0] + x[1]", y=y, x=x, z=z)
    A = jacobian(k, x, [y, z], as_matrix=True)
    assert A.dtype == np.float64
    assert_array_equal(A, [[3, 2], [1, 1]])
    assert jacobian(k, x, [y], as_matrix=True).dtype == np.float32
    pair = kernel_of("pair(a: ti.f64, b: ti.f64) -> ti.math.vec2: return ti.math.vec2(a * b, a)")
    value, A = value_and_jacobian(pair, ["a", "b"], args=(2.0, 3.0), as_matrix=True)
    assert_array_equal(A, [[3, 2], [1, 0]])
    assert list(value) == [6, 2]


def test_tensors():
    torch = pytest.importorskip("torch")
    k = kernel_of("for i, j in y: y[i, j] = x[i] * (j + 1)", "x: A1, y: A2")
    x, y = torch.ones(2, dtype=torch.float64), torch.zeros((2, 2), dtype=torch.float64)
    expected = [[1, 0], [2, 0], [0, 1], [0, 2]]
    A = jacobian(k, [x], [y], args=(x, y), as_matrix=True)
    assert isinstance(A, torch.Tensor)
    assert_array_equal(A, expected)
    sparse = jacobian(k, [x], [y], args=(x, y), as_matrix=True, format="torch_csr")
    assert sparse.layout == torch.sparse_csr
    assert_array_equal(sparse.to_dense(), expected)
