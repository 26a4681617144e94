"""Where paths from parameters to outputs end: casts to integers, roundings, comparisons, stores of other values.

Paths are edges of two graphs: of those that have a derivative, which end at cuts, and of all, through indices and
conditions too, in which cuts are sources of what is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import taichi_ext.program as ir
from taichi_ext.program.values import flat_number

_WORDS = {
    "cast": "a cast to an integer",
    "bit_cast": "a cast to bits",
    "floordiv": "the quotient of `//`",
    **{name: f"`{name}`" for name in ("floor", "ceil", "round")},
    **dict.fromkeys(ir.COMPARISONS, "a comparison"),
}
_CARRIERS = {"stop_gradient": "", "gradient": "", "replace_gradient": "surrogate", "weighted": "arguments"}
_STORE = "store"
Memory = ir.Local | ir.Container


@dataclass(frozen=True)
class Cut:
    """A place of the source where numbers lose their derivative."""

    place: ir.Place | None
    name: str

    @property
    def is_store(self) -> bool:
        """Whether another value replaces the number."""
        return self.name == _STORE

    def __str__(self) -> str:
        where = "" if self.place is None else f"{self.place.file}:{self.place.line} (`{self.place.text.strip()}`), in "
        return f"{where}{_WORDS.get(self.name, 'a store that replaces it')}"


@dataclass(frozen=True)
class Component:
    """A component of the elements of a container, by its number; None where it is not known."""

    key: Hashable
    number: int | None


Edge = tuple[Hashable, Hashable]


@dataclass(frozen=True)
class Paths:
    """What a kernel computes from what: edges between keys of containers, parts of these, locals and cuts."""

    smooth: tuple[Edge, ...] = ()  # with a derivative
    any: tuple[Edge, ...] = ()  # in any way

    @property
    def cuts(self) -> list[Cut]:
        """All cuts of numbers that are read from containers or parameters, without comparisons, which are many."""
        smooth = ir.reached((part for part, _ in self.smooth if isinstance(part, Component)), self.smooth)
        cuts = [cut for cut in dict.fromkeys(to for _, to in self.smooth) if isinstance(cut, Cut) and cut in smooth]
        cuts = [cut for cut in cuts if cut.name not in ir.COMPARISONS]
        # nearly all kernels store what they do not add to
        return [] if all(cut.is_store for cut in cuts) else cuts


def cuts_between(paths: Sequence[Paths], param: Hashable, number: int, output: Hashable) -> list[Cut]:
    """The cuts on the paths from a component of a parameter to an output, on which the derivative is zero.

    Kernels are taken in any order. Where a path has a derivative, a store to the parameter may have come before.
    """
    start = {Component(param, None), Component(param, number)}
    edges, every = [e for p in paths for e in p.smooth], [e for p in paths for e in p.any]
    smooth = ir.reached(start, edges)
    if output in smooth:
        return list(dict.fromkeys(to for part, to in edges if part in start and isinstance(to, Cut) and to.is_store))
    between = dict.fromkeys(to for _, to in edges if to in smooth and isinstance(to, Cut) and not to.is_store)
    return [cut for cut in between if output in ir.reached((cut,), every)]


def reaches(paths: Sequence[Paths], start: Hashable, output: Hashable) -> bool:
    """Whether a container is computed from another one in any way, by kernels taken in any order."""
    return output in ir.reached((start,), [e for p in paths for e in p.any])


def has_cuts(program: ir.Program) -> bool:
    """Whether real numbers are cast to integers, rounded, compared, or divided with a whole quotient."""
    values = (value for s in ir.statements(program.body) for value in ir.values_of(s))
    return any(_is_cut(node) for value in values for node in ir.walk(value))


def find_paths(program: ir.Program, key_of: Callable[[Memory | None], Hashable], *, has_source: bool = True) -> Paths:
    """The paths of a kernel; ``key_of`` gives the key of a container or parameter, or of what the kernel returns.

    Where the user has no source of it (``copy_from``), cuts have no place.
    """
    paths = _Edges(key_of, has_source)
    for s, around in ir.inherited(program.body, frozenset(), lambda s, around: around | paths.sources(s)):
        paths.add(s, around)
    for cut, part, sources in paths.stores:
        if sources.isdisjoint(ir.reached(paths.parts.get(part.key, ()), paths.smooth)):
            paths.smooth[part, cut] = None
    return Paths(tuple(paths.smooth), tuple(paths.any))


def _is_cut(node: ir.Value) -> bool:
    if not isinstance(node, ir.Op) or node.name not in _WORDS or not node.args[0].dtype.is_real:
        return False
    return not node.dtype.is_real or node.name not in ("cast", "bit_cast")


def _operands(value: ir.Value) -> tuple[ir.Value, ...]:
    return (value.source,) if isinstance(value, ir.FoldedConst) else ir.children(value)


def _smooth_operands(value: ir.Value) -> tuple[ir.Value, ...]:
    """Those on which a value depends with a derivative."""
    is_smooth = isinstance(value, ir.Op) and value.dtype.is_real and not _is_cut(value)
    return _operands(value) if is_smooth or isinstance(value, ir.FoldedConst) else ()


class _Edges:
    """The edges of one kernel, and stores of values that may not depend on what they replace."""

    def __init__(self, key_of: Callable[[Memory | None], Hashable], has_source: bool) -> None:
        self.key_of, self.has_source = key_of, has_source
        self.smooth: dict[Edge, None] = {}
        self.any: dict[Edge, None] = {}
        self.parts: dict[Hashable, set[Component]] = {}
        self.stores: list[tuple[Cut, Component, set[Hashable]]] = []

    def add(self, s: ir.Statement, around: frozenset[Hashable]) -> None:
        """The edges of a statement, whose blocks around depend on some sources."""
        values = ir.values_of(s)
        for node, cut in self._cuts(s):
            self._link(self.smooth, self._read(node.args, _smooth_operands), cut)
        every = around | self.sources(s)
        if isinstance(s, ir.Boundary) and s.kind in _CARRIERS:
            values = s.sources(_CARRIERS[s.kind]) if _CARRIERS[s.kind] else []
        written: list[Memory | None] = [*ir.declared(s)]
        written += [s.target.memory] if isinstance(s, ir.Store) else [None] if isinstance(s, ir.Return) else []
        for memory in written:
            node = memory if isinstance(memory, ir.Local) else self.key_of(memory)
            if memory is None or memory.dtype.is_real:
                self._link(self.smooth, self._read(values, _smooth_operands), node)
            self._link(self.any, every, node)
        if isinstance(s, ir.Assign) and isinstance(s.target, ir.Load) and s.target.dtype.is_real:
            cut, sources = self._cut(s.place, _STORE), self._read([s.value], _smooth_operands)
            self.stores.append((cut, self._part(s.target), sources))

    def sources(self, s: ir.Statement) -> frozenset[Hashable]:
        """What the values of a statement depend on, in any way."""
        return frozenset(chain(self._read(ir.values_of(s), _operands), (cut for _, cut in self._cuts(s))))

    def _cuts(self, s: ir.Statement) -> Iterator[tuple[ir.Op, Cut]]:
        for node in ir.through(ir.values_of(s), _operands):
            if isinstance(node, ir.Op) and _is_cut(node):
                yield node, self._cut(node.place or s.place, node.name)

    def _cut(self, place: ir.Place | None, name: str) -> Cut:
        return Cut(place if self.has_source else None, name)

    def _read(self, values: Iterable[ir.Value], operands: Callable[[ir.Value], Iterable[ir.Value]]) -> set[Hashable]:
        """What values are read from, through the operands that count."""
        reads = [v for v in ir.through(values, operands) if isinstance(v, (ir.Read, ir.Load))]
        parts: set[Hashable] = {self._part(v) for v in reads if self.key_of(v.memory) is not None}
        return parts | {v.local for v in reads if isinstance(v, ir.Read)}

    def _part(self, value: ir.Read | ir.Load) -> Component:
        index = value.index if isinstance(value, ir.Read) else value.component
        shape = value.local.shape if isinstance(value, ir.Read) else value.container.element_shape
        part = Component(self.key_of(value.memory), flat_number(index, shape) if index else 0)
        self.parts.setdefault(part.key, set()).add(part)
        self.smooth[part.key, part] = self.any[part.key, part] = None
        return part

    @staticmethod
    def _link(edges: dict[Edge, None], sources: Iterable[Hashable], target: Hashable) -> None:
        edges.update(dict.fromkeys((source, target) for source in sources))
