"""Reorder and sum numbers in parallel."""

# The annotations of a kernel are values that Taichi reads, such as ti.template().
# pyright: reportInvalidTypeForm=false

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from taichi_ext import backend

NO_OVERFLOW = 2**30 - 1  # so that LLVM adds constants to a place as part of the address


@functools.cache
def _kernels(ti: ModuleType) -> tuple[Callable[..., None], ...]:
    """Kernels that gather numbers, and add up stretches of vectors of them, and of blocks of a symmetric matrix."""
    array: Any = ti.types.ndarray(ndim=1)
    table: Any = ti.types.ndarray(ndim=2)

    @ti.kernel
    def gather(numbers: array, order: array, found: array):
        for k in order:
            found[k] = numbers[order[k]]

    @ti.kernel
    def add_up(numbers: array, order: array, starts: array, found: array, length: ti.template()):
        for k in range(starts.shape[0] - 1):
            first = order[starts[k]]
            totals = ti.Vector([numbers[first + c] for c in ti.static(range(length))])
            for n in range(starts[k] + 1, starts[k + 1]):
                for c in ti.static(range(length)):
                    totals[c] += numbers[order[n] + c]
            for c in ti.static(range(length)):
                found[length * k + c] = totals[c]

    @ti.kernel
    def add_up_blocks(numbers: array, order: array, blocks: table, found: array, length: ti.template()):
        for k in range(blocks.shape[0]):
            places = ti.Vector([blocks[k, n] & NO_OVERFLOW for n in ti.static(range(2 * length))])
            start, end = blocks[k, 2 * length], blocks[k, 2 * length + 1]
            first = order[start] & NO_OVERFLOW
            totals = ti.Vector([numbers[first + c] for c in ti.static(range(length * length))])
            for n in range(start + 1, end):
                place = order[n] & NO_OVERFLOW
                for c in ti.static(range(length * length)):
                    totals[c] += numbers[place + c]
            for i, j in ti.static(ti.ndrange(length, length)):
                found[places[i] + j] = totals[length * i + j]
                found[places[length + j] + i] = totals[length * i + j]

    return gather, add_up, add_up_blocks


def merged(numbers: np.ndarray, order: np.ndarray, starts: Any, length: int) -> np.ndarray:
    """The numbers in an order; with ``starts`` (one per entry, and the end), the sum of each stretch of them.

    If ``length`` is more than 1, each place in the order stands for ``length`` contiguous numbers.
    """
    gather, add_up, _ = _kernels(backend.RUNTIME.module)
    with backend.suspend_following():
        if starts is None:
            found = np.empty(len(order), numbers.dtype)
            gather(numbers, order, found)
        else:
            found = np.empty(length * (len(starts) - 1), numbers.dtype)
            add_up(numbers, order, starts, found, length)
    return found


def merged_blocks(numbers: np.ndarray, order: np.ndarray, blocks: np.ndarray, length: int, count: int) -> np.ndarray:
    """The sums of blocks of ``length x length`` numbers, each written to its place and, transposed, to another one.

    ``blocks`` has the places of the rows in each of the two, and the stretch of ``order`` to add up.
    """
    found = np.empty(count, numbers.dtype)
    with backend.suspend_following(), backend.without_fast_math():  # LLVM would add up each fourth number in a lane
        _kernels(backend.RUNTIME.module)[2](numbers, order, blocks, found, length)
    return found
