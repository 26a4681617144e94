"""J as sparse arrays; if its rows cannot be sparse, they are computed densely and zeros are dropped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.results import Layout, Placed, joined
from taichi_ext.api.inputs.sparse_results import check_out, fill_out, in_format
from taichi_ext.api.runs.by_adjoint import HessianForm
from taichi_ext.api.runs.evaluation import DenseForm, Evaluation, StoresFoundError
from taichi_ext.api.runs.replay import Replay
from taichi_ext.api.runs.subject import EnergyGradient
from taichi_ext.differentiate.forms.entry_sites import DenseRowsError, IntermediatesError, SparseColumns
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.launches import TERMS_GRADIENT, FieldKey, container_key
from taichi_ext.program.keys import Key
from taichi_ext.runtime.launching.sparse_target import ProjectedEntries, SparseEntries
from taichi_ext.runtime.memory.shadows import OverBudgetError, Shadow, check_fits, numpy_dtype
from taichi_ext.runtime.memory.state import State
from taichi_ext.runtime.sparse.matrices import positive_factors, scipy_sparse
from taichi_ext.runtime.sparse.pattern import sparse_dtype
from taichi_ext.runtime.sparse.rows import SparseRows, csr_of
from taichi_ext.runtime.sparse.streams import Streams

FEW_COLUMNS = 64  # of one parameter, held in rows of tangents if rows cannot be sparse otherwise
MOST_COLUMNS = 512  # of all such parameters


class SparseForm(DenseForm):
    """J as sparse arrays."""

    may_begin_again = True
    keeps_launch = False  # of rows that are dense, although J is sparse

    def check_out(self, evaluation: Evaluation) -> list[tuple[str, object]]:
        layout = evaluation.layout
        return check_out(self.leaves(evaluation), self.wanted(layout, evaluation.subject.wanted_sparse(layout)))

    def result(self, evaluation: Evaluation, blocks: Sequence[Sequence[object]]) -> Any:
        layout, rows = evaluation.layout, evaluation.subject.rows(evaluation.layout)
        elements = [[(o.element, p.element) for p in layout.params] for o in rows]
        if self.as_matrix:
            blocks, elements = [[joined(blocks, layout)]], [[(1, 1)]]
        if evaluation.out is not None:
            fill_out(self.leaves(evaluation), [matrix for row in blocks for matrix in row])
            return evaluation.out
        kind, device = evaluation.prepared.format, _device(evaluation)
        assert kind is not None
        formatted = [
            [in_format(matrix, kind, element, device) for matrix, element in zip(row, sizes, strict=True)]
            for row, sizes in zip(blocks, elements, strict=True)
        ]
        return formatted[0][0] if self.as_matrix else evaluation.prepared.question.result(formatted)

    def repeated(self, evaluation: Evaluation) -> Any:
        with evaluation.whole():
            result = self._launched_again(evaluation)
            if result is None:
                return None
            block, is_symmetric = partial(_block, result[0]), result[1].is_symmetric
            blocks = evaluation.subject.of_sparse(block, evaluation.layout, is_symmetric=is_symmetric)
        return self.result(evaluation, blocks)

    def blocks(self, evaluation: Evaluation) -> list[list[Any]]:
        _device(evaluation)
        sparse = evaluation.prepared.sparse
        if evaluation.layout.passed:
            sparse.dense_reason = "a number that the pipeline takes is a parameter"
        while not sparse.dense_reason:
            try:
                return self._sparse_blocks(evaluation)
            except DenseRowsError as error:
                reason = str(error)
                intermediates = self._composed(evaluation, error)
                sparse.of_energy.update(intermediates)
                if not intermediates and not _put_in_rows(evaluation):
                    sparse.dense_reason = reason
            except StoresFoundError:
                continue
            except OverBudgetError:
                reason = sparse.dense_reason = (
                    "tangents of fields between params and outputs do not fit into max_memory"
                )
            if evaluation.state is not None:
                again = f"The run has to begin again with dense tangents, because {reason}"
                evaluation.restore(again, f"Leave out format={evaluation.prepared.format!r}.")
        return self._dense_blocks(evaluation)

    def _composed(self, evaluation: Evaluation, error: DenseRowsError) -> Mapping[Any, int]:
        """The fields that an energy is computed from, if that can be composed with what they are computed from."""
        if not isinstance(error, IntermediatesError):
            return {}
        params = {p.container for p in evaluation.layout.params}
        is_known = error.sizes.keys() <= evaluation.prepared.sparse.of_energy.keys()
        return {} if is_known or error.sizes.keys() & params else error.sizes

    def _sparse_blocks(self, evaluation: Evaluation) -> list[list[object]]:
        subject, layout, intermediates = evaluation.subject, evaluation.layout, evaluation.prepared.sparse.of_energy
        evaluation.log.begin()
        if not intermediates:
            rows, launch = self._launched_again(evaluation) or self._run(evaluation)
            return subject.of_sparse(partial(_block, rows), layout, is_symmetric=launch.is_symmetric)
        adjoints = self._adjoints(evaluation, intermediates)
        rows, _ = self._run(evaluation, adjoints)

        def block(output: Placed, param: Placed) -> Any:
            both = (replace(output, key=key) for key in (output.key, TERMS_GRADIENT))
            total = sum(_block(rows, each, param, sum(intermediates.values())) for each in both)
            return _of_params(total, rows, layout, intermediates)

        return subject.of_sparse(block, layout, is_symmetric=False)

    def _launched_again(self, evaluation: Evaluation) -> tuple[SparseRows, Replay] | None:
        """The rows after a launch like that of the call before, and that; None if there is no such launch."""
        prepared, subject, replay = evaluation.prepared, evaluation.subject, evaluation.prepared.replay
        if replay is None or not _is_simple(evaluation) or prepared.sparse.of_energy:
            return None
        if bool(replay.fused.first_order) != subject.has_gradient or not replay.is_current:
            return None
        prepared.sparse.arithmetic.begin()
        rows = SparseRows(replay.layout.sizes, prepared.sparse.arithmetic)
        subject.note_gradients(replay.sparse(evaluation.call.full_args, rows))
        return rows, replay

    def _run(
        self, evaluation: Evaluation, adjoints: Shadow | None = None, apart: frozenset[Key] = frozenset()
    ) -> tuple[SparseRows, SparseEntries]:
        """The rows after a run, and the target that computed them.

        With adjoints, there are two runs; the first one keeps the rows of the fields that an energy is computed from
        ``apart``.
        """
        prepared, sparse, layout = evaluation.prepared, evaluation.prepared.sparse, evaluation.layout
        sparse.arithmetic.begin()
        keys = [p.container for p in layout.params]
        sizes = layout.sizes
        in_rows = {keys[n] for n in sparse.in_rows}
        numbering = SparseColumns(sizes, in_rows, {**sparse.intermediates, **sparse.of_energy})
        containers = frozenset(container_key(output.key) for output in evaluation.subject.outputs(layout))
        containers |= {TERMS_GRADIENT} if adjoints is not None else set()
        rows = SparseRows(sizes, sparse.arithmetic, apart)
        target = self._target(numbering, containers, rows, sparse.of_energy, adjoints)
        try:
            session, _ = evaluation.run(target, 0, layout.count, is_repeated=bool(apart))
        finally:
            sparse.in_rows |= {n for n, key in enumerate(keys) if key in target.numbering.in_rows}
            sparse.intermediates.update(target.numbering.intermediates)
        if _is_simple(evaluation) and all(o.target.kind == "field" for o in layout.outputs):
            prepared.replay = _replay(layout, target, session.tangents.shadows)
        return rows, target

    def _target(self, *entries: Any) -> SparseEntries:
        """What takes the entries of a run."""
        return SparseEntries(*entries)

    def _adjoints(self, evaluation: Evaluation, intermediates: Mapping[Any, int]) -> Shadow:
        """The derivatives of an energy with respect to the fields it is computed from, by a separate run."""
        subject, (energy,) = evaluation.subject, evaluation.layout.outputs
        assert isinstance(subject, EnergyGradient)
        evaluation.state = evaluation.state or State()
        first = sum(evaluation.layout.sizes.values())
        adjoints = Shadow("adjoints", 1, first + sum(intermediates.values()), energy.dtype)
        rows, _ = self._run(evaluation, adjoints, frozenset(intermediates))
        ends = np.cumsum([first, *intermediates.values()])
        rows.add_adjoints(dict(zip(intermediates, np.split(subject.gradient, ends)[1:-1], strict=True)))
        subject.gradient[:first] = 0
        adjoints.set_rows(slice(None), subject.gradient)
        again = "The energy is computed from fields that kernels compute, which takes a second run"
        evaluation.restore(again, f"Leave out format={evaluation.prepared.format!r}.")
        return adjoints

    def _dense_blocks(self, evaluation: Evaluation) -> list[list[object]]:
        reason = evaluation.prepared.sparse.dense_reason
        rows, params = evaluation.subject.rows(evaluation.layout), evaluation.layout.params
        entries = sum(o.size for o in rows) * evaluation.layout.count
        form = HessianForm() if isinstance(evaluation.subject, EnergyGradient) else DenseForm()
        advice = "Rewrite that part of the kernel, allow more max_memory=, or use fewer parameters."
        check_fits(f"{reason}, so J has to be computed dense:", 8 * entries, advice, share=0.5)
        return [
            [csr_of(block.reshape(o.size, p.size)) for block, p in zip(row, params, strict=True)]
            for row, o in zip(form.blocks(evaluation), rows, strict=True)
        ]


class ProjectedForm(SparseForm):
    """A sparse Hessian whose blocks of elements are made positive semidefinite, see ``Projection``."""

    def __init__(self, projection: str) -> None:
        super().__init__()
        self._projection = projection

    def _target(self, *entries: Any) -> SparseEntries:
        return ProjectedEntries(self._projection, *entries)

    def _composed(self, evaluation: Evaluation, error: DenseRowsError) -> Mapping[Any, int]:
        return {}  # blocks of elements are those of intermediates, too

    def _launched_again(self, evaluation: Evaluation) -> None:
        return None

    def _sparse_blocks(self, evaluation: Evaluation) -> list[list[object]]:
        subject, layout = evaluation.subject, evaluation.layout
        evaluation.log.begin()
        rows, target = self._run(evaluation)
        blocks = subject.of_sparse(partial(_block, rows), layout, is_symmetric=target.is_symmetric)
        assert isinstance(target, ProjectedEntries)
        if target.indefinite and positive_factors(scipy_sparse().block_array(blocks, format="csr")) is None:
            rows = target.project_saved(evaluation.prepared.sparse.arithmetic)
            blocks = subject.of_sparse(partial(_block, rows), layout, is_symmetric=target.is_symmetric)
        return blocks

    def _dense_blocks(self, evaluation: Evaluation) -> list[list[object]]:
        raise UnsupportedError(
            f"project={self._projection!r} needs an energy that is a sum of terms of few entries of the params: "
            f"{evaluation.prepared.sparse.dense_reason}. Leave out project=."
        )


def _block(rows: SparseRows, output: Placed, param: Placed, more: int = 0) -> Any:
    """The block of an output and a parameter; ``more`` is how many rows follow those of the output."""
    dtype = sparse_dtype(numpy_dtype(output.dtype))
    block = rows.block(container_key(output.key), param.container, output.rows + more, dtype)
    return block if param.inner == slice(None) else block[:, param.inner]


def _of_params(block: Any, rows: SparseRows, layout: Layout, intermediates: Mapping[object, int]) -> object:
    """The rows of the parameters, from the rows of the parameters and of the intermediate fields."""
    sizes = layout.sizes
    first = sum(sizes.values())
    along = [
        [rows.block(key, container, size, block.dtype) for container in sizes] for key, size in intermediates.items()
    ]
    total = (block[:first] + scipy_sparse().block_array(along, format="csr").T @ block[first:]).tocsr()
    total.sort_indices()
    return total


def _put_in_rows(evaluation: Evaluation) -> bool:
    """Put the columns of small parameters into rows of tangents; False if they are too many, or are there already."""
    sparse, sizes = evaluation.prepared.sparse, [p.size for p in evaluation.layout.params]
    small = {n for n, size in enumerate(sizes) if size <= FEW_COLUMNS}
    if small <= sparse.in_rows or sum(sizes[n] for n in small) > MOST_COLUMNS:
        return False
    sparse.in_rows |= small
    sparse.intermediates.clear()
    return True


def _is_simple(evaluation: Evaluation) -> bool:
    """Whether a call can be made without a session, and its run need not be undone."""
    return evaluation.is_repeatable and evaluation.out is None and evaluation.state is None


def _replay(layout: Layout, target: SparseEntries, shadows: Mapping[Key, Shadow]) -> Replay | None:
    """The launch of a run, if the next one has as many entries, and tangents that begin at zero."""
    fused = target.launched
    if fused is None or Streams.of(fused).counts:
        return None
    own = {*target.numbering.sizes, *target.outputs}  # begin as seeds, or are kept in the target
    fields = [key for key in fused.shadows if isinstance(key, FieldKey) and key not in own]
    tangents: dict[Key, Any] = {key: ((max(1, math.prod(shadows[key].shape)),), shadows[key].dtype) for key in fields}
    return Replay.of(fused, layout, tangents)


def _device(evaluation: Evaluation) -> object:
    """The device of the tensors, for a torch format; raises if the rows do not belong to tensors."""
    call, kind = evaluation.call, evaluation.prepared.format
    if kind is None or not kind.startswith("torch"):
        return None
    targets = [o.target for o in evaluation.subject.rows(evaluation.layout)]
    for target in targets:
        value = call.value(target) if target.kind in ("argument", "array") else None
        if not backend.is_torch_tensor(value):
            raise InvalidArgumentError(
                f"format={kind!r} gives torch tensors, and {target.name} is not a torch tensor; use format='csr'."
            )
    return call.value(targets[0]).device
