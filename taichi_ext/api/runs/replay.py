"""Fast path for repeated calls: one kernel without arguments, launched as in the previous call."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, Target, check_not_ended
from taichi_ext.api.inputs.options import Options
from taichi_ext.api.inputs.results import Layout
from taichi_ext.api.runs.arbiter import ArrayStores
from taichi_ext.cached import Bounded
from taichi_ext.launches import GRADIENT, JacobianKernel
from taichi_ext.program.keys import Key, SiteArray
from taichi_ext.runtime.launching.session import KernelTable, is_repeatable
from taichi_ext.runtime.memory.shadows import FieldTable, numpy_dtype
from taichi_ext.runtime.reverse.reverse import Reverse
from taichi_ext.runtime.sparse.matrices import Arithmetic
from taichi_ext.runtime.sparse.rows import SparseRows
from taichi_ext.runtime.sparse.streams import Streams


@dataclass(frozen=True)
class _Tangents:
    """An array of tangents as the kernel takes it: zeros, unless it writes all of them."""

    shape: tuple[int, ...]
    dtype: np.dtype
    is_covered: bool

    def new(self) -> np.ndarray:
        return (np.empty if self.is_covered else np.zeros)(self.shape, self.dtype)

    def fits(self, array: Any) -> bool:
        is_array = type(array) is np.ndarray and array.shape == self.shape and array.dtype == self.dtype
        return is_array and array.flags.c_contiguous and array.flags.writeable


@dataclass
class Replay:
    """A launch that takes tangents that begin at zero, and memory of the kernel itself; it is set up once."""

    layout: Layout
    fused: JacobianKernel  # the kernel
    tangents: dict[Key, _Tangents]  # those that it takes, for a dense J, J alone; and the gradient beside H
    kept: dict[Key, Any]  # memory of the kernel itself, by key
    _repeated: backend.RepeatedLaunch | None = None
    _changing: list[tuple[int, Key]] = field(default_factory=list)  # positions and keys of the arrays that are not kept

    @staticmethod
    def of(
        fused: JacobianKernel, layout: Layout, tangents: Mapping[Key, tuple[tuple[int, ...], np.dtype]]
    ) -> Replay | None:
        """A launch; None if the kernel takes more than these tangents, of this shape and type, and its own memory."""
        scratch = {key: shadow.array for key, shadow in fused.memory.scratch.items()}
        given = {key: _Tangents(*kind, key in fused.facts.covered) for key, kind in tangents.items()}
        for array in fused.first_order:
            given[array.name] = _Tangents((max(1, array.info.size),), numpy_dtype(array.info.dtype), is_covered=False)
        is_known = all(key in given or key in scratch or isinstance(key, SiteArray) for key in fused.shadows)
        has_others = any(array.info.key != GRADIENT for array in fused.first_order)
        if backend.stores_by_column() or not is_known or has_others:
            return None
        return Replay(layout, fused, given, scratch)

    @staticmethod
    def of_field(kernels: list[JacobianKernel], layout: Layout) -> Replay | None:
        """The launch of one kernel for a dense J of one field with respect to one other parameter; None for others."""
        if any(len(items) != 1 for items in (kernels, layout.outputs, layout.params)):
            return None
        (fused,), (output,), (param,) = kernels, layout.outputs, layout.params
        shape = (*output.shape, *param.shape)
        is_whole = output.target.kind == "field" and output.key == output.container != param.container
        is_simple = is_whole and math.prod(shape) > 0
        return Replay.of(fused, layout, {output.key: (shape, output.result_dtype)}) if is_simple else None

    @property
    def is_current(self) -> bool:
        """Whether it gives what a launch by a session would."""
        return is_repeatable(self.fused)

    def _launch(self, args: tuple[object, ...], array: Callable[[Key], object]) -> None:
        """Launch it; ``array`` gives the arrays that are not kept."""
        if self._repeated is not None:
            self._repeated({position: array(key) for position, key in self._changing})
            return
        fused, kept = self.fused, self.kept
        fused.launch(args, [kept[key] if key in kept else array(key) for key in fused.shadows])
        if backend.is_plain_call(fused.primal):
            numbered = list(enumerate(fused.shadows))
            self._changing = [(position, key) for position, key in numbered if key not in kept]
            same = {position: kept[key] for position, key in numbered if key in kept}
            self._repeated = backend.RepeatedLaunch(fused.kernel, same)

    def dense(self, args: tuple[object, ...], out: Any) -> np.ndarray | None:
        """J of a launch that is current, in ``out`` if that is given; None if J does not fit there, or has to wait.

        ``args`` holds the object that the kernel is bound to.
        """
        (given,) = self.tangents.values()
        if out is None:
            out = given.new()
        elif not given.fits(out):
            return None
        elif not given.is_covered:
            out.fill(0)
        with backend.exclusive:  # scratch memory is shared
            if backend.is_moved_elsewhere():
                return None
            self._launch(args, lambda _: out.reshape(-1))
        return out

    @property
    def is_symmetric(self) -> bool:
        """Whether J is symmetric to the last bit, as a Hessian is."""
        return Streams.of(self.fused).is_symmetric

    def sparse(self, args: tuple[object, ...], rows: SparseRows) -> list[np.ndarray]:
        """Compose the rows of a launch that is current, see ``dense``; returns the gradient of an energy."""
        streams = Streams.of(self.fused)
        streams.begin()
        arrays = {key: given.new() for key, given in self.tangents.items()}
        self._launch(args, lambda key: streams.array(key) if isinstance(key, SiteArray) else arrays[key])
        rows.compose(streams.end(), lambda key: key)
        return [arrays[array.name] for array in self.fused.first_order]


# The state shared by the calls of one Jacobian.

_MOST_KNOWN = 256  # calls of one kind that are remembered
_KNOWN = partial(Bounded[Hashable, Any], _MOST_KNOWN)
_PAIRS = ("hessian", "projected")  # uses with a block for each pair of parameters


@dataclass(frozen=True)
class JacobianProblem:
    """The quantity to compute."""

    params: list[Target]
    outputs: list[Target]
    rebuild_params: Callable[[list[Any]], object]  # puts the blocks of one output into the structure of the parameters
    rebuild_outputs: Callable[[list[Any]], object]  # likewise values, one for each output
    options: Options  # see ``checked_options``
    use: str = "jacobian"  # "jacobian"; or "gradient", "hessian", "hvp", "projected" where the output is an energy

    def result(self, blocks: list[list[object]]) -> Any:
        """``[output][parameter]`` in the user's structure; for a Hessian ``[parameter][parameter]``."""
        rebuild = self.rebuild_params if self.use in _PAIRS else self.rebuild_outputs
        return rebuild([self.rebuild_params(row) for row in blocks])

    def skeleton(self) -> object:
        """A dummy with the structure of the result."""
        rows = self.params if self.use in _PAIRS else self.outputs
        return self.result([[0] * len(self.params) for _ in rows])


