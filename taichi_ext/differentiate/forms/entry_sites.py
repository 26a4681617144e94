"""The sites at which a kernel writes entries of a sparse Jacobian, with the data from which the host places them.

A *site* is a statement that stores or adds a tangent.  Each time it runs it fills one *slot*: a coefficient for each of
its entries, and the integers that rows and columns depend on and that are not loop variables.  Rows and columns are
``sum(factor * integer) + constant``, so that the host finds the pattern from a few integers per slot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from taichi_ext.analysis.affine import Affine, Atom
from taichi_ext.analysis.loops import Loop
from taichi_ext.program import Type
from taichi_ext.program.keys import Key, SiteArray, Version


@dataclass(frozen=True)
class Axis:
    """A loop around a site: its variable, and the indices that it runs over."""

    variable: Atom
    first: int
    end: int

    @property
    def length(self) -> int:
        return max(0, self.end - self.first)


@dataclass(frozen=True)
class SiteEntry:
    """One number that a site writes: its row, that of a part of the slot, and its column among all columns."""

    part: int
    column: Affine


@dataclass(frozen=True)
class Group:
    """The entries of a site whose columns belong to one owner, a container; None if it is only known at run time."""

    owner: Key
    entries: tuple[SiteEntry, ...]


@dataclass(frozen=True)
class SiteLoops:
    """The loops around a site."""

    loops: tuple[Loop, ...]  # identifiers of all loops
    axes: tuple[Axis, ...]  # the loops whose numbers of iterations are known
    opened: int | None  # the number of the open loop, whose number of iterations is only known at run time
    counter: int | None  # the number of the counter of the site's slots, if their number is only known at run time


@dataclass(frozen=True)
class Site:
    """One statement that writes tangents."""

    number: int  # among the sites of a kernel, in the order of the text
    # the top-level statement that contains it, and a step of that: a stage never reads its own writes
    stage: tuple[int, int]
    key: Key  # the container that it writes to
    is_sum: bool  # whether it adds to entries rather than replacing them
    around: SiteLoops
    is_conditional: bool  # whether some slots may not be filled; the integers then end with a flag
    is_injective: bool  # whether no two slots have the same row
    rows: tuple[Affine, ...]  # the row of each part
    atoms: tuple[Atom, ...]  # the integers that each slot keeps
    groups: tuple[Group, ...]  # the entries by owner
    has_rows: bool = False  # whether entries come from rows of tangents, which may have zeros anywhere
    # for a Hessian whose slots are symmetric blocks, the part that each column belongs to
    parts: Mapping[Affine, int] | None = None

    @property
    def is_symmetric(self) -> bool:
        """Whether the entries of each slot are a symmetric block."""
        return self.parts is not None

    @property
    def slots(self) -> int:
        """The number of slots, without counters and open loops."""
        return math.prod(axis.length for axis in self.around.axes)

    @property
    def integers(self) -> int:
        """The number of integers kept for a slot."""
        return len(self.atoms) + self.is_conditional

    def entries(self, owner: Key) -> SiteArray:
        """The array of the entries whose columns belong to one container."""
        return SiteArray(self.number, "entries", owner, self.key)


@dataclass(frozen=True)
class EntryTarget:
    """A container whose tangents are written as entries, or a local with separate columns."""

    key: Key  # its identity
    name: str  # its name in messages
    size: int  # its number of entries
    dtype: Type  # their type
    is_columns: bool  # whether its entries are separate columns
    opened: int | None = None  # the number of an open loop; there are ``size`` entries for each of its iterations


@dataclass(frozen=True)
class SparseResult:
    """The entries that a program writes: their sites, columns and containers."""

    sites: tuple[Site, ...]
    columns: SparseColumns
    containers: dict[Key, EntryTarget]


# The columns of a sparse Jacobian: their owners, and which of them rows of tangents hold.

FIRST_SPARSE = 1 << 28  # rows do not hold columns from this number on
LAST_SPARSE = 2**31 - 1
OPEN_ENTRIES = 1 << 25  # most columns of a local in a loop over ranges that are only known at run time


class DenseRowsError(Exception):
    """Tangents need rows of all columns; the message gives the reason."""


def check_sparse(*reasons: tuple[str, object]) -> None:
    """Raise for the first of these reasons for rows of all columns that holds."""
    for reason, holds in reasons:
        if holds:
            raise DenseRowsError(reason)


class IntermediatesError(DenseRowsError):
    """An energy is computed from containers that kernels compute from params; ``sizes`` are their sizes."""

    def __init__(self, reason: str, sizes: Mapping[Key, int]) -> None:
        super().__init__(reason)
        self.sizes = sizes


@dataclass
class SparseColumns:
    """The columns of a sparse Jacobian: those that rows hold come first, the others from ``FIRST_SPARSE`` on.

    Attributes:
        sizes: the entries of each parameter, in order.
        in_rows: the parameters whose columns rows hold.
        intermediates: containers whose entries are separate columns, and their sizes.
        versions: the number of their versions that a kernel reads, if more than one.
    """

    sizes: dict[Key, int] = field(default_factory=dict)
    in_rows: set[Key] = field(default_factory=set)
    intermediates: dict[Key, int] = field(default_factory=dict)
    versions: dict[Key, int] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return max(1, sum(self.sizes[key] for key in self.in_rows))

    def extended(self, in_rows: set[Key], intermediates: dict[Key, int], versions: dict[Key, int]) -> SparseColumns:
        """The same parameters, with the columns that a trace needs in addition."""
        return SparseColumns(self.sizes, set(in_rows), dict(intermediates), dict(versions))

    def first(self, key: Key) -> int | None:
        return self._numbers().get(key)

    def _numbers(self) -> dict[Key, int]:
        numbers, row, other = {}, 0, FIRST_SPARSE
        for key, size in self.sizes.items():
            if key in self.in_rows:
                numbers[key], row = row, row + size
            else:
                numbers[key], other = other, other + size
        for key, size in self.intermediates.items():
            for version in range(self.versions.get(key, 1)):
                numbers[Version(key, version)], other = other, other + size
        count = other - FIRST_SPARSE
        reason = f"parameters and fields between them and outputs have {count} entries, too many"
        check_sparse((reason, other > LAST_SPARSE))
        return numbers

    def ranges(self) -> list[tuple[int, int, Key]]:
        """First column, end and container, in order of the columns."""

        def size(key: Key) -> int:
            return self.intermediates[key.of] if isinstance(key, Version) else self.sizes[key]

        numbers = self._numbers().items()
        return sorted(((first, first + size(key), key) for key, first in numbers), key=lambda r: r[:2])


# Blocks of columns, and the blocks that a program made for one of them is valid for.
#
# A walk asks whether the column of an entry by constant indices is in its block. If it is, the program names it and is
# valid for this block only. If not, it is valid for all blocks of that size on the same side of the column. For other
# entries, and where this would take many programs, one program for all blocks asks at run time.

LAST = 2**31 - 1  # no column has a larger number
_FEW = 24  # entries by number: of so many, each block may have a kernel of its own, with columns in registers


class Blocks:
    """The blocks that a program is valid for; columns are counted from the first one of its own block.

    Args:
        count: the number of columns of a block.
        first: the number of its first column among all columns; None if the block has all columns.
        by_number: the number of entries of params that the program reads by constant indices.
    """

    def __init__(self, count: int, first: int | None = None, by_number: int = 0) -> None:
        self.first = first
        self.is_for_all = first is not None and by_number > max(2 * count, _FEW)  # asks at run time for each of them
        self._count = count
        self._least, self._most = -(first or 0), LAST - (first or 0)  # the range of shifts of the block

    def has(self, column: int) -> bool:
        """Whether a column is in the block."""
        if column < 0:
            self._least = max(self._least, column + 1)
        elif column >= self._count:
            self._most = min(self._most, column - self._count)
        else:
            self._least = self._most = 0
        return 0 <= column < self._count

    @property
    def first_columns(self) -> range | None:
        """The first columns of the blocks; None if there is one block of all columns."""
        return None if self.first is None else range(self.first + self._least, self.first + self._most + 1)
