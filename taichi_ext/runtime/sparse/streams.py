"""The memory that a kernel writes the entries of a sparse Jacobian to, and its blocks after a launch.

Those of an energy's elements may be made positive semidefinite there.
"""

# The annotations of a kernel are values that Taichi reads, such as ti.template().
# pyright: reportInvalidTypeForm=false

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np

from taichi_ext import backend
from taichi_ext.differentiate.forms.entry_sites import OPEN_ENTRIES, Group, Site
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.launches import JacobianKernel
from taichi_ext.program.keys import Key, SiteArray, SumKey, Version
from taichi_ext.runtime.memory.shadows import array_of, check_fits, new_array, numpy_dtype, to_numpy
from taichi_ext.runtime.sparse.pattern import PatternBlock, SiteSlots, SlotCounts, block_of, kept_slots, stored_rows

ORDERING = 32  # bytes per entry to put entries in order: row, column, key, order

Stage = tuple[int, int]  # of a site
Saved = tuple[list[np.ndarray], dict[int, Any]]  # numbers of bundles, and the integers of sites


@dataclass(frozen=True)
class StageBlocks:
    """The entries that one stage writes to one container, by the container that owns their columns.

    Attributes:
        key: the container.
        size: its number of entries.
        stored: its entries that are overwritten, rather than added to.
        blocks: CSR arrays, including data, by the owner of the columns. Data in place that have rows are valid until
            the next launch.
    """

    key: Key
    size: int
    stored: np.ndarray
    blocks: dict[Key, tuple[PatternBlock, np.ndarray]]


@dataclass
class _Bundle:
    """Groups that share a stretch of memory: those with the same rows and columns."""

    sources: list[tuple[Site, Group]]
    owners: tuple[object, ...]
    starts: list[int]  # of the numbers of each source, and the end
    memory: Any = None  # an array until it belongs to a result; on a GPU, whose arrays have no slices, one by source
    copy: np.ndarray | None = None  # on a GPU: the numbers of the last launch, on the host

    @property
    def numbers(self) -> int:
        return self.starts[-1]

    def allocate(self, dtype: Any, *, is_host: bool) -> None:
        """Make room for the numbers of one launch."""
        self.copy = None
        if self.memory is not None:
            return
        if is_host:
            self.memory = np.empty(max(1, self.numbers), numpy_dtype(dtype))
        else:
            self.memory = [new_array(end - start, dtype) for start, end in itertools.pairwise(self.starts)]

    def array(self, source: int) -> Any:
        """The container that a source writes to."""
        if isinstance(self.memory, list):
            return self.memory[source]
        start, end = self.starts[source : source + 2]
        return self.memory[start : max(end, start + 1)]

    def written(self) -> np.ndarray:
        """The numbers of all sources, which may be changed."""
        if not isinstance(self.memory, list):
            return self.memory[: self.numbers]
        if self.copy is None:
            pairs = zip(self.memory, itertools.pairwise(self.starts), strict=True)
            self.copy = _joined([to_numpy(array)[: end - start] for array, (start, end) in pairs])
        return self.copy

    def give_away(self) -> None:
        """Leave the numbers to a result: the next launch gets other memory."""
        self.copy = None
        if not isinstance(self.memory, list):
            self.memory = None

    def put_back(self, numbers: np.ndarray) -> None:
        """Take these as the numbers of all sources."""
        if isinstance(self.memory, list):
            self.copy = numbers
        else:
            self.memory = numbers


