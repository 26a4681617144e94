"""Loops of arithmetic in pieces that LLVM vectorises.

A store to an array argument reads the array's address again, and LLVM cannot tell that the stores before it have left
that address alone. So it vectorises no loop that stores to J. A loop whose body is arithmetic therefore runs in pieces:
one piece stores its rows of J to a local array, and copies that to J when it is done. What the body reads at a fixed
place is read before the piece, for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from taichi_ext.analysis.affine import Affine, Indices
from taichi_ext.analysis.changes import written_containers
from taichi_ext.differentiate.build import Coefficient, add, cast, literal, multiply, operation
from taichi_ext.program import (
    F16,
    F32,
    I32,
    U32,
    U64,
    Assign,
    Body,
    Const,
    Container,
    Declare,
    For,
    If,
    Load,
    Local,
    Op,
    Read,
    Statement,
    Update,
    Value,
    declared,
    mapped,
    rebuilt,
    statements,
    with_values,
)
from taichi_ext.schedule.elementary import as_arithmetic, elementary_of
from taichi_ext.schedule.machine import ARRAYS, Machine
from taichi_ext.simplify.usage import all_values

LENGTHS = (32, 16)  # iterations of a piece: whole vectors, and few enough that its array is cleared quickly
MOST_COLLECTED = 256  # numbers
LEAST_WORK = 3  # operations per number that is collected, below which a copy costs more than vectors save

# What a vector does as fast as a scalar, by its cost in additions. What is not here is a call, for each element.
WORK = {
    **dict.fromkeys(("add", "sub", "mul", "neg", "abs", "max", "min", "floor", "ceil"), 1),
    **dict.fromkeys(("truediv", "sqrt", "rsqrt", "mod", "floordiv"), 6),
}
_TRUTHS = ("lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_not")
FREE = frozenset((*_TRUTHS, "cast", "select", "ifte", "bit_and", "bit_or", "bit_xor", "invert"))


@dataclass(frozen=True)
class Collected:
    """What an iteration stores to one container: ``numbers`` for each of its entries, one after the other."""

    container: Container
    numbers: int
    is_paired: bool = False  # as far as this loop goes, they can be stored in pairs, which LLVM makes one store


@dataclass(frozen=True)
class Pieces:
    """The pieces of a loop: their length, what is read before them, and what they collect."""

    domain: tuple[int, ...]
    length: int
    loads: tuple[Load, ...]
    tangents: tuple[Collected, ...]
    values: tuple[Collected, ...]  # empty where values are stored at once

    @property
    def numbers(self) -> int:
        """Of J, from each iteration."""
        return sum(c.numbers for c in self.tangents)

    @property
    def pairs(self) -> tuple[Container, ...]:
        """The shadows of which it stores two numbers at a time if nothing else touches them."""
        return tuple(c.container for c in self.tangents if c.is_paired)


def find_pieces(
    loop: For, domain: tuple[int, ...], shadows: dict[Container, Container], columns: int, machine: Machine
) -> Pieces | None:
    """How to run a loop in pieces, None where that is not possible or does not pay."""
    if machine.is_checked:
        return None
    survey = _Survey(loop, domain, shadows, columns, machine)
    survey.block(loop.body, is_top=True)
    tangents, values = survey.collected()
    is_possible = survey.is_arithmetic and tangents and not survey.loaded & survey.stored.keys()
    numbers = sum(c.numbers for c in tangents)
    if not is_possible or survey.work < LEAST_WORK * numbers:
        return None
    # the address of a tree is found before the piece if something is read from it there; others, and those of
    # arrays, are found again after each store to memory
    loads = tuple(survey.fixed.values())
    touched = {machine.tree(c) for c in survey.loaded | {c.container for c in values}}
    if touched <= {machine.tree(load.container) for load in loads} - {ARRAYS}:
        values = ()
    elif any(c.container not in shadows.values() for c in values):
        return None  # values of fields without tangents
    size = numbers + sum(c.numbers for c in values)
    for length in LENGTHS:
        if size * length <= MOST_COLLECTED and count_pieces(domain, length) >= machine.least:
            return Pieces(domain, length, loads, tangents, values)
    return None


def count_pieces(domain: tuple[int, ...], length: int) -> int:
    """How many pieces a loop over a domain has; none goes across the end of a row."""
    return math.prod(domain[:-1]) * -(-domain[-1] // length)


class _Survey:
    """What the body of a parallel loop does."""

    def __init__(
        self, loop: For, domain: tuple[int, ...], shadows: Mapping[Container, Container], columns: int, machine: Machine
    ) -> None:
        self.loop, self.domain, self.shadows, self.columns, self.machine = loop, domain, shadows, columns, machine
        self.indices = Indices((loop,))
        self.own = {local for s in statements(loop.body) for local in declared(s)}
        self.is_arithmetic = True
        self.work = 0
        self.fixed: dict[Any, Load] = {}  # reads at fixed places
        self.loaded: set[Container] = set()
        self.stored: dict[Container, list[tuple[tuple[Affine, ...], Any]]] = {}

    def block(self, body: Body, *, is_top: bool) -> None:
        for s in body:
            match s:
                case Declare(local=local):
                    self.is_arithmetic &= not local.shape
                case If(then=then, orelse=orelse):
                    self.block(then, is_top=False)
                    self.block(orelse, is_top=False)
                case Assign(target=Read(local=local, index=())) | Update(target=Read(local=local, index=())):
                    self.is_arithmetic &= local in self.own
                case Assign(target=Load() as target) if is_top:
                    places = tuple(map(self.indices.site, target.indices))
                    self.stored.setdefault(target.container, []).append((places, target.component))
                case _:
                    self.is_arithmetic = False
            seen: set[Value] = set()
            for value in all_values(s):
                if value not in seen:
                    seen.add(value)
                    self._note(value)

    def _note(self, value: Value) -> None:
        if isinstance(value, Op):
            known = elementary_of(value) if self.machine.is_fast else None
            self.is_arithmetic &= known is not None or value.name in WORK or value.name in FREE
            self.work += (WORK.get(value.name, 0) if known is None else known.work) * value.dtype.is_real
        elif isinstance(value, Read):
            self.is_arithmetic &= not value.index or not value.local.shape
        elif isinstance(value, Load):
            self.loaded.add(value.container)
            if all(isinstance(i, Const) for i in value.indices):
                self.is_arithmetic &= self._is_inside(value)
                self.fixed.setdefault(place_of(value), value)

    def _is_inside(self, load: Load) -> bool:
        extent = self.machine.extents.get(load.container)
        if extent is None or not all(isinstance(i, int) for i in load.component):
            return False
        offset = extent.offset or (0,) * len(extent.shape)
        places = zip(load.indices, offset, extent.shape, strict=True)
        return all(0 <= i.value - first < n for i, first, n in places)  # type: ignore[attr-defined]

    def collected(self) -> tuple[tuple[Collected, ...], tuple[Collected, ...]]:
        """The shadows and the containers that the loop stores to, each in full; all else is no arithmetic."""
        tangents, values = [], []
        for c, stores in self.stored.items():
            of = self.shadows.get(c)
            numbers = math.prod(c.element_shape) if of is None else self.columns * math.prod(of.element_shape)
            found = [self._number(c, *store) for store in stores] if of is None else self._numbers_of_j(stores, numbers)
            self.is_arithmetic &= sorted(found) == list(range(numbers)) and c.dtype != F16
            is_paired = of is not None and c.dtype == F32 and numbers * self.domain[-1] % 2 == 0
            (values if of is None else tangents).append(Collected(c, numbers, is_paired))
        return tuple(tangents), tuple(values)

    def _number(self, container: Container, places: tuple[Affine, ...], component: tuple[Any, ...]) -> int:
        """Which of the numbers of its own entry of a field or array an iteration stores; -1 for any other place."""
        extent = self.machine.extents.get(container)
        own = tuple(Affine(((v, 1),)) for v in self.loop.variables)
        is_own = extent is not None and extent.shape == self.domain and not any(extent.offset) and places == own
        if not is_own or not all(isinstance(n, int) for n in component):
            return -1
        number = 0
        for n, size in zip(component, container.element_shape, strict=True):
            number = number * size + n
        return number

    def _numbers_of_j(self, stores: list[Any], numbers: int) -> list[int]:
        own = Affine()
        for variable, size in zip(self.loop.variables, self.domain, strict=True):
            own = own * size + Affine(((variable, 1),))
        own = own * numbers
        return [place.constant if place.terms == own.terms else -1 for (place,), _ in stores]


def place_of(load: Load) -> Any:
    """What identifies an entry at a fixed place."""
    return load.container, tuple(i.value for i in load.indices), load.component  # type: ignore[attr-defined]


# --- the loop in pieces


def in_pieces(loop: For, pieces: Pieces, pairs: Mapping[Container, Container] = MappingProxyType({})) -> For:
    """The loop as one over pieces; ``pairs`` are shadows and the arrays of pairs that are stored to in their place."""
    *outer, last = loop.variables
    size = pieces.domain[-1]
    piece = Local("piece", I32, (), "loop")
    body, start = start_of(piece, outer, pieces.domain, pieces.length)
    first = _declared(body, "first", start)
    end = add(first, pieces.length)
    end = _declared(body, "end", end if size % pieces.length == 0 else operation("min", end, size))
    made = _Piece(pieces, pairs, [*map(Read, outer)], Read(last), first, end)
    body += made.before()
    body.append(For("range", (last,), (first, end), made.inner(loop), place=loop.place))
    body += made.after()
    count = literal(count_pieces(pieces.domain, pieces.length), I32)
    return For("range", (piece,), (count,), tuple(body), loop.config, place=loop.place)


def start_of(
    piece: Local, outer: list[Local], domain: tuple[int, ...], length: int
) -> tuple[list[Statement], Coefficient]:
    """The outer variables of a loop as declared from the number of a piece, and where that begins in its row."""
    *sizes, size = domain
    below = per_row = -(-size // length)
    below *= math.prod(sizes)
    body: list[Statement] = []
    for n, (variable, count) in enumerate(zip(outer, sizes, strict=True)):
        below //= count
        number = Read(piece) if below == 1 else operation("floordiv", Read(piece), below)
        body.append(Declare(variable, (operation("mod", number, count) if n else number,)))
    number = operation("mod", Read(piece), per_row) if outer else Read(piece)
    return body, multiply(number, length)


def _declared(body: list[Statement], name: str, value: Coefficient) -> Read:
    local = Local(name, I32, (), "temporary")
    body.append(Declare(local, (cast(value, I32),)))
    return Read(local)


class _Piece:
    """What a piece does before, in and after its loop."""

    def __init__(
        self,
        pieces: Pieces,
        pairs: Mapping[Container, Container],
        outer: list[Read],
        last: Read,
        first: Read,
        end: Read,
    ) -> None:
        self.pieces, self.pairs, self.outer, self.last, self.first, self.end = pieces, pairs, outer, last, first, end
        self.loads = {place_of(load): Local(load.container.name, load.dtype, (), "temporary") for load in pieces.loads}
        self.arrays = {
            c.container: Local(f"piece_{c.container.name}", c.container.dtype, (c.numbers * pieces.length,))
            for c in (*pieces.tangents, *pieces.values)
        }
        self.numbers = {c.container: c.numbers for c in (*pieces.tangents, *pieces.values)}

    def before(self) -> list[Statement]:
        reads: list[Statement] = [Declare(self.loads[place_of(load)], (load,)) for load in self.pieces.loads]
        return reads + [Declare(a, (literal(0, a.dtype),) * a.shape[0]) for a in self.arrays.values()]

    def inner(self, loop: For) -> Body:
        memo: dict[Value, Value] = {}
        indices = Indices((loop,))

        def read(value: Value) -> Value:
            is_fixed = isinstance(value, Load) and all(isinstance(i, Const) for i in value.indices)
            return Read(self.loads[place_of(value)], place=value.place) if is_fixed else as_arithmetic(value)  # type: ignore[arg-type]

        def change(s: Statement) -> Statement:
            new = with_values(s, lambda v: rebuilt(v, read, memo))
            if isinstance(s, Assign) and isinstance(s.target, Load) and s.target.container in self.arrays:
                assert isinstance(new, Assign)
                return Assign(self._place(s.target, indices), cast(new.value, s.target.dtype), place=s.place)
            return new

        return mapped(loop.body, change)

    def _place(self, target: Load, indices: Indices) -> Read:
        """Where a piece keeps what an iteration stores."""
        c = target.container
        number = 0
        if c.element_shape:
            for n, size in zip(target.component, c.element_shape, strict=True):
                number = number * size + n  # type: ignore[operator]
        elif any(c is t.container for t in self.pieces.tangents):
            number = indices.site(target.indices[0]).constant
        own = multiply(operation("sub", self.last, self.first), self.numbers[c])
        return Read(self.arrays[c], (cast(add(own, number), I32),))

    def after(self) -> list[Statement]:
        made: list[Statement] = []
        length = operation("sub", self.end, self.first)
        for c in self.pieces.values:
            made.append(self._copy_of_values(c, length))
        for c in self.pieces.tangents:
            made += self._copy_of_tangents(c, length)
        return made

    def _copy_of_values(self, c: Collected, length: Value) -> For:
        k = Local("k", I32, (), "loop")
        indices = (*self.outer, cast(add(self.first, Read(k)), I32))
        stores = []
        for n in range(c.numbers):
            component, rest = [], n
            for size in reversed(c.container.element_shape):
                component.insert(0, rest % size)
                rest //= size
            value = Read(self.arrays[c.container], (cast(add(multiply(Read(k), c.numbers), n), I32),))
            stores.append(Assign(Load(c.container, indices, tuple(component)), value))
        return For("range", (k,), (length,), tuple(stores))

    def _copy_of_tangents(self, c: Collected, length: Value) -> list[Statement]:
        body: list[Statement] = []
        number: Any = 0
        for index, size in zip((*self.outer, self.first), self.pieces.domain, strict=True):
            number = add(multiply(number, size), index)
        count, start = multiply(length, c.numbers), multiply(number, c.numbers)
        pair = self.pairs.get(c.container)
        if pair is not None:
            count, start = operation("floordiv", count, 2), operation("floordiv", start, 2)
        start = _declared(body, "start", start)
        k = Local("k", I32, (), "loop")
        array = self.arrays[c.container]
        if pair is None:
            store = Assign(Load(c.container, (cast(add(start, Read(k)), I32),)), Read(array, (Read(k),)))
        else:
            numbers = (Read(array, (cast(add(multiply(Read(k), 2), n), I32),)) for n in (0, 1))
            store = Assign(Load(pair, (cast(add(start, Read(k)), I32),)), _pair(*numbers))
        return [*body, For("range", (k,), (count,), (store,))]


# --- two numbers at a time


def as_pairs(shadow: Container) -> Container:
    """An array of pairs in the place of one of numbers of 32 bits."""
    return replace(shadow, dtype=U64)


def _pair(low: Value, high: Value) -> Value:
    """Two numbers of 32 bits as one of 64, as memory has them one after the other."""
    first, second = (Op("cast", (Op("bit_cast", (x,), U32),), U64) for x in (low, high))
    return Op("bit_or", (first, Op("shift_left", (second, Const(32, U64)), U64)), U64)


def touched(statement: Statement) -> set[Container]:
    """The containers that a statement reads or writes, in its blocks too."""
    inner = list(statements((statement,)))
    found = {v.container for s in inner for v in all_values(s) if isinstance(v, Load)}
    return found | written_containers(inner)
