"""Every way in which Python stores to fields and arrays between the kernels of a pipeline.

A store makes entries constants: their tangents are zero.  Between runs for different columns it is undone.
"""

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import read as values_of
from differences import write
from kernel_texts import kernel_of, kernels_of
from numpy.testing import assert_allclose, assert_array_equal
from taichi.lang.mesh import MeshReorderedScalarFieldProxy

from taichi_ext import InvalidArgumentError, jacobian

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.filterwarnings("ignore::taichi_ext.DerivativeWarning")]

N = 3
V1 = ti.types.ndarray(dtype=ti.types.vector(2, ti.f64), ndim=1)
each_chunk = pytest.mark.parametrize("chunk_size", [None, 1])


KERNELS = {
    "scalar": """
load: for i in x: c[i] += x[i]
read: for i in x: y[i, 0] += c[i] * c[i]
""",
    "vector": """
load: for i in x: c[i] += ti.Vector([x[i], 2 * x[i]])
read: for i in x: y[i, 0] += c[i][0] ** 2; y[i, 1] += c[i][1] ** 2
""",
    "struct": """
load:
    for i in x:
        c[i].m += x[i]
        c[i].v += ti.Vector([2 * x[i], 3 * x[i]])
        c[i].s.n += 4 * x[i]
read:
    for i in x:
        y[i, 0] += c[i].m ** 2
        y[i, 1] += c[i].v[0] ** 2
        y[i, 2] += c[i].v[1] ** 2
        y[i, 3] += c[i].s.n ** 2
""",
}


class Scene:
    """A container between two kernels."""

    def __init__(self, kind, c, members):
        self.x, self.y, self.c, self.members = ti.field(ti.f64, N), ti.field(ti.f64, (N, 4)), c, members
        write(self.x, np.array([0.5, 1.5, 2.5]))
        kernels = kernels_of(KERNELS[kind], x=self.x, y=self.y, c=c)
        self.load, self.read = kernels["load"], kernels["read"]

    def check(self, store, cleared):
        """``cleared``: which of the numbers are constants after the store, as (entry, number)."""
        pipeline = lambda: (self.load(), store(self.c), self.read())
        for chunk_size in (None, 1):
            self.reset()
            pipeline()
            expected, stored = values_of(self.y), self.numbers()
            self.reset()
            J = jacobian(pipeline, self.x, self.y, chunk_size=chunk_size)
            assert_array_equal(values_of(self.y), expected)
            assert_array_equal(self.numbers(), stored)
            for i, n in np.ndindex(stored.shape):
                slope = 0.0 if (i, n) in cleared else 2 * stored[i, n] * (n + 1)
                assert_allclose(J[i, n], slope * np.eye(N)[i], atol=1e-12, err_msg=str((i, n)))

    def reset(self):
        write(self.y, 0.0)
        for member in self.members:
            write(member, 1.0)

    def numbers(self):
        """In rows of one entry each."""
        return np.column_stack([values_of(member) for member in self.members])


@pytest.fixture(scope="module")
def scenes(ti64):
    scalar, vector, inner = ti.field(ti.f64, N), ti.Vector.field(2, ti.f64, N), ti.types.struct(n=ti.f64)
    struct = ti.types.struct(m=ti.f64, v=ti.types.vector(2, ti.f64), s=inner).field(shape=N)
    members = [(scalar, [scalar]), (vector, [vector]), (struct, [struct.m, struct.v, struct.s.n])]
    return {kind: Scene(kind, *given) for kind, given in zip(KERNELS, members)}


def _copied(c):
    other = ti.field(ti.f64, N)
    write(other, 7.0)
    c.copy_from(other)


def _through_mesh(c):
    order = ti.field(ti.i32, N)
    for i in range(N):
        order[i] = N - 1 - i
    MeshReorderedScalarFieldProxy(c, None, None, order)[0] = 5.0


def _incremented(c):
    c[1] = c[1] + 1.0


