"""The way back through a block: its records from the last to the first, each by a line of a table.

The adjoints of locals that a compound statement changes, or adds to, are mutable locals around it. A loop keeps those
numbers of each iteration that its way back reads, on the tape, or in a local array where the loop is short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import taichi_ext.program as ir
from taichi_ext.adjoint.block import Block, Later, entry_indices
from taichi_ext.adjoint.costly import cone_of, find_costly, single_declarations
from taichi_ext.adjoint.forward import (
    ArrayDefinition,
    BranchRecord,
    Compound,
    Definition,
    LoopRecord,
    StoreRecord,
    WeightedRecord,
    run_forward,
    without_jumps,
)
from taichi_ext.adjoint.normal import whole
from taichi_ext.adjoint.sweep import Sweep, Weights, array_of, is_none, substitution
from taichi_ext.adjoint.tapes import INTEGER, MOST_LOCAL, REAL, converted
from taichi_ext.program import I32, U1, Const, Load, Local, Read, Value
from taichi_ext.program.build import add, cast, is_number, literal, negative, operation, subtract
from taichi_ext.simplify.usage import assigned_locals

Shared = dict[Local, list[Local]]  # mutable locals that hold adjoints, one for each cotangent


def run_back(block: Block) -> None:
    """Put the way back through the records of a block behind its forward part."""
    for record in reversed(block.records):
        _BACK[type(record)](block, record)


def _definition(block: Block, r: Definition) -> None:
    ws = block.take(r.local)
    if is_none(ws):
        return
    if not isinstance(r.value, Read) or not r.value.index:
        block.spread(r.value, ws, r.local)
        return
    for array, w in zip(block.sweep.local_arrays.get(r.value.local, ()), ws, strict=False):
        entry = Read(array, r.value.index)
        block.emit(ir.Assign(entry, operation("add", entry, cast(w, entry.dtype))))


def _array(block: Block, r: ArrayDefinition) -> None:
    for index, value in zip(entry_indices(r.local), r.values, strict=False):
        if block.sweep.has(value):
            block.spread(value, block.array_weights(r.local, index))


def _weighted(block: Block, r: WeightedRecord) -> None:
    ws = block.take(r.local)
    if not is_none(ws):
        ws = [block.keep(w) for w in ws]
        for argument, weight in zip(r.arguments, r.weights, strict=True):
            if block.sweep.has(argument):
                block.spread(argument, block.times(ws, weight, is_singular=True))


def _stored(block: Block, r: StoreRecord) -> None:
    if r.old is not None:
        block.emit(ir.Assign(r.target, r.old))
    is_update, is_value = isinstance(r.statement, ir.Update), block.sweep.has(r.value)
    if not r.is_active or (is_update and not is_value):
        return
    condition: Value | None = None
    if isinstance(r.target, Load):
        loads, condition = block.entries(r.target)
        entries: list[ir.Target] = [*loads]
    else:
        entries = [Read(array, r.target.index) for array in block.sweep.local_arrays[r.target.local]]
    ws: Weights = []
    for entry in entries:
        cleared = () if is_update else (ir.Assign(entry, literal(0, entry.dtype)),)
        if is_value:
            w = block.declare("w", entry.dtype, entry if condition is None else 0, "weight")
            cleared = cleared if condition is None else (ir.Assign(w, entry), *cleared)
            ws.append(w)
        block.emit(*(cleared if condition is None or not cleared else (ir.If(condition, cleared, ()),)))
    if is_value:
        is_less = isinstance(r.statement, ir.Update) and r.statement.op == "sub"
        block.spread(r.value, [negative(w) for w in ws] if is_less else ws)


# --- compound statements


def _mutable(block: Block, local: Local, ws: Weights) -> list[Local]:
    """An adjoint in locals that change."""
    return [block.declare(f"b_{local.name}", local.dtype, w, "tangent").local for w in ws]


def _reads(locals_: list[Local]) -> Weights:
    return [Read(b) for b in locals_]


def _sums(locals_: list[Local], ws: Weights) -> list[ir.Statement]:
    """Add an adjoint to one in locals."""
    return [
        ir.Assign(Read(b), cast(add(Read(b), w), b.dtype))
        for b, w in zip(locals_, ws, strict=True)
        if not is_number(w, 0)
    ]


def _after(block: Block, r: Compound) -> Shared:
    """The adjoints of the locals that a statement changes, as they are after it."""
    active = [(v, mutable) for v, (_, mutable) in r.carried.items() if mutable in block.sweep.active]
    return {v: _mutable(block, v, block.take(mutable)) for v, mutable in active}


def _inner(block: Block, r: Compound, body: ir.Body, env: dict[Local, Value], after: Shared) -> Block:
    """A block within a statement, forward and back; the adjoints after it are moved to what it makes of the locals."""
    inner = Block(block.sweep, dict(env), block.definitions)
    changed = assigned_locals(body)
    run_forward(inner, body)
    for v, bs in after.items():
        if v in changed:
            ws = inner.moved[v] = [inner.keep(b) for b in _reads(bs)]
            zeros = [ir.Assign(Read(b), literal(0, b.dtype)) for b in bs]
            inner.emit(Later(lambda v=v, zeros=zeros: () if v in inner.unchanged else tuple(zeros)))
            inner.spread(inner.env[v], ws)
    run_back(inner)
    return inner


def _outer(block: Block, blocks: list[Block]) -> tuple[Shared, list[list[ir.Statement]]]:
    """The adjoints of locals from before a statement in mutable locals, and how each of its blocks adds to them."""
    shared: Shared = {}
    sums: list[list[ir.Statement]] = []
    for inner in blocks:
        made: list[ir.Statement] = []
        for u, ws in inner.adjoints.items():
            if not is_none(ws):
                if u not in shared:
                    shared[u] = _mutable(block, u, block.take(u))
                made += _sums(shared[u], ws)
        sums.append(made)
    return shared, sums


def _end(block: Block, r: Compound, shared: Shared, after: Shared) -> None:
    """Go on before a statement."""
    block.adjoints.update({u: _reads(bs) for u, bs in shared.items()})
    for v, bs in after.items():
        block.spread(r.carried[v][0], _reads(bs))


def _undo(block: Block, r: BranchRecord | LoopRecord) -> bool:
    """Put back the numbers that a statement has overwritten; returns whether nothing in it has an adjoint.

    Nothing is kept on the tape for its iterations then, and it is not gone back through: one log has all its records.
    """
    is_idle = all(is_none(block.adjoints.get(mutable, [])) for _, mutable in r.carried.values())
    for s in r.statement.within if is_idle else ():
        if isinstance(s, ir.Store) and s.target.dtype.is_real:
            memory = s.target.memory
            if isinstance(memory, Local):
                is_idle = is_idle and array_of(r.env, memory) not in block.sweep.local_arrays
            else:
                is_idle = is_idle and memory not in block.sweep.arrays
    if r.log is not None and (is_idle or isinstance(r, BranchRecord)):
        block.emit(*block.sweep.tape.undone(r.log))
    return is_idle


def _branch(block: Block, r: BranchRecord) -> None:
    if _undo(block, r):
        return
    after = _after(block, r)
    blocks = [_inner(block, r, body, r.env, after) for body in ir.bodies(r.statement)]
    shared, sums = _outer(block, blocks)

    def make() -> ir.Body:
        sides = ((*inner.finished(), *made) for inner, made in zip(blocks, sums, strict=True))
        return (ir.If(r.condition, *sides),)

    block.emit(Later(make))
    _end(block, r, shared, after)


def _loop(block: Block, r: LoopRecord) -> None:
    if _undo(block, r):
        return
    sweep, s = block.sweep, r.statement
    after = _after(block, r)
    i, env = _iteration(sweep, r)
    inner = _inner(block, r, without_jumps(s.body), env, after)
    ends = {v: inner.take(i.starts[v]) for v in after}
    inner.unchanged |= {v for v, ws in inner.moved.items() if _is_same(ws, ends[v])}
    shared, (sums,) = _outer(block, [inner])
    changed = [x for v, ws in ends.items() if v not in inner.unchanged for x in _sums(after[v], ws)]
    rest, is_ordered = _with_kept(block, r, i, (*inner.finished(), *changed, *sums))
    moves = inner.moved.keys() - inner.unchanged  # adjoints that other iterations see changed
    is_ordered = is_ordered or bool(moves) or _overwrites(s)
    index = Local("back", I32, (), "loop")
    first, trips = _range(r)
    place: Value = operation("sub", operation("sub", trips, 1), Read(index)) if is_ordered else Read(index)
    names = [ir.Declare(i.number, (place,)), ir.Declare(i.again, (whole(add(Read(i.number), first)),))]
    block.emit(ir.For("range", (index,), (trips,), (*names, *rest)))
    _end(block, r, shared, after)


@dataclass(frozen=True)
class _Iteration:
    """The locals of an iteration on the way back: carried numbers at its start, its number, the loop's variable."""

    starts: dict[Local, Local]
    number: Local
    again: Local


