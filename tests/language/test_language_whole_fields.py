"""Calls in kernels that change a field as a whole: fill, append, deactivate; loops over the active entries."""

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, check_refused, outputs, read, scalars
from kernel_texts import kernel_of, squares
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import Jacobian, UnsupportedError, jacobian, vjp

pytestmark = pytest.mark.usefixtures("ti64")

X = np.array([0.5, -1.0, 2.0])


@pytest.mark.mostly_sweep("mid-kernel")
@pytest.mark.parametrize("where", ["kernel", "function", "method", "mid-kernel"])
def test_fill_clears_tangents(where):
    x, y = scalars(X), outputs(3)

    @ti.func
    def clear(f: ti.template(), value):
        f.fill(value)

    @ti.data_oriented
    class Holder:
        def __init__(self):
            self.y = y

        @ti.func
        def clear(self):
            self.y.fill(2.0)

    holder = Holder()

    @ti.kernel
    def k():
        for i in x:
            y[i] = x[i] ** 2
        if ti.static(where == "kernel"):
            y.fill(1.0)
        elif ti.static(where == "function"):
            clear(y, 3.0)
        elif ti.static(where == "method"):
            holder.clear()
        else:
            y.fill(0.5)
            for i in x:
                y[i] += 3 * x[i]

    check_jacobian(k, x, y)


@pytest.mark.parametrize("options", [{}, {"format": "csr"}])
def test_entries_of_a_field_are_constants_behind_stop_grad(options):
    """To the end of the block that it stands in."""
    x, y, z = scalars(X), outputs(3), outputs(3)

    @ti.kernel
    def k():
        for i in y:
            a = x[i] ** 2
            if i > 0:
                ti.stop_grad(x)
                y[i] = a * x[i]
            z[i] = x[i] ** 3
            ti.stop_grad(x)
            z[i] += 5 * x[i]

    expected = 2 * X**2 * [0, 1, 1], 3 * X**2
    for J, diagonal in zip(jacobian(k, x, [y, z], **options), expected, strict=True):
        J = J.toarray() if options else J
        assert_allclose(J, np.diag(diagonal), rtol=1e-12)
    assert_allclose(vjp(k, x, y, np.ones(3)), expected[0], rtol=1e-12)


# --- dynamic nodes


def test_a_kernel_deactivates_a_node_of_a_field_that_it_does_not_name():
    x, y, c = scalars(X), outputs(3), ti.field(ti.f64)
    node = ti.root.pointer(ti.i, 3)
    node.place(c)
    store = squares(x, c)
    clear = kernel_of("for i in range(2): ti.deactivate(node, [i])", node=node)
    read = kernel_of("for i in x: y[i] = 3.0 * c[i] + x[i]", x=x, y=y, c=c)
    run = lambda: (store(), clear(), read())
    assert_allclose(jacobian(run, x, y), np.diag([1.0, 1.0, 6.0 * X[2] + 1.0]))


def test_append_to_a_node():
    x, total = scalars(X), outputs()
    bag = ti.field(ti.f64)
    node = ti.root.dynamic(ti.i, 8, chunk_size=4)
    node.place(bag)

    @ti.kernel
    def k():
        ti.deactivate(bag.parent(), [])
        for i in x:
            ti.append(bag.parent(), [], x[i] ** 2)
        for i in range(ti.length(node, [])):
            total[None] += bag[i]

    assert_allclose(jacobian(k, x, total), 2 * X, rtol=1e-14)

    unknown = ti.field(ti.f64)
    other = ti.root.dynamic(ti.i, 8, chunk_size=4)
    other.place(unknown)
    alone = kernel_of("for i in x: ti.append(other, [], x[i])", x=x, other=other)
    check_refused(alone, x, total, "Append to the field itself", only_forward=True)  # total is not written


def placed(kind):
    """A field of 8 x 3 and a node of it."""
    t = ti.field(ti.f64)
    if kind == "rows":
        node = ti.root.pointer(ti.i, 4)
        node.dense(ti.ij, (2, 3)).place(t)
    elif kind == "inner":
        node = ti.root.pointer(ti.ij, (2, 1)).pointer(ti.ij, (2, 3))
        node.dense(ti.i, 2).place(t)
    elif kind == "offset":
        node = ti.root.pointer(ti.ij, (4, 3))
        node.dense(ti.i, 2).place(t, offset=(-5, 7))
    else:
        node = ti.root.bitmasked(ti.ij, (8, 3))
        node.place(t)
    return t, node


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["rows", "inner", "offset", "bitmasked"])
def test_deactivated_cells_lose_their_tangents(kind):
    t, node = placed(kind)
    x, y = scalars(np.arange(1.0, 25.0).reshape(8, 3)), outputs(8, 3)
    first = (-5, 7) if kind == "offset" else (0, 0)
    index = (1,) if kind == "rows" else (1, 2)

    @ti.kernel
    def k():
        for i, j in x:
            t[i + first[0], j + first[1]] = x[i, j] ** 2
        for i in range(1):
            ti.deactivate(node, index)
        for i, j in x:
            y[i, j] = t[i + first[0], j + first[1]] + 1.0

    k()
    kept = read(y) != 1.0  # as Taichi has it: a bitmasked node keeps its memory
    assert kept.sum() == {"rows": 18, "inner": 22, "offset": 22, "bitmasked": 24}[kind]
    J = jacobian(k, x, y)
    assert_allclose(J.reshape(24, 24), np.diag((2 * read(x) * kept).ravel()), rtol=1e-14)


