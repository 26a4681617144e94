"""Blocks of columns, and the blocks that a program made for one of them is valid for.

A walk asks whether columns are in its block. If they are, the program names them and is valid for this block only. If
not, it is valid for all blocks of the same size that do not contain them either and are on the same side of them.
"""

from __future__ import annotations

LAST = 2**31 - 1  # no column has a larger number


class Blocks:
    """The blocks that a program is valid for; columns are counted from the first one of its own block.

    Args:
        count: the number of columns of a block.
        first: the number of its first column among all columns; None if the block has all columns.
    """

    def __init__(self, count: int, first: int | None = None) -> None:
        self.first = first
        self._count = count
        self._least, self._most = -(first or 0), LAST - (first or 0)  # the range of shifts of the block

    def has(self, column: int, size: int = 1) -> bool:
        """Whether ``size`` columns from this one on are all in the block."""
        first_move, last_move = column + size - self._count, column  # shifts that give a block with these columns
        if first_move <= 0 <= last_move:
            self._least = self._most = 0
            return True
        if 0 < first_move <= last_move:
            self._most = min(self._most, first_move - 1)
        elif first_move <= last_move < 0:
            self._least = max(self._least, last_move + 1)
        return False

    @property
    def first_columns(self) -> range | None:
        """The first columns of the blocks; None if there is one block of all columns."""
        return None if self.first is None else range(self.first + self._least, self.first + self._most + 1)
