"""Check that each stage reads containers with sparse rows before it writes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from taichi_ext.analysis.affine import Affine
from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.forms.sparse_columns import DenseRowsError
from taichi_ext.program.keys import Key


@dataclass(frozen=True)
class Access:
    """A read or write of a container with sparse rows."""

    order: int
    stage: int
    key: Key
    row: Affine
    loops: tuple[Loop, ...]
    is_injective: bool = False  # no two iterations touch the same entry
    is_sum: bool = False
    since: int | None = None  # for a read of a form stored by this iteration: the number of loops around the store


def check_order(reads: list[Access], writes: list[Access]) -> None:
    """Raise if a stage reads its own writes, or stores twice to one entry."""
    for read in reads:
        for write in writes:
            if write.key == read.key and write.stage == read.stage and _meet(read, write):
                raise DenseRowsError("an entry is read in the loop that writes it, by another iteration or twice")
    for n, one in enumerate(writes):
        for other in writes[:n]:
            if one.key == other.key and one.stage == other.stage and not _are_in_order(other, one):
                raise DenseRowsError("entries are stored to twice in one loop, in an order that is not known")


def are_apart(a: Affine, b: Affine) -> bool:
    """Whether two rows differ for all values of their variables."""
    if a.is_constant and b.is_constant:
        return a.constant != b.constant
    divisor = math.gcd(*(factor for _, factor in (*a.terms, *b.terms)))
    return (a.constant - b.constant) % divisor != 0


def _meet(read: Access, write: Access) -> bool:
    """Whether a read may or may not see a write of the same stage."""
    if are_apart(read.row, write.row):
        return False
    if read.since is not None:  # stored before by this iteration: valid unless another store comes in between
        is_later = write.order > read.order
        inner = read.loops[read.since :]
        return is_later and bool(inner) and write.loops[: read.since + 1] == read.loops[: read.since + 1]
    is_before = read.order < write.order and read.row == write.row
    return not (is_before and write.is_injective)


def _are_in_order(first: Access, second: Access) -> bool:
    """Whether the host can decide which of two writes of a stage counts; the first is earlier in the text."""
    if (first.is_sum and second.is_sum) or are_apart(first.row, second.row):
        return True
    is_same_row = first.row == second.row
    if not second.is_sum:
        return is_same_row and first.loops == second.loops and first.is_injective and second.is_injective
    is_around = second.loops[: len(first.loops)] == first.loops
    return is_same_row and first.is_injective and is_around
