"""Sums that all iterations add to: each thread has numbers of its own; those above a diagonal are mirrored.

An energy that all iterations add to has a gradient, and a dense Hessian, whose entries all iterations add to. An atomic
addition takes ten times as long as one to memory of a thread's own. One thread alone needs no atomic ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, replace

import taichi_ext.program as ir
from taichi_ext.analysis.affine import Affine, IntegerForms
from taichi_ext.analysis.changes import read_containers
from taichi_ext.analysis.intervals import RANGE, IndexFacts, Interval
from taichi_ext.analysis.loops import Loop, find_loops
from taichi_ext.differentiate.facts.decisions import Differentiated
from taichi_ext.program.build import (
    add,
    cast,
    element,
    is_over_columns,
    literal,
    multiply,
    not_written_out,
    number_of,
    operation,
    subtract,
)
from taichi_ext.program.keys import Scratch
from taichi_ext.schedule.machine import Machine
from taichi_ext.simplify.usage import all_values, assigned_locals


def with_lower_triangle(found: Differentiated, gradient: ir.Container | None, columns: int) -> Differentiated:
    """The program without additions to entries above the diagonal, if nothing reads H in it.

    Args:
        found: the gradient's program with tangents.
        gradient: the gradient, with a row of H for each of its numbers; None if all of H is needed.
        columns: of H, as many as it has rows.
    """
    array = next((c for what, c in found.shadows if what is gradient), None)
    body = found.program.body
    if array is None or array in read_containers(body):
        return found
    return replace(found, program=replace(found.program, body=_Triangle(array, columns).block(body, ())))


@dataclass(frozen=True)
class _Triangle:
    """The lower triangle of a matrix in an array, row after row."""

    array: ir.Container
    columns: int

    def block(self, body: ir.Body, rows: tuple[ir.Local, ...]) -> ir.Body:
        """A block without additions above the diagonal; ``rows`` are the variables of loops over columns around it."""
        made: list[ir.Statement] = []
        for s in body:
            if self._is_above(s):
                continue
            if is_over_columns(s):
                s = self._until_diagonal(s, rows)
            inner = (*rows, *s.variables) if is_over_columns(s) else rows
            made.append(ir.with_blocks(s, lambda block, inner=inner: self.block(block, inner)))
        return tuple(made)

    def _index(self, s: ir.Statement) -> ir.Value | None:
        """The number of the entry that a statement adds to."""
        if not isinstance(s, ir.Update) or not isinstance(s.target, ir.Load) or s.target.container is not self.array:
            return None
        return s.target.indices[0] if s.op in ("add", "sub") else None

    def _is_above(self, s: ir.Statement) -> bool:
        index = number_of(self._index(s))
        return index is not None and index % self.columns > index // self.columns

    def _until_diagonal(self, loop: ir.For, rows: tuple[ir.Local, ...]) -> ir.For:
        """A loop over the columns of a row that a loop around it goes through, up to the diagonal."""
        (k,) = loop.variables
        stored = {self._row(self._index(s), k, rows) for s in loop.body if not isinstance(s, ir.Declare)}
        row = stored.pop() if len(stored) == 1 else None
        if row is None or self.columns <= MOST_WRITTEN_OUT or number_of(loop.domain[0]) != self.columns:
            return loop
        return replace(loop, domain=(up_to(row, self.columns),))

    def _row(self, index: ir.Value | None, k: ir.Local, rows: tuple[ir.Local, ...]) -> ir.Local | None:
        """``row`` of ``row * columns + k``."""
        match index:
            case ir.Op("add", (ir.Op("mul", (ir.Read(local=row), ir.Const(value=n)), _), ir.Read(local=column))):
                return row if n == self.columns and column is k and row in rows else None
            case _:
                return None


LEAST_ADDED = 8  # additions of one iteration
LEAST_TIMES = 2  # that a thread adds to a sum, which has to be cleared and added up
MOST_SUMS = 1 << 15  # of one thread
APART = 16  # numbers, so that threads do not write to the same cache line
SIGNS = ("add", "sub")


def with_private_sums(differentiated: Differentiated, machine: Machine) -> Differentiated:
    """The program with tangents that each thread adds up by itself, where a loop adds often to the same few of them."""
    summed, body, threads = differentiated, [], machine.threads
    own = {c for what, c in differentiated.shadows if not isinstance(what, Scratch)}
    if threads == 1:
        return replace(summed, program=replace(summed.program, body=without_atomics(summed.program.body, own)))
    for s in summed.program.body:
        domain = machine.domain(s) if isinstance(s, ir.For) else None
        if domain is None:
            body.append(s)
            continue
        assert isinstance(s, ir.For)
        before, after = [], []
        for array, (first, end) in _shared_sums(s, own, math.prod(domain) / threads).items():
            size = threads * _width(first, end)
            summed, memory, start = _reserved(summed, array, size)
            before.append(_cleared(memory, start, size))
            after.append(_added_up(array, memory, start, (first, end), threads))
            s = _with_own_sums(s, array, memory, start, (first, end))
        body += [*before, s, *after]
    return replace(summed, program=replace(summed.program, body=tuple(body)))


def without_atomics(body: ir.Body, arrays: Set[ir.Container]) -> ir.Body:
    """A block for one thread: additions to arrays are a load and a store, which take a third of an atomic's time."""
    return ir.mapped(body, lambda s: _added(s, arrays, lambda entry: entry))


