"""Kernels that Taichi compiles for a gradient, their replacements, and gradients of fields and arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from taichi_ext.backend.arrays import as_numpy, is_placed, is_torch_tensor, put_back
from taichi_ext.backend.runtime import (
    RUNTIME,
    AutodiffMode,
    CompilationError,
    Field,
    Kernel,
    current_kernel,
    keep_replaced,
)


def is_gradient_kernel() -> bool:
    """Whether a kernel is being compiled for Taichi's reverse mode; raises where it is for its forward mode."""
    kernel = current_kernel()
    mode = AutodiffMode.NONE if kernel is None else kernel.autodiff_mode
    if mode == AutodiffMode.FORWARD:
        raise CompilationError(
            "A custom gradient is used in a kernel that is compiled for ti.ad.FwdMode, which cannot take it; use "
            "taichi_ext.jacobian, or kernel.grad() and ti.ad.Tape."
        )
    return mode == AutodiffMode.REVERSE


Launch = Callable[[tuple[Any, ...]], object]
_gradient_of: Callable[[Kernel, tuple[Any, ...]], Launch] | None = None


def compile_gradients_with(gradient_launch: Callable[[Kernel, tuple[Any, ...]], Launch]) -> None:
    """From now on, kernels for a gradient that Taichi cannot compile are launched by ``gradient_launch(kernel, args)``.

    It is called where Taichi would compile one, with the kernel itself and arguments of its types, and gives a function
    of arguments.
    """
    global _gradient_of
    _gradient_of = gradient_launch


def replace_gradient_kernel(kernel: Kernel, key: object, args: tuple[Any, ...]) -> None:
    """Launch our adjoint in place of a kernel for a gradient, for arguments of these types."""
    assert _gradient_of is not None
    primal = next(k for k in RUNTIME.state().kernels if k.grad is kernel)
    keep_replaced(kernel, key, _gradient_of(primal, args))


def gradient_of(x: Any) -> object:
    """The field or array that holds the gradient of a field or array; None where it has none."""
    if is_torch_tensor(x) and x.requires_grad and x.grad is None:
        x.grad = x.detach().clone().zero_()
    grad = getattr(x, "grad", None)
    return None if isinstance(grad, Field) and not is_placed(grad) else grad


def add_to(x: Any, values: np.ndarray, *, is_added: bool = True) -> None:
    """Add values to a field or array, or store them."""
    before = np.asarray(as_numpy(x))
    values = np.broadcast_to(values.reshape(before.shape) if values.size == before.size else values, before.shape)
    total = np.asarray(before + values if is_added else values, before.dtype)
    if is_torch_tensor(x):
        put_back(x, x.new_tensor(total))
    else:
        x.from_numpy(total)
