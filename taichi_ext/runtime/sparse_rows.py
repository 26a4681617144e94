"""The rows of the containers that have columns: by parameter, as they are between two stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from taichi_ext.differentiate.sparse_columns import is_sum_key
from taichi_ext.runtime.sparse_pattern import Block, block_of, sparse_dtype
from taichi_ext.runtime.sparse_streams import StageBlocks

IDENTITY = "identity"  # a parameter that nothing has written to, by itself


class SparseRows:
    """For each container a sparse matrix by each parameter."""

    def __init__(self, sizes: dict[Any, int]) -> None:
        self._sizes = sizes
        self._blocks: dict[Any, dict[Any, Any]] = {key: {key: IDENTITY} for key in sizes}

    def keys(self) -> list[Any]:
        return list(self._blocks)

    def of(self, key: Any, note_clear: Callable[[Any], None] | None = None) -> Rows:
        """The rows of one container; ``note_clear`` is called before some of them are cleared."""
        return Rows(self, key, note_clear)

    def blocks(self, key: Any) -> dict[Any, Any]:
        """The blocks of a container that have entries."""
        return self._blocks.get(key, {})

    def block(self, key: Any, param: Any, rows: int, dtype: Any) -> Any:
        """A block of J as a CSR array."""
        sparse = scipy_sparse()
        found = self.blocks(key).get(param)
        if found is None:
            return sparse.csr_array((rows, self._sizes[param]), dtype=dtype)
        return sparse.eye_array(rows, dtype=dtype, format="csr") if isinstance(found, str) else found

    def replace(self, key: Any, blocks: dict[Any, Any]) -> None:
        self._blocks[key] = blocks

    def clear(self, key: Any, rows: Any) -> None:
        """Set the tangents of some entries to zero."""
        left = {}
        for param, block in self.blocks(key).items():
            size = self._sizes[key] if isinstance(block, str) else block.shape[0]
            rest = without_rows(block, np.arange(size)[rows].reshape(-1), size)
            if rest is not None:
                left[param] = rest
        self._blocks[key] = left

    def compose(self, stages: Iterable[list[StageBlocks]], outer: Callable[[Any], Any]) -> None:
        """Go on by one launch: what each stage writes, by what was there before it."""
        versions: dict[Any, list[Any]] = {}

        def before(key: Any, version: int) -> dict[Any, Any]:
            return versions.get(key, [self.blocks(key)])[version]

        for written in stages:
            found = {outer(w.key): self._after(w, outer, before) for w in written}
            for key, blocks in found.items():
                versions.setdefault(key, [self.blocks(key)]).append(blocks)
            self._blocks.update(found)
        for key in [key for key in self._blocks if is_sum_key(key)]:
            del self._blocks[key]

    def _after(
        self, written: StageBlocks, outer: Callable[[Any], Any], known: Callable[[Any, int], dict[Any, Any]]
    ) -> dict[Any, Any]:
        terms: dict[Any, list[Any]] = {}
        for owner, (block, data) in written.blocks.items():
            matrix = as_csr(block, data)
            if owner[0] != "composed":
                terms.setdefault(outer(owner), []).append(matrix)
                continue
            for param, before in known(outer(owner[1]), owner[2]).items():
                terms.setdefault(param, []).append(matrix if isinstance(before, str) else product(matrix, before))
        for param, before in self.blocks(outer(written.key)).items():
            rest = without_rows(before, written.stored, written.size)
            if rest is not None:
                terms.setdefault(param, []).append(rest)
        return {param: self._sum(param, matrices) for param, matrices in terms.items()}

    def _sum(self, param: Any, matrices: list[Any]) -> Any:
        if len(matrices) == 1:
            return matrices[0]
        size = self._sizes[param]
        eye = scipy_sparse().eye_array(size, format="csr")
        return total([eye if isinstance(m, str) else m for m in matrices])


class Rows:
    """The rows of one container, as a session clears and asks for them."""

    is_fresh = False

    def __init__(self, rows: SparseRows, key: Any, note_clear: Callable[[Any], None] | None) -> None:
        self._rows = rows
        self._key = key
        self._note_clear = note_clear

    def any(self) -> bool:
        return any(isinstance(b, str) or b.nnz for b in self._rows.blocks(self._key).values())

    def clear_rows(self, rows: Any) -> None:
        """Set the tangents of some entries to zero."""
        if self._note_clear is not None:
            self._note_clear(self._key)
        self._rows.clear(self._key, rows)


def scipy_sparse() -> Any:
    import scipy.sparse

    return scipy.sparse


def as_csr(block: Block, data: np.ndarray) -> Any:
    """A CSR array with index arrays of its own: users may change them."""
    matrix = scipy_sparse().csr_array((data, block.indices.copy(), block.indptr.copy()), shape=block.shape)
    matrix.has_canonical_format = True
    if block.has_rows:
        matrix.eliminate_zeros()
    return matrix


def csr_of(values: np.ndarray) -> Any:
    """The entries of a dense matrix that are not zero."""
    return scipy_sparse().csr_array(values.astype(sparse_dtype(values.dtype), copy=False))


def product(a: Any, b: Any) -> Any:
    """A @ b; entries that are zero stay in."""
    ones = [scipy_sparse().csr_array((np.ones(m.nnz, np.int8), m.indices, m.indptr), shape=m.shape) for m in (a, b)]
    pattern = (ones[0].astype(np.int32) @ ones[1].astype(np.int32)).astype(a.dtype)
    found = a @ b  # scipy leaves out what is zero
    if found.nnz == pattern.nnz:
        found.sort_indices()
        return found
    pattern.data[:] = 0
    return total([pattern, found])


def total(matrices: list[Any]) -> Any:
    """The sum of CSR arrays; entries that are zero stay in."""
    coo = [m.tocoo() for m in matrices]
    width = np.int64(max(1, matrices[0].shape[1]))
    key = np.concatenate([m.row * width + m.col for m in coo])
    block = block_of(key, np.ones(len(key), bool), matrices[0].shape, False, may_be_in_place=True)
    return as_csr(block, block.data(np.concatenate([m.data for m in coo])))


def without_rows(matrix: Any, rows: np.ndarray, size: int) -> Any:
    """The matrix with some rows empty; None where nothing is left."""
    is_kept = np.ones(size, bool)
    is_kept[rows] = False
    if not is_kept.any():
        return None
    if isinstance(matrix, str):
        if is_kept.all():
            return matrix
        matrix = scipy_sparse().eye_array(size, format="csr")
    counts = np.diff(matrix.indptr)
    entries = np.repeat(is_kept, counts)
    indptr = np.concatenate([[0], np.cumsum(counts * is_kept)]).astype(matrix.indptr.dtype)
    kept = scipy_sparse().csr_array((matrix.data[entries], matrix.indices[entries], indptr), shape=matrix.shape)
    return kept if kept.nnz else None
