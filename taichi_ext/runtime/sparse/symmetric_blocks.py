"""The pattern of a symmetric matrix whose numbers come in square blocks: only those above the diagonal are added up."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from taichi_ext.runtime.sparse.merging import NO_OVERFLOW

LENGTHS = (4, 3, 2)  # of rows of blocks
PART = 1 << 14  # count of blocks looked at in one pass, to save memory


class SymmetricBlocks(NamedTuple):
    """CSR index arrays, and for ``merged_blocks`` the numbers that are added up, the blocks, and their length."""

    indptr: np.ndarray
    indices: np.ndarray
    order: np.ndarray
    blocks: np.ndarray
    length: int


def symmetric_blocks(key: np.ndarray, kept: np.ndarray, size: int) -> SymmetricBlocks | None:
    """The blocks for numbers at ``row * size + column``; None if they are no square blocks of kept numbers."""
    for length in LENGTHS:
        square = length * length
        if size % length == 0 and len(key) % square == 0 and len(key) <= NO_OVERFLOW // 2:
            keys, is_kept = key.reshape(-1, square), kept.reshape(-1, square)
            if all(_are_blocks(keys[n : n + PART], is_kept[n : n + PART], size) for n in range(0, len(keys), PART)):
                return _ordered(keys[:, 0], np.flatnonzero(is_kept[:, 0]), size, length)
    return None


def _are_blocks(keys: np.ndarray, kept: np.ndarray, size: int) -> bool:
    steps = np.arange(keys.shape[1])
    length = math.isqrt(len(steps))
    is_same = keys - keys[:, :1] == steps // length * size + steps % length
    return bool((kept == kept[:, :1]).all() and (is_same | ~kept).all())


def _ordered(first: np.ndarray, numbers: np.ndarray, size: int, length: int) -> SymmetricBlocks | None:
    rows, columns = np.divmod(first[numbers], size)
    if (rows % length).any() or (columns % length).any():
        return None
    rows, columns, width = rows // length, columns // length, size // length
    is_upper = rows <= columns
    places, numbers = (rows * width + columns)[is_upper], numbers[is_upper]
    order = np.argsort(places, kind="stable")
    places = places[order]
    starts = np.flatnonzero(np.append(True, places[1:] != places[:-1])[: len(places)])
    upper = places[starts]
    rows, columns = np.divmod(upper, width)
    mirrored = columns * width + rows
    every = np.sort(np.concatenate([upper, mirrored[rows < columns]]))
    count = np.bincount(every // width, minlength=width)  # of the blocks in a row of them
    before = np.cumsum(count) - count

    def rows_of(places: np.ndarray) -> list[np.ndarray]:
        row = places // width
        first = length * ((length - 1) * before[row] + np.searchsorted(every, places))
        return [first + n * length * count[row] for n in range(length)]

    dtype: Any = np.int32
    ends = np.append(starts, len(order))
    blocks = np.stack([*rows_of(upper), *rows_of(mirrored), ends[:-1], ends[1:]], axis=1).astype(dtype)
    in_row = np.repeat(count, length)
    indptr = np.append(0, np.cumsum(length * in_row)).astype(dtype)
    block = np.arange(in_row.sum()) + np.repeat(np.repeat(before, length) - (np.cumsum(in_row) - in_row), in_row)
    indices = (length * (every % width)).astype(dtype)[block][:, None] + np.arange(length, dtype=dtype)
    numbers = (length * length * numbers[order]).astype(dtype)
    return SymmetricBlocks(indptr, indices.reshape(-1), numbers, blocks, length)
