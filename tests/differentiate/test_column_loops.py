"""Loops over columns within parallel loops: made one, kept from being written out; rows of few columns."""

import textwrap

import numpy as np
import pytest
import taichi as ti
from numpy.testing import assert_allclose
from printed_programs import text

from taichi_ext import Jacobian
from taichi_ext.program import F64, I32, Assign, Const, Container, For, Load, Local, Op, Program, Read
from taichi_ext.schedule.private_sums import with_counted_columns

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.cpu_only("on a GPU, other threads compute other columns")]


def cleared(target, columns):
    """A loop over the columns of ``target`` in a parallel loop."""
    i, k = Local("i", I32, kind="loop"), Local("k", I32, kind="column")
    index = Op("add", (Op("mul", (Read(i), Const(columns, I32)), I32), Read(k)), I32)
    where = Read(target, (Read(k),)) if isinstance(target, Local) else Load(target, (index,))
    inner = For("range", (k,), (Const(columns, I32),), (Assign(where, Const(0.0, F64)),))
    return (For("range", (i,), (Const(9, I32),), (inner,)),)


def test_text():
    shadow = Container("d_x", F64, 1, is_argument=True)
    program = Program("clear", (), (), with_counted_columns(cleared(shadow, 17)), ())
    assert text(program) == textwrap.dedent(
        """\
        program clear():
            for i in range(9:i32):
                k: i32 = 0:i32
                while (k < min(17:i32, d_x.shape[0])):
                    d_x[((i * 17:i32) + k)] = 0.0:f64
                    k += 1:i32
        """
    )


def test_columns_that_are_stored_twice():
    """The second store of an entry reads the first one, so columns stay one by one."""
    size = 20
    x, y = ti.field(ti.f64, size), ti.field(ti.f64, size)
    x.from_numpy(np.linspace(0.1, 1.0, size))

    @ti.kernel
    def twice():
        for i in x:
            x[i] = ti.sin(x[i])
        for i in x:
            y[i] = 2.0 * x[i]
            y[i] += ti.cos(x[size - 1 - i])

    plan = Jacobian(twice, x, y)
    v = np.linspace(0.1, 1.0, size)
    expected = np.diag(2 * np.cos(v)) - np.fliplr(np.diag((np.sin(np.sin(v)) * np.cos(v))[::-1]))
    assert_allclose(plan(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("target", "columns"),
    [(Container("d_x", F64, 1, is_argument=True), 16), (Local("d_y", F64, (40,)), 40)],
    ids=("few columns", "a local array"),
)
def test_stays(target, columns):
    """LLVM writes out a loop over few columns soon, and vectorises one that stores to local memory only."""
    body = cleared(target, columns)
    same, changed = (text(Program("clear", (), (), b, ())) for b in (body, with_counted_columns(body)))
    assert same == changed


@pytest.mark.sweep
def test_a_choice_leaves_out_rows_that_are_not_finite():
    """A slope limiter at a jump: its ratio is infinite, and what the limiter does not pick has no part in J."""
    p = ti.field(ti.f64, 2)
    u, y = ti.field(ti.f64, 4), ti.field(ti.f64, 4)

    @ti.kernel
    def values():
        for i in u:
            u[i] = p[0] + ti.max(i - 1, 0) * p[1]

    @ti.kernel
    def limited():
        for i in range(1, 3):
            ratio = (u[i + 1] - u[i]) / (u[i] - u[i - 1])
            y[i] = ti.min(ratio, 1.0) * u[i] + ti.select(ratio > 5.0, 0.0, ratio * ratio)

    def run():
        values()
        limited()

    p.from_numpy(np.array([3.0, 2.0]))
    # at i = 1 the ratio is p1 / 0, y = u = p0; at i = 2 it is 1, where ti.min takes the second operand: y = u + 1
    assert_allclose(Jacobian(run, p, y)()[1:3], [[1.0, 0.0], [1.0, 1.0]], atol=1e-12)


@pytest.mark.sweep
@pytest.mark.chosen_only("what it looks at is that of one run", "--chunk-size")
def test_numbers_of_integer_tables_cost_nothing():
    """Products with zeros of an integer table have no tangents, and conditions that are known no branches."""
    x, y = ti.field(ti.f64, 3), ti.field(ti.f64, 3)
    table = ti.Matrix([[0, 1, -1], [1, 0, 0], [0, 0, 2]])

    @ti.func
    def term(kind, value):
        result = value
        if kind == 1:
            result = value * value
        return result

    @ti.kernel
    def apply():
        for i in y:
            vector = table @ ti.Vector([x[0], x[1], x[2]])
            for n in ti.static(range(3)):
                if i == n:
                    y[i] = term(n, vector[n])

    point = np.array([0.3, 0.7, -0.2])
    x.from_numpy(point)
    plan = Jacobian(apply, x, y)
    expected = np.array([[0, 1, -1], [2 * point[0], 0, 0], [0, 0, 2]])
    assert_allclose(plan(), expected, rtol=1e-14)
    assert plan.source.count("if ") == 3
    assert "ti.cast(0" not in plan.source
    assert "ti.cast(1" not in plan.source
