"""The containers and locals that a program reads and writes, its local arrays and random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Set
from itertools import groupby
from typing import TypeGuard

import taichi_ext.program as ir
from taichi_ext.simplify.usage import assigned_locals, written_locals


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
        is_same = s.contents.is_same(found, stored)
        if is_chosen or not is_same or isinstance(s, ir.Atomic):
            found.update(written_locals(s))
        for block in ir.bodies(s):
            is_chosen_here = is_chosen or (not is_same and isinstance(s, (ir.If, ir.For, ir.While)))
            _spread_variation(block, found, stored, is_chosen=is_chosen_here)
            if isinstance(s, (ir.For, ir.While)) and parts_ways(block, found, stored):
                found.update(assigned_locals(block) - {local for x in ir.statements(block) for local in ir.declared(x)})


def parts_ways(body: ir.Body, varying: Set[ir.Local], stored: Set[ir.Container], *, is_chosen: bool = False) -> bool:
    """Whether a varying value decides when the loop around a block, or an iteration of it, ends."""
    pending = [(body, is_chosen)]
    while pending:
        block, is_chosen = pending.pop()
        for s in block:
            if isinstance(s, ir.Jump) and is_chosen:
                return True
            if isinstance(s, ir.If):
                is_inner = is_chosen or not s.contents.is_same(varying, stored)
                pending += [(inner, is_inner) for inner in ir.bodies(s)]
    return False


def read_containers(body: ir.Body) -> set[ir.Container]:
    """The containers of which an entry is read; adding to an entry does not read it."""
    found: set[ir.Container] = set()
    for s in ir.statements(body):
        found |= s.contents.containers
        if reads_target(s) and isinstance(s.target, ir.Load):
            found.add(s.target.container)
    return found


def reads_target(s: ir.Statement) -> TypeGuard[ir.Update | ir.Atomic]:
    """Whether a statement reads the entry that it stores to; adding to an entry does not read it."""
    return isinstance(s, ir.Atomic) or (isinstance(s, ir.Update) and s.op not in ("add", "sub"))


def read_locals(body: ir.Body) -> set[ir.Local]:
    """The locals that are read."""
    return {memory for s in body for memory in s.reads if isinstance(memory, ir.Local)}


def draws_random_numbers(body: ir.Body) -> bool:
    """Whether two runs may differ."""
    return any(
        not s.contents.is_pure or (isinstance(s, ir.Effect) and getattr(s.function, "__name__", "") == "randn")
        for s in ir.statements(body)
    )


def stages_of(body: ir.Body) -> list[ir.Body]:
    """The stages of a kernel: its loops, and the statements between them."""
    numbered = groupby(enumerate(body), lambda pair: pair[0] if isinstance(pair[1], ir.For) else -1)
    return [tuple(top for _, top in stage) for _, stage in numbered]


def stages_with_arrays(body: ir.Body) -> int:
    """How many stages of a kernel have local arrays."""
    return sum(any(v.shape for s in ir.statements(stage) for v in ir.declared(s)) for stage in stages_of(body))
