"""Loops over many columns, in a form that LLVM does not write out.

Where LLVM knows how many iterations a loop has, it writes out as many of them as 150 instructions hold, and its later
passes take more than in proportion to that: three quarters of the first call of a spring system with 259 columns. Runs
gain nothing: after each store to an array the array's address is read again, whatever comes in one iteration. So loops
that only store to their own columns take four at a time, and read all that they need before they store.
"""

from __future__ import annotations

from dataclasses import replace

import taichi_ext.program as ir
from taichi_ext.program.build import add, cast, is_over_columns, literal, not_written_out, operation
from taichi_ext.simplify.usage import all_values

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
    """An array that a block stores numbers to."""
    for s in ir.statements(body):
        if isinstance(s, (ir.Assign, ir.Update)) and isinstance(s.target, ir.Load):
            container = s.target.container
            if container.is_argument and container.ndim == 1 and not container.element_shape:
                return container
    return None
