"""Stores of lanes to memory: kept in local arrays, and copied to memory behind the loop over the lanes.

Where an inner loop stores entries of J, all its iterations are copied together behind it, row by row: an entry of each
row in turn took 0.75 times as long as the whole kernel of a volume, since neighbours in memory were written far apart.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import taichi_ext.program as ir
from taichi_ext.analysis.affine import Affine, Atom, atom_value
from taichi_ext.analysis.loops import iterations
from taichi_ext.program.build import Coefficient, add, cast, multiply, not_written_out
from taichi_ext.schedule.lanes import Around, Lanes, Run
from taichi_ext.simplify.usage import all_values, assigned_locals

SIDE_BY_SIDE = 4  # numbers that LLVM turns into vectors at low cost
LONG = 32  # copies of one row that LLVM may write out; of more, that takes half of a first call
MOST_TOGETHER = 4096  # numbers of a loop that are kept in one array


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


@dataclass(frozen=True)
class _Kept:
    """The place of a number until it is copied: its index in an array with several numbers for each lane."""

    array: ir.Local
    size: int
    number: int = 0


class Copies:
    """Stores of lanes to memory: those of a run, or in all iterations of a loop around it.

    Args:
        stretch: of the lanes.
        body: the statements, of which some store.
        loop: around them.
    """

    def __init__(self, stretch: Stretch, body: Iterable[ir.Statement], loop: ir.For | None = None) -> None:
        self.stretch, self.loop = stretch, loop
        self.lane = ir.Local("lane", ir.I32, (), "loop")
        self.again = ir.Local("number", ir.I32, (), "loop")  # the variable of the loop, when it copies
        self.renamed: dict[ir.Local, ir.Local] = {} if loop is None else {loop.variables[0]: self.again}
        self.before: list[ir.Statement] = []
        self.stores: list[ir.Statement] = []
        self.starts: dict[tuple[tuple[Atom, int], ...], ir.Read] = {}
        self.kept = _neighbours(body, stretch.lanes.places, _iterations(loop))

    @staticmethod
    def behind(stretch: Stretch, part: Around) -> Copies | None:
        """Copies of the entries of J that a loop stores, if it stores them in each iteration and does not read them."""
        loop, places = part.statement, stretch.lanes.places
        if not isinstance(loop, ir.For) or len(loop.domain) != 1 or not isinstance(loop.domain[0], ir.Const):
            return None
        (parts,) = part.blocks
        runs = [p for p in parts if isinstance(p, Run)]
        stores = {s for run in runs for s in run.statements if s in places}
        inner = list(ir.statements(loop.body))
        read = {v.container for s in inner for v in _read(s) if isinstance(v, ir.Load)}
        is_simple = all(isinstance(p, (Run, ir.Declare)) for p in parts) and stores == {s for s in inner if s in places}
        if not stores or not is_simple or any(s.target.container in read for s in stores):  # type: ignore[attr-defined]
            return None
        if len(stores) * _iterations(loop) * stretch.lanes.count > MOST_TOGETHER:
            return None
        found = Copies(stretch, stores, loop)
        if any(kept.size == SIDE_BY_SIDE for kept in found.kept.values()):
            return None  # whole vectors, which are best stored at once
        for p in parts:
            if isinstance(p, ir.Declare):
                found.declare_again(p)
        return found

    def declare_again(self, s: ir.Declare) -> None:
        """Declare a local that is the same for all lanes once more, in the loop that copies."""
        local = self.renamed[s.local] = replace(s.local)
        self.before.append(replace(ir.with_nodes(s, self._again), local=local))

    def _again(self, v: ir.Value) -> ir.Value:
        return ir.read_from(v, self.renamed)

    def keep(self, s: ir.Assign | ir.Update, value: ir.Value, lane: ir.Local) -> Iterator[ir.Assign]:
        """A store as one to an array; as none where an array holds the numbers already."""
        target, lanes = s.target, self.stretch.lanes
        assert isinstance(target, ir.Load)
        name = f"{target.container.name}_of"
        kept = self.kept.setdefault(s, _Kept(ir.Local(name, target.dtype, (_iterations(self.loop),), "temporary"), 1))

        def entry(lane: ir.Local, iteration: ir.Local | None) -> ir.Read:
            place = add(multiply(0 if iteration is None else ir.Read(iteration), lanes.count), ir.Read(lane))
            return ir.Read(array, (cast(add(multiply(place, kept.size), kept.number), ir.I32),))

        if s in lanes.places:
            place = lanes.places[s]
            along = multiply(ir.Read(self.lane), dict(place.terms)[lanes.last])
            to = ir.Load(target.container, (cast(add(add(self._start(place), along), place.constant), ir.I32),))
        else:
            own = cast(add(self.stretch.first, ir.Read(self.lane)), ir.I32)
            to = ir.Load(target.container, (*target.indices[:-1], own), target.component)
        if self._is_kept(s.value):
            self.renamed[lane] = self.lane
            self.stores.append(replace(s, target=to, value=ir.rebuilt(value, self._again)))
            return
        array = self.stretch.array(kept.array)
        number = None if self.loop is None else self.again
        self.stores.append(replace(s, target=to, value=entry(self.lane, number)))
        here = None if self.loop is None else self.loop.variables[0]
        yield ir.Assign(entry(lane, here), cast(value, array.dtype), place=s.place)

    def _is_kept(self, value: ir.Value) -> bool:
        """Whether a value is the entry of a local array at the loop's variable, and does not change in the loop."""
        if self.loop is None or not isinstance(value, ir.Read) or len(value.index) != 1:
            return False
        (index,) = value.index
        is_along = isinstance(index, ir.Read) and index.local is self.loop.variables[0]
        return is_along and value.local not in assigned_locals(self.loop.body)

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


def _neighbours(
    body: Iterable[ir.Statement], places: Mapping[ir.Statement, Affine], times: int
) -> dict[ir.Statement, _Kept]:
    """Stores to entries of J next to each other, in arrays that keep them side by side.

    LLVM makes whole vectors of numbers that are stored side by side, and reads them in their order in memory.
    """
    rows: dict[tuple[ir.Container, tuple[tuple[Atom, int], ...]], list[tuple[int, ir.Statement]]] = defaultdict(list)
    for s in body:
        if isinstance(s, (ir.Assign, ir.Update)) and isinstance(s.target, ir.Load) and s in places:
            rows[s.target.container, places[s].terms].append((places[s].constant, s))
    found: dict[ir.Statement, _Kept] = {}
    for (c, _), stores in rows.items():
        stores.sort(key=lambda store: store[0])
        while stores:
            start, _ = stores[0]
            n = 1
            while n < min(SIDE_BY_SIDE, len(stores)) and stores[n][0] == start + n:
                n += 1
            array = ir.Local(f"{c.name}_of", c.dtype, (n * times,), "temporary")
            found |= {s: _Kept(array, n, number) for number, (_, s) in enumerate(stores[:n])}
            del stores[:n]
    return found
