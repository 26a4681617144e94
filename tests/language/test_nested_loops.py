"""Parallel loops over fields of several dimensions, which run row by row: a loop over pieces of rows and one over j."""

import textwrap

import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars
from kernel_texts import kernel_of
from printed_programs import text

from taichi_ext import backend, jacobian
from taichi_ext.program import F64, I32, Assign, Const, Container, For, Load, Local, Program, Read
from taichi_ext.schedule import loops, machine
from taichi_ext.schedule.loops import by_rows

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.cpu_only("on a GPU, loops over fields stay as they are")]

X = [0.3, 0.8, 0.5]


@pytest.fixture(autouse=True)
def nested(monkeypatch):
    """Fields of tests are small: rows of any length are cut, and each loop that is nested is counted."""
    found = []
    monkeypatch.setattr(loops, "SHORTEST", 0)
    monkeypatch.setattr(machine, "LEAST_ITERATIONS", 4)
    monkeypatch.setattr(loops, "LEAST_ITERATIONS", 0)  # none is so short that it runs as a serial loop

    def counted(loop, bounds, pieces):
        found.append(tuple(end for _, end in bounds))
        return by_rows(loop, bounds, pieces)

    monkeypatch.setattr(loops, "by_rows", counted)
    return found


def is_row_by_row():
    """On a GPU, loops over fields stay as they are; and where tangents are in memory as there."""
    return not backend.stores_by_column()


def test_text():
    x = Container("x", F64, 3, shape=(2, 6, 5))
    i, j, k = (Local(name, I32, kind="loop") for name in "ijk")
    loop = For("field", (i, j, k), (x,), (Assign(Load(x, (Read(i), Read(j), Read(k))), Const(1.0, F64)),))
    program = Program("p", (), (), tuple(by_rows(loop, ((0, 2), (0, 6), (0, 5)), n) for n in (3, 1)), (x,))
    assert text(program) == textwrap.dedent(
        """\
        program p():
            for piece in range(6:i32):
                i: i32 = (piece // 3:i32)
                for j in range((((piece % 3:i32) * 6:i32) // 3:i32), ((((piece % 3:i32) * 6:i32) + 6:i32) // 3:i32)):
                    for k in range(5:i32):
                        x[i, j, k] = 1.0:f64
            for piece.2 in range(2:i32):
                i: i32 = piece.2
                for j in range(6:i32):
                    for k in range(5:i32):
                        x[i, j, k] = 1.0:f64
        """
    )


def test_ranges(nested):
    x, y = scalars(X), outputs(3, 2, 4)
    k = kernel_of("for i, _, m in ti.ndrange(3, 2, 4): y[i, m % 2, m] += x[i] * x[m % 3]", y=y, x=x)
    check_jacobian(k, x, y)
    assert ((3, 2, 4) in nested) == is_row_by_row()


def test_a_parallel_loop_that_is_left_is_refused_by_taichi():
    x, y = scalars(X), outputs(3, 2)

    @ti.kernel
    def k():
        for i, j in y:
            if j == 1:
                break
            y[i, j] = x[i]

    for call in (k, lambda: jacobian(k, x, y)):
        with pytest.raises(ti.TaichiCompilationError, match="break"):
            call()


@pytest.mark.sweep
def test_variables_that_a_function_changes(nested):
    x, y = scalars(X), outputs(3, 2)

    @ti.func
    def advance(a: ti.template()):
        a += 1

    k = kernel_of("for i, j in ti.ndrange(2, 2): advance(i); y[i, j] = x[i] * x[j]", advance=advance, y=y, x=x)
    check_jacobian(k, x, y)
