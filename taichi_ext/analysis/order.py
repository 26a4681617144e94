"""Which parallel loops with loops in them give the same in any order of their iterations."""

from __future__ import annotations

from taichi_ext.analysis.accesses import read_containers
from taichi_ext.analysis.affine import Indices
from taichi_ext.analysis.changes import written_containers
from taichi_ext.analysis.loops import Extents, find_loops
from taichi_ext.analysis.stores import Stores
from taichi_ext.program import (
    Atomic,
    Call,
    Effect,
    For,
    Local,
    Program,
    Return,
    Statement,
    While,
    declared,
    statements,
)
from taichi_ext.simplify.usage import assigned_locals


def free_loops(program: Program, extents: Extents) -> frozenset[Local]:
    """The first variables of such loops: each iteration writes only entries of its own, that no other reads.

    A loop keeps its variables when a program is differentiated, so they name it.
    """
    loops = find_loops(program.body, extents)
    stores = Stores(program, Indices(program.body), loops, extents)
    own = {local for s in program.body if not isinstance(s, For) for local in declared(s)}
    found: set[Local] = set()
    for s in program.body:
        if not isinstance(s, For) or not loops[s].is_parallel or own & assigned_locals(s.body):
            continue
        inner = statements(s.body)
        if not any(isinstance(x, (For, While)) for x in inner):
            continue
        if any(isinstance(x, (Effect, Atomic, Call, Return)) for x in inner) or _draws(inner):
            continue
        sites = [site for x in inner if (site := stores.of.get(x)) is not None]
        if all(map(stores.is_private, sites)) and not read_containers(s.body) & written_containers(s.body):
            found.add(s.variables[0])
    return frozenset(found)


def _draws(inner: list[Statement]) -> bool:
    return any(not s.contents.is_pure for s in inner)
