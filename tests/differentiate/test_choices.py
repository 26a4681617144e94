"""Coefficients that are 0 where a condition does not hold: products and sums of them are such choices, too."""

import math

import taichi_ext.program as ir
from taichi_ext.differentiate.forms.forms import Guarded, times_entry
from taichi_ext.program.build import Builder, add, literal, multiply, negative, operation, select

inside, outside = (ir.Read(ir.Local(name, ir.U1, (), "inside")) for name in ("inside", "outside"))
a, b = (ir.Read(ir.Local(name, ir.F64, (), "user")) for name in "ab")


def number(x, condition=inside):
    return select(condition, literal(x, ir.F64), literal(0, ir.F64))


def test_products_and_sums():
    again = ir.Read(inside.local)
    for made, expected in (
        (multiply(number(1), a), select(inside, a, 0)),
        (multiply(a, number(-1)), select(inside, operation("neg", a), 0)),
        (multiply(number(2), a), select(inside, operation("mul", literal(2, ir.F64), a), 0)),
        (negative(number(1)), number(-1)),
        (add(select(inside, a, 0), select(again, b, 0)), select(inside, operation("add", a, b), 0)),
        (add(select(inside, a, 0), negative(select(again, b, 0))), select(inside, operation("sub", a, b), 0)),
    ):
        assert repr(made) == repr(expected)


def test_others_stay():
    two = select(inside, a, 0), select(outside, b, 0)
    assert repr(add(*two)) == repr(operation("add", *two))
    infinite = number(math.inf)
    assert repr(multiply(infinite, a)) == repr(operation("mul", infinite, a))
    assert repr(negative(infinite)) == repr(operation("neg", infinite))
    other = select(inside, literal(0, ir.F64), literal(1, ir.F64))  # 1 where the condition does not hold
    assert repr(multiply(other, a)) == repr(operation("mul", other, a))


def test_rows_under_a_condition_need_no_other_guard():
    """No entry of a row that is not chosen enters, and a finite number times a zero entry is zero."""
    for guard in (Guarded(number(-1), is_chosen=True), Guarded(number(-1), is_chosen=True, is_again=True)):
        assert repr(times_entry(guard, a)) == repr(select(inside, operation("neg", a), 0))
    guard = Guarded(b, is_chosen=True)
    assert "eq" in repr(times_entry(guard, a))


def test_conditions_stay_visible_to_products():
    builder = Builder()
    builder.frozen.add(inside.local)
    kept = number(-1)
    assert builder.keep(kept) is kept
    assert builder.keep(number(1, outside)) is not kept
    assert len(builder.body) == 1
