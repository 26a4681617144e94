"""Parallel loops without loops in them that run in lanes: the values that a store needs lie in local arrays before."""

import textwrap

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, matrix_outputs, outputs, scalars, vector_outputs
from forced_lanes import force_lanes
from numpy.testing import assert_allclose, assert_array_equal
from printed_programs import text
from taichi_program import initialise

from taichi_ext import Jacobian
from taichi_ext.analysis.loops import Extent
from taichi_ext.differentiate.plan.storage_facts import STRATEGIES
from taichi_ext.program import F64, I32, Assign, Const, Container, For, Load, Local, Op, Program, Read
from taichi_ext.schedule import Machine, machine, schedule
from taichi_ext.schedule import lanes as schedule_lanes

pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.cpu_only("loops run in lanes where rows come one after the other in memory"),
]

of_all_columns = pytest.mark.chosen_only("what is collected depends on the number of columns", "--chunk-size")

X = [0.3, 0.8, 0.5]
BRANCHES_IN_LANES = STRATEGIES["auto"] is not STRATEGIES["dense"]  # rows that branches write are no arithmetic


@pytest.fixture(autouse=True)
def lanes(monkeypatch):
    """All threads take part."""
    monkeypatch.setattr(machine, "LEAST_ITERATIONS", 0)
    return force_lanes(monkeypatch)


@pytest.mark.sweep
def test_text():
    p, q = (Container(name, F64, 2, shape=(3, 40)) for name in ("p", "q"))
    shadow = Container("d_q", F64, 1, is_argument=True)
    i, j = Local("i", I32, kind="loop"), Local("j", I32, kind="loop")
    fixed = Load(p, (Const(0, I32), Const(1, I32)))
    number = Op("add", (Op("mul", (Read(i), Const(40, I32)), I32), Read(j)), I32)
    body = (
        Assign(Load(q, (Read(i), Read(j))), Op("mul", (fixed, fixed), F64)),
        Assign(Load(shadow, (number,)), Op("add", (fixed, fixed), F64)),
    )
    loop = For("field", (i, j), (q,), body)
    extents = {p: Extent((3, 40), ()), q: Extent((3, 40), ())}
    small = Machine(2, shapes={q: (3, 40)}, extents=extents)
    program = Program("k", (), (), (loop,), (p, q))
    assert text(schedule(program, program, {shadow: q}, small).program) == textwrap.dedent(
        """\
        program k():
            for stretch in range(15:i32) with {'serialize': True}:
                i: i32 = ((stretch & 15:i32) // 5:i32)
                first: i32 = (((stretch & 15:i32) % 5:i32) * 8:i32)
                q_of: f64[8] = []
                d_q_of: f64[8] = []
                for lane in range(8:i32):
                    q_of[lane] = (p[0:i32, 1:i32] * p[0:i32, 1:i32])
                    d_q_of[lane] = (p[0:i32, 1:i32] + p[0:i32, 1:i32])
                start: i32 = ((i * 40:i32) + first)
                for lane.2 in range(8:i32):
                    q[i, (first + lane.2)] = q_of[lane.2]
                    d_q[(start + lane.2)] = d_q_of[lane.2]
        """
    )


@pytest.mark.sweep
@pytest.mark.parametrize("shape", [(3, 32), (2, 37), (1, 5), (2, 64), (50,), (96,)])
def test_rows_of_any_length(shape, lanes):
    x, y = scalars(X), outputs(*shape)
    rows = shape[0] if len(shape) == 2 else 1

    @ti.kernel
    def over_rows():
        for i, j in y:
            t = x[0] * j - x[1]
            if t > 1.03:
                y[i, j] = ti.sqrt(t) * x[2] + i
            else:
                y[i, j] = ti.max(t, x[1]) / (x[0] + rows)

    @ti.kernel
    def over_one_row():
        for i in y:
            t = x[0] * i - x[1]
            s = ti.sqrt(t * t + 1.0) * x[2]
            if t > 1.03:
                s -= t / (x[0] + rows)
            y[i] = s

    @ti.kernel
    def branches():
        for i, j in y:
            t = x[0] * j - x[1]
            s = ti.max(t, x[1]) / (x[0] + rows)
            if t > 1.03:
                s = ti.sqrt(t) * x[2] + i
            y[i, j] = s

    if len(shape) == 1:
        check_jacobian(over_one_row, x, y)
        assert (lanes[-1] is not None) == BRANCHES_IN_LANES
    else:
        check_jacobian(branches, x, y)
        assert (lanes[-1] is not None) == (BRANCHES_IN_LANES and shape[-1] > 5)  # fewer iterations than lanes
        check_jacobian(over_rows, x, y)  # stores in two places


