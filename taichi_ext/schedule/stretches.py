"""A parallel loop in lanes, written: stretches of neighbours, loops over their lanes (see ``lanes``), copies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import taichi_ext.program as ir
from taichi_ext.analysis.affine import Affine, Atom, atom_value
from taichi_ext.analysis.loops import iterations
from taichi_ext.program.build import Coefficient, add, cast, indices_of, literal, multiply, not_written_out, operation
from taichi_ext.schedule.elementary import as_arithmetic
from taichi_ext.schedule.lanes import LaneRun, Lanes, Part, SharedBlock
from taichi_ext.schedule.masks import is_to_memory
from taichi_ext.simplify.pipeline import without_dead_code
from taichi_ext.simplify.usage import all_values, assigned_locals

LONG = 32  # copies of one row that LLVM may write out; of more, that takes half of a first call
MOST_TOGETHER = 2048  # numbers of a loop that are kept in arrays; of more, copies take long to compile


@dataclass
class Stretch:
    """The text of one stretch: arrays, declared before all else, and the index of its first lane."""

    lanes: Lanes
    first: ir.Read
    width: ir.Value  # how many lanes there are
    arrays: dict[ir.Local, ir.Local] = field(default_factory=dict)

    def array(self, local: ir.Local) -> ir.Local:
        """Where the numbers of a local lie, those of all lanes next to each other."""
        size = math.prod(local.shape) * self.lanes.count
        dtype = ir.I32 if local.dtype == ir.U1 else local.dtype  # arrays of truth values are nothing that Taichi knows
        return self.arrays.setdefault(local, ir.Local(local.name, dtype, (size,), "tangent"))


class Copies:
    """Stores of lanes to memory: those of a run, or in all iterations of a loop around it."""

    def __init__(self, stretch: Stretch, loop: ir.For | None = None) -> None:
        self.stretch, self.loop = stretch, loop
        self.lane = ir.Local("lane", ir.I32, (), "loop")
        self.again = ir.Local("number", ir.I32, (), "loop")  # the variable of the loop, when it copies
        self.renamed: dict[ir.Local, ir.Local] = {} if loop is None else {loop.variables[0]: self.again}
        self.before: list[ir.Statement] = []
        self.stores: list[ir.Statement] = []
        self.starts: dict[tuple[tuple[Atom, int], ...], ir.Read] = {}

    @staticmethod
    def behind(stretch: Stretch, part: SharedBlock) -> Copies | None:
        """Copies of the entries of J that a loop stores, if it stores them in each iteration and does not read them."""
        loop, places = part.statement, stretch.lanes.places
        if not isinstance(loop, ir.For) or len(loop.domain) != 1 or not isinstance(loop.domain[0], ir.Const):
            return None
        (parts,) = part.blocks
        runs = [p for p in parts if isinstance(p, LaneRun)]
        stores = {s for run in runs for s in run.statements if s in places}
        read = {v.container for s in loop.within for v in _read(s) if isinstance(v, ir.Load)}
        is_simple = all(isinstance(p, (LaneRun, ir.Declare)) for p in parts) and stores == places.keys() & loop.within
        if not stores or not is_simple or any(s.target.container in read for s in stores):  # type: ignore[attr-defined]
            return None
        if len(stores) * _iterations(loop) * stretch.lanes.count > MOST_TOGETHER:
            return None
        result = Copies(stretch, loop)
        for p in parts:
            if isinstance(p, ir.Declare):
                result.declare_again(p)
        return result

    def declare_again(self, s: ir.Declare) -> None:
        """Declare a local that is the same for all lanes once more, in the loop that copies."""
        local = self.renamed[s.local] = replace(s.local)
        self.before.append(replace(ir.with_nodes(s, self._again), local=local))

    def _again(self, v: ir.Value) -> ir.Value:
        return ir.read_from(v, self.renamed)

    def keep(self, s: ir.Assign | ir.Update, value: ir.Value, lane: ir.Local) -> ir.Assign:
        """A store as one to an array."""
        target, lanes = s.target, self.stretch.lanes
        assert isinstance(target, ir.Load)

        def entry(lane: ir.Local, iteration: ir.Local | None) -> ir.Read:
            place = add(multiply(0 if iteration is None else ir.Read(iteration), lanes.count), ir.Read(lane))
            return ir.Read(array, (cast(place, ir.I32),))

        if s in lanes.places:
            place = lanes.places[s]
            along = multiply(ir.Read(self.lane), dict(place.terms)[lanes.last])
            to = ir.Load(target.container, (cast(add(add(self._start(place), along), place.constant), ir.I32),))
        else:
            own = cast(add(self.stretch.first, ir.Read(self.lane)), ir.I32)
            to = ir.Load(target.container, (*target.indices[:-1], own), target.component)
        name = f"{target.container.name}_of"
        array = self.stretch.array(ir.Local(name, target.dtype, (_iterations(self.loop),), "temporary"))
        number = None if self.loop is None else self.again
        self.stores.append(replace(s, target=to, value=entry(self.lane, number)))
        here = None if self.loop is None else self.loop.variables[0]
        return ir.Assign(entry(lane, here), cast(value, array.dtype), place=s.place)

    def _start(self, place: Affine) -> ir.Read:
        """Where the first lane stores, without the constant."""
        if place.terms not in self.starts:
            total: Coefficient = 0
            for atom, factor in place.terms:
                is_lane = atom is self.stretch.lanes.last
                at = self.stretch.first if is_lane else ir.rebuilt(atom_value(atom), self._again)
                total = add(total, multiply(at, factor))
            start = ir.Local("start", ir.I32, (), "temporary")
            self.before.append(ir.Declare(start, (cast(total, ir.I32),)))
            self.starts[place.terms] = ir.Read(start)
        return self.starts[place.terms]

    def written(self) -> ir.Body:
        """The loops that copy."""
        if not self.stores:
            return ()
        body, width = tuple(self.stores), self.stretch.width
        if self.loop is None:
            return (*self.before, ir.For("range", (self.lane,), (width,), body, place=body[-1].place))
        inner = ir.For("range", (self.again,), self.loop.domain, (*self.before, *body), place=self.loop.place)
        arrays = [s.target.container for s in body if isinstance(s, ir.Assign) and isinstance(s.target, ir.Load)]
        is_long = bool(arrays) and _iterations(self.loop) > LONG
        rows = not_written_out(inner, arrays[0]) if is_long else (inner,)
        outer = ir.For("range", (self.lane,), (width,), rows, place=self.loop.place)
        return not_written_out(outer, arrays[0]) if is_long else (outer,)


def _iterations(loop: ir.For | None) -> int:
    return 1 if loop is None else iterations(loop, {}) or 0


def _read(s: ir.Statement) -> Iterable[ir.Value]:
    return ir.walk(s.value) if isinstance(s, (ir.Assign, ir.Update)) else all_values(s)


def in_lanes(lanes: Lanes) -> ir.For:
    """The loop, which changes no local outside, as a loop over stretches of neighbours."""
    (whole,) = without_dead_code((stretches(lanes),))
    assert isinstance(whole, ir.For)
    return whole


def stretches(lanes: Lanes) -> ir.For:
    """The loop as a loop over stretches of neighbours, with statements that nothing needs."""
    loop, count = lanes.loop, lanes.count
    *sizes, size = lanes.domain
    stretch = ir.Local("stretch", ir.I32, (), "loop")
    *outer, number = indices_of(_bounded(stretch, lanes.stretches), (*sizes, -(-size // count)))
    body: list[ir.Statement] = [ir.Declare(v, (i,)) for v, i in zip(loop.variables[:-1], outer, strict=True)]
    start = multiply(number, count)
    first = ir.Local("first", ir.I32, (), "temporary")
    is_cut = size % count > 0 and not lanes.is_repeatable
    begin = operation("min", start, size - count) if size % count and not is_cut else start
    body.append(ir.Declare(first, (cast(begin, ir.I32),)))
    width: ir.Value = literal(count, ir.I32)
    if is_cut:
        end = ir.Local("width", ir.I32, (), "temporary")
        body.append(ir.Declare(end, (operation("min", count, operation("sub", size, ir.Read(first))),)))
        width = ir.Read(end)
    writer = _Writer(Stretch(lanes, ir.Read(first), width))
    inner = writer.block(lanes.parts)
    arrays = [ir.Declare(a, ()) for a in writer.stretch.arrays.values()]
    body += (*arrays, *inner)
    return ir.For("range", (stretch,), (literal(lanes.stretches, ir.I32),), tuple(body), loop.config, place=loop.place)


def _bounded(stretch: ir.Local, count: int) -> ir.Value:
    """The number of a stretch, with the bits alone that it can have: LLVM then knows that no index overflows.

    Else it looks for a proof for each address of a loop, which took a third of the first call of bench's network.
    """
    return operation("bit_and", ir.Read(stretch), literal((1 << (count - 1).bit_length()) - 1, ir.I32))


class _Writer:
    """Writes runs as loops over lanes."""

    def __init__(self, stretch: Stretch) -> None:
        self.stretch, self.lanes = stretch, stretch.lanes
        users: dict[ir.Local, set[LaneRun]] = defaultdict(set)
        for run in _runs(self.lanes.parts):
            for local in _touched(run, is_direct=stretch.lanes.is_direct):
                users[local].add(run)
        self.shared = {x for x, runs in users.items() if x in self.lanes.varying and (x.shape or len(runs) > 1)}
        branches = (s for run in _runs(self.lanes.parts) for s in run.statements if isinstance(s, ir.If))
        storing = (s.condition for s in branches if any(map(is_to_memory, s.within)))
        self.shared |= {mask.local for mask in storing if isinstance(mask, ir.Read)}
        self.shared.discard(self.lanes.last)

    def block(self, parts: tuple[Part, ...], copies: Copies | None = None) -> ir.Body:
        made: list[ir.Statement] = []
        for part in parts:
            if isinstance(part, LaneRun):
                made += _RunWriter(self, part, copies).written()
            elif isinstance(part, SharedBlock):
                behind = Copies.behind(self.stretch, part)
                blocks = tuple(self.block(b, behind) for b in part.blocks)
                made.append(ir.with_bodies(part.statement, blocks))
                made += () if behind is None else behind.written()
            else:
                made.append(part)
        return tuple(made)


class _RunWriter:
    """Writes one run: a loop over lanes, and behind it one that copies to memory.

    ``behind``: the copies after the loop around the run.
    """

    def __init__(self, writer: _Writer, run: LaneRun, behind: Copies | None) -> None:
        self.stretch, self.run = writer.stretch, run
        self.lane = ir.Local("lane", ir.I32, (), "loop")
        touched = _touched(run, is_direct=self.stretch.lanes.is_direct)
        self.scalars = {x: replace(x) for x in touched if x in writer.shared and not x.shape}
        self.arrays = {x for x in touched if x.shape and x in writer.shared}
        self.number = ir.Local(self.stretch.lanes.last.name, ir.I32, (), "temporary")
        self.memo: dict[ir.Value, ir.Value] = {}
        self.before: list[ir.Statement] = []
        self.copies, self.behind = Copies(self.stretch), behind

    def written(self) -> list[ir.Statement]:
        inner = [x for s in self.run.statements for x in self._statement(s)]
        everything = ir.statements(self.run.statements)
        own = {x.local for x in self.run.statements if isinstance(x, ir.Declare)}
        changed = own | assigned_locals(self.run.statements)
        head: list[ir.Statement] = []
        if any(self.stretch.lanes.last in s.contents.locals for s in everything):
            head.append(ir.Declare(self.number, (cast(add(self.stretch.first, ir.Read(self.lane)), ir.I32),)))
        tail: list[ir.Statement] = []
        for x, scalar in self.scalars.items():
            entry = self._entry(x)
            if x not in own:
                head.append(ir.Declare(scalar, (operation("ne", entry, 0) if x.dtype == ir.U1 else entry,)))
            if x in changed:
                tail.append(ir.Assign(entry, cast(ir.Read(scalar), entry.dtype)))
        made = [*self.before]
        if inner:
            body = (*head, *inner, *tail)
            made.append(ir.For("range", (self.lane,), (self.stretch.width,), body, place=body[-1].place))
        return [*made, *self.copies.written()]

    def _entry(self, x: ir.Local, index: ir.Value | None = None) -> ir.Read:
        start = 0 if index is None else multiply(index, self.stretch.lanes.count)
        return ir.Read(self.stretch.array(x), (cast(add(start, ir.Read(self.lane)), ir.I32),))

    def _changed(self, value: ir.Value) -> ir.Value:
        if isinstance(value, ir.Read):
            if value.local is self.stretch.lanes.last:
                return ir.Read(self.number, place=value.place)
            if value.local in self.arrays:
                (index,) = value.index
                return self._entry(value.local, index if isinstance(index, ir.Value) else literal(index, ir.I32))
            scalar = self.scalars.get(value.local)
            return value if scalar is None else ir.Read(scalar, place=value.place)
        return as_arithmetic(value) if self.stretch.lanes.is_fast else value

    def _value(self, value: ir.Value) -> ir.Value:
        return ir.rebuilt(value, self._changed, self.memo)

    def _statement(self, s: ir.Statement) -> Iterator[ir.Statement]:
        new = ir.with_values(s, self._value)
        match new:
            case ir.Declare(local=local) if local.shape:
                yield from self._array(new)
            case ir.Declare(local=local):
                yield replace(new, local=self.scalars.get(local, local))
            case ir.Assign(target=ir.Load()) | ir.Update(target=ir.Load()) if self.stretch.lanes.is_direct:
                yield new
            case ir.Assign(target=ir.Load()) | ir.Update(target=ir.Load()):
                assert isinstance(s, (ir.Assign, ir.Update))
                behind = self.behind if s in self.stretch.lanes.places else None
                copies = self.copies if behind is None else behind
                yield copies.keep(s, new.value, self.lane)
            case ir.Assign() | ir.Update():
                yield replace(new, target=self._changed(new.target))
            case ir.If():
                copies = self.copies
                stores, copies.stores = copies.stores, []
                yield ir.with_bodies(new, tuple(tuple(x for y in b for x in self._statement(y)) for b in ir.bodies(s)))
                if copies.stores:  # in lanes that take part
                    assert isinstance(s, ir.If)
                    assert isinstance(s.condition, ir.Read)
                    mask = ir.Read(self.stretch.array(s.condition.local), (ir.Read(copies.lane),))
                    stores.append(ir.If(operation("ne", mask, 0), tuple(copies.stores), place=s.place))
                copies.stores = stores

    def _array(self, s: ir.Declare) -> Iterator[ir.Statement]:
        array = self.stretch.array(s.local)
        if not s.values:
            return
        if all(isinstance(v, ir.Const) and v.value == s.values[0].value for v in s.values):  # type: ignore[attr-defined]
            k = ir.Local("k", ir.I32, (), "loop")
            body = (ir.Assign(ir.Read(array, (ir.Read(k),)), s.values[0]),)
            self.before.append(ir.For("range", (k,), (literal(array.shape[0], ir.I32),), body, place=s.place))
            return
        for n, value in enumerate(s.values):
            yield ir.Assign(self._entry(s.local, literal(n, ir.I32)), value, place=s.place)


def _runs(parts: tuple[Part, ...]) -> Iterator[LaneRun]:
    for part in parts:
        if isinstance(part, LaneRun):
            yield part
        elif isinstance(part, SharedBlock):
            for block in part.blocks:
                yield from _runs(block)


def _touched(run: LaneRun, *, is_direct: bool) -> list[ir.Local]:
    """The locals that a run declares, reads or changes, each once, in their order; see ``Lanes.is_direct``."""
    locals_: dict[ir.Local, None] = {}
    for s in ir.statements(run.statements):
        values = ir.walk(s.value) if is_to_memory(s) and not is_direct else all_values(s)
        locals_.update(dict.fromkeys(v.local for v in values if isinstance(v, ir.Read)))
        if isinstance(s, (ir.Assign, ir.Update)) and isinstance(s.target, ir.Read):
            locals_[s.target.local] = None
        if isinstance(s, ir.Declare):
            locals_[s.local] = None
    return list(locals_)