class Streams:
    """The arrays of one fused kernel; kept on it from launch to launch."""

    @staticmethod
    def of(fused: JacobianKernel) -> "Streams":
        if fused.memory.streams is None:
            fused.memory.streams = Streams(fused)
        return fused.memory.streams

    def __init__(self, fused: JacobianKernel) -> None:
        assert fused.entries is not None
        self._program = fused.entries
        self.counts = SlotCounts(self.sites)
        self._is_host = backend.is_host_arch()
        self._known: dict[Any, np.ndarray] = {}  # integers that the blocks belong to
        self._blocks: dict[tuple[Stage, Key], dict[Key, tuple[PatternBlock, _Bundle]]] = {}
        self._stored: dict[tuple[Stage, Key], np.ndarray] = {}
        self.is_symmetric = False  # to the last bit, as the matrix of a Hessian
        self.make_room()

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites at which the kernel writes entries."""
        return self._program.sites

    def make_room(self) -> None:
        """Allocate memory for the number of slots known so far."""
        for key, container in self._program.containers.items():
            if container.opened is not None and isinstance(key, SumKey) and self._size(key) > OPEN_ENTRIES:
                raise InvalidArgumentError(
                    f"The local {key.name} has {self._size(key)} entries in all iterations of its loop. A sparse "
                    f"Jacobian can have {OPEN_ENTRIES} of them where the number of iterations is only known at run "
                    "time: make it a constant of the kernel, or leave format= out."
                )
        self._bundles: dict[Any, _Bundle] = {}
        self._places: dict[SiteArray, tuple[_Bundle, int]] = {}
        self._integers: dict[int, Any] = {}
        self._blocks.clear()
        self._make_bundles()

    def _make_bundles(self) -> None:
        mixed = {(s.stage, s.key) for s in self.sites for g in s.groups if g.owner is None}
        every = tuple(key for _, _, key in self._program.columns.ranges())
        for site in self.sites:
            for group in site.groups:
                is_mixed = (site.stage, site.key) in mixed
                name = (site.stage, site.key, None if is_mixed else group.owner)
                bundle = self._bundles.setdefault(name, _Bundle([], every if is_mixed else (group.owner,), [0]))
                length = self.counts.slots(site) * len(group.entries)
                self._places[site.entries(group.owner)] = (bundle, len(bundle.sources))
                bundle.sources.append((site, group))
                bundle.starts.append(bundle.numbers + length)
        sizes = ((b.numbers, numpy_dtype(self._dtype(name[1])).itemsize) for name, b in self._bundles.items())
        _check_number(list(sizes))

    # --- a launch

    def begin(self) -> None:
        """Allocate memory for the numbers of one launch."""
        self.counts.begin()
        for (_, key, _), bundle in self._bundles.items():
            bundle.allocate(self._dtype(key), is_host=self._is_host)
        for site in self.sites:
            if site.integers:
                if site.number not in self._integers:
                    self._integers[site.number] = new_array(self.counts.slots(site) * site.integers, backend.i32)
                if site.is_conditional:
                    with backend.suspend_following():
                        self._integers[site.number].fill(0)

    def array(self, name: SiteArray) -> Any:
        match name.what:
            case "integers":
                return self._integers[name.number]
            case "entries":
                bundle, source = self._places[name]
                return bundle.array(source)
            case _:
                return self.counts.array(name.number, name.what)

    def has_room(self) -> bool:
        """After a launch, whether there was room for all entries; otherwise ``make_room`` allocates more."""
        return not self.counts or self.counts.end()

    def end(self) -> Iterator[list[StageBlocks]]:
        """The entries after the launch, stage by stage.

        The pattern is found again if the integers that it depends on have changed.
        """
        integers: dict[Any, Any] = {n: to_numpy(array) for n, array in self._integers.items()}
        integers |= {("lengths", n): np.array(length) for n, length in self.counts.lengths.items()}
        integers |= {("counts", n): counts for n, counts in self.counts.counts.items()}
        is_same = self._blocks and all(np.array_equal(a, self._known[n]) for n, a in integers.items())
        if not is_same:
            self._known = {n: a.copy() for n, a in integers.items()}
            self._find_blocks()
        return (list(self._stage_blocks(stage)) for stage in sorted({site.stage for site in self.sites}))

    def _find_blocks(self) -> None:
        slots = {site.number: SiteSlots(site, self._known.get(site.number), self.counts) for site in self.sites}
        self._blocks, self._stored = {}, {}
        self.is_symmetric = all(s.site.is_symmetric and not s.has_repeats() for s in slots.values())
        for stage, key in dict.fromkeys((s.stage, s.key) for s in self.sites):
            here = [slots[s.number] for s in self.sites if (s.stage, s.key) == (stage, key)]
            kept = dict(zip((s.site.number for s in here), kept_slots(here), strict=True))
            self._stored[stage, key] = stored_rows(here)
            blocks = self._blocks[stage, key] = {}
            for (at, to, _), bundle in self._bundles.items():
                if (at, to) == (stage, key):
                    parts = self._bundle_blocks(bundle, key, slots, kept)
                    blocks.update((owner, (block, bundle)) for owner, block in parts.items())

    def _size(self, key: Key) -> int:
        """The number of entries of a container, or of a local that has separate columns in this launch."""
        container = self._program.containers[key]
        return container.size * (1 if container.opened is None else self.counts.rooms[container.opened])

    def _dtype(self, key: Key) -> object:
        return backend.named_type(self._program.containers[key].dtype.name)

    def _bundle_blocks(
        self, bundle: _Bundle, key: Key, slots: dict[int, SiteSlots], kept: dict[int, np.ndarray]
    ) -> dict[Key, PatternBlock]:
        size = self._size(key)
        row_type = np.int32 if size < 2**31 else np.int64
        places = [_joined([slots[s.number].rows(g, row_type) for s, g in bundle.sources])]
        places.append(_joined([slots[s.number].columns(g) for s, g in bundle.sources]))
        is_kept = _joined([kept[s.number][:, [e.part for e in g.entries]].reshape(-1) for s, g in bundle.sources])
        is_kept &= (places[0] >= 0) & (places[0] < size)  # rows of a Hessian are params' entries, that may not exist
        has_rows = any(s.has_rows for s, _ in bundle.sources)
        is_whole = len(bundle.owners) == 1
        blocks, containers = {}, self._program.containers
        for first, end, owner in self._program.columns.ranges():
            if owner in bundle.owners:
                here = is_kept & (places[1] >= first) & (places[1] < end)
                if here.any():
                    columns = end - first
                    if (
                        isinstance(owner, Version)
                        and owner.of in containers
                        and containers[owner.of].opened is not None
                    ):
                        columns = self._size(owner.of)
                    shape = (size, columns)
                    width = max(1, columns)  # no reference to the keys is kept, so that they can be freed
                    is_row = has_rows and owner in self._program.columns.in_rows
                    blocks[owner] = block_of(
                        _keys(places, first, width, is_last=is_whole),
                        here,
                        shape,
                        is_row,
                        may_be_in_place=is_whole,
                    )
        return blocks

    # --- entries after a launch

    def entries_of(self, site: Site, group: Group) -> np.ndarray:
        """The numbers of a site's group after a launch, which may be changed."""
        bundle, source = self._places[site.entries(group.owner)]
        return bundle.written()[bundle.starts[source] : bundle.starts[source + 1]]

    def slots(self, site: Site) -> SiteSlots:
        """The slots of a site after a launch."""
        integers = self._integers.get(site.number)
        return SiteSlots(site, None if integers is None else to_numpy(integers), self.counts)

    def saved(self) -> Saved:
        """Copies of all numbers that the kernel has written."""
        integers = {number: array_of(to_numpy(array).copy()) for number, array in self._integers.items()}
        return [bundle.written().copy() for bundle in self._bundles.values()], integers

    def put_back(self, saved: Saved) -> None:
        """Restore saved numbers in memory."""
        numbers, self._integers = saved
        for bundle, values in zip(self._bundles.values(), numbers, strict=True):
            bundle.put_back(values)

    def _stage_blocks(self, stage: Stage) -> Iterator[StageBlocks]:
        for (at, key), blocks in self._blocks.items():
            if at == stage:
                full = {}
                for owner, (block, bundle) in blocks.items():
                    full[owner] = (block, block.data(bundle.written()))
                    if block.is_in_place and not block.has_rows:  # rows are copied, without their zeros
                        bundle.give_away()
                yield StageBlocks(key, self._size(key), self._stored[stage, key], full)


