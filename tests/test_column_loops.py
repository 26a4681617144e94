"""Loops over many columns within parallel loops, which LLVM is kept from writing out."""

import textwrap

import numpy as np
import pytest
import taichi as ti
from numpy.testing import assert_allclose

from taichi_ext import Jacobian
from taichi_ext.program import F64, I32, Assign, Const, Container, For, Load, Local, Op, Program, Read, text
from taichi_ext.schedule.columns import with_counted_columns

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


@pytest.mark.parametrize("size", [5, 16, 17, 40])
def test_jacobian(size):
    """Rows that are stored, added to, multiplied in place and copied, in branches and in loops: y = W x² and more."""
    x, y, z = (ti.field(ti.f64, size) for _ in range(3))
    squares = ti.field(ti.f64, size)
    weights = ti.field(ti.f64, (size, size))

    @ti.kernel
    def square():
        for i in x:
            squares[i] = x[i] * x[i]

    @ti.kernel
    def combine():
        for i in y:
            y[i] = 0.0
            for j in range(size):
                if weights[i, j] > 0:
                    y[i] += weights[i, j] * squares[j]
            if i % 2 == 0:
                y[i] *= 3.0
            z[i] = squares[i] * y[i]

    rng = np.random.default_rng(0)
    point, matrix = rng.normal(size=size), rng.normal(size=(size, size))
    x.from_numpy(point)
    weights.from_numpy(matrix)

    def run():
        square()
        combine()

    dy, dz = Jacobian(run, x, [y, z])()
    scale = np.where(np.arange(size) % 2 == 0, 3.0, 1.0)[:, None] * np.maximum(matrix, 0)
    expected = scale * (2 * point)
    assert_allclose(dy, expected, rtol=1e-13)
    values = scale @ point**2
    assert_allclose(dz, (point**2)[:, None] * expected + np.diag(2 * point * values), rtol=1e-13, atol=1e-13)
