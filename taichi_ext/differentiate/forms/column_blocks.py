"""Blocks of columns: for which of them a program is right that was made for one.

A walk asks whether columns are in its block. Where they are, the program names them and is right for this block alone.
Where they are not, it is right for all blocks of the same size that do not have them either, on the same side.
"""

from __future__ import annotations

LAST = 2**31 - 1  # no column has a larger number


class Blocks:
    """The blocks that are alike as far as a program asks; columns are counted from the first one of its own block.

    Args:
        count: how many columns a block has.
        first: the number of the first one among all columns; None where the block has all of them.
    """

    def __init__(self, count: int, first: int | None = None) -> None:
        self.first = first
        self._count = count
        self._least, self._most = -(first or 0), LAST - (first or 0)  # by how many columns the block can be moved

    def has(self, column: int, size: int = 1) -> bool:
        """Whether ``size`` columns from this one on are all in the block."""
        first_move, last_move = column + size - self._count, column  # that give a block which has them
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
        """The first columns of the blocks; None where there is one block of all columns."""
        return None if self.first is None else range(self.first + self._least, self.first + self._most + 1)
