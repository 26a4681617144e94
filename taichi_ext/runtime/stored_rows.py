"""The rows of tangents that belong to entries which Python stores to."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.launches import ContainerInfo


def row_of_entry(info: ContainerInfo, index: tuple[int, ...], component: int) -> int:
    """The row of one number of a field, by its index and the component that it is."""
    row = 0
    for i, first, size in zip(index, info.offset or (0,) * len(info.shape), info.shape, strict=False):
        row = row * size + i - first
    return row * math.prod(info.element_shape) + component


def rows_of_index(array: Any, index: Any) -> np.ndarray:
    """The rows of an entry of a ti.ndarray; the index of a component may follow."""
    index = index if isinstance(index, tuple) else () if index is None else (index,)
    shape = backend.full_shape(array)
    return np.arange(math.prod(shape)).reshape(shape)[tuple(int(i) for i in index)].reshape(-1)
