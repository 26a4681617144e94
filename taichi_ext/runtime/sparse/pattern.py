"""The pattern of a sparse Jacobian: CSR arrays from the integers that a kernel has kept, computed once."""

# The annotations of a kernel are values that Taichi reads, such as ti.template().
# pyright: reportInvalidTypeForm=false

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.analysis.affine import Affine
from taichi_ext.cached import cached_property
from taichi_ext.differentiate.forms.entry_sites import Group, Site
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.runtime.memory.shadows import array_of, to_numpy
from taichi_ext.runtime.sparse.matrices import Pattern

# Numbers are reordered and summed in parallel.


@functools.cache
def _kernels(ti: ModuleType) -> tuple[Callable[..., None], ...]:
    """Kernels that gather numbers, and add up stretches of vectors of them."""
    array: Any = ti.types.ndarray(ndim=1)

    @ti.kernel
    def gather(numbers: array, order: array, result: array):
        for k in order:
            result[k] = numbers[order[k]]

    @ti.kernel
    def add_up(numbers: array, order: array, starts: array, result: array, length: ti.template()):
        for k in range(starts.shape[0] - 1):
            first = order[starts[k]]
            totals = ti.Vector([numbers[first + c] for c in ti.static(range(length))])
            for n in range(starts[k] + 1, starts[k + 1]):
                for c in ti.static(range(length)):
                    totals[c] += numbers[order[n] + c]
            for c in ti.static(range(length)):
                result[length * k + c] = totals[c]

    return gather, add_up


def merged(numbers: np.ndarray, order: np.ndarray, starts: Any, length: int) -> np.ndarray:
    """The numbers in an order; with ``starts`` (one per entry, and the end), the sum of each stretch of them.

    If ``length`` is more than 1, each place in the order stands for ``length`` contiguous numbers.
    """
    gather, add_up = _kernels(backend.RUNTIME.module)
    with backend.suspend_following():
        if starts is None:
            result = np.empty(len(order), numbers.dtype)
            gather(numbers, order, result)
        else:
            result = np.empty(length * (len(starts) - 1), numbers.dtype)
            add_up(numbers, order, starts, result, length)
    return result


class SiteSlots:
    """The slots of a site in one launch: whether they are filled, and their rows and columns."""

    def __init__(self, site: Site, integers: np.ndarray | None, counts: "SlotCounts") -> None:
        self.site = site
        numbers, self.is_filled = counts.numbers(site)
        self.count = len(numbers)
        size = (self.count, site.integers)  # an array has one entry more if that is none
        self.integers = None if integers is None else integers[: size[0] * size[1]].reshape(size)
        self.values: dict[Any, np.ndarray] = {}
        stride = site.slots
        for axis in site.around.axes:
            stride //= max(1, axis.length)
            self.values[axis.variable] = numbers // max(1, stride) % max(1, axis.length) + axis.first
        for n, atom in enumerate(site.atoms):
            assert self.integers is not None
            self.values[atom] = self.integers[:, n].astype(np.int64)
        if site.is_conditional and self.integers is not None:
            self.is_filled = self.is_filled & (self.integers[:, -1] == 1)

    def of(self, affine: Affine) -> np.ndarray:
        """The value of an index in each slot."""
        total = np.full(self.count, affine.constant, np.int64)
        for atom, factor in affine.terms:
            total += self.values[atom] * factor
        return total

    def has_repeats(self) -> bool:
        """Whether two parts of a slot have the same row."""
        rows = np.stack([self.of(row)[self.is_filled] for row in self.site.rows], axis=1)
        rows.sort(axis=1)
        return bool((rows[:, 1:] == rows[:, :-1]).any())

    def rows(self, group: Group, dtype: Any) -> np.ndarray:
        numbers = np.empty((self.count, len(group.entries)), dtype)
        parts = [self.of(row) for row in self.site.rows]
        for n, entry in enumerate(group.entries):
            numbers[:, n] = parts[entry.part]
        return numbers.reshape(-1)

    def columns(self, group: Group) -> np.ndarray:
        """The column of each entry, among all columns; negative if it has none."""
        numbers = np.empty((self.count, len(group.entries)), np.int32)  # columns end before 2**31
        for n, entry in enumerate(group.entries):
            numbers[:, n] = self.of(entry.column)
        return numbers.reshape(-1)


LONG = 1 << 15  # count of numbers from which threads share the work
LENGTHS = (12, 6, 4, 3, 2)  # of vectors in which entries may be contiguous


