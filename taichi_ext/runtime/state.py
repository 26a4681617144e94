"""What a run changes, kept so that it can be run again: only needed when columns are computed in several runs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.labels import Labels

_SEVERAL_RUNS = (
    "The columns are to be computed in several runs (chunk_size=, or tangents that do not fit into max_memory)"
)
DENSE_FIELDS = "Draw random numbers into a field before the call, and give fields that kernels write a dense layout."
_FEWER_RUNS = "Leave out chunk_size=, allow more max_memory, or use fewer parameters at a time."


@dataclass(eq=False)
class _Stretch:
    """A stretch of memory, as it was."""

    owner: Any  # keeps the memory alive
    start: int
    copy: np.ndarray  # bytes
    is_used: bool = True  # in this run

    @property
    def end(self) -> int:
        return self.start + self.copy.size


class State:
    """Copies of fields and arrays as they were before they were first written."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._log: dict[Any, tuple[Any, Any]] = {}  # fields, ti.ndarrays, single numbers of fields: what they held
        self._memory: dict[Any, list[_Stretch]] = {}  # of arrays, by address; no two stretches overlap
        self.has_random = False
        self.reason, self.advice = _SEVERAL_RUNS, _FEWER_RUNS  # why there is another run, and how to do with one

    def save(self, obj: Any) -> None:
        """Keep a copy of a field or array, the first time that it is named; of memory only where there is none yet."""
        if backend.is_array(obj) and not isinstance(obj, backend.Ndarray):
            self._save_memory(obj)
        elif id(obj) not in self._log:
            with backend.suspend_following():
                self._log[id(obj)] = (obj, backend.copy_of(obj))

    def save_fields(self, fields: list[Any]) -> None:
        """Keep copies of several fields."""
        with backend.suspend_following():
            backend.find_memory(f for f in fields if id(f) not in self._log)
        for field in fields:
            self.save(field)

    def save_entry(self, entry: backend.FieldEntry) -> None:
        """Keep one number of a field that Python is about to store to."""
        if entry.name not in self._log:
            self._log[entry.name] = (entry, entry.read())

    def _save_memory(self, array: Any) -> None:
        space, start, end = backend.memory_span(array)
        saved = self._memory.setdefault(space, [])
        first = bisect_right(saved, start, key=lambda s: s.end)
        for stretch in saved[first : bisect_left(saved, end, key=lambda s: s.start)]:
            self._reuse(stretch, array)
        for gap, length in list(_gaps(saved[first:], start, end)):
            memory = backend.memory_of(array, gap, length)
            assert memory is not None
            insort(saved, _Stretch(array, gap, memory.copy()), key=lambda s: s.start)

    def _reuse(self, stretch: _Stretch, array: Any) -> None:
        """The same memory is named again: at first it has to hold what it did in the run before."""
        if stretch.is_used:
            return
        stretch.is_used = True
        memory = backend.memory_of(stretch.owner, stretch.start, stretch.copy.size)
        if memory is None or not np.array_equal(memory, stretch.copy):
            raise InvalidArgumentError(
                f"{self.reason}, but Python code changes an array of shape {tuple(array.shape)} before a kernel gets "
                f"it, and this cannot be undone for another run. Pass the array in args. {self.advice}"
            )

    def restore(self) -> None:
        """Put everything back as it was."""
        self.refuse_repetition()
        self.undo()

    def refuse_repetition(self) -> None:
        """Raise where what has been saved so far cannot be put back, or would be computed from other numbers."""
        if self.has_random:
            raise InvalidArgumentError(
                f"{self.reason}, and a kernel that draws random numbers cannot draw the same ones again. {self.advice}"
            )
        for obj, _ in self._log.values():
            if not _is_dense(obj):
                what = f"{self._labels.field(obj)}," if isinstance(obj, backend.Field) else "a field,"
                raise InvalidArgumentError(
                    f"{self.reason}, and {what} in a sparse layout, cannot be restored for another run. {self.advice}"
                )

    def is_repeatable(self) -> bool:
        """Whether all that has been saved can be put back, and would be computed from the same numbers again."""
        return not self.has_random and all(_is_dense(obj) for obj, _ in self._log.values())

    def undo(self) -> None:
        """Put back what can be put back: all but fields in sparse layouts."""
        with backend.suspend_following():
            for obj, copy in reversed(self._log.values()):  # they may overlap: what was saved first holds
                if not _is_dense(obj):
                    continue
                if isinstance(obj, backend.FieldEntry):
                    obj.write(copy)
                else:
                    backend.put_back(obj, copy)
        for stretch in (s for saved in self._memory.values() for s in saved):
            backend.set_memory(stretch.owner, stretch.start, stretch.copy)
            stretch.is_used = False


def _gaps(saved: list[_Stretch], start: int, end: int) -> Iterator[tuple[int, int]]:
    """The beginnings and lengths of what no stretch holds."""
    for stretch in saved:
        if start >= end or stretch.start >= end:
            break
        if start < stretch.start:
            yield start, stretch.start - start
        start = max(start, stretch.end)
    if start < end:
        yield start, end - start


def _is_dense(obj: Any) -> bool:
    if isinstance(obj, backend.FieldEntry):
        return obj.is_dense
    return not isinstance(obj, backend.Field) or backend.is_dense(obj)


class OverBudgetError(Exception):
    """The tangents of intermediates need more memory than allowed; fewer columns at a time are tried."""
