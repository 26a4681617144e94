"""The language of the engine, on programs written by hand."""

import pytest
from printed_programs import text

from taichi_ext import program as ir

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
    other = ir.Local("t", ir.F32)
    program = ir.Program("p", (), (), (ir.Declare(t, (f32(1.0),)), ir.Declare(other, (ir.Read(t),))), ())
    assert "t.2: f32 = t\n" in text(program)


def test_statements_come_in_the_order_of_the_text():
    names = [type(s).__name__ for s in ir.statements(sum_of_squares().body)]
    assert names == ["For", "Declare", "If", "Assign", "Update"]


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


def test_indices_are_operands():
    load = ir.Load(x, (ir.Op("add", (ir.Read(i), ir.Const(1, ir.I32)), ir.I32),))
    changed = ir.rebuilt(load, lambda n: ir.Const(3, ir.I32) if isinstance(n, ir.Read) else n)
    assert changed.container is x
    assert changed.indices[0].args[0].value == 3
    element = ir.Read(ir.Local("v", ir.F32, (2, 2)), (0, ir.Read(i)))
    assert ir.rebuilt(element, lambda n: ir.Const(1, ir.I32) if n is element.index[1] else n).index[0] == 0


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


def test_changes_may_give_several_statements_or_none():
    body = ir.mapped(
        sum_of_squares().body, lambda s: () if isinstance(s, ir.If) else (s, s) if isinstance(s, ir.Update) else s
    )
    assert [type(s).__name__ for s in ir.statements(body)] == ["For", "Declare", "Update", "Update"]


def test_groups():
    group = ir.Struct({"a": f32(1.0), "b": ir.Tensor((f32(2.0), f32(3.0)), (2,))})
    assert [e.value for e in ir.entries(group)] == [1.0, 2.0, 3.0]
    new = ir.regrouped(group, tuple(f32(0.0) for _ in range(3)))
    assert new.members["b"].shape == (2,)


def test_boundaries_hold_values():
    kept = ir.Local("kept", ir.F32)
    boundary = ir.Boundary("mark", "name", {"by": ir.Read(t)}, ir.Load(y, ()), (kept,))
    assert ir.declared(boundary) == (kept,)
    assert len(ir.values_of(boundary)) == 2
    assert "kept: f32 = boundary mark 'name'(by=t) of y[]" in text(ir.Program("p", (), (), (boundary,), ()))


@pytest.mark.parametrize(("name", "is_real", "is_signed", "bits"), [("f32", True, True, 32), ("u8", False, False, 8)])
def test_types(name, is_real, is_signed, bits):
    kind = ir.Type(name)
    assert (kind.is_real, kind.is_signed, kind.bits) == (is_real, is_signed, bits)
