"""Numbers put in order and added up, by all threads."""

# The annotations of a kernel are values that Taichi reads, such as ti.template().
# pyright: reportInvalidTypeForm=false

from typing import Any

import numpy as np
import taichi as ti

from taichi_ext import backend

Array: Any = ti.types.ndarray(ndim=1)


@ti.kernel
def _gather(numbers: Array, order: Array, found: Array):
    for k in order:
        found[k] = numbers[order[k]]


@ti.kernel
def _add_up(numbers: Array, order: Array, starts: Array, found: Array):
    for k in found:
        total = numbers[order[starts[k]]]
        for n in range(starts[k] + 1, starts[k + 1]):
            total += numbers[order[n]]
        found[k] = total


@ti.kernel
def _add_up_together(numbers: Array, order: Array, starts: Array, found: Array, length: ti.template()):
    for k in range(starts.shape[0] - 1):
        first = order[starts[k]]
        totals = ti.Vector([numbers[first + c] for c in ti.static(range(length))])
        for n in range(starts[k] + 1, starts[k + 1]):
            for c in ti.static(range(length)):
                totals[c] += numbers[order[n] + c]
        for c in ti.static(range(length)):
            found[length * k + c] = totals[c]


def merged(numbers: np.ndarray, order: np.ndarray, starts: Any, length: int) -> np.ndarray:
    """The numbers in an order; with ``starts``, one per entry and where they end, the sum of each stretch of them.

    Where the length is more than 1, each place in the order stands for so many numbers that lie together.
    """
    with backend.suspend_following():
        if starts is None:
            found = np.empty(len(order), numbers.dtype)
            _gather(numbers, order, found)
        elif length == 1:
            found = np.empty(len(starts) - 1, numbers.dtype)
            _add_up(numbers, order, starts, found)
        else:
            found = np.empty(length * (len(starts) - 1), numbers.dtype)
            _add_up_together(numbers, order, starts, found, length)
    return found
