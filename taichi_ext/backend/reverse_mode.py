"""Kernels that Taichi compiles for a gradient: which they are; functions with rules leave them to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import taichi as ti
from taichi.lang import impl
from taichi.lang.enums import AutodiffMode
from taichi.lang.kernel_impl import Func

from taichi_ext.backend.compiling import NeedsEngine
from taichi_ext.backend.kernels import FusedKernel


def is_gradient_kernel() -> bool:
    """Whether a kernel is being compiled for Taichi's reverse mode; raises where it is for its forward mode."""
    kernel = impl.get_runtime().current_kernel
    mode = AutodiffMode.NONE if kernel is None else kernel.autodiff_mode
    if mode == AutodiffMode.FORWARD:
        raise ti.TaichiCompilationError(
            "A custom gradient is used in a kernel that is compiled for ti.ad.FwdMode, which cannot take it; use "
            "taichi_ext.jacobian, or kernel.grad() and ti.ad.Tape."
        )
    return mode == AutodiffMode.REVERSE


def leave_function_to_engine(func: Func, has_rule: Callable[[], bool]) -> None:
    """Kernels that call a function are built by the engine where they are for reverse mode and the function has a rule.

    Kernels of the engine itself have no rules: it has applied them.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        is_users = impl.inside_kernel() and not isinstance(impl.get_runtime().current_kernel, FusedKernel)
        if is_users and has_rule() and is_gradient_kernel():
            raise NeedsEngine(func.func.__qualname__)
        return Func.__call__(func, *args, **kwargs)

    func.__call__ = call  # type: ignore[method-assign]  # the decorated function looks it up on the instance


def restore_function(func: Func) -> None:
    func.__dict__.pop("__call__", None)
