"""Reorder and sum numbers in parallel."""

# The annotations of a kernel are values that Taichi reads, such as ti.template().
# pyright: reportInvalidTypeForm=false

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from taichi_ext import backend


@functools.cache
def _kernels(ti: ModuleType) -> tuple[Callable[..., None], ...]:
    """Kernels that gather numbers, add up stretches of them, and add up stretches of vectors."""
    array: Any = ti.types.ndarray(ndim=1)

    @ti.kernel
    def gather(numbers: array, order: array, found: array):
        for k in order:
            found[k] = numbers[order[k]]

    @ti.kernel
    def add_up(numbers: array, order: array, starts: array, found: array):
        for k in found:
            total = numbers[order[starts[k]]]
            for n in range(starts[k] + 1, starts[k + 1]):
                total += numbers[order[n]]
            found[k] = total

    @ti.kernel
    def add_up_vectors(numbers: array, order: array, starts: array, found: array, length: ti.template()):
        for k in range(starts.shape[0] - 1):
            first = order[starts[k]]
            totals = ti.Vector([numbers[first + c] for c in ti.static(range(length))])
            for n in range(starts[k] + 1, starts[k + 1]):
                for c in ti.static(range(length)):
                    totals[c] += numbers[order[n] + c]
            for c in ti.static(range(length)):
                found[length * k + c] = totals[c]

    return gather, add_up, add_up_vectors


def merged(numbers: np.ndarray, order: np.ndarray, starts: Any, length: int) -> np.ndarray:
    """The numbers in an order; with ``starts`` (one per entry, and the end), the sum of each stretch of them.

    If ``length`` is more than 1, each place in the order stands for ``length`` contiguous numbers.
    """
    gather, add_up, add_up_vectors = _kernels(backend.RUNTIME.module)
    with backend.suspend_following():
        if starts is None:
            found = np.empty(len(order), numbers.dtype)
            gather(numbers, order, found)
        elif length == 1:
            found = np.empty(len(starts) - 1, numbers.dtype)
            add_up(numbers, order, starts, found)
        else:
            found = np.empty(length * (len(starts) - 1), numbers.dtype)
            add_up_vectors(numbers, order, starts, found, length)
    return found
