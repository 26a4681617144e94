"""The columns of a sparse Jacobian: their owners, and which of them rows of tangents hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from taichi_ext.program.keys import Key, Version

FIRST_SPARSE = 1 << 28  # rows do not hold columns from this number on
LAST_SPARSE = 2**31 - 1
OPEN_ENTRIES = 1 << 25  # most columns of a local in a loop over ranges that are only known at run time


class DenseRowsError(Exception):
    """Tangents need rows of all columns; the message gives the reason."""


class IntermediatesError(DenseRowsError):
    """An energy is computed from containers that kernels compute from params; ``sizes`` are their sizes."""

    def __init__(self, reason: str, sizes: Mapping[Key, int]) -> None:
        super().__init__(reason)
        self.sizes = sizes


@dataclass
class Columns:
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
        """The number of columns of rows."""
        return max(1, sum(self.sizes[key] for key in self.in_rows))

    def extended(self, in_rows: set[Key], intermediates: dict[Key, int], versions: dict[Key, int]) -> Columns:
        """The same parameters, with the columns that a trace needs in addition."""
        return Columns(self.sizes, set(in_rows), dict(intermediates), dict(versions))

    def first(self, key: Key) -> int | None:
        """The first column of a container; None if it has none."""
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
        if other > LAST_SPARSE:
            raise DenseRowsError(
                f"parameters and fields between them and outputs have {other - FIRST_SPARSE} entries, too many"
            )
        return numbers

    def ranges(self) -> list[tuple[int, int, Key]]:
        """First column, end and container, in order of the columns."""

        def size(key: Key) -> int:
            return self.intermediates[key.of] if isinstance(key, Version) else self.sizes[key]

        numbers = self._numbers().items()
        return sorted(((first, first + size(key), key) for key, first in numbers), key=lambda r: r[:2])
