"""Turn conditional expressions that carry tangents into ``if`` statements: only the chosen side is evaluated."""

from __future__ import annotations

from dataclasses import replace

import taichi_ext.program as ir
from taichi_ext.analysis.activity import Activity
from taichi_ext.program.build import literal


def with_branches(program: ir.Program, activity: Activity) -> ir.Program:
    """The program with an ``if`` statement for each conditional expression that carries a tangent."""
    return replace(program, body=ir.mapped(program.body, lambda s: _split(s, activity)))


def _split(s: ir.Statement, activity: Activity) -> ir.Body:
    if not isinstance(s, ir.WITH_TANGENTS):
        return (s,)
    if not any(_is_branch(node, activity) for value in ir.values_of(s) for node in ir.walk(value)):
        return (s,)
    before: list[ir.Statement] = []
    known: dict[ir.Value, ir.Value] = {}

    def change(value: ir.Value) -> ir.Value:
        if value not in known:
            if _is_branch(value, activity):
                assert isinstance(value, ir.Op)
                known[value] = _joined(value, s, before, activity)
            else:
                known[value] = ir.with_children(value, change)
        return known[value]

    new = ir.with_values(s, change)
    return (*before, new)


def _joined(value: ir.Op, s: ir.Statement, before: list[ir.Statement], activity: Activity) -> ir.Read:
    """A local that takes the value in an ``if`` statement, which is added to ``before``."""
    condition, then, orelse = value.args
    local = ir.Local("value", value.dtype)
    target = ir.Read(local, place=value.place)
    sides = (_split(ir.Assign(target, side, place=s.place), activity) for side in (then, orelse))
    before.append(ir.Declare(local, (literal(0, value.dtype),), place=s.place))
    before.append(ir.If(condition, *sides, place=s.place))
    return target


def _is_branch(value: ir.Value, activity: Activity) -> bool:
    return isinstance(value, ir.Op) and value.name == "ifte" and activity.has(value)