@dataclass
class SparseChoices:
    """How the entries of a sparse Jacobian are computed, as far as runs have shown what that takes."""

    dense_reason: str = ""  # why rows of all columns are computed; empty if they are not
    in_rows: set[int] = field(default_factory=set)  # parameters whose columns are held by rows
    intermediates: dict[object, int] = field(default_factory=dict)  # sizes of fields whose entries are columns
    of_energy: dict[object, int] = field(default_factory=dict)  # those that an energy is computed from
    arithmetic: Arithmetic = field(default_factory=Arithmetic)  # the patterns of products and sums of sparse matrices


@dataclass(kw_only=True)
class Prepared:
    """The state shared by all calls of one Jacobian, from all threads; it holds nothing of a single call."""

    question: JacobianProblem  # the quantity to compute
    fields: FieldTable  # the fields that the kernels use
    fused: KernelTable = field(default_factory=KernelTable)  # the kernels with tangents
    runs: dict[Hashable, int] = field(default_factory=_KNOWN)  # how many all columns have taken, by shapes of arguments
    judged: dict[Hashable, ArrayStores] = field(default_factory=_KNOWN)  # what an ``Arbiter`` has seen, by ``path``
    has_host_arrays: bool = False  # whether kernels of a pipeline read arrays that Python may have stored to
    is_checked: bool = False  # whether a run has shown that every parameter is read and every output written
    rules_seen: Hashable = None  # the version of the registry at the last check of a run
    replay: Replay | None = None  # the fast path for a repeated launch, where there is one
    sparse: SparseChoices = field(default_factory=SparseChoices)  # how entries are computed
    reverse: Reverse | None = None  # the kernels of reverse mode
    has_no_adjoint: str = ""  # why rows are not computed by reverse mode; empty if they are
    is_reverse: bool | None = None  # whether rows of J are computed, where that has been chosen by estimate
    mode: str = ""  # which mode was chosen, and why

    @property
    def stores_to_arrays(self) -> bool:
        """Whether Python was seen to store to arrays with tangents, in some call."""
        return any(stores.seen for stores in list(self.judged.values()))

    @property
    def params(self) -> list[Target]:
        return self.question.params

    @property
    def outputs(self) -> list[Target]:
        return self.question.outputs

    @property
    def format(self) -> str | None:
        """Of sparse Jacobians; None for dense ones."""
        return self.question.options.format


def values_of(prepared: Prepared, call: KernelCall, returned: object) -> list[object]:
    """A copy of the current value of each output; for a return value, that of the run."""
    return [returned if t.kind == "return" else _held(t, call) for t in map(call.current, prepared.outputs)]


def _held(target: Target, call: KernelCall) -> object:
    obj = call.value(target)
    check_not_ended(str(target.name), obj)
    return backend.copy_of(obj)
