"""The state before a run, restored for the next one if columns are computed in several runs."""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import InvalidArgumentError

_SEVERAL_RUNS = (
    "The columns are to be computed in several runs (chunk_size=, or tangents that do not fit into max_memory)"
)
RANDOM_BEFORE = "Draw random numbers into a field before the call."
_FEWER_RUNS = "Leave out chunk_size=, allow more max_memory, or use fewer parameters at a time."


@dataclass(eq=False)
class _Stretch:
    """A saved stretch of memory."""

    owner: object  # keeps the memory alive
    start: int
    copy: np.ndarray  # bytes
    is_used: bool = True  # in this run

    @property
    def end(self) -> int:
        return self.start + self.copy.size


class _Python(Protocol):
    """What Python may change, as it was."""

    def as_now(self) -> Any: ...
    def undo(self) -> None: ...


class State:
    """Copies of fields and arrays as they were before they were first written, and ``python``, what Python changes."""

    def __init__(self, python: _Python | None = None) -> None:
        self._python = python
        self._log: dict[Any, tuple[Any, Any]] = {}  # copies of fields, parts of the layout, ti.ndarrays and numbers
        self._fields: dict[int, object] = {}  # fields and ti.ndarrays that are saved, by identity
        self._nodes: set[int] = set()  # of their components
        self._memory: dict[object, list[_Stretch]] = {}  # memory of arrays, by address; no two stretches overlap
        self.has_random = False
        self.reason, self.advice = _SEVERAL_RUNS, _FEWER_RUNS  # why there is another run, and how to avoid it
        self._start = backend.moment()

    def save(self, obj: object, fields: Callable[[], Iterable[backend.Field]] = tuple) -> None:
        """Save a field, array or entry the first time; of the memory of an array, only parts not saved yet.

        An entry of one of ``fields`` is saved with all of that field.
        """
        if id(obj) in self._fields:
            return
        if isinstance(obj, backend.FieldEntry):
            if obj.node in self._nodes or obj.name in self._log:
                return
            obj = next((f for f in fields() if obj.node in backend.nodes_of(f)), obj)
        if isinstance(obj, backend.FieldEntry):
            self._keep(obj.sparse_part() or obj)
        elif backend.is_array(obj) and not isinstance(obj, backend.Ndarray):
            self._save_memory(obj)
        else:
            self._fields[id(obj)] = obj
            for part in backend.leaf_fields(obj):
                for stored in () if _name(part) in self._log else backend.storage_parts(part):
                    self._keep(stored)
                if isinstance(part, backend.Field):
                    self._nodes.update(backend.nodes_of(part))

    def save_fields(self, fields: Sequence[object], nodes: Iterable[backend.SNode] = ()) -> None:
        """Save several fields, and the parts of the layout that contain the nodes."""
        with backend.suspend_following():
            backend.find_memory(f for f in fields if _name(f) not in self._log)
        for field in fields:
            self.save(field)
        for node in nodes:
            self.save_part(node)

    def save_part(self, node: backend.SNode) -> None:
        """Save the part of the layout that contains a node which is not dense."""
        part = backend.sparse_part(node)
        if part is not None:
            self._keep(part)

    def _keep(self, obj: object) -> None:
        """Copy something the first time."""
        name = _name(obj)
        if name not in self._log:
            with backend.suspend_following():
                self._log[name] = obj, backend.copy_of(obj)

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
        """Use a saved stretch again; at first use, the memory must hold the same numbers as in the run before."""
        if stretch.is_used:
            return
        stretch.is_used = True
        memory = backend.memory_of(stretch.owner, stretch.start, stretch.copy.size)
        if memory is None or not np.array_equal(memory, stretch.copy):
            raise InvalidArgumentError(
                f"{self.reason}, but Python code changes an array of shape {tuple(array.shape)} before a kernel gets "
                f"it, and this cannot be undone for another run. Pass the array in args. {self.advice}"
            )

    def restore(self, reason: str = "", advice: str = "") -> None:
        """Put everything back as it was, for another run: why there is one, and how to avoid it."""
        self.reason, self.advice = reason or self.reason, advice or self.advice
        self.check_repetition()
        self.undo()

    def check_repetition(self) -> None:
        """Raise if another run would compute something else."""
        if self.has_random:
            raise InvalidArgumentError(
                f"{self.reason}, and a kernel that draws random numbers cannot draw the same ones again. {self.advice}"
            )
        lost = backend.lost_since(self._start)
        if lost:
            raise InvalidArgumentError(
                f"{self.reason}, but in the run before {lost}, which was there at its start, so that no other run can "
                f"begin like it. Destroy it after the call, or make it in the pipeline. {self.advice}"
            )

    def as_now(self) -> State:
        """A state with the same objects, as they are now."""
        other = State(self._python and self._python.as_now())
        with backend.suspend_following():
            for name, (obj, _) in self._log.items():
                if not backend.ended_problem(obj):
                    other._log[name] = obj, backend.copy_of(obj)
        for space, saved in self._memory.items():
            memories = [(s, backend.memory_of(s.owner, s.start, s.copy.size)) for s in saved]
            other._memory[space] = [
                _Stretch(s.owner, s.start, memory.copy()) for s, memory in memories if memory is not None
            ]
        return other

    def begin_again(self) -> None:
        """Put everything back for a run that may change arrays before kernels get them."""
        self.undo()
        for stretch in (s for saved in self._memory.values() for s in saved):
            stretch.is_used = True

    def undo(self) -> None:
        """Restore the saved objects that still exist; the others were created in the run, and are created again."""
        with backend.suspend_following():
            for obj, copy in reversed(self._log.values()):  # copies may overlap: the one saved first counts
                if not backend.ended_problem(obj):
                    backend.put_back(obj, copy)
        for stretch in (s for saved in self._memory.values() for s in saved):
            backend.set_memory(stretch.owner, stretch.start, stretch.copy)
            stretch.is_used = False
        if self._python is not None:
            self._python.undo()

    @contextlib.contextmanager
    def including(self, python: _Python | None) -> Iterator[None]:
        """Within the context, this is a part of it."""
        before, self._python = self._python, python or self._python
        try:
            yield
        finally:
            self._python = before


def _name(obj: object) -> object:
    """The key of an object that is saved as a whole; a component, and an entry, is a new object at each access."""
    if isinstance(obj, backend.FieldEntry):
        return obj.name
    return backend.field_identity(obj) if isinstance(obj, backend.Field) else id(obj)


def _gaps(saved: list[_Stretch], start: int, end: int) -> Iterator[tuple[int, int]]:
    """The starts and lengths of the gaps between saved stretches."""
    for stretch in saved:
        if start >= end or stretch.start >= end:
            break
        if start < stretch.start:
            yield start, stretch.start - start
        start = max(start, stretch.end)
    if start < end:
        yield start, end - start
