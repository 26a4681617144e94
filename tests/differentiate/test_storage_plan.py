"""Where tangents are kept, with reasons, as passes over a program find it."""

from dataclasses import replace
from itertools import pairwise

import pytest
import test_differentiate as programs
from test_differentiate import P, Role, a, at, c, f, i, n, nearest, op, over, s, sum_over_a_loop, times, x, y, z

from taichi_ext.differentiate.transform.forward import differentiate
from taichi_ext.program import F64, Assign, Declare, Local, Place, Program, Read, Update, mapped

W = replace(z, name="w", shape=(40,))


def differentiated(body):
    """A program with the parameter x and the output y, and its tangents."""
    placed = mapped(tuple(body), lambda statement: replace(statement, place=Place("spheres.py", 7)))
    program = Program("program", (), (), placed, (x, y, z, W))
    roles = {x: Role(0, is_fresh=False), y: Role(), z: Role(), W: Role()}
    extents = {**programs.EXTENTS, W: replace(programs.EXTENTS[z], shape=W.shape)}
    return differentiate(program, programs.DifferentiationRequest(P, roles, extents))


def used_twice():
    """A local that two statements use."""
    first = Declare(a, (op("mul", at(x, c(0)), at(x, c(1))),))
    return [over(y, [first, *(Assign(at(t, Read(i)), op("sin", Read(a))) for t in (z, y))])]


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (used_twice, ["local a, line 7: its tangent is computed where it is declared, since it is used more than"]),
        (sum_over_a_loop, ["local s, line 7: all 4 columns in local array", "iterations of a loop add columns to it"]),
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


def chain(length):
    """Locals that are made of the two before and of entries with all columns."""
    names = [Local(f"t{number}", F64) for number in range(length)]
    body = [Declare(local, (at(W, c(k)),)) for k, local in enumerate(names[:2])]
    for k in range(2, length):
        product = op("mul", op("sin", Read(names[k - 1])), Read(names[k - 2]))
        body.append(Declare(names[k], (op("add", product, at(W, c(k))),)))
    stored = Assign(at(W, Read(i)), op("mul", at(x, c(0)), at(x, c(1))))
    return [over(W, [stored]), over(y, [*body, Assign(at(y, Read(i)), Read(names[-1]))])]


def test_tangents_of_a_chain_of_locals_do_not_grow_with_its_square():
    small, middle, large = (differentiated(chain(length)).report.costs.total for length in (4, 12, 20))
    assert large - middle == middle - small > 0


def test_rows_that_are_made_of_rows_take_no_pass_each():
    short, long = (differentiated(rows_of_rows(length)) for length in (2, 12))
    assert long.passes == short.passes
    reasons = [choice.why for choice in long.report.locals if choice.name.startswith("t")]
    assert reasons == ["it is made of such locals"] * 12
