"""Exported modules: what ``bind`` and the function are given is compared with what the kernel was made for."""

import runpy

import numpy as np
import pytest
import taichi as ti
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

    @ti.kernel
    def k():
        for i in x:
            y[i] = x[i] ** 2 * v[i][1] * n[i]

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


def test_objects_like_those_that_were_exported_are_taken(fields, arrays):
    bind, given = fields
    pair = ti.field(ti.f64), ti.field(ti.f64)  # in another layout
    ti.root.dense(ti.i, 1).dense(ti.i, 3).place(*pair)
    pair[0].from_numpy(X)
    J = np.full((3, 3), np.nan)
    bind(**{**given, "x": pair[0], "y": pair[1]})(J)
    assert_array_equal(J, np.diag(2.0 * X))
    assert_array_equal(pair[1].to_numpy(), X**2)
    torch = pytest.importorskip("torch")
    bind, given = arrays
    expected = np.diag(2 * X * W[:, 1] * 1.5 * 2)
    for change in (
        {},
        {"w": W},
        {"w": torch.tensor(W)},
        {"a": torch.tensor(X)},
        {"s": np.float32(1.5), "m": np.int64(2)},
    ):
        for J in (np.full((3, 3), np.nan), torch.zeros(3, 3, dtype=torch.float64)):
            bind(**{**given, **change})(J)
            np.testing.assert_allclose(J, expected, rtol=1e-14)


def sparse_field():
    field = ti.field(ti.f64)
    ti.root.pointer(ti.i, 3).place(field)
    return field


FIELDS = {
    "sparse": ("x", sparse_field, ValueError, "layout sparse; .* dense"),
    "shape": ("x", lambda: ti.field(ti.f64, 4), ValueError, r"shape \(4,\); .* \(3,\)"),
    "axes": ("y", lambda: ti.field(ti.f64, (3, 1)), ValueError, r"shape \(3, 1\); .* \(3,\)"),
    "vectors": ("x", lambda: ti.Vector.field(2, ti.f64, 3), ValueError, r"entries of shape \(2,\); .* \(\)"),
    "longer vectors": ("v", lambda: ti.Vector.field(3, ti.f64, 3), ValueError, r"entries of shape \(3,\); .* \(2,\)"),
    "matrices": ("v", lambda: ti.Matrix.field(2, 1, ti.f64, 3), ValueError, r"entries of shape \(2, 1\); .* \(2,\)"),
    "numbers": ("v", lambda: ti.field(ti.f64, 3), ValueError, r"entries of shape \(\); .* \(2,\)"),
    "precision": ("x", lambda: ti.field(ti.f32, 3), ValueError, "type f32; .* f64"),
    "integers": ("y", lambda: ti.field(ti.i32, 3), ValueError, "type i32; .* f64"),
    "reals": ("n", lambda: ti.field(ti.f64, 3), ValueError, "type f64; .* i32"),
    "unsigned": ("n", lambda: ti.field(ti.u32, 3), ValueError, "type u32; .* i32"),
    "offset": ("x", lambda: ti.field(ti.f64, 3, offset=1), ValueError, r"first index \(1,\); .* \(\)"),
    "structs": ("x", lambda: ti.Struct.field({"a": ti.f64}, shape=3), TypeError, "is a field; pass a field of numbers"),
    "ndarray": ("x", lambda: ti.ndarray(ti.f64, 3), TypeError, "is a ti.ndarray; pass a field"),
    "NumPy": ("x", lambda: X, TypeError, "is a NumPy array; pass a field"),
    "list": ("x", lambda: [1.0, 2.0, 3.0], TypeError, "is of type list; pass a field"),
    "None": ("n", lambda: None, TypeError, "is of type NoneType; pass a field"),
}


def test_other_fields(fields):
    bind, given = fields
    for name, make, kind, message in FIELDS.values():
        with pytest.raises(kind, match=rf"^{name} (has the )?{message}"):
            bind(**{**given, name: make()})
    assert_array_equal(given["x"].to_numpy(), X)