EVERYTHING = [(i, n) for i in range(N) for n in range(4)]
SCALAR_STORES = {
    "entry": (lambda c: c.__setitem__(1, 5.0), [(1, 0)]),
    "entry by a NumPy integer": (lambda c: c.__setitem__(np.int64(2), 5.0), [(2, 0)]),
    "increment": (_incremented, []),
    "fill": (lambda c: c.fill(2.0), EVERYTHING),
    "from_numpy": (lambda c: c.from_numpy(np.arange(3.0)), EVERYTHING),
    "copy_from": (_copied, EVERYTHING),
    "mesh": (_through_mesh, [(2, 0)]),
}
VECTOR_STORES = {
    "entry": (lambda c: c.__setitem__(1, [5.0, 6.0]), [(1, 0), (1, 1)]),
    "component": (lambda c: c[1].__setitem__(1, 5.0), [(1, 1)]),
    "component by name": (lambda c: setattr(c[2], "x", 5.0), [(2, 0)]),
    "scalar field": (lambda c: c.get_scalar_field(1).__setitem__(2, 5.0), [(2, 1)]),
    "fill of a scalar field": (lambda c: c.get_scalar_field(1).fill(5.0), [(i, 1) for i in range(N)]),
    "from_numpy": (lambda c: c.from_numpy(np.ones((N, 2))), EVERYTHING),
    "from_numpy of a scalar field": (
        lambda c: c.get_scalar_field(0).from_numpy(np.ones(N)),
        [(i, 0) for i in range(N)],
    ),
}
STRUCT_STORES = {
    "member": (lambda c: setattr(c[1], "m", 5.0), [(1, 0)]),
    "member by key": (lambda c: c[1].__setitem__("m", 5.0), [(1, 0)]),
    "increment": (lambda c: setattr(c[2], "m", c[2].m + 1.0), []),
    "vector member": (lambda c: setattr(c[1], "v", ti.Vector([5.0, 6.0])), [(1, 1), (1, 2)]),
    "component of a member": (lambda c: c[1].v.__setitem__(1, 5.0), [(1, 2)]),
    "inner struct": (lambda c: setattr(c[2].s, "n", 5.0), [(2, 3)]),
    "whole": (lambda c: c.__setitem__(1, {"m": 5.0, "v": [6.0, 7.0], "s": {"n": 8.0}}), [(1, n) for n in range(4)]),
    "member field": (lambda c: c.m.__setitem__(1, 5.0), [(1, 0)]),
    "member field by name": (lambda c: c.get_member_field("v").__setitem__(0, [5.0, 6.0]), [(0, 1), (0, 2)]),
    "fill of a member": (lambda c: c.m.fill(5.0), [(i, 0) for i in range(N)]),
    "fill": (lambda c: c.fill(5.0), EVERYTHING),
    "from_numpy": (lambda c: c.from_numpy({"m": np.ones(N), "v": np.ones((N, 2)), "s": {"n": np.ones(N)}}), EVERYTHING),
    "copy_from itself": (lambda c: c.copy_from(c), []),
}


STORES = {"scalar": SCALAR_STORES, "vector": VECTOR_STORES, "struct": STRUCT_STORES}


@pytest.mark.mostly_sweep(
    *(f"scalar-{name}" for name in ("entry", "entry by a NumPy integer", "fill", "from_numpy")),
    *(f"vector-{name}" for name in ("component", "component by name", "scalar field")),
    *(f"struct-{name}" for name in ("component of a member", "whole", "member field", "member field by name")),
)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in STORES for name in STORES[kind]])
def test_stores_to_fields(scenes, kind, name):
    scenes[kind].check(*STORES[kind][name])


def test_an_entry_object_made_before_the_pipeline(scenes):
    entry, vector = scenes["struct"].c[1], scenes["vector"].c[2]
    scenes["struct"].check(lambda c: setattr(entry, "m", 5.0), [(1, 0)])
    scenes["vector"].check(lambda c: vector.__setitem__(0, 5.0), [(2, 0)])


