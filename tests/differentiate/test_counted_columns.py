"""Loops over columns that are counted in random blocks: the blocks do what they did before."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from printed_programs import text
from program_interpreter import Interpreter

from taichi_ext import program as ir
from taichi_ext.schedule.private_sums import with_counted_columns

BLOCKS = 400


class Blocks:
    """Writes one block: loops over columns of a few arrays, and what may stand between them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.count = rng.choice([3, 17])
        self.locals = [ir.Local(name, ir.F64, (6 * self.count,)) for name in "ab"]
        self.containers = [ir.Container(name, ir.F64, 1, is_argument=True) for name in "JD"]
        self.scalars = [ir.Local(name, ir.F64) for name in "xy"]
        self.rows = [ir.Local(name, ir.I32) for name in "rs"]

    def row(self) -> ir.Value:
        """The first index of a row, or one that is none."""
        count, first = ir.Const(self.count, ir.I32), ir.Read(self.rows[0])
        options = [
            ir.Const(self.rng.randrange(3) * self.count, ir.I32),
            ir.Const(self.rng.randrange(3), ir.I32),
            ir.Read(self.rng.choice(self.rows)),
            ir.Op("mul", (ir.Read(self.rng.choice(self.rows)), count), ir.I32),
            ir.Op("add", (ir.Op("mul", (count, first), ir.I32), count), ir.I32),
            ir.Op("mul", (ir.Op("add", (first, ir.Const(1, ir.I32)), ir.I32), count), ir.I32),
        ]
        return self.rng.choice(options)

    def index(self, column: ir.Local | None) -> ir.Value:
        if column is None or self.rng.random() < 0.1:
            return self.row()
        k = ir.Read(column)
        shifted = ir.Op("add", (k, ir.Const(self.rng.choice([0, 1, self.count]), ir.I32)), ir.I32)
        pairs = [(self.row(), k), (k, self.row()), (shifted, self.row())]
        return self.rng.choice([k, k, *(ir.Op("add", pair, ir.I32) for pair in pairs)])

    def place(self, column: ir.Local | None) -> ir.Read | ir.Load:
        memory = self.rng.choice([*self.locals, *self.containers])
        index = (self.index(column),)
        return ir.Read(memory, index) if isinstance(memory, ir.Local) else ir.Load(memory, index)

    def value(self, column: ir.Local | None, more: tuple[ir.Local, ...] = ()) -> ir.Value:
        def leaf() -> ir.Value:
            scalar = ir.Read(self.rng.choice([*self.scalars, *more]))
            return self.rng.choice([self.place(column), self.place(column), scalar, ir.Const(0.5, ir.F64)])

        return (
            ir.Op(self.rng.choice(["add", "mul", "sub"]), (leaf(), leaf()), ir.F64)
            if self.rng.random() < 0.7
            else leaf()
        )

    def store(self, column: ir.Local | None, more: tuple[ir.Local, ...] = ()) -> ir.Statement:
        target, value = self.place(column), self.value(column, more)
        return ir.Assign(target, value) if self.rng.random() < 0.6 else ir.Update(target, "add", value)

    def columns(self) -> ir.Statement:
        k, kept = ir.Local("k", ir.I32, kind="column"), ir.Local("w", ir.F64)
        has_kept = self.rng.random() < 0.3
        body: list[ir.Statement] = [ir.Declare(kept, (self.value(k),))] * has_kept
        body += [self.store(k, (kept,) * has_kept) for _ in range(self.rng.choice([1, 1, 2]))]
        count = self.count - (self.rng.random() < 0.1)
        return ir.For("range", (k,), (ir.Const(count, ir.I32),), tuple(body))

    def condition(self) -> ir.Value:
        return ir.Op("gt", (self.value(None), ir.Const(0.1, ir.F64)), ir.I32)

    def other(self, depth: int) -> ir.Statement:
        kind = self.rng.randrange(6 if depth else 4)
        if kind == 0:
            return ir.Declare(ir.Local("t", ir.F64), (self.value(None),))
        if kind == 1:
            return ir.Assign(ir.Read(self.rng.choice(self.scalars)), self.value(None))
        if kind == 2:
            return ir.Assign(ir.Read(self.rng.choice(self.rows)), ir.Const(self.rng.randrange(2), ir.I32))
        if kind == 3:
            return self.store(None)
        if kind == 4:
            return ir.If(self.condition(), self.block(depth - 1), self.block(depth - 1))
        body = self.block(depth - 1)
        if self.rng.random() < 0.3:
            jump = ir.Jump(self.rng.choice(["break", "continue"]))
            body += (ir.If(self.condition(), (jump,)), *self.block(0))
        return ir.For("range", (ir.Local("i", ir.I32, kind="loop"),), (ir.Const(2, ir.I32),), body)

    def block(self, depth: int = 2) -> ir.Body:
        count = self.rng.randint(1, 6)
        return tuple(self.columns() if self.rng.random() < 0.65 else self.other(depth) for _ in range(count))

    def after(self, body: ir.Body, seed: int) -> list[np.ndarray]:
        """The memory after a run of a block."""
        rng = np.random.default_rng(seed)
        state = Interpreter({c: rng.uniform(-1, 1, 6 * self.count) for c in self.containers})
        state.locals.update({local: rng.uniform(-1, 1, local.shape) for local in self.locals})
        state.locals.update({local: rng.uniform() for local in self.scalars})
        state.locals.update({local: int(rng.integers(0, 2)) for local in self.rows})
        with np.errstate(all="ignore"):
            state.run(body)
        return [*state.arrays.values(), *(np.array(state.locals[x]) for x in (*self.locals, *self.scalars))]


def loops(body: ir.Body) -> int:
    return sum(isinstance(s, ir.For) for s in ir.statements(body))


@pytest.mark.sweep
def test_random_blocks_do_what_they_did():
    counted = 0
    for seed in range(BLOCKS):
        blocks = Blocks(random.Random(seed))
        body = blocks.block()
        changed = with_counted_columns(body)
        counted += loops(body) - loops(changed)
        shown = text(ir.Program("before", (), (), body, ())) + text(ir.Program("after", (), (), changed, ()))
        for actual, value in zip(blocks.after(changed, seed), blocks.after(body, seed), strict=True):
            assert_array_equal(actual, value, err_msg=f"seed {seed}\n{shown}")
    assert counted > BLOCKS / 8