def _width(first: int, end: int) -> int:
    return -(-(end - first) // APART) * APART


def _reserved(d: Differentiated, array: ir.Container, size: int) -> tuple[Differentiated, ir.Container, int]:
    """Scratch memory for numbers of a type: the array, and the start of the numbers in it."""
    key, sizes = Scratch(array.dtype.name), d.scratch_sizes
    memory = next((c for what, c in d.shadows if what == key), None)
    if memory is None:
        memory = ir.Container(f"sums_{array.dtype.name}_of_threads", array.dtype, 1, is_argument=True)
        d = replace(d, shadows=(*d.shadows, (key, memory)))
    start = sizes.get(key, 0)
    return replace(d, scratch_sizes={**sizes, key: start + size}), memory, start


def _shared_sums(loop: ir.For, own: Set[ir.Container], iterations: float) -> dict[ir.Container, tuple[int, int]]:
    """The arrays to whose entries each iteration only adds, to any of the same ones: the first entry and the end.

    ``iterations`` are those of one thread.
    """
    additions = _Additions(loop.body)
    additions.collect(loop.body)
    result = {}
    for array, sums in additions.of.items():
        if array not in own or array in additions.others:
            continue
        count = sum(times for times, _ in sums)
        first, end = min(entry[0] for _, entry in sums), 1 + max(entry[1] for _, entry in sums)
        is_often = count >= LEAST_ADDED and iterations * count >= LEAST_TIMES * (end - first)
        if first >= 0 and end - first <= MOST_SUMS and is_often:
            result[array] = (first, end)
    return result


class _Additions:
    """The additions of a loop to arrays: the most per iteration, and the range of entries."""

    def __init__(self, body: ir.Body) -> None:
        self.of: dict[ir.Container, list[tuple[int, Interval]]] = {}  # those to each array
        self.others: set[ir.Container] = set()  # containers that are read or stored to
        self._assigned = assigned_locals(body)
        self._loops = find_loops(body, {})

    def collect(self, body: ir.Body) -> None:
        start = 1, IndexFacts(IntegerForms(()))
        for s, (times, facts) in ir.inherited(body, start, self._within):
            self.others |= s.contents.containers
            if isinstance(s, ir.Update) and isinstance(s.target, ir.Load) and s.op in SIGNS and s.group is None:
                entry = facts.interval(s.target.indices[0]) if len(s.target.indices) == 1 else RANGE
                self.of.setdefault(s.target.container, []).append((times, entry))
            elif isinstance(s, ir.Store) and isinstance(s.target, ir.Load):
                self.others.add(s.target.container)

    def _within(self, s: ir.Statement, around: tuple[int, IndexFacts]) -> tuple[int, IndexFacts]:
        times, facts = around[0], around[1].copy()
        return (times * self._enter(self._loops[s], facts) if s in self._loops else times), facts

    def _enter(self, loop: Loop, facts: IndexFacts) -> int:
        """The iterations of a loop, 1 where they are not known."""
        bounds, s = loop.bounds, loop.statement
        if bounds is None and isinstance(s, ir.For) and is_over_columns(s):
            bounds = ((0, facts.interval(s.domain[0])[1]),)
        if bounds is None or not self._assigned.isdisjoint(loop.atoms):
            return 1
        for atom, (first, end) in zip(loop.atoms, bounds, strict=True):
            facts.note(Affine(((atom, 1),)), (first, max(first, end - 1)))
        return math.prod(end - first for first, end in bounds)


def _with_own_sums(s: ir.For, array: ir.Container, memory: ir.Container, start: int, span: tuple[int, int]) -> ir.For:
    """A loop that adds to the thread's own numbers."""
    own = ir.Local("own_sums", ir.I32, (), "temporary")
    place = add(multiply(ir.Op("global_thread_idx", (), ir.I32), _width(*span)), start - span[0])

    def change(x: ir.Statement) -> ir.Statement:
        return _added(x, {array}, lambda entry: element(memory, add(ir.Read(own), entry.indices[0])))

    assert isinstance(place, ir.Value)
    return replace(s, body=(ir.Declare(own, (place,), place=s.place), *ir.mapped(s.body, change)))


def _added(s: ir.Statement, arrays: Set[ir.Container], entry: Callable[[ir.Load], ir.Load]) -> ir.Statement:
    """An addition to an array, as one that is not atomic, to an entry in place of its own; other statements stay."""
    if not isinstance(s, ir.Update) or not isinstance(s.target, ir.Load) or s.target.container not in arrays:
        return s
    if s.op not in SIGNS:
        return s
    to, value = entry(s.target), cast(s.value, s.target.dtype)
    made = add(to, value) if s.op == "add" else subtract(to, value)
    assert isinstance(made, ir.Value)
    return ir.Assign(to, made, place=s.place)


def _cleared(memory: ir.Container, start: int, count: int) -> ir.For:
    k = ir.Local("k", ir.I32, (), "column")
    body = (ir.Assign(element(memory, add(ir.Read(k), start)), literal(0, memory.dtype)),)
    return ir.For("range", (k,), (literal(count, ir.I32),), body)


def _added_up(array: ir.Container, memory: ir.Container, start: int, span: tuple[int, int], threads: int) -> ir.For:
    k, thread = ir.Local("k", ir.I32, (), "column"), ir.Local("thread", ir.I32, (), "column")
    entry = element(array, add(ir.Read(k), span[0]))
    part = element(memory, add(add(multiply(ir.Read(thread), _width(*span)), start), ir.Read(k)))
    total = add(entry, part)
    assert isinstance(total, ir.Value)
    inner = ir.For("range", (thread,), (literal(threads, ir.I32),), (ir.Assign(entry, total),))
    # entries behind the end of the array are within the span where conditions keep the loop from them
    count = operation("min", literal(span[1] - span[0], ir.I32), subtract(ir.Size(array, 0), span[0]))
    return ir.For("range", (k,), (count,), (inner,))


# Loops over many columns, in a form that LLVM does not write out.
#
# Where LLVM knows how many iterations a loop has, it writes out as many of them as 150 instructions hold, and its
# later passes take more than in proportion to that: three quarters of the first call of a spring system with 259
# columns. Runs gain nothing: after each store to an array the array's address is read again, whatever comes in one
# iteration. So loops that only store to their own columns take four at a time, and read all that they need before
# they store.

AT_ONCE = 4  # columns of loops that store them last
MOST_TOGETHER = 6  # statements of such a loop
MOST_WRITTEN_OUT = 16  # columns; up to this number unrolled loops compile fast enough, and run faster
MOST_SERIAL = 4096  # columns; for each parallel loop Taichi compiles a function, and wakes the threads


def with_counted_columns(body: ir.Body) -> ir.Body:
    """The program with loops over many columns as ``while`` loops; of the kernel's own, those that are not long."""
    return tuple(made for s in body for made in _of_kernel(s))


def _of_kernel(s: ir.Statement) -> ir.Body:
    if is_over_columns(s):
        counted = _counted(s) if is_serial(s) else s
        return counted if isinstance(counted, tuple) else (counted,)
    return (ir.with_blocks(s, lambda block: ir.mapped(block, _counted)),)


def is_serial(s: ir.For) -> bool:
    """Whether a loop of the kernel itself over columns is done sooner than it is given to threads."""
    (count,) = s.domain
    return isinstance(count, ir.Const) and count.value <= MOST_SERIAL


def _counted(s: ir.Statement) -> ir.Statement | ir.Body:
    if not is_over_columns(s):
        return s
    (count,) = s.domain
    array, most = _stored_to(s.body), _most(count)
    if most is None or most <= MOST_WRITTEN_OUT or array is None:
        return s
    if not _are_independent(s):
        return not_written_out(s, array)
    copies = [_copied(s, number) for number in range(AT_ONCE)]
    body = tuple(x for part in zip(*copies, strict=True) for copy in part for x in copy)
    counter, several = not_written_out(replace(s, body=body), array, AT_ONCE)
    rest = not_written_out(s, array)[1:] if most % AT_ONCE else ()
    return (counter, several, *rest)


def up_to(column: ir.Local, columns: int) -> ir.Value:
    """The number of columns up to one of them, rounded up to as many as are taken at once, if there are as many."""
    several = operation("bit_or", ir.Read(column), literal(AT_ONCE - 1, ir.I32))
    return operation("min", cast(add(several, 1), ir.I32), literal(columns, ir.I32))


def _most(count: ir.Value) -> int | None:
    """The number of columns of a loop, or the most of one that ends ``up_to`` a column."""
    match count:
        case ir.Const(value=n) | ir.Op("min", (ir.Op("add", (ir.Op("bit_or"), _)), ir.Const(value=n))):
            return int(n)
        case _:
            return None


def _are_independent(s: ir.For) -> bool:
    """Whether a short loop over columns only stores numbers it computes to its own columns, and reads no others."""
    (k,) = s.variables
    written: set[ir.Container] = set()
    for x in s.body:
        if isinstance(x, ir.Declare) and not x.local.shape:
            continue
        if not isinstance(x, ir.Assign) or not isinstance(x.target, ir.Load) or isinstance(x.value, ir.Const):
            return False
        c, index = x.target.container, x.target.indices
        if c in written or len(index) != 1 or not _follows(index[0], k) or x.value.dtype != x.target.dtype:
            return False
        written.add(c)
        for other in s.body:
            loads = [v for v in all_values(other) if isinstance(v, ir.Load) and v.container is c]
            if loads and (other is not x or any(v.indices[0] is not index[0] for v in loads)):
                return False
    return len(s.body) <= MOST_TOGETHER


def _follows(index: ir.Value, k: ir.Local) -> bool:
    """Whether an index is k, or a sum of k and numbers that are the same for all k."""
    if isinstance(index, ir.Op) and index.name == "add":
        first, second = sorted(index.args, key=lambda v: k in v.contents.locals)
        return k not in first.contents.locals and _follows(second, k)
    return isinstance(index, ir.Read) and index.local is k and not index.index


def _copied(s: ir.For, number: int) -> tuple[ir.Body, ir.Body]:
    """The statements of a column that comes later, before it stores, and its stores."""
    (k,) = s.variables
    renamed: dict[ir.Local, ir.Value] = {k: cast(add(ir.Read(k), number), ir.I32)}
    before: list[ir.Statement] = []
    stores: list[ir.Statement] = []

    def rename(value: ir.Value) -> ir.Value:
        return renamed.get(value.local, value) if isinstance(value, ir.Read) else value

    for x in s.body:
        moved = ir.with_nodes(x, rename)
        if isinstance(moved, ir.Assign):
            local = ir.Local("entry", moved.target.dtype, (), "kept")
            before.append(ir.Declare(local, (moved.value,), place=s.place))
            stores.append(replace(moved, value=ir.Read(local)))
        elif isinstance(moved, ir.Declare):
            local = replace(moved.local)
            before.append(replace(moved, local=local))
            renamed[moved.local] = ir.Read(local)
    return tuple(before), tuple(stores)


def _stored_to(body: ir.Body) -> ir.Container | None:
    for s in ir.statements(body):
        if isinstance(s, (ir.Assign, ir.Update)) and isinstance(s.target, ir.Load):
            container = s.target.container
            if container.is_argument and container.ndim == 1 and not container.element_shape:
                return container
    return None
