"""The adjoint of one stage: a program that takes adjoints after the stage to adjoints before it.

Each block runs forward once more, in locals that never change, then its statements are visited backwards. Memory is
left as it was before the stage: a store is left out of the forward part unless the same iteration may load from there
afterwards; then the old number is in a local, or within branches and loops in a log. See A. Griewank and A. Walther,
*Evaluating Derivatives* (2008), chapters 3 and 6.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import taichi_ext.program as ir
from taichi_ext.adjoint.backward import run_back
from taichi_ext.adjoint.block import Block
from taichi_ext.adjoint.contention import Bounds, bounds_of, contention
from taichi_ext.adjoint.forward import run_forward, without_jumps
from taichi_ext.adjoint.lanes import adjoint_in_lanes
from taichi_ext.adjoint.normal import whole
from taichi_ext.adjoint.stages import Stage
from taichi_ext.adjoint.sweep import Sweep, dirty_containers
from taichi_ext.adjoint.tapes import MOST_IN_LANES, MOST_LOCAL, AdjointArray, Tape
from taichi_ext.analysis.activity import Activity
from taichi_ext.analysis.loops import loop_bounds
from taichi_ext.program import I32, Container, Local, Op, Read, Value
from taichi_ext.program.build import add, begin_of_piece, literal, operation
from taichi_ext.schedule.lanes import CannotError
from taichi_ext.schedule.loops import by_rows, nested
from taichi_ext.schedule.machine import Machine

_LEAST_PIECES = 512  # iterations below which Taichi runs a loop in one thread


@dataclass(frozen=True, eq=False)
class StageAdjoint:
    """The adjoint of a stage.

    Attributes:
        arrays: the adjoints of containers.
        own: for containers of which each thread has sums of its own, the array of these.
        tape: the stack of a thread.
    """

    body: ir.Body
    arrays: Mapping[Container, AdjointArray]
    own: Mapping[Container, Container]
    tape: Tape


def adjoint_of(
    stage: Stage,
    activity: Activity,
    arrays: Mapping[Container, AdjointArray],
    machine: Machine,
    width: int,
    *,
    is_guarded: bool = False,
    is_again: bool = False,
) -> StageAdjoint:
    """The adjoint of a stage.

    Args:
        stage: in normal form.
        activity: its locals and containers that carry derivatives.
        arrays: the arrays of adjoints.
        machine: what runs it.
        width: the number of cotangents, at most those that the arrays are for.
        is_guarded: whether a product of 0 with what is infinite or not a number is 0.
        is_again: whether it is differentiated again.
    """
    sizes = {c: a.container.shape[0] for c, a in arrays.items() if a.container.shape is not None}
    dtypes = {m.dtype for s in stage.body for m in s.reads | s.written} | {c.dtype for c in arrays}
    real = max((t for t in dtypes if t.is_real), key=lambda t: t.bits, default=ir.F32)
    shared = contention(stage, sizes, machine)
    own = {c: replace(a.container, name=f"own_{a.container.name}") for c, a in arrays.items() if c in shared.own}
    given = stage, activity, arrays, Tape(real), shared, width, dirty_containers(stage.body), own
    sweep = Sweep(*given, is_guarded=is_guarded, is_again=is_again, is_fast=machine.is_fast)
    body = _Loops(sweep, bounds_of(stage, machine), machine).body()
    return StageAdjoint(body, arrays, sweep.own, sweep.tape)


class _Loops:
    """The loops around an iteration and its way back."""

    def __init__(self, sweep: Sweep, bounds: Bounds | None, machine: Machine) -> None:
        self.sweep, self.bounds = sweep, bounds
        self.threads = 1 if sweep.contention.is_serial else machine.threads
        self.config = {"serialize": True} if self.threads < machine.threads else {}
        self.is_in_lanes = False

    def body(self) -> ir.Body:
        loop, colours = self.sweep.stage.loop, self.sweep.contention.colours
        if loop is None:
            once = Local("once", I32, (), "loop")
            return (ir.For("range", (once,), (literal(1, I32),), self._iteration(()), {"serialize": True}),)
        if colours is not None and self.bounds is not None:
            return tuple([self._coloured(loop, self.bounds, *colours, colour) for colour in (0, 1)])
        if self.bounds is not None and any(isinstance(s, ir.For) for s in self.sweep.stage.body):
            with contextlib.suppress(CannotError):
                return (self._in_lanes(loop, self.bounds),)
        if self.bounds is not None and (len(loop.variables) > 1 or self.config):
            return (self._by_rows(loop, self.bounds),)
        return (self._plain(loop),)

    def _plain(self, loop: ir.For, most_local: int = MOST_LOCAL) -> ir.For:
        """The loop over iterations and their ways back, as it is."""
        variables = _variables(loop)
        return replace(loop, variables=variables, body=self._iteration(variables, most_local))

    def _iteration(self, variables: tuple[Local, ...], most_local: int = MOST_LOCAL) -> ir.Body:
        """An iteration and its way back, with these variables of the loop."""
        sweep = self.sweep
        sweep.most_local = most_local
        pairs = list(zip(() if sweep.stage.loop is None else sweep.stage.loop.variables, variables, strict=True))
        block = Block(sweep, {v: Read(w) for v, w in pairs})
        run_forward(block, without_jumps(sweep.stage.body))
        run_back(block)
        made = block.finished()
        if sweep.tape.is_used:
            made = (*sweep.tape.prelude(sweep.thread), *made)
        if not sweep.tape.is_used and not sweep.own:
            return made
        is_parallel = sweep.stage.loop is not None and self.threads > 1
        thread = Op("global_thread_idx", (), I32) if is_parallel else literal(0, I32)
        return (ir.Declare(sweep.thread, (thread,)), *made)

    def _in_lanes(self, loop: ir.For, bounds: Bounds) -> ir.For:
        """Neighbouring iterations together; see ``lanes``."""
        return adjoint_in_lanes(self.sweep, self._plain(loop, MOST_IN_LANES), bounds, self.threads)

    def _row_in_lanes(self, row: ir.For) -> ir.For:
        """A row of iterations together, if that pays."""
        bounds = loop_bounds(row, {})
        if self.sweep.is_again or bounds is None or any(isinstance(s, (ir.For, ir.While)) for s in row.within):
            return row
        try:
            made = adjoint_in_lanes(self.sweep, row, bounds, 0)
        except CannotError:
            return row
        self.is_in_lanes = True
        return made

    def _by_rows(self, loop: ir.For, bounds: Bounds) -> ir.For:
        """Threads take rows, or pieces of rows along the second variable where there are few."""
        first, last = bounds[0]
        pieces = 1 if self.threads == 1 else max(1, -(-_LEAST_PIECES * self.threads // max(1, last - first)))
        made = by_rows(self._plain(loop), bounds, pieces, self._row_in_lanes)
        return replace(made, config=self.config, is_function=self.is_in_lanes)

    def _coloured(self, loop: ir.For, bounds: Bounds, k: int, reach: int, colour: int) -> ir.For:
        """Every other piece of a loop, so that no two of them touch the same entries."""
        first, last = bounds[k]
        slots = _LEAST_PIECES * self.threads
        size = max(2 * reach, 1, -(-(last - first) // (8 * self.threads)))
        pieces = (-(-(last - first) // size) + 1 - colour) // 2  # of this colour
        slot, number = Local("slot", I32, (), "loop"), Local("piece", I32, (), "loop")
        ends = (Read(slot), operation("add", Read(slot), 1))
        of_slot = tuple([begin_of_piece(s, slots, pieces) for s in ends])
        place = operation("mul", operation("add", operation("mul", Read(number), 2), colour), size)
        start = whole(add(place, first))
        domains: list[tuple[Value, ...]] = [(literal(a, I32), literal(b, I32)) for a, b in bounds]
        domains[k] = start, operation("min", add(start, size), literal(last, I32))
        order = [k, *(n for n in range(len(bounds)) if n != k)]
        made = self._plain(loop)
        body = nested([(made.variables[n], domains[n]) for n in order], made.body, loop.place, self._row_in_lanes)
        inner = ir.For("range", (number,), of_slot, body)
        return ir.For("range", (slot,), (literal(slots, I32),), (inner,), is_function=self.is_in_lanes)


def _variables(loop: ir.For) -> tuple[Local, ...]:
    return tuple([Local(v.name, v.dtype, v.shape, "loop") for v in loop.variables])
