"""One call for a sparse Hessian: the sparse Jacobian of the gradient of an energy, cut into pairs of parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from taichi_ext.api.second_order import SecondOrderEvaluation
from taichi_ext.api.sparse_evaluation import SparseEvaluation
from taichi_ext.api.sparse_results import refuse_too_large
from taichi_ext.runtime.memory import available_memory, numpy_dtype
from taichi_ext.runtime.second_order import SparseSecondOrderSession
from taichi_ext.runtime.sparse_matrices import Arithmetic, Matrix
from taichi_ext.runtime.sparse_pattern import sparse_dtype
from taichi_ext.runtime.sparse_rows import csr_of


class SparseSecondOrderEvaluation(SparseEvaluation, SecondOrderEvaluation):
    """A call of a ``Hessian`` with ``format=``."""

    _session_type = SparseSecondOrderSession

    @property
    def _row_targets(self) -> list[Any]:
        return self._params

    def _run_sparse(self) -> list[list[Any]]:
        ((row,), is_symmetric) = super()._run_sparse(), self._is_symmetric
        blocks = [[_part(block, rows, inner) for block in row] for rows, inner, _ in self._ranges]
        return blocks if is_symmetric else _symmetric(blocks)

    def _run_session(self) -> tuple[Any, list[Any]]:
        session, outputs = super()._run_session()
        self._is_symmetric = session.is_symmetric()
        return session, outputs

    def _run_dense(self) -> list[list[Any]]:
        size = self.column_count()
        refuse_too_large(self._prepared.dense_reason, size * size, np.dtype(np.float64), available_memory() / 2)
        sizes = list(map(math.prod, self.parameter_shapes()))
        square = self._square(self._dense_blocks())
        return [
            [csr_of(block.reshape(m, n)) for block, n in zip(row, sizes, strict=True)]
            for row, m in zip(square, sizes, strict=True)
        ]

    def _wanted(self, session: Any, outputs: list[Any], columns: Any) -> list[tuple[tuple[int, int], Any]]:
        sizes, dtype = [math.prod(shape) for _, shape in columns], self._dtype(session, None)
        return [((m, n), dtype) for m in sizes for n in sizes]

    def _dtype(self, session: Any, key: Any) -> Any:
        return sparse_dtype(numpy_dtype(self._energy_dtype(session)))

    def _is_simple(self) -> bool:
        return False


def _part(block: Any, rows: slice, inner: slice) -> Any:
    """The rows of a parameter, and those of them that belong to a component; slices of CSR arrays are copies."""
    found = block if rows == slice(0, block.shape[0]) else block[rows]
    return found if inner == slice(None) else found[inner]


def _symmetric(blocks: list[list[Any]]) -> list[list[Any]]:
    """The mean of a matrix and its transpose, block by block."""
    result = [list(row) for row in blocks]
    for n, row in enumerate(blocks):
        for m in range(n, len(row)):
            mirrored = blocks[m][n].T.tocsr()
            mirrored.sort_indices()
            mean = Arithmetic().total([Matrix.of(row[m]), Matrix.of(mirrored)])
            result[n][m] = Matrix(mean.pattern, 0.5 * mean.data).csr()
            result[m][n] = result[n][m] if n == m else result[n][m].T.tocsr()
    return result
