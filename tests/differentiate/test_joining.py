"""Loops over columns made one in random blocks: the blocks do what they did before."""

from __future__ import annotations

import random

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, integers, outputs, scalars
from numpy.testing import assert_array_equal
from printed_programs import text
from program_interpreter import Interpreter

from taichi_ext import Jacobian
from taichi_ext.program import (
    F64,
    I32,
    U1,
    Assign,
    Body,
    Const,
    Container,
    Declare,
    For,
    If,
    Jump,
    Load,
    Local,
    Op,
    Program,
    Read,
    Statement,
    Update,
    Value,
    statements,
)
from taichi_ext.schedule.loops import with_guarded_sums, with_joined_columns
from taichi_ext.schedule.private_sums import with_counted_columns

BLOCKS = 400


class Blocks:
    """Writes one block: loops over columns of a few arrays, and what may stand between them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.count = rng.choice([3, 17])
        self.locals = [Local(name, F64, (6 * self.count,)) for name in "ab"]
        self.containers = [Container(name, F64, 1, is_argument=True) for name in "JD"]
        self.scalars = [Local(name, F64) for name in "xy"]
        self.rows = [Local(name, I32) for name in "rs"]
        self.inside = [Local(f"inside_{n}", U1, kind="inside") for n in range(2)]

    def row(self) -> Value:
        """The first index of a row, or one that is none."""
        count, first = Const(self.count, I32), Read(self.rows[0])
        options = [
            Const(self.rng.randrange(3) * self.count, I32),
            Const(self.rng.randrange(3), I32),
            Read(self.rng.choice(self.rows)),
            Op("mul", (Read(self.rng.choice(self.rows)), count), I32),
            Op("add", (Op("mul", (count, first), I32), count), I32),
            Op("mul", (Op("add", (first, Const(1, I32)), I32), count), I32),
        ]
        return self.rng.choice(options)

    def index(self, column: Local | None) -> Value:
        if column is None or self.rng.random() < 0.1:
            return self.row()
        k = Read(column)
        shifted = Op("add", (k, Const(self.rng.choice([0, 1, self.count]), I32)), I32)
        pairs = [(self.row(), k), (k, self.row()), (shifted, self.row())]
        return self.rng.choice([k, k, *(Op("add", pair, I32) for pair in pairs)])

    def place(self, column: Local | None) -> Read | Load:
        memory = self.rng.choice([*self.locals, *self.containers])
        index = (self.index(column),)
        return Read(memory, index) if isinstance(memory, Local) else Load(memory, index)

    def value(self, column: Local | None, more: tuple[Local, ...] = ()) -> Value:
        def leaf() -> Value:
            scalar = Read(self.rng.choice([*self.scalars, *more]))
            return self.rng.choice([self.place(column), self.place(column), scalar, Const(0.5, F64)])

        return Op(self.rng.choice(["add", "mul", "sub"]), (leaf(), leaf()), F64) if self.rng.random() < 0.7 else leaf()

    def store(self, column: Local | None, more: tuple[Local, ...] = ()) -> Statement:
        target, value = self.place(column), self.value(column, more)
        return Assign(target, value) if self.rng.random() < 0.6 else Update(target, "add", value)

    def guarded_sum(self, k: Local) -> Statement:
        """An addition to a row where indices lie within, or something like it."""
        x, y = self.rng.choice([self.locals, self.locals[:1] * 2])
        old = Read(x if self.rng.random() < 0.9 else y, (Read(k),))
        no = self.value(k) if self.rng.random() < 0.1 else Const(0.0, F64)
        inside = Read(self.inside[self.rng.random() < 0.1])
        terms = (old, Op("select", (inside, self.value(k), no), F64))
        at = self.index(k) if self.rng.random() < 0.1 else Read(k)
        return Assign(Read(x, (at,)), Op("add", terms if self.rng.random() < 0.9 else terms[::-1], F64))

    def columns(self) -> Statement:
        k, kept = Local("k", I32, kind="column"), Local("w", F64)
        has_kept = self.rng.random() < 0.3
        body: list[Statement] = [Declare(kept, (self.value(k),))] * has_kept
        if self.rng.random() < 0.3:
            body = [self.guarded_sum(k) for _ in range(self.rng.choice([1, 2, 3]))]
        else:
            body += [self.store(k, (kept,) * has_kept) for _ in range(self.rng.choice([1, 1, 2]))]
        count = self.count - (self.rng.random() < 0.1)
        return For("range", (k,), (Const(count, I32),), tuple(body))

    def condition(self) -> Value:
        return Op("gt", (self.value(None), Const(0.1, F64)), I32)

    def other(self, depth: int) -> Statement:
        kind = self.rng.randrange(6 if depth else 4)
        if kind == 0:
            return Declare(Local("t", F64), (self.value(None),))
        if kind == 1:
            return Assign(Read(self.rng.choice(self.scalars)), self.value(None))
        if kind == 2:
            return Assign(Read(self.rng.choice(self.rows)), Const(self.rng.randrange(2), I32))
        if kind == 3:
            return self.store(None)
        if kind == 4:
            return If(self.condition(), self.block(depth - 1), self.block(depth - 1))
        body = self.block(depth - 1)
        if self.rng.random() < 0.3:
            jump = Jump(self.rng.choice(["break", "continue"]))
            body += (If(self.condition(), (jump,)), *self.block(0))
        return For("range", (Local("i", I32, kind="loop"),), (Const(2, I32),), body)

    def block(self, depth: int = 2) -> Body:
        count = self.rng.randint(1, 6)
        return tuple(self.columns() if self.rng.random() < 0.65 else self.other(depth) for _ in range(count))

    def after(self, body: Body, seed: int) -> list[np.ndarray]:
        """The memory after a run of a block."""
        rng = np.random.default_rng(seed)
        state = Interpreter({c: rng.uniform(-1, 1, 6 * self.count) for c in self.containers})
        state.locals.update({local: rng.uniform(-1, 1, local.shape) for local in self.locals})
        state.locals.update({local: rng.uniform() for local in self.scalars})
        state.locals.update({local: int(rng.integers(0, 2)) for local in (*self.rows, *self.inside)})
        with np.errstate(all="ignore"):
            state.run(body)
        return [*state.arrays.values(), *(np.array(state.locals[x]) for x in (*self.locals, *self.scalars))]


def loops(body: Body) -> int:
    return sum(isinstance(s, For) for s in statements(body))


@pytest.mark.sweep
def test_random_blocks_do_what_they_did():
    joined = guarded = 0
    for seed in range(BLOCKS):
        blocks = Blocks(random.Random(seed))
        body = blocks.block()
        found = with_joined_columns(body)
        joined += loops(body) - loops(found)
        sums = with_guarded_sums(found)
        guarded += sum(isinstance(s, If) and s.condition.contents.locals <= {*blocks.inside} for s in statements(sums))
        expected = blocks.after(body, seed)
        for changed in (found, sums, with_counted_columns(sums)):
            shown = text(Program("before", (), (), body, ())) + text(Program("after", (), (), changed, ()))
            for actual, value in zip(blocks.after(changed, seed), expected, strict=True):
                assert_array_equal(actual, value, err_msg=f"seed {seed}\n{shown}")
    assert joined > BLOCKS / 8  # of loops that may not be joined there are more
    assert guarded > BLOCKS / 4


@pytest.mark.sweep
@pytest.mark.usefixtures("ti64")
@pytest.mark.cpu_only("loops over columns are scheduled there alone")
@pytest.mark.chosen_only("tangents of a are rows", "--tangents", "--by-column", "--chunk-size")
def test_rows_of_entries_at_indices_that_are_read_are_added_in_a_branch():
    x, a, y = scalars(np.linspace(0.2, 0.9, 20)), outputs(4), outputs(6)
    which = integers([[(3 * i + j * j) % 4 for j in range(3)] for i in range(6)])

    @ti.kernel
    def k():
        ti.loop_config(serialize=True)
        for b in range(4):
            s = 0.0
            for i in range(20):
                s += x[i] * x[(i + b) % 20]
            a[b] = s
        for i in y:
            t = 0.0
            for j in range(3):
                t += a[which[i, j]] * (1.0 + j)
            y[i] = t * t

    check_jacobian(k, x, y)
    plan = Jacobian(k, x, y)
    plan()
    lines = [line.strip() for line in plan.source.splitlines()]
    branch = lines.index("if inside:")
    assert lines[branch + 1].startswith("for k in range(20)"), plan.source
    assert "select(inside, t" not in lines[branch + 2]
