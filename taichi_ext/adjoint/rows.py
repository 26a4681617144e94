"""Rows of a stencil in lanes as its stage runs forward: LLVM makes vectors of functions that are arithmetic.

In ``for i, j in u: if 0 < i < n - 1 and 0 < j < n - 1: v[i, j] = ti.sin(u[i, j])`` the library is called for each
entry, and in lanes each load under the condition would be a branch. So the loop runs where the condition holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce

import taichi_ext.program as ir
from taichi_ext.adjoint.lanes import neighbours_in_lanes
from taichi_ext.adjoint.sweep import dirty_containers
from taichi_ext.analysis.affine import IntegerForms
from taichi_ext.analysis.changes import draws_random_numbers
from taichi_ext.analysis.intervals import IndexFacts, Interval
from taichi_ext.analysis.loops import loop_bounds
from taichi_ext.program import I32, U1, Load, Read, Value
from taichi_ext.program.build import literal, operation
from taichi_ext.schedule.elementary import elementary_of
from taichi_ext.schedule.lanes import CannotError
from taichi_ext.schedule.loops import nested, spread
from taichi_ext.schedule.machine import Machine
from taichi_ext.simplify.usage import all_values, assigned_locals


def rows_in_lanes(loop: ir.For, machine: Machine) -> ir.For:
    """A parallel loop, whose iterations give the same in any order, with its rows in lanes.

    Raises:
        CannotError: that is not possible, or does not pay.
    """
    bounds, inner = loop_bounds(loop, machine.extents), ir.statements(loop.body)
    if machine.is_checked or not machine.is_fast or bounds is None or not 1 < len(bounds) == len(loop.variables):
        raise CannotError("it is watched or exact, or has no rows")
    stores = [s for s in inner if isinstance(s, ir.Store) and isinstance(s.target, Load)]
    own = {local for s in inner for local in ir.declared(s)}
    if not all(isinstance(s, ir.Assign) for s in stores) or not assigned_locals(loop.body) <= own:
        raise CannotError("it adds to what iterations share")
    if dirty_containers(loop.body) or any(isinstance(s, (ir.For, ir.While, ir.Jump)) for s in inner):
        raise CannotError("it reads what it has stored, or has loops in it")
    if not any(isinstance(v, ir.Op) and elementary_of(v) for s in inner for v in all_values(s)):
        raise CannotError("it has no functions of the library")
    ends, body = _narrowed(loop, [(first, end - 1) for first, end in bounds])
    if any(first < 0 for first, _ in ends) or draws_random_numbers(loop.body):
        raise CannotError("it begins below zero, or draws numbers")
    firsts = {v: first for v, (first, _) in zip(loop.variables, ends, strict=True)}

    def moved(v: Value) -> Value:
        first = firsts.get(v.local, 0) if isinstance(v, Read) else 0
        return ir.Op("add", (v, literal(first, I32)), I32) if first else v

    body = ir.mapped(body, lambda s: ir.with_nodes(s, moved))
    size, *sizes = (last + 1 - first for first, last in ends)

    def in_lanes(row: ir.For) -> ir.For:
        return neighbours_in_lanes(row, sizes[-1:], 0, is_fast=True)

    ranges = zip(loop.variables[1:], [(literal(n, I32),) for n in sizes], strict=True)
    body = nested(ranges, body, loop.place, in_lanes)
    domain = (literal(size, I32),)
    made = ir.For("range", loop.variables[:1], domain, body, loop.config, place=loop.place)
    is_few = machine.threads > 1 and 1 < size < machine.least
    return replace(spread(made, (size,), machine.least) if is_few else made, is_function=True)


def _narrowed(loop: ir.For, ends: list[Interval]) -> tuple[Sequence[Interval], ir.Body]:
    """The range in which a loop does anything, and what it does there."""
    branch = loop.body[0] if len(loop.body) == 1 else None
    if not isinstance(branch, ir.If) or branch.orelse:
        return ends, loop.body
    reads = [Read(v) for v in loop.variables]
    facts = IndexFacts(IntegerForms(loop.body))

    def note(ends: Sequence[Interval]) -> None:
        for v, interval in zip(loop.variables, ends, strict=True):
            facts.set(v, interval)

    note(ends)
    narrow = [facts.where(branch.condition).interval(r) for r in reads]
    if any(first > last for first, last in narrow):
        raise CannotError("it does nothing")
    note(narrow)

    def may_fail(condition: Value) -> bool:
        return all(first <= last for first, last in map(facts.where(condition, holds=False).interval, reads))

    rest = list(filter(may_fail, _terms(branch.condition)))
    if not rest:
        return narrow, branch.then
    return narrow, (replace(branch, condition=reduce(partial(operation, "logical_and"), rest)),)


def _terms(condition: Value) -> list[Value]:
    """The conditions that all hold where one does."""
    if isinstance(condition, ir.Op) and condition.name == "logical_and" and condition.dtype == U1:
        return [term for a in condition.args for term in _terms(a)]
    return [condition]
