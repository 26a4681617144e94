"""Products and sums of sparse matrices whose patterns are mostly those of the previous call.

SciPy finds the pattern of a result in each call, and drops entries that are zero. Here the pattern of a result, and
the order of its entries, are found once for the patterns of the operands; after that only numbers are computed.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext.cached import cached_property

FEW_TERMS = 2**13  # products of up to so many terms list them: SciPy takes 0.1 ms for any product
MOST_KEPT = 2**29  # bytes that a plan keeps for patterns


def scipy_sparse() -> Any:
    import scipy.sparse

    return scipy.sparse


def positive_factors(matrix: Any) -> Any:
    """The factors of a symmetric CSR array, a SuperLU of SciPy; None unless it is positive definite.

    Without pivots, in an order for symmetric patterns, LU is LDL', and the signs of D are those of the eigenvalues
    (Sylvester's law of inertia).
    """
    from scipy.sparse.linalg import splu

    options = {"SymmetricMode": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            factors = splu(matrix.T.tocsc(), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options)
        except RuntimeError:  # exactly singular
            return None
    is_positive = (factors.U.diagonal() > 0).all() and np.array_equal(factors.perm_r, factors.perm_c)
    return factors if is_positive else None


@dataclass(frozen=True, eq=False)
class Pattern:
    """The pattern of a matrix: CSR index arrays in canonical form, which are never modified."""

    indptr: np.ndarray
    indices: np.ndarray
    shape: tuple[int, int]

    def with_data(self, data: np.ndarray) -> Any:
        """A CSR array that shares its index arrays with this pattern."""
        matrix = object.__new__(type(self._empty))
        matrix.__dict__.update(self._empty.__dict__)  # in a quarter of the time of copy.copy
        matrix.data = data
        return matrix

    @cached_property
    def _empty(self) -> Any:
        """A CSR array without numbers: SciPy then checks the index arrays once, not for each array that shares them."""
        numbers = np.zeros(len(self.indices), np.int8)
        matrix = scipy_sparse().csr_array((numbers, self.indices, self.indptr), shape=self.shape)
        matrix.has_canonical_format = True
        matrix.data = numbers[:0]
        return matrix

    def ones(self) -> Any:
        return self.with_data(np.ones(len(self.indices), np.int32))


@dataclass(frozen=True, eq=False)
class Matrix:
    """A sparse matrix; entries may be zero."""

    pattern: Pattern
    data: np.ndarray

    @staticmethod
    def of(matrix: Any) -> Matrix:
        """A matrix from a CSR array in canonical form, which must not be used afterwards."""
        return Matrix(Pattern(matrix.indptr, matrix.indices, matrix.shape), matrix.data)

    @property
    def shape(self) -> tuple[int, int]:
        return self.pattern.shape

    @property
    def nnz(self) -> int:
        return len(self.data)

    def view(self) -> Any:
        """A CSR array for reading."""
        return self.pattern.with_data(self.data)

    def csr(self) -> object:
        """A CSR array with separate index arrays, since users may change them."""
        matrix = self.view()
        matrix.indptr, matrix.indices = matrix.indptr.copy(), matrix.indices.copy()
        return matrix


@functools.lru_cache(maxsize=16)
def _diagonal(size: int) -> Pattern:
    dtype = np.int32 if size < 2**31 else np.int64
    return Pattern(np.arange(size + 1, dtype=dtype), np.arange(size, dtype=dtype), (size, size))


def identity(size: int, dtype: Any) -> Matrix:
    return Matrix(_diagonal(size), np.ones(size, dtype))


@dataclass
class _Known:
    inputs: tuple[Any, ...]  # kept, so that no other object gets the same id
    mask: bytes  # of the entries that are not zero, where the result depends on these
    result: Any
    size: int
    round: int


class Arithmetic:
    """Operations on matrices, and the patterns of their results; patterns unused in a call are dropped in the next."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}
        self._round = 0

    def begin(self) -> None:
        """Start a call."""
        for name, known in list(self._known.items()):
            if known.round < self._round:
                self._known.pop(name, None)
        self._round += 1

    def _find(
        self, kind: str, inputs: tuple[Any, ...], make: Callable[[], tuple[Pattern, Any]], mask: bytes = b""
    ) -> tuple[Pattern, Any]:
        """The pattern of a result and its order, as in an earlier call with the same inputs and mask, if kept."""
        name = (kind, *map(id, inputs))
        known = self._known.get(name)
        if known is None or known.mask != mask:
            pattern, rest = result = make()
            arrays = (pattern.indptr, pattern.indices, *(rest if isinstance(rest, list) else [rest]))
            known = _Known(inputs, mask, result, sum(a.nbytes for a in arrays), self._round)
            if known.size + sum(k.size for k in list(self._known.values())) <= MOST_KEPT:
                self._known[name] = known
        known.round = self._round
        return known.result

    # --- operations

    def product(self, a: Matrix, b: Matrix) -> Matrix:
        """``a @ b``."""
        pattern, order = self._find("product", (a.pattern, b.pattern), lambda: _product_pattern(a.pattern, b.pattern))
        if isinstance(order, list):
            of_a, of_b, starts = order
            terms = a.data.take(of_a) * b.data.take(of_b)
            return Matrix(pattern, np.add.reduceat(terms, starts) if len(starts) else terms)
        matrix = a.view() @ b.view()
        if matrix.nnz == len(order) and np.array_equal(matrix.indices.take(order), pattern.indices):
            return Matrix(pattern, matrix.data.take(order))
        matrix.sort_indices()  # SciPy drops entries that are zero
        data = np.zeros(len(order), matrix.dtype)
        data[_places(Pattern(matrix.indptr, matrix.indices, matrix.shape), pattern)] = matrix.data
        return Matrix(pattern, data)

    def total(self, matrices: list[Matrix]) -> Matrix:
        """The sum of some matrices of one shape."""
        if len(matrices) == 1:
            return matrices[0]
        patterns = tuple(m.pattern for m in matrices)
        pattern, places = self._find("total", patterns, lambda: total_pattern(patterns))
        data = np.zeros(len(pattern.indices), np.result_type(*(m.data for m in matrices)))
        for matrix, where in zip(matrices, places, strict=True):
            data[where] += matrix.data
        return Matrix(pattern, data)

    def without_zeros(self, pattern: Pattern, data: np.ndarray) -> Matrix:
        """The entries that are not zero, mostly those of the previous call."""
        is_there = data != 0
        mask = is_there.tobytes()  # bytes are compared in a quarter of the time of arrays
        result, entries = self._find("nonzero", (pattern,), lambda: _nonzero_pattern(pattern, is_there), mask)
        return Matrix(result, data.take(entries))

    def without_rows(self, matrix: Matrix, rows: np.ndarray) -> Matrix | None:
        """The matrix with some rows empty; None if no entry is left."""
        pattern, entries = self._find("without", (matrix.pattern, rows), lambda: _rest_pattern(matrix.pattern, rows))
        if len(entries) == matrix.nnz:
            return matrix
        return Matrix(pattern, matrix.data.take(entries)) if len(entries) else None


def _product_pattern(a: Pattern, b: Pattern) -> tuple[Pattern, object]:
    """The pattern of a product, and the position of each entry in SciPy's result.

    For products with few terms, instead of positions: the numbers of their factors, and the start of each entry's.
    """
    counts = np.diff(b.indptr).take(a.indices)
    if counts.sum() <= FEW_TERMS:
        return listed_terms(a, b)
    product = a.ones() @ b.ones()
    product.data = np.arange(product.nnz, dtype=product.indices.dtype)
    product.sort_indices()
    return Pattern(product.indptr, product.indices, product.shape), product.data


def listed_terms(a: Pattern, b: Pattern) -> tuple[Pattern, list[np.ndarray]]:
    """The pattern of a product, and its terms: the numbers of their factors, and the first term of each entry."""
    counts = np.diff(b.indptr).take(a.indices)
    of_a = np.repeat(np.arange(len(a.indices)), counts)
    of_b = np.arange(len(of_a)) + np.repeat(b.indptr[a.indices] - (np.cumsum(counts) - counts), counts)
    terms = scipy_sparse().csr_array(
        (np.arange(len(of_a)), b.indices.take(of_b), np.append(0, counts.cumsum())[a.indptr]),
        shape=(a.shape[0], b.shape[1]),
    )
    terms = terms.tocsc().tocsr()  # in the order of entries, by counting
    rows = np.repeat(np.arange(a.shape[0]), np.diff(terms.indptr))
    starts = np.flatnonzero((np.diff(rows, prepend=-1) != 0) | (np.diff(terms.indices, prepend=-1) != 0))
    indptr = np.searchsorted(starts, terms.indptr).astype(a.indptr.dtype)
    pattern = Pattern(indptr, terms.indices[starts].astype(a.indices.dtype), terms.shape)
    return pattern, [of_a[terms.data], of_b[terms.data], starts]


def total_pattern(patterns: tuple[Pattern, ...]) -> tuple[Pattern, list[np.ndarray]]:
    """The pattern of a sum, and for each summand the positions of its entries in it."""
    total = functools.reduce(operator.add, (p.ones() for p in patterns))
    pattern = Pattern(total.indptr, total.indices, total.shape)
    return pattern, [_places(p, pattern) for p in patterns]


def _rest_pattern(pattern: Pattern, rows: np.ndarray) -> tuple[Pattern, np.ndarray]:
    """The pattern without some rows, and the numbers of the remaining entries."""
    is_kept = np.ones(pattern.shape[0], bool)
    is_kept[rows] = False
    counts = np.diff(pattern.indptr)
    entries = np.flatnonzero(np.repeat(is_kept, counts))
    indptr = np.concatenate([[0], np.cumsum(counts * is_kept)]).astype(pattern.indptr.dtype)
    return Pattern(indptr, pattern.indices[entries], pattern.shape), entries


def _nonzero_pattern(pattern: Pattern, is_there: np.ndarray) -> tuple[Pattern, np.ndarray]:
    entries = np.flatnonzero(is_there)
    indptr = np.searchsorted(entries, pattern.indptr).astype(pattern.indptr.dtype)
    return Pattern(indptr, pattern.indices.take(entries), pattern.shape), entries


def _places(part: Pattern, whole: Pattern) -> np.ndarray:
    """The positions of the entries of a pattern in another one that contains them."""
    numbers = whole.with_data(np.arange(1, len(whole.indices) + 1, dtype=whole.indptr.dtype))
    places = numbers.multiply(part.ones()).data
    places -= 1
    return places