ARRAYS = {
    "shape": ("a", lambda: np.zeros(4), ValueError, r"shape \(4,\); .* \(3,\)"),
    "axes": ("a", lambda: np.zeros((3, 1)), ValueError, r"shape \(3, 1\); .* \(3,\)"),
    "precision": ("a", lambda: np.zeros(3, np.float32), ValueError, "type float32; .* float64"),
    "integers": ("b", lambda: np.zeros(3, int), ValueError, "type int64; .* float64"),
    "complex": ("b", lambda: np.zeros(3, complex), ValueError, "type complex128; .* float64"),
    "byte order": ("a", lambda: np.zeros(3, ">f8"), ValueError, "type >f8; .* float64"),
    "strided": ("a", lambda: np.zeros(6)[::2], ValueError, "is not contiguous"),
    "vectors": ("a", lambda: ti.Vector.ndarray(2, ti.f64, 3), ValueError, r"entries of shape \(2,\); .* \(\)"),
    "numbers": ("w", lambda: ti.ndarray(ti.f64, (3, 2)), ValueError, r"shape \(3, 2\); .* \(3,\)"),
    "longer vectors": ("w", lambda: ti.Vector.ndarray(3, ti.f64, 3), ValueError, r"entries of shape \(3,\); .* \(2,\)"),
    "other vectors": ("w", lambda: ti.Vector.ndarray(2, ti.f32, 3), ValueError, "type f32; .* f64"),
    "NumPy for vectors": ("w", lambda: np.zeros((3, 3)), ValueError, r"shape \(3, 3\); .* \(3, 2\)"),
    "field": ("a", lambda: ti.field(ti.f64, 3), TypeError, "is a field; pass a NumPy array"),
    "list": ("a", lambda: [1.0, 2.0, 3.0], TypeError, "is of type list; pass a NumPy array"),
    "real": ("s", lambda: 1j, TypeError, "is of type complex; expected a real number"),
    "text": ("s", lambda: "1.5", TypeError, "is of type str; expected a real number"),
    "integer": ("m", lambda: 2.5, TypeError, "is of type float; expected an integer"),
}


def test_other_arguments(arrays):
    bind, given = arrays
    for name, make, kind, message in ARRAYS.values():
        with pytest.raises(kind, match=rf"^{name} (has the )?{message}"):
            bind(**{**given, name: make()})


def test_other_tensors(arrays):
    torch = pytest.importorskip("torch")
    bind, given = arrays
    with pytest.raises(ValueError, match="^a has the type float32"):
        bind(**{**given, "a": torch.zeros(3)})
    with pytest.raises(ValueError, match="^a is not contiguous"):
        bind(**{**given, "a": torch.zeros(6, dtype=torch.float64)[::2]})


def test_numbers_of_one_call(arrays):
    """They are checked at each call, and those of ``bind`` hold for the others."""
    bind, given = arrays
    run, J = bind(**given), np.zeros((3, 3))
    for numbers in ({"s": 2.5}, {"s": 0.5, "m": 4}, {}):
        s, m = {"s": 1.5, "m": 2, **numbers}.values()
        run(J, **numbers)
        np.testing.assert_allclose(J, np.diag(2 * X * W[:, 1] * s * m), rtol=1e-14)
    with pytest.raises(TypeError, match="^m is of type float; expected an integer"):
        run(J, m=2.5)
    with pytest.raises(TypeError, match="'a'"):
        run(J, a=given["a"])


def test_the_description_lists_all_that_is_taken(fields, arrays, tmp_path):
    for name, expected in (
        ("fields", ["n: a field of shape (3,), i32", "v: the field v of shape (3,) with entries of shape (2,), f64"]),
        ("arrays", ["m: ti.i32", "s: ti.f64", "b: ti.types.ndarray(dtype=ti.f64, ndim=1), of shape (3,)"]),
    ):
        text = runpy.run_path(str(tmp_path / f"{name}.py"))["__doc__"]
        given = fields[1] if name == "fields" else arrays[1]
        assert [line.split(":")[0].strip() for line in text.splitlines() if line.startswith("    ")][2:-1] == sorted(
            given
        )
        assert all(f"    {line}\n" in text for line in expected)


def test_names(fields):
    bind, given = fields
    with pytest.raises(TypeError, match="z"):
        bind(**given, z=given["x"])
    with pytest.raises(TypeError, match="'y'"):
        bind(**{name: given[name] for name in ("x", "v", "n")})


