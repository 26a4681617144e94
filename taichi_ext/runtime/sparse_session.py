"""One evaluation of a sparse Jacobian: each launch gives sparse blocks, which are put together launch by launch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.differentiate.keys import Key, LaunchArray, OwnArray, SumKey
from taichi_ext.differentiate.sparse_columns import Columns, DenseRowsError
from taichi_ext.labels import Label
from taichi_ext.launches import Fused, Role, SparseTarget, container_key
from taichi_ext.runtime.memory import FieldTable, numpy_dtype
from taichi_ext.runtime.regions import View
from taichi_ext.runtime.session import Session
from taichi_ext.runtime.sparse_matrices import Arithmetic
from taichi_ext.runtime.sparse_rows import SparseRows, csr_of
from taichi_ext.runtime.sparse_streams import Streams
from taichi_ext.runtime.state import State


class SparseSession(Session):
    """The tangents of one run; ``columns_of`` tells how columns are numbered, and is kept from run to run."""

    def __init__(self, fields: FieldTable, fused: dict[Any, Fused], is_direct: bool, numbering: Columns) -> None:
        super().__init__(fields, fused, is_direct)
        self.numbering = numbering
        self.outputs: dict[Key, Any] = {}  # sizes by key
        self.make_rows: type[SparseRows] = SparseRows
        self.most_entries = math.inf  # that are not rather computed as dense rows
        self.arithmetic = Arithmetic()
        self.rows = SparseRows(numbering.sizes, self.arithmetic)
        self.launched: Fused | None = None  # the last kernel
        self._streams: Streams | None = None

    def number(self, sizes: dict[Key, int], in_rows: set[Key], composed: dict[Key, int]) -> None:
        """Give the parameters their columns."""
        self.numbering = Columns(sizes, in_rows, dict(composed))
        self.rows = self.make_rows(sizes, self.arithmetic)
        self.arithmetic.begin()
        self.columns = self.numbering.width

    def _note_clear(self, key: Key) -> None:
        """Python is about to store to a parameter: from now on its entries are other columns than at the start."""
        if key not in self.numbering.sizes or key in self.numbering.composed:
            return
        if isinstance(key, View):
            raise DenseRowsError("an array that is a parameter is changed from Python")
        composed = {**self.numbering.composed, key: self.numbering.sizes[key]}
        self._extend(self.numbering.in_rows, composed)

    def _extend(self, in_rows: set[Key], composed: dict[Key, int]) -> None:
        """Number the columns of more containers; kernels that launches repeat may lack the tangents of these."""
        self.numbering = self.numbering.extended(in_rows, composed, {})
        self._changes += 1

    # --- containers

    def seed(self, columns: dict[Key, int]) -> None:
        """Name the parameters; whole fields have columns, also where a component is the parameter."""
        super().seed({container_key(key): column for key, column in columns.items()})

    def open_output(self, key: Key, name: Label | str, rows: int, dtype: Any, place: np.ndarray | None) -> None:
        self.outputs[container_key(key)] = rows

    def tangents(self, key: Key) -> Any:
        """Something whose ``any()`` says whether an output or parameter depends on parameters."""
        return self.rows.of(container_key(key))

    def is_fresh(self, key: Key) -> bool:
        return not self.tangents(key).any()

    def dtype(self, key: Key) -> np.dtype:
        return numpy_dtype(self.info(key).dtype)

    def carries_tangent(self, key: Key) -> bool:
        return self.rows.of(key).any() or super().carries_tangent(key)

    def shadow(self, key: Key) -> Any:
        if key in self.numbering.composed or key in self.outputs or key in self.numbering.sizes:
            return self.rows.of(key, self._note_clear)
        return super().shadow(key)

    def _active_fields(self) -> list[Any]:
        return [*super()._active_fields(), *self.rows.keys()]

    # --- launches

    def _role(self, key: Key) -> Role:
        if isinstance(key, View) and key not in self.numbering.sizes and key not in self.outputs:
            known = [k for k in (*self.numbering.sizes, *self.outputs) if isinstance(k, View)]
            if any(other.overlaps(key) for other in known):
                raise DenseRowsError("two arrays share a part of their memory")
        return super()._role(key)

    def _variant(self, outer: Mapping[Key, Key]) -> Any:
        numbering = self._local(outer)
        ranges = tuple(r for r in numbering.ranges())
        return (ranges, frozenset(numbering.in_rows), self._sinks(outer))

    def _sparse_target(self, outer: Mapping[Key, Key]) -> SparseTarget:
        return SparseTarget(self._local(outer), self._sinks(outer))

    def _sinks(self, outer: Mapping[Key, Key]) -> frozenset[Key]:
        names = {key: local for local, key in outer.items()}
        return frozenset(names.get(key, key) for key in self.outputs)

    def _local(self, outer: Mapping[Key, Key]) -> Columns:
        """The columns with the keys that a trace has for arrays."""
        names = {key: local for local, key in outer.items()}
        numbering = self.numbering
        return Columns(
            {names.get(key, key): size for key, size in numbering.sizes.items()},
            {names.get(key, key) for key in numbering.in_rows},
            {names.get(key, key): size for key, size in numbering.composed.items()},
        )

    def _accept(self, fused: Fused, outer: Mapping[Key, Key]) -> None:
        assert fused.entries is not None
        columns = fused.entries.columns
        in_rows = {outer.get(key, key) for key in columns.in_rows} - self.numbering.in_rows
        composed = {outer.get(k, k): n for k, n in columns.composed.items() if not isinstance(k, SumKey)}
        new = {key: n for key, n in composed.items() if key not in self.numbering.composed}
        if any(isinstance(key, View) for key in new):
            raise DenseRowsError("an array that carries tangents is read and written")
        if in_rows or new:
            before = self.numbering
            self._extend(before.in_rows | in_rows, {**before.composed, **new})
            self.columns = self.numbering.width
            self._renumber(before)

    def _renumber(self, before: Columns) -> None:
        """Rows of tangents that earlier launches have made get the columns of the others, or become sparse."""
        if any(region.shadow is not None for region in self.arrays.regions):
            raise DenseRowsError("an array carries tangents of a parameter whose columns rows come to hold later")
        for key, shadow in list(self.shadows.items()):
            values = shadow.to_numpy()
            now = self.numbering
            places = {p: (before.first(p) or 0, now.first(p) or 0, now.sizes[p]) for p in before.in_rows}
            if key in self.numbering.composed:
                del self.shadows[key]
                blocks = {p: csr_of(values[:, first : first + n]) for p, (first, _, n) in places.items()}
                self.rows.replace(key, blocks)
                continue
            info = self.info(key)
            wider = np.zeros((len(values), self.columns), values.dtype)
            for first, place, n in places.values():
                wider[:, place : place + n] = values[:, first : first + n]
            self.shadows[key] = self.new_shadow(info.name, info.size, info.dtype)
            if not shadow.is_fresh:
                self.shadows[key].set_rows(slice(None), wider)

    def _stream(self, fused: Fused, name: Any) -> Any:
        if self._streams is None:
            self._streams = Streams.of(fused)
            self._refuse_many(self._streams)
            self._streams.begin()
        return self._streams.array(name)

    def _refuse_many(self, streams: Streams) -> None:
        if streams.entries > self.most_entries:
            raise DenseRowsError("rows have nearly as many entries as columns")

    def _run(self, fused: Fused, args: tuple[Any, ...], passed: list[Any]) -> Any:
        """Run the kernel, again where there was too little room for the entries that it counts."""
        self.launched = fused
        if self._streams is None or not self._streams.counts:
            return super()._run(fused, args, passed)
        state = State()
        self._save(state, fused, backend.leaf_values(fused.primal, args))
        self._refuse_repetition(state, fused)
        while True:
            result = super()._run(fused, args, passed)
            if self._streams.has_room():
                return result
            state.undo()
            self._streams.make_room()
            self._refuse_many(self._streams)
            self._streams.begin()
            both = zip(fused.shadows, passed, strict=True)
            passed = [self._stream(fused, k) if isinstance(k, LaunchArray) else p for k, p in both]

    def _refuse_repetition(self, state: State, fused: Fused) -> None:
        """Raise where a kernel that counts its entries cannot be run again."""
        is_lost = any(k in fused.facts.written for k in fused.shadows if not isinstance(k, OwnArray))
        if is_lost or state.has_random:
            raise DenseRowsError(
                "the number of entries is only known after a launch, which cannot be repeated: it draws random "
                "numbers, or writes to rows of tangents"
            )

    def _collect(self, fused: Fused, outer: Mapping[Key, Key]) -> None:
        if not fused.sites:
            return
        streams, self._streams = self._streams or Streams.of(fused), None  # those that only clear rows write nothing
        streams.end()
        stages = (list(streams.blocks(stage)) for stage in streams.stages())
        self.rows.compose(stages, lambda key: outer.get(key, key))

    def finish(self) -> None:
        super().finish()
        if not self.is_direct and any(isinstance(key, View) for key in (*self.numbering.sizes, *self.outputs)):
            raise DenseRowsError("arrays that Python can change are parameters or outputs of a pipeline")
