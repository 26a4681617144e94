"""Locals that differ between iterations, or lanes, of a loop: by their values, and by the paths that lead to them."""

import pytest

import taichi_ext.program as ir
from taichi_ext.analysis.changes import varying_locals
from taichi_ext.program import I32, Assign, Container, Declare, For, If, Jump, Load, Local, Op, Read, Update, While
from taichi_ext.program.build import literal, operation

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
