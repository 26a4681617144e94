"""The stores of a program to containers: entries written once, containers written in full or by one iteration only.

Loops whose iterations only write such entries give the same in any order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeGuard

import taichi_ext.program as ir
from taichi_ext.analysis.affine import Affine, Atom, IntegerForms
from taichi_ext.analysis.changes import read_containers, written_containers
from taichi_ext.analysis.loops import Extents, Loop, find_loops, integer_forms
from taichi_ext.analysis.same_values import is_equal
from taichi_ext.simplify.usage import assigned_locals

WHOLE = None  # in place of a component: all of them


@dataclass(frozen=True, eq=False)
class StoreSite:
    """One store or accumulation: its indices in normal form, the component (None for all), and where it stands."""

    container: ir.Container
    indices: tuple[Affine, ...]
    component: Affine | None
    loops: tuple[Loop, ...]
    depth: int  # blocks around it
    is_store: bool

    def covers(self, atoms: Iterable[Atom], *, has_component: bool = False) -> bool:
        """Whether each variable stands alone in one index, so that different iterations touch different entries.

        ``has_component``: the component counts as an index.
        """
        indices = (*self.indices, self.component) if has_component and self.component is not None else self.indices
        bare = {i.terms[0][0] for i in indices if len(i.terms) == 1 and abs(i.terms[0][1]) == 1}
        return bare.issuperset(atoms)

    def is_disjoint_from(self, other: StoreSite) -> bool:
        """Whether the two never name the same entry."""
        pairs = list(zip(self.indices, other.indices, strict=True))
        if self.component is not None and other.component is not None:
            pairs.append((self.component, other.component))
        return any(a.is_apart_from(b) for a, b in pairs)


class Stores:
    """All stores of a program."""

    def __init__(
        self, program: ir.Program, indices: IntegerForms, loops: dict[ir.Statement, Loop], extents: Extents
    ) -> None:
        self.extents = extents
        self.sites: dict[ir.Container, list[StoreSite]] = {}
        self.of: dict[ir.Statement, StoreSite] = {}
        self._indices = indices
        self._loops = loops
        self._visit(program.body, (), 0)

    def _visit(self, body: ir.Body, around: tuple[Loop, ...], depth: int) -> None:
        for group in grouped(body):
            first = group[0]
            if isinstance(first, ir.Store) and isinstance(first.target, ir.Load):
                self._add(group, first.target, around, depth)
            for s in group:
                loops = (*around, self._loops[s]) if s in self._loops else around
                for block in ir.bodies(s):
                    self._visit(block, loops, depth + 1)

    def _add(self, group: tuple[ir.Statement, ...], target: ir.Load, around: tuple[Loop, ...], depth: int) -> None:
        component = None
        if target.component and len(group) == 1 and len(group) != math.prod(target.container.element_shape):
            component = self.component(target)
        indices = tuple(map(self._indices.site, target.indices))
        if is_scattered(first := group[0]):
            indices = tuple(Affine(((i, 1),)) for i in target.indices)  # any entries
        site = StoreSite(target.container, indices, component, around, depth, isinstance(first, ir.Assign))
        self.sites.setdefault(target.container, []).append(site)
        for s in group:
            self.of[s] = site

    def component(self, target: ir.Load) -> Affine:
        total = Affine()
        for i, n in zip(target.component, target.container.element_shape, strict=True):
            total = total * n + self._indices.site(i)
        return total

    # --- conclusions

    def covers(self, site: StoreSite) -> bool:
        """Whether every entry of the container is stored, once, whatever the values are: by a loop over all of it."""
        if len(self.sites[site.container]) > 1 or not site.is_store or site.component is not WHOLE:
            return False
        if site.depth != 1 or len(site.loops) != 1:
            return False
        (loop,) = site.loops
        extent = self.extents.get(site.container)
        if extent is None or any(extent.offset) or loop.is_interrupted or loop.shape != extent.shape:
            return False
        return site.indices == tuple(Affine(((a, 1),)) for a in loop.atoms)

    def is_first(self, site: StoreSite) -> bool:
        """Whether no other store, nor another iteration of this one, can have been to the same entry before."""
        others = [s for s in self.sites[site.container] if s is not site]
        if any(not loop.atoms or not site.covers(loop.atoms) for loop in site.loops):
            return False
        return all(site.is_disjoint_from(other) for other in others)

    def is_untouched(self, site: StoreSite) -> bool:
        """Whether nothing can have been stored to the container before this first run of the store."""
        sites = self.sites[site.container]
        if sites[0] is not site:
            return False
        own = site.loops[:1]
        return not own or all(other.loops[:1] != own for other in sites[1:])

    def is_private(self, site: StoreSite) -> bool:
        """Whether no other iteration of the surrounding parallel loop writes to the entry."""
        if not site.loops or not site.loops[0].is_parallel:
            return True
        loop = site.loops[0]
        sites = [s for s in self.sites[site.container] if s.loops and s.loops[0] is loop]
        if not loop.atoms or not sites[0].covers(loop.atoms):
            return False
        own = set(loop.atoms)
        dims = [n for n, a in enumerate(sites[0].indices) if len(a.terms) == 1 and a.terms[0][0] in own]
        return all(s.indices[d] == sites[0].indices[d] for s in sites for d in dims)


def grouped(body: ir.Body) -> list[tuple[ir.Statement, ...]]:
    """The statements of a block; stores to all components of an entry, one after the other, as one."""
    result: list[tuple[ir.Statement, ...]] = []
    k = 0
    while k < len(body):
        length = _whole_length(body, k)
        result.append(body[k : k + length])
        k += length
    return result


def is_scattered(s: ir.Statement) -> TypeGuard[ir.Update]:
    """Whether a statement is part of a group that adds to any entries of a container."""
    return isinstance(s, ir.Update) and s.group is not None


def _whole_length(body: ir.Body, start: int) -> int:
    first = body[start]
    if is_scattered(first):
        return sum(1 for _ in itertools.takewhile(lambda s: getattr(s, "group", None) is first.group, body[start:]))
    entry = first.target if isinstance(first, (ir.Assign, ir.Update)) else None
    if not isinstance(entry, ir.Load) or not entry.component:
        return 1
    count = math.prod(entry.container.element_shape)
    group = body[start : start + count]
    is_whole = len(group) == count and all(_is_part(s, n, first, entry) for n, s in enumerate(group))
    return count if is_whole else 1


def _is_part(s: ir.Statement, n: int, first: ir.Statement, entry: ir.Load) -> bool:
    """Whether a statement stores to the component ``n`` of an entry as the first one does, and reads none before it."""
    if type(s) is not type(first) or getattr(s, "op", "") != getattr(first, "op", ""):
        return False
    assert isinstance(s, ir.Store)
    target, c = s.target, entry.container
    if not isinstance(target, ir.Load) or target.container is not c or (n and c in s.value.contents.containers):
        return False
    is_next = ir.flat_number(target.component, c.element_shape) == n
    return is_next and all(map(is_equal, target.indices, entry.indices))


def free_loops(program: ir.Program, extents: Extents) -> frozenset[ir.Local]:
    """The first variables of such loops: each iteration writes only entries of its own, that no other reads.

    A loop keeps its variables when a program is differentiated, so they name it.
    """
    loops = find_loops(program.body, extents)
    stores = Stores(program, integer_forms(program.body, extents), loops, extents)
    own = {local for s in program.body if not isinstance(s, ir.For) for local in ir.declared(s)}
    locals_: set[ir.Local] = set()
    for s in program.body:
        if not isinstance(s, ir.For) or not loops[s].is_parallel or own & assigned_locals(s.body):
            continue
        inner = ir.statements(s.body)
        if not any(isinstance(x, (ir.For, ir.While)) for x in inner):
            continue
        if any(isinstance(x, (ir.Effect, ir.Atomic, ir.Call, ir.Return)) or not x.contents.is_pure for x in inner):
            continue
        sites = [site for x in inner if (site := stores.of.get(x)) is not None]
        if all(map(stores.is_private, sites)) and not read_containers(s.body) & written_containers(s.body):
            locals_.add(s.variables[0])
    return frozenset(locals_)
