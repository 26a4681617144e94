"""One evaluation of a prepared Jacobian: one run of the kernel or pipeline, or several, and the Jacobian as blocks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.arguments import KernelCall, Target, refuse_inactive, refuse_unread
from taichi_ext.api.columns import Columns, by_parameter, direct, lay_out
from taichi_ext.api.findings import Findings, warn_of_indices, warn_of_python_readers
from taichi_ext.api.prepared import Prepared, values_of
from taichi_ext.api.progress import progress_bar
from taichi_ext.api.replay import Replay
from taichi_ext.api.results import as_torch, by_path, check_out, fill_out, in_place, refuse_shared_out
from taichi_ext.boundary.registry import registry
from taichi_ext.differentiate.keys import RETURN, Key
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.launches import FieldKey, Fused, NumberArgument, PipelineArgument, container_key, rows_of
from taichi_ext.runtime.memory import available_memory, numpy_dtype
from taichi_ext.runtime.passed_arguments import NumberSeeds
from taichi_ext.runtime.passed_numbers import PipelineRun, with_tangents
from taichi_ext.runtime.python_watch import watching
from taichi_ext.runtime.regions import View
from taichi_ext.runtime.run_record import RunRecord
from taichi_ext.runtime.session import Session
from taichi_ext.runtime.state import OverBudgetError, State
from taichi_ext.runtime.warning import saying_once, warn_at_user
from taichi_ext.stages import Stages


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
        self._directions: np.ndarray | None = None  # tangents of the parameters, a row for each entry
        self._passed: dict[int, int] = {}  # the numbers that a pipeline takes and that are parameters: first columns
        self._runs = 0
        self._is_last_run = True
        self._findings = Findings()
        self._record = RunRecord()
        self._said: set[Any] = set()  # warnings
        self._params = [call.current(target) for target in prepared.params]
        self._outputs = [call.current(target) for target in prepared.outputs]
        self._blocks = prepared.blocks
        if prepared.chunk_size is not None:
            self._blocks = max(self._blocks, -(-self.column_count() // prepared.chunk_size))

    def jacobian(self) -> Any:
        """J in the structure that was asked for, in ``out`` if that was given."""
        prepared, out = self._prepared, self._out
        if isinstance(prepared.replay, Replay):
            repeated = prepared.replay.run(self.call.full_args, out)
            if repeated is not None:
                return prepared.result([[repeated]])
        with backend.suspend_following():  # a thread that a pipeline has started may compute a Jacobian of its own
            result = prepared.result(self.blocks())
            return as_torch(result, self.call, self._outputs) if out is None else fill_out(out, result)

    def value_and_jacobian(self, jacobian: Callable[[], Any] | None = None) -> tuple[Any, Any]:
        """The outputs and J, in the structures that were asked for; or what a function makes of J."""
        with self._whole():
            result = (jacobian or self.jacobian)()
            values = values_of(self._prepared, self.call, self.returned)
        return self._prepared.rebuild_outputs(values), result

    def along(self, directions: np.ndarray) -> Evaluation:
        """Let the columns be those of products with J: the parameters' tangents, a row for each entry, are given."""
        self._directions = directions
        return self

    def columns(self, first: int, count: int) -> list[np.ndarray]:
        """Some columns of each output, a row for each entry, from a run of their own.

        Every run but the first begins at the state in which the first one began.
        """
        with self._whole(), backend.suspend_following():
            is_partial = first > 0 or count < self.column_count()
            if self._state is None and (is_partial or (self.call.kernel is None and self._max_memory() < math.inf)):
                self._state = State()
            if self._runs:
                assert self._state is not None
                self._state.restore()
            self._runs += 1
            session, _ = self._new_session(first, count)
            outputs = [self._open_output(session, target, None) for target in self._outputs]
            try:
                self._launch(session, [key for key, _ in outputs])
            except (InvalidArgumentError, UnsupportedError):
                if self._state is not None:
                    self._state.undo()
                raise
            return [session.tangents(key) for key, _ in outputs]

    def column_blocks(self, count: int) -> Iterator[tuple[int, list[np.ndarray]]]:
        """All columns, so many at a time at most, or as many as memory allows: the first one, and them by output."""
        first, total = 0, self.column_count()
        while first < total:
            found = self.columns_within_memory(first, count)
            yield first, found
            count = min(count, found[0].shape[1])
            first += count

    def columns_within_memory(self, first: int, count: int) -> list[np.ndarray]:
        """The same as ``columns``, or fewer of them where the tangents of intermediates do not fit into memory."""
        while True:
            try:
                return self.columns(first, count)
            except OverBudgetError:
                count = -(-min(count, self.column_count() - first) // 2)
                if self._state is None:  # one kernel, which has not been launched
                    self._state = State()

    def blocks(self) -> list[list[np.ndarray]]:
        """J as ``[output][parameter]``: all columns at once or, to save memory, in several runs."""
        with self._whole(), Stages(f"Jacobian of {self.call.name}"):
            if self._state is None and self._may_need_state():
                self._state = State()
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
        """How many columns are computed: those of J, or the directions that are given."""
        if self._directions is not None:
            return self._directions.shape[1]
        return sum(map(math.prod, self.parameter_shapes()))

    def parameter_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters, those of their elements included."""
        session = Session(self._prepared.fields, self._prepared.fused, self.call.kernel is not None)
        return [shape for _, shape in lay_out(self.call, self._params, partial(self._container, session)).columns]

    def output_shapes(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """The shapes of the outputs, those of their elements included, and their types."""
        session, found = Session(self._prepared.fields, self._prepared.fused, self.call.kernel is not None), []
        for target in self._outputs:
            if target.kind == "return":
                found.append((self.call.return_shape(), numpy_dtype(self.call.return_dtype())))
            else:
                key, shape = self._container(session, target)
                found.append((shape, numpy_dtype(session.info(key).dtype)))
        return found

    def _run_within_memory(self) -> list[list[np.ndarray]]:
        while True:
            try:
                result = self._run_once() if self._blocks == 1 else self._run_all_blocks()
            except OverBudgetError:
                self._blocks *= 2
                if self._state is None:  # one kernel, which has not been launched
                    self._state = State()
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
        return [by_parameter(values, shape, columns) for values, shape in full]

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
            session, columns = self._new_session(first, -(-self.column_count() // self._blocks))
            end = sum(math.prod(shape) for _, shape in columns)
            session.is_repeated = first + session.columns < end
            outputs = [self._open_output(session, target, None) for target in self._outputs]
            self._check_out(session, outputs, columns)
            self._launch(session, [key for key, _ in outputs])
            parts.append([session.tangents(key) for key, _ in outputs])
            first += session.columns
            advance(session.columns)
        joined = [np.concatenate(values, axis=1) for values in zip(*parts, strict=True)]
        return [by_parameter(values, shape, columns) for values, (_, shape) in zip(joined, outputs, strict=True)]

    def _is_repeatable(self, session: Session, outputs: list[Any]) -> bool:
        """Whether one kernel without arguments has one parameter and one output, which are different fields."""
        is_simple = self.call.kernel is not None and not self.call.args and self._watch is None
        is_single = len(self._params) == len(outputs) == len(self._prepared.fused) == 1
        if not is_simple or not is_single or self._outputs[0].kind != "field":
            return False
        key = outputs[0][0]
        return key == container_key(key) and key not in map(container_key, session.params)

    def _new_replay(self, session: Session, outputs: list[Any], columns: Columns) -> Replay | None:
        (key, shape), (_, inner) = outputs[0], columns[0]
        (fused,) = self._prepared.fused.values()
        if not Replay.is_possible(fused, key):
            return None
        return Replay(fused, key, (*shape, *inner), session.dtype(key))

    # --- parameters and outputs

    def _new_session(self, first: int, count: int | None) -> tuple[Session, Columns]:
        """A session for some columns, from ``first`` on; and of each parameter the first column and the shape."""
        session = self._session()
        parameters = lay_out(self.call, self._params, partial(self._container, session))
        columns = parameters.columns if self._directions is None else [(0, (self._directions.shape[1],))]
        total = sum(math.prod(shape) for _, shape in columns)
        if first == 0:
            self._findings.begin()
            self._record = RunRecord()
        session.first_column = first
        count = total - first if count is None else min(count, total - first)
        session.columns = max(1, count)  # without parameters' entries there is one that nothing carries
        session.blocks = max(1, -(-total // session.columns))
        self._is_last_run = first + session.columns >= total
        session.max_memory = self._max_memory()
        session.state = self._state
        if self.call.kernel is None and session.columns < total:
            self._record.begin()
            session.record = self._record
        session.watch = self._watch
        session.strategy = self._prepared.strategy
        if self._directions is not None:
            direct(session, parameters, self._directions)
        session.seed(parameters.seeds)
        if self._directions is None:
            session.params = parameters.names_within(first, session.columns)
        constants = tuple(parameters.constants.values())
        session.numbers = NumberSeeds(parameters.arguments, constants, parameters.tangents)
        self._passed = parameters.passed
        session.wants_return = any(target.kind == "return" for target in self._outputs)
        return session, columns

    def _session(self) -> Session:
        return Session(self._prepared.fields, self._prepared.fused, self.call.kernel is not None)

    def _container(self, session: Session, target: Target) -> tuple[Any, tuple[int, ...]]:
        """Key and shape, element shape included, of a field or array."""
        if target.kind == "field":
            info = self._prepared.fields.part(target.field)
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
        rows = math.prod(shape) if key == RETURN or isinstance(key, View) else session.info(key).size
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
        with saying_once(self._said):
            self._launch_kernels(session)
            session.finish()
            self._findings.note_params(session.params, session.overwritten)
            self._check_after_run(session, outputs)
            if self._directions is None:
                self._findings.note_columns([session.tangents(key) for key in outputs])
                if self._is_last_run:
                    self._findings.warn()

    def _launch_kernels(self, session: Session) -> None:
        if self.call.kernel is not None:
            session.before_launch = lambda fused, outer: self._check_before_launch(session, fused, outer)
            self.returned = session.launch(self.call.kernel, self.call.full_args)
            session.before_launch = None  # which refers to the session: nothing of it waits for the garbage collector
        else:
            session.start(self.call.function, self.call.args)
            args, run = list(self.call.args), PipelineRun(warn_at_user)
            session.pipeline = run if self._passed else None
            for position, column in self._passed.items():
                args[position] = with_tangents(args[position], self.call.names[position], column, run)
            with backend.follow(session), watching(session.python, self.call.function), run:
                self.returned = self.call.function(*args)
            session.read |= {PipelineArgument(name) for name in run.passed}

    def _rows_of(self, key: Key) -> slice:
        """The entries of a container that a parameter or output is."""
        return rows_of(key, self._prepared.fields.infos[key.whole]) if isinstance(key, FieldKey) else slice(None)

    def _size(self, key: Key, shape: tuple[int, ...]) -> int:
        """How many entries the container of a parameter or output has, which has this shape itself."""
        infos = self._prepared.fields.infos
        return infos[key.whole].size if isinstance(key, FieldKey) else math.prod(shape)

    def _param_containers(self, session: Session) -> list[Any]:
        """The keys of the containers of the parameters."""
        return [container_key(self._key(session, target)) for target in self._params]

    # --- checks

    def _places(self) -> list[Any]:
        """For each output the memory of ``out`` in which its Jacobian can be computed."""
        if self._out is None or len(self._params) != 1 or self.call.kernel is None:
            return [None] * len(self._outputs)
        leaves = by_path(self._out, self._prepared.skeleton())
        return [in_place(target, list(self.call.args)) for _, target in leaves]

    def _check_out(self, session: Session, outputs: list[Any], columns: Columns) -> None:
        if self._out is not None:
            wanted = [((*shape, *p), session.dtype(key)) for key, shape in outputs for _, p in columns]
            leaves = by_path(self._out, self._prepared.skeleton())
            check_out(leaves, wanted)
            refuse_shared_out(leaves, self._containers())

    def _containers(self) -> list[Any]:
        """What ``out`` must not share memory with."""
        targets = (*self._params, *self._outputs)
        return [*(target.field for target in targets if target.field is not None), *self.call.args]

    def _check_before_launch(self, session: Session, fused: Fused, outer: dict[Key, Key]) -> None:
        """Every parameter is read by the kernel and every output written."""
        read = session.arrays.shared(outer.get(k, k) for k in fused.facts.read)
        written = session.arrays.shared(outer.get(k, k) for k in fused.facts.written)
        refuse_unread(self._params, read, fused.kernel.captures.numbers, f"in {self.call.name}")
        refuse_inactive(*self._keys(session), read, written, f"in {self.call.name}")

    def _keys(self, session: Session) -> tuple[list[tuple[Target, Any]], list[tuple[Target, Any]]]:
        """The parameters and the outputs, each with its key in a session."""
        both = (self._params, self._outputs)
        params, outputs = ([(t, container_key(self._key(session, t))) for t in targets] for targets in both)
        return params, outputs

    def _key(self, session: Session, target: Target) -> Any:
        if target.kind == "return":
            return RETURN
        if target.variable is not None:
            return target.variable.key
        if self.call.is_value(target):
            return (PipelineArgument if self.call.kernel is None else NumberArgument)(target.argument)
        return self._container(session, target)[0]

    def _check_after_run(self, session: Session, outputs: list[Any]) -> None:
        prepared = self._prepared
        if prepared.rules_seen != registry.version:
            prepared.rules_seen = registry.version
            for message in registry.warnings():
                warn_at_user(message)
        if self.call.kernel is None and not session.has_launched:
            raise InvalidArgumentError(f"{self.call.name} launched no kernel, so there is nothing to differentiate.")
        if prepared.is_checked:
            return
        if self.call.kernel is None:
            where = f"by the kernels that {self.call.name} launched"
            numbers = [text for fused in prepared.fused.values() for text in fused.kernel.captures.numbers]
            refuse_unread(self._params, session.read, numbers, where)
            warn_of_python_readers(self._params, self.call.function)
            refuse_inactive(*self._keys(session), session.read, session.written, where)
        prepared.is_checked = True
        warn_of_indices(prepared.fused.values())
        self._findings.judge((t, session.is_fresh(key)) for t, key in zip(self._outputs, outputs, strict=True))