@pytest.mark.sweep
@each_chunk
def test_stores_before_any_kernel_has_used_the_field(chunk_size):
    """Nothing is known of the field yet; a store is undone all the same."""
    x, y = ti.field(ti.f64, N), ti.field(ti.f64, N)
    s, v, c = ti.types.struct(m=ti.f64).field(shape=N), ti.Vector.field(2, ti.f64, N), ti.field(ti.f64, N)
    write(x, 1.0)
    read = kernel_of("for i in x: y[i] = x[i] * s[i].m * v[i][1] * c[i]", x=x, y=y, s=s, v=v, c=c)

    def pipeline():
        s[1].m = s[1].m + 1.0
        v[2][1] = v[2][1] * 3.0
        v.get_scalar_field(1)[0] = v[0][1] + 3.0
        c[0] = c[0] + 1.0
        read()

    for field in (s.m, v, c):
        write(field, 1.0)
    assert_allclose(jacobian(pipeline, x, y, chunk_size=chunk_size), np.diag([8.0, 2.0, 3.0]))
    assert_array_equal(values_of(s.m), [1, 2, 1])
    assert_array_equal(values_of(v)[:, 1], [4, 1, 3])
    assert_array_equal(values_of(c), [2, 1, 1])


WITHOUT_DIMENSIONS = {
    "from_numpy": lambda s, other: s.from_numpy(np.full((), 0.2)),
    "copy_from": lambda s, other: s.copy_from(other),
    "fill": lambda s, other: s.fill(0.2),
    "item": lambda s, other: s.__setitem__(None, 0.2),
}


@pytest.mark.sweep
@pytest.mark.parametrize("way", WITHOUT_DIMENSIONS)
def test_stores_to_a_field_without_dimensions(way):
    x = ti.field(ti.f64, N)
    write(x, np.array([0.5, 1.5, 2.5]))
    s, other = ti.field(ti.f64, ()), ti.field(ti.f64, ())
    other[None] = 0.2
    load = kernel_of("for i in x: s[None] += x[i] ** 2", x=x, s=s)
    read = kernel_of("for i in x: x[i] *= s[None]", x=x, s=s)
    pipeline = lambda: (load(), WITHOUT_DIMENSIONS[way](s, other), read())
    assert_allclose(jacobian(pipeline, x, x), 0.2 * np.eye(N))


@pytest.mark.mostly_sweep("False-None")
@each_chunk
@pytest.mark.parametrize("is_vector", [False, True])
def test_stores_to_ndarrays(is_vector, chunk_size):
    x = ti.field(ti.f64, N)
    write(x, np.array([0.5, 1.5, 2.5]))
    y = ti.field(ti.f64, N)
    load = kernel_of("for i in x: a[i] += x[i]", "a: A1", x=x)
    load_vectors = kernel_of("for i in x: a[i] += ti.Vector([1.0, x[i]])", "a: V1", V1=V1, x=x)
    read = kernel_of("for i in x: y[i] += a[i] * a[i]", "a: A1", x=x, y=y)
    read_vectors = kernel_of("for i in x: y[i] += a[i][1] ** 2", "a: V1", V1=V1, x=x, y=y)
    a = ti.Vector.ndarray(2, ti.f64, N) if is_vector else ti.ndarray(ti.f64, N)

    def pipeline(a):
        load_vectors(a) if is_vector else load(a)
        if is_vector:
            a[1] = [4.0, 5.0]
            a[0][0] = 7.0
        else:
            a[1] = a[1] + 1.0
        read_vectors(a) if is_vector else read(a)
        a.fill(2.0)
        load_vectors(a) if is_vector else load(a)
        read_vectors(a) if is_vector else read(a)

    write(a, 1.0)
    write(y, 0.0)
    J = jacobian(pipeline, x, y, args=(a,), chunk_size=chunk_size)
    first = 2 * (1.0 + values_of(x) + [0, 1, 0]) * ([1, 0, 1] if is_vector else [1, 1, 1])
    assert_allclose(J, np.diag(first + 2 * (2.0 + values_of(x))))
    expected = values_of(a)
    write(a, 1.0)
    write(y, 0.0)
    pipeline(a)
    assert_array_equal(values_of(a), expected)


