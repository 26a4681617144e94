"""Loops over many columns, in a form that LLVM does not write out.

Where LLVM knows how many iterations a loop has, it writes out as many of them as 150 instructions hold, and its later
passes take more than in proportion to that: three quarters of the first call of a spring system with 259 columns. Runs
gain nothing: after each store to an array the array's address is read again, whatever comes in one iteration.
"""

from __future__ import annotations

import taichi_ext.program as ir
from taichi_ext.differentiate.forms.build import is_over_columns, not_written_out

MOST_WRITTEN_OUT = 16  # columns; up to this number unrolled loops compile fast enough, and run faster
MOST_SERIAL = 4096  # columns; for each parallel loop Taichi compiles a function, and wakes the threads


def with_counted_columns(body: ir.Body) -> ir.Body:
    """The program with loops over many columns as ``while`` loops; of the kernel's own, those that are not long."""
    return tuple(made for s in body for made in _of_kernel(s))


def _of_kernel(s: ir.Statement) -> ir.Body:
    if is_over_columns(s):
        counted = _counted(s) if is_serial(s) else s
        return counted if isinstance(counted, tuple) else (counted,)
    return (ir.with_bodies(s, tuple(ir.mapped(inner, _counted) for inner in ir.bodies(s))),)


def is_serial(s: ir.For) -> bool:
    """Whether a loop of the kernel itself over columns is done sooner than it is given to threads."""
    (count,) = s.domain
    return isinstance(count, ir.Const) and count.value <= MOST_SERIAL


def _counted(s: ir.Statement) -> ir.Statement | ir.Body:
    if not is_over_columns(s):
        return s
    (count,) = s.domain
    array = _stored_to(s.body)
    if not isinstance(count, ir.Const) or count.value <= MOST_WRITTEN_OUT or array is None:
        return s
    return not_written_out(s, array)


def _stored_to(body: ir.Body) -> ir.Container | None:
    """An array that a block stores numbers to."""
    for s in ir.statements(body):
        if isinstance(s, (ir.Assign, ir.Update)) and isinstance(s.target, ir.Load):
            container = s.target.container
            if container.is_argument and container.ndim == 1 and not container.element_shape:
                return container
    return None