@dataclass
class PatternBlock:
    """The CSR arrays of one container's entries in the columns of another one, and the sources of their numbers."""

    indptr: np.ndarray  # of the CSR arrays
    indices: np.ndarray  # likewise
    order: np.ndarray | None  # for each entry the numbers that are added up; None: the written memory is the data
    starts: np.ndarray | None  # the start of each entry in ``order``, and the end; None if each entry is one number
    shape: tuple[int, int]
    has_rows: bool  # whether numbers come from rows of tangents, whose zeros are not entries
    length: int = 1  # the count of contiguous entries for each place in ``order``, which has the first of them

    @property
    def is_in_place(self) -> bool:
        return self.order is None

    @cached_property
    def pattern(self) -> Pattern:
        return Pattern(self.indptr, self.indices, self.shape)

    def data(self, numbers: np.ndarray) -> np.ndarray:
        """The numbers of the CSR arrays."""
        numbers = numbers.astype(sparse_dtype(numbers.dtype), copy=False)
        if self.order is None:
            return numbers
        if not len(self.order):
            return np.zeros(0, numbers.dtype)
        if self.length > 1 or len(self.order) >= LONG:
            return merged(numbers, self.order, self.starts, self.length)
        taken = numbers.take(self.order)
        return taken if self.starts is None else np.add.reduceat(taken, self.starts[:-1])


def sparse_dtype(dtype: Any) -> np.dtype:
    """The type of the numbers of a sparse array: SciPy has none of float16."""
    return np.promote_types(dtype, np.float32)


def block_of(
    key: np.ndarray,
    kept: np.ndarray,
    shape: tuple[int, int],
    has_rows: bool,
    *,
    may_be_in_place: bool,
) -> PatternBlock:
    """The CSR arrays for numbers at the places ``row * columns + column``, of which some are kept."""
    width, dtype = max(1, shape[1]), np.int32 if max(*shape, len(key)) < 2**31 else np.int64
    if may_be_in_place and kept.all() and (len(key) < 2 or (key[1:] > key[:-1]).all()):
        return PatternBlock(_row_starts(key, shape, dtype), (key % width).astype(dtype), None, None, shape, has_rows)
    numbers = None if kept.all() else np.flatnonzero(kept)
    key = key if numbers is None else key[numbers]
    order = np.argsort(key, kind="stable")
    key = key[order]
    is_first = np.ones(len(key), bool)
    is_first[1:] = key[1:] != key[:-1]
    starts = np.flatnonzero(is_first).astype(dtype)
    key = key[starts]
    indptr = _row_starts(key, shape, dtype)
    indices = (key % width).astype(dtype)
    del key
    order = (order if numbers is None else numbers[order]).astype(dtype, copy=False)
    ends = np.append(starts, dtype(len(order)))
    del starts
    for length in LENGTHS if len(order) >= LONG else ():
        if _comes_together(order, ends, length):
            counts = np.diff(ends)[::length]
            first = np.repeat(ends[:-1:length] - np.append(0, np.cumsum(counts)[:-1]), counts) + np.arange(counts.sum())
            ends = np.append(0, np.cumsum(counts)).astype(dtype)
            return PatternBlock(indptr, indices, order[first], ends, shape, has_rows, length)
    return PatternBlock(indptr, indices, order, None if is_first.all() else ends, shape, has_rows)


