"""Exported modules: what ``bind`` and the function are given is compared with what the kernel was made for."""

import runpy

import numpy as np
import pytest
import taichi as ti
from kernel_texts import kernel_of
from numpy.testing import assert_array_equal
from taichi_program import initialise

from taichi_ext import Jacobian

pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.cpu_only("arrays of J are on the host"),
    pytest.mark.chosen_only("what it looks at is that of one run", "--chunk-size"),
]

X, W = np.array([0.3, 0.7, 1.1]), np.linspace(0.1, 0.6, 6).reshape(3, 2)
vec2, numbers = ti.types.vector(2, ti.f64), ti.types.ndarray(ti.f64, ndim=1)


def bind_of(plan, path):
    plan()
    plan.export(path)
    return runpy.run_path(str(path))["bind"]


@pytest.fixture
def fields(tmp_path):
    """``bind`` of a kernel on fields, and what it takes."""
    x, v, n, y = ti.field(ti.f64, 3), ti.Vector.field(2, ti.f64, 3), ti.field(ti.i32, 3), ti.field(ti.f64, 3)
    x.from_numpy(X)
    v.fill(0.5)
    n.fill(2)
    k = kernel_of("for i in x: y[i] = x[i] ** 2 * v[i][1] * n[i]", x=x, y=y, v=v, n=n)
    return bind_of(Jacobian(k, x, y), tmp_path / "fields.py"), {"x": x, "v": v, "n": n, "y": y}


@pytest.fixture
def arrays(tmp_path):
    """The same of a kernel on arrays and numbers."""

    @ti.kernel
    def k(a: numbers, w: ti.types.ndarray(vec2, ndim=1), b: numbers, s: ti.f64, m: ti.i32):
        for i in a:
            b[i] = a[i] ** 2 * w[i][1] * s * m

    given = {"a": X.copy(), "w": ti.Vector.ndarray(2, ti.f64, 3), "b": np.zeros(3), "s": 1.5, "m": 2}
    given["w"].from_numpy(W)
    return bind_of(Jacobian(k, "a", "b", args=tuple(given.values())), tmp_path / "arrays.py"), given


def sparse_field():
    field = ti.field(ti.f64)
    ti.root.pointer(ti.i, 3).place(field)
    return field


FIELDS = {
    "sparse": ("x", sparse_field, "a sparse field"),
    "shape": ("x", lambda: ti.field(ti.f64, 4), r"shape \(4,\)"),
    "axes": ("y", lambda: ti.field(ti.f64, (3, 1)), r"shape \(3, 1\)"),
    "vectors": ("x", lambda: ti.Vector.field(2, ti.f64, 3), r"entries of shape \(2,\)"),
    "longer vectors": ("v", lambda: ti.Vector.field(3, ti.f64, 3), r"entries of shape \(3,\)"),
    "matrices": ("v", lambda: ti.Matrix.field(2, 1, ti.f64, 3), r"entries of shape \(2, 1\)"),
    "numbers": ("v", lambda: ti.field(ti.f64, 3), r"entries of shape \(\)"),
    "precision": ("x", lambda: ti.field(ti.f32, 3), "field of f32"),
    "integers": ("y", lambda: ti.field(ti.i32, 3), "field of i32"),
    "unsigned": ("n", lambda: ti.field(ti.u32, 3), "field of u32"),
    "offset": ("x", lambda: ti.field(ti.f64, 3, offset=1), r"first \(1,\)"),
    "structs": ("x", lambda: ti.Struct.field({"a": ti.f64}, shape=3), "of type StructField"),
    "ndarray": ("x", lambda: ti.ndarray(ti.f64, 3), "an array of f64"),
    "list": ("x", lambda: [1.0, 2.0, 3.0], "of type list"),
    "None": ("n", lambda: None, "of type NoneType"),
}


@pytest.mark.sweep
def test_other_fields(fields):
    bind, given = fields
    for name, make, message in FIELDS.values():
        with pytest.raises(ValueError, match=rf"^{name} is .*{message}.*; the kernel was made for a dense field of"):
            bind(**{**given, name: make()})
    assert_array_equal(given["x"].to_numpy(), X)


ARRAYS = {
    "shape": ("a", lambda: np.zeros(4), r"shape \(4,\)"),
    "axes": ("a", lambda: np.zeros((3, 1)), r"shape \(3, 1\)"),
    "precision": ("a", lambda: np.zeros(3, np.float32), "of f32"),
    "integers": ("b", lambda: np.zeros(3, int), "of i64"),
    "complex": ("b", lambda: np.zeros(3, complex), "of c128"),
    "byte order": ("a", lambda: np.zeros(3, ">f8"), "swapped"),
    "strided": ("a", lambda: np.zeros(6)[::2], "not contiguous"),
    "vectors": ("a", lambda: ti.Vector.ndarray(2, ti.f64, 3), r"shape \(3, 2\)"),
    "longer vectors": ("w", lambda: ti.Vector.ndarray(3, ti.f64, 3), r"shape \(3, 3\)"),
    "NumPy for vectors": ("w", lambda: np.zeros((3, 3)), r"shape \(3, 3\)"),
    "field": ("a", lambda: ti.field(ti.f64, 3), "a dense field"),
    "list": ("a", lambda: [1.0, 2.0, 3.0], "of type list"),
}


def test_other_arguments(arrays):
    bind, given = arrays
    for name, make, message in ARRAYS.values():
        with pytest.raises(ValueError, match=rf"^{name} is .*{message}.*; the kernel was made for an array of"):
            bind(**{**given, name: make()})


