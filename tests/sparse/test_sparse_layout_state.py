"""Runs that begin again where kernels change fields in sparse layouts: active cells, lists, what unnamed fields hold."""

import numpy as np
import pytest
import taichi as ti
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal
from taichi_program import end_program, initialise

from taichi_ext import jacobian, linear_operator
from taichi_ext.backend import storage_parts

X = np.array([0.5, -1.5, 2.0])


@pytest.fixture(autouse=True)
def _fresh_program():
    """Layouts are placed in a program of their own."""
    initialise(default_fp=ti.f64)
    yield
    end_program()


def numbers(values, dtype=ti.f64):
    field = ti.field(dtype, shape=len(values))
    field.from_numpy(np.asarray(values))
    return field


def active(field):
    """The indices of the active cells of a field or node, in order, with what a field holds there."""
    rank = len(field.shape)
    is_field = isinstance(field, ti.Field)

    @ti.kernel
    def find(found: ti.types.ndarray(ti.f64, ndim=2), count: ti.types.ndarray(ti.i32, ndim=1)):
        for cell in ti.grouped(field):
            place = ti.atomic_add(count[0], 1)
            for d in ti.static(range(rank)):
                found[place, d] = cell[d]
            if ti.static(is_field):
                found[place, rank] = field[cell]

    found, count = np.zeros((1000, rank + is_field)), np.zeros(1, np.int32)
    find(found, count)
    return sorted(map(tuple, found[: count[0]].tolist()))


@pytest.fixture
def trees():
    """A tree of blocks of bits with two fields at different places, and lists; kernels that change everything."""
    a, m, l = ti.field(ti.f32), ti.Vector.field(2, ti.i32), ti.field(ti.f64)
    wide, single = ti.field(ti.u64), ti.field(ti.i8)
    blocks = ti.root.pointer(ti.ij, (4, 4))
    bits = blocks.bitmasked(ti.ij, (2, 2))
    bits.place(a)
    bits.place(m, offset=(-2, 0))
    bits.place(wide, single)
    lists = ti.root.dense(ti.j, 3).dynamic(ti.i, 16, chunk_size=4)
    lists.place(l)

    @ti.kernel
    def begin():
        a[1, 1], a[5, 6] = 3.5, 2.0
        m[1, 2] = [4, -5]
        wide[5, 6] = (ti.u64(1) << 63) + 1
        single[5, 6] = -7
        ti.loop_config(serialize=True)
        for i in range(6):
            l[i, 1] = 1.5 + i
        l[0, 2] = 2.0
        ti.activate(blocks, [3, 0])

    @ti.kernel
    def go_on():
        a[5, 6], a[7, 7] = 9.0, 1.0
        m[-1, 7] = [1, 1]
        wide[5, 6] = 3
        l[6, 1], l[0, 0] = 9.0, 8.0
        ti.deactivate(blocks, [3, 0])
        ti.deactivate(lists, [2])

    def state():
        parts = [m.get_scalar_field(n) for n in range(2)]
        return [active(x) for x in (blocks, bits, lists, a, *parts, l, wide, single)] + [wide[5, 6]]

    begin()
    return a, l, [go_on, blocks.deactivate_all, lists.deactivate_all, ti.deactivate_all_snodes], state


@pytest.mark.sweep
def test_cells_and_what_they_hold_are_put_back(trees):
    a, l, changes, state = trees
    before = state()
    assert len(before[0]) == 4, "a block without active bits is one of them"
    copies = [(part, part.copy()) for part in (storage_parts(field)[0] for field in (a, l))]
    for change in changes:
        change()
        assert state() != before
        for part, copy in copies:
            part.put_back(copy)
        assert state() == before


def test_a_bit_that_was_not_set_reads_zero_again():
    """Taichi reads the memory of a bitmasked cell whether it is active or not."""
    t = ti.field(ti.f64)
    ti.root.bitmasked(ti.i, 8).place(t)
    read = kernel_of("read(i: int) -> ti.f64: return t[i]", t=t)
    leave = kernel_of("ti.deactivate(node, [2])", node=t.parent())
    t[2] = 1.0
    (part,) = storage_parts(t)
    copy = part.copy()
    leave()
    t[3] = 5.0
    part.put_back(copy)
    assert read(2) == 1 and read(3) == 0
    assert active(t) == [(2, 1)]


LAYOUTS = {
    "blocks": "pointer 4, dense 3",
    "bitmasked": "bitmasked 12",
    "bits of blocks": "pointer 3, bitmasked 4",
    "blocks of blocks": "pointer 3, pointer 2, dense 2",
    "dynamic": "dynamic 12",
}


