"""Whether a level reads values from a field or array that were computed from the position of its pixel.

Tangents by positions are kept with locals. Fields and arrays have none, so values read from them are constant for the
gradient of a level. That is correct for values stored at other positions: by other kernels, loops or iterations. The
dependence on a number stored at the same position would be missing.

The statements are walked in their order, loops until nothing changes. An entry is identified by the normal forms of its
indices. A store to the same entry replaces its value; entries whose indices differ by a constant are distinct. If a
loop starts its next iteration at another position, earlier stores depend on a position that no longer applies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import taichi_ext.program as ir
from taichi_ext.analysis.activity import CONSTANT
from taichi_ext.analysis.affine import Affine, Indices, source_of
from taichi_ext.analysis.changes import read_containers, varying_locals, written_containers
from taichi_ext.analysis.same_values import SameValues
from taichi_ext.cached import cached_property

Position = frozenset[tuple[ir.Local, int]]  # entries of locals; a ``sqrt_edge`` counts as one
Key = tuple[Affine | None, ...]  # the indices of an entry, None where they are not known
_SIDES = ("inside", "outside")


@dataclass(frozen=True)
class StoredPosition:
    """A level, or a side of an edge, that reads a value stored at the same position."""

    use: ir.Boundary
    load: ir.Load
    is_root: bool  # a ``sqrt_edge`` was stored


class _Sources(NamedTuple):
    """The positions that a value depends on, and from where it has those that it was read with."""

    positions: frozenset[Position] = frozenset()
    loads: frozenset[tuple[Position, ir.Load]] = frozenset()

    def union(self, other: _Sources) -> _Sources:
        return _Sources(self.positions | other.positions, self.loads | other.loads)

    def without(self, gone: frozenset[Position]) -> _Sources:
        return _Sources(self.positions - gone, frozenset(pair for pair in self.loads if pair[0] not in gone))


_NOTHING = _Sources()
_State = dict[ir.Local | ir.Container, dict[Key, _Sources]]


def find_stored_position(body: ir.Body, positions: Mapping[ir.Boundary, Position]) -> StoredPosition | None:
    """The first level that reads a stored value that depends on its position; None if there is none.

    Args:
        body: the statements of a kernel.
        positions: those of the statements that differentiate with respect to one.
    """
    stored = {c for c in written_containers(body) if c.dtype.is_real}
    if not positions or stored.isdisjoint(read_containers(body)):
        return None
    walk = _Positions(body, positions)
    walk.block(body)
    return walk.found


class _Positions:
    """One walk over a kernel; ``state`` holds the positions that memory and locals depend on."""

    def __init__(self, body: ir.Body, positions: Mapping[ir.Boundary, Position]) -> None:
        self.positions = positions
        self.indices = Indices(body)
        self.body = body
        self.found: StoredPosition | None = None
        self.state: _State = {}
        self.own: dict[ir.Local, dict[int, set[Position]]] = {}  # the positions that a local is part of, by entry
        for position in positions.values():
            for local, n in position:
                self.own.setdefault(local, {}).setdefault(n, set()).add(position)
        self.roots: list[dict[Position, ir.Value]] = []  # of the blocks around, each with its level
        self.stopped: list[set[ir.Container]] = []
        self.jumps: list[list[_State]] = [[]]

    # --- values

    def sources(self, value: ir.Value, known: dict[ir.Value, _Sources] | None = None) -> _Sources:
        """The dependences of a value through real numbers."""
        known = {} if known is None else known
        if value not in known:
            known[value] = self._found(value, known)
        return known[value]

    def _found(self, value: ir.Value, known: dict[ir.Value, _Sources]) -> _Sources:
        if isinstance(value, ir.FoldedConst):
            return self.sources(value.source, known)
        if not value.dtype.is_real:
            return _NOTHING
        if isinstance(value, ir.Read):
            return self._at(value).union(_Sources(frozenset(self._own(value))))
        if isinstance(value, ir.Load):
            if any(value.container in stopped for stopped in self.stopped):
                return _NOTHING
            found = self._at(value).positions
            return _Sources(found, frozenset((position, value) for position in found))
        if isinstance(value, ir.Op) and value.name not in CONSTANT:
            return self._joined(value.args, known)
        return _NOTHING

    def _joined(self, values: Iterable[ir.Value], known: dict[ir.Value, _Sources] | None = None) -> _Sources:
        known = {} if known is None else known
        total = _NOTHING
        for value in values:
            total = total.union(self.sources(value, known))
        return total

    def _own(self, read: ir.Read) -> set[Position]:
        """The positions that an entry of a local is part of, or may be part of."""
        known = self.own.get(read.local, {})
        number = read.number if known else None
        return set().union(*known.values()) if number is None else known.get(number, set())

    # --- memory

    def _key(self, place: ir.Read | ir.Load) -> Key:
        index = place.index if isinstance(place, ir.Read) else (*place.indices, *place.component)
        return tuple(map(self.indices.form, index))

    def _at(self, place: ir.Read | ir.Load) -> _Sources:
        """The possible dependences of an entry that is read."""
        total, key = _NOTHING, self._key(place)
        for other, held in self.state.get(place.memory, {}).items():
            if not _differ(key, other):
                total = total.union(held)
        return total

    def _store(self, place: ir.Read | ir.Load, sources: _Sources, *, replaces: bool) -> None:
        if not place.dtype.is_real:
            return
        self._put(place.memory, self._key(place), sources, replaces=replaces)

    def _put(self, memory: ir.Local | ir.Container, key: Key, sources: _Sources, *, replaces: bool) -> None:
        """Store sources for an entry; only entries that depend on a position are kept."""
        if replaces and None not in key:
            self.state.get(memory, {}).pop(key, None)
        if sources.positions:
            held = self.state.setdefault(memory, {})
            held[key] = held.get(key, _NOTHING).union(sources)

    # --- statements

    def block(self, body: ir.Body) -> None:
        self.roots.append({})
        self.stopped.append(set())
        for s in body:
            self.statement(s)
        self.roots.pop()
        self.stopped.pop()

    def statement(self, s: ir.Statement) -> None:
        match s:
            case ir.Declare(local=local, values=values):
                known = [self.sources(value) for value in values]
                self.state.pop(local, None)
                for n, sources in enumerate(known):
                    self._store(_entry(local, n), sources, replaces=True)
            case ir.Assign(target=target, value=value):
                self._store(target, self.sources(value), replaces=True)
            case ir.Update(target=target, value=value):
                self._store(target, self.sources(value), replaces=False)
            case ir.Atomic(target=target, value=value, result=result):
                before = self.sources(target)
                self._store(target, self.sources(value), replaces=False)
                self._give([] if result is None else [result], before)
            case ir.Call(results=results):
                self._give(results, self._joined(ir.values_of(s)))
            case ir.Boundary():
                self._boundary(s)
            case ir.Effect():
                self._effect(s)
            case ir.If(then=then, orelse=orelse):
                self._branches(then, orelse)
            case ir.For() | ir.While():
                self._loop(s)
            case ir.Jump():
                self.jumps[-1].append(_copied(self.state))
            case _:
                pass

    def _give(self, results: Iterable[ir.Local], sources: _Sources) -> None:
        for local in results:
            self.state.pop(local, None)
            if local.dtype.is_real:
                self._put(local, (None,) * len(local.shape), sources, replaces=False)

    def _effect(self, s: ir.Effect) -> None:
        if s.function == "stop_grad":
            self.stopped[-1].update(a for a in s.args if isinstance(a, ir.Container))
        sources = self._joined(ir.values_of(s))
        for container in s.writes:
            if container.dtype.is_real:
                key = (None,) * (container.ndim + len(container.element_shape))
                self._put(container, key, sources, replaces=False)

    def _branches(self, then: ir.Body, orelse: ir.Body) -> None:
        before = _copied(self.state)
        self.block(then)
        after, self.state = self.state, before
        self.block(orelse)
        self.state = _union(self.state, after)

    def _loop(self, s: ir.For | ir.While) -> None:
        varying = varying_locals(s)
        inner = {local for statement in s.within for local in ir.declared(statement)}
        inner.update(s.variables if isinstance(s, ir.For) else ())
        gone = frozenset(p for p in {*self.positions.values()} if any(e[0] in varying and e[0] in inner for e in p))
        before = _copied(self.state)
        while True:
            self.jumps.append([])
            self.block(s.body)
            ends = [self.state, *self.jumps.pop()]
            last = before
            for end in ends:
                last = _union(last, _forgotten(end, inner))
            again = before
            for end in ends:
                again = _union(again, _without(_forgotten(end, inner), gone))
            if again == before:
                self.state = last
                return
            before, self.state = again, _copied(again)

    # --- boundaries

    @cached_property
    def levels(self) -> SameValues:
        return SameValues(self.body)

    def _boundary(self, s: ir.Boundary) -> None:
        position = self.positions.get(s)
        if position is not None:
            self._check(s, [s.given[name] for name in ("level", "value") if name in s.given], position, is_root=False)
            self._check_roots(s)
        for result, sources in zip(s.results, self._results(s), strict=True):
            self._give([result], sources)
        if s.kind == "sqrt_edge":
            level, root = s.given["level"], frozenset(((s.results[0], 0),))
            assert isinstance(level, ir.Value)
            self.roots[-1][root] = level
            self._give(s.results, self.sources(ir.Read(s.results[0])).union(_Sources(frozenset((root,)))))

    def _results(self, s: ir.Boundary) -> list[_Sources]:
        """The dependences of the tangents of the results."""
        count = len(s.results)
        match s.kind:
            case "replace_gradient":
                return [self.sources(value) for value in s.sources("surrogate")]
            case "rule":
                own = self._joined(value for name in s.inner for value in s.sources(name))
                kept = s.numbers if s.options["keeps_automatic"] else [None] * count
                return [own if value is None else own.union(self.sources(value)) for value in kept]
            case "edge" | "coverage" | "sqrt_edge":
                names = ("level", *_SIDES)
                return [self._joined(e for name in names if name in s.given for e in ir.entries(s.given[name]))] * count
        return [_NOTHING] * count

    def _check_roots(self, s: ir.Boundary) -> None:
        """An edge looks for the roots of its own level in its sides."""
        level = s.given.get("level")
        for root, of in [pair for block in self.roots for pair in block.items()]:
            if isinstance(level, ir.Value) and self.levels.may_be_equal(level, of):
                self._check(s, [s.given[name] for name in _SIDES if name in s.given], root, is_root=True)

    def _check(self, s: ir.Boundary, groups: Iterable[ir.Group], position: Position, *, is_root: bool) -> None:
        loads = self._joined(e for group in groups for e in ir.entries(group)).loads
        found = next((load for of, load in loads if of == position), None)
        if found is not None and self.found is None:
            self.found = StoredPosition(s, found, is_root)


def _entry(local: ir.Local, n: int) -> ir.Read:
    """The entry of a local with a number, in C order."""
    index: list[int] = []
    for size in reversed(local.shape):
        index.insert(0, n % size)
        n //= size
    return ir.Read(local, tuple(index))


def _differ(a: Key, b: Key) -> bool:
    """Whether two entries are certainly not the same."""
    return any(
        i is not None and j is not None and i.terms == j.terms and i.constant != j.constant
        for i, j in zip(a, b, strict=True)
    )


def _copied(state: _State) -> _State:
    return {memory: dict(held) for memory, held in state.items()}


def _union(a: _State, b: _State) -> _State:
    """Facts that hold after both."""
    result = _copied(a)
    for memory, held in b.items():
        own = result.setdefault(memory, {})
        for key, sources in held.items():
            own[key] = own.get(key, _NOTHING).union(sources)
    return result


def _forgotten(state: _State, inner: set[ir.Local]) -> _State:
    """The state after locals have changed: entries whose indices use them are unknown."""

    def key_of(key: Key) -> Key:
        return tuple(None if i is None or any(source_of(a) in inner for a, _ in i.terms) else i for i in key)

    result: _State = {}
    for memory, held in state.items():
        own = result.setdefault(memory, {})
        for key, sources in held.items():
            new = key_of(key)
            own[new] = own.get(new, _NOTHING).union(sources)
    return result


def _without(state: _State, gone: frozenset[Position]) -> _State:
    left = {m: {key: sources.without(gone) for key, sources in held.items()} for m, held in state.items()}
    return {m: {key: sources for key, sources in held.items() if sources.positions} for m, held in left.items()}
