"""All pairs: adjoints that an inner loop adds to are gathered by a loop over them instead of scattered.

In ``for i: for j: y[i] += f(x[i], z[j])`` the way back adds to z[j] for each pair. With the loops exchanged, an
iteration over j sums over all i in a local, without atomics and without sums of each thread. Both orders can be used
where a pair only needs what is cheap to compute for each i again.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import taichi_ext.program as ir
from taichi_ext.adjoint.contention import Bounds
from taichi_ext.adjoint.costly import is_costly
from taichi_ext.adjoint.normal import whole
from taichi_ext.adjoint.own_entries import with_own_entries
from taichi_ext.adjoint.stages import is_entry
from taichi_ext.adjoint.sweep import Sweep
from taichi_ext.analysis.changes import read_containers, written_containers
from taichi_ext.analysis.loops import Extents
from taichi_ext.analysis.same_values import is_equal
from taichi_ext.program import I32, Const, Container, Load, Local, Op, Read, Value
from taichi_ext.program.build import add, element, literal, multiply, subtract
from taichi_ext.simplify.pipeline import without_dead_code
from taichi_ext.simplify.usage import assigned_locals

LEAST_PAIRS = 512  # iterations of both loops, so that both can be run in parallel


def inner_loop(body: ir.Body, bounds: Bounds | None, active: set[Container]) -> ir.For | None:
    """The loop of a stage over the other partner of pairs, if there is one whose adjoints can be gathered."""
    loops = [s for s in ir.statements(body) if isinstance(s, (ir.For, ir.While))]
    if bounds is None or len(bounds) != 1 or len(loops) != 1 or loops[0] not in body:
        return None
    (s,) = loops
    if not isinstance(s, ir.For) or not all(isinstance(x, Const) for x in s.domain):
        return None
    is_long = min(s.domain[1].value - s.domain[0].value, bounds[0][1] - bounds[0][0]) >= LEAST_PAIRS
    is_reading = not written_containers(s.body) and not any(isinstance(x, (ir.Jump, ir.Call)) for x in s.within)
    entries = chain(*(ir.walk(v) for x in s.within for v in ir.values_of(x)))
    active = active - written_containers(body)
    named = {n.container for n in entries if isinstance(n, Load) and is_entry(n, s.variables[0])} & active
    is_inside = all(_covers(c, s.domain[0].value, s.domain[1].value) for c in named)
    is_fixed = s.variables[0] not in assigned_locals(body)
    return s if is_long and is_reading and named and is_inside and is_fixed else None


def _covers(c: Container, first: int, end: int) -> bool:
    """Whether a container of one dimension has all entries from a first one to an end."""
    start = c.offset[0] if c.offset else 0
    return c.shape is not None and start <= first and end <= start + c.shape[0]


def gathered(sweep: Sweep, iteration: ir.Body, variable: Local, bounds: Bounds, extents: Extents) -> ir.For | None:
    """The loop over the other partner, which gathers; None if a pair needs too much.

    Args:
        sweep: with which the iteration was made.
        iteration: the adjoint of an iteration, which only adds to sums in locals.
        variable: of the loop around it.
        bounds: the range of that.
    """
    gather = sweep.gather
    assert gather is not None
    back = next((s for s in iteration if isinstance(s, ir.For) and s.variables[0] is gather.back), None)
    if back is None or not gather.sums:
        return None
    before = iteration[: iteration.index(back)]
    other = Local(gather.variable.name, I32, (), "loop")
    first = gather.domain[0]
    number = ir.Declare(back.variables[0], (whole(subtract(Read(other), first)),))
    pair = (*_without_stores(before), number, *_without_stores(back.body))
    inner = ir.For("range", (variable,), tuple(literal(b, I32) for b in bounds[0]), pair)
    zeros = [ir.Declare(local, (literal(0, local.dtype),)) for sums in gather.sums.values() for local in sums]
    ends = [
        ir.Assign(entry, add(entry, Read(local)))  # type: ignore[arg-type]
        for (container, component), sums in gather.sums.items()
        for entry, local in zip(_entries(sweep, container, component, other), sums, strict=True)
    ]
    body = without_dead_code((*zeros, inner, *ends))
    pair = next(s for s in body if isinstance(s, ir.For)).body
    if not _is_cheap(pair, before):
        return None
    names = {gather.again: other}
    body = ir.mapped(body, lambda s: ir.with_nodes(s, lambda v: ir.read_from(v, names)))  # type: ignore[arg-type]
    loop = ir.For("range", (other,), gather.domain, body)
    return replace(loop, body=with_own_entries(loop, extents))


def _is_cheap(pair: ir.Body, before: ir.Body) -> bool:
    """Whether what a pair needs of its iteration is cheap, and is read before it changes."""
    kept, stores, outside = set(pair), list[Load](), set(before)
    for s in before:
        if s in kept and not (isinstance(s, ir.Declare) and not any(map(is_costly, s.values))):
            return False
        if s in kept and any(_may_meet(n, store) for v in ir.values_of(s) for n in ir.walk(v) for store in stores):
            return False
        stores += [x.target for x in (s, *s.within) if isinstance(x, ir.Store) and isinstance(x.target, Load)]
    return {s.container for s in stores}.isdisjoint(read_containers(tuple(s for s in pair if s not in outside)))


def _may_meet(value: Value, store: Load) -> bool:
    """Whether a value may be the entry of a store, whose indices do not change in between."""
    if not isinstance(value, Load) or value.container is not store.container or len(store.indices) != 1:
        return isinstance(value, Load) and value.container is store.container
    (a, m), (b, n) = map(_with_constant, (value.indices[0], store.indices[0]))
    return m == n or not is_equal(a, b)


def _with_constant(index: Value) -> tuple[Value, float]:
    """An index as a sum of a value and a constant."""
    if isinstance(index, Op) and index.name == "add" and isinstance(index.args[1], Const):
        return index.args[0], index.args[1].value
    return index, 0


def _entries(sweep: Sweep, container: Container, component: tuple[int, ...], other: Local) -> list[Load]:
    array = sweep.arrays[container]
    first = multiply(array.number(Load(container, (Read(other),), component)), array.width)
    return [element(array.container, add(first, k)) for k in range(sweep.width)]


def _without_stores(body: ir.Body) -> ir.Body:
    return ir.mapped(body, lambda s: () if isinstance(s, ir.Store) and isinstance(s.target, Load) else s)
