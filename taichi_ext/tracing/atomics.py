"""Atomic operations in a traced kernel: primal and tangent of one entry change together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taichi_ext.backend import ops
from taichi_ext.derivative.values import is_active, primal_of
from taichi_ext.errors import UnsupportedError
from taichi_ext.tracing.containers import Ref
from taichi_ext.tracing.index_forms import Locals


def _atomic_sum(sign: int) -> Callable[..., Any]:
    def evaluate(tracer: Any, function: Any, args: list[Any], keywords: Any, is_statement: bool) -> Any:
        target, value = _place(args[0]), tracer.value_of(args[1])
        if not isinstance(target, (Ref, *Locals)):
            return _native_atomic(tracer, function, target, value)
        if is_statement:
            target.add(value, sign)
            return None
        if _is_plain(target, value):
            tracer_note(tracer, target)
            return function(target.primal, primal_of(value))
        _keep_order(tracer, target)
        old = tracer.freeze(target, (tracer.path, "atomic", tracer.line()))
        with tracer.inside_expression():
            target.add(value, sign)
        return old

    return evaluate


def _place(target: Any) -> Any:
    return target.settled() if isinstance(target, Ref) else target


def _is_plain(target: Any, value: Any) -> bool:
    """Whether neither the entry nor what is combined with it carries a tangent."""
    if not isinstance(target, Ref) or is_active(value):
        return False
    return not target.container.is_active


def tracer_note(tracer: Any, target: Ref) -> None:
    tracer.note_read(target.container)
    tracer.note_write(target.container, target, False)


def _native_atomic(tracer: Any, function: Any, target: Any, value: Any) -> Any:
    tracer._note_native_assignment(target, value)
    return function(target, primal_of(value))


def _keep_order(tracer: Any, target: Any) -> None:
    if isinstance(target, Ref) and target.container.key not in tracer.facts.writes:
        return  # what writes to it is known after the first trace
    is_alone = (
        tracer.is_private(target.container, target) if isinstance(target, Ref) else not tracer.is_shared(target.block)
    )
    if not is_alone:
        tracer.keep_order()


def _atomic_extremum(name: str) -> Callable[..., Any]:
    def evaluate(tracer: Any, function: Any, args: list[Any], keywords: Any, is_statement: bool) -> Any:
        target, value = _place(args[0]), tracer.value_of(args[1])
        if not isinstance(target, (Ref, *Locals)):
            return _native_atomic(tracer, function, target, value)
        if _is_plain(target, value):
            tracer_note(tracer, target)
            return function(target.primal, primal_of(value))
        if isinstance(target, Ref):
            tracer.note_read(target.container)
            tracer.note_write(target.container, target, is_active(value))
        _keep_order(tracer, target)
        old = tracer.freeze(target, (tracer.path, "atomic", tracer.line()))
        # the right-hand operand wins a tie: here what was there before
        with tracer.inside_expression():
            tracer.assign_to(target, tracer.operate(name, value, old))
        return old

    return evaluate


def _atomic_product(tracer: Any, function: Any, args: list[Any], keywords: Any, is_statement: bool) -> Any:
    target, value = args[0], tracer.value_of(args[1])
    if isinstance(target, Ref):
        raise UnsupportedError("ti.atomic_mul on a field or array: Taichi aborts on it; use x[i] *= value.")
    if not isinstance(target, Locals):
        return _native_atomic(tracer, function, target, value)
    _keep_order(tracer, target)
    old = tracer.freeze(target, (tracer.path, "atomic", tracer.line()))
    with tracer.inside_expression():
        tracer.assign_to(target, tracer.operate("mul", old, value))
    return old


SPECIAL: dict[Any, Callable[..., Any]] = {
    ops.atomic_add: _atomic_sum(1),
    ops.atomic_sub: _atomic_sum(-1),
    ops.atomic_min: _atomic_extremum("min"),
    ops.atomic_max: _atomic_extremum("max"),
    ops.atomic_mul: _atomic_product,
}
