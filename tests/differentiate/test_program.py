"""The language of the engine, on programs written by hand."""

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
