"""Kernels that Taichi compiles for a gradient, and replacements for those that it cannot compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from taichi_ext.backend.arrays import as_numpy, is_torch_tensor, put_back
from taichi_ext.backend.runtime import RUNTIME, AutodiffMode, CompilationError, Kernel, current_kernel, keep_replaced


class NeedsTranspose(CompilationError):
    """Raised while the engine builds a kernel for reverse mode, by a construct that it cannot differentiate."""


TRANSPOSED = object()  # in place of such a kernel, compiled


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


_add_gradient: Callable[[Kernel, tuple[Any, ...]], None] | None = None


def transpose_with(add_gradient: Callable[[Kernel, tuple[object, ...]], None]) -> None:
    """From now on ``add_gradient(kernel, args)`` runs in place of gradients that are ``TRANSPOSED``."""
    global _add_gradient
    _add_gradient = add_gradient


def transpose(kernel: Kernel, key: object) -> None:
    """Run the function of ``transpose_with`` in place of a kernel for a gradient, for arguments of these types."""

    def launch(args: tuple[object, ...]) -> object:
        assert _add_gradient is not None
        return _add_gradient(_primal(kernel), args)

    keep_replaced(kernel, key, TRANSPOSED, launch)


def _primal(gradient: Kernel) -> Kernel:
    """The kernel that a kernel computes the gradient of."""
    return next(k for k in RUNTIME.state().kernels if k.grad is gradient)


def gradient_of(x: Any) -> object:
    """The field or array that holds the gradient of a field or array; None where it has none."""
    if is_torch_tensor(x) and x.requires_grad and x.grad is None:
        x.grad = x.detach().clone().zero_()
    return getattr(x, "grad", None)


def add_to(x: Any, values: Any) -> None:
    """Add values to a field or array."""
    before = np.asarray(as_numpy(x))
    total = np.asarray(before + values.reshape(before.shape), before.dtype)
    if is_torch_tensor(x):
        put_back(x, x.new_tensor(total))
    else:
        x.from_numpy(total)
