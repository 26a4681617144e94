"""What carries tangents: fields, and memory shared by arrays: views of memory, regions made of overlapping views."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.differentiate.facts.decisions import Role
from taichi_ext.launches import FieldKey


@dataclass(frozen=True)
class View:
    """The memory of one array; equal for arrays that are the same one.

    The numbers are contiguous; the last axis changes fastest, or the first one (``is_fortran``, as in a transposed
    array).
    """

    space: object  # which memory: that of the host, of a device, or an object's own
    start: int  # address of the first byte
    shape: tuple[int, ...]  # shape of the elements included
    dtype: str
    itemsize: int
    is_fortran: bool = False
    size: int = field(init=False, compare=False, repr=False)
    end: int = field(init=False, compare=False, repr=False)  # address after the last byte
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        size = math.prod(self.shape)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "end", self.start + size * self.itemsize)
        object.__setattr__(self, "_hash", hash((self.space, self.start, self.shape)))

    def __hash__(self) -> int:
        return self._hash

    def overlaps(self, other: View) -> bool:
        """Whether a number belongs to both."""
        if self == other:
            return True
        return self.space == other.space and self.start < other.end and other.start < self.end

    def contains(self, other: View) -> bool:
        return self.space == other.space and self.start <= other.start and other.end <= self.end

    def fits(self, other: View) -> bool:
        """Whether both cut their memory into the same numbers."""
        return self.dtype == other.dtype and (self.start - other.start) % self.itemsize == 0

    def positions(self, start: int) -> slice | np.ndarray:
        """The positions of the entries, in the order of their indices, in memory that begins at an address."""
        first = (self.start - start) // self.itemsize
        if not self.is_fortran:
            return slice(first, first + self.size)
        return first + np.arange(self.size).reshape(self.shape[::-1]).T.reshape(-1)

    def entries_in(self, other: View) -> np.ndarray:
        """For each entry whether it belongs to another array of the same memory, too."""
        starts = self.start + self.itemsize * np.arange(self.size)[self.positions(self.start)]
        return (starts < other.end) & (starts + self.itemsize > other.start)


@dataclass(eq=False)
class Carrier:
    """What carries tangents: a field, whose parts are components, or memory, whose parts are arrays."""

    name: Any  # its name in messages
    size: int  # how many numbers it has
    dtype: Any
    width: int = 1  # the number of components
    shadow: Any = None  # the tangents, a row for each number; None where there are none
    seeds: dict[Any, int] = field(default_factory=dict)  # the first columns of parts that still are seeds, by key

    def rows(self, key: Any) -> slice | np.ndarray:
        """The rows of the shadow that are the tangents of a part's entries."""
        return slice(None) if self.is_whole(key) else slice(key.component, None, self.width)

    def is_whole(self, key: Any) -> bool:
        """Whether the shadow is that of the part, row by row."""
        return not isinstance(key, FieldKey) or key.component is None

    def seeded(self, key: Any) -> Role:
        """The role of a part that starts as seeds."""
        parts = ((part.component, column) for part, column in self.seeds.items() if not self.is_whole(part))
        return Role(min(self.seeds.values()), False, tuple(sorted(parts)))

    def column(self, key: Any, row: int) -> int | None:
        """The column that an entry of a part stands for, if it is one of a parameter that nothing was stored to."""
        for part, column in self.seeds.items():
            rows: Any = range(row + 1)[self.rows(part)]  # type: ignore[index]
            if row in rows:
                return column + rows.index(row)
        return None

    @property
    def is_active(self) -> bool:
        """Whether an entry may carry a tangent."""
        return bool(self.seeds) or (self.shadow is not None and not self.shadow.is_fresh)

    def role(self, key: Any) -> Role:
        """The tangents of a part when a kernel starts."""
        if self.seeds:
            return self.seeded(key)
        return Role(is_fresh=self.shadow is None or self.shadow.is_fresh)

    def sown(self, columns: Any) -> Any:
        """The tangents, allocated at first use; those of parameters start as their seeds."""
        if self.shadow is None:
            self.shadow = columns.new_shadow(self.name, self.size, self.dtype)
        for key, column in self.seeds.items():
            columns.seed_rows(self.shadow, column, self.rows(key))
        self.seeds.clear()
        return self.shadow

    def values(self, key: Any) -> np.ndarray:
        """The tangents of a part, a row for each entry."""
        values = self.shadow.to_numpy()
        return values if self.is_whole(key) else np.ascontiguousarray(values[self.rows(key)])


