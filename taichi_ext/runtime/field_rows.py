"""Fields and the rows of their tangents: which rows belong to which entries and components."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.differentiate.keys import Key
from taichi_ext.launches import ContainerInfo, FieldKey, Role
from taichi_ext.runtime.memory import Shadow


def role_of(columns: Mapping[Key, int], shadow: Shadow | None) -> Role:
    """What a field carries: ``columns`` are the first ones by key, of the field or of components."""
    if columns:
        parts = ((key.component, column) for key, column in columns.items() if isinstance(key, FieldKey))
        components = tuple(sorted((number, column) for number, column in parts if number is not None))
        return Role(min(columns.values()), components)
    return Role() if shadow is None else Role(has_shadow=not shadow.is_fresh, is_fresh=shadow.is_fresh)


def row_of_entry(info: ContainerInfo, component: int, index: tuple[int, ...]) -> int:
    """The row of one number, whose index may be filled up with zeros."""
    row = 0
    for i, first, size in zip(index, info.offset or (0,) * len(info.shape), info.shape, strict=False):
        row = row * size + i - first
    return row * math.prod(info.element_shape) + component


def rows_under(info: ContainerInfo, node: Any) -> np.ndarray:
    """The rows of the components that are placed in a node of the layout."""
    rows = np.arange(info.size).reshape(-1, math.prod(info.element_shape))
    return rows[:, backend.components_under(info.obj, node)].reshape(-1)


def rows_of_index(array: Any, index: Any) -> np.ndarray:
    """The rows of an entry of a ti.ndarray; the index of a component may follow."""
    index = index if isinstance(index, tuple) else () if index is None else (index,)
    shape = backend.full_shape(array)
    return np.arange(math.prod(shape)).reshape(shape)[tuple(int(i) for i in index)].reshape(-1)
