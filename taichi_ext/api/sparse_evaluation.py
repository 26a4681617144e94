"""One evaluation of a sparse Jacobian; where its rows cannot be sparse, a dense one of which the zeros are left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.evaluation import Evaluation
from taichi_ext.api.results import by_path, refuse_shared_out
from taichi_ext.api.sparse_replay import SparseReplay
from taichi_ext.api.sparse_results import check_out, fill_out, in_format, refuse_too_large
from taichi_ext.differentiate.keys import RETURN, Key
from taichi_ext.differentiate.sparse_columns import Columns, DenseRowsError
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.launches import container_key
from taichi_ext.runtime.memory import available_memory
from taichi_ext.runtime.session import Session
from taichi_ext.runtime.sparse_adjoint import AdjointRows
from taichi_ext.runtime.sparse_pattern import sparse_dtype
from taichi_ext.runtime.sparse_rows import SparseRows, csr_of
from taichi_ext.runtime.sparse_session import SparseSession
from taichi_ext.runtime.state import OverBudgetError, State
from taichi_ext.stages import Stages

FEW_COLUMNS = 64  # of a parameter that rows of tangents hold if rows cannot be sparse otherwise
MOST_COLUMNS = 512  # of all of them


class SparseEvaluation(Evaluation):
    """A call with ``format=``."""

    _session_type: type[SparseSession] = SparseSession
    _make_rows: type[SparseRows] = SparseRows
    _most_entries: float = math.inf

    def jacobian(self) -> Any:
        """J in the structure that was asked for, in ``out`` if that was given."""
        with backend.suspend_following():
            blocks = self.blocks()
            if self._out is None:
                return self._prepared.result(self._in_format(blocks))
            leaves = by_path(self._out, self._prepared.skeleton())
            fill_out(leaves, [matrix for row in blocks for matrix in row])
            return self._out

    @property
    def _format(self) -> str:
        assert self._prepared.format is not None
        return self._prepared.format

    @property
    def _row_targets(self) -> list[Any]:
        """What the rows of the blocks belong to."""
        return self._outputs

    def _in_format(self, blocks: list[list[Any]]) -> list[list[Any]]:
        kind = self._format
        device = self._device() if kind.startswith("torch") else None
        elements = self.elements()
        return [
            [in_format(m, kind, (rows, columns), device) for m, columns in zip(row, elements[1], strict=True)]
            for row, rows in zip(blocks, elements[0], strict=True)
        ]

    def elements(self) -> tuple[list[int], list[int]]:
        """How many numbers an element of each output has, or of what else has rows, and of each parameter."""
        return [self._element(t) for t in self._row_targets], [self._element(t) for t in self._params]

    def _device(self) -> Any:
        for target in self._row_targets:
            value = self.call.value(target) if target.kind in ("argument", "array") else None
            if not backend.is_torch_tensor(value):
                raise InvalidArgumentError(
                    f"format={self._prepared.format!r} gives torch tensors, and {target.name} is no torch tensor; use "
                    "format='csr'."
                )
        return self.call.value(self._row_targets[0]).device

    def _element(self, target: Any) -> int:
        """How many numbers an element of a parameter or output has."""
        if target.kind == "field":
            return math.prod(self._prepared.fields.part(target.field).element_shape)
        if target.kind == "return" or target.variable is not None or self.call.is_value(target):
            return 1
        return math.prod(backend.array_element_shape(self.call.value(target), self.call.annotation(target)))

    # --- runs

    def _may_need_state(self) -> bool:
        return self.call.kernel is None or super()._may_need_state()

    def _session(self) -> Session:
        prepared = self._prepared
        if prepared.dense_reason:
            return super()._session()
        session = self._session_type(prepared.fields, prepared.fused, self.call.kernel is not None, Columns())
        session.make_rows, session.most_entries = self._make_rows, self._most_entries
        session.arithmetic = prepared.arithmetic
        return session

    def _new_session(self, first: int, count: int | None) -> tuple[Any, Any]:
        session, columns = super()._new_session(first, count)
        if isinstance(session, SparseSession):
            keys = self._param_containers(session)
            shapes = (shape for _, shape in columns)
            sizes = {key: self._size(key, shape) for key, shape in zip(keys, shapes, strict=True)}
            in_rows = {keys[n] for n in self._prepared.in_rows}
            session.number(sizes, in_rows, self._prepared.composed)
        return session, columns

    def _run_within_memory(self) -> list[list[Any]]:
        if self._format.startswith("torch"):
            self._device()
        found = self._while_sparse(self._run_sparse)
        return self._run_dense() if found is None else found

    def transposed(self, cotangents: list[np.ndarray], most_entries: float) -> list[np.ndarray | None] | None:
        """The transpose of J times the columns of matrices, one for each output: for each parameter a matrix.

        A matrix is None where it is zero; all is None, and nothing has changed, where rows of J cannot be sparse or a
        kernel writes more entries than this.
        """
        self._make_rows, self._most_entries = AdjointRows, most_entries
        with self._whole(), backend.suspend_following(), Stages(f"Product with the Jacobian of {self.call.name}"):
            if self._state is None and self._may_need_state():
                self._state = State()
            try:
                return self._while_sparse(lambda: self._run_transposed(cotangents))
            except (InvalidArgumentError, UnsupportedError):
                if self._state is not None:
                    self._state.undo()
                raise

    def _while_sparse(self, run: Callable[[], Any]) -> Any:
        """The result of a run; None, at the state before it, where rows cannot be sparse."""
        if any(map(self.call.is_passed_number, self._params)):
            self._prepared.dense_reason = "a number that the pipeline takes is a parameter"
        while not self._prepared.dense_reason:
            try:
                return run()
            except DenseRowsError as error:
                reason = str(error)
                if not self._put_in_rows():
                    self._prepared.dense_reason = reason
            except OverBudgetError:
                reason = self._prepared.dense_reason = "the rows of tangents do not fit into max_memory"
            self._restore(reason)
        return None

    def _put_in_rows(self) -> bool:
        """Let rows of tangents hold the columns of small parameters; False where they have been tried."""
        prepared = self._prepared
        if prepared.is_in_rows:
            return False
        prepared.is_in_rows = True
        sizes = [math.prod(shape) for _, shape in self._new_session(0, None)[1]]
        small = {n for n, size in enumerate(sizes) if size <= FEW_COLUMNS}
        if not small or sum(sizes[n] for n in small) > MOST_COLUMNS:
            return False
        prepared.in_rows |= small
        prepared.composed.clear()
        return True

    def _restore(self, reason: str) -> None:
        """The state before a run that came to where its tangents cannot be kept sparse."""
        if self._state is not None:
            self._state.reason = f"The run has to begin again with dense tangents, because {reason}"
            self._state.advice = f"Leave out format={self._prepared.format!r}."
            self._state.restore()

    def _run_sparse(self) -> list[list[Any]]:
        rows, outputs, params = self._run_rows()
        return [[self._block(rows, output, param) for param in params] for output in outputs]

    def _block(self, rows: Any, output: tuple[Any, int, Any], param: Key) -> Any:
        """The block of an output and a parameter: of components the rows and columns that are theirs."""
        key, size, dtype = output
        block = rows.block(container_key(key), container_key(param), size, dtype)
        for axis, part in enumerate((key, param)):
            if part != container_key(part):
                block = block[self._rows_of(part)] if axis == 0 else block[:, self._rows_of(part)]
        return block

    def _run_transposed(self, cotangents: list[np.ndarray]) -> list[np.ndarray | None]:
        rows, outputs, params = self._run_rows()
        given: dict[Key, Any] = {}
        for (part, size, _), matrix in zip(outputs, cotangents, strict=True):
            key, whole = container_key(part), matrix
            if part != key:
                whole = np.zeros((size, matrix.shape[1]), matrix.dtype)
                whole[self._rows_of(part)] = matrix
            given[key] = given[key] + whole if key in given else whole
        gradient = rows.times(given)
        found = ((key, gradient.get(container_key(key))) for key in params)
        return [None if matrix is None else matrix[self._rows_of(key)] for key, matrix in found]

    def _run_rows(self) -> tuple[Any, list[tuple[Any, int, Any]], list[Any]]:
        """The rows after a run; of each output the key, the size of its container, the type; the parameters' keys."""
        prepared = self._prepared
        is_simple = self._is_simple()
        if is_simple and isinstance(prepared.replay, SparseReplay):
            args = self.call.full_args
            rows = prepared.replay.run(args, self._make_rows, prepared.arithmetic, self._most_entries)
            if rows is not None:
                return rows, prepared.replay.outputs, prepared.replay.params
        session, found = self._run_session()
        outputs = [(key, self._size(key, shape), self._dtype(session, key)) for key, shape in found]
        params = [self._key(session, target) for target in self._params]
        if is_simple and all(target.kind == "field" for target in self._outputs):
            prepared.replay = SparseReplay.of(session, outputs, params)
        return session.rows, outputs, params

    def _is_simple(self) -> bool:
        """Whether the launch may be repeated without a session."""
        is_alone = self.call.kernel is not None and not self.call.args and self._watch is None
        return is_alone and self._out is None and self._state is None

    def _run_session(self) -> tuple[Any, list[Any]]:
        """A run: its session, the keys and shapes of the outputs."""
        session, columns = self._new_session(0, None)
        try:
            outputs = [self._open_output(session, target, None) for target in self._outputs]
            self._check_out(session, outputs, columns)
            self._launch(session, [key for key, _ in outputs])
        finally:
            keys = self._param_containers(session)
            self._prepared.in_rows |= {n for n, key in enumerate(keys) if key in session.numbering.in_rows}
            self._prepared.composed.update(session.numbering.composed)
        return session, outputs

    def _run_dense(self) -> list[list[Any]]:
        session, columns = self._new_session(0, None)
        rows = [self._rows(session, target) for target in self._outputs]
        entries = sum(rows) * sum(math.prod(shape) for _, shape in columns)
        refuse_too_large(self._prepared.dense_reason, entries, np.dtype(np.float64), available_memory() / 2)
        dense = self._dense_blocks()
        return [
            [csr_of(block.reshape(n, math.prod(shape))) for block, (_, shape) in zip(row, columns, strict=True)]
            for row, n in zip(dense, rows, strict=True)
        ]

    def _dense_blocks(self) -> list[list[np.ndarray]]:
        return super()._run_within_memory()

    def _rows(self, session: Session, target: Any) -> int:
        if target.kind == "return":
            return math.prod(self.call.return_shape())
        return math.prod(self._container(session, target)[1])

    def _dtype(self, session: Session, key: Key) -> Any:
        dtype = backend.to_numpy_type(self.call.return_dtype()) if key == RETURN else session.dtype(key)
        return sparse_dtype(dtype)

    def _places(self) -> list[Any]:
        return [None] * len(self._outputs)

    def _check_out(self, session: Session, outputs: list[Any], columns: Any) -> None:
        if self._out is None:
            return
        wanted = self._wanted(session, outputs, columns)
        numbers = check_out(by_path(self._out, self._prepared.skeleton()), wanted)
        refuse_shared_out(numbers, self._containers())

    def _wanted(self, session: Session, outputs: list[Any], columns: Any) -> list[tuple[tuple[int, int], Any]]:
        """The shape and type of each block."""
        return [
            ((math.prod(shape), math.prod(p)), self._dtype(session, key)) for key, shape in outputs for _, p in columns
        ]

    def _is_repeatable(self, session: Session, outputs: list[Any]) -> bool:
        return False
