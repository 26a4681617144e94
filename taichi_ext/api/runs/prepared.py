"""The state shared by the calls of one Jacobian."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, Target, check_not_ended
from taichi_ext.api.inputs.options import Options
from taichi_ext.api.runs.replay import Replay
from taichi_ext.launches import Fused
from taichi_ext.runtime.memory.shadows import FieldTable
from taichi_ext.runtime.reverse.reverse import Reverse
from taichi_ext.runtime.sparse.matrices import Arithmetic

_MOST_SIZES = 256  # combinations of shapes that are remembered
_PAIRS = ("hessian", "projected")  # uses with a block for each pair of parameters


@dataclass(frozen=True, kw_only=True)
class Question:
    """The quantity to compute.

    Attributes:
        params: the parameters.
        outputs: the outputs.
        rebuild_params: puts the blocks of one output into the structure of the parameters.
        rebuild_outputs: puts values, one for each output, into the structure of the outputs.
        options: see ``checked_options``.
        use: "jacobian"; or "gradient", "hessian", "hvp", "projected" where the output is an energy.
    """

    params: list[Target]
    outputs: list[Target]
    rebuild_params: Callable[[list[Any]], object]
    rebuild_outputs: Callable[[list[Any]], object]
    options: Options
    use: str = "jacobian"

    def result(self, blocks: list[list[object]]) -> Any:
        """``[output][parameter]`` in the user's structure; for a Hessian ``[parameter][parameter]``."""
        return self.rebuild_outputs([self.rebuild_params(row) for row in blocks])

    def skeleton(self) -> object:
        """A dummy with the structure of the result."""
        rows = self.params if self.use in _PAIRS else self.outputs
        return self.result([[0] * len(self.params) for _ in rows])


@dataclass
class SparseChoices:
    """How the rows of a sparse Jacobian are computed.

    Attributes:
        dense_reason: why rows of all columns are computed although the result is sparse; empty if they are not.
        in_rows: the numbers of the parameters whose columns are held by rows of tangents.
        is_in_rows: whether the columns of small parameters have been moved there.
        intermediates: the fields whose entries are separate columns, and their sizes.
        energy_intermediates: the fields that an energy is computed from, and their sizes.
        arithmetic: the patterns of products and sums of sparse matrices.
    """

    dense_reason: str = ""
    in_rows: set[int] = field(default_factory=set)
    is_in_rows: bool = False
    intermediates: dict[object, int] = field(default_factory=dict)
    energy_intermediates: dict[object, int] = field(default_factory=dict)
    arithmetic: Arithmetic = field(default_factory=Arithmetic)


@dataclass(kw_only=True)
class Prepared:
    """The state shared by all calls of one Jacobian, from all threads; it holds nothing of a single call.

    Attributes:
        question: the quantity to compute.
        fields: the fields that the kernels use.
        fused: the kernels with tangents.
        layout: the version of the layout of all fields that the kernels were built for.
        blocks: the least number of runs for all columns.
        sizes_that_fit: the shapes of arguments for which a call has fitted into free memory.
        is_judged: whether an ``Arbiter`` has looked for derivatives that Python loses.
        stores: entries of arrays that Python stores to, by event, see ``Arbiter``.
        is_checked: whether a run has shown that every parameter is read and every output written.
        rules_seen: the version of the registry at the last check of its marks.
        replay: the fast path for a repeated launch, where there is one.
        sparse: how sparse rows are computed.
        reverse: the kernels of reverse mode.
        has_no_adjoint: why rows are not computed by reverse mode; empty if they are.
        mode: which mode was chosen, and why.
    """

    question: Question
    fields: FieldTable
    fused: dict[Any, Fused] = field(default_factory=dict)
    layout: int = 0
    blocks: int = 1
    sizes_that_fit: set[object] = field(default_factory=set)
    is_judged: bool = False
    stores: Mapping[int, Any] = field(default_factory=dict)
    is_checked: bool = False
    rules_seen: Hashable = None
    replay: Replay | None = None
    sparse: SparseChoices = field(default_factory=SparseChoices)
    reverse: Reverse | None = None
    has_no_adjoint: str = ""
    mode: str = ""

    @property
    def params(self) -> list[Target]:
        """The parameters."""
        return self.question.params

    @property
    def outputs(self) -> list[Target]:
        """The outputs."""
        return self.question.outputs

    @property
    def format(self) -> str | None:
        """Of sparse Jacobians; None for dense ones."""
        return self.question.options.format

    @property
    def dense_reason(self) -> str:
        """See ``SparseChoices``."""
        return self.sparse.dense_reason

    def note_fit(self, sizes: object) -> None:
        """Remember that a call with arrays of these shapes has fitted into free memory."""
        if len(self.sizes_that_fit) >= _MOST_SIZES:
            self.sizes_that_fit = set()
        self.sizes_that_fit.add(sizes)


def values_of(prepared: Prepared, call: KernelCall, returned: object) -> list[object]:
    """A copy of the current value of each output; for a return value, that of the run."""
    return [returned if t.kind == "return" else _held(t, call) for t in map(call.current, prepared.outputs)]


def _held(target: Target, call: KernelCall) -> object:
    obj = call.value(target)
    check_not_ended(str(target.name), obj)
    return backend.copy_of(obj)
