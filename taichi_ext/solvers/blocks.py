"""Sparse matrices in small dense blocks: how they are cut, and their products, by a kernel where it pays."""

# The annotations of a kernel are values that Taichi reads, and pyright knows no types of SciPy.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from taichi_ext import backend
from taichi_ext.runtime.sparse.matrices import Pattern, listed_terms, total_pattern

MOST_WIDE = 32  # numbers on the side of a block
_LEAST_WORK = 2**20  # multiplications of a product by the kernel, which takes 0.1 s to be compiled for each size
_MOST_TERMS = 2**25  # of a product that are listed
_MOST_NUMBERS = 2**31  # of all blocks of a matrix: the kernel counts in 32 bits
_MOST_TOTALS = 256  # numbers of a block that are added up at once


class BlockCut:
    """How CSR arrays of one pattern are cut into blocks."""

    def __init__(self, block: Any, size: tuple[int, int]) -> None:
        numbered = type(block)((np.arange(1, block.nnz + 1), block.indices, block.indptr), shape=block.shape)
        found = numbered.tobsr(size)
        found.sort_indices()
        filled = np.flatnonzero(found.data)
        self._places = np.empty(block.nnz, np.int64)
        self._places[found.data.reshape(-1)[filled] - 1] = filled
        self._indices, self._shape = (found.indices, found.indptr), found.data.shape
        self._array = functools.partial(type(found), shape=block.shape)
        self.filling = found.data.size / max(1, block.nnz)  # numbers in blocks for each entry

    def blocks(self, block: Any, factors: np.ndarray | None) -> Any:
        """A CSR array as a BSR array in float64, whose rows are multiplied by factors."""
        data = np.zeros(self._shape)
        data.reshape(-1)[self._places] = block.data
        if factors is not None:
            counts = np.diff(self._indices[1])
            data *= np.repeat(factors.reshape(-1, data.shape[1]), counts, axis=0)[:, :, None]
        return self._array((data, *self._indices))


class _Plan(NamedTuple):
    """The terms of a product, by the blocks of the result.

    Attributes:
        terms: the blocks of the factors by term, and for each block of the result its first term, the end of its terms,
            and its place; for the product of a matrix with its own transpose, without blocks below the diagonal.
        pattern: of the result.
        before: places of the blocks of the matrix that it is added to.
        mirrored: places of blocks below the diagonal, and of those above it.
    """

    terms: list[np.ndarray]
    pattern: Pattern
    before: np.ndarray | None
    mirrored: tuple[np.ndarray, np.ndarray] | None


class BlockProducts:
    """Products of BSR arrays, and how CSR arrays are cut into those: both are planned once for each pattern.

    Args:
        is_compiled: whether a kernel adds up the terms of large products, if Taichi runs on the CPU; else SciPy does.
    """

    def __init__(self, is_compiled: bool) -> None:
        self._is_compiled = is_compiled
        self._known: dict[object, tuple[list[np.ndarray], Any]] = {}

    def cut(self, place: tuple[int, int], block: Any, size: tuple[int, int]) -> BlockCut:
        """How a CSR array is cut into blocks of a size; ``place`` stands for its pattern."""
        return self._planned((place, size), [block], lambda: BlockCut(block, size))

    def add(self, key: object, before: Any, left: Any, right: Any, sign: int = 1) -> Any:
        """``before + sign * left.T @ right``; None for ``before`` is zero, and ``key`` stands for the patterns."""
        if not self._can_be_compiled(left, right):
            product = left.T @ right
            product.data *= sign
            return product if before is None else before + product
        matrices = [matrix for matrix in (before, left, right) if matrix is not None]
        plan: _Plan = self._planned(key, matrices, lambda: _terms(matrices, left is right))
        (height, rows), width = left.blocksize, right.blocksize[1]
        data = np.zeros((len(plan.pattern.indices), rows, width))
        if before is not None:
            data[plan.before] = before.data
        group = max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * width <= _MOST_TOTALS))
        arrays = (np.ascontiguousarray(blocks).reshape(-1) for blocks in (data, left.data, right.data))
        with backend.suspend_following():
            _kernel(backend.RUNTIME.module)(*arrays, *plan.terms, height, rows, float(sign), group, width)
        if plan.mirrored is not None:
            below, above = plan.mirrored
            data[below] = data[above].transpose(0, 2, 1)
        shape = left.shape[1], right.shape[1]
        return type(left)((data, plan.pattern.indices, plan.pattern.indptr), shape=shape)

    def _can_be_compiled(self, left: Any, right: Any) -> bool:
        """Whether a product has some work for the kernel, and not too much to list its terms."""
        if not (self._is_compiled and backend.program() is not None and backend.is_host_arch()):
            return False
        height, *widths = *left.blocksize, right.blocksize[1]
        count = int(np.diff(left.indptr).astype(np.int64) @ np.diff(right.indptr))
        numbers = max(left.data.size, right.data.size, count * widths[0] * widths[1])
        is_listed = count <= _MOST_TERMS and numbers < _MOST_NUMBERS and max(height, *widths) <= MOST_WIDE
        return is_listed and count * height * widths[0] * widths[1] >= _LEAST_WORK

    def _planned(self, key: object, matrices: list[Any], plan: Callable[[], Any]) -> Any:
        """What was planned for matrices of these patterns, or is now."""
        patterns = [array for matrix in matrices for array in (matrix.indptr, matrix.indices)]
        known = self._known.get(key)
        if known is None or not all(map(np.array_equal, known[0], patterns)):
            known = self._known[key] = patterns, plan()
        return known[1]


