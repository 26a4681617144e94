"""What cannot be launched with tangents, and what loses them."""

from __future__ import annotations

from typing import Any

from taichi_ext import backend
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.runtime.host_values import is_active_on_host, warn_at_user

STORED = (
    "A number that was read from a field or array with a tangent is stored from Python: what is stored counts as a "
    "constant, its tangent is lost. Assign it in a kernel."
)


def refuse_replaced_gradient(kernel: Any) -> None:
    """Raise in a function whose gradient Taichi is told not to take, or to take otherwise."""
    if backend.is_gradient_replaced():
        raise UnsupportedError(
            f"{kernel.func.__qualname__} is launched in a function decorated with ti.ad.no_grad or "
            "ti.ad.grad_replaced, whose gradient is only defined in reverse mode. Call it without the decorator, "
            "or stop the gradient in the kernel."
        )


def refuse_ended(kernel: Any, args: tuple[Any, ...]) -> None:
    """Raise where an argument is a field or array of a program that has ended."""
    for position, value in enumerate(args):
        problem = backend.ended_problem(value)
        if problem:
            raise InvalidArgumentError(f"Argument {position} of {kernel.func.__qualname__} {problem}.")


def warn_of_lost_tangents(kernel: Any, args: tuple[Any, ...]) -> None:
    """Warn where a number that Python has read from something with a tangent is passed to a kernel."""
    if backend.is_library_kernel(kernel):  # field.fill(value); copies of arrays are told where they are made
        if any(is_active_on_host(a) for a in args if not backend.is_array(a)):
            warn_at_user(STORED)
    elif any(is_active_on_host(a) for a in args):
        warn_at_user(
            f"A number that was read from a field or array with a tangent is passed to {kernel.func.__qualname__}: "
            "it counts as a constant, its tangent is lost. Read it in the kernel."
        )


def refuse_other_fields(kernel: Any, before: Any, now: Any) -> None:
    """Raise where a kernel names other fields than when it was recorded before, in another state of the pipeline."""
    if before != now:
        raise UnsupportedError(
            f"{kernel.func.__qualname__} names other fields than at an earlier launch: attributes or globals have "
            "changed, which plain Taichi does not notice. Pass the fields as ti.template() arguments."
        )
