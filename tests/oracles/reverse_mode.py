"""Compare Taichi's own reverse mode with ``jacobian``: the gradient must be the transpose of J."""

from collections.abc import Callable
from typing import Any

import numpy as np
import taichi as ti
from differences import read, write
from field_pool import pool
from numpy.testing import assert_allclose

from taichi_ext import jacobian


def gradient_field(values: Any, rank: int = 0, dtype: Any = ti.f64) -> Any:
    """A field with a gradient that holds the values; the last ``rank`` axes are the vector or matrix."""
    values = np.asarray(values, np.float32 if dtype == ti.f32 else np.float64)
    shape, element = values.shape[: values.ndim - rank], values.shape[values.ndim - rank :]
    field = pool.take(element, dtype, shape, needs_grad=True)
    write(field, values)
    return field


def gradient(kernel: Callable[[], None], x: Any, y: Any, weights: np.ndarray) -> np.ndarray:
    """``kernel.grad()``: the gradient of ``sum(weights * y)`` by x, in float64."""
    zeros = np.zeros_like(read(y))
    write(y, zeros)
    kernel()
    write(y.grad, weights.astype(zeros.dtype))
    write(x.grad, np.zeros_like(read(x)))
    kernel.grad()
    return read(x.grad).astype(np.float64)


def check_transpose(kernel: Any, x: Any, y: Any, rtol: float = 1e-9) -> np.ndarray:
    """Hold ``kernel.grad()`` against the transpose of ``jacobian(kernel, x, y)`` for random weights; returns J."""
    J = jacobian(kernel, x, y)
    weights = np.random.default_rng(0).normal(size=read(y).shape)
    expected = np.tensordot(weights, J.astype(np.float64), weights.ndim)
    result = gradient(kernel, x, y, weights)
    # by the size of the terms that the sum consists of: it may cancel
    scale = np.tensordot(np.abs(weights), np.abs(J).astype(np.float64), weights.ndim).max()
    assert scale > 0, "the output does not depend on x"
    assert_allclose(result, expected, rtol=rtol, atol=rtol * scale)
    return J