@pytest.mark.sweep
def test_fields_of_one_tree(lanes):
    """Values are stored to fields without tangents too."""
    layout = ti.FieldsBuilder()
    x, f, w, y, z, plain = (ti.field(ti.f64) for _ in range(6))
    layout.dense(ti.i, 3).place(x)
    layout.place(f)
    layout.dense(ti.ij, (2, 20)).place(w, y, z, plain)
    tree = layout.finalize()
    x.from_numpy(np.array(X))
    f[None] = 0.7
    w.from_numpy(np.linspace(0.2, 0.9, 40).reshape(2, 20))

    @ti.kernel
    def k():
        for i, j in ti.ndrange(2, 20):
            t = x[0] * w[i, j] - x[1] * w[1 - i, 19 - j]
            y[i, j] = t * t * f[None]
            z[i, j] = ti.min(t, f[None]) * 2.0
            plain[i, j] = w[i, j] * 3.0

    check_jacobian(k, [x, f], [y, z], state=[plain])
    assert lanes[-1] is not None
    tree.destroy()


def kernels_that_stay(x, y, z, count):
    """Kernels with a loop that LLVM does not vectorise, or that does not store whole rows of J, by reason."""
    p = ti.field(ti.i32, shape=3)

    @ti.kernel
    def rounded():
        for i, j in y:
            y[i, j] = ti.round(0.3 * j) * x[0] + x[1]

    @ti.kernel
    def turned():
        for i, j in z:
            y[j, i] = x[0] * j + x[1] * i

    @ti.kernel
    def counted():
        for i, j in y:
            y[i, j] = x[0] * j
            p[i] = j

    @ti.kernel
    def another_sum():
        for i, j in y:
            y[i, j] = x[0] * j
            z[0, 0] += x[1]

    @ti.kernel
    def over_a_range_of_another_length():
        for i, j in ti.ndrange(2, 20):
            y[i, j] = x[0] * j

    return {name: f for name, f in locals().items() if hasattr(f, "_primal")}


STAY = """
    rounded turned counted another_sum over_a_range_of_another_length
""".split()


@pytest.mark.sweep
@pytest.mark.parametrize("name", STAY)
def test_loops_that_stay(name, lanes):
    x, y, z = scalars(X), outputs(3, 20), outputs(20, 3)
    kernels = kernels_that_stay(x, y, z, 3)
    assert set(kernels) == set(STAY)
    check_jacobian(kernels[name], x, y, state=[z])
    assert lanes
    assert not any(lanes)


@pytest.mark.sweep
@of_all_columns
def test_arrays(lanes):
    """The arrays that are read are other objects in each trace."""
    x, w, n = np.array(X), np.linspace(0.2, 0.9, 20), np.arange(20, dtype=np.int32)
    y, z, v = np.zeros((3, 20)), np.zeros((20, 2)), np.array([[0.4, 0.9], [0.1, 0.2]])
    pair = ti.types.vector(2, ti.f64)

    @ti.kernel
    def k(
        x: ti.types.ndarray(),
        w: ti.types.ndarray(),
        n: ti.types.ndarray(),
        y: ti.types.ndarray(),
        z: ti.types.ndarray(dtype=pair, ndim=1),
        v: ti.types.ndarray(dtype=pair, ndim=1),
    ):
        for i, j in ti.ndrange(3, 20):
            t = x[0] * w[j] - x[2]
            y[i, j] = t * t if n[19 - j] > 4 else t + x[1] * i
        for j in range(w.shape[0]):
            z[j] = v[1] * w[j] * x[0] + v[0].norm() * x[1]

    check_jacobian(k, [x, v], [y, z], args=(x, w, n, y, z, v))
    assert [found is not None for found in lanes] == [BRANCHES_IN_LANES, True]