def _iteration(sweep: Sweep, r: LoopRecord) -> tuple[_Iteration, dict[Local, Value]]:
    """The locals of an iteration, and the values of the stage's locals at its start."""
    s, env = r.statement, dict(r.env)
    starts = {v: Local(v.name, v.dtype, (), "temporary") for v in r.carried}
    env.update({v: Read(start) for v, start in starts.items()})
    sweep.active.update(starts[v] for v, (_, mutable) in r.carried.items() if mutable in sweep.active)
    again = Local(s.variables[0].name if isinstance(s, ir.For) else "again", I32, (), "temporary")
    if isinstance(s, ir.For):
        env[s.variables[0]] = Read(again)
    return _Iteration(starts, Local("number", I32, (), "temporary"), again), env


def _with_kept(block: Block, r: LoopRecord, i: _Iteration, rest: ir.Body) -> tuple[ir.Body, bool]:
    """The way back through an iteration with what it needs of the run forward, and whether that is on the stack."""
    sweep, needed, length = block.sweep, _needed(rest), _length(r)
    kept = [v for v, local in i.starts.items() if local in needed]
    if r.log is None and length is not None and length * max(1, len(kept)) <= sweep.most_local:
        return _with_local_tapes(block, r, kept, i, length, rest), False
    head = _taped(block, r, kept, i.starts)
    is_stacked = bool(kept) or r.log is not None
    if is_stacked:
        rest = (ir.If(operation("eq", Read(sweep.tape.lost), 0), rest),)
    return (*head, *rest), is_stacked