def _terms(matrices: list[Any], is_symmetric: bool) -> _Plan:
    *before, (left, of_left), (right, of_right) = map(_sorted, matrices)
    turned, order = _transposed(left)
    pattern, (lefts, rights, firsts) = listed_terms(turned, right)
    whole, (*found, places) = total_pattern((*(p for p, _ in before), pattern))
    of_before = [numbers.take(np.argsort(order)) for numbers, (_, order) in zip(found, before, strict=True)]
    ends, is_added, mirrored = np.append(firsts[1:], len(lefts)), np.full(len(firsts), True), None
    if is_symmetric:
        is_added = np.repeat(np.arange(pattern.shape[0]), np.diff(pattern.indptr)) <= pattern.indices
        mirrored = places[~is_added], places[_transposed(pattern)[1]][~is_added]
    slots = np.stack([firsts, ends, places], axis=1)[is_added]
    terms = [array.astype(np.int32) for array in (of_left[order[lefts]], of_right[rights], slots)]
    return _Plan(terms, whole, of_before[0] if before else None, mirrored)


def _sorted(matrix: Any) -> tuple[Pattern, np.ndarray]:
    """The pattern of the blocks of a BSR array, and their numbers in it."""
    shape = tuple(np.floor_divide(matrix.shape, matrix.blocksize))
    rows = np.repeat(np.arange(shape[0]), np.diff(matrix.indptr))
    order = np.argsort(rows * shape[1] + matrix.indices, kind="stable")
    return Pattern(matrix.indptr, matrix.indices[order], shape), order


def _transposed(pattern: Pattern) -> tuple[Pattern, np.ndarray]:
    found = pattern.with_data(np.arange(len(pattern.indices))).T.tocsr()
    return Pattern(found.indptr, found.indices, found.shape), found.data


@functools.cache
def _kernel(ti: ModuleType) -> Callable[..., None]:
    """A kernel that adds up the terms of each block, some of its rows at once."""
    numbers: Any = ti.types.ndarray(dtype=ti.f64, ndim=1)
    integers: Any = ti.types.ndarray(dtype=ti.i32, ndim=1)

    @ti.kernel
    def add_terms(
        found: numbers,
        left: numbers,
        right: numbers,
        lefts: integers,
        rights: integers,
        slots: ti.types.ndarray(dtype=ti.i32, ndim=2),
        height: ti.i32,
        rows: ti.i32,
        sign: ti.f64,
        group: ti.template(),
        width: ti.template(),
    ):
        for s in range(slots.shape[0]):
            for part in range(rows // group):
                totals = ti.Vector.zero(ti.f64, group * width)
                for t in range(slots[s, 0], slots[s, 1]):
                    a = lefts[t] * height * rows + part * group
                    b = rights[t] * height * width
                    for _ in range(height):
                        for i in range(group):
                            number = left[a + i]
                            for j in range(width):
                                totals[i * width + j] += number * right[b + j]
                        a += rows
                        b += width
                place = (slots[s, 2] * rows + part * group) * width
                for j in range(group * width):
                    found[place + j] = found[place + j] + sign * totals[j]  # += would be atomic, ten times as slow

    return add_terms