@pytest.mark.sweep
def test_what_is_outside_a_field_is_not_read_before(lanes):
    """A read that never happens may name any place."""
    x, y = scalars(X), outputs(2, 20)
    is_there = False

    @ti.kernel
    def k():
        for i, j in y:
            t = x[0] * j
            if ti.static(is_there) or i > 5:
                t += x[1 << 30]
            y[i, j] = t

    check_jacobian(k, x, y)


@pytest.mark.mostly_sweep("LEAST_TOTAL-300")
@of_all_columns
@pytest.mark.parametrize(("limit", "value"), [("LEAST_WORK", 4), ("LEAST_TOTAL", 300)])
def test_loops_that_do_little_stay(limit, value, lanes, monkeypatch):
    monkeypatch.setattr(schedule_lanes, limit, value)
    x, y = scalars(X), outputs(2, 20)

    @ti.kernel
    def little():
        for i, j in y:
            y[i, j] = x[0] * j + x[1]

    @ti.kernel
    def more():
        for i, j in y:
            y[i, j] = ti.sqrt(x[0] * x[0] * j / x[1] + 1.0)

    check_jacobian(little, x, y)
    check_jacobian(more, x, y)
    assert [found is None for found in lanes] == [True, False]


def test_columns_in_blocks(lanes):
    x, y = scalars(np.linspace(0.2, 0.9, 7)), outputs(3, 20)

    @ti.kernel
    def k():
        for i, j in y:
            s = 0.0
            for n in ti.static(range(7)):
                s += x[n] * x[n] * (j + n)
            y[i, j] = s

    whole = check_jacobian(k, x, y)
    assert_array_equal(Jacobian(k, x, y, chunk_size=3)(), whole)
    assert any(lanes)


@pytest.mark.sweep
@of_all_columns
def test_a_number_stored_to_a_vector(lanes):
    x, v, m = scalars(X), vector_outputs(3, 2, 20), matrix_outputs(2, 2, 20)

    @ti.kernel
    def k():
        for i, j in v:
            v[i, j] = x[0] * j + x[1]
        for i in m:
            m[i] = x[2] * i

    check_jacobian(k, x, [v, m])
    assert all(lanes)


@pytest.mark.sweep
def test_names_that_the_loops_might_take(lanes):
    x, y, z = scalars(X), outputs(2, 40), outputs(40)

    @ti.kernel
    def k(_first: ti.f64):
        _end = 2.0
        _piece = x[0] * x[1]
        _flat = 1
        for _i, j in y:
            t = x[0] * x[0] + x[1] * j
            y[_i, j] = ti.sqrt(t * t + 1.0) / (_end + t * t) + _piece * _first + _flat
        for _piece_ in z:
            _start = x[0] * _piece_
            z[_piece_] = _start * _end

    @ti.kernel
    def loops():
        for _piece, _first in y:
            _end = x[0] * _first
            y[_piece, _first] = _end * _end
        for _flat in range(40):
            s = x[0]
            for _piece in range(3):
                s += x[_piece] * _flat
            z[_flat] = s

    check_jacobian(k, x, [y, z], args=(0.5,))
    check_jacobian(loops, x, [y, z])
    assert any(lanes)


