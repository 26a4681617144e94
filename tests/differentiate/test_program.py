"""The language of the engine, on programs written by hand."""

import pytest
from printed_programs import text

from taichi_ext import program as ir
from taichi_ext.analysis.changes import varying_locals
from taichi_ext.program import I32, Assign, Container, Declare, For, If, Jump, Load, Local, Op, Read, Update, While
from taichi_ext.program.build import literal, operation

x, y = ir.Container("x", ir.F32, 1), ir.Container("y", ir.F32, 0)
i, t = ir.Local("i", ir.I32, kind="loop"), ir.Local("t", ir.F32)


def f32(value):
    return ir.Const(value, ir.F32)


def sum_of_squares():
    entry = ir.Load(x, (ir.Read(i),))
    body = (
        ir.Declare(t, (ir.Op("mul", (entry, entry), ir.F32),)),
        ir.If(ir.Op("gt", (ir.Read(t), f32(1.0)), ir.U1), (ir.Assign(ir.Read(t), f32(1.0)),)),
        ir.Update(ir.Load(y, ()), "add", ir.Read(t)),
    )
    return ir.Program("total", (), (), (ir.For("field", (i,), (x,), body),), (x, y))


def test_rebuilding_keeps_what_is_shared_and_what_does_not_change():
    square = ir.Op("mul", (ir.Read(t), ir.Read(t)), ir.F32)
    double = ir.Op("add", (square, square), ir.F32)
    assert ir.rebuilt(double, lambda n: n) is double
    new = ir.rebuilt(double, lambda n: f32(2.0) if isinstance(n, ir.Read) else n)
    assert new.args[0] is new.args[1]
    assert sum(isinstance(n, ir.Const) for n in ir.walk(new)) == 4


def test_statements_that_do_not_change_stay_themselves():
    (loop,) = sum_of_squares().body
    assert ir.mapped((loop,), lambda s: ir.with_values(s, lambda v: ir.rebuilt(v, lambda n: n)))[0] is loop
    effect = ir.Effect("print", ("x is", ir.Tensor((ir.Read(t), f32(1.0)), (2,))), (), {"sep": " "})
    changed = ir.with_values(effect, lambda v: f32(2.0))
    assert [e.value for e in ir.values_of(changed)] == [2.0, 2.0]
    assert (changed.args[0], changed.keywords) == ("x is", {"sep": " "})


def test_contents_of_values_and_statements():
    entry = ir.Load(x, (ir.Read(i),))
    noise = ir.Op("random", (), ir.F32)
    value = ir.Op("mul", (entry, ir.Op("add", (entry, ir.Read(t)), ir.F32)), ir.F32)
    assert value.contents == ({i, t}, {x}, 2, True)
    assert ir.Op("add", (value, value), ir.F32).contents.size == 5  # as often as it occurs
    assert ir.Update(entry, "add", noise).contents == ({i}, set(), 1, False)  # of a target, the indices
    assert sum_of_squares().body[0].contents == (set(), set(), 0, True)  # without its blocks
    assert f32(1.0).contents == (set(), set(), 0, True)


def test_changed_statements():
    program = sum_of_squares()
    seven = {
        n: ir.Const(7, ir.I32)
        for s in ir.statements(program.body)
        for v in ir.values_of(s)
        for n in ir.walk(v)
        if n.dtype == ir.I32
    }
    body = ir.mapped(program.body, lambda s: ir.with_values(s, lambda v: ir.rebuilt(v, lambda n: seven.get(n, n))))
    assert "t: f32 = (x[7:i32] * x[7:i32])" in text(ir.Program("p", (), (), body, ()))
    assert "x[i]" in text(program)  # which stays as it was


# Locals that differ between iterations, or lanes, of a loop: by their values, and by the paths that lead to them.


A, B, K, M = (Local(name, I32) for name in "abkm")
J, N = (Local(name, I32, (), "loop") for name in "jn")
OUT, ROW = (Container(name, I32, 1) for name in ("out", "row"))
ONE = literal(1, I32)
DIFFERS = operation("gt", Read(J), 2)
SAME = operation("gt", Read(B), 2)