@pytest.mark.sweep
def test_bitmasked_nodes_keep_their_memory_when_python_deactivates_them():
    t, node = placed("bitmasked")
    x, y = scalars(X), outputs(3)
    store = kernel_of("for i in x: t[i, 0] = x[i] ** 2", x=x, t=t)
    load = kernel_of("for i in y: y[i] = t[i, 0]", y=y, t=t)
    k = lambda: (store(), node.deactivate_all(), load())
    k()
    assert_array_equal(read(y), X**2)
    assert_allclose(jacobian(k, x, y), np.diag(2 * X), rtol=1e-14)


def test_loops_over_meshes_are_refused():
    """Attributes of their elements are read by names, which the engine does not see."""
    from taichi.lang.mesh import MeshElementField

    elements = MeshElementField(None, None, {}, {}, {})
    x, y = scalars(X), outputs(3)
    k = kernel_of("for v in elements: y[0] = x[0]", elements=elements, y=y, x=x)
    with pytest.raises(UnsupportedError, match=r"(?s)for v in elements.*a mesh"):
        jacobian(k, x, y)


@pytest.mark.sweep
def test_deactivation_in_the_loop_that_stores_is_refused():
    t, node = placed("rows")
    x, y = scalars(X), outputs(3)
    k = kernel_of("for i in x: t[i, 0] = x[i]; ti.deactivate(node, [i // 2]); y[i] = t[i, 0]", x=x, t=t, node=node, y=y)
    check_refused(k, x, y, "a loop of its own", only_forward=True)  # adjoints know it


PLACEMENTS = {
    "dense": "dense 8",
    "pointer": "pointer 4, dense 2",
    "bitmasked": "dense 2, bitmasked 4",
    "ordered": "dense 8",
}
PLACEMENTS |= {"dense pointer": "dense 4, pointer 2", "hash-like": "pointer 2, pointer 2, dense 2"}


@pytest.mark.mostly_sweep("ordered")
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_struct_for_on_placements(kind):
    y, p, node = outputs(8), ti.field(ti.f64), ti.root
    for part in PLACEMENTS[kind].split(", "):
        node = getattr(node, part.split()[0])(ti.i, int(part.split()[1]))
    node.place(p, offset=0 if kind == "ordered" else None)
    for i in (1, 2, 5, 7):
        p[i] = 0.3 + 0.1 * i
    active = [i for i in range(8) if kind in ("dense", "ordered") or p[i] != 0 or is_active_block(kind, i)]

    @ti.kernel
    def k():
        for i in p:
            y[i] = p[i] * p[i] + p[1] * p[5]
        for i in p:
            y[0] += ti.sin(p[i])

    values = p.to_numpy()
    by_p = np.zeros((8, 8))
    for i in active:
        by_p[i, i] += 2 * values[i]
        by_p[i, 1] += values[5]
        by_p[i, 5] += values[1]
        by_p[0, i] += np.cos(values[i])
    check_jacobian(k, p, y, expected=by_p)


def is_active_block(kind, i):
    blocks = {"pointer": 2, "hash-like": 2}
    return any(i // blocks[kind] == j // blocks[kind] for j in (1, 2, 5, 7)) if kind in blocks else False


@pytest.mark.sweep
def test_indices_of_grouped_loops():
    """A component that gravity leaves alone, ``v[I][0] += 0.0``: Taichi drops it, and aborted on what was left."""
    x, v = ti.Vector.field(3, ti.f64, (2, 3)), ti.Vector.field(3, ti.f64, (2, 3))
    stiffness = scalars([2.0])
    x.from_numpy(np.linspace(0.3, 1.1, 18).reshape(2, 3, 3))

    @ti.func
    def pulled(i):
        f = ti.Vector([0.0, 0.0, 0.0])
        for offset in ti.static([ti.Vector([0, 1]), ti.Vector([1, -1])]):
            j = i + offset
            if 0 <= j[0] < 2 and 0 <= j[1] < 3:
                f -= stiffness[0] * (x[i] - x[j]).normalized() * float(i - j).norm()
        return f

    @ti.kernel
    def k():
        for i in ti.grouped(ti.ndrange(2, 3)):
            v[i] += ti.Vector([0.0, -9.8, 0.0]) * 0.01 * stiffness[0]
            v[i] += ti.Vector([0.0, -9.8, 0.0]) * 0.01
            axis = i[0] % 2
            v[i][axis] += 0.1 * i[axis] * x[i].norm_sqr()
        for i in ti.grouped(x):
            v[i] += ti.Vector([0.0, -9.8, 0.0]) * 0.01
        for i in ti.grouped(x):
            v[i] += pulled(i) * 0.01
        for i in ti.grouped(x):
            x[i] += 0.01 * v[i]

    check_jacobian(k, [stiffness, x], v, state=[x])
    plan = Jacobian(k, stiffness, v)
    plan()
    assert plan.source.count("ti.grouped") == 1  # the indices of that loop are themselves indexed
