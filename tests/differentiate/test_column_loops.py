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
