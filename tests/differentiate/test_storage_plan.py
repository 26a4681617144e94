"""Where tangents are kept, with reasons, as passes over a program find it."""

from dataclasses import replace
from itertools import pairwise

import pytest
import test_differentiate as programs
from test_differentiate import P, Role, a, at, c, f, i, n, nearest, op, over, s, sum_over_a_loop, times, x, y, z

from taichi_ext.differentiate.transform.forward import differentiate
from taichi_ext.program import F64, Assign, Declare, Local, Place, Program, Read, Update, mapped


def differentiated(body):
    """A program with the parameter x and the output y, and its tangents."""
    placed = mapped(tuple(body), lambda statement: replace(statement, place=Place("spheres.py", 7)))
    program = Program("program", (), (), placed, (x, y, z))
    roles = {x: Role(0, is_fresh=False), y: Role(), z: Role()}
    return differentiate(program, programs.DifferentiationRequest(P, roles, programs.EXTENTS))


def used_twice():
    """A local that two statements use."""
    first = Declare(a, (op("mul", at(x, c(0)), at(x, c(1))),))
    return [over(y, [first, *(Assign(at(t, Read(i)), op("sin", Read(a))) for t in (z, y))])]


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
    text = "\n".join(differentiated(body()).report.lines(P, str))
    for line in lines:
        assert line in text


def rows_of_rows(length):
    """A row, and locals each of which is made of the one before and changes."""
    names = [Local(f"t{number}", F64) for number in range(length)]
    body = [Declare(s, (f(0),)), times(P, n, [Update(Read(s), "add", op("mul", at(x, Read(n)), at(x, Read(n))))])]
    for before, local in pairwise([s, *names]):
        body += [Declare(local, (op("mul", Read(before), f(0.5)),)), Assign(Read(local), op("sin", Read(before)))]
    return [over(y, [*body, Assign(at(y, Read(i)), Read(names[-1]))])]


def test_rows_that_are_made_of_rows_take_no_pass_each():
    short, long = (differentiated(rows_of_rows(length)) for length in (2, 12))
    assert long.passes == short.passes
    reasons = [choice.why for choice in long.report.locals if choice.name.startswith("t")]
    assert reasons == ["it is made of such locals"] * 12
