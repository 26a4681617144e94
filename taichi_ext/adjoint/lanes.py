"""Neighbouring iterations of an adjoint in lanes: they go through its inner loops together.

In ``for i, j: for d: s += a[i, d] * b[d, j]`` each iteration reads a column of b, and its way back adds to one: to an
entry of each row. In lanes, ``for d: for lane: ...``, neighbours read and add to neighbouring entries, which lie in one
line of the cache, and which LLVM puts into vectors. This changes the order of iterations, as threads do, which may be
any as long as iterations only add to what they share. So there are lanes only where

* no memory but that of adjoints is stored to: the stage reads nothing that it has stored to before. What an iteration
  clears is an entry that no other one uses, or else the stage runs in one thread and in order (``order.py``);
* nothing is kept on the stack of the thread, and no inner loop differs between lanes;
* all accesses in inner loops are to one entry, or to as many neighbours as there are lanes: else it would not pay.

Iterations without inner loops that one thread takes one after the other, as in a stencil, run in lanes along a row if
all accesses are such. They would add to the entries around them in turns; in lanes, each sum is a loop of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import taichi_ext.program as ir
from taichi_ext.adjoint.draws import Bounds
from taichi_ext.adjoint.sweep import Sweep
from taichi_ext.analysis.affine import Atom
from taichi_ext.analysis.changes import varying_locals, written_containers
from taichi_ext.analysis.same_values import is_equal
from taichi_ext.cached import cached_property
from taichi_ext.program import Const, Load
from taichi_ext.program.build import literal, operation
from taichi_ext.schedule.elementary import elementary_of
from taichi_ext.schedule.lanes import (
    COMPILED,
    MOST_NUMBERS,
    MOST_OPERATIONS,
    CannotError,
    Lanes,
    Memory,
    Survey,
    work_of,
)
from taichi_ext.schedule.loops import spread
from taichi_ext.schedule.machine import Machine
from taichi_ext.schedule.masks import with_masks
from taichi_ext.schedule.stretches import in_lanes
from taichi_ext.simplify.usage import accesses, assigned_locals

MOST, FEWEST = 64, 16  # lanes: more of them read longer parts of rows, one after the other
FEWEST_WITH_TAPES = 8  # where iterations keep many numbers
MOST_STORES = 12 << 20  # squares of the sizes of local arrays, added up: Taichi takes 1 s for 8 million
STRETCHES = 4  # for each thread, at least
ROWS_OF_FLOAT64 = False  # of stencils: up to 12 % faster, and a first call takes 0.2 to 0.7 CPU s more


def adjoint_in_lanes(sweep: Sweep, loop: ir.For, bounds: Bounds, threads: int) -> ir.For:
    """The loop of an adjoint in lanes.

    Args:
        sweep: with which it was made.
        loop: over scalars, with an inner loop; or over a row.
        bounds: of these.
        threads: of the CPU; 0 for a row within the loop of a thread.

    Raises:
        CannotError: that is not possible, or does not pay.
    """
    if sweep.tape.is_used or sweep.dirty or any(first for first, _ in bounds):
        raise CannotError("it keeps numbers, or does not begin at 0")
    width = next((a.width for a in sweep.arrays.values()), 1)
    return neighbours_in_lanes(
        loop, [end for _, end in bounds], threads, width, is_fast=sweep.is_fast and not sweep.is_again
    )


def neighbours_in_lanes(loop: ir.For, ends: Sequence[int], threads: int, width: int = 0, *, is_fast: bool) -> ir.For:
    """The same for a loop that reads nothing that it has stored to before; see ``adjoint_in_lanes``.

    Args:
        ends: of the ranges of its variables, which begin at 0.
        width: the distance of the adjoints of neighbours; 0 for a loop of the run forward.
        is_fast: whether functions of the library may differ in their last bits.
    """
    *rows, size = ends
    count = MOST
    while count > FEWEST and (
        (threads and size % count) or count > size or math.prod(rows) * (size // count) < STRETCHES * threads
    ):
        count //= 2
    if size < count:
        raise CannotError("it is short")
    along = replace(loop, kind="range", variables=loop.variables[-1:], domain=(Const(size, ir.I32),))
    varying = varying_locals(along)
    if not threads:
        work = partial(work_of, is_fast=False)
        body, varying = with_masks(loop.body, varying, written_containers(loop.body), work)
        loop = replace(loop, body=body)
    sums = _Sums(loop, varying)
    loop = replace(loop, body=sums.block(loop.body))
    machine = Machine(threads, is_fast=is_fast)
    survey = _Survey(loop, (*rows, size), {}, machine, frozenset(varying))
    survey.is_row, survey.once = not threads, sums.once
    survey.width = width
    parts = survey.block(loop.body, 1)
    if survey.is_row and survey.totals.widest == ir.F64 and not ROWS_OF_FLOAT64:
        raise CannotError("it is a row of float64, of which vectors hold fewer numbers")
    sizes = [math.prod(local.shape) for s in ir.statements(loop.body) for local in ir.declared(s)]

    def fit(count: int) -> bool:
        stores = sum((size * count) ** 2 for size in sizes)
        return survey.totals.numbers * count <= MOST_NUMBERS and stores <= MOST_STORES

    while count > FEWEST_WITH_TAPES and not fit(count):
        count //= 2
    if survey.totals.operations > MOST_OPERATIONS or not fit(count):
        raise CannotError("it is long")
    lanes = Lanes(loop, (*rows, size), count, survey.varying, parts, {}, False, machine.is_fast, is_direct=True)
    made, least = in_lanes(lanes), survey.machine.least
    if 1 < threads and lanes.stretches < least:
        made = spread(made, (lanes.stretches,), least)
    return replace(made, is_function=threads > 0)


class _Survey(Survey):
    """The statements of an adjoint, which may add to any entry of one."""

    width = 1  # the distance of the adjoints of neighbours; 0 for a loop of the run forward
    is_row = False  # whether what is outside of inner loops has to pay, too
    once: Collection[ir.Statement] = ()  # what is done once for all lanes

    def _place(self, target: Load) -> None:
        """No entry is one of J."""

    def _note_operation(self, op: ir.Op, times: int) -> None:
        known = elementary_of(op) if self.machine.is_fast else None
        self.totals.operations += 1 if known is None else known.work // COMPILED

    def _note(self, s: ir.Statement, times: int) -> None:
        super()._note(s, times)
        if (times > 1 or self.is_row) and not all(map(self._is_side_by_side, accesses(s))):
            raise CannotError("neighbours do not lie side by side")

    def _is_uniform(self, s: ir.Statement) -> bool:
        return s in self.once or super()._is_uniform(s)

    @cached_property
    def _mixed(self) -> dict[ir.Container, ir.Container]:
        """Names for the reads of containers that are stored to, and of which other entries are read."""
        entries: dict[ir.Container, set[object]] = {}
        for load in () if self.width else (load for s in self.loop.within for load in _others(s)):
            entries.setdefault(load.container, set()).add((*map(self.indices.form, load.indices), load.component))
        return {c: replace(c) for c, found in entries.items() if len(found) > 1 and c in self.written}

    def _memory(self, s: ir.Statement) -> Memory:
        """LLVM cannot tell such entries apart: stores to them are in a loop behind that which reads them."""
        memory = super()._memory(s)
        for c, reads in self._mixed.items():
            if c in memory.read:
                memory.stored.add(reads)
            if c in s.written:
                memory.read.add(reads)
        return memory

    def _is_side_by_side(self, load: Load) -> bool:
        """Whether entries of neighbouring lanes are neighbours, or the same."""
        if self.varying.isdisjoint(load.contents.locals):
            return True
        *rows, last = load.indices
        terms = self._terms(last)
        is_row = not load.component and all(self.varying.isdisjoint(i.contents.locals) for i in rows)
        return is_row and terms is not None and terms.get(self.loop.variables[-1], 0) in (1, self.width)

    def _terms(self, index: ir.Value) -> dict[Atom, int] | None:
        """The terms of an index, of which at most one differs between lanes; None if that is not known."""
        form = self.indices.form(index)
        terms = None if form is None else dict(form.terms)
        return None if terms is None or self.varying & terms.keys() - {self.loop.variables[-1]} else terms


class _Sums:
    """Blocks of a loop whose sums over all lanes, in an entry that these share, are added to it once.

    Args:
        loop: the loop.
        varying: the locals that differ between lanes.
    """

    def __init__(self, loop: ir.For, varying: Collection[ir.Local]) -> None:
        self.varying, self.changed = frozenset(varying), assigned_locals(loop.body)
        self.others = {load.container for s in ir.statements(loop.body) for load in _others(s)}
        self.once = set[ir.Statement]()

    def block(self, body: ir.Body) -> ir.Body:
        """A block that all lanes go through."""
        if any(isinstance(s, ir.Jump) for s in ir.statements(body)):
            return body
        zeros: list[ir.Statement] = []
        made: list[ir.Statement] = []
        sums: list[ir.Statement] = []
        for s in body:
            if isinstance(s, (ir.For, ir.While, ir.If)) and s.contents.is_same(self.varying, set()):
                made.append(ir.with_blocks(s, self.block))
            else:
                own = {local for x in s.within for local in ir.declared(x)}
                made += ir.mapped((s,), lambda x, own=own: self._statement(x, own, zeros, sums))
        self.once.update(sums)
        return (*zeros, *made, *sums)

    def _statement(
        self, s: ir.Statement, own: set[ir.Local], zeros: list[ir.Statement], sums: list[ir.Statement]
    ) -> ir.Statement:
        added = _added(s)
        if added is None or self.varying.isdisjoint(added.contents.locals):
            return s
        assert isinstance(s, (ir.Assign, ir.Update))
        assert isinstance(s.target, Load)
        named = s.target.contents.locals
        if s.target.container in self.others or not named.isdisjoint(self.varying | self.changed | own):
            return s
        total = ir.Local("total", s.target.dtype, (), "tangent")
        zeros.append(ir.Declare(total, (literal(0, total.dtype),)))
        whole = ir.Read(total) if isinstance(s, ir.Update) else operation("add", s.target, ir.Read(total))
        sums.append(replace(s, value=whole))
        return ir.Update(ir.Read(total), "add", added)


def _added(s: ir.Statement) -> ir.Value | None:
    """What a statement adds to an entry of memory; None if it does something else."""
    if not isinstance(s, (ir.Assign, ir.Update)) or not isinstance(s.target, Load):
        return None
    if isinstance(s, ir.Update):
        return s.value if s.op == "add" else None
    is_sum = isinstance(s.value, ir.Op) and s.value.name == "add" and is_equal(s.value.args[0], s.target)
    return s.value.args[1] if is_sum else None  # type: ignore[attr-defined]


def _others(s: ir.Statement) -> list[Load]:
    """The entries of memory that a statement reads or stores to, but for one that it adds to."""
    added = _added(s)
    return accesses(s) if added is None else [v for v in ir.walk(added) if isinstance(v, Load)]
