"""Memory shared by arrays: views of memory, and regions made of overlapping views."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np


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


@dataclass(eq=False)
class Region:
    """Memory of overlapping arrays, and the tangents that all of them share.

    The rows of the shadow have the order of ``layout``: that of the only array seen so far, or the order in memory.
    """

    layout: View
    owners: list[tuple[str, object]]  # the arrays that it was made from, by name: they keep the memory alive
    shadow: Any = None
    seeds: dict[View, int] = field(default_factory=dict)  # first columns of arrays whose rows still are their seeds
    copy: Any = None  # a copy of its bytes after the last kernel

    @property
    def name(self) -> str:
        return self.owners[0][0]

    @property
    def is_active(self) -> bool:
        """Whether an entry may carry a tangent."""
        return bool(self.seeds) or (self.shadow is not None and not self.shadow.is_fresh)

    def rows(self, view: View) -> slice | np.ndarray:
        """The rows of the shadow that are the tangents of an array's entries."""
        return slice(0, view.size) if view == self.layout else view.positions(self.layout.start)

    def is_whole(self, view: View) -> bool:
        """Whether the shadow is that of the array, row by row."""
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

    def changed_rows(self, changed: np.ndarray) -> np.ndarray:
        """The rows of the entries that are marked, in the order in memory."""
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
        first = bisect_right(regions, start, key=_end)
        return regions[first : bisect_left(regions, end, key=_start)]

    def include(self, view: View, name: Any, value: object) -> tuple[Region, list[Region]]:
        """The region of an array, and the regions that it replaces, whose tangents have to move to it."""
        known = self._places.get(view)
        if known is not None:
            return known, []
        found = self.overlapping(view)
        if len(found) == 1 and not found[0].layout.is_fortran and found[0].layout.contains(view):
            self._places[view] = found[0]
            return found[0], []
        layout = _union([view, *(region.layout for region in found)]) if found else view
        region = Region(layout, [*(owner for other in found for owner in other.owners), (name, value)])
        regions = self._spaces.setdefault(view.space, [])
        for other in found:
            regions.remove(other)
        insort(regions, region, key=_start)
        if found:
            self._places = {other: region if place in found else place for other, place in self._places.items()}
        self._places[view] = self._places[layout] = region
        return region, found

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


def _end(region: Region) -> int:
    return region.layout.end
