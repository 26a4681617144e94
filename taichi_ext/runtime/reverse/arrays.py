"""NumPy arrays and tensors that Python can change unnoticed, between the launches of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError
from taichi_ext.runtime.memory.regions import Region
from taichi_ext.runtime.reverse.cells import Cell, Cells


@dataclass(frozen=True)
class ArrayChange:
    """Entries of an array that Python has changed; memory is as it was before.

    Attributes:
        cell: the array.
        rows: the entries.
        redo: makes the change again.
    """

    cell: Cell
    name: Any
    rows: np.ndarray
    redo: Any


class HostArrays:
    """The arrays of a run that Python can change unnoticed, and their bytes after the last launch.

    Args:
        cells: those of the run.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def remember(self, written: Iterable[Cell] | None = None) -> None:
        """Copy the bytes of arrays that may have changed since the last copy: those written, or all."""
        changed = None if written is None else {self._cells.regions.find(c.key) for c in written if c.key is not None}  # type: ignore[arg-type]
        for region in self._cells.regions:
            if region.copy is not None and changed is not None and region not in changed:
                continue
            memory = region.memory
            if memory is not None:
                region.copy = memory.copy()

    def changes(self) -> Iterator[ArrayChange]:
        """What Python has changed since the last launch."""
        for region in list(self._cells.regions):
            memory = region.memory
            rows = region.changed_rows(memory, region.copy)
            if memory is not None and len(rows):
                yield self._change(region, memory, rows)

    def _change(self, region: Region, memory: np.ndarray, rows: np.ndarray) -> ArrayChange:
        if backend.host_values(region.owners[-1][1]) is None:
            raise UnsupportedError("Python changes an array on a device between kernels.")
        cell = self._cells.of_array(region.layout, region.name, memory.view(backend.to_numpy_type(region.dtype)))
        now = memory.copy()
        memory[...] = region.copy
        region.copy = now
        return ArrayChange(cell, region.name, rows, lambda: np.copyto(memory, now))
