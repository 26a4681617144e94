"""Choose how each parallel loop of a program with tangents runs on a CPU.

* A loop of arithmetic runs in *lanes*, which LLVM makes vectors (``lanes``).
* A loop of few iterations is *spread* over the threads. Taichi gives a thread at least 512 iterations, so that shorter
  loops run on one; this one becomes a loop over several pieces for each thread, of one iteration or none.
* A loop of few iterations that one thread runs in any case is *serial*: no thread is woken for it.
* A loop over several dimensions runs *row by row*: as one over pieces of rows, each with a loop over its last indices,
  since finding i and j from a running number costs as much as a small body.

Loops over many columns within them are not written out (``private_sums``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import taichi_ext.program as ir
from taichi_ext.analysis.changes import varying_locals, written_containers
from taichi_ext.analysis.loops import Extents, is_serialized, iterations, leaves
from taichi_ext.differentiate.plan.report import LoopChoice, parallel_loops
from taichi_ext.program.build import (
    add,
    begin_of_piece,
    cast,
    indices_of,
    is_over_columns,
    literal,
    number_of,
    operation,
    subtract,
)
from taichi_ext.schedule.lanes import MOST_OPERATIONS, CannotError, Lanes, Survey, find_lanes, work_of
from taichi_ext.schedule.machine import LEAST_ITERATIONS, Machine
from taichi_ext.schedule.masks import keys_of, with_masks
from taichi_ext.schedule.private_sums import is_serial, with_counted_columns
from taichi_ext.schedule.stretches import in_lanes, stretches
from taichi_ext.simplify.usage import assigned_locals


def with_iterations_together(body: ir.Body, machine: Machine) -> ir.Body:
    """The block with loops whose iterations go through their bodies together, where that is possible."""

    def change(s: ir.Statement) -> ir.Statement:
        if not isinstance(s, ir.For) or not s.is_together:
            return s
        try:
            return _together(s, machine)
        except CannotError:
            return s

    return ir.mapped(body, change)


def _together(loop: ir.For, machine: Machine) -> ir.For:
    (count,) = loop.domain
    if machine.is_checked or not isinstance(count, ir.Const) or written_containers(loop.body):
        raise CannotError("it stores to memory")
    results = assigned_locals(loop.body) - {x for s in loop.within for x in ir.declared(s)}
    if not all(x.shape for x in results):
        raise CannotError("iterations share a local")
    varying = varying_locals(loop) - results
    for s in loop.within:
        is_apart = not s.contents.is_same(varying, set())
        if isinstance(s, ir.Jump) or (is_apart and isinstance(s, ir.While)):
            raise CannotError("it ends early")
        if isinstance(s, ir.For) and is_apart and not keys_of(s, varying):
            raise CannotError("each lane has another range")

    def work(body: ir.Body) -> int:
        return work_of(body, is_fast=machine.is_fast)

    body, varying = with_masks(loop.body, varying, set(), work, by_keys=True)
    loop = replace(loop, body=body, is_together=False)
    lanes = int(count.value)
    survey = Survey(loop, (lanes,), {}, machine, frozenset(varying))
    parts = survey.block(body, 1)
    if survey.totals.operations > MOST_OPERATIONS:
        raise CannotError("LLVM takes too long")
    return stretches(Lanes(loop, (lanes,), lanes, survey.varying, parts, {}, True, machine.is_fast))


SHORTEST = 8  # part of a row that is worth a loop
LONGEST = 2048  # array in a function, which Taichi compiles in a time that grows with the square of its length
SHORT = 100  # statements of a body that LLVM compiles soon in the kernel, too
ChangesLoop = Callable[[ir.For], ir.For]
Bounds = tuple[tuple[int, int], ...]
UNKNOWN = "it ends early, or its indices are not all from 0 to sizes that are known, in the order of memory"


@dataclass(frozen=True)
class Scheduled:
    """The program with its loops as they run, and the decisions about them."""

    program: ir.Program
    choices: tuple[LoopChoice, ...] = ()


def schedule(
    recorded: ir.Program, program: ir.Program, shadows: Mapping[ir.Container, ir.Container | None], machine: Machine
) -> Scheduled:
    """Schedule the parallel loops of a program so that they run fastest on a CPU.

    Args:
        recorded: without tangents.
        program: with tangents.
        shadows: the container that each shadow belongs to; None for entries of a sparse J, by number of the iteration.
        machine: facts about the machine.
    """
    numbers = {s.variables[0]: n for n, s in enumerate(parallel_loops(recorded.body), 1)}
    choices: list[LoopChoice] = []
    body: list[ir.Statement] = []
    for s in with_iterations_together(program.body, machine):
        if not isinstance(s, ir.For):
            body.append(s)
            continue
        is_whole = leaves(s.body, ("break",)) or (is_over_columns(s) and is_serial(s))
        domain, number = None if is_whole else machine.domain(s), numbers.get(s.variables[0], 0)
        if domain is None:
            body.append(s)
            if number and not is_serialized(s):
                choices.append(LoopChoice(number, f"does not run in lanes: {UNKNOWN}"))
            continue
        lanes: Lanes | None = None
        try:
            lanes = find_lanes(s, domain, shadows, machine)
        except CannotError as reason:
            choices.append(LoopChoice(number, f"does not run in lanes: {reason}"))
        if lanes is not None:
            choices.append(LoopChoice(number, f"runs in lanes, {lanes.count} iterations at a time in vectors"))
            is_few = machine.threads > 1 and 1 < lanes.stretches < machine.least
            made, domain = in_lanes(lanes), (lanes.stretches,)
            if is_few:
                made = spread(made, domain, machine.least)
            made = serial(made, domain) if not is_few and is_alone(made, domain, machine) else made
            body.append(replace(made, is_function=_is_better_as_function(made)))
        elif is_short(s, domain, machine):
            choices.append(LoopChoice(number, "has few iterations, which are spread over all threads"))
            body.append(spread(s, domain, machine.least))
        elif is_alone(s, domain, machine):
            body.append(serial(s, domain))
        else:
            pieces = max(1, -(-machine.least // domain[0]))
            is_long = len(domain) > 1 and domain[1] // pieces >= SHORTEST
            body.append(by_rows(s, tuple((0, n) for n in domain), pieces) if is_long else s)
    made = with_counted_columns(tuple(body))
    return Scheduled(replace(program, body=made), tuple(choices))


def from_below_zero(program: ir.Program, extents: Extents, *, is_host: bool) -> ir.Program:
    """The program whose loops that begin below zero are serial ones if they are short, else ones from zero on.

    On a CPU: LLVM 15 may extend an index below zero without its sign, also that of a short parallel loop minus a
    constant.
    """
    if not is_host:
        return program
    body = [_from_below_zero(s, extents) if isinstance(s, ir.For) else s for s in program.body]
    return replace(program, body=tuple(body))


def _from_below_zero(loop: ir.For, extents: Extents) -> ir.For:
    if is_short_below_zero(loop, extents):
        return replace(loop, config={"serialize": True})
    if not _begins_below_zero(loop):
        return loop
    first, end = loop.domain
    assert isinstance(end, ir.Value)
    flat = ir.Local("flat", ir.I32, (), "loop")
    declare = ir.Declare(loop.variables[0], (cast(add(ir.Read(flat), first), ir.I32),), place=loop.place)
    return replace(loop, variables=(flat,), domain=(cast(subtract(end, first), ir.I32),), body=(declare, *loop.body))


def is_short_below_zero(loop: ir.For, extents: Extents) -> bool:
    """Whether a loop begins below zero, and Taichi gives it to one thread."""
    return _begins_below_zero(loop) and is_of_one_thread(loop, extents)


def is_of_one_thread(loop: ir.For, extents: Extents) -> bool:
    """Whether Taichi gives a parallel loop to one thread, which runs its iterations in order."""
    count = iterations(loop, extents)
    return count is not None and count <= LEAST_ITERATIONS and not loop.config


def _begins_below_zero(loop: ir.For) -> bool:
    first = number_of(loop.domain[0]) if loop.kind == "range" and len(loop.domain) == 2 else None
    if first is None or first >= 0:
        return False
    return not is_serialized(loop) and loop.variables[0] not in assigned_locals(loop.body)


def _is_better_as_function(loop: ir.For) -> bool:
    """Whether a body in lanes is compiled soon as a function, or would be compiled even later in the kernel.

    A body that ends an iteration early cannot be a function: Taichi goes on behind a ``return`` without a value.
    """
    if leaves(loop.body):
        return False
    inner = ir.statements(loop.body)
    return len(inner) > SHORT or all(math.prod(s.local.shape) <= LONGEST for s in inner if isinstance(s, ir.Declare))


# --- short loops


def is_short(loop: ir.For, domain: tuple[int, ...], machine: Machine) -> bool:
    """Whether a loop of too few iterations for all threads is worth spreading over them: it has loops of its own."""
    count, least = math.prod(domain), machine.least
    is_few = machine.threads > 1 and 1 < count < least
    return is_few and loop.variables[0] in machine.free and not machine.is_checked


def spread(loop: ir.For, domain: tuple[int, ...], pieces: int) -> ir.For:
    """A loop over fewer indices than pieces as one over pieces, each of one index or none."""
    piece, flat = ir.Local("piece", ir.I32, (), "loop"), ir.Local("flat", ir.I32, (), "loop")
    first, end = (begin_of_piece(number, pieces, math.prod(domain)) for number in (ir.Read(piece), _next(piece)))
    indices = zip(loop.variables, indices_of(ir.Read(flat), domain), strict=True)
    declares = (ir.Declare(variable, (value,), place=loop.place) for variable, value in indices)
    inner = ir.For("range", (flat,), (first, end), (*declares, *loop.body), place=loop.place)
    return _outer(loop, piece, pieces, (inner,))


def _next(piece: ir.Local) -> ir.Value:
    return cast(add(ir.Read(piece), 1), ir.I32)


def _outer(loop: ir.For, variable: ir.Local, count: int, body: ir.Body) -> ir.For:
    return ir.For("range", (variable,), (literal(count, ir.I32),), body, loop.config, place=loop.place)


def is_alone(loop: ir.For, domain: tuple[int, ...], machine: Machine) -> bool:
    """Whether Taichi gives a loop to one thread, as it does if the user has not configured it."""
    return math.prod(domain) <= LEAST_ITERATIONS and not loop.config and not machine.is_checked


def serial(loop: ir.For, domain: tuple[int, ...]) -> ir.For:
    """A loop that runs in one thread without waking it, which takes as long as a small loop."""
    (made,) = nested(zip(loop.variables, [(literal(n, ir.I32),) for n in domain], strict=True), loop.body, loop.place)
    return replace(made, config={"serialize": True})  # type: ignore[call-arg]


# --- rows


def by_rows(loop: ir.For, bounds: Bounds, pieces: int, innermost: ChangesLoop = lambda row: row) -> ir.For:
    """A loop over several dimensions as one over pieces of rows that runs a loop over each of the other dimensions.

    Taichi gives each thread one stretch of at least 512 iterations, so rows are cut into as many pieces as that takes.
    ``bounds``: the first index and the end of each variable; ``innermost`` changes the innermost loop.
    """
    piece = ir.Local("piece", ir.I32, (), "loop")
    row, *others = loop.variables
    domains: list[tuple[ir.Value, ...]] = [
        tuple(literal(n, ir.I32) for n in (first, end)[not first :]) for first, end in bounds[1:]
    ]
    number: ir.Value = ir.Read(piece)
    if pieces > 1:
        part, (first, end) = operation("mod", number, pieces), bounds[1]
        ends = (begin_of_piece(n, pieces, end - first) for n in (part, cast(add(part, 1), ir.I32)))
        domains[0] = tuple(cast(add(n, first), ir.I32) for n in ends)
        number = operation("floordiv", number, pieces)
    first, end = bounds[0]
    declare = ir.Declare(row, (cast(add(number, first), ir.I32),), place=loop.place)
    body = nested(zip(others, domains, strict=True), loop.body, loop.place, innermost)
    return _outer(loop, piece, max(0, end - first) * pieces, (declare, *body))


def nested(
    ranges: Iterable[tuple[ir.Local, tuple[ir.Value, ...]]],
    body: ir.Body,
    place: ir.Place | None,
    innermost: ChangesLoop = lambda row: row,
) -> ir.Body:
    """Loops over the ranges of variables, the first outermost; ``innermost`` changes the last one."""
    for n, (variable, domain) in enumerate(reversed([*ranges])):
        loop = ir.For("range", (variable,), domain, body, place=place)
        body = (loop if n else innermost(loop),)
    return body
