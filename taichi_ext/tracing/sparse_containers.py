"""Containers as the trace for a sparse Jacobian sees them."""

from __future__ import annotations

from typing import Any

from taichi_ext import backend
from taichi_ext.derivative.storage import settle
from taichi_ext.derivative.values import linearize, primal_of
from taichi_ext.differentiate.sparse_columns import Columns, composed_key
from taichi_ext.tracing.containers import Container, Ref, broadcast, columns_only


def sparse_container(
    tracer: Any, info: Any, columns: Columns, shadow: Any, is_sunk: bool, is_param: bool, is_fresh: bool
) -> Container:
    """One with a sink, one that is columns, or one with rows of the columns that rows hold."""
    first = columns.first(info.key) if is_param else None
    if info.key in tracer.facts.composed:
        first = columns.first(composed_key(info.key, 0))
    if shadow is not None:
        first = None
    kind = (info.key, info.name, info.shape, info.element_shape, info.offset, info.dtype)
    return Container(*kind, columns.width, first, shadow, is_fresh, sink=tracer.sink if is_sunk else None)


def sink_returned(tracer: Any, key: Any, value: Any) -> None:
    """Store what a kernel returns."""
    scalars = broadcast(value, 1)
    dtype = backend.dtype_of(primal_of(scalars[0]))
    container = Container(key, "the return value", (len(scalars),), (), (), dtype, tracer.columns, sink=tracer.sink)
    refs = [Ref(tracer, container, None, (n,), None) for n in range(len(scalars))]
    forms = [settle(columns_only(tracer, linearize(tracer, scalar)), dtype) for scalar in scalars]
    for ref, form in zip(refs, forms, strict=True):
        tracer.note_write(container, ref, True)
        tracer.sink.store(ref, [ref], [form])
