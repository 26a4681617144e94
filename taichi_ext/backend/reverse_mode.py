"""Kernels that Taichi compiles for a gradient."""

from __future__ import annotations

import taichi as ti
from taichi.lang import impl
from taichi.lang.enums import AutodiffMode


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
