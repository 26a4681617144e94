"""Levels at other positions: copies of the code that computes a level, with another position in it.

The copied statements are those before the level that compute it from its position, in the iteration of the loops
around.  Other values that they read are kept in locals.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import taichi_ext.program as ir
from taichi_ext.analysis.changes import read_locals
from taichi_ext.differentiate.facts.pixel_indices import with_real_operands
from taichi_ext.errors import DerivativeWarning
from taichi_ext.record.signs import with_slopes
from taichi_ext.simplify.usage import written_locals

_Entry = tuple[ir.Local, tuple[Any, ...]]


class _Lost(Exception):
    """Why a level cannot be computed at another position."""


def with_levels(body: ir.Body) -> ir.Body:
    """The block with each ``level_at`` replaced by the code that computes the level there.

    Where that is not possible, a level that is linear in the pixel takes its place; a ``DerivativeWarning`` says so.
    """
    levels = [s for s in ir.statements(body) if isinstance(s, ir.Boundary) and s.kind == "level_at"]
    if not levels:
        return body
    named = {value.local for value in (s.given["value"] for s in levels) if isinstance(value, ir.Read)}
    body = with_slopes(body, named)
    levels = [s for s in ir.statements(body) if isinstance(s, ir.Boundary) and s.kind == "level_at"]
    before: dict[ir.Statement, list[ir.Declare]] = {}  # values kept before the statements that read them
    instead: dict[ir.Statement, ir.Body] = {}
    slices: dict[ir.Local, _Slice] = {}
    for s in levels:
        level = s.given["value"]
        if not all(isinstance(v, ir.Read) for v in (level, *ir.entries(s.given["at"]))):  # the latter: raises later
            instead[s] = (_linear(s),)
            continue
        local = _read(level).local
        if local not in slices:
            slices[local] = _slice(body, local, s)
            before.update({of: [*before.get(of, []), *kept] for of, kept in slices[local].kept.items()})
        instead[s] = (*slices[local].at(s),)
    return _replaced(body, before, instead)


def _replaced(
    body: ir.Body, before: Mapping[ir.Statement, list[ir.Declare]], instead: Mapping[ir.Statement, ir.Body]
) -> ir.Body:
    made: list[ir.Statement] = []
    for s in body:
        made += before.get(s, ())
        made += instead.get(s, ()) or (ir.with_blocks(s, lambda block: _replaced(block, before, instead)),)
    return tuple(made)


def _slice(body: ir.Body, local: ir.Local, s: ir.Boundary) -> _Slice:
    position = list(map(_read, ir.entries(s.given["at"])))
    slice_ = _Slice({(e.local, e.index) for e in position}, local)
    try:
        slice_.collect(body)
    except _Lost as lost:
        warnings.warn(
            f"{ir.cited(s.place)}"
            f"The level of this edge cannot be computed at other positions, since {lost}. Its derivative is "
            "wrong in pixels that the edge crosses more than once, or in which it bends. Compute the level in one "
            "iteration, or use layers or pixel.",
            DerivativeWarning,
            stacklevel=2,
        )
        slice_.parts.clear()
        slice_.kept.clear()
        slice_.held.clear()
    return slice_


def _linear(s: ir.Boundary) -> ir.Declare:
    """The result of a ``level_at`` from the level and its slope at the pixel's centre."""
    (result,), (level,) = s.results, ir.entries(s.given["value"])
    offsets = [*ir.entries(s.given["x"]), *ir.entries(s.given["y"])]
    for offset, slope in zip(offsets, ir.entries(s.given["slope"]), strict=True):
        level = ir.Op("add", (level, ir.Op("mul", (offset, slope), level.dtype)), level.dtype)
    return ir.Declare(result, (level,), place=s.place)


