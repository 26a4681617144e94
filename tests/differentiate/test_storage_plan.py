"""Where tangents are kept is planned first; what a plan lacks is an internal error, never a wrong derivative."""

from dataclasses import replace
from itertools import pairwise

import pytest
from test_differentiate import (
    EXTENTS,
    DifferentiationRequest,
    P,
    Role,
    a,
    at,
    c,
    f,
    i,
    n,
    nearest,
    op,
    over,
    s,
    sum_over_a_loop,
    times,
    x,
    y,
    z,
)

from taichi_ext import InternalError
from taichi_ext.differentiate.forms.entry_sites import Blocks
from taichi_ext.differentiate.plan.storage_plan import StorageKey, Table, UnplannedError
from taichi_ext.differentiate.transform.forward import emit_tangents, find_facts, plan_storage
from taichi_ext.program import F64, Assign, Declare, Local, Place, Program, Read, Update, mapped


def planned(body):
    """The plan of a program with the parameter x and the output y, the facts, and the blocks."""
    placed = mapped(tuple(body), lambda statement: replace(statement, place=Place("spheres.py", 7)))
    program = Program("program", (), (), placed, (x, y, z))
    blocks = Blocks(P)
    facts, _ = find_facts(
        program, DifferentiationRequest(P, {x: Role(0, is_fresh=False), y: Role(), z: Role()}, EXTENTS)
    )
    return *plan_storage(facts, blocks), blocks


def used_twice():
    """A local that two statements use."""
    first = Declare(a, (op("mul", at(x, c(0)), at(x, c(1))),))
    return [over(y, [first, *(Assign(at(t, Read(i)), op("sin", Read(a))) for t in (z, y))])]


def without(table, key):
    return Table(table.name, {k: v for k, v in table.items() if k != key}, is_frozen=True)


@pytest.mark.parametrize(
    ("body", "reason"), [(sum_over_a_loop, "iterations of a loop add columns to it"), (nearest, "")]
)
def test_a_plan_has_a_row_where_columns_add_up(body, reason):
    plan, _, _ = planned(body())
    facts = plan.storages[StorageKey(s)]
    assert facts.why_row == reason
    assert facts.slots == 1


def test_a_local_that_is_used_twice_is_planned_with_a_reason():
    plan, _, _ = planned(used_twice())
    assert [(local.name, why) for local, why in plan.accumulated.items()] == [("a", "it is used more than once")]


@pytest.mark.parametrize("body", [sum_over_a_loop, nearest])
def test_emission_takes_the_plan_as_it_is(body):
    plan, facts, blocks = planned(body())
    before = dict(plan.storages)
    assert emit_tangents(facts, plan, blocks).report.locals == plan.locals
    assert dict(plan.storages) == before


@pytest.mark.parametrize("body", [sum_over_a_loop, nearest])
def test_a_local_that_was_not_planned_is_an_internal_error(body):
    plan, facts, blocks = planned(body())
    poor = replace(plan, storages=without(plan.storages, StorageKey(s)))
    with pytest.raises(InternalError, match=r'"spheres.py", line 7(.|\n)*internal error(.|\n)*local s(.|\n)*report'):
        emit_tangents(facts, poor, blocks)


def test_a_local_that_is_used_twice_must_be_planned_so():
    plan, facts, blocks = planned(used_twice())
    (local,) = plan.accumulated
    with pytest.raises(InternalError, match="accumulated of local a: it is used more than once"):
        emit_tangents(facts, replace(plan, accumulated=without(plan.accumulated, local)), blocks)


def test_a_frozen_table_cannot_change():
    table = Table("serial", {"a": "a reason"}, is_frozen=True)
    table.require("a", "a reason")
    table.drop("b")
    for change in (lambda: table.require("a", "another"), lambda: table.note("b", ""), lambda: table.drop("a")):
        with pytest.raises(UnplannedError, match="serial of"):
            change()


def test_an_empty_loop_needs_no_storage():
    assert planned([over(y, [])])[0].locals == ()


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (
            used_twice,
            ["local a, line 7: its tangent is computed where it is declared, since it is used more than once"],
        ),
        (
            sum_over_a_loop,
            ["local s, line 7: all 4 columns in local array", "since iterations of a loop add columns to it"],
        ),
        (nearest, ["1 indexed columns, since it changes"]),
    ],
)
def test_the_report_names_each_decision_and_its_reason(body, lines):
    plan, facts, blocks = planned(body())
    report = emit_tangents(facts, plan, blocks).report
    text = "\n".join(report.lines(P, str))
    for line in lines:
        assert line in text


def rows_of_rows(length):
    """A row, and locals each of which is made of the one before and changes."""
    names = [Local(f"t{number}", F64) for number in range(length)]
    body = [Declare(s, (f(0),)), times(P, n, [Update(Read(s), "add", op("mul", at(x, Read(n)), at(x, Read(n))))])]
    for before, local in pairwise([s, *names]):
        body += [Declare(local, (op("mul", Read(before), f(0.5)),)), Assign(Read(local), op("sin", Read(before)))]
    return [over(y, [*body, Assign(at(y, Read(i)), Read(names[-1]))])]


def test_rows_that_are_made_of_rows_take_no_walk_each():
    short, long = (planned(rows_of_rows(length))[0] for length in (2, 12))
    assert long.walks == short.walks
    reasons = [facts.why_row for key, facts in long.storages.items() if key.local.name.startswith("t")]
    assert reasons == ["it is made of such locals"] * 12