@pytest.mark.sweep
def test_deactivated_places_are_read_each_time(lanes):
    x, y = scalars(X), outputs(40)
    w = ti.field(ti.f64)
    ti.root.dense(ti.i, 1).dynamic(ti.j, 8).place(w)

    @ti.kernel
    def fill():
        for i in range(1):
            w[0].deactivate()
            w[0].append(1.5)

    @ti.kernel
    def k():
        for i in y:
            w[0].deactivate()
            y[i] = x[0] * w[0, 0] + x[1]

    fill()
    k()
    plain = y.to_numpy()
    fill()
    assert_allclose(Jacobian(k, x, y)(), [[0.0, 1.0, 0.0]] * 40)
    assert_array_equal(y.to_numpy(), plain)
    assert not any(lanes)


@pytest.mark.sweep
@of_all_columns
def test_integers_of_64_bits(lanes):
    initialise(default_fp=ti.f64, default_ip=ti.i64)
    x, w, y, z = scalars(np.linspace(0.1, 0.9, 30)), scalars(X), outputs(50), vector_outputs(2, 3, 20)

    @ti.kernel
    def in_lanes():
        for i in y:
            y[i] = w[0] * i + w[1]
        for i, j in z:
            z[i, j] = ti.Vector([w[0] * w[1] * i, w[2] * j])

    @ti.kernel
    def by_rows():
        for i in y:
            s, t = 0.0, 1.0
            for n in range(30):
                s += x[n] * n * i
                t *= 1.0 - 0.1 * x[n]
            y[i] = s * t

    check_jacobian(in_lanes, w, [y, z])
    check_jacobian(by_rows, x, y)
    assert all(lanes)


@pytest.mark.sweep
@of_all_columns
@pytest.mark.parametrize(("shape", "columns"), [((4, 40), 3), ((4, 41), 2), ((71,), 3)])
def test_float32(shape, columns, lanes):
    initialise()
    x, y = scalars(np.linspace(0.2, 0.9, columns), ti.f32), outputs(*shape, dtype=ti.f32)
    last = shape[-1]

    @ti.func
    def value(i, j):
        return x[0] * x[0] * j + ti.sqrt(x[columns - 1]) * i

    @ti.kernel
    def k():
        for I in ti.static(range(1)):
            if ti.static(len(shape) == 2):
                for i, j in y:
                    y[i, j] = value(i, j)
            else:
                for j in y:
                    y[j] = value(I + 1, j)

    plan = Jacobian(k, x, y)
    out = np.full((*shape, columns), np.nan, np.float32)
    p = x.to_numpy()
    i, j = np.meshgrid(np.arange(shape[0]) if len(shape) == 2 else [1], np.arange(last), indexing="ij")
    expected = np.zeros((*i.shape, columns))
    expected[..., 0] = 2 * p[0] * j
    expected[..., columns - 1] += 0.5 / np.sqrt(p[-1]) * i
    for _ in range(3):
        assert_allclose(plan(out=out), expected.reshape(out.shape), rtol=1e-6)
        assert_allclose(plan(), out, rtol=0)
        out.fill(np.nan)
    assert_allclose(y.to_numpy().ravel(), (p[0] ** 2 * j + np.sqrt(p[-1]) * i).ravel(), rtol=1e-5)
    assert lanes[-1].count == 16


@pytest.mark.sweep
def test_pipeline(lanes):
    """The same kernel again and again, the second time repeated from memory; then one that reads what it wrote."""
    initialise()
    x, y, total = scalars(X, ti.f32), outputs(2, 20, dtype=ti.f32), outputs(1, dtype=ti.f32)

    @ti.kernel
    def render():
        for i, j in y:
            y[i, j] = x[0] * x[0] * j + x[1]

    @ti.kernel
    def add():
        for i, j in y:
            total[0] += y[i, j]

    def run():
        total.fill(0)
        for _ in range(3):
            render()
            add()

    plan = Jacobian(run, x, [y, total])
    for _ in range(2):
        by_pixel, by_sum = plan()
        expected = np.zeros((2, 20, 3))
        expected[..., 0], expected[..., 1] = 0.6 * np.arange(20), 1
        assert_allclose(by_pixel, expected, rtol=1e-6)
        assert_allclose(by_sum[0], 3 * expected.sum(axis=(0, 1)), rtol=1e-5)
    assert any(lanes)
