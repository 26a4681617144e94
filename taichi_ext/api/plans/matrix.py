"""J as one matrix: a row for each entry of the outputs, a column for each entry of the params, all in C order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs import sparse_results
from taichi_ext.api.inputs.results import as_torch, check_out, check_out_is_separate, fill_out
from taichi_ext.api.runs.evaluation import Evaluation
from taichi_ext.api.runs.prepared import Prepared
from taichi_ext.errors import InvalidArgumentError, shown
from taichi_ext.runtime.sparse.matrices import scipy_sparse
from taichi_ext.runtime.sparse.pattern import sparse_dtype


def check_as_matrix(as_matrix: object, format: str | None) -> None:
    """Raise for a value of ``as_matrix=`` that cannot be used, or not with this format."""
    if not isinstance(as_matrix, bool):
        raise InvalidArgumentError(f"as_matrix is {shown(as_matrix)}; expected True or False.")
    if as_matrix and format == "bsr":
        raise InvalidArgumentError(
            "format='bsr' needs blocks of one size, and as_matrix=True puts outputs and params with elements of "
            "different sizes into one matrix. Use format='csr'."
        )


def matrix_of(evaluation: Evaluation, prepared: Prepared, out: object = None) -> Any:
    """J of a call as one matrix, in ``out`` if that is given."""
    (rows, columns), dtype = _shape(evaluation), np.result_type(*(t for _, t in evaluation.output_shapes()))
    outputs, kind = [evaluation.call.current(t) for t in prepared.outputs], prepared.format
    if out is not None:
        fields = [t.field for t in (*map(evaluation.call.current, prepared.params), *outputs) if t.field is not None]
        leaves, others = [("", out)], [*fields, *evaluation.call.args]
        if kind is None:
            check_out(leaves, [((rows, columns), dtype)])
            check_out_is_separate(leaves, others)
        else:
            numbers = sparse_results.check_out(leaves, [((rows, columns), sparse_dtype(dtype))])
            check_out_is_separate(numbers, others)
    with backend.suspend_following():
        matrix = joined(evaluation, evaluation.blocks())
    if kind is None:
        return as_torch(matrix, evaluation.call, outputs) if out is None else fill_out(out, matrix)
    if out is not None:
        sparse_results.fill_out([("", out)], [matrix])
        return out
    device = evaluation.call.value(outputs[0]).device if kind.startswith("torch") else None
    return sparse_results.in_format(matrix, kind, (1, 1), device)


def joined(evaluation: Evaluation, blocks: Sequence[Sequence[object]]) -> Any:
    """The blocks of J, one for each pair of output and parameter, as one matrix: an array or CSR."""
    if not isinstance(blocks[0][0], np.ndarray):
        if len(blocks) == len(blocks[0]) == 1:
            return blocks[0][0]
        return scipy_sparse().block_array(blocks, format="csr")
    sizes = [math.prod(shape) for shape, _ in evaluation.output_shapes()]
    widths = [math.prod(shape) for shape in evaluation.parameter_shapes()]
    parts = [
        [np.asarray(block).reshape(size, width) for block, width in zip(row, widths, strict=True)]
        for row, size in zip(blocks, sizes, strict=True)
    ]
    return parts[0][0] if len(sizes) == len(widths) == 1 else np.block(parts)


def _shape(evaluation: Evaluation) -> tuple[int, int]:
    rows = sum(math.prod(shape) for shape, _ in evaluation.output_shapes())
    return rows, sum(map(math.prod, evaluation.parameter_shapes()))
