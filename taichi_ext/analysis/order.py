"""Which parallel loops with loops in them give the same in any order of their iterations."""

from __future__ import annotations

import taichi_ext.program as ir
from taichi_ext.analysis.affine import Indices
from taichi_ext.analysis.changes import read_containers, written_containers
from taichi_ext.analysis.loops import Extents, find_loops
from taichi_ext.analysis.stores import Stores
from taichi_ext.simplify.usage import assigned_locals


def free_loops(program: ir.Program, extents: Extents) -> frozenset[ir.Local]:
    """The first variables of such loops: each iteration writes only entries of its own, that no other reads.

    A loop keeps its variables when a program is differentiated, so they name it.
    """
    loops = find_loops(program.body, extents)
    stores = Stores(program, Indices(program.body), loops, extents)
    own = {local for s in program.body if not isinstance(s, ir.For) for local in ir.declared(s)}
    found: set[ir.Local] = set()
    for s in program.body:
        if not isinstance(s, ir.For) or not loops[s].is_parallel or own & assigned_locals(s.body):
            continue
        inner = ir.statements(s.body)
        if not any(isinstance(x, (ir.For, ir.While)) for x in inner):
            continue
        if any(isinstance(x, (ir.Effect, ir.Atomic, ir.Call, ir.Return)) for x in inner) or _draws(inner):
            continue
        sites = [site for x in inner if (site := stores.of.get(x)) is not None]
        if all(map(stores.is_private, sites)) and not read_containers(s.body) & written_containers(s.body):
            found.add(s.variables[0])
    return frozenset(found)


def _draws(inner: list[ir.Statement]) -> bool:
    return any(not s.contents.is_pure for s in inner)