def test_shared_memory(fields, arrays):
    bind, given = fields
    with pytest.raises(ValueError, match="x and y are one field"):
        bind(**{**given, "y": given["x"]})
    bind, given = arrays
    memory = np.ones(12)
    with pytest.raises(ValueError, match="b shares memory with a"):
        bind(**{**given, "a": memory[:3], "b": memory[2:5]})
    with pytest.raises(ValueError, match="a shares memory with w"):
        bind(**{**given, "a": memory[2:5], "w": memory[:6].reshape(3, 2)})
    shared = ti.ndarray(ti.f64, 3)
    with pytest.raises(ValueError, match="b shares memory with a"):
        bind(**{**given, "a": shared, "b": shared})
    run = bind(**{**given, "a": memory[9:]})
    with pytest.raises(ValueError, match="d_b shares memory with a"):
        run(memory[1:10].reshape(3, 3))
    run(memory[:9].reshape(3, 3))  # next to each other
    assert_array_equal(memory[9:], np.ones(3))
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="d_b shares memory with a"):
        run(torch.from_numpy(memory)[1:10].reshape(3, 3))


JACOBIANS = {
    "list": (lambda: [[0.0] * 3] * 3, TypeError, "is of type list; pass a NumPy array"),
    "field": (lambda: ti.field(ti.f64, (3, 3)), TypeError, "is a field; pass a NumPy array"),
    "None": (lambda: None, TypeError, "is of type NoneType"),
    "complex": (lambda: np.zeros((3, 3), np.complex64), ValueError, "has the type complex64; .* float64"),
    "precision": (lambda: np.zeros((3, 3), np.float32), ValueError, "has the type float32; .* float64"),
    "shape": (lambda: np.zeros((3, 4)), ValueError, r"has the shape \(3, 4\); .* \(3, 3\)"),
    "transposed": (lambda: np.zeros((3, 3)).T[:, ::-1], ValueError, "is not contiguous"),
    "read-only": (lambda: _read_only(), ValueError, "is read-only"),
    "ndarray": (lambda: ti.ndarray(ti.f64, (3, 3)), TypeError, "is a ti.ndarray; pass a NumPy array"),
    "vectors": (lambda: ti.Vector.ndarray(3, ti.f64, 3), ValueError, r"has the shape \(3,\); .* \(3, 3\)"),
}


def _read_only():
    J = np.zeros((3, 3))
    J.flags.writeable = False
    return J


def test_other_arrays_of_the_jacobian(arrays):
    bind, given = arrays
    run = bind(**given)
    given["b"][:] = 7.0
    for make, kind, message in JACOBIANS.values():
        with pytest.raises(kind, match=f"^d_b {message}"):
            run(make())
    assert_array_equal(given["b"], np.full(3, 7.0))  # nothing has run


def test_several_jacobians(tmp_path):
    x, y, z = ti.field(ti.f32, 2), ti.field(ti.f32, ()), ti.field(ti.f32, 40)
    x.from_numpy(np.array([0.5, 2.0], np.float32))
    y[None] = 3.0

    @ti.kernel
    def k():
        for i in z:
            z[i] = x[0] * i + x[1] * y[None]

    bind = bind_of(Jacobian(k, (x, y), z), tmp_path / "several.py")
    run, memory = bind(x=x, y=y, z=z), np.zeros(120, np.float32)
    with pytest.raises(ValueError, match="d_z_by_y shares memory with d_z_by_x"):
        run(memory[:80].reshape(40, 2), memory[79:119])
    run(memory[:80].reshape(40, 2), memory[80:])
    assert_array_equal(memory[:80].reshape(40, 2), np.stack([np.arange(40), np.full(40, 3)], -1))
    assert_array_equal(memory[80:], np.full(40, 2))


def test_tensors_of_single_precision(tmp_path):
    """The kernel stores two numbers at a time."""
    torch = pytest.importorskip("torch")
    x, z = ti.field(ti.f32, 2), ti.field(ti.f32, (64, 32))
    x.from_numpy(np.array([0.5, 2.0], np.float32))

    @ti.kernel
    def k():
        for i, j in z:
            z[i, j] = x[0] * i + x[1] * j * x[1]

    plan = Jacobian(k, x, z)
    expected = plan()
    run = bind_of(plan, tmp_path / "pairs.py")(x=x, z=z)
    J = torch.zeros(64, 32, 2, requires_grad=False)
    run(J)
    assert_array_equal(J.numpy(), expected)


@pytest.mark.sweep
def test_after_another_start(fields):
    bind, given = fields
    run = bind(**given)
    initialise(default_fp=ti.f64)
    with pytest.raises(RuntimeError, match="ti.init or ti.reset was called since bind"):
        run(np.zeros((3, 3)))