def _is_same(a: Weights, b: Weights) -> bool:
    """Whether two adjoints are the same locals."""
    return all(isinstance(x, Read) and isinstance(y, Read) and x.local is y.local for x, y in zip(a, b, strict=True))


def _overwrites(s: ir.Statement) -> bool:
    """Whether a loop overwrites memory, so that its iterations have to be gone back through in order."""
    memory = (x for x in s.within if isinstance(x, ir.Assign) and (isinstance(x.target, Load) or x.target.index))
    return any(True for _ in memory)


def _length(r: LoopRecord) -> int | None:
    """The number of iterations, if it is known."""
    if r.variable is not None:
        a, b = r.domain
        if isinstance(a, Const) and isinstance(b, Const):
            return max(0, int(b.value - a.value))
    return None


def _range(r: LoopRecord) -> tuple[Value, Value]:
    """The first number and the count of the iterations that ran."""
    first = r.domain[0] if r.variable is not None else literal(0, I32)
    if r.counter is not None:
        return first, Read(r.counter)
    length = _length(r)
    return first, whole(subtract(r.domain[1], first)) if length is None else literal(length, I32)


def _with_local_tapes(
    block: Block, r: LoopRecord, kept: list[Local], i: _Iteration, length: int, rest: ir.Body
) -> ir.Body:
    """The way back through an iteration, whose carried numbers and costly values are kept in local arrays."""
    assert r.variable is not None
    at = whole(subtract(Read(r.variable), r.domain[0]))

    def keep(local: Local, value: Value) -> ir.Declare:
        dtype = local.dtype if local.dtype != U1 else I32
        tape = Local(f"tape_{local.name}", dtype, (max(1, length),), "tangent")
        r.tapes.append(ir.Declare(tape, ()))
        r.pushes.append(ir.Assign(Read(tape, (at,)), cast(value, dtype)))
        return ir.Declare(local, (converted(Read(tape, (Read(i.number),)), local.dtype),))

    given = {*i.starts.values(), i.number, i.again}
    given |= {local for v in r.env.values() for local in v.contents.locals}
    adjoints = {*(a.container for a in block.sweep.arrays.values()), *block.sweep.own.values()}
    costly = find_costly(rest, given, adjoints | block.sweep.dirty)[: max(0, MOST_LOCAL // max(1, length) - len(kept))]
    single = single_declarations(rest)
    env: dict[Local, Value] = {i.starts[v]: Read(mutable) for v, (_, mutable) in r.carried.items()}
    env |= {i.again: Read(r.variable), i.number: at}
    read: dict[ir.Statement, ir.Statement] = {}
    for s in costly:
        for d in cone_of(s, single):
            if d.local not in env:
                new = Local(d.local.name, d.local.dtype, (), "temporary")
                r.pushes.append(ir.Declare(new, tuple(map(substitution(env), d.values))))
                env[d.local] = Read(new)
        read[s] = keep(s.local, env[s.local])
    rest = tuple([read.get(s, s) for s in rest])
    needed = _needed(rest)
    return (*(keep(i.starts[v], Read(r.carried[v][1])) for v in kept if i.starts[v] in needed), *rest)


def _taped(block: Block, r: LoopRecord, kept: list[Local], starts: dict[Local, Local]) -> ir.Body:
    """Keep numbers on the tape; the statements that take them off and undo what the iteration has logged."""
    tape = block.sweep.tape
    made: list[ir.Statement] = [] if r.log is None else [*tape.undone(r.log)]
    for part, is_real in ((REAL, True), (INTEGER, False)):
        values = [v for v in kept if v.dtype.is_real == is_real]
        count = [r.log] if r.log is not None and not is_real else []
        r.pushes.extend(tape.push([Read(local) for local in (*(r.carried[v][1] for v in values), *count)], part))
        pop, numbers = tape.pop([local.dtype for local in (*values, *count)], part)
        made += [*pop, *(ir.Declare(starts[v], (x,)) for v, x in zip(values, numbers, strict=False))]
        if count:
            # the log of an iteration begins behind its record, which has the length of the log before
            assert r.log is not None
            r.pushes.append(ir.Assign(Read(r.log), literal(0, I32)))
            made.append(ir.Assign(Read(r.log), numbers[-1]))
    return tuple(made)


def _needed(body: ir.Body) -> set[Local]:
    """The locals that a block reads for something that lasts: memory, locals from before it, control."""
    everything = ir.statements(body)
    declared = {local for s in everything for local in ir.declared(s)}
    needed: set[Local] = set()
    edges: list[tuple[ir.Memory, Local]] = []
    for s in everything:
        given = [] if isinstance(s, ir.Effect) else [memory for memory, _ in ir.flows(s)]
        if given and declared.issuperset(given):
            edges += ((memory, source) for memory in given for source in s.contents.locals)
        else:
            needed |= s.contents.locals
    return {x for x in ir.reached(needed, edges) if isinstance(x, Local)}


_BACK: dict[type, Callable[[Block, Any], None]] = {
    Definition: _definition,
    ArrayDefinition: _array,
    WeightedRecord: _weighted,
    StoreRecord: _stored,
    BranchRecord: _branch,
    LoopRecord: _loop,
}