def _keys(places: list[np.ndarray], first: int, width: int, *, is_last: bool) -> np.ndarray:
    """``row * width + column`` for columns from ``first`` on; frees rows and columns when last used."""
    rows, columns = places
    if is_last:
        places.clear()
    keys = rows * np.int64(width)
    keys += columns
    keys -= first
    return keys


def _check_number(sizes: list[tuple[int, int]]) -> None:
    """Raise, before a launch, if the entries and the memory to put them in order do not fit."""
    check_fits(
        f"The sparse Jacobian adds up {sum(count for count, _ in sizes)} entries, which takes",
        sum(count * (size + ORDERING) for count, size in sizes),
        "Compute it for fewer outputs or parameters at a time, or use jvp, vjp, linear_operator or normal_equations.",
    )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


# The blocks of an energy's elements, made positive semidefinite in the memory that a kernel has written.
#
# One kernel tests all blocks by a factorisation without pivots, LDL'. Only blocks that are not positive semidefinite
# are decomposed: their negative eigenvalues are replaced by 0, or by their absolute values.

Projection = Literal["clamp", "abs", "on_demand"]
ROUNDING = 1000  # tolerance of a zero pivot, in units in the last place of the largest diagonal entry


@functools.cache
def _marking(ti: ModuleType) -> Callable[..., None]:
    """A kernel that marks the blocks that are not positive semidefinite."""
    array: Any = ti.types.ndarray(ndim=3)

    @ti.kernel
    def mark(blocks: array, work: array, marks: ti.types.ndarray(dtype=ti.i32, ndim=1), rounding: ti.f64):
        for e in range(blocks.shape[0]):
            size = blocks.shape[1]
            zero = 0.0 * blocks[e, 0, 0]  # the tolerance
            for i in range(size):
                zero = ti.max(zero, ti.abs(blocks[e, i, i]) * rounding)
            for i in range(size):
                for j in range(i, size):
                    pivot = blocks[e, i, j]
                    for k in range(i):
                        pivot -= work[e, k, i] * work[e, j, k]
                    if j == i:
                        if not pivot >= -zero:
                            marks[e] = 1
                        work[e, i, i] = ti.max(pivot, 0.0)
                    elif work[e, i, i] > zero:
                        work[e, i, j] = pivot  # of D L', above the diagonal, and of L below it
                        work[e, j, i] = pivot / work[e, i, i]
                    else:  # as in the plane of a rigid motion: its row has to be zero, too
                        if not ti.abs(pivot) <= zero:
                            marks[e] = 1
                        work[e, i, j] = work[e, j, i] = 0.0
                if marks[e] == 1:
                    break

    return mark


