"""Fields that tests use again."""

from __future__ import annotations

from typing import Any

import taichi as ti


class FieldPool:
    """Fields of the current Taichi program, handed out again in the next test.

    Taichi compiles a kernel for each field that is copied from or to NumPy, which takes longer than most tests.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[Any]] = {}
        self._taken: list[tuple[Any, Any]] = []

    def take(self, element_shape: tuple[int, ...], dtype: Any, shape: tuple[int, ...]) -> Any:
        """A dense field; what it holds is not defined."""
        key = (element_shape, dtype, shape)
        free = self._free.setdefault(key, [])
        if free:
            field = free.pop()
        elif len(element_shape) == 0:
            field = ti.field(dtype, shape=shape)
        elif len(element_shape) == 1:
            field = ti.Vector.field(*element_shape, dtype, shape=shape)
        else:
            field = ti.Matrix.field(*element_shape, dtype, shape=shape)
        self._taken.append((key, field))
        return field

    def give_back(self) -> None:
        """The test is over: all fields are free."""
        for key, field in self._taken:
            self._free[key].append(field)
        self._taken.clear()

    def forget(self) -> None:
        """The Taichi program is over: its fields no longer exist."""
        self._free.clear()
        self._taken.clear()


pool = FieldPool()
