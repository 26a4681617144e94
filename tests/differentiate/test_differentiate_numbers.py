"""Differentiated programs without Taichi: Python numbers as parameters, given tangents, what is reported and watched."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from program_interpreter import Interpreter

from taichi_ext import program as ir
from taichi_ext.analysis.loops import Extent
from taichi_ext.differentiate.facts.decisions import Device, DifferentiationRequest, Role
from taichi_ext.differentiate.transform.forward import differentiate
from taichi_ext.differentiate.transform.watch import watched
from taichi_ext.program.keys import VALUES

P = 3
x, y = ir.Container("x", ir.F64, 1, shape=(P,)), ir.Container("y", ir.F64, 1, shape=(P,))
i, n = (ir.Local(name, ir.I32, kind="loop") for name in "in")
a, s = ir.Local("a", ir.F64), ir.Local("s", ir.F64)
rate = ir.Local("rate", ir.F64, (), "parameter")
EXTENTS = {c: Extent(c.shape, ()) for c in (x, y)}
X = np.array([0.5, 1.0, 2.0])


def op(name, *args, place=None):
    return ir.Op(name, args, ir.F64, place=place)


def at(container, index):
    return ir.Load(container, (index,))


def made_from(body, **seeds):
    roles = {x: Role(first_column=seeds.pop("first", 0)), y: Role()}
    columns = seeds.pop("columns", P)
    return differentiate(
        ir.Program("k", (), (), tuple(body), (x, y)), DifferentiationRequest(columns, roles, EXTENTS, **seeds)
    )


def ran(made, columns, **given):
    """The contents of all containers after a run, by what they are for."""
    arrays = {x: X.copy(), y: np.zeros(P), **given}
    shadows = dict(made.shadows)
    for what, shadow in shadows.items():
        arrays[shadow] = given.get(what, np.zeros(P * columns))
    Interpreter(arrays).run(made.program.body)
    return {what: arrays[shadow] for what, shadow in shadows.items()}, arrays


def with_a_number():
    """``y[i] = x[i] * (2 * rate) ** 2`` for rate = 3, which Python has folded."""
    twice = ir.FoldedConst(6, ir.I32, op("mul", ir.Const(2, ir.I32), ir.FoldedConst(3.0, ir.F64, ir.Read(rate))))
    square = ir.FoldedConst(36.0, ir.F64, op("pow", twice, ir.Const(2, ir.I32)))
    return [ir.For("field", (i,), (y,), (ir.Assign(at(y, ir.Read(i)), op("mul", at(x, ir.Read(i)), square)),))]


def test_a_number_is_folded_and_has_the_derivative_of_its_source():
    tangents, arrays = ran(made_from(with_a_number(), columns=4, first=1, arguments={rate: 0}), 4)
    assert_allclose(arrays[y], 36 * X)
    J = tangents[y].reshape(P, 4)
    assert_allclose(J[:, 0], 24 * X)
    assert_allclose(J[:, 1:], 36 * np.eye(P))


def test_a_number_that_is_no_parameter_of_the_run_is_a_constant():
    tangents, _ = ran(made_from(with_a_number()), P)
    assert_allclose(tangents[y].reshape(P, P), 36 * np.eye(P))


@pytest.mark.parametrize("by_column", [False, True])
def test_given_tangents(by_column):
    rows, columns = 2, 4
    given = np.arange(8.0).reshape(rows, columns)
    seeds = {"arguments": {rate: 1}, "values": (ir.F64, rows), "device": Device(by_column=by_column)}
    made = differentiate(
        ir.Program("k", (), (), tuple(with_a_number()), (x, y)),
        DifferentiationRequest(columns, {y: Role()}, EXTENTS, **seeds),
    )
    arrays = {x: X.copy(), y: np.zeros(P)}
    shadows = dict(made.shadows)
    arrays[shadows[VALUES]] = (given.T if by_column else given).ravel()
    arrays[shadows[y]] = np.zeros(P * columns)
    Interpreter(arrays).run(made.program.body)
    J = arrays[shadows[y]].reshape(columns, P).T if by_column else arrays[shadows[y]].reshape(P, columns)
    assert_allclose(J, np.outer(24 * X, given[1]))


def at_line(number):
    return ir.Place("k.py", number, function="k")


def test_what_is_not_finite_is_counted_by_its_place():
    counts = ir.Container("counts", ir.I32, 1, shape=(9,))
    large = ir.Const(1e200, ir.F64)
    body = [
        ir.Declare(a, (op("mul", op("mul", at(x, ir.Read(i)), large), large),), place=at_line(2)),
        ir.Declare(s, (op("mul", at(x, ir.Read(i)), at(x, ir.Read(i))),), place=at_line(3)),
        ir.Assign(at(y, ir.Read(i)), op("add", ir.Read(a), ir.Read(s)), place=at_line(4)),
    ]
    made = made_from([ir.For("field", (i,), (y,), tuple(body))])
    program = watched(made, counts, lambda place, of_index=False: None if place is None or of_index else place.line)
    arrays = {x: X.copy(), y: np.zeros(P), counts: np.zeros(9, int)}
    arrays |= {shadow: np.zeros(P * P) for _, shadow in made.shadows}
    Interpreter(arrays).run(program.body)
    assert arrays[counts].nonzero()[0].tolist() == [2, 4]
