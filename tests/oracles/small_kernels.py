"""Kernels of one line that many tests need, where what they compute does not matter."""

from __future__ import annotations

from typing import Any

import taichi as ti


def squares(x: Any, y: Any) -> Any:
    """y[i] = x[i]^2, in a kernel of its own."""

    @ti.kernel
    def square():
        for i in x:
            y[i] = x[i] ** 2

    return square
