"""Loops over many columns, in a form that LLVM does not write out.

Where LLVM knows how many iterations a loop has, it writes out as many of them as 150 instructions hold, and its later
passes take more than in proportion to that: three quarters of the first call of a spring system with 259 columns. Runs
gain nothing: after each store to an array the array's address is read again, whatever comes in one iteration.
"""

from __future__ import annotations

from taichi_ext.differentiate.forms.build import is_over_columns, not_written_out
from taichi_ext.program import (
    Assign,
    Body,
    Const,
    Container,
    For,
    Load,
    Statement,
    Update,
    bodies,
    mapped,
    statements,
    with_bodies,
)

MOST_WRITTEN_OUT = 16  # columns; so many are written out soon enough, and run faster
MOST_SERIAL = 4096  # columns; for each parallel loop Taichi compiles a function, and wakes the threads


def with_counted_columns(body: Body) -> Body:
    """The program with loops over many columns as ``while`` loops; of the kernel's own, those that are not long."""
    return tuple(made for s in body for made in _of_kernel(s))


def _of_kernel(s: Statement) -> Body:
    if is_over_columns(s):
        counted = _counted(s) if is_serial(s) else s
        return counted if isinstance(counted, tuple) else (counted,)
    return (with_bodies(s, tuple(mapped(inner, _counted) for inner in bodies(s))),)


def is_serial(s: For) -> bool:
    """Whether a loop of the kernel itself over columns is done sooner than it is given to threads."""
    (count,) = s.domain
    return isinstance(count, Const) and count.value <= MOST_SERIAL


def _counted(s: Statement) -> Statement | Body:
    if not is_over_columns(s):
        return s
    (count,) = s.domain
    array = _stored_to(s.body)
    if not isinstance(count, Const) or count.value <= MOST_WRITTEN_OUT or array is None:
        return s
    return not_written_out(s, array)


def _stored_to(body: Body) -> Container | None:
    """An array that a block stores numbers to."""
    for s in statements(body):
        if isinstance(s, (Assign, Update)) and isinstance(s.target, Load):
            container = s.target.container
            if container.is_argument and container.ndim == 1 and not container.element_shape:
                return container
    return None