class Arrays:
    """Where a pipeline may have an array from, that Python changes before the first kernel gets it."""

    def __init__(self):
        self.x, self.y = ti.field(ti.f64, N), ti.field(ti.f64, N)
        write(self.x, 1.0)
        x, y = self.x, self.y
        add = kernel_of("for i in y: y[i] += a[i] * x[i]", "a: A1", y=y, x=x)
        self.add = add
        self.kept = real(np.ones(N))

    def change(self, a):
        a += 1.0
        self.add(a)

    def change_own(self):
        self.change(self.kept)

    def check(self, pipeline, array, chunk_size, args=()):
        write(self.y, 0.0)
        J = jacobian(pipeline, self.x, self.y, args=args, chunk_size=chunk_size)
        assert_allclose(J, 2 * np.eye(N))
        assert_array_equal(values_of(self.y), 2)
        assert_array_equal(array, 2)


GLOBAL = {"array": real(np.ones(N))}


@pytest.mark.mostly_sweep("None")
@each_chunk
def test_arrays_changed_before_the_first_kernel(chunk_size):
    scene = Arrays()
    a = real(np.ones(N))
    scene.check(scene.change, a, chunk_size, (a,))
    a = real(np.ones(N))
    scene.check(lambda: scene.change(a), a, chunk_size)
    scene.check(scene.change_own, scene.kept, chunk_size)
    b = real(np.ones((2, N)))
    scene.check(lambda items: scene.change(items["b"][1]), b[1], chunk_size, ({"b": b},))
    assert_array_equal(b[0], 1)
    GLOBAL["array"][...] = 1.0
    scene.check(lambda: scene.change(GLOBAL["array"]), GLOBAL["array"], chunk_size)
    c = real(np.ones((N, 2)))

    def column():
        c[:, 1] += 1.0
        scene.add(np.ascontiguousarray(c[:, 1]))

    scene.check(column, c[:, 1], chunk_size)


@each_chunk
def test_tensors_changed_before_the_first_kernel(chunk_size):
    torch = pytest.importorskip("torch")
    scene = Arrays()
    t = torch.from_numpy(real(np.ones(N)))
    scene.check(scene.change, t, chunk_size, (t,))
    u = torch.from_numpy(real(np.ones((N, 2))))

    def column(u):
        u[:, 1] += 1.0
        scene.add(u[:, 1].contiguous())

    scene.check(column, u[:, 1], chunk_size, (u,))


@pytest.mark.chosen_only("the last part is what one run can do", "--chunk-size")
def test_arrays_that_cannot_be_found_and_are_changed_before_the_first_kernel_are_refused():
    scene, hidden = Arrays(), np.empty(1, object)  # in an array of objects
    hidden[0] = real(np.ones(N))
    with pytest.raises(InvalidArgumentError, match="Python code changes an array.*Pass the array in args"):
        jacobian(lambda: scene.change(hidden[0]), scene.x, scene.y, chunk_size=1)
    hidden[0][...] = 1.0
    scene.check(lambda: scene.change(hidden[0]), hidden[0], None)


@pytest.mark.mostly_sweep("None")
@each_chunk
def test_deactivation_from_python(chunk_size):
    x, y, c = ti.field(ti.f64, N), ti.field(ti.f64, N), ti.field(ti.f64)
    node = ti.root.pointer(ti.i, N)
    node.place(c)
    write(x, 1.5)
    load = kernel_of("for i in x: c[i] += x[i]", x=x, c=c)
    read = kernel_of("for i in x: y[i] += 3.0 * c[i] + x[i]", x=x, y=y, c=c)  # of c = 0, a square has no tangent

    for deactivate in (node.deactivate_all, c.parent().deactivate_all, ti.deactivate_all_snodes):
        deactivate()
        write(y, 0.0)

        def pipeline(deactivate=deactivate):
            load()
            deactivate()
            read()

        assert_allclose(jacobian(pipeline, x, y, chunk_size=chunk_size), np.eye(N))
