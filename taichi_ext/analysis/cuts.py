"""Where paths from parameters to outputs end: casts to integers, roundings, quotients, stores of other values.

For each container, sources are collected twice: those on which its numbers depend with a derivative, and all, through
indices and conditions too. Where a number with sources is cut, the cut itself is a source of the second kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import taichi_ext.program as ir
from taichi_ext.program.values import flat_number

_WORDS = {
    "cast": "a cast to an integer",
    "bit_cast": "a cast to bits",
    "floordiv": "the quotient of `//`",
    **{name: f"`{name}`" for name in ("floor", "ceil", "round")},
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
class Part:
    """A component of the elements of a container, by its number."""

    key: Hashable
    number: int


@dataclass(frozen=True)
class Paths:
    """What the containers of a kernel are computed from, by key: other keys, parts of them, and cuts.

    Attributes:
        smooth: with a derivative.
        any: in any way.
        sources: of each cut.
    """

    smooth: Mapping[Hashable, frozenset[Hashable]] = field(default_factory=dict)
    any: Mapping[Hashable, frozenset[Hashable]] = field(default_factory=dict)
    sources: Mapping[Cut, frozenset[Hashable]] = field(default_factory=dict)


def cuts_between(paths: Sequence[Paths], param: Hashable, number: int, output: Hashable) -> list[Cut]:
    """The cuts on the paths from a component of a parameter to an output, on which the derivative is zero.

    Kernels are taken in any order. Where a path has a derivative, a store to the parameter may have come before.
    """
    start = {param, Part(param, number)}
    smooth = _reached([p.smooth for p in paths], start)
    cuts = [(cut, sources) for p in paths for cut, sources in p.sources.items()]
    if output in smooth:
        return list(dict.fromkeys(cut for cut, sources in cuts if cut.is_store and not sources.isdisjoint(start)))
    found = dict.fromkeys(cut for cut, sources in cuts if not cut.is_store and _meets(sources, smooth, start))
    return [cut for cut in found if output in _reached([p.any for p in paths], {cut})]


def reaches(paths: Sequence[Paths], start: Hashable, output: Hashable) -> bool:
    """Whether a container is computed from another one in any way, by kernels taken in any order."""
    tables = [p.any for p in paths]
    parts = {s for t in tables for sources in t.values() for s in sources if isinstance(s, Part) and s.key == start}
    return start == output or output in _reached(tables, {start, *parts})


def _meets(sources: Iterable[Hashable], reached: set[Hashable], start: set[Hashable]) -> bool:
    return any(s in start or s in reached or (isinstance(s, Part) and s.key in reached) for s in sources)


def _reached(tables: list[Mapping[Hashable, frozenset[Hashable]]], start: set[Hashable]) -> set[Hashable]:
    """The containers that are computed from some."""
    reached = set[Hashable]()
    while new := {k for t in tables for k, sources in t.items() if _meets(sources, reached, start)} - reached:
        reached |= new
    return reached


def has_cuts(program: ir.Program) -> bool:
    """Whether real numbers are cast to integers, rounded, or divided with a whole quotient."""
    values = (value for s in ir.statements(program.body) for value in ir.values_of(s))
    return any(_is_cut(node) for value in values for node in ir.walk(value))


def find_paths(program: ir.Program, key_of: Callable[[Memory | None], Hashable]) -> Paths:
    """The paths of a kernel; ``key_of`` gives the key of a container, or of what the kernel returns."""
    found = _Search(key_of)
    while found.has_changed:
        found.has_changed = False
        found.body(program.body, frozenset())

    def by_key(table: Mapping[Memory | None, set[Hashable]]) -> dict[Hashable, frozenset[Hashable]]:
        return {key_of(m): frozenset(sources) for m, sources in table.items() if not isinstance(m, ir.Local)}

    return Paths(by_key(found.smooth), by_key(found.any), {cut: frozenset(s) for cut, s in found.cuts.items()})


def _is_cut(node: ir.Value) -> bool:
    if not isinstance(node, ir.Op) or node.name not in _WORDS or not node.args[0].dtype.is_real:
        return False
    return not node.dtype.is_real or node.name not in ("cast", "bit_cast")


@dataclass(frozen=True)
class _Sources:
    """Of a value: those on which it depends with a derivative, and all."""

    smooth: frozenset[Hashable]
    any: frozenset[Hashable]


class _Search:
    """One fixpoint: sources of memory, of both kinds."""

    def __init__(self, key_of: Callable[[Memory | None], Hashable]) -> None:
        self.key_of = key_of
        self.smooth: dict[Memory | None, set[Hashable]] = defaultdict(set)
        self.any: dict[Memory | None, set[Hashable]] = defaultdict(set)
        self.cuts: dict[Cut, set[Hashable]] = defaultdict(set)
        self.has_changed = True

    def body(self, body: ir.Body, guard: frozenset[Hashable]) -> None:
        for s in body:
            known: dict[ir.Value, _Sources] = {}  # of its nodes
            sources = [self._of(v, s.place, known) for v in ir.values_of(s)]
            every = guard.union(*(source.any for source in sources))
            for block in ir.bodies(s):
                self.body(block, every)
            if isinstance(s, ir.Boundary) and s.kind in _CARRIERS:
                name = _CARRIERS[s.kind]
                sources = [self._of(v, s.place, known) for v in s.sources(name)] if name else []
            written: list[Memory | None] = [*ir.declared(s)]
            written += [s.target.memory] if isinstance(s, ir.Store) else [None] if isinstance(s, ir.Return) else []
            for memory in written:
                if memory is None or memory.dtype.is_real:
                    self._add(self.smooth[memory], frozenset().union(*(source.smooth for source in sources)))
                self._add(self.any[memory], every)
            if isinstance(s, ir.Assign) and isinstance(s.target, ir.Load) and s.target.dtype.is_real:
                own, key = self._own(s.target), self.key_of(s.target.memory)
                if not any(k == key or (isinstance(k, Part) and k.key == key) for k in sources[-1].smooth):
                    self._add(self.cuts[Cut(s.place, _STORE)], own)

    def _add(self, table: set[Hashable], sources: frozenset[Hashable]) -> None:
        if not sources <= table:
            table |= sources
            self.has_changed = True

    def _of(self, value: ir.Value, place: ir.Place | None, known: dict[ir.Value, _Sources]) -> _Sources:
        if value not in known:
            parts = (value.source,) if isinstance(value, ir.Known) else ir.children(value)
            below = [self._of(part, place, known) for part in parts]
            every = frozenset[Hashable]().union(*(source.any for source in below))
            if isinstance(value, (ir.Read, ir.Load)):
                own = self._own(value)
                known[value] = _Sources(own | self.smooth[value.memory], own | every | self.any[value.memory])
            else:
                smooth = frozenset[Hashable]().union(*(source.smooth for source in below))
                if smooth and _is_cut(value):
                    cut = Cut(value.place or place, value.name)  # type: ignore[attr-defined]
                    self._add(self.cuts[cut], smooth)
                    every |= {cut}
                known[value] = _Sources(smooth if value.dtype.is_real and not _is_cut(value) else frozenset(), every)
        return known[value]

    def _own(self, value: ir.Read | ir.Load) -> frozenset[Hashable]:
        """What a value is read from, if that is a container or a parameter."""
        key = self.key_of(value.memory)
        if key is None:
            return frozenset()
        index = value.index if isinstance(value, ir.Read) else value.component
        shape = value.local.shape if isinstance(value, ir.Read) else value.container.element_shape
        number = flat_number(index, shape) if index else 0
        return frozenset([key if number is None else Part(key, number)])
