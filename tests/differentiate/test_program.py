"""The language of the engine, on programs written by hand."""

import pytest
from printed_programs import text

from taichi_ext.program import (
    F32,
    I32,
    U1,
    Assign,
    Boundary,
    Const,
    Container,
    Declare,
    Effect,
    For,
    If,
    Load,
    Local,
    Op,
    Program,
    Read,
    Struct,
    Tensor,
    Type,
    Update,
    declared,
    entries,
    mapped,
    rebuilt,
    regrouped,
    statements,
    values_of,
    walk,
    with_values,
)

x, y = Container("x", F32, 1), Container("y", F32, 0)
i, t = Local("i", I32, kind="loop"), Local("t", F32)


def f32(value):
    return Const(value, F32)


def sum_of_squares():
    entry = Load(x, (Read(i),))
    body = (
        Declare(t, (Op("mul", (entry, entry), F32),)),
        If(Op("gt", (Read(t), f32(1.0)), U1), (Assign(Read(t), f32(1.0)),)),
        Update(Load(y, ()), "add", Read(t)),
    )
    return Program("total", (), (), (For("field", (i,), (x,), body),), (x, y))


def test_text():
    assert text(sum_of_squares()) == (
        "program total():\n"
        "    for i in field(x):\n"
        "        t: f32 = (x[i] * x[i])\n"
        "        if (t > 1.0:f32):\n"
        "            t = 1.0:f32\n"
        "        y[] += t\n"
    )


def test_locals_of_one_name_are_told_apart():
    other = Local("t", F32)
    program = Program("p", (), (), (Declare(t, (f32(1.0),)), Declare(other, (Read(t),))), ())
    assert "t.2: f32 = t\n" in text(program)


def test_statements_come_in_the_order_of_the_text():
    names = [type(s).__name__ for s in statements(sum_of_squares().body)]
    assert names == ["For", "Declare", "If", "Assign", "Update"]


def test_rebuilding_keeps_what_is_shared_and_what_does_not_change():
    square = Op("mul", (Read(t), Read(t)), F32)
    double = Op("add", (square, square), F32)
    assert rebuilt(double, lambda n: n) is double
    new = rebuilt(double, lambda n: f32(2.0) if isinstance(n, Read) else n)
    assert new.args[0] is new.args[1]
    assert sum(isinstance(n, Const) for n in walk(new)) == 4


def test_statements_that_do_not_change_stay_themselves():
    (loop,) = sum_of_squares().body
    assert mapped((loop,), lambda s: with_values(s, lambda v: rebuilt(v, lambda n: n)))[0] is loop
    effect = Effect("print", ("x is", Tensor((Read(t), f32(1.0)), (2,))), (), {"sep": " "})
    changed = with_values(effect, lambda v: f32(2.0))
    assert [e.value for e in values_of(changed)] == [2.0, 2.0]
    assert (changed.args[0], changed.keywords) == ("x is", {"sep": " "})


def test_contents_of_values_and_statements():
    entry = Load(x, (Read(i),))
    noise = Op("random", (), F32)
    value = Op("mul", (entry, Op("add", (entry, Read(t)), F32)), F32)
    assert value.contents == ({i, t}, {x}, 2, True)
    assert Op("add", (value, value), F32).contents.size == 5  # as often as it occurs
    assert Update(entry, "add", noise).contents == ({i}, set(), 1, False)  # of a target, the indices
    assert sum_of_squares().body[0].contents == (set(), set(), 0, True)  # without its blocks
    assert f32(1.0).contents == (set(), set(), 0, True)


def test_indices_are_operands():
    load = Load(x, (Op("add", (Read(i), Const(1, I32)), I32),))
    changed = rebuilt(load, lambda n: Const(3, I32) if isinstance(n, Read) else n)
    assert changed.container is x
    assert changed.indices[0].args[0].value == 3
    element = Read(Local("v", F32, (2, 2)), (0, Read(i)))
    assert rebuilt(element, lambda n: Const(1, I32) if n is element.index[1] else n).index[0] == 0


def test_changed_statements():
    program = sum_of_squares()
    seven = {
        n: Const(7, I32) for s in statements(program.body) for v in values_of(s) for n in walk(v) if n.dtype == I32
    }
    body = mapped(program.body, lambda s: with_values(s, lambda v: rebuilt(v, lambda n: seven.get(n, n))))
    assert "t: f32 = (x[7:i32] * x[7:i32])" in text(Program("p", (), (), body, ()))
    assert "x[i]" in text(program)  # which stays as it was


def test_changes_may_give_several_statements_or_none():
    body = mapped(sum_of_squares().body, lambda s: () if isinstance(s, If) else (s, s) if isinstance(s, Update) else s)
    assert [type(s).__name__ for s in statements(body)] == ["For", "Declare", "Update", "Update"]


def test_groups():
    group = Struct({"a": f32(1.0), "b": Tensor((f32(2.0), f32(3.0)), (2,))})
    assert [e.value for e in entries(group)] == [1.0, 2.0, 3.0]
    new = regrouped(group, tuple(f32(0.0) for _ in range(3)))
    assert new.members["b"].shape == (2,)


def test_boundaries_hold_values():
    kept = Local("kept", F32)
    boundary = Boundary("mark", "name", {"by": Read(t)}, Load(y, ()), (kept,))
    assert declared(boundary) == (kept,)
    assert len(values_of(boundary)) == 2
    assert "kept: f32 = boundary mark 'name'(by=t) of y[]" in text(Program("p", (), (), (boundary,), ()))


@pytest.mark.parametrize(("name", "is_real", "is_signed", "bits"), [("f32", True, True, 32), ("u8", False, False, 8)])
def test_types(name, is_real, is_signed, bits):
    kind = Type(name)
    assert (kind.is_real, kind.is_signed, kind.bits) == (is_real, is_signed, bits)
