"""Entries that an iteration of a parallel loop owns, as locals.

State in place, as in ``v[i] += a[i]`` and then ``if v[i] < 0: v[i] = 0``, is loaded once before the statements and
stored once behind them. So the way back has values that never change, and needs no log of overwritten numbers. This
holds where

* all that the loop does to the container is to load and store entries whose indices are constants and the variables
  of the loop, all of these, each at the same place: no other iteration touches the entry;
* these are in range for all iterations, of a container in which no cell is activated by a store;
* no jump leaves the iteration before its end.

Entries of containers that the loop does not store to are loaded before inner loops, whatever else it reads of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import taichi_ext.program as ir
from taichi_ext.analysis.changes import written_containers
from taichi_ext.analysis.loops import Extents, leaves, loop_bounds
from taichi_ext.program import Const, Container, Load, Local, Read, Value
from taichi_ext.simplify.usage import all_values, assigned_locals

Bounds = dict[Local, tuple[int, int]]
Name = tuple[Hashable, ...]


def with_own_entries(loop: ir.For, extents: Extents) -> ir.Body:
    """The body of a parallel loop, with locals for entries that its variables name."""
    bounds = loop_bounds(loop, extents)
    if bounds is None or any(v.shape for v in loop.variables) or assigned_locals(loop.body) & set(loop.variables):
        return loop.body
    ranges = dict(zip(loop.variables, bounds, strict=True))
    stored = written_containers(loop.body)
    owned = _owned(loop, ranges, stored, extents)
    entries: dict[Name, tuple[Load, Local]] = {}

    def local_of(v: Value, is_inner: bool) -> Read | None:
        name = _name(v, ranges)
        if name is None or not (name in owned or (is_inner and name[0] not in stored)):
            return None
        assert isinstance(v, Load)
        return Read(entries.setdefault(name, (v, Local(f"own_{v.container.name}", v.dtype, (), "user")))[1])

    def change(s: ir.Statement, is_inner: bool) -> ir.Statement:
        s = ir.with_places(s, lambda v: local_of(v, is_inner) or v)
        is_inner = is_inner or isinstance(s, (ir.For, ir.While))
        return ir.with_blocks(s, lambda block: tuple([change(x, is_inner) for x in block]))

    changed = [change(s, False) for s in loop.body]
    loads = [ir.Declare(local, (v,), place=loop.place) for v, local in entries.values()]
    ends = [ir.Assign(v, Read(local), place=loop.place) for v, local in entries.values() if v.container in stored]
    return (*loads, *changed, *ends)


def _owned(loop: ir.For, ranges: Bounds, stored: set[Container], extents: Extents) -> set[Name]:
    """The entries that one iteration stores to, and that it also reads or stores to again."""
    if leaves(loop.body):
        return set()
    touched: dict[Container, list[Load]] = {c: [] for c in stored if c in extents and extents[c].is_full}
    for s in ir.statements(loop.body):
        for v in (*all_values(s), *_targets(s)):
            if isinstance(v, Load) and v.container in touched:
                touched[v.container].append(v)
        for c in s.writes if isinstance(s, ir.Effect) else ():
            touched.pop(c, None)
    names: set[Name] = set()
    for loads in touched.values():
        uses = Counter(_name(v, ranges) for v in loads)
        places = {tuple(i.local if isinstance(i, Read) else None for i in v.indices) for v in loads}
        if None not in uses and len(places) == 1 and set(*places) >= set(loop.variables):
            names |= {name for name, count in uses.items() if name is not None and count > 1}
    return names


def _targets(s: ir.Statement) -> tuple[ir.Target, ...]:
    """What a statement stores to; twice where it reads the entry, too."""
    if not isinstance(s, ir.Store):
        return ()
    is_read = isinstance(s, ir.Update) and s.op not in ("add", "sub")
    return (s.target, s.target) if is_read else (s.target,)


def _name(v: Value, ranges: Bounds) -> Name | None:
    """The name of an entry whose indices are constants and variables of the loop, all in range."""
    if not isinstance(v, Load) or v.container.shape is None or not v.indices or any(v.container.offset):
        return None
    if not all(isinstance(c, (int, Const)) for c in v.component):
        return None
    sides = [ranges.get(i.local) if isinstance(i, Read) and not i.index else _side(i) for i in v.indices]
    is_inside = all(b is not None and b[0] >= 0 and b[1] <= n for b, n in zip(sides, v.container.shape, strict=True))
    parts = (i.local if isinstance(i, Read) else i.value for i in v.indices if isinstance(i, (Read, Const)))
    components = (c.value if isinstance(c, Const) else c for c in v.component)
    return (v.container, *parts, *components) if is_inside else None


def _side(index: Value) -> tuple[int, int] | None:
    return (int(index.value), int(index.value) + 1) if isinstance(index, Const) else None
