"""The shortest way to repeat a launch for a sparse Jacobian: one kernel without arguments, and fields alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.boundary.registry import registry
from taichi_ext.differentiate.keys import Key, OwnArray, Scratch, SiteArray
from taichi_ext.launches import FieldKey, Fused, Relaunch
from taichi_ext.runtime.sparse_matrices import Arithmetic
from taichi_ext.runtime.sparse_rows import SparseRows
from taichi_ext.runtime.sparse_session import SparseSession
from taichi_ext.runtime.sparse_streams import Streams

MOST_KEPT = 2**24  # bytes of tangents that are kept from call to call


@dataclass
class SparseReplay:
    """A launch whose every decision was taken at the call before.

    Attributes:
        fused: the kernel.
        sizes: how many entries each parameter has, by key.
        tangents: the shape and type of each matrix of tangents that it is passed, by key.
        outputs: the key, size and type of each output.
        params: the key of each parameter.
    """

    fused: Fused
    sizes: dict[Key, int]
    tangents: dict[Key, tuple[tuple[int, int], np.dtype]]
    outputs: list[tuple[Any, int, Any]]
    params: list[Any]

    def __post_init__(self) -> None:
        self._launch = Relaunch(self.fused)
        self._kept: dict[Any, np.ndarray] = {}  # tangents, the same memory in each call

    @staticmethod
    def of(session: SparseSession, outputs: list[Any], params: list[Any]) -> SparseReplay | None:
        """The launch of a session; None where the next one may be another, or takes tangents that are not zero."""
        fused = session.launched
        if fused is None or Streams.of(fused).counts or backend.stores_by_column():
            return None
        passed = [key for key in fused.shadows if not isinstance(key, OwnArray)]
        sparse = {*session.numbering.sizes, *session.outputs}
        if any(not isinstance(key, FieldKey) or key in sparse for key in passed):
            return None
        shadows = {key: session.shadows[key] for key in passed}
        tangents = {key: (shadow.shape, shadow.dtype) for key, shadow in shadows.items()}
        return SparseReplay(fused, dict(session.numbering.sizes), tangents, outputs, params)

    def run(
        self, args: tuple[Any, ...], make_rows: type[SparseRows], arithmetic: Arithmetic, most_entries: float
    ) -> SparseRows | None:
        """The rows after a launch; None, before it, where something is not as it was at the call before.

        ``args`` holds the object that the kernel is bound to.
        """
        streams = Streams.of(self.fused)
        if self.fused.memory.rules_version != registry.version or streams.entries > most_entries:
            return None
        self.fused.refuse_changed()
        streams.begin()
        self._launch(args, [self._array(streams, key) for key in self.fused.shadows], self._kept)
        streams.end()
        arithmetic.begin()
        rows = make_rows(self.sizes, arithmetic)
        rows.compose((list(streams.blocks(stage)) for stage in streams.stages()), lambda key: key)
        return rows

    def _array(self, streams: Streams, key: Key) -> Any:
        if isinstance(key, SiteArray):
            return streams.array(key)
        if isinstance(key, Scratch):
            return self.fused.memory.scratch[key].array
        is_covered = key in self.fused.facts.covered
        if key in self._kept:
            if not is_covered:
                self._kept[key].fill(0)
            return self._kept[key]
        shape, dtype = self.tangents[key]
        size = max(1, math.prod(shape))
        array = np.empty(size, dtype) if is_covered else np.zeros(size, dtype)
        if array.nbytes + sum(a.nbytes for a in self._kept.values()) <= MOST_KEPT:
            self._kept[key] = array
        return array
