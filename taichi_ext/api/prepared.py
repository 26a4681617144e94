"""What the calls of one Jacobian share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from taichi_ext import backend
from taichi_ext.api.arguments import KernelCall, Target, refuse_ended
from taichi_ext.api.replay import Replay
from taichi_ext.api.sparse_replay import SparseReplay
from taichi_ext.launches import Fused
from taichi_ext.runtime.memory import FieldTable
from taichi_ext.runtime.sparse_matrices import Arithmetic

_MOST_SIZES = 256  # combinations of shapes that are remembered


@dataclass(kw_only=True)
class Prepared:
    """Everything that the calls of one Jacobian share, whatever the thread: nothing in it belongs to one call.

    Attributes:
        params: the parameters.
        outputs: the outputs.
        rebuild_params: puts the blocks of one output into the structure of the parameters.
        rebuild_outputs: puts what belongs to each output into the structure of the outputs.
        limit: bytes for tangents other than J; None for a share of what is free.
        strategy: how tangents of locals are stored.
        fields: the fields that the kernels use.
        fused: the kernels with tangents.
        chunk_size: how many columns are computed in one run at most; None for all of them.
        blocks: in how many runs the columns are computed at least.
        sizes_that_fit: the shapes of arguments for which a call has been within the memory that was free.
        layout: the version of the layout of all fields that the kernels were built for.
        is_checked: whether a run has shown that every parameter is read and every output written.
        rules_seen: the version of the registry at the last check of its marks.
        replay: the shortest way to repeat a launch, where there is one.
        format: of sparse Jacobians; None for dense ones.
        dense_reason: why rows of all columns are computed although the result is sparse; empty where they are not.
        in_rows: the parameters, by number, whose columns rows of tangents hold.
        is_in_rows: whether the columns of small parameters have been put there.
        composed: the fields whose entries are columns of their own, and their sizes.
        arithmetic: the patterns of products and sums of sparse matrices.
        use: "gradient" or "hessian" where the output is an energy, and these are computed.
    """

    params: list[Target]
    outputs: list[Target]
    rebuild_params: Callable[[list[Any]], Any]
    rebuild_outputs: Callable[[list[Any]], Any]
    limit: float | None
    strategy: str
    fields: FieldTable
    fused: dict[Any, Fused] = field(default_factory=dict)
    chunk_size: int | None = None
    blocks: int = 1
    layout: int = 0
    sizes_that_fit: set[Any] = field(default_factory=set)
    is_checked: bool = False
    rules_seen: Hashable = None
    replay: Replay | SparseReplay | None = None
    format: str | None = None
    dense_reason: str = ""
    in_rows: set[int] = field(default_factory=set)
    is_in_rows: bool = False
    composed: dict[Any, int] = field(default_factory=dict)
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    use: str = "jacobian"

    def result(self, blocks: list[list[Any]]) -> Any:
        """``[output][parameter]`` in the structure that was asked for; of a Hessian ``[parameter][parameter]``."""
        return self.rebuild_outputs([self.rebuild_params(row) for row in blocks])

    def note_fit(self, sizes: Any) -> None:
        """Remember that a call with arrays of these shapes was within the memory that was free."""
        if len(self.sizes_that_fit) >= _MOST_SIZES:
            self.sizes_that_fit = set()
        self.sizes_that_fit.add(sizes)

    def skeleton(self) -> Any:
        """Something of the structure of the result."""
        rows = self.params if self.use in ("hessian", "projected") else self.outputs
        return self.result([[0] * len(self.params) for _ in rows])


def values_of(prepared: Prepared, call: KernelCall, returned: Any) -> list[Any]:
    """A copy of each output as it is now; a return value is what was returned."""
    return [returned if t.kind == "return" else _held(t, call) for t in map(call.current, prepared.outputs)]


def _held(target: Target, call: KernelCall) -> Any:
    obj = target.field if target.kind == "field" else call.value(target)
    refuse_ended(str(target.name), obj)
    return backend.copy_of(obj)
