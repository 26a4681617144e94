"""The fields of one run and their tangents."""

from __future__ import annotations

import math

import numpy as np

from taichi_ext import backend
from taichi_ext.labels import Label
from taichi_ext.launches import ContainerInfo, FieldKey, Role, container_key, rows_of
from taichi_ext.program.keys import Key
from taichi_ext.runtime.memory.shadows import FieldTable, Shadow, TangentColumns


class FieldTangents:
    """Seeds and shadows by field, and of keys that are not containers: returned values, numbers, gradients.

    Attributes:
        shadows: the tangents that are stored, by key.
        own_infos: infos of keys that are not fields.
    """

    def __init__(self, table: FieldTable, columns: TangentColumns) -> None:
        self.shadows: dict[Key, Shadow] = {}
        self.own_infos: dict[Key, ContainerInfo] = {}
        self._table = table
        self._columns = columns
        self._seeds: dict[Key, dict[Key, int]] = {}  # first columns by key, of the field or components

    def info(self, key: Key) -> ContainerInfo:
        """The container of a field or component."""
        return self.own_infos.get(key) or self._table.infos[container_key(key)]

    def names(self) -> list[Key]:
        """The fields that may carry tangents."""
        return [*self._seeds, *(key for key in self.shadows if key not in self._seeds)]

    def seed(self, key: Key, column: int) -> None:
        """Make a field or component a parameter: its entries are the columns from ``column`` on."""
        self._seeds.setdefault(container_key(key), {})[key] = column

    def open_output(self, key: Key, name: Label | str, rows: int, dtype: object, place: np.ndarray | None) -> None:
        """Make a container an output; its J is computed in ``place`` if given."""
        if key not in self.shadows:
            self.shadows[key] = Shadow(name, rows, self._columns.count, dtype, place)
            if key in self._seeds:
                self.shadow(key)

    def shadow(self, key: Key) -> Shadow:
        """The tangents of a container, allocated at first use; those of a parameter start as its seeds."""
        if key not in self.shadows:
            info = self.info(key)
            self.shadows[key] = self._columns.new_shadow(info.name, info.size, info.dtype)
        shadow = self.shadows[key]
        for part, column in self._seeds.pop(key, {}).items():
            self._columns.seed_rows(shadow, column, rows_of(part, self.info(key)))
        return shadow

    def rows(self, key: Key) -> slice:
        """The rows of a field or component in the shadow of the field."""
        return rows_of(key, self.info(key))

    def values(self, key: Key) -> np.ndarray:
        """The tangents of an output, a row for each entry."""
        values = self.shadows[container_key(key)].to_numpy()
        return values if key in self.shadows else np.ascontiguousarray(values[self.rows(key)])

    def column(self, key: Key, row: int) -> int | None:
        """The column that an entry stands for, if it is one of a parameter that nothing has been stored to."""
        for part, column in self._seeds.get(key, {}).items():
            rows = range(row + 1)[rows_of(part, self.info(key))]
            if row in rows:
                return column + rows.index(row)
        return None

    def row(self, key: Key, row: int) -> np.ndarray | None:
        """The tangent of one entry that carries one, a number for each column."""
        shadow = self.shadows.get(key)
        return None if shadow is None else shadow.to_numpy()[row]

    def is_stored(self, key: Key) -> bool:
        """Whether a container has tangents in memory."""
        return container_key(key) in self.shadows

    def is_fresh(self, key: Key) -> bool:
        """Whether nothing has been written to the tangents of an output."""
        return self.shadows[container_key(key)].is_fresh

    def carries(self, key: Key) -> bool:
        """Whether an entry may carry a tangent."""
        return key in self._seeds or (key in self.shadows and not self.shadows[key].is_fresh)

    def role(self, key: Key) -> Role:
        """The tangents of a field when a kernel starts."""
        columns, shadow = self._seeds.get(key), self.shadows.get(key)
        if columns:
            parts = ((part.component, column) for part, column in columns.items() if isinstance(part, FieldKey))
            components = tuple(sorted((number, column) for number, column in parts if number is not None))
            return Role(min(columns.values()), components)
        return Role() if shadow is None else Role(has_shadow=not shadow.is_fresh, is_fresh=shadow.is_fresh)


def row_of_entry(info: ContainerInfo, component: int, index: tuple[int, ...]) -> int:
    """The row of one number; its index may be padded with zeros."""
    row = 0
    for i, first, size in zip(index, info.offset or (0,) * len(info.shape), info.shape, strict=False):
        row = row * size + i - first
    return row * math.prod(info.element_shape) + component


def rows_under(info: ContainerInfo, node: backend.SNode) -> np.ndarray:
    """The rows of the components that are placed in a node of the layout."""
    rows = np.arange(info.size).reshape(-1, math.prod(info.element_shape))
    return rows[:, backend.components_under(info.obj, node)].reshape(-1)
