"""The containers and locals that a program reads and writes, its local arrays and random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Set
from itertools import groupby
from typing import TypeGuard

import taichi_ext.program as ir
from taichi_ext.program.values import joined_contents
from taichi_ext.simplify.usage import assigned_locals, written_locals


def written_containers(body: ir.Body | Iterable[ir.Statement], *, with_effects: bool = True) -> set[ir.Container]:
    """The containers that are stored to, by statements and, if wanted, by calls that stay as they are."""
    result: set[ir.Container] = set()
    for s in ir.statements(tuple(body)):
        if isinstance(s, ir.Store) and isinstance(s.target, ir.Load):
            result.add(s.target.container)
        if isinstance(s, ir.Effect) and with_effects:
            result |= set(s.writes)
    return result


def written(body: ir.Body | Iterable[ir.Statement]) -> set[ir.Local | ir.Container]:
    kept = tuple(body)
    return assigned_locals(kept) | written_containers(kept)


def varying_locals(loop: ir.For | ir.While) -> set[ir.Local]:
    """The locals that may have other values in other iterations of a loop."""
    inner = {local for s in loop.within for local in ir.declared(s)}
    start = assigned_locals((loop,)) - inner | written_containers(loop.body) | set(ir.declared(loop))
    edges: list[tuple[ir.Memory | None, ir.Local]] = []  # None: what is never the same
    for s, around in ir.enclosed(loop.body):
        deciding, changed = (s, *around), written_locals(s)
        if isinstance(s, ir.Jump):
            deciding = tuple(itertools.takewhile(lambda a: isinstance(a, ir.If), reversed(around)))
            left = around[: len(around) - len(deciding)][-1:]
            changed = tuple(assigned_locals(left) - {x for y in left for z in y.within for x in ir.declared(z)})
        parts = joined_contents(v for a in deciding for v in ir.values_of(a))
        is_same = parts.is_pure and not isinstance(s, ir.Atomic)
        sources = (*parts.locals, *parts.containers, *(() if is_same else (None,)))
        edges += ((source, local) for source in sources for local in changed)
    return {local for local in ir.reached((None, *start), edges) if isinstance(local, ir.Local)}


def parts_ways(body: ir.Body, varying: Set[ir.Local], stored: Set[ir.Container], *, is_chosen: bool = False) -> bool:
    """Whether a varying value decides when the loop around a block, or an iteration of it, ends."""
    for s, around in ir.enclosed(body):
        is_left = isinstance(s, ir.Jump) and all(isinstance(a, ir.If) for a in around)
        if is_left and (is_chosen or not all(a.contents.is_same(varying, stored) for a in around)):
            return True
    return False


def read_containers(body: ir.Body) -> set[ir.Container]:
    """The containers of which an entry is read; adding to an entry does not read it."""
    result: set[ir.Container] = set()
    for s in ir.statements(body):
        result |= s.contents.containers
        if reads_target(s) and isinstance(s.target, ir.Load):
            result.add(s.target.container)
    return result


def reads_target(s: ir.Statement) -> TypeGuard[ir.Update | ir.Atomic]:
    """Whether a statement reads the entry that it stores to; adding to an entry does not read it."""
    return isinstance(s, ir.Atomic) or (isinstance(s, ir.Update) and s.op not in ("add", "sub"))


def read_locals(body: ir.Body) -> set[ir.Local]:
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
