"""Array arguments as parameters, outputs, intermediates and constants: NumPy, ti.ndarray and torch."""

import numpy as np
import pytest
import taichi as ti
from devices import real
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import InvalidArgumentError, backend, jacobian, value_and_jacobian

pytestmark = pytest.mark.usefixtures("ti64")

needs_torch = "PyTorch is not installed (python -m pip install '.[torch]')"
KINDS = ["numpy", "ndarray", "torch"]
vec3 = ti.types.vector(3, ti.f64)


def make(kind, values, element=()):
    """An array of some kind that holds the values; ``element`` is the shape of its elements where they are vectors."""
    values = real(values)
    if kind == "numpy":
        return values
    if kind == "torch":
        return pytest.importorskip("torch", reason=needs_torch).from_numpy(values)
    dtype = {np.dtype(np.float64): ti.f64, np.dtype(np.float32): ti.f32, np.dtype(np.int32): ti.i32}[values.dtype]
    shape = values.shape[: values.ndim - len(element)]
    if len(element) == 1:
        array = ti.Vector.ndarray(*element, dtype, shape)
    elif len(element) == 2:
        array = ti.Matrix.ndarray(*element, dtype, shape)
    else:
        array = ti.ndarray(dtype, shape)
    array.from_numpy(values)
    return array


def content(array):
    """A NumPy copy of an array."""
    if isinstance(array, np.ndarray):
        return array.copy()
    return array.to_numpy() if isinstance(array, ti.Ndarray) else array.numpy().copy()


smooth = kernel_of("for i in range(y.shape[0]): y[i] = ti.sin(x[i]) * x[i + 1]", "x: A, y: A")


def smooth_jacobian(x):
    J = np.zeros((len(x) - 1, len(x)))
    for i in range(len(x) - 1):
        J[i, i], J[i, i + 1] = np.cos(x[i]) * x[i + 1], np.sin(x[i])
    return J


X = np.array([0.3, -0.8, 1.1, 0.6])


@pytest.mark.mostly_sweep("torch")
@pytest.mark.parametrize("kind", KINDS)
def test_parameter_and_output(kind):
    x, y = make(kind, X), make(kind, np.zeros(3))
    values, J = value_and_jacobian(smooth, x, y, args=(x, y))
    assert_allclose(content(J), smooth_jacobian(X), rtol=1e-14)
    assert_allclose(content(y), np.sin(X[:-1]) * X[1:], rtol=1e-15)
    assert_allclose(content(values), content(y), rtol=0)
    assert_array_equal(content(x), X)
    assert type(J).__module__.split(".")[0] == ("torch" if kind == "torch" else "numpy")


@ti.kernel
def spread(s: ti.types.ndarray(ndim=2), v: ti.types.ndarray(dtype=vec3, ndim=2)):
    for i, j in v:
        v[i, j] = ti.Vector([1.0, s[i, j], s[i, j] ** 2]) * s[0, 0]
        v[i, j][2] += s[1, 0]


@pytest.mark.mostly_sweep("torch")
@pytest.mark.parametrize("kind", KINDS)
def test_vector_elements_as_output(kind):
    s_values = np.array([[0.5, 1.5, -1.0], [2.0, 0.3, 0.7]])
    s, v = make(kind, s_values), make(kind, np.zeros((2, 3, 3)), (3,))
    J = content(jacobian(spread, s, v, args=(s, v)))
    assert J.shape == (2, 3, 3, 2, 3)
    expected = np.zeros(J.shape)
    for i, j in np.ndindex(2, 3):
        x, scale = s_values[i, j], s_values[0, 0]
        expected[i, j, :, 0, 0] += [1, x, x**2]
        expected[i, j, :, i, j] += np.array([0, 1, 2 * x]) * scale
        expected[i, j, 2, 1, 0] += 1
    assert_allclose(J, expected, rtol=1e-14)


step_in_place = kernel_of("for i in x: x[i] += k * x[i] ** 2", "x: A, k: ti.f64")


def test_array_and_number_as_parameters():
    for chunk_size in (None, 3):  # the number is a column of the second block
        J = jacobian(step_in_place, {"x": "x", "k": "k"}, "x", args=(X.copy(), 0.5), chunk_size=chunk_size)
        assert_allclose(J["x"], np.diag(1 + X), rtol=1e-14)
        assert_allclose(J["k"], X**2, rtol=1e-14)


product = kernel_of("for i in a: c[i] = a[i] * b[i]", "a: A, b: A, c: A")


@pytest.mark.mostly_sweep("ndarray", "torch")
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_array_twice_is_one_array(kind):
    if kind != "ndarray" and not backend.is_host_arch():
        pytest.skip("a GPU gets a copy of the host's array for each argument: see the next test")
    a, c = make(kind, X), make(kind, np.zeros(4))
    J = jacobian(product, a, c, args=(a, a, c))
    assert_allclose(content(J), np.diag(2 * X), rtol=1e-14)
    J = jacobian(product, "a", a, args=(a, a, a))
    assert_allclose(content(J), np.diag(2 * X), rtol=1e-14)
    assert_allclose(content(a), X**2, rtol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_array_twice_on_a_gpu(kind, monkeypatch):
    """Taichi copies an array of the host once for each argument: a plain kernel does not see its own stores."""
    monkeypatch.setattr(backend, "is_host_arch", lambda: False)
    a, c = make(kind, X), make(kind, np.zeros(4))
    assert_allclose(content(jacobian(product, a, c, args=(a, a, c))), np.diag(2 * X), rtol=1e-14)
    if kind == "ndarray":
        assert_allclose(content(jacobian(product, "a", a, args=(a, a, a))), np.diag(2 * X), rtol=1e-14)
        return
    with pytest.raises(InvalidArgumentError, match="Taichi gives the GPU two copies.*; pass copies, or a ti.ndarray"):
        jacobian(product, "a", a, args=(a, a, a))
    assert_array_equal(content(a), X)


def test_arrays_that_change_roles_between_calls():
    """The same two arrays the other way round: nothing that was prepared for one call is taken for the other."""
    a, b, c = X.copy(), X[::-1].copy(), np.zeros(4)
    assert_allclose(jacobian(product, a, c, args=(a, b, c)), np.diag(b), rtol=1e-14)
    assert_allclose(jacobian(product, a, c, args=(b, a, c)), np.diag(b), rtol=1e-14)
    assert_allclose(jacobian(product, b, c, args=(a, b, c)), np.diag(a), rtol=1e-14)
    assert_allclose(jacobian(product, a, c, args=(a, a, c)), np.diag(2 * a), rtol=1e-14)
    assert_allclose(jacobian(product, a, c, args=(a, b, c)), np.diag(b), rtol=1e-14)


def test_tensor_that_requires_grad_gets_no_gradient():
    torch = pytest.importorskip("torch", reason=needs_torch)
    x, y = torch.tensor(real(X), requires_grad=True), torch.from_numpy(real(np.zeros(3)))
    J = jacobian(smooth, x, y, args=(x, y))
    assert_allclose(J.numpy(), smooth_jacobian(X), rtol=1e-14)
    assert x.grad is None
    assert not J.requires_grad


def test_tensors_of_one_storage():
    """Two rows of one tensor are two arrays."""
    torch = pytest.importorskip("torch", reason=needs_torch)
    pair = torch.tensor(np.stack([X, 2 * X]))
    c = torch.zeros(4, dtype=torch.float64)
    J = jacobian(product, "a", c, args=(pair[0], pair[1], c))
    assert_allclose(J.numpy(), np.diag(2 * X), rtol=1e-14)
