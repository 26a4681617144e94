"""Loops over columns that are counted in random blocks: the blocks do what they did before."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from printed_programs import text
from program_interpreter import Interpreter

from taichi_ext.program import (
    F64,
    I32,
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

    def columns(self) -> Statement:
        k, kept = Local("k", I32, kind="column"), Local("w", F64)
        has_kept = self.rng.random() < 0.3
        body: list[Statement] = [Declare(kept, (self.value(k),))] * has_kept
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
        state.locals.update({local: int(rng.integers(0, 2)) for local in self.rows})
        with np.errstate(all="ignore"):
            state.run(body)
        return [*state.arrays.values(), *(np.array(state.locals[x]) for x in (*self.locals, *self.scalars))]


def loops(body: Body) -> int:
    return sum(isinstance(s, For) for s in statements(body))


@pytest.mark.sweep
def test_random_blocks_do_what_they_did():
    counted = 0
    for seed in range(BLOCKS):
        blocks = Blocks(random.Random(seed))
        body = blocks.block()
        changed = with_counted_columns(body)
        counted += loops(body) - loops(changed)
        shown = text(Program("before", (), (), body, ())) + text(Program("after", (), (), changed, ()))
        for actual, value in zip(blocks.after(changed, seed), blocks.after(body, seed), strict=True):
            assert_array_equal(actual, value, err_msg=f"seed {seed}\n{shown}")
    assert counted > BLOCKS / 8