def loop(*body):
    return For("range", (N,), (ONE,), body)


def change(local, value=ONE):
    return Assign(Read(local), value)


def jump(condition, kind="break"):
    return If(condition, (Jump(kind),))


# Bodies of a loop over j, and the locals that differ among a, k, m, n; b, which is declared outside of it, is the same.
CASES = {
    "a value": ([Declare(A, (Read(J),))], "a"),
    "the same value": ([Declare(A, (Read(B),))], ""),
    "values of values": ([Declare(K, (ONE,)), Declare(A, (Read(K),)), change(K, Read(J))], "ka"),
    "a sum": ([Declare(A, (ONE,)), Update(Read(A), "add", Read(J))], "a"),
    "an entry": ([Declare(A, (Load(ROW, (Read(J),)),)), Declare(K, (Load(ROW, (Read(B),)),))], "a"),
    "stored memory": ([Assign(Load(OUT, (Read(J),)), ONE), Declare(A, (Load(OUT, (Read(B),)),))], "a"),
    "random numbers": ([Declare(A, (Op("random", (), I32),))], "a"),
    "an atomic": ([ir.Atomic("atomic_add", Load(OUT, (Read(B),)), ONE, A)], "a"),
    "later in the text": (
        [Declare(A, (ONE,)), Declare(K, (ONE,)), loop(change(A, Read(K)), change(K, Read(M)), change(M, Read(J)))],
        "akm",
    ),
    "a branch": ([Declare(A, (ONE,)), If(DIFFERS, (change(A),))], "a"),
    "the other side": ([Declare(A, (ONE,)), If(DIFFERS, (), (change(A),))], "a"),
    "a branch of all": ([Declare(A, (ONE,)), If(SAME, (change(A),))], ""),
    "branches in a branch": (
        [Declare(A, (ONE,)), If(DIFFERS, (If(SAME, (loop(Update(Read(A), "add", ONE)),)),))],
        "an",
    ),
    "rounds": ([Declare(A, (ONE,)), For("range", (N,), (Read(J),), (change(A),))], "an"),
    "rounds of a while": ([Declare(A, (ONE,)), While(DIFFERS, (change(A),))], "a"),
    "rounds of all": ([Declare(A, (ONE,)), loop(change(A)), While(SAME, (change(A),))], ""),
    "break": ([Declare(A, (ONE,)), loop(jump(DIFFERS), change(A))], "a"),
    "break behind": ([Declare(A, (ONE,)), loop(change(A), jump(DIFFERS))], "a"),
    "break of all": ([Declare(A, (ONE,)), loop(jump(SAME), change(A))], ""),
    "break of a while": ([Declare(A, (ONE,)), While(None, (change(A), jump(DIFFERS)))], "a"),
    "continue": ([Declare(A, (ONE,)), loop(jump(DIFFERS, "continue"), change(A))], "a"),
    "continue in branches": ([Declare(A, (ONE,)), loop(If(DIFFERS, (If(SAME, (Jump("continue"),)),)), change(A))], "a"),
    "break by stored memory": (
        [Declare(A, (ONE,)), loop(jump(Load(OUT, (ONE,))), change(A), Assign(Load(OUT, (Read(J),)), ONE))],
        "a",
    ),
    "locals of one round": ([loop(Declare(A, (ONE,)), jump(DIFFERS), change(A))], ""),
    "break of the loop within": (
        [Declare(A, (ONE,)), Declare(K, (ONE,)), loop(change(K), loop(change(A), jump(DIFFERS)))],
        "a",
    ),
    "what break changed": ([Declare(A, (ONE,)), loop(jump(DIFFERS), change(A)), Declare(K, (Read(A),))], "ak"),
}


@pytest.mark.parametrize("name", CASES)
def test_locals(name):
    body, expected = CASES[name]
    assert {x.name for x in varying_locals(For("range", (J,), (ONE,), tuple(body)))} == {*expected, "j"}


def test_locals_from_outside_differ_where_they_change():
    """The next iteration reads what this one assigned."""
    assert varying_locals(While(SAME, (change(B, operation("add", Read(B), 1)), Declare(A, (Read(B),))))) == {A, B}
