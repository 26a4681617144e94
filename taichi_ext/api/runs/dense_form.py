"""J as dense arrays, in as few runs as memory allows."""

from __future__ import annotations

from typing import Any

import numpy as np

from taichi_ext.api.inputs.layout import Layout, joined
from taichi_ext.api.inputs.progress import progress_bar
from taichi_ext.api.inputs.results import as_torch, by_path, check_out, fill_out
from taichi_ext.api.runs.evaluation import Evaluation, StoresFoundError
from taichi_ext.api.runs.replay import Replay
from taichi_ext.api.runs.subject import Shapes
from taichi_ext.runtime.launching.tangents import DenseRows
from taichi_ext.runtime.memory.shadows import OverBudgetError


class DenseForm:
    """J as dense arrays; ``as_matrix``: as one matrix over all outputs and parameters."""

    is_sparse = False

    def __init__(self, *, as_matrix: bool = False) -> None:
        self.as_matrix = as_matrix

    def leaves(self, evaluation: Evaluation) -> list[tuple[str, Any]]:
        """The arrays of ``out``."""
        return by_path(evaluation.out, 0 if self.as_matrix else evaluation.prepared.question.skeleton())

    def wanted(self, layout: Layout, shapes: Shapes) -> Shapes:
        """The shapes and types of these arrays, from those of the blocks."""
        if not self.as_matrix:
            return shapes
        return [((sum(o.size for o in layout.outputs), layout.count), np.result_type(*(t for _, t in shapes)))]

    def check_out(self, evaluation: Evaluation) -> list[tuple[str, object]]:
        """Raise, before anything runs, for an ``out`` that cannot take the blocks; returns the arrays to fill."""
        leaves, layout = self.leaves(evaluation), evaluation.layout
        check_out(leaves, self.wanted(layout, evaluation.subject.wanted(layout)))
        return leaves

    def blocks(self, evaluation: Evaluation) -> list[list[Any]]:
        """The blocks of J: all columns, in as few runs as memory allows."""
        prepared, total = evaluation.prepared, evaluation.column_count()
        while True:
            parts: list[list[np.ndarray]] = []
            is_whole, count = evaluation.least_runs == 1, max(1, -(-total // evaluation.least_runs))
            places = evaluation.places() if is_whole else None
            progress = False if is_whole else evaluation.progress
            try:
                with progress_bar(progress, f"Columns of J, {evaluation.call.name}", total) as advance:
                    for first in range(0, max(1, total), count):
                        if first:
                            evaluation.restore()
                        is_repeated = first + count < total
                        parts.append(evaluation.run(DenseRows(), first, count, places, is_repeated=is_repeated)[1])
                        advance(count)
            except StoresFoundError:
                evaluation.restore()
                continue
            except OverBudgetError:
                evaluation.least_runs *= 2
                evaluation.restore()
                prepared.blocks = max(prepared.blocks, evaluation.least_runs)
                continue
            prepared.note_fit(evaluation.sizes)
            if is_whole and not evaluation.form.is_sparse and evaluation.subject.has_rows_of_outputs:
                kernels = list(prepared.fused.values()) if evaluation.is_repeatable else []
                prepared.replay = Replay.of_field(kernels, evaluation.layout)
            found = _apart(parts[0]) if is_whole else [np.concatenate(v, axis=1) for v in zip(*parts, strict=True)]
            return evaluation.subject.of_dense(found, evaluation.layout)

    def repeated(self, evaluation: Evaluation) -> Any:
        """J by a launch like that of the call before; None if there is no such launch."""
        replay, out = evaluation.prepared.replay, evaluation.out
        if replay is None or replay.is_sparse or not evaluation.is_repeatable or not replay.launch.is_current():
            return None
        found = replay.dense(evaluation.call.full_args, out)
        return self.structured(evaluation, [[found]]) if out is None and found is not None else found

    def structured(self, evaluation: Evaluation, blocks: list[list[Any]]) -> Any:
        """The blocks as one matrix, or in the structure of the outputs and params."""
        question = evaluation.prepared.question
        return joined(blocks, evaluation.layout) if self.as_matrix else question.result(blocks)

    def result(self, evaluation: Evaluation, blocks: list[list[object]]) -> Any:
        """The blocks as ``structured``, in ``out`` if that was given."""
        result = self.structured(evaluation, blocks)
        if evaluation.out is not None:
            return fill_out(evaluation.out, result)
        return as_torch(result, evaluation.call, [o.target for o in evaluation.layout.outputs])


def _apart(values: list[np.ndarray]) -> list[np.ndarray]:
    """The same values, with separate memory for an output that is named twice."""
    if len(values) == 1:
        return values
    is_shared = [any(np.may_share_memory(v, other) for other in values[:n]) for n, v in enumerate(values)]
    return [v.copy() if shared else v for v, shared in zip(values, is_shared, strict=True)]