def nodes(how):
    """A field of 12 numbers, and the node that is activated first, in some layout."""
    t, made = ti.field(ti.f64), [ti.root]
    for kind, size in map(str.split, LAYOUTS.get(how, "pointer 12").split(", ")):
        made.append(getattr(made[-1], kind)(ti.i, int(size)))
    made[-1].place(t)
    return t, made[1]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("how", "options"),
    [*((how, {"chunk_size": 1}) for how in LAYOUTS), ("pointer", {"format": "csr", "chunk_size": 2})],
)
def test_cells_that_a_run_makes_active_are_not_there_in_the_next(how, options):
    x, y, (t, _) = numbers(X), ti.field(ti.f64, shape=5), nodes(how)
    t[0] = 2.0

    @ti.kernel
    def scatter():
        ti.loop_config(serialize=True)
        for i in range(3):
            t[i] += x[i] ** 2
        t[6] = x[0] * x[1]

    @ti.kernel
    def gather():
        for i in t:
            y[4] += x[0]  # once for each active cell
        for i in range(3):
            y[i] = t[i] * x[2]
        y[3] = t[6]

    run = lambda: (gather(), scatter(), gather())
    run()
    after, values = active(t), y.to_numpy()
    start(t)
    y.fill(0)
    expected = np.zeros((5, 3))
    a, b, c = X
    expected[:3] = np.diag(2 * X * c) + [[0, 0, 2 + a**2], [0, 0, b**2], [0, 0, c**2]]
    expected[3, :2] = b, a
    expected[4, 0] = sum(1 for _ in after) + before_of(how)
    J = jacobian(run, x, y, **options)
    assert_allclose(J.toarray() if "format" in options else J, expected, rtol=1e-13)
    assert active(t) == after
    assert_allclose(y.to_numpy(), values, rtol=1e-14)


def start(t):
    """The state before: one active cell."""
    t.parent().deactivate_all()
    ti.deactivate_all_snodes()
    t[6] = 0.0  # of bitmasked cells Taichi keeps the memory
    for i in range(3):
        t[i] = 0.0
    ti.deactivate_all_snodes()
    t[0] = 2.0


def before_of(how):
    """How many cells are active once one has been stored to."""
    return {"blocks": 3, "blocks of blocks": 2}.get(how, 1)


def scaling(x, t, y):
    """A kernel: ``y = x * t``, of three numbers each."""
    scale = kernel_of("for i in range(3): y[i] = x[i] * t[i]", y=y, x=x, t=t)
    return scale


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["bits of blocks", "dynamic"])
def test_what_is_deactivated_from_python_is_there_in_the_next_run(how):
    """Also of fields that are only read, and that have no tangents."""
    x, y, (t, node) = numbers(X), ti.field(ti.f64, shape=3), nodes(how)
    for i in range(3):
        t[i] = i + 1.0
    scale = scaling(x, t, y)
    run = lambda: (scale(), node.deactivate_all())
    assert_array_equal(jacobian(run, x, y, chunk_size=1), np.diag([1.0, 2, 3]))
    assert active(t) == []


@pytest.mark.sweep
def test_fields_that_share_cells_keep_what_they_hold():
    """The second is read by another kernel; or by none, and is there after a product, whose state is put back."""
    pytest.importorskip("scipy")
    x, y, t, other = numbers(X), ti.field(ti.f64, shape=3), ti.field(ti.f64), ti.field(ti.f64)
    node = ti.root.pointer(ti.i, 4)
    node.place(t, other)
    for i in range(3):
        t[i], other[i] = 1.0, i + 5.0

    store = scaling(x, t, y)
    read = kernel_of("read: for i in range(3): y[i] += x[i] * other[i]", y=y, x=x, other=other)
    without_other = lambda: (store(), node.deactivate_all())
    run = lambda: (store(), read(), node.deactivate_all())
    assert_array_equal(linear_operator(without_other, x, y) @ np.ones(3), np.ones(3))
    assert active(other) == [(0, 5), (1, 6), (2, 7)]
    assert_array_equal(jacobian(run, x, y, chunk_size=1), np.diag([6.0, 7, 8]))
    assert active(other) == []


@pytest.mark.sweep
def test_cells_that_a_kernel_activates_and_deactivates_by_name():
    x, y, t = numbers(X), ti.field(ti.f64, shape=2), ti.field(ti.f64)
    node = ti.root.pointer(ti.i, 8)
    node.place(t)
    t[5] = 3.0
    count = kernel_of("for i in node: y[n] += x[0] * x[1]", "n: int", node=node, y=y, x=x)
    change = kernel_of("ti.activate(node, [2]); ti.deactivate(node, [5]); ti.activate(node, [3])", node=node)
    run = lambda: (count(0), change(), count(1))
    J = jacobian(run, x, y, chunk_size=1)
    assert_allclose(J, [[-1.5, 0.5, 0], [-3, 1, 0]], rtol=1e-14)
    assert [i for i, _ in active(t)] == [2, 3]