def test_numbers_of_one_call(arrays):
    """Those of ``bind`` hold for the others."""
    bind, given = arrays
    run, J = bind(**given), np.zeros((3, 3))
    for numbers in ({"s": 2.5}, {"s": 0.5, "m": 4}, {}):
        s, m = {"s": 1.5, "m": 2, **numbers}.values()
        run(J, **numbers)
        np.testing.assert_allclose(J, np.diag(2 * X * W[:, 1] * s * m), rtol=1e-14)
    with pytest.raises(TypeError, match="float"):
        run(J, m=2.5)
    with pytest.raises(TypeError, match="'a'"):
        run(J, a=given["a"])


def test_names_of_arguments_are_free(tmp_path):
    """Whatever the module calls its own."""

    @ti.kernel
    def k(array: numbers, jacobian: numbers, n: ti.f64, shape: ti.f64):
        for i in array:
            jacobian[i] = array[i] ** 2 * n * shape

    args = X.copy(), np.zeros(3), 3.0, 5.0
    bind = bind_of(Jacobian(k, ("array", "n"), "jacobian", args=args), tmp_path / "names.py")
    by_array, by_n = np.zeros((3, 3)), np.zeros(3)
    bind(array=args[0], jacobian=args[1], n=3.0, shape=5.0)(by_array, by_n)
    np.testing.assert_allclose(by_array, np.diag(30 * X), rtol=1e-14)
    np.testing.assert_allclose(by_n, 5 * X**2, rtol=1e-14)


@pytest.mark.sweep
def test_names(fields):
    bind, given = fields
    with pytest.raises(TypeError, match="z"):
        bind(**given, z=given["x"])
    with pytest.raises(TypeError, match="'y'"):
        bind(**{name: given[name] for name in ("x", "v", "n")})


def test_shared_memory(fields, arrays):
    bind, given = fields
    with pytest.raises(ValueError, match="shares memory with"):
        bind(**{**given, "y": given["x"]})
    bind, given = arrays
    memory = np.ones(12)
    shared = ti.ndarray(ti.f64, 3)
    for change in (
        {"a": memory[:3], "b": memory[2:5]},
        {"a": memory[2:5], "w": memory[:6].reshape(3, 2)},
        {"a": shared, "b": shared},
    ):
        with pytest.raises(ValueError, match="shares memory with"):
            bind(**{**given, **change})
    run = bind(**{**given, "a": memory[9:]})
    with pytest.raises(ValueError, match="d_b shares memory with a"):
        run(memory[1:10].reshape(3, 3))
    run(memory[:9].reshape(3, 3))  # next to each other
    assert_array_equal(memory[9:], np.ones(3))


JACOBIANS = {
    "list": (lambda: [[0.0] * 3] * 3, "is of type list"),
    "field": (lambda: ti.field(ti.f64, (3, 3)), "is a dense field"),
    "None": (lambda: None, "is of type NoneType"),
    "complex": (lambda: np.zeros((3, 3), np.complex64), "is an array of c64"),
    "precision": (lambda: np.zeros((3, 3), np.float32), "is an array of f32"),
    "shape": (lambda: np.zeros((3, 4)), r"is an array of f64, shape \(3, 4\)"),
    "transposed": (lambda: np.zeros((3, 3)).T[:, ::-1], "is .* not contiguous"),
    "read-only": (lambda: _read_only(), "is read-only"),
}


def _read_only():
    J = np.zeros((3, 3))
    J.flags.writeable = False
    return J


def test_other_arrays_of_the_jacobian(arrays):
    bind, given = arrays
    run = bind(**given)
    given["b"][:] = 7.0
    for make, message in JACOBIANS.values():
        with pytest.raises(ValueError, match=f"^d_b {message}"):
            run(make())
    assert_array_equal(given["b"], np.full(3, 7.0))  # nothing has run


@pytest.mark.sweep
def test_several_jacobians(tmp_path):
    x, y, z = ti.field(ti.f32, 2), ti.field(ti.f32, ()), ti.field(ti.f32, 40)
    x.from_numpy(np.array([0.5, 2.0], np.float32))
    y[None] = 3.0
    k = kernel_of("for i in z: z[i] = x[0] * i + x[1] * y[None]", z=z, x=x, y=y)
    bind = bind_of(Jacobian(k, (x, y), z), tmp_path / "several.py")
    run, memory = bind(x=x, y=y, z=z), np.zeros(120, np.float32)
    with pytest.raises(ValueError, match="d_z_by_x shares memory with d_z_by_y"):
        run(memory[:80].reshape(40, 2), memory[79:119])
    run(memory[:80].reshape(40, 2), memory[80:])
    assert_array_equal(memory[:80].reshape(40, 2), np.stack([np.arange(40), np.full(40, 3)], -1))
    assert_array_equal(memory[80:], np.full(40, 2))


@pytest.mark.sweep
def test_after_another_start(fields):
    bind, given = fields
    run = bind(**given)
    initialise(default_fp=ti.f64)
    with pytest.raises(RuntimeError, match="ti.init or ti.reset was called since bind"):
        run(np.zeros((3, 3)))


@pytest.mark.sweep
def test_after_the_end_of_the_program(fields):
    bind, given = fields
    run = bind(**given)
    ti.reset()
    with pytest.raises(RuntimeError, match="ti.reset was called since bind"):
        run(np.zeros((3, 3)))
