"""Conditional expressions that carry tangents as ``if`` statements: only the side that is taken is evaluated."""

from __future__ import annotations

from dataclasses import replace

from taichi_ext.analysis.activity import Activity
from taichi_ext.differentiate.forms.build import literal
from taichi_ext.program import (
    Assign,
    Atomic,
    Body,
    Boundary,
    Call,
    Declare,
    If,
    Local,
    Op,
    Program,
    Read,
    Return,
    Statement,
    Update,
    Value,
    mapped,
    values_of,
    walk,
    with_children,
    with_values,
)


def with_branches(program: Program, activity: Activity) -> Program:
    """The program with an ``if`` statement for each conditional expression that carries a tangent."""
    return replace(program, body=mapped(program.body, lambda s: _split(s, activity)))


def _split(s: Statement, activity: Activity) -> Body:
    if not isinstance(s, (Declare, Assign, Update, Atomic, Return, Call, Boundary)):
        return (s,)
    if not any(_is_branch(node, activity) for value in values_of(s) for node in walk(value)):
        return (s,)
    before: list[Statement] = []
    known: dict[Value, Value] = {}

    def change(value: Value) -> Value:
        if value not in known:
            if _is_branch(value, activity):
                assert isinstance(value, Op)
                known[value] = _joined(value, s, before, activity)
            else:
                known[value] = with_children(value, change)
        return known[value]

    new = with_values(s, change)
    return (*before, new)


def _joined(value: Op, s: Statement, before: list[Statement], activity: Activity) -> Read:
    """A local that takes the value in an ``if`` statement, which is added to ``before``."""
    condition, then, orelse = value.args
    local = Local("value", value.dtype)
    target = Read(local, place=value.place)
    sides = (_split(Assign(target, side, place=s.place), activity) for side in (then, orelse))
    before.append(Declare(local, (literal(0, value.dtype),), place=s.place))
    before.append(If(condition, *sides, place=s.place))
    return target


def _is_branch(value: Value, activity: Activity) -> bool:
    return isinstance(value, Op) and value.name == "ifte" and activity.has(value)