def placed(fields):
    """The tree of some fields of 3 entries."""
    builder = ti.FieldsBuilder()
    builder.dense(ti.i, 3).place(*fields)
    return builder.finalize()


@pytest.mark.sweep
def test_fields_of_destroyed_trees(fields):
    """They are found where the number of their tree is free, and where it has been given again; all others stay as they are."""
    bind, given = fields
    trees, gone = [], []
    for _ in range(3):
        pair = ti.field(ti.f64), ti.field(ti.f64)
        trees.append(placed(pair))
        pair[0].from_numpy(X)
        gone.append({**given, "x": pair[0], "y": pair[1]})
    run, kept, J = bind(**gone[1]), bind(**gone[2]), np.zeros((3, 3))
    run(J)
    trees[1].destroy()
    count = ti.lang.impl.get_runtime().prog.get_snode_tree_size()
    for _ in range(3):
        for call in (lambda: run(J), lambda: bind(**gone[1]), lambda: bind(**{**given, "x": gone[1]["x"]})):
            with pytest.raises(ValueError, match=r"[xy] no longer exists: its tree was destroyed"):
                call()
    trees[0].destroy()
    again = ti.field(ti.f64), ti.field(ti.f64)
    numbers = [placed([field]).id for field in again]
    assert set(numbers) < set(range(count)), "free numbers are given again"
    for n in (0, 1):
        with pytest.raises(ValueError, match="no longer exists"):
            bind(**gone[n])
    again[0].from_numpy(X)
    for call in (kept, bind(**{**given, "x": again[0], "y": again[1]})):
        J[:] = np.nan
        call(J)
        assert_array_equal(J, np.diag(2.0 * X))
    assert ti.lang.impl.get_runtime().prog.get_snode_tree_size() <= count + 1


def test_nodes_of_destroyed_trees(tmp_path):
    x, s = ti.field(ti.f64, 3), ti.field(ti.f64)
    block = ti.root.pointer(ti.i, 3)
    block.place(s)
    x.from_numpy(X)
    s[1] = 2.0

    @ti.kernel
    def k():
        for i in x:
            if ti.is_active(block, [i]):
                s[i] = x[i] ** 2

    bind, J = bind_of(Jacobian(k, x, s), tmp_path / "nodes.py"), np.zeros((3, 3))
    bind(x=x, s=s, snode=block)(J)
    assert_array_equal(J, np.diag([0.0, 2.0 * X[1], 0.0]))
    builder, other = ti.FieldsBuilder(), ti.field(ti.f64)
    gone = builder.pointer(ti.i, 3)
    gone.place(other)
    builder.finalize().destroy()
    with pytest.raises(ValueError, match="snode no longer exists"):
        bind(x=x, s=s, snode=gone)


def test_members_of_structs_and_vectors(tmp_path):
    x, y = ti.field(ti.f64, 2), ti.field(ti.f64, 2)
    x.from_numpy(np.array([0.5, 2.0]))
    material = ti.types.struct(young=ti.f64, size=ti.types.vector(2, ti.f64))

    @ti.kernel
    def k(m: material, w: ti.types.vector(2, ti.f64)):
        for i in x:
            y[i] = m.young * m.size[1] * w[0] * x[i] ** 2

    args = (material(young=3.0, size=[1.0, 2.0]), ti.Vector([5.0, 7.0]))
    bind = bind_of(Jacobian(k, ["m.young", "w"], y, args=args), tmp_path / "members.py")
    J = np.zeros(2), np.zeros((2, 2))
    bind(x=x, y=y, m=args[0], w=args[1])(*J)
    assert_array_equal(J[0], 10.0 * x.to_numpy() ** 2)
    assert_array_equal(J[1], np.stack([6.0 * x.to_numpy() ** 2, np.zeros(2)], -1))
    for wrong, shape in ((ti.Vector([1.0, 2.0, 3.0]), r"\(3,\)"), (1.0, r"\(\)")):
        with pytest.raises(ValueError, match=rf"w has the shape {shape}; the kernel was made for \(2,\)"):
            bind(x=x, y=y, m=args[0], w=wrong)(*J)


def test_after_the_end_of_the_program(fields):
    bind, given = fields
    run = bind(**given)
    ti.reset()
    with pytest.raises(RuntimeError, match="ti.reset was called since bind"):
        run(np.zeros((3, 3)))