def project(streams: Streams, way: str) -> int:
    """Project the blocks of all sites of a launch; returns the number of blocks that were not semidefinite.

    "on_demand" only counts them.
    """
    return sum(_project_site(streams, site, way) for site in streams.sites)


def _project_site(streams: Streams, site: Site, way: str) -> int:
    assert site.parts is not None
    numbers = {part: n for n, part in enumerate(sorted(set(site.parts.values())))}
    slots = streams.slots(site)
    size, count = len(numbers), slots.count
    memory, places = [], []
    for group in site.groups:
        memory.append(streams.entries_of(site, group).reshape(count, len(group.entries)))
        places.append([numbers[e.part] * size + numbers[site.parts[e.column]] for e in group.entries])
    dtype = memory[0].dtype if memory else np.float64
    if len(memory) == 1 and len(places[0]) == size * size:
        blocks = memory[0].take(np.argsort(places[0]), axis=1)
    else:
        blocks = np.zeros((count, size * size), dtype)
        for values, where in zip(memory, places, strict=True):
            blocks[:, where] = values
    blocks = blocks.reshape(count, size, size)
    marks = np.zeros(count, np.int32)
    if count and size:
        blocks[~slots.is_filled] = np.eye(size)
        with backend.suspend_following():
            _marking(backend.RUNTIME.module)(blocks, np.empty_like(blocks), marks, ROUNDING * np.finfo(dtype).eps)
    bad = np.flatnonzero(marks)
    bad = bad[np.isfinite(blocks[bad]).all(axis=(1, 2))]
    if len(bad) and way != "on_demand":
        rows = np.stack([slots.of(site.rows[part])[bad] for part in numbers], axis=1)
        fixed = semidefinite(_without_repeats(blocks[bad], rows), way).reshape(len(bad), size * size)
        for values, where in zip(memory, places, strict=True):
            values[bad] = fixed.take(where, axis=1)
    return len(bad)


def _without_repeats(blocks: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Blocks in which entries of one place are added up at the first of them: an element may name a vertex twice."""
    first = (rows[:, :, None] == rows[:, None, :]).argmax(axis=2)
    to = first[:, None, :] == np.arange(rows.shape[1])[:, None]
    is_repeated = (to.sum(axis=2) > 1).any(axis=1)
    blocks[is_repeated] = to[is_repeated] @ blocks[is_repeated] @ to[is_repeated].transpose(0, 2, 1)
    return blocks


def semidefinite(blocks: np.ndarray, way: str) -> np.ndarray:
    """Symmetric matrices with negative eigenvalues replaced by 0 ("clamp") or their absolute values ("abs")."""
    values, vectors = np.linalg.eigh(blocks)
    values = np.abs(values) if way == "abs" else np.maximum(values, 0)
    projected = (vectors * values[:, None, :]) @ vectors.transpose(0, 2, 1)
    return 0.5 * (projected + projected.transpose(0, 2, 1))
