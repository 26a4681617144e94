"""Custom derivatives in a kernel: marks, stopped and replaced gradients, in kernels that Taichi compiles by itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.boundary.kernel_scope import recorded, require_kernel
from taichi_ext.boundary.registry import registry
from taichi_ext.errors import InvalidRuleError

_NUMBERS: Any = (float, int, np.number)


@recorded
def mark(name: str, value: object, **along: object) -> Any:
    """Give a subexpression of a kernel a name, so that ``@boundary_gradient(name)`` can give it a derivative.

    Args:
        name: the name, a string literal.
        value: the subexpression: a scalar, vector or matrix.
        **along: further values for the rule: it can take each of them, and its tangent.

    Returns:
        The value.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import boundary_gradient, jacobian, mark, registry
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> x, y = ti.field(ti.f64, shape=()), ti.field(ti.f64, shape=())
        >>> x[None] = 2.0
        >>> @ti.kernel
        ... def k():
        ...     y[None] = 3.0 * mark("clipped", ti.min(x[None], 1.0), by=x[None])
        >>> @boundary_gradient("clipped")
        ... def _(by, d_by, auto):
        ...     return ti.select(by > 1.0, 0.1 * d_by, auto)  # a slope that leads back
        >>> jacobian(k, x, y)
        array(0.3)
        >>> registry.remove("clipped")
    """
    require_kernel("mark", value)
    check_mark_name(name)
    registry.note_mark(name)
    if registry.rule_for(name) is not None:
        _leave_reverse_mode_to_engine("mark")
    return value


@recorded
def stop_gradient(value: Any) -> Any:
    """The value, with a derivative of zero.

    Args:
        value: a scalar, vector or matrix in a kernel; in the Python code of a pipeline, a number.

    Returns:
        The value.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import jacobian, stop_gradient
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> x, y = ti.field(ti.f64, shape=()), ti.field(ti.f64, shape=())
        >>> x[None] = 2.0
        >>> @ti.kernel
        ... def k():
        ...     y[None] = x[None] * stop_gradient(x[None])
        >>> jacobian(k, x, y)
        array(2.)
    """
    if isinstance(value, _NUMBERS) and not backend.is_inside_kernel():
        stop = getattr(value, "stopped", None)  # of a dual number in a pipeline
        return value if stop is None else stop()
    require_kernel("stop_gradient", value)
    _leave_reverse_mode_to_engine("stop_gradient")
    return value


@recorded
def replace_gradient(value: object, surrogate: object) -> Any:
    """The value of one expression with the derivative of another.

    Args:
        value: a scalar, vector or matrix in a kernel.
        surrogate: an expression of the same shape.

    Returns:
        The value, with the tangent of the surrogate.

    Raises:
        InvalidRuleError: the shapes differ, or the value is an integer, which has no derivative.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import jacobian, replace_gradient
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> x, y = ti.field(ti.f64, shape=()), ti.field(ti.f64, shape=())
        >>> x[None] = 2.0
        >>> @ti.kernel
        ... def k():
        ...     y[None] = replace_gradient(ti.round(x[None]), x[None])  # straight through
        >>> jacobian(k, x, y)
        array(1.)
    """
    require_kernel("replace_gradient", value)
    _leave_reverse_mode_to_engine("replace_gradient")
    return value


def _leave_reverse_mode_to_engine(name: str) -> None:
    """Make the engine build the kernel that Taichi is compiling, where that is for Taichi's reverse mode."""
    if backend.is_gradient_kernel():
        raise backend.NeedsEngine(name)


def check_mark_name(name: object) -> None:
    """Raise unless a mark is named by a string."""
    if not isinstance(name, str):
        raise InvalidRuleError(f"mark: the name is {name!r}; expected a string.")
