"""The memory that a run in reverse mode uses, and copies of it from before it was overwritten."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.cached import cached_property
from taichi_ext.errors import UnsupportedError
from taichi_ext.runtime.memory.regions import Regions, View
from taichi_ext.runtime.memory.shadows import available_memory, numpy_dtype
from taichi_ext.runtime.memory.state import State

UNIT_SHARE = 4  # of the memory, that the log of one unit of a run takes, and what is recorded
Box = tuple[int, ...]  # the first indices of the entries of a field or array that are meant; () for all


@dataclass(eq=False)
class Cell:
    """A field, an array, or the numbers that one launch takes and returns.

    Attributes:
        key: of the field or array; None for the numbers of a launch.
        obj: the object itself.
        shape: that of elements included.
        dtype: NumPy's.
        is_active: whether an entry may depend on the parameters.
        related: other arrays that share memory with it.
        wanted: the parts whose present numbers are needed on the way back.
        found: where its numbers lie, and the version of the layout for which that holds.
        dots: the tangents of all cells, for second derivatives; None if there are none.
    """

    key: Hashable
    obj: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    is_active: bool = False
    related: list[Cell] = field(default_factory=list)
    wanted: set[Box] = field(default_factory=set)
    found: tuple[int, np.ndarray | None] = (-1, None)
    dots: Any = None

    @property
    def memory(self) -> np.ndarray | None:
        """Its numbers where they lie, shaped like it; None where they have to be copied by kernels."""
        if not isinstance(self.obj, backend.Field):
            return backend.host_values(self.obj)
        version = backend.layout_version()
        if self.found[0] != version:
            self.found = version, backend.memory_of_field(self.obj)
        return self.found[1]

    def numbers(self) -> np.ndarray:
        """Its numbers, where they lie or copied."""
        memory = self.memory
        with backend.suspend_following():
            return backend.as_numpy(self.obj) if memory is None else memory

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def all(self) -> Iterator[Cell]:
        """It, and those that share memory with it."""
        yield self
        yield from self.related

    def carries(self) -> bool:
        """Whether an entry may depend on the parameters, perhaps by another array in the same memory."""
        return any(cell.is_active for cell in self.all)


def meet(a: Box, b: Box) -> bool:
    """Whether two parts of one cell have an entry in common."""
    return all(i == j for i, j in zip(a, b, strict=False))


class Copy:
    """The numbers of a part of a cell, and their tangents, as they are when it is made, in so many bytes."""

    __slots__ = "_dots", "_parts", "box", "cell", "nbytes"

    def __init__(self, cell: Cell, box: Box) -> None:
        self.cell, self.box = cell, box
        memory, self._dots = cell.memory, None
        if memory is not None:
            part = memory[box].copy()
            self._parts: list[Any] = [part]
            self.nbytes = int(part.nbytes)
        else:
            self.box = ()
            with backend.suspend_following():
                self._parts = [backend.copy_of(part) for part in _parts(cell.obj)]
            self.nbytes = sum(map(_size, self._parts))
        if cell.dots is not None and cell.dots.has(cell):
            self._dots = cell.dots.of(cell)[self._rows()].copy()
            self.nbytes += self._dots.nbytes

    def _rows(self) -> Any:
        return np.arange(self.cell.size).reshape(self.cell.shape)[self.box].reshape(-1) if self.box else slice(None)

    def put_back(self) -> None:
        """Store the numbers again."""
        if self.cell.dots is not None and self.cell.dots.has(self.cell):
            self.cell.dots.store(self.cell, self._rows(), 0 if self._dots is None else self._dots)
        memory = self.cell.memory
        if memory is not None:
            if memory.flags.writeable:  # others are only read
                memory[self.box] = self._parts[0]
            return
        with backend.suspend_following():
            for obj, copy in zip(_parts(self.cell.obj), self._parts, strict=True):
                backend.put_back(obj, copy)


def _parts(obj: object) -> list[object]:
    return backend.storage_parts(obj) if isinstance(obj, backend.Field) else [obj]


def _size(part: Any) -> int:
    if hasattr(part, "nbytes"):
        return int(part.nbytes)
    arrays = [*part[0], *(array for held in part[1] for array in held)]  # of a part that is not dense
    return sum(int(array.nbytes) for array in arrays)


class Cells:
    """The fields and arrays of one run, by key.

    Args:
        table: the fields that kernels use.

    Attributes:
        version: changes where a cell becomes active, or a new one shares memory with it.
        dots: their tangents, for second derivatives; None if there are none.
    """

    def __init__(self, table: Any) -> None:
        self.table = table
        self.version = 0
        self.dots: Any = None
        self._known: dict[Hashable, Cell] = {}
        self._nodes: dict[int, tuple[Cell, Box, Box]] = {}  # of a component: its field, the offset, and its own index
        self._parts: dict[object, list[Cell]] = {}  # the fields in each part of the layout that is not dense
        self.regions = Regions()  # of the memory of arrays, for adjoints

    def __iter__(self) -> Iterator[Cell]:
        return iter(list(self._known.values()))

    def activate(self, cell: Cell) -> None:
        """An entry may depend on the parameters from now on."""
        self.version += not cell.is_active and cell.key is not None
        cell.is_active = True

    def of_field(self, obj: Any) -> Cell:
        """The cell of a scalar or matrix field, or of the field that a component belongs to."""
        info = self.table.field(obj)
        whole = backend.whole_field(obj) if info is None else info.obj
        key = ("integers", backend.field_identity(whole)) if info is None else info.key
        known = self._known.get(key)
        if known is None:
            shape, dtype = backend.full_field_shape(whole), backend.numpy_dtype_of(whole)
            known = Cell(key, whole, shape, dtype, dots=self.dots)
            offset = tuple(backend.field_offset(whole) or (0,) * len(whole.shape))
            within = np.ndindex(shape[len(offset) :])
            for component, index in zip(backend.field_components(whole), within, strict=True):
                self._nodes[backend.node_of(component)] = known, offset, index
            for part in backend.storage_parts(whole):  # fields in one part of the layout share what is active
                if isinstance(part, backend.SparsePart):
                    known.related += self._parts.setdefault(part, [])
                    for other in self._parts[part]:
                        other.related.append(known)
                    self._parts[part].append(known)
            self._known[key] = known
            self.version += 1
        return known

    def of_entry(self, entry: backend.FieldEntry) -> tuple[Cell, tuple[int, ...], int] | None:
        """The field that a number belongs to, its index, and its row; None for a field that nothing has used."""
        if entry.node not in self._nodes and (info := self.table.by_entry(entry)) is not None:
            self.of_field(info[0].obj)
        found = self._nodes.get(entry.node)
        if found is None:
            return None
        cell, offset, component = found
        index = (*map(operator.sub, entry.index, offset), *component)
        return cell, index, backend.row_at(index, cell.shape)

    def of_array(self, view: View, name: object, obj: Any) -> Cell:
        known = self._known.get(view)
        if known is None:
            dtype = numpy_dtype(backend.named_type(view.dtype))
            known = self._known[view] = Cell(view, obj, view.shape, dtype, dots=self.dots)
            for other in self.sharing(view):
                if not view.fits(other.key):  # type: ignore[arg-type]
                    raise UnsupportedError(f"{name} and another array share memory as numbers of different types.")
                if other is not known:
                    known.related.append(other)
                    other.related.append(known)
            replaced = self.regions.include(view, name, obj)[1]
            if self.dots is not None:
                self.dots.move(replaced, known)
            self.version += 1
        return known

    def remember(self, written: Iterable[Cell] | None = None) -> None:
        """Copy the bytes of arrays that may have changed since the last copy: those written, or all."""
        changed = None if written is None else {self.regions.find(c.key) for c in written if c.key is not None}  # type: ignore[arg-type]
        self.regions.remember(lambda region: region.copy is None or changed is None or region in changed)

    def changes(self) -> Iterator[tuple[Cell, Any, np.ndarray, Callable[[], None]]]:
        """Arrays that Python has changed since then: the name, the entries, and what changes them again.

        Memory is as it was before.
        """
        for region, rows in self.regions.changes():
            if backend.host_values(region.owners[-1][1]) is None:
                raise UnsupportedError("Python changes an array on a device between kernels.")
            memory = region.memory
            assert memory is not None
            cell = self.of_array(region.layout, region.name, memory.view(backend.to_numpy_type(region.dtype)))
            now = memory.copy()
            memory[...] = region.copy
            region.copy = now
            yield cell, region.name, rows, partial(np.copyto, memory, now)

    def sharing(self, view: View) -> list[Cell]:
        """The arrays that have memory in common with one."""
        return [c for key, c in self._known.items() if isinstance(key, View) and key.overlaps(view)]

    def find(self, key: Hashable) -> Cell | None:
        return self._known.get(key)


class Log:
    """Copies of what is overwritten, for the way back.

    Attributes:
        nbytes: their memory.
        is_keeping: whether copies are made.
        first: a copy of each cell from before it was first written in the run, in that order.
        first_nbytes: the memory of these.
        others: arrays, and entries and parts of the layout of fields, that no kernel had used when Python changed them.
        keeps_first: whether the run can be undone.
        whole: takes a copy of each cell before it is written next; None for none.
        is_recording: whether values of stages are recorded.
        recorded: the memory that they take.
        max_memory: bytes that may be kept; half of the free memory if None.
    """

    def __init__(self, *, keeps_first: bool, max_memory: float | None = None) -> None:
        self.nbytes, self.max_memory = 0, max_memory
        self.keeps_first = keeps_first
        self.others = State()
        self.is_keeping = True
        self.whole: dict[Cell, Copy] | None = None
        self.first: dict[Cell, Copy] = {}
        self.first_nbytes = 0
        self.is_recording, self.recorded = True, 0

    @cached_property
    def limit(self) -> float:
        """The most bytes that are kept."""
        return available_memory() / 2 if self.max_memory is None else self.max_memory

    def want(self, cell: Cell, boxes: Iterable[Box]) -> None:
        """The way back will read these parts as they are now."""
        if self.is_keeping:
            cell.wanted.update(boxes)

    def records(self, nbytes: int) -> bool:
        """Whether a stage may record values that take so much memory; they count then."""
        is_one = self.is_keeping and self.is_recording and self.recorded + nbytes <= self.limit / UNIT_SHARE
        self.recorded += nbytes * is_one
        return is_one

    def before_write(self, cell: Cell, boxes: Sequence[Box]) -> list[Copy]:
        """Parts are about to be overwritten; returns the copies that the way back needs."""
        if self.keeps_first and cell not in self.first and cell.key is not None:
            self.first[cell] = Copy(cell, ())
            self.first_nbytes += self.first[cell].nbytes
        if self.whole is not None and cell not in self.whole and cell.key is not None:
            self.whole[cell] = Copy(cell, ())
        is_shared = any(other.wanted for other in cell.related) if cell.related else False
        if not self.is_keeping or not (cell.wanted or is_shared):
            return []
        met = [box for box in boxes if is_shared or any(meet(box, wanted) for wanted in cell.wanted)]
        if not met:
            return []
        copies = [Copy(cell, box) for box in met]
        for box in met:
            cell.wanted = {wanted for wanted in cell.wanted if wanted[: len(box)] != box}
        self.nbytes += sum(copy.nbytes for copy in copies)
        return copies

    def save_unknown(self, obj: Any, fields: Callable[[], Iterable[Any]] = tuple) -> None:
        """Python stores to a field that no kernel has used yet."""
        if isinstance(obj, backend.FieldEntry):
            self.others.save(obj, fields)

    def undo(self) -> None:
        """Put everything back as it was before the run."""
        for copy in reversed(self.first.values()):
            if not backend.ended_problem(copy.cell.obj):
                copy.put_back()
        self.others.undo()
