"""One call for a sparse Hessian: the sparse Jacobian of the gradient of an energy, cut into pairs of parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from taichi_ext.api.second_order import SecondOrderEvaluation
from taichi_ext.api.sparse_evaluation import SparseEvaluation
from taichi_ext.api.sparse_results import refuse_too_large
from taichi_ext.differentiate.keys import Key
from taichi_ext.errors import UnsupportedError
from taichi_ext.runtime.memory import available_memory, numpy_dtype
from taichi_ext.runtime.projection import positive_factors
from taichi_ext.runtime.second_order import SparseSecondOrderSession
from taichi_ext.runtime.sparse_matrices import Arithmetic, Matrix, scipy_sparse
from taichi_ext.runtime.sparse_pattern import sparse_dtype
from taichi_ext.runtime.sparse_rows import csr_of


class SparseSecondOrderEvaluation(SparseEvaluation, SecondOrderEvaluation):
    """A call of a ``Hessian`` with ``format=``."""

    _session_type = SparseSecondOrderSession

    @property
    def _row_targets(self) -> list[Any]:
        return self._params

    def _new_session(self, first: int, count: int | None) -> tuple[Any, Any]:
        session, columns = super()._new_session(first, count)
        session.projection = self._projection
        self._run = session
        return session, columns

    def _run_sparse(self) -> list[list[Any]]:
        rows, (gradient,), params = self._run_rows()
        blocks = self._square_of(rows, gradient, params)
        if (
            self._projection == "on_demand"
            and positive_factors(scipy_sparse().block_array(blocks, format="csc")) is None
        ):
            blocks = self._square_of(self._run.project_saved(), gradient, params)
        return blocks

    def _square_of(self, rows: Any, gradient: Any, params: list[Any]) -> list[list[Any]]:
        """A block for each pair of parameters."""
        row = [self._block(rows, gradient, param) for param in params]
        blocks = [[_part(block, rows, inner) for block in row] for rows, inner, _ in self._ranges]
        blocks = blocks if self._run.is_symmetric else _symmetric(blocks)
        return self._fixed.mask_blocks(blocks) if self._fixed else blocks

    def _run_dense(self) -> list[list[Any]]:
        if self._projection is not None:
            raise UnsupportedError(
                f"project={self._projection!r} needs an energy that is a sum of terms of few entries of the params: "
                f"{self._prepared.dense_reason}. Leave out project=."
            )
        size = self.column_count()
        refuse_too_large(self._prepared.dense_reason, size * size, np.dtype(np.float64), available_memory() / 2)
        sizes = list(map(math.prod, self.parameter_shapes()))
        square = self._dense_blocks()
        return [
            [csr_of(block.reshape(m, n)) for block, n in zip(row, sizes, strict=True)]
            for row, m in zip(square, sizes, strict=True)
        ]

    def _wanted(self, session: Any, outputs: list[Any], columns: Any) -> list[tuple[tuple[int, int], Any]]:
        sizes, dtype = [math.prod(shape) for _, shape in columns], self._dtype(session, None)
        return [((m, n), dtype) for m in sizes for n in sizes]

    def _dtype(self, session: Any, key: Key) -> Any:
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
