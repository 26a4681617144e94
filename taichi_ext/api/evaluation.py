"""One evaluation of a prepared Jacobian: one run of the kernel or pipeline, or several, and the Jacobian as blocks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.arguments import KernelCall, Target, refuse_inactive, refuse_unread
from taichi_ext.api.progress import progress_bar
from taichi_ext.api.replay import Replay
from taichi_ext.api.results import as_torch, by_path, check_out, fill_out, in_place, refuse_shared_out
from taichi_ext.boundary.registry import registry
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.labels import Label
from taichi_ext.record.variables import Variable
from taichi_ext.runtime.memory import FieldTable, available_memory, numpy_dtype
from taichi_ext.runtime.session import Session, warn_at_user
from taichi_ext.runtime.state import OverBudgetError, State
from taichi_ext.stages import Stages
from taichi_ext.tracing.trace import RETURN, Fused

_MOST_SIZES = 256  # combinations of shapes that are remembered
_Columns = list[tuple[int, tuple[int, ...]]]  # of each parameter: the first column and the shape


@dataclass
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
        composed: the fields whose entries are columns of their own, and their sizes.
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
    rules_seen: int = -1
    replay: Replay | None = None
    format: str | None = None
    dense_reason: str = ""
    in_rows: set[int] = field(default_factory=set)
    composed: dict[Any, int] = field(default_factory=dict)

    def result(self, blocks: list[list[Any]]) -> Any:
        """``[output][parameter]`` in the structure that was asked for."""
        return self.rebuild_outputs([self.rebuild_params(row) for row in blocks])

    def note_fit(self, sizes: Any) -> None:
        """Remember that a call with arrays of these shapes was within the memory that was free."""
        if len(self.sizes_that_fit) >= _MOST_SIZES:
            self.sizes_that_fit = set()
        self.sizes_that_fit.add(sizes)

    def skeleton(self) -> Any:
        """Something of the structure of the result."""
        return self.result([[0] * len(self.params) for _ in self.outputs])


class Evaluation:
    """One call: its arguments, what the kernel returned, and what has to be put back before another run.

    Attributes:
        call: the kernel and the arguments of this call.
        returned: what the kernel or function returned in the last run.
    """

    def __init__(
        self,
        prepared: Prepared,
        call: KernelCall,
        out: Any = None,
        state: State | None = None,
        watch: Any = None,
        progress: bool | None = False,
    ) -> None:
        self.call = call
        self.returned: Any = None
        self._prepared = prepared
        self._out = out
        self._state = state
        self._watch = watch
        self._progress = progress
        self._params = [call.current(target) for target in prepared.params]
        self._outputs = [call.current(target) for target in prepared.outputs]
        self._blocks = prepared.blocks
        if prepared.chunk_size is not None:
            self._blocks = max(self._blocks, -(-self.column_count() // prepared.chunk_size))

    def jacobian(self) -> Any:
        """J in the structure that was asked for, in ``out`` if that was given."""
        prepared, out = self._prepared, self._out
        if prepared.replay is not None:
            repeated = prepared.replay.run(out)
            if repeated is not None:
                return prepared.result([[repeated]])
        with backend.suspend_following():  # a thread that a pipeline has started may compute a Jacobian of its own
            result = prepared.result(self.blocks())
            return as_torch(result, self.call, self._outputs) if out is None else fill_out(out, result)

    def value_and_jacobian(self) -> tuple[Any, Any]:
        """The outputs and J, in the structures that were asked for."""
        with self._whole():
            result = self.jacobian()
            values = values_of(self._prepared, self.call, self.returned)
        return self._prepared.rebuild_outputs(values), result

    def blocks(self) -> list[list[np.ndarray]]:
        """J as ``[output][parameter]``: all columns at once or, to save memory, in several runs."""
        with self._whole(), Stages(f"Jacobian of {self.call.name}"):
            if self._state is None and self._may_need_state():
                self._state = State(self.call.labels)
            try:
                return self._run_within_memory()
            except (InvalidArgumentError, UnsupportedError):
                if self._state is not None:
                    self._state.undo()
                raise

    def _whole(self) -> contextlib.AbstractContextManager[Any]:
        """No other thread comes between the parts of what is done to one kernel.

        The function of a pipeline may wait for other threads, so that there each launch is a whole.
        """
        return backend.exclusive if self.call.kernel is not None else contextlib.nullcontext()

    def column_count(self) -> int:
        """How many columns J has."""
        return sum(math.prod(shape) for _, shape in self._new_session(0, None)[1])

    def _run_within_memory(self) -> list[list[np.ndarray]]:
        while True:
            try:
                result = self._run_once() if self._blocks == 1 else self._run_all_blocks()
            except OverBudgetError:
                self._blocks *= 2
                if self._state is None:  # one kernel, which has not been launched
                    self._state = State(self.call.labels)
                self._state.restore()
                self._prepared.blocks = max(self._prepared.blocks, self._blocks)
            else:
                self._prepared.note_fit(self._sizes())
                return result

    def _may_need_state(self) -> bool:
        """Whether what is run may have to be run again: in blocks, or a pipeline that may turn out to need too much."""
        return self._blocks > 1 or (self.call.kernel is None and self._max_memory() < math.inf)

    def _sizes(self) -> Any:
        """The shapes of the fields and arrays of this call."""
        sized = (a for a in self.call.args if backend.is_array(a) or isinstance(a, backend.Field))
        return tuple(tuple(a.shape) for a in sized)

    def _run_once(self) -> list[list[np.ndarray]]:
        places = self._places()
        session, columns = self._new_session(0, None)
        outputs = [self._open_output(session, t, p) for t, p in zip(self._outputs, places, strict=True)]
        self._check_out(session, outputs, columns)
        self._launch(session, [key for key, _ in outputs])
        if self._is_repeatable(session, outputs):
            self._prepared.replay = self._new_replay(session, outputs, columns)
        full = [(session.tangents(key), shape) for key, shape in outputs]
        for n in range(1, len(full)):  # an output that is named twice gets memory of its own
            if any(np.may_share_memory(full[n][0], values) for values, _ in full[:n]):
                full[n] = (full[n][0].copy(), full[n][1])
        return [_by_parameter(values, shape, columns) for values, shape in full]

    def _run_all_blocks(self) -> list[list[np.ndarray]]:
        with progress_bar(self._progress, f"Columns of J, {self.call.name}", self.column_count()) as advance:
            return self._run_blocks(advance)

    def _run_blocks(self, advance: Callable[[int], None]) -> list[list[np.ndarray]]:
        parts: list[list[np.ndarray]] = []
        first, end = 0, 1
        while first < end:
            if first:
                assert self._state is not None
                self._state.restore()
            session, columns = self._new_session(first, self._blocks)
            end = sum(math.prod(shape) for _, shape in columns)
            session.is_repeated = first + session.columns < end
            outputs = [self._open_output(session, target, None) for target in self._outputs]
            self._check_out(session, outputs, columns)
            self._launch(session, [key for key, _ in outputs])
            parts.append([session.tangents(key) for key, _ in outputs])
            first += session.columns
            advance(session.columns)
        joined = [np.concatenate(values, axis=1) for values in zip(*parts, strict=True)]
        return [_by_parameter(values, shape, columns) for values, (_, shape) in zip(joined, outputs, strict=True)]

    def _is_repeatable(self, session: Session, outputs: list[Any]) -> bool:
        """Whether one kernel without arguments has one parameter and one output, which are different fields."""
        is_simple = self.call.kernel is not None and not self.call.args and self._watch is None
        is_single = len(self._params) == len(outputs) == len(self._prepared.fused) == 1
        return is_simple and is_single and self._outputs[0].kind == "field" and outputs[0][0] not in session.params

    def _new_replay(self, session: Session, outputs: list[Any], columns: _Columns) -> Replay | None:
        (key, shape), (_, inner) = outputs[0], columns[0]
        (fused,) = self._prepared.fused.values()
        if not Replay.is_possible(fused, key):
            return None
        return Replay(fused, self.call.full_args, key, (*shape, *inner), session.dtype(key))

    # --- parameters and outputs

    def _new_session(self, first: int, blocks: int | None) -> tuple[Session, _Columns]:
        """Give every parameter its columns: the first one and the shape of each.

        With ``blocks``, the session computes the columns from ``first`` on that one of so many balanced blocks has.
        """
        columns: _Columns = []
        seeds: dict[Any, int] = {}
        arguments: dict[str, int] = {}
        names: dict[Any, Label | str] = {}
        constants: dict[Any, tuple[Variable, int]] = {}
        session = self._session()
        total = 0
        for target in self._params:
            if target.variable is not None:
                shape = target.shape
                if target.variable.key in constants:
                    raise InvalidArgumentError(f"{target.name} is given twice among params.")
                constants[target.variable.key] = (target.variable, total)
            elif self.call.is_value(target):
                shape = self.call.value_shape(target)
                if target.argument in arguments:
                    raise InvalidArgumentError(f"{target.name} is given twice among params.")
                arguments[target.argument] = total
            else:
                key, shape = self._container(session, target)
                if key in seeds:
                    raise InvalidArgumentError(f"{target.name} is given twice among params.")
                seeds[key] = total
                names[key] = target.name
            columns.append((total, shape))
            total += math.prod(shape)
        session.first_column = first
        count = total - first if blocks is None else min(-(-total // blocks), total - first)
        session.columns = max(1, count)  # without parameters' entries there is one that nothing carries
        session.max_memory = self._max_memory()
        session.state = self._state
        session.watch = self._watch
        session.strategy = self._prepared.strategy
        session.seed(seeds)
        session.params = names
        session.argument_columns = arguments
        session.constants = tuple(constants.values())
        session.wants_return = any(target.kind == "return" for target in self._outputs)
        return session, columns

    def _session(self) -> Session:
        return Session(self._prepared.fields, self._prepared.fused, self.call.kernel is not None)

    def _container(self, session: Session, target: Target) -> tuple[Any, tuple[int, ...]]:
        """Key and shape, element shape included, of a field or array."""
        fields = self._prepared.fields
        if target.kind == "field":
            info = fields.field(target.field)
            assert info is not None
            if fields.component(target.field) is not None:
                raise InvalidArgumentError(
                    f"{target.name} is one component of a matrix field that is used as a whole; name the whole field."
                )
            return info.key, (*info.shape, *info.element_shape)
        value = self.call.value(target)
        key = session.register_array(value, self.call.annotation(target), target.name)
        return key, tuple(backend.full_shape(value))

    def _open_output(self, session: Session, target: Target, place: Any) -> tuple[Any, tuple[int, ...]]:
        """Key and shape of an output; its shadow is made now, in the array given as ``out`` where that is possible."""
        if target.kind == "return":
            key, shape, dtype = RETURN, self.call.return_shape(), self.call.return_dtype()
        elif self.call.is_value(target):
            raise InvalidArgumentError(f"{target.name} is passed by value and cannot be written by the kernel.")
        else:
            key, shape = self._container(session, target)
            host = None if target.kind == "field" else backend.host_values(self.call.value(target))
            if host is not None and not host.flags.writeable:
                raise InvalidArgumentError(f"{target.name} is read-only; give an array that can be written.")
            dtype = session.info(key).dtype
        rows = math.prod(shape)
        is_fit = place is not None and place.size == rows * session.columns and place.dtype == numpy_dtype(dtype)
        session.open_output(key, target.name, rows, dtype, place if is_fit else None)
        return key, shape

    def _max_memory(self) -> float:
        """Bytes that tangents other than J may take."""
        if self._prepared.limit is not None:
            return self._prepared.limit
        has_fit = self._blocks == 1 and self._sizes() in self._prepared.sizes_that_fit
        return math.inf if has_fit else available_memory() / 2

    def _launch(self, session: Session, outputs: list[Any]) -> None:
        if self.call.kernel is not None:
            session.before_launch = lambda fused, outer: self._check_before_launch(session, fused, outer)
            self.returned = session.launch(self.call.kernel, self.call.full_args)
            session.before_launch = None  # which refers to the session: nothing of it waits for the garbage collector
        else:
            session.start(self.call.function, self.call.args)
            with backend.follow(session):
                self.returned = self.call.function(*self.call.args)
        session.finish()
        self._check_after_run(session, outputs)

    # --- checks

    def _places(self) -> list[Any]:
        """For each output the memory of ``out`` in which its Jacobian can be computed."""
        if self._out is None or len(self._params) != 1 or self.call.kernel is None:
            return [None] * len(self._outputs)
        leaves = by_path(self._out, self._prepared.skeleton())
        return [in_place(target, list(self.call.args)) for _, target in leaves]

    def _check_out(self, session: Session, outputs: list[Any], columns: _Columns) -> None:
        if self._out is not None:
            wanted = [((*shape, *p), session.dtype(key)) for key, shape in outputs for _, p in columns]
            leaves = by_path(self._out, self._prepared.skeleton())
            check_out(leaves, wanted)
            targets = (*self._params, *self._outputs)
            containers = [target.field for target in targets if target.field is not None]
            refuse_shared_out(leaves, [*containers, *self.call.args])

    def _check_before_launch(self, session: Session, fused: Fused, outer: dict[Any, Any]) -> None:
        """Every parameter is read by the kernel and every output written."""
        read = session.arrays.shared(outer.get(k, k) for k in fused.facts.read)
        written = session.arrays.shared(outer.get(k, k) for k in fused.facts.written)
        refuse_unread(self._params, read, fused.kernel.captures.numbers, f"in {self.call.name}")
        refuse_inactive(*self._keys(session), read, written, f"in {self.call.name}")

    def _keys(self, session: Session) -> tuple[list[tuple[Target, Any]], list[tuple[Target, Any]]]:
        """The parameters and the outputs, each with its key in a session."""
        both = (self._params, self._outputs)
        params, outputs = ([(t, self._key(session, t)) for t in targets] for targets in both)
        return params, outputs

    def _key(self, session: Session, target: Target) -> Any:
        if target.kind == "return":
            return RETURN
        if target.variable is not None:
            return target.variable.key
        if self.call.is_value(target):
            return ("argument", target.argument)
        return self._container(session, target)[0]

    def _check_after_run(self, session: Session, outputs: list[Any]) -> None:
        prepared = self._prepared
        if prepared.rules_seen != registry.version:
            prepared.rules_seen = registry.version
            for message in registry.unused_marks():
                warn_at_user(message)
        if prepared.is_checked:
            return
        if self.call.kernel is None:
            if not session.has_launched:
                raise InvalidArgumentError(
                    f"{self.call.name} launched no kernel, so there is nothing to differentiate."
                )
            where = f"by the kernels that {self.call.name} launched"
            numbers = [text for fused in prepared.fused.values() for text in fused.kernel.captures.numbers]
            refuse_unread(self._params, session.read, numbers, where)
            refuse_inactive(*self._keys(session), session.read, session.written, where)
        prepared.is_checked = True
        for target, key in zip(self._outputs, outputs, strict=True):
            if session.is_fresh(key):
                warn_at_user(f"{target.name} does not depend on any of the params: its Jacobian is zero.")
            elif self._blocks == 1 and not session.overwritten and not session.tangents(key).any():
                warn_at_user(f"{target.name} does not depend on the params as they are now: its Jacobian is zero.")


def values_of(prepared: Prepared, call: KernelCall, returned: Any) -> list[Any]:
    """A copy of each output as it is now; a return value is what was returned."""
    return [
        returned
        if target.kind == "return"
        else backend.copy_of(target.field if target.kind == "field" else call.value(target))
        for target in map(call.current, prepared.outputs)
    ]


def _by_parameter(values: np.ndarray, shape: tuple[int, ...], columns: _Columns) -> list[np.ndarray]:
    """The Jacobian of one output, cut into its parameters."""
    full = values.reshape((*shape, values.shape[1]))
    return [full[..., first : first + math.prod(s)].reshape((*shape, *s)) for first, s in columns]
