"""The current rows of containers, by parameter, between two stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any

import numpy as np

from taichi_ext.errors import InternalError
from taichi_ext.program.keys import Key, SumKey, Version
from taichi_ext.runtime.sparse.matrices import Arithmetic, Matrix, identity, scipy_sparse
from taichi_ext.runtime.sparse.pattern import sparse_dtype
from taichi_ext.runtime.sparse.streams import StageBlocks

IDENTITY = "identity"  # the derivative of a parameter with respect to itself, before any write


class SparseRows:
    """For each container, a sparse matrix for each parameter; ``arithmetic`` is kept between calls.

    ``apart``: containers that are like parameters for what is computed from them; only their rows are composed.
    """

    def __init__(self, sizes: dict[Key, int], arithmetic: Arithmetic, apart: Set[Key] = frozenset()) -> None:
        self._sizes = sizes
        self._arithmetic = arithmetic
        self._apart: dict[Key, dict[Key, Any]] = {key: {} for key in apart}  # their blocks, those last written last
        self._blocks: dict[Key, dict[Key, object]] = {key: {key: IDENTITY} for key in sizes}

    def keys(self) -> list[object]:
        return list(self._blocks)

    def of(self, key: Key, note_clear: Callable[[object], None] | None = None) -> ContainerRows:
        """The rows of one container; ``note_clear`` is called before some of them are cleared."""
        return ContainerRows(self, key, note_clear)

    def blocks(self, key: Key) -> dict[Key, Any]:
        return self._blocks.get(key, {})

    def block(self, key: Key, param: Key, rows: int, dtype: object) -> Any:
        """A block of J as a CSR array."""
        known = self.blocks(key).get(param)
        if known is None:
            return scipy_sparse().csr_array((rows, self._sizes[param]), dtype=dtype)
        return identity(rows, dtype).csr() if isinstance(known, str) else known.csr()

    def clear(self, key: Key, rows: Any) -> None:
        """Set the tangents of some entries to zero."""
        left = {}
        for param, block in self.blocks(key).items():
            size = self._sizes[key] if isinstance(block, str) else block.shape[0]
            rest = self._without_rows(block, np.arange(size)[rows].reshape(-1), size)
            if rest is not None:
                left[param] = rest
        self._blocks[key] = left

    def compose(self, stages: Iterable[list[StageBlocks]], outer: Callable[[Key], Key]) -> None:
        """Compose the entries of one launch, stage by stage, with the rows before it."""
        versions: dict[Key, list[Any]] = {}

        def before(key: Key, version: int) -> dict[Key, Any] | None:
            made = versions.get(key, [self.blocks(key)])
            return made[version] if version < len(made) else None

        for written in stages:
            keys = [(outer(w.key), w) for w in written]
            keys = [(k, w) for k, w in keys if not self._apart or k in self._apart or isinstance(k, SumKey)]
            products = {key: self._after(w, outer, before) for key, w in keys}
            for key in products.keys() & self._apart.keys():
                del self._apart[key]
                self._apart[key] = products[key]
                products[key] = {key: IDENTITY} if products[key] else {}
            for key, blocks in products.items():
                versions.setdefault(key, [self.blocks(key)]).append(blocks)
            self._blocks.update(products)
        for key in [key for key in self._blocks if isinstance(key, SumKey)]:
            del self._blocks[key]

    def _after(
        self, written: StageBlocks, outer: Callable[[Key], Key], known: Callable[[Any, int], dict[Key, Any] | None]
    ) -> dict[Key, object]:
        terms: dict[Key, list[Any]] = {}
        for owner, (block, data) in written.blocks.items():
            matrix = Matrix(block.pattern, data)
            if block.has_rows:
                matrix = self._arithmetic.without_zeros(block.pattern, data)
            if not isinstance(owner, Version):
                terms.setdefault(outer(owner), []).append(matrix)
                continue
            blocks = known(outer(owner.of), owner.number)
            if blocks is None:  # columns of the row of a local that only a later store gives it
                if matrix.data.any():
                    raise InternalError(f"{written.key} takes a later version of {owner.of}: please report this kernel")
                continue
            for param, before in blocks.items():
                term = matrix if isinstance(before, str) else self._arithmetic.product(matrix, before)
                terms.setdefault(param, []).append(term)
        key = outer(written.key)
        for param, before in self._apart.get(key, self.blocks(key)).items():
            rest = self._without_rows(before, written.stored, written.size)
            if rest is not None:
                terms.setdefault(param, []).append(rest)
        return {param: self._total(matrices) for param, matrices in terms.items()}

    def add_adjoints(self, adjoints: dict[Key, np.ndarray]) -> None:
        """Add to the adjoints of containers that are apart those of what is computed from them, in place."""
        for key, blocks in reversed(self._apart.items()):
            for source in blocks.keys() & adjoints.keys():
                adjoints[source] += blocks[source].view().T @ adjoints[key]

    def _without_rows(self, block: Any, rows: np.ndarray, size: int) -> str | Matrix | None:
        """A block with some rows empty; None if no entry is left."""
        if isinstance(block, str):
            if not len(rows):
                return block
            block = identity(size, np.float64)
        return self._arithmetic.without_rows(block, rows)

    def _total(self, blocks: list[Any]) -> object:
        if len(blocks) == 1:
            return blocks[0]
        known = [b for b in blocks if not isinstance(b, str)]
        eye = identity(known[0].shape[1], np.result_type(*(b.data.dtype for b in known)))
        return self._arithmetic.total([eye if isinstance(b, str) else b for b in blocks])


class ContainerRows:
    """The rows of one container, with the methods that a session uses."""

    is_fresh = False

    def __init__(self, rows: SparseRows, key: Key, note_clear: Callable[[object], None] | None) -> None:
        self._rows = rows
        self._key = key
        self._note_clear = note_clear

    def columns(self, param: Key, count: int) -> np.ndarray:
        """Which columns of a parameter have entries that are not zero."""
        block = self._rows.blocks(self._key).get(param)
        csr = None if block is None or isinstance(block, str) else block.csr()
        if csr is None:
            return np.full(count, block is not None)
        return np.bincount(csr.indices[csr.data != 0], minlength=count) > 0

    def any(self) -> bool:
        return any(isinstance(b, str) or b.nnz for b in self._rows.blocks(self._key).values())

    def clear_rows(self, rows: object) -> None:
        """Set the tangents of some entries to zero."""
        if self._note_clear is not None:
            self._note_clear(self._key)
        self._rows.clear(self._key, rows)


def csr_of(values: np.ndarray) -> object:
    """The entries of a dense matrix that are not zero."""
    return scipy_sparse().csr_array(values.astype(sparse_dtype(values.dtype), copy=False))
