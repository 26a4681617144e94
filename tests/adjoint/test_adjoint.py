"""Adjoints of programs written by hand, without Taichi: run by an interpreter, compared with differences."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from program_interpreter import Interpreter

import taichi_ext.program as ir
from taichi_ext.adjoint import adjoint_array, adjoint_of, contention, lanes, staged
from taichi_ext.adjoint import costly as costly_values
from taichi_ext.analysis.activity import find_activity
from taichi_ext.analysis.loops import Extent
from taichi_ext.program import F64, I32, For, If, Jump, Local, Op, Program, Read, Update, statements, values_of, walk
from taichi_ext.schedule.machine import Machine
from taichi_ext.simplify import simplify

N = 5
x, y, z = (ir.Container(name, F64, 1, shape=(N,)) for name in "xyz")
EXTENTS = {container: Extent((N,), ()) for container in (x, y, z)}
GIVEN = {x: np.array([0.7, 0.4, 0.3, 1.1, 0.9]), y: np.array([0.2, 0.5, 0.1, 0.8, 0.6]), z: np.linspace(0.3, 0.5, N)}
i, j, n = (Local(name, I32, kind="loop") for name in "ijn")
a, b, s = (Local(name, F64) for name in "abs")
count = Local("count", I32)
pair = Local("pair", F64, (2,))
places = Local("places", I32, (2,))


def value(v):
    return v if not isinstance(v, (int, float)) else ir.Const(v, F64 if isinstance(v, float) else I32)


def op(name, *args):
    values = tuple(map(value, args))
    return Op(name, values, ir.U1 if name in ("gt", "lt", "ge", "le", "eq") else values[-1].dtype)


def at(container, index):
    return ir.Load(container, (value(index),))


def put(target, v):
    return ir.Assign(Read(target) if isinstance(target, Local) else target, value(v))


def let(local, *values):
    return ir.Declare(local, tuple(map(value, values)))


def over(container, *body, variable=i):
    return For("field", (variable,), (container,), body)


def times(variable, ends, *body):
    return For("range", (variable,), tuple(map(value, ends)), body)


def around(shift):
    return op("mod", op("add", Read(i), shift), N)


def straight_line():
    """A local that is used twice, and a choice."""
    product = let(a, op("mul", at(x, Read(i)), at(x, around(1))))
    total = op("add", op("sin", Read(a)), op("mul", Read(a), at(y, 0)))
    return [over(y, product, put(at(z, Read(i)), op("max", total, at(x, 2))))]


def recurrence():
    """A loop that carries a number, with a branch: a tape in a local array."""
    step = put(s, op("add", op("mul", Read(s), op("sin", Read(s))), at(x, around(Read(n)))))
    damp = If(op("gt", Read(s), 1.0), (put(s, op("mul", Read(s), 0.5)),), ())
    return [over(y, let(s, at(y, Read(i))), times(n, (7,), step, damp), put(at(z, Read(i)), Read(s)))]


def of_unknown_length():
    """Loops within loops whose numbers of iterations are not known: the stack."""
    inner = times(
        n, (op("add", Read(j), 1),), put(s, op("mul", Read(s), op("cos", op("add", Read(s), at(x, Read(n))))))
    )
    outer = times(j, (op("sub", N, Read(i)),), inner, put(s, op("add", op("mul", Read(s), Read(s)), 0.5)))
    return [over(y, let(s, at(y, Read(i))), outer, put(at(z, Read(i)), Read(s)))]


def left_early():
    """``while`` with ``continue`` and ``break``."""
    body = (
        put(count, op("add", Read(count), 1)),
        put(s, op("mul", Read(s), op("add", 1.0, at(x, Read(i))))),
        If(op("eq", op("mod", Read(count), 3), 0), (Jump("continue"),), ()),
        If(op("gt", Read(s), 9.0), (put(s, op("sqrt", Read(s))), Jump("break")), ()),
        put(s, op("add", Read(s), at(y, around(Read(count))))),
    )
    rounds = ir.While(op("lt", Read(count), 20), body)
    return [over(y, let(s, at(y, Read(i))), let(count, 0), rounds, put(at(z, Read(i)), op("mul", Read(s), Read(s))))]


def in_place():
    """Gauss-Seidel in one thread: overwritten numbers are in a log."""
    mean = op("mul", 0.5, op("add", at(x, Read(j)), at(x, op("add", Read(j), 1))))
    change = put(at(x, op("add", Read(j), 1)), op("add", mean, op("sin", at(x, op("add", Read(j), 1)))))
    sweep = times(j, (N - 1,), change)
    return [times(n, (1,), times(i, (3,), sweep)), over(z, put(at(z, Read(i)), op("mul", at(x, Read(i)), at(y, 1))))]


def local_array():
    """A local array, of which a computed entry changes in a branch in a loop."""
    entry = Read(pair, (op("mod", Read(n), 2),))
    branch = If(
        op("gt", entry, 0.5), (put(entry, op("mul", entry, at(y, Read(n)))),), (Update(entry, "add", value(0.3)),)
    )
    last = op("mul", Read(pair, (0,)), op("sin", Read(pair, (1,))))
    return [over(z, let(pair, at(x, Read(i)), at(x, around(2))), times(n, (N,), branch), put(at(z, Read(i)), last))]


def stencil():
    """Neighbours: two colours where there are threads."""
    inside = op("ifte", op("gt", Read(i), 0), at(x, op("sub", Read(i), 1)), at(y, Read(i)))
    return [over(z, put(at(z, Read(i)), op("mul", inside, op("exp", at(x, Read(i))))))]


def sums():
    """Many additions to few entries: sums of each thread."""
    body = times(n, (N,), Update(at(z, 1), "add", op("mul", at(x, Read(n)), at(y, Read(i)))))
    return [over(y, body), over(y, Update(at(z, 2), "sub", op("sqrt", at(z, 1))))]


def sums_of_sums():
    """Additions to an entry that the same loop reads: the order of the way back counts."""
    return [
        over(z, times(n, (3,), Update(at(z, Read(i)), "add", op("mul", op("sin", at(z, Read(i))), at(x, Read(n))))))
    ]


def all_pairs():
    """Entries that an inner loop names by its variable alone."""
    pair = op("exp", op("mul", op("sub", at(x, Read(i)), at(x, Read(n))), at(y, Read(n))))
    return [over(z, let(s, 0.0), times(n, (N,), Update(Read(s), "add", pair)), put(at(z, Read(i)), Read(s)))]


def costly():
    """Costly values beside adjoints that do not change in the loop, or are memory that changes behind it."""
    quotient = op("truediv", op("sin", at(x, Read(n))), op("add", at(y, Read(n)), op("exp", at(x, Read(i)))))
    loop = times(
        n, (N,), Update(Read(s), "add", quotient), Update(at(z, Read(i)), "add", op("mul", quotient, at(y, 0)))
    )
    return [over(z, let(s, 0.0), loop, put(at(z, Read(i)), op("mul", op("mul", Read(s), Read(s)), at(z, Read(i)))))]


def last_counts():
    """A number that each iteration overwrites: the last one has the derivative."""
    loop = times(n, (op("add", Read(i), 1),), put(s, op("mul", at(x, Read(n)), at(y, Read(n)))))
    return [over(z, let(s, 1.0), loop, put(at(z, Read(i)), op("sin", Read(s))))]


def crossing():
    """A local of the kernel that a parallel loop adds to, and a returned number."""
    add = over(x, Update(Read(s), "add", op("mul", at(x, Read(i)), at(x, Read(i)))))
    return [let(s, 0.0), add, over(z, put(at(z, Read(i)), op("mul", Read(s), at(y, Read(i))))), ir.Return((Read(s),))]


def taken_numbers():
    """An atomic operation with a result: the order of the iterations counts."""
    take = ir.Atomic("atomic_max", at(z, 0), op("mul", at(x, Read(i)), at(y, Read(i))), b)
    return [over(x, take, put(at(y, Read(i)), op("add", op("mul", Read(b), 2.0), at(x, Read(i))))), over(z, doubled())]


def doubled():
    return put(at(z, Read(i)), op("add", op("mul", 2.0, at(z, Read(i))), at(y, Read(i))))


def with_steps():
    """Ranges that go up and down in steps."""
    up = times(n, (1, N, 2), put(s, op("mul", Read(s), op("add", 1.0, at(x, Read(n))))))
    down = times(j, (N - 1, 0, -3), put(s, op("add", op("sin", Read(s)), at(x, Read(j)))))
    return [over(z, let(s, at(y, Read(i))), up, down, put(at(z, Read(i)), Read(s)))]


def search():
    """Places that a loop finds, in an array that each of two rounds overwrites: no number in the loop has an adjoint."""
    size = op("mul", at(x, Read(n)), at(y, Read(i)))
    slot = Read(places, (op("mod", Read(count), 2),))
    found = If(op("gt", size, 0.3), (put(slot, Read(n)), put(count, op("add", Read(count), 1))), ())
    both = op("mul", at(x, Read(places, (value(0),))), at(y, Read(places, (value(1),))))
    term = put(s, op("add", op("sin", Read(s)), both))
    rounds = times(j, (2,), times(n, (op("sub", N, Read(j)),), let(b, size), found), term)
    return [over(z, let(s, 0.1), let(count, 0), let(places, 0, 1), rounds, put(at(z, Read(i)), Read(s)))]


PROGRAMS = [straight_line, recurrence, of_unknown_length, left_early, in_place, local_array, stencil, sums, crossing]
PROGRAMS += [costly, last_counts, sums_of_sums, all_pairs, taken_numbers, with_steps, search]


class Stages:
    """The stages of a program, run by the interpreter."""

    def __init__(self, make, threads):
        self.program = Program("program", (), (), tuple(make()), (x, y, z))
        self.machine = Machine(threads, extents=EXTENTS)
        self.staged = staged(self.program, EXTENTS)
        self.crossing = {c: np.zeros(size) for c, size in self.staged.own.items()}

    def forward(self, given):
        """The memory before each stage and at the end."""
        arrays = {c: v.copy() for c, v in (*given.items(), *self.crossing.items())}
        states = []
        for stage in self.staged.stages:
            states.append({c: v.copy() for c, v in arrays.items()})
            Interpreter(arrays).run(stage.original)
        return [*states, arrays]

    def adjoint(self, stage, active, width=1):
        activity = find_activity(Program("stage", (), (), stage.body, ()), active)
        sizes = {c: (len(v),) for c, v in (*GIVEN.items(), *self.crossing.items())}
        arrays = {c: adjoint_array(c, f"adj_{c.name}", sizes[c], width) for c in (activity.containers | active)}
        made = adjoint_of(stage, activity, arrays, self.machine, width)
        # without numbers that the way back does not need, which are not on the tape
        body = simplify(Program("adjoint", (), (), made.body, ())).body
        return replace(made, body=body), activity.containers

    def gradient(self, given, cotangents, tape_size=10_000):
        """The adjoints of x and y, for cotangents of z along the last axis."""
        states, active, made = self.forward(given), frozenset((x, y)), []
        width = cotangents.shape[1]
        for stage in self.staged.stages:
            found, active = self.adjoint(stage, active, width)
            made.append(found)
        adjoints = {c: np.zeros(len(v) * width) for c, v in states[0].items()}
        adjoints[z][:] = cotangents.ravel()
        status = np.array([0, 0, tape_size, tape_size])
        for found, before in zip(reversed(made), states[-2::-1], strict=True):
            arrays = {c: v.copy() for c, v in before.items()}
            own = {array: np.zeros(self.machine.threads * 64 * width) for array in found.own.values()}
            tapes = dict(zip(found.tape.arrays, (np.zeros(tape_size), np.zeros(tape_size, int), status), strict=True))
            Interpreter({**arrays, **own, **tapes, **{f.container: adjoints[c] for c, f in found.arrays.items()}}).run(
                found.body
            )
            for c, array in found.own.items():
                adjoints[c] += own[array][: adjoints[c].size]
            for c, v in before.items():
                assert status[:2].any() or (arrays[c] == v).all(), f"{c.name} is not as it was"
        return adjoints[x].reshape(N, width), adjoints[y].reshape(N, width), status


def differences(stages, step=1e-6):
    """J of z with respect to x and y."""
    found = []
    for c in (x, y):
        for k in range(N):
            sides = [{**GIVEN, c: GIVEN[c] + sign * step * np.eye(N)[k]} for sign in (1, -1)]
            up, down = (stages.forward(given)[-1][z] for given in sides)
            found.append((up - down) / (2 * step))
    return np.array(found)


def drawn():
    """Random numbers, some of them in a branch in a loop."""
    new = let(a, Op("random", (), F64))
    kick = If(
        op("gt", Read(a), 0.5), (put(s, op("add", Read(s), op("mul", at(x, Read(i)), Op("random", (), F64)))),), ()
    )
    return [
        over(z, let(s, at(y, Read(i))), times(n, (3,), new, kick), put(at(z, Read(i)), op("mul", Read(s), Read(s))))
    ]


each_program = pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)


@each_program
@pytest.mark.parametrize("threads", [1, 4])
def test_adjoints_are_those_of_differences(make, threads):
    stages = Stages(make, threads)
    truth = differences(stages)
    cotangents = np.random.default_rng(0).standard_normal((N, 1))
    *found, status = stages.gradient(GIVEN, cotangents)
    assert status[:2].tolist() == [0, 0]
    assert_allclose(np.concatenate(found), truth @ cotangents, rtol=1e-7, atol=1e-8)


@each_program
def test_several_cotangents_go_back_together(make):
    stages = Stages(make, 2)
    *found, _ = stages.gradient(GIVEN, np.eye(N)[:, :3])
    assert_allclose(np.concatenate(found), differences(stages)[:, :3], rtol=1e-7, atol=1e-8)


def test_what_has_no_adjoint_is_not_gone_back_through():
    """The search is in the forward part, and in that of an iteration on the way back."""
    stages = Stages(search, 1)
    body = stages.adjoint(stages.staged.stages[0], frozenset((x, y)))[0].body
    nodes = [v for s in statements(body) for value in values_of(s) for v in walk(value)]
    assert sum(isinstance(v, Op) and v.name == "gt" for v in nodes) == 2


def test_draws_are_recorded_and_read_again():
    stages = Stages(drawn, 1)
    (stage,) = stages.staged.stages
    states = stages.forward(GIVEN)
    stages.crossing = {c: states[-1][c] for c in stage.draws}
    assert all(len(np.unique(v)) > 1 for v in stages.crossing.values())
    stages.staged.stages[0] = replace(stage, original=stage.again)
    assert_array_equal(stages.forward(GIVEN)[-1][z], states[-1][z])
    cotangents = np.random.default_rng(1).standard_normal((N, 1))
    *found, _ = stages.gradient(GIVEN, cotangents)
    assert_allclose(np.concatenate(found), differences(stages) @ cotangents, rtol=1e-7, atol=1e-8)


@each_program
def test_any_costly_value_can_be_kept(make, monkeypatch):
    monkeypatch.setattr(costly_values, "LEAST_COST", 1)
    test_adjoints_are_those_of_differences(make, 1)


def test_long_bodies_are_gone_through_once():
    """All that the last value of a chain is computed from; to go from each to the ones before it would be too deep."""
    chain = [let(Local("a", F64), 1.0)]
    for _ in range(2000):
        chain.append(let(Local("a", F64), op("sin", Read(chain[-1].local))))
    assert costly_values.cone_of(chain[-1], costly_values.single_declarations(chain)) == chain


@pytest.mark.parametrize("make", [of_unknown_length, in_place], ids=["tape", "log"])
def test_a_tape_that_is_too_small_says_what_is_missing(make):
    stages = Stages(make, 1)
    cotangents = np.ones((N, 1))
    size = 4
    *_, status = stages.gradient(GIVEN, cotangents, size)
    assert status[:2].max() > 0
    for _ in range(3):  # loops within the way back are met once there is room for those around them
        size += status[:2].max()
        *found, status = stages.gradient(GIVEN, cotangents, size)
    assert status[:2].tolist() == [0, 0]
    assert_allclose(np.concatenate(found), differences(stages) @ cotangents, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("little", [0, contention.LITTLE_WORK], ids=["two colours", "serial"])
def test_a_loop_over_neighbours_runs_in_two_colours_or_one_thread_without_atomics(monkeypatch, little):
    monkeypatch.setattr(contention, "LITTLE_WORK", little)
    stages = Stages(stencil, 4)
    made, _ = stages.adjoint(stages.staged.stages[0], frozenset((x, y)))
    assert [(s.kind, s.config) for s in made.body] == (
        [("range", {"serialize": True})] if little else [("range", {})] * 2
    )
    assert not [s for s in statements(made.body) if isinstance(s, Update)]
    test_adjoints_are_those_of_differences(stencil, 4)
    test_several_cotangents_go_back_together(stencil)


def test_few_entries_have_sums_of_each_thread():
    stages = Stages(sums, 2)
    made, _ = stages.adjoint(stages.staged.stages[0], frozenset((x, y)))
    assert x in made.own and y not in made.own  # an iteration owns its entry of y


def test_sums_over_lanes_are_those_of_differences(monkeypatch):
    monkeypatch.setattr(lanes, "FEWEST", 2)
    test_adjoints_are_those_of_differences(all_pairs, 4)
    test_several_cotangents_go_back_together(all_pairs)


def test_zero_times_infinity_is_zero_where_adjoints_are_guarded():
    """z = sqrt(x sin x) at x = 0: the partial of the square is 0, that of the root infinite."""

    def make():
        square = op("mul", at(x, Read(i)), op("sin", at(x, Read(i))))
        return [over(z, put(at(z, Read(i)), op("pow", square, 0.5)))]

    stages = Stages(make, 1)
    activity = find_activity(stages.program, [x])
    arrays = {c: adjoint_array(c, f"adj_{c.name}", (N,)) for c in (x, z)}
    for is_guarded in (False, True):
        made = adjoint_of(stages.staged.stages[0], activity, arrays, stages.machine, 1, is_guarded=is_guarded)
        adjoints = {arrays[x].container: np.zeros(N), arrays[z].container: np.ones(N)}
        with np.errstate(all="ignore"):
            Interpreter({x: np.zeros(N), y: np.zeros(N), z: np.zeros(N), **adjoints}).run(made.body)
        assert_array_equal(adjoints[arrays[x].container], 0.0 if is_guarded else np.nan)
