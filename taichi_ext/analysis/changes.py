"""The containers and locals that a block of statements writes."""

from __future__ import annotations

from collections.abc import Iterable

import taichi_ext.program as ir
from taichi_ext.simplify.usage import assigned_locals


def written_containers(body: ir.Body | Iterable[ir.Statement], *, with_effects: bool = True) -> set[ir.Container]:
    """The containers that are stored to, by statements and, if wanted, by calls that stay as they are."""
    found: set[ir.Container] = set()
    for s in ir.statements(tuple(body)):
        if isinstance(s, ir.Store) and isinstance(s.target, ir.Load):
            found.add(s.target.container)
        if isinstance(s, ir.Effect) and with_effects:
            found |= set(s.writes)
    return found


def written(body: ir.Body | Iterable[ir.Statement]) -> set[ir.Local | ir.Container]:
    """The locals and containers that change."""
    kept = tuple(body)
    return assigned_locals(kept) | written_containers(kept)


def varying_locals(loop: ir.For | ir.While) -> set[ir.Local]:
    """The locals that may have other values in other iterations of a loop."""
    inner = {local for s in loop.within for local in ir.declared(s)}
    found = assigned_locals((loop,)) - inner
    found.update(loop.variables if isinstance(loop, ir.For) else ())
    stored, count = written_containers(loop.body), -1
    while count != len(found):
        count = len(found)
        _spread_variation(loop.body, found, stored, is_chosen=False)
    return found


def _spread_variation(body: ir.Body, found: set[ir.Local], stored: set[ir.Container], *, is_chosen: bool) -> None:
    """Add the locals that are assigned varying values, or assigned under a varying condition."""
    for s in body:
        contents = s.contents
        is_same = contents.is_pure and found.isdisjoint(contents.locals) and stored.isdisjoint(contents.containers)
        if is_chosen or not is_same or isinstance(s, ir.Atomic):
            found.update(ir.declared(s))
            if isinstance(s, ir.Store) and isinstance(s.target, ir.Read):
                found.add(s.target.local)
        for block in ir.bodies(s):
            is_chosen_here = is_chosen or (not is_same and isinstance(s, (ir.If, ir.For, ir.While)))
            _spread_variation(block, found, stored, is_chosen=is_chosen_here)
            if isinstance(s, (ir.For, ir.While)) and _is_left(block, found, stored):
                found.update(assigned_locals(block) - {local for x in ir.statements(block) for local in ir.declared(x)})


def _is_left(body: ir.Body, found: set[ir.Local], stored: set[ir.Container], *, is_chosen: bool = False) -> bool:
    """Whether a varying value decides when a loop, or an iteration of it, ends."""
    for s in body:
        if isinstance(s, ir.Jump) and is_chosen:
            return True
        contents = s.contents
        is_same = contents.is_pure and found.isdisjoint(contents.locals) and stored.isdisjoint(contents.containers)
        if isinstance(s, ir.If) and any(
            _is_left(b, found, stored, is_chosen=is_chosen or not is_same) for b in ir.bodies(s)
        ):
            return True
    return False
