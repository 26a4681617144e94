"""Structs and argument packs that kernels take: their members are constants, parameters by name, and arrays."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars
from kernel_texts import kernel_of
from numpy.testing import assert_allclose

from taichi_ext import InvalidArgumentError, Jacobian, jacobian, vjp

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.double_only("packs of float64")]
A1 = ti.types.ndarray(ti.f64, ndim=1)
vec2 = ti.types.vector(2, ti.f64)  # of a certain type: that of ti.math.vec2 is only known after ti.init
Body = ti.types.struct(mass=ti.f64, count=ti.i32)
Inner = ti.types.argpack(gain=ti.f64, bias=A1)
Pack = ti.types.argpack(a=ti.f64, v=vec2, n=ti.i32, body=Body, inner=Inner, data=A1)
DATA, BIAS, X = np.array([0.5, 1.5, 2.5]), np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])


@pytest.fixture
def fields():
    return scalars(X), outputs(3)


def make_kernel(x, y):
    @ti.kernel
    def k(p: Pack, c: ti.f64, other: Body):
        for i in x:
            y[i] = p.a * x[i] ** p.n + p.v[1] * x[i] * p.data[i] + p.inner.gain * p.inner.bias[i]
            y[i] += p.body.mass * p.body.count * c * other.mass

    return k


def make_array(values, is_ndarray):
    if not is_ndarray:
        return values.copy()
    array = ti.ndarray(ti.f64, values.shape)
    array.from_numpy(values)
    return array


def make_args(is_ndarray=False):
    data, bias = make_array(DATA, is_ndarray), make_array(BIAS, is_ndarray)
    inner = Inner(gain=0.25, bias=bias)
    return Pack(a=2.0, v=vec2(3.0, 4.0), n=2, body=Body(5.0, 3), inner=inner, data=data), 0.5, Body(7.0, 1)


# by the names of params, the J of y
EXPECTED = {
    "p.a": X**2,
    "p.v": np.stack([np.zeros(3), X * DATA], 1),
    "p.body.mass": np.full(3, 3 * 0.5 * 7),
    "p.inner.gain": BIAS,
    "p.inner.bias": np.diag(np.full(3, 0.25)),
    "p.data": np.diag(4 * X),
    "c": np.full(3, 5 * 3 * 7.0),
    "other.mass": np.full(3, 5 * 3 * 0.5),
}
BY_X = np.diag(4 * X + 4 * DATA)


@pytest.mark.mostly_sweep("numpy-csr", "numpy-chunks")
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"format": "csr"}], ids=["whole", "chunks", "csr"])
@pytest.mark.parametrize("is_ndarray", [False, True], ids=["numpy", "ndarray"])
def test_members_are_constants_or_parameters_by_name(fields, is_ndarray, options):
    x, y = fields
    k, args = make_kernel(x, y), make_args(is_ndarray)
    found = jacobian(k, [x, *EXPECTED], y, args=args, **options)
    for J, expected in zip(found, [BY_X, *EXPECTED.values()], strict=True):
        dense = J.toarray() if options.get("format") else J
        assert_allclose(dense.reshape(expected.shape), expected, rtol=1e-12)
    k(*args)
    assert_allclose(read(y), 2 * X**2 + 4 * X * DATA + 0.25 * BIAS + 5 * 3 * 0.5 * 7)


def test_a_prepared_form_takes_other_packs(fields):
    x, y = fields
    plan = Jacobian(make_kernel(x, y), "p.a", y, args=make_args())
    assert_allclose(plan(), X**2)
    pack, c, other = make_args()
    pack = Pack(a=1.0, v=pack.v, n=3, body=pack.body, inner=pack.inner, data=pack.data)
    assert_allclose(plan(args=(pack, c, other)), X**3)


def test_an_array_in_a_pack_is_found_by_identity(fields):
    x, y = fields
    args = make_args()
    assert_allclose(jacobian(make_kernel(x, y), args[0].data, y, args=args), EXPECTED["p.data"])


@pytest.mark.sweep
def test_arrays_in_packs_are_outputs(fields):
    x, _ = fields
    Both = ti.types.argpack(source=A1, target=A1)
    k = kernel_of("for i in p.source: p.target[i] = p.source[i] ** 2 * x[i]", "p: Both", Both=Both, x=x)
    pack = Both(source=DATA.copy(), target=np.zeros(3))
    J = jacobian(k, "p.source", "p.target", args=(pack,))
    assert_allclose(J, np.diag(2 * DATA * X))
    assert_allclose(pack.target, DATA**2 * X)
    pipeline = lambda pack: (k(pack), k(Both(source=pack.target, target=pack.source)))
    pack = Both(source=DATA.copy(), target=np.zeros(3))
    J = jacobian(pipeline, x, pack.source, args=(pack,), chunk_size=2)
    assert_allclose(J, np.diag(3 * DATA**4 * X**2))


def test_a_local_or_global_of_a_members_name_is_another(fields):
    x, y = fields
    Scaled = ti.types.argpack(t=ti.f64, k=ti.f64)
    p_t = 10.0

    @ti.kernel
    def k(p: Scaled):
        for i in x:
            shared = ti.sin(p.k * x[i])  # generated locals are called t and k, too
            y[i] = p.t * shared * shared + p_t

    by_t, by_k = jacobian(k, ["p.t", "p.k"], y, args=(Scaled(t=2.0, k=0.5),))
    assert_allclose(by_t, np.sin(0.5 * X) ** 2)
    assert_allclose(by_k, 2 * X * np.sin(X))
    assert_allclose(read(y), 2 * np.sin(0.5 * X) ** 2 + 10)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("p", "name the members that are meant: 'p.a', 'p.v'"),
        ("p.inner", "name the members that are meant: 'p.inner.gain', 'p.inner.bias'"),
        ("p.n", "is an integer"),
        ("p.missing", "not an argument of k (arguments: 'p.a', 'p.v', 'p.n'"),
    ],
)
def test_names_that_mean_no_number_or_array(fields, params, message):
    x, y = fields
    with pytest.raises(InvalidArgumentError) as error:
        jacobian(make_kernel(x, y), params, y, args=make_args())
    assert message in str(error.value)


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, 1.0, "args[0] ('p' of make_kernel.<locals>.k) is a float; expected the annotated argument pack"),
        (0, Body(1.0, 1), "is a struct with the members mass, count; expected the annotated argument pack"),
        (2, Inner, "expected the annotated struct, with the members mass, count"),
    ],
)
def test_arguments_of_other_types_are_rejected(fields, position, value, message):
    x, y = fields
    args = list(make_args())
    args[position] = value
    with pytest.raises(InvalidArgumentError) as error:
        jacobian(make_kernel(x, y), x, y, args=tuple(args))
    assert message.replace("make_kernel.<locals>.", "") in str(error.value)


def test_a_pack_that_changes_after_it_was_passed():
    x, y = scalars(X), outputs(3)
    z = outputs(3)
    gains = ti.types.argpack(gain=ti.f64)
    scaled = kernel_of(
        "for i in a: b[i] = p.gain * ti.sin(a[i])", "a: ti.template(), p: gains, b: ti.template()", gains=gains
    )

    def run():
        p = gains(gain=2.0)
        scaled(x, p, z)
        p.gain = 3.0
        scaled(z, p, y)

    expected = 6 * np.cos(2 * np.sin(X)) * np.cos(X)
    assert_allclose(vjp(run, x, y, np.ones(3)), expected)
    assert_allclose(jacobian(run, x, y), np.diag(expected))
