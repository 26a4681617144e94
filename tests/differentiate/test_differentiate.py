"""Differentiation of programs written by hand, without Taichi: run by an interpreter, compared with differences."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from program_interpreter import Interpreter

import taichi_ext.program as ir
from taichi_ext.analysis.activity import find_activity, useful_activity
from taichi_ext.analysis.affine import Affine, IntegerForms
from taichi_ext.analysis.loops import Extent
from taichi_ext.differentiate.facts.decisions import DifferentiationRequest, Role
from taichi_ext.differentiate.plan.storage_facts import STRATEGIES
from taichi_ext.differentiate.transform.forward import differentiate
from taichi_ext.program import F64, I32, Assign, Const, Container, Declare, For, If, Local, Op, Program, Read, Update

P, M = 4, 3
x = Container("x", F64, 1, shape=(P,))
y = Container("y", F64, 1, shape=(M,))
z = Container("z", F64, 1, shape=(M,))
i, j, n = (Local(name, I32, kind="loop") for name in "ijn")
a, b, s = (Local(name, F64) for name in "abs")
EXTENTS = {c: Extent(c.shape, ()) for c in (x, y, z)}


def f(value):
    return Const(float(value), F64)


def c(value):
    return Const(value, I32)


def op(name, *args):
    is_truth = name in ("gt", "lt", "ge", "le", "eq")
    return Op(name, args, ir.U1 if is_truth else args[-1].dtype)


def at(container, index):
    return ir.Load(container, (index,))


def over(container, body, variable=i):
    return For("field", (variable,), (container,), tuple(body))


def times(count, variable, body):
    return For("range", (variable,), (c(count),), tuple(body))


def straight_line():
    """Constant columns, a local that is used twice, a choice."""
    first = Declare(a, (op("mul", at(x, c(0)), at(x, c(1))),))
    second = Declare(b, (op("add", op("sin", Read(a)), op("mul", Read(a), at(x, c(3)))),))
    return [over(y, [first, second, Assign(at(y, Read(i)), op("max", op("mul", Read(b), f(0.5)), at(x, c(2))))])]


def symbolic_columns():
    """A column that is known at run time: x[i + 1]."""
    return [over(y, [Assign(at(y, Read(i)), op("exp", op("mul", at(x, op("add", Read(i), c(1))), at(x, c(0)))))])]


def sum_over_a_loop():
    """A sum of columns that a loop counts: a row."""
    inner = Update(Read(s), "add", op("mul", at(x, Read(n)), at(x, Read(n))))
    body = [Declare(s, (f(0),)), times(P, n, [inner]), Assign(at(y, Read(i)), op("sqrt", Read(s)))]
    return [over(y, body)]


def nearest():
    """A local that takes another column in a branch: a slot."""
    branch = If(op("lt", at(x, Read(n)), Read(s)), (Assign(Read(s), at(x, Read(n))),))
    body = [Declare(s, (f(10),)), times(P, n, [branch]), Assign(at(y, Read(i)), op("mul", Read(s), Read(s)))]
    return [over(y, body)]


def intermediate():
    """A field that is written in one loop, read in the next and changed while what was read is in use."""
    first = over(z, [Assign(at(z, Read(i)), op("mul", at(x, Read(i)), at(x, c(3))))])
    read = Declare(a, (op("mul", at(z, c(1)), f(2)),))
    change = Assign(at(z, c(1)), op("sin", at(x, c(0))))
    second = over(y, [read, change, Assign(at(y, Read(j)), op("add", Read(a), at(z, Read(j))))], j)
    return [first, times(1, n, [second])]


def conditional_expression():
    """Only the side that is taken has a derivative."""
    value = op("ifte", op("gt", at(x, c(0)), f(0)), op("log", at(x, c(0))), op("sqrt", at(x, c(1))))
    return [over(y, [Update(at(y, Read(i)), "add", op("mul", value, at(x, Read(i))))])]


def guarded_index():
    """A branch keeps x[i + 2] within x: where it is not taken, the row of y has no such column."""
    branch = If(op("lt", Read(i), c(2)), (Assign(Read(a), at(x, op("add", Read(i), c(2)))),))
    return [over(y, [Declare(a, (f(0.5),)), branch, Assign(at(y, Read(i)), op("mul", Read(a), at(x, Read(i))))])]


def guarded_index_in_a_sum():
    """The same, added to a row of which each entry would get one term."""
    guarded = If(op("lt", Read(n), c(2)), (Assign(Read(a), at(x, op("add", Read(n), c(2)))),))
    inner = [Declare(a, (f(0.5),)), guarded, Update(Read(s), "add", op("mul", Read(a), Read(a)))]
    return [over(y, [Declare(s, (f(0),)), times(P, n, inner), Assign(at(y, Read(i)), op("mul", Read(s), f(2)))])]


PROGRAMS = [straight_line, symbolic_columns, sum_over_a_loop, nearest, intermediate, conditional_expression]
PROGRAMS += [guarded_index, guarded_index_in_a_sum]


def values_after(body, given):
    arrays = {x: given.copy(), y: np.zeros(M), z: np.zeros(M)}
    Interpreter(arrays).run(body)
    return arrays[y]


def differences(body, given):
    truth = np.zeros((M, P))
    for k in range(P):
        step = np.eye(P)[k] * 1e-6
        truth[:, k] = (values_after(body, given + step) - values_after(body, given - step)) / 2e-6
    return truth


def tangents_after(made, given, columns, first_column=0):
    """y and its tangents after a run of a differentiated program."""
    arrays = {x: given.copy(), y: np.zeros(M), z: np.zeros(M)}
    shadows = {what: shadow for what, shadow in made.shadows}
    for container, shadow in shadows.items():
        size = columns * container.shape[0]
        arrays[shadow] = np.full(size, 1e9) if container in made.covered else np.zeros(size)
    interpreter = Interpreter(arrays)
    interpreter.locals[made.first_column] = first_column
    interpreter.run(made.program.body)
    return arrays[y], arrays[shadows[y]].reshape(M, columns)


GIVEN = np.array([0.7, 0.4, 0.3, 1.1])
each_program = pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@each_program
@each_strategy
def test_tangents_are_those_of_differences(make, strategy):
    body = tuple(make())
    program = Program(make.__name__, (), (), body, (x, y, z))
    roles = {x: Role(first_column=0), y: Role(), z: Role()}
    made = differentiate(program, DifferentiationRequest(P, roles, EXTENTS, limits=STRATEGIES[strategy]))
    assert made.first_columns is None and made.first_column is None
    values, tangents = tangents_after(made, GIVEN, P)
    assert_allclose(values, values_after(body, GIVEN))
    assert_allclose(tangents, differences(body, GIVEN), rtol=1e-7, atol=1e-9)


@each_program
@each_strategy
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_a_program_for_one_block_of_columns_computes_others(make, strategy, columns):
    body = tuple(make())
    program = Program(make.__name__, (), (), body, (x, y, z))
    truth = differences(body, GIVEN)
    for first in range(P + 1 - columns):
        roles = {x: Role(first_column=-first), y: Role(), z: Role()}
        seeds = DifferentiationRequest(columns, roles, EXTENTS, limits=STRATEGIES[strategy], first_column=first)
        made = differentiate(program, seeds)
        assert first in made.first_columns
        for other in (n for n in range(P + 1 - columns) if n in made.first_columns):
            tangents = tangents_after(made, GIVEN, columns, other)[1]
            assert_allclose(tangents, truth[:, other : other + columns], rtol=1e-7, atol=1e-9)


# --- analyses ---------------------------------------------------------------------------------------------------------


def test_normal_forms_of_indices():
    k = Local("k", I32)
    twice = op("mul", c(2), Read(i))
    indices = IntegerForms((times(3, i, [Declare(k, (op("add", twice, c(1)),))]),))
    assert indices.form(op("sub", Read(k), c(3))) == Affine(((i, 2),), -2)
    assert indices.form(op("sub", op("add", Read(k), Read(i)), Read(k))) == Affine(((i, 1),))
    assert indices.form(op("mul", Read(i), Read(i))) is None


def test_an_index_that_changes_has_no_normal_form():
    k = Local("k", I32)
    indices = IntegerForms((Declare(k, (c(0),)), times(3, i, [Assign(Read(k), Read(i))])))
    assert indices.form(Read(k)) is None


def test_tangents_that_reach_nothing_are_not_useful():
    compared, stored, stopped = (Local(name, F64) for name in ("compared", "stored", "stopped"))
    stop = ir.Boundary("stop_gradient", None, {}, Read(stored), (stopped,))
    body = over(
        y,
        [
            Declare(a, (at(x, Read(i)),)),
            Declare(compared, (op("mul", Read(a), Read(a)),)),
            Declare(b, (at(x, c(0)),)),
            Declare(stored, (op("add", Read(b), f(1)),)),
            stop,
            If(op("gt", Read(compared), Read(stopped)), (Assign(at(y, Read(i)), Read(stored)),), ()),
        ],
    )
    program = Program("k", (), (), (body,), (x, y))
    found = find_activity(program, [x])
    assert found.locals == {a, b, compared, stored}
    assert useful_activity(program, found).locals == {b, stored}
