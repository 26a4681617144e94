"""Complex vectors: products with J are linear in them, and all other arguments are real."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars, vectors
from kernel_texts import kernel_of, squares
from numpy.testing import assert_allclose

import taichi_ext as te
from taichi_ext import InvalidArgumentError, jacobian, jvp, least_squares, linear_operator, normal_equations, vjp

KINDS = (np.complex64, np.complex128)


@pytest.fixture(params=[ti.f32, ti.f64], ids=["f32", "f64"])
def problem(request, ti64):
    """An operator with two parameters, and its matrix in closed form."""
    dtype = request.param
    x, z = scalars([1.0, 2.0, 3.0], dtype), vectors([[1.0, 2.0], [3.0, 4.0]], dtype)
    y = outputs(4, dtype=dtype)
    k = kernel_of("for i in y: y[i] = x[i % 3] ** 2 * z[i % 2][1] + z[i // 2][0]", y=y, x=x, z=z)
    M = np.zeros((4, 7), np.float32 if dtype == ti.f32 else np.float64)
    X, Z = np.array([1.0, 2.0, 3.0]), np.array([[1.0, 2.0], [3.0, 4.0]])
    for i in range(4):
        M[i, i % 3] += 2 * X[i % 3] * Z[i % 2, 1]
        M[i, 3 + 2 * (i % 2) + 1] += X[i % 3] ** 2
        M[i, 3 + 2 * (i // 2)] += 1.0
    return linear_operator(k, [x, z], y), M


def drawn(kind, *shape):
    rng = np.random.default_rng(0)
    return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(kind)


@pytest.mark.mostly_sweep(every=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("product", "shape"),
    [
        (lambda A, v: A @ v, (7,)),
        (lambda A, v: A @ v, (7, 1)),
        (lambda A, v: A @ v, (7, 40)),  # more than one launch takes
        (lambda A, v: A.T @ v, (4,)),
        (lambda A, v: A.T @ v, (4, 5)),
        (lambda A, v: v @ A, (4,)),
        (lambda A, v: v @ A, (5, 4)),
        (lambda A, v: A.T.T @ v, (7,)),
        (lambda A, v: A.T @ (A @ v), (7,)),
        (lambda A, v: (2j * A) @ v, (7,)),
        (lambda A, v: (A + 1j * A) @ v, (7, 2)),
    ],
)
def test_products(problem, product, shape, kind):
    A, M = problem
    v = drawn(kind, *shape)
    found, expected = product(A, v), product(M, v)
    assert found.dtype == expected.dtype
    assert_allclose(found, expected, rtol=1e-4 if found.dtype == np.complex64 or M.dtype == np.float32 else 1e-12)


@pytest.mark.mostly_sweep("f32-shape0")
@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_the_adjoint_is_the_transpose(problem, shape):
    A, M = problem
    v = drawn(np.complex128, *shape)
    for found in (A.H @ v, A.adjoint() @ v, A.rmatvec(v) if len(shape) == 1 else A.rmatmat(v)):
        assert_allclose(found, M.T @ v, rtol=1e-5)


@pytest.mark.mostly_sweep("f64")
def test_parts_do_not_mix_and_real_vectors_stay_real(problem):
    A, M = problem
    v = drawn(np.complex128, 7)
    assert (A @ v.real).dtype.kind == "f"
    assert_allclose((A @ (1j * v.imag)).real, 0.0, atol=0)
    assert_allclose(A @ (v.real > 0), M @ (v.real > 0), rtol=1e-5)
    assert_allclose(A @ np.ones(7, np.int32), M.sum(1), rtol=1e-5)
    infinite = np.zeros(7, complex)
    infinite[6] = complex(1.0, np.inf)  # z[1][1]: the imaginary part stays in its part
    assert_allclose((A @ infinite).real[[1, 3]], M[[1, 3], 6], rtol=1e-5)


@pytest.mark.parametrize("vector", [np.array([1j] * 7, object), np.array(["a"] * 7), np.array(["2020"] * 7, "M8[Y]")])
def test_vectors_that_are_no_numbers(problem, vector):
    with pytest.raises(InvalidArgumentError, match="expected real or complex numbers"):
        problem[0] @ vector


@pytest.fixture
def square(ti64):
    x, y = scalars([1.0, 2.0, 3.0]), outputs(3)
    k = squares(x, y)
    return k, x, y


C = 1j * np.ones(3)


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda k, x, y: jvp(k, x, C, y), "tangents"),
        (lambda k, x, y: jvp(k, [x], [C], y), r"tangents\[0\]"),
        (lambda k, x, y: jvp(k, x, C.tolist(), y), "tangents"),
        (lambda k, x, y: vjp(k, x, y, C), "cotangents"),
        (lambda k, x, y: normal_equations(k, x, y, C), "weights"),
        (lambda k, x, y: normal_equations(k, x, y, dtype=complex), "dtype"),
        (lambda k, x, y: least_squares(k, x, y, bounds=(-1j, 1.0)), r"bounds\[0\]"),
        (lambda k, x, y: least_squares(k, x, y, bounds=(-9.0, C)), r"bounds\[1\]"),
        (lambda k, x, y: least_squares(k, x, y, method="trf", x_scale=C), "x_scale"),
        (lambda k, x, y: least_squares(k, [x], y, method="trf", x_scale=[C]), "x_scale"),
        (lambda k, x, y: least_squares(k, x, y, ftol=1j), "ftol"),
        (lambda k, x, y: least_squares(k, x, y, f_scale=np.complex64(1)), "f_scale"),
        (lambda k, x, y: te.check_jacobian(k, x, y, step=1j), "step"),
        (lambda k, x, y: jacobian(k, x, y, out=np.zeros((3, 3), complex)), "out has elements of type complex128"),
    ],
)
def test_all_other_arguments_are_real(call, what, square):
    k, x, y = square
    with pytest.raises(InvalidArgumentError, match=f"^{what}"):
        call(k, x, y)
    assert_allclose(x.to_numpy(), [1.0, 2.0, 3.0])
    assert_allclose(y.to_numpy(), 0.0)  # nothing was launched