@dataclass(eq=False, kw_only=True)
class Region(Carrier):
    """Memory of overlapping arrays, and the tangents that all of them share.

    The rows of the shadow have the order of ``layout``: that of the only array seen so far, or the order in memory.
    """

    layout: View
    owners: list[tuple[str, object]]  # the arrays that it was made from, by name: they keep the memory alive
    copy: Any = None  # a copy of its bytes after the last kernel

    def rows(self, view: View) -> slice | np.ndarray:
        return slice(0, view.size) if view == self.layout else view.positions(self.layout.start)

    def is_whole(self, view: View) -> bool:
        return view == self.layout or (
            view.size == self.layout.size and not view.is_fortran and not self.layout.is_fortran
        )

    def first_seed(self, view: View) -> int | None:
        """The first column, if an array's entries are consecutive seeds; None otherwise."""
        for seeded, column in self.seeds.items():
            is_same = seeded.start == view.start and seeded.size == view.size
            if seeded == view or (is_same and not seeded.is_fortran and not view.is_fortran):
                return column
        return None

    def seeded(self, view: View) -> Role:
        first = self.first_seed(view)
        return Role(first, is_fresh=first is None)

    def column(self, view: View, row: int) -> int | None:
        column = self.first_seed(view)
        return None if column is None else column + row

    @property
    def memory(self) -> np.ndarray | None:
        """Its bytes; None if Python cannot change them unnoticed."""
        return backend.memory_of(self.owners[-1][1], self.layout.start, self.layout.end - self.layout.start)

    def changed_rows(self) -> np.ndarray:
        """The rows of the entries that have changed since its bytes were copied; a NaN is equal to another one."""
        before, now = self.copy, None if self.copy is None else self.memory
        if before is None or now is None or np.array_equal(now, before):
            return np.zeros(0, np.intp)
        dtype = backend.to_numpy_type(self.dtype)
        numbers, old = now.view(dtype), before.view(dtype)
        changed = (numbers != old) & ~((numbers != numbers) & (old != old))
        return np.flatnonzero(changed[self.layout.positions(self.layout.start)])


class Regions:
    """The regions of the arrays that were seen; no two of them overlap."""

    def __init__(self) -> None:
        self._places: dict[View, Region] = {}
        self._spaces: dict[object, list[Region]] = {}  # by address

    def __iter__(self) -> Iterator[Region]:
        return chain.from_iterable(self._spaces.values())

    def __len__(self) -> int:
        return sum(map(len, self._spaces.values()))

    def remember(self, is_needed: Callable[[Region], bool]) -> None:
        """Copy the bytes of regions that Python can change unnoticed."""
        for region in filter(is_needed, self):
            memory = region.memory
            region.copy = None if memory is None else memory.copy()

    def changes(self) -> list[tuple[Region, np.ndarray]]:
        """The regions that have changed since they were copied, and the rows of the entries."""
        changed = ((region, region.changed_rows()) for region in self)
        return [(region, rows) for region, rows in changed if len(rows)]

    def find(self, view: View) -> Region | None:
        """The region of an array that has been included."""
        return self._places.get(view)

    def overlapping(self, view: View) -> list[Region]:
        """The regions that have memory in common with an array."""
        known = self._places.get(view)
        if known is not None:
            return [known]
        return self.between(view.space, view.start, view.end)

    def between(self, space: object, start: int, end: int) -> list[Region]:
        """The regions that have memory in common with a stretch of it."""
        regions = self._spaces.get(space)
        if not regions:
            return []
        first = bisect_right(regions, start, key=lambda region: region.layout.end)
        return regions[first : bisect_left(regions, end, key=_start)]

    def include(self, view: View, name: Any, value: object) -> tuple[Region, list[Region]]:
        """The region of an array, and the regions that it replaces, whose tangents have to move to it."""
        known = self._places.get(view)
        if known is not None:
            return known, []
        parts = self.overlapping(view)
        if len(parts) == 1 and not parts[0].layout.is_fortran and parts[0].layout.contains(view):
            self._places[view] = parts[0]
            return parts[0], []
        layout = _union([view, *(region.layout for region in parts)]) if parts else view
        owners = [*(owner for other in parts for owner in other.owners), (name, value)]
        dtype = backend.named_type(layout.dtype)
        region = Region(owners[0][0], layout.size, dtype, layout=layout, owners=owners)
        regions = self._spaces.setdefault(view.space, [])
        for other in parts:
            regions.remove(other)
        insort(regions, region, key=_start)
        if parts:
            self._places = {other: region if place in parts else place for other, place in self._places.items()}
        self._places[view] = self._places[layout] = region
        return region, parts

    def forget(self, region: Region) -> None:
        """Leave out a region that has no tangents."""
        self._spaces[region.layout.space].remove(region)
        self._places = {view: place for view, place in self._places.items() if place is not region}


def _union(views: list[View]) -> View:
    """The memory of overlapping arrays as one array."""
    first = views[0]
    start, end = min(v.start for v in views), max(v.end for v in views)
    return View(first.space, start, ((end - start) // first.itemsize,), first.dtype, first.itemsize)


def _start(region: Region) -> int:
    return region.layout.start