def _row_starts(key: np.ndarray, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """The start of each row among ascending places, and the end."""
    indptr = np.zeros(shape[0] + 1, dtype)
    np.cumsum(np.bincount(key // max(1, shape[1]), minlength=shape[0]), out=indptr[1:])
    return indptr


def _comes_together(order: np.ndarray, ends: np.ndarray, length: int) -> bool:
    """Whether groups of ``length`` entries come from contiguous numbers."""
    counts = np.diff(ends)
    if len(counts) % length or (counts.reshape(-1, length) != counts[::length, None]).any():
        return False
    back = np.arange(len(counts), dtype=ends.dtype) % length  # from each entry to the first one of its group
    before = np.arange(len(order)) - np.repeat(back * counts, counts)
    return bool((order == order[before] + np.repeat(back, counts)).all())


def kept_slots(sites: list[SiteSlots]) -> list[np.ndarray]:
    """For each site, a mask of its rows, by slot and part: rows that are overwritten later do not count."""
    kept = [np.repeat(s.is_filled[:, None], len(s.site.rows), axis=1) for s in sites]
    stores = [n for n, s in enumerate(sites) if not s.site.is_sum]
    for n, slots in enumerate(sites):
        site = slots.site
        if not site.is_sum and not site.is_injective:
            _keep_last(sites[n], kept[n])
        for later in stores:
            other = sites[later].site
            if later <= n or other.around.loops != site.around.loops or other.around.counter != site.around.counter:
                continue
            for part, row in enumerate(site.rows):
                if row in other.rows:
                    kept[n][:, part] &= ~sites[later].is_filled
    return kept


def _keep_last(slots: SiteSlots, kept: np.ndarray) -> None:
    """Among several stores to one row in a loop, keep the last one."""
    rows = np.stack([slots.of(row) for row in slots.site.rows], axis=1).reshape(-1)
    flat = kept.reshape(-1)
    numbers = np.flatnonzero(flat)[::-1]
    _, last = np.unique(rows[numbers], return_index=True)
    flat[:] = False
    flat[numbers[last]] = True


def stored_rows(sites: list[SiteSlots]) -> np.ndarray:
    """The rows that are overwritten, rather than added to."""
    parts: list[Any] = [np.zeros(0, np.int64)]
    for s in sites:
        if not s.site.is_sum:
            parts += [s.of(row)[s.is_filled] for row in s.site.rows]
    return np.concatenate(parts)


# Numbers of slots of the sites of a sparse Jacobian that are only known at run time, launch by launch.

MOST_SLOTS = 2**31 - 2


class SlotCounts:
    """The room for entries, and the part filled by the last launch.

    Attributes:
        rooms: by open loop, the number of iterations that fit.
        lengths: by open loop, the number of iterations in the last launch.
        offsets: by counter, the starts of the slots of each iteration, and the end of the last one twice. The slot
            after that is unused.
        counts: by counter, the number of slots that each iteration has filled.
    """

    def __init__(self, sites: Iterable[Site]) -> None:
        self._sites = [s for s in sites if s.around.opened is not None or s.around.counter is not None]
        self.rooms = {s.around.opened: 0 for s in self._sites if s.around.opened is not None}
        self.lengths = dict(self.rooms)
        self.offsets: dict[int, np.ndarray] = {}
        self.counts: dict[int, np.ndarray] = {}
        self._memory: dict[object, object] = {}
        for site in self._sites:
            if site.around.counter is not None:
                self._set_counts(site, np.zeros(self._iterations(site), np.int64))

    def __bool__(self) -> bool:
        return bool(self._sites)

    def _iterations(self, site: Site) -> int:
        """The number of iterations of the loops around a site, known ones and those that there is room for."""
        return site.slots * (1 if site.around.opened is None else self.rooms[site.around.opened])

    def _set_counts(self, site: Site, counts: np.ndarray) -> None:
        assert site.around.counter is not None
        ends = np.cumsum(counts)
        self.offsets[site.around.counter] = np.concatenate([[0], ends, ends[-1:] if len(ends) else [0]])
        self.counts[site.around.counter] = counts

    # --- slots

    def slots(self, site: Site) -> int:
        """The number of slots of a site; if only known at run time, the last one is unused."""
        if site.around.counter is not None:
            return int(self.offsets[site.around.counter][-1]) + 1
        return self._iterations(site) + (site.around.opened is not None)

    def numbers(self, site: Site) -> tuple[np.ndarray, np.ndarray]:
        """For each slot, the number of its iteration, and whether it is filled."""
        if site.around.counter is None:
            numbers = np.arange(self.slots(site), dtype=np.int64)
            if site.around.opened is None:
                return numbers, np.ones(len(numbers), bool)
            return numbers, numbers < site.slots * self.lengths[site.around.opened]
        offsets, counts = self.offsets[site.around.counter], self.counts[site.around.counter]
        rooms = np.diff(offsets)[:-1]
        numbers = np.repeat(np.arange(len(rooms)), rooms)
        is_filled = np.arange(len(numbers)) - offsets[numbers] < counts[numbers]
        return np.append(numbers, 0), np.append(is_filled, False)

    # --- launches

    def begin(self) -> None:
        """Allocate the arrays that hold the room of a kernel."""
        self._memory = {}
        for number, room in self.rooms.items():
            self._memory[number, "lengths"] = self._filled(np.array([room, 0]))
        for number, offsets in self.offsets.items():
            self._memory[number, "offsets"] = self._filled(offsets)
            self._memory[number, "counts"] = self._filled(offsets[:-1])

    def _filled(self, values: np.ndarray) -> object:
        if values.max(initial=0) > MOST_SLOTS:
            raise InvalidArgumentError(
                f"A sparse Jacobian of {values.max()} entries in one loop is more than Taichi can index. "
                "Compute it for fewer outputs at a time."
            )
        return array_of(values.astype(np.int32))

    def array(self, number: int, what: str) -> Any:
        return self._memory[number, what]

    def end(self) -> bool:
        """Read the counts of the launch; False if there was too little room, which is then made."""
        arrays = {name: to_numpy(array).astype(np.int64) for name, array in self._memory.items()}
        self.lengths = {number: int(arrays[number, "lengths"][1]) for number in self.rooms}
        if any(self.lengths[number] > room for number, room in self.rooms.items()):
            self.rooms = {number: max(room, self.lengths[number]) for number, room in self.rooms.items()}
            for site in self._sites:
                if site.around.counter is not None and site.around.opened is not None:
                    self._set_counts(site, np.zeros(self._iterations(site), np.int64))
            return False
        is_enough = True
        for site in {s.around.counter: s for s in self._sites if s.around.counter is not None}.values():
            counter: int = site.around.counter  # type: ignore[assignment]
            offsets = self.offsets[counter]
            counts = arrays[counter, "counts"][: len(offsets) - 2] - offsets[:-2]
            if site.around.opened is not None:
                counts[site.slots * self.lengths[site.around.opened] :] = 0
            if (counts > np.diff(offsets)[:-1]).any():
                self._set_counts(site, counts)
                is_enough = False
            self.counts[counter] = counts
        return is_enough
