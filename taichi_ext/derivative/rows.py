"""Memory for a row, one number per column: in a local array, in scratch memory, or in the Jacobian itself."""

from __future__ import annotations

from typing import Any

from taichi_ext import backend

MAX_LOCAL_ARRAY = 512
UNROLL = 4  # rows up to this length are handled without a loop


def rows_loop(columns: int, body: Any, *, reads_memory: bool) -> None:
    """``for k in range(columns): body(k)``, unrolled where it is short.

    One that reads memory stays a loop: in straight-line code Taichi 1.7.4 takes a value that it has loaded from memory
    for unchanged by a store whose index it cannot compare (``cfg_optimization``).
    """
    if columns <= UNROLL and not reads_memory:
        for k in range(columns):
            body(k)
        return
    with backend.for_range(columns) as k:
        body(k)


class LocalArray:
    """A row in a local array of the kernel: the fastest to reach, slow to compile when it is long."""

    def __init__(self, size: int, dtype: Any) -> None:
        self.array = backend.zeros_variable(size, dtype)

    def entry(self, index: Any) -> Any:
        return backend.element(self.array, (index,))


class Scratch:
    """A row in an extra argument of the kernel: a part of its own for each thread or iteration of a parallel loop."""

    def __init__(self, tracer: Any, size: int, dtype: Any, *, is_filled: bool) -> None:
        self.array, start = tracer.reserve_scratch(size, dtype)
        self.start: Any = backend.variable(start) if backend.is_expr(start) else start
        if self.array is not None and not is_filled:
            with backend.for_range(size) as k:
                backend.assign(self.entry(k), backend.constant(0, dtype))
        if self.array is None:  # a trace that only collects facts
            self.array, self.start = backend.zeros_variable(1, dtype), 0

    def entry(self, index: Any) -> Any:
        return backend.element(self.array, (self.start + index,))


class SharedRow:
    """A row of the Jacobian itself: what is summed up there need not be copied."""

    def __init__(self, tracer: Any, container: Any, *, is_filled: bool) -> None:
        self.container = container
        indices = [tracer.affine(tracer.atoms[name]) for name in tracer.loops[0].variables]
        row = indices[0] * 0
        for index, size in zip(indices, container.shape, strict=True):
            row = row * size + index
        self.place = row
        self.row = backend.variable(tracer.affine_expression(row))
        if not is_filled:
            with backend.for_range(tracer.columns) as k:
                backend.assign(self.entry(k), backend.constant(0, container.dtype))

    def entry(self, index: Any) -> Any:
        return self.container.tangent_in_place(self.row, index)