@dataclass
class _Slice:
    """The code that computes one level from its position, part by part."""

    position: set[_Entry]
    level: ir.Local
    parts: list[ir.Statement] = field(default_factory=list)
    kept: dict[ir.Statement, list[ir.Declare]] = field(default_factory=dict)
    held: list[dict[_Entry, ir.Local]] = field(default_factory=list)  # of each part, where the position was

    def collect(self, body: ir.Body) -> None:
        """Find the code, and the values that it reads."""
        moving = _moving(body, {local for local, _ in self.position}, self.level)
        if self.level not in moving:
            return
        prefix = _prefix(body, self.level)
        holders = {local for local, _ in self.position}
        needed: set[ir.Local] = {self.level}
        originals: list[ir.Statement] = []
        for s in reversed(prefix):
            if isinstance(s, tuple):
                carried = {x.name for inner in s for x in needed & _written(inner)}
                if carried:
                    raise _Lost(f"{min(carried)} is carried from one iteration of a loop to the next")
                continue
            if not needed & _written(s):
                continue
            part = _pruned(s, needed)
            if holders & _written(part):
                raise _Lost("the position is computed in a loop or branch with the level")
            originals.append(s)
            self.parts.insert(0, part)
            needed = (needed | (read_locals((part,)) & moving) | (_written(part) - holders)) - _declared(part) - holders
            if isinstance(s, ir.Assign) and isinstance(s.target, ir.Read) and not s.target.index:
                needed -= {s.target.local} - read_locals((part,))
        if needed:
            raise _Lost(f"{min(x.name for x in needed)} is not known")
        self._keep(list(reversed(originals)), body)

    def _keep(self, originals: list[ir.Statement], body: ir.Body) -> None:
        """Keep values that the code reads from elsewhere, at the place of the code."""
        own = {x for part in self.parts for x in _written(part)} | {local for local, _ in self.position}
        changed = {x for s in ir.statements(body) if isinstance(s, ir.Store) for x in _written(s)}
        for n, original in enumerate(originals):
            kept = _Kept(frozenset(own), frozenset(changed), original.place)
            part = self.parts[n] = _changed(self.parts[n], kept.value, is_guarded=False)
            read = [node for one in (part, *part.within) for v in ir.values_of(one) for node in ir.walk(v)]
            held: dict[_Entry, ir.Local] = {}
            for node in read:
                entry = (node.local, node.index) if isinstance(node, ir.Read) else None
                if entry in self.position:
                    value = node if node.dtype.is_real else ir.Op("cast", (node,), self.level.dtype)
                    held[entry] = kept.local(entry, value)
            self.held.append(held)
            self.kept[original] = kept.made

    def at(self, s: ir.Boundary) -> Iterator[ir.Statement]:
        """The code at the position of a ``level_at``, and its result."""
        if not self.parts:
            yield _linear(s)
            return
        (result,) = s.results
        names: dict[ir.Local, ir.Local] = {}
        position = [(e.local, e.index) for e in map(_read, ir.entries(s.given["at"]))]
        moves = (*ir.entries(s.given["x"]), *ir.entries(s.given["y"]))
        offsets = dict(zip(position, moves, strict=False))  # at=x is one
        moved: dict[_Entry, ir.Value] = {}
        for part, held in zip(self.parts, self.held, strict=True):
            names.update((local, replace(local, kind="temporary")) for local in _declared(part))
            moved.update((e, ir.Op("add", (ir.Read(x), offsets[e]), x.dtype)) for e, x in held.items())
            if isinstance(part, ir.Declare) and isinstance(part.values[0], ir.Read) and not part.local.dtype.is_real:
                copied = names.get(part.values[0].local, part.values[0].local), part.values[0].index
                if copied in moved:  # a copy of an index: values computed from it move, too
                    moved[names[part.local], ()] = moved[copied]
            yield _copied(part, names, moved)
        yield ir.Declare(result, (ir.Read(names[self.level]),), place=s.place)


@dataclass
class _Kept:
    """Values that one part of the code reads from elsewhere, in locals that are declared before it.

    ``own`` are the locals that the code computes, ``changed`` those whose value changes.
    """

    own: frozenset[ir.Local]
    changed: frozenset[ir.Local]
    place: ir.Place | None
    made: list[ir.Declare] = field(default_factory=list)
    names: dict[Any, ir.Local] = field(default_factory=dict)

    def local(self, key: object, value: ir.Value) -> ir.Local:
        if key not in self.names:
            self.names[key] = ir.Local("held", value.dtype, (), "temporary")
            self.made.append(ir.Declare(self.names[key], (value,), place=self.place))
        return self.names[key]

    def value(self, node: ir.Value, is_guarded: bool) -> ir.Value:
        """The replacement of a node; an entry of a field that is only read under a condition stays."""
        if isinstance(node, ir.Op) and node.name == "random":
            raise _Lost("it draws random numbers")
        if isinstance(node, ir.Load):
            key: Any = None if is_guarded else node
        else:
            key = (node.local, node.index) if isinstance(node, ir.Read) and node.local in self.changed else None
        if key is None or not self.own.isdisjoint(node.contents.locals):
            return node
        return ir.Read(self.local(key, node), place=node.place)


def _prefix(body: ir.Body, level: ir.Local) -> list[ir.Statement | ir.Body]:
    """The statements up to and including the declaration of a level; a loop around it is given by its whole body."""
    for n, s in enumerate(body):
        if isinstance(s, ir.Declare) and s.local is level:
            return list(body[: n + 1])
        for inner in ir.bodies(s):
            prefix = _prefix(inner, level)
            if prefix:
                loop = [inner] if isinstance(s, (ir.For, ir.While)) else []
                return [*body[:n], *loop, *prefix]
    return []


