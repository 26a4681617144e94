"""One-dimensional arrays that kernels of this package's own take: of NumPy on the CPU, ``ti.ndarray``s on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.backend import ti


@functools.cache
def numpy_dtype(dtype: Any) -> np.dtype:
    """NumPy's type of Taichi's one, which looks it up in a chain of comparisons."""
    return np.dtype(backend.to_numpy_type(dtype))


def new_array(size: int, dtype: Any, *, is_zero: bool = False) -> Any:
    """An array of at least one number."""
    if backend.is_host_arch():
        return (np.zeros if is_zero else np.empty)(max(1, size), numpy_dtype(dtype))
    with backend.suspend_following():  # it is no array of the user's
        backend.enter_thread()
        array = ti.ndarray(dtype, shape=max(1, size))
        if is_zero:
            array.fill(0)
    return array


def array_of(integers: np.ndarray) -> Any:
    """An array of given integers of 32 bits; on the CPU these themselves."""
    if backend.is_host_arch():
        return integers
    array = new_array(len(integers), backend.i32)
    with backend.suspend_following():
        array.from_numpy(integers)
    return array


def to_numpy(array: Any) -> np.ndarray:
    """The numbers; on the CPU the array itself."""
    if isinstance(array, np.ndarray):
        return array
    with backend.suspend_following():
        return array.to_numpy()