def _moving(body: ir.Body, position: set[ir.Local], level: ir.Local) -> set[ir.Local]:
    """The locals that depend on the position, directly or through conditions.

    A condition under which the level is computed holds wherever it is computed, so locals of that branch do not depend
    on it; those that live longer do, since an earlier iteration may have changed them in it.
    """
    edges: list[tuple[ir.Local, ir.Local]] = []
    declared = functools.cache(_declared)
    for s, around in ir.enclosed(body):
        if isinstance(s, ir.If) or (isinstance(s, ir.Boundary) and s.kind == "level_at"):
            continue
        has_level = bool(around) and level in declared(around[-1])
        for local in written_locals(s):
            deciding = [s, *(a for a in around if not has_level or local not in declared(a))]
            edges += ((source, local) for x in deciding for source in x.contents.locals)
    return set(ir.reached(position, edges))


def _written(s: ir.Statement) -> set[ir.Local]:
    """The locals that a statement declares or changes, including those in its blocks."""
    return {x for one in (s, *s.within) for x in written_locals(one)}


def _declared(s: ir.Statement) -> set[ir.Local]:
    return {x for one in (s, *s.within) for x in ir.declared(one)}


def _pruned(s: ir.Statement, needed: set[ir.Local]) -> ir.Statement:
    """A statement without effects, and without inner statements that do not compute needed locals."""
    part, before = _kept_part(s, needed), -1
    while len(needed) > before:
        before = len(needed)
        needed = needed | read_locals((part,))
        part = _kept_part(s, needed)
    return part


def _kept_part(s: ir.Statement, needed: set[ir.Local]) -> ir.Statement:
    def keep(one: ir.Statement) -> ir.Body:
        if isinstance(one, ir.Jump) or one.within:
            return (one,)
        if not needed.intersection(written_locals(one)):
            return ()
        if isinstance(one, (ir.Atomic, ir.Effect)) or (isinstance(one, ir.Boundary) and one.kind == "level_at"):
            raise _Lost("it depends on an atomic operation, on another edge, or on a call with effects")
        return (one,)

    (part,) = (ir.with_blocks(s, lambda block: ir.mapped(block, keep)),) if ir.bodies(s) else keep(s)
    return part


def _changed(s: ir.Statement, keep: Any, *, is_guarded: bool) -> ir.Statement:
    """A statement with changed values; values that are not always evaluated may not be evaluated before it."""
    names = {n.name for v in ir.values_of(s) for n in ir.walk(v) if isinstance(n, ir.Op)}
    is_guarded = is_guarded or isinstance(s, ir.While) or not names.isdisjoint(ir.LAZY)
    s = ir.with_places(s, lambda node: keep(node, is_guarded))
    return ir.with_blocks(s, lambda block: tuple([_changed(i, keep, is_guarded=True) for i in block]))


def _copied(s: ir.Statement, names: Mapping[ir.Local, ir.Local], new: Mapping[_Entry, Any]) -> ir.Statement:
    """A statement on new locals, at another position."""

    def change(node: ir.Value) -> ir.Value:
        if isinstance(node, ir.Op) and node.dtype.is_real:  # indices that are positions are real numbers there
            return with_real_operands(node, new)
        if not isinstance(node, ir.Read):
            return node
        if node.dtype.is_real and (node.local, node.index) in new:
            return new[node.local, node.index]
        own = names.get(node.local)
        return node if own is None else ir.Read(own, node.index, place=node.place)

    blocks = tuple(tuple(_copied(i, names, new) for i in block) for block in ir.bodies(s))
    s = _renamed(ir.with_places(s, change), names)
    if isinstance(s, ir.For):
        s = replace(s, variables=tuple(names[v] for v in s.variables))
    return ir.with_bodies(s, blocks)


def _renamed(s: ir.Statement, names: Mapping[ir.Local, ir.Local]) -> ir.Statement:
    """A statement of its own, with new locals for those that it declares."""
    if isinstance(s, ir.Declare):
        return replace(s, local=names[s.local])
    if isinstance(s, ir.Atomic) and s.result is not None:
        return replace(s, result=names[s.result])
    if isinstance(s, (ir.Call, ir.Effect, ir.Boundary)):
        return replace(s, results=tuple(names[r] for r in s.results))
    return replace(s)


def _read(value: object) -> ir.Read:
    assert isinstance(value, ir.Read)
    return value
