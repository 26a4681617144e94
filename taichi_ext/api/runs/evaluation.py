"""One evaluation of a prepared Jacobian: one or several runs of the kernel or pipeline, and the blocks of J."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall
from taichi_ext.api.inputs.progress import Progress, progress_bar, stage_line
from taichi_ext.api.inputs.results import (
    Layout,
    as_torch,
    by_path,
    check_out,
    check_out_is_separate,
    fill_out,
    in_place,
    joined,
    lay_out,
)
from taichi_ext.api.runs.arbiter import Arbiter, ArrayStores
from taichi_ext.api.runs.findings import RunLog, check_accesses, check_run, warn_of_alerts
from taichi_ext.api.runs.replay import Prepared, Replay, values_of
from taichi_ext.api.runs.subject import RowSpace, Shapes
from taichi_ext.cached import cached_property
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.launches import ColumnBlock, JacobianKernel
from taichi_ext.program.keys import Key
from taichi_ext.runtime.launching.pipeline import Pipeline, PipelineSession
from taichi_ext.runtime.launching.session import Session
from taichi_ext.runtime.launching.tangents import DenseRows, Request, Restart
from taichi_ext.runtime.launching.trace import Trace
from taichi_ext.runtime.memory.shadows import OverBudgetError, available_memory
from taichi_ext.runtime.memory.state import State
from taichi_ext.runtime.python.dual_numbers import Run, saying_once, warn_at_user
from taichi_ext.runtime.python.reached import flags_of
from taichi_ext.runtime.python.run_record import RunRecord
from taichi_ext.stages import Stages

_MOST_PATHS = 8  # of one pipeline, from which on flags outside of its arguments do not count
_EARLIER = (
    "Python stores numbers to entries of an array that they hold already, which was only found after the first {} "
    "columns of J: these count on the tangents of the entries. Use jacobian, or the same prepared form again."
)


def equal_parts(total: int, most: int) -> int:
    """The size of blocks of at most ``most`` columns, at least one, that differ little in their size."""
    return max(1, -(-total // max(1, -(-total // max(1, most)))))


class StoresFoundError(Exception):
    """The columns so far count on tangents of entries that Python stores to, see ``Arbiter``."""


@dataclass(eq=False)
class Evaluation:
    """One call: its arguments, the kernel's return value, and the state to restore before another run.

    ``dataclasses.replace`` gives the same call with another subject or form, or for products with J.
    """

    prepared: Prepared  # state shared by all calls
    call: KernelCall  # the kernel and the arguments of this call
    subject: RowSpace  # the containers that rows of the blocks belong to
    form: DenseForm  # the form of the blocks, dense or sparse
    out: object = None  # arrays for the result
    state: State | None = None  # saves the containers that the call changes
    watch: object = None  # observer of the values that kernels compute
    progress: Progress = "stages"  # whether a bar is drawn, and a line says what a long first call does
    directions: np.ndarray | None = None  # for products with J, the tangents of the parameters, a row for each entry
    is_any: bool = False  # whether no tangent vanishes in all of them but by chance
    record: RunRecord | None = None  # of the launches and stores of the runs so far
    said: set[object] = field(default_factory=set[object])  # the warnings of the call so far
    returned: Any = field(default=None, init=False)  # the return value of the kernel or function in the last run
    _arbiter: Arbiter | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.given_state = self.state

    @cached_property
    def least_runs(self) -> int:
        """How many runs all columns take at least."""
        most = self.prepared.question.options.chunk_size or max(1, self.column_count())
        return max(1, -(-self.column_count() // most), self.prepared.runs.get(self.sizes, 1))

    @cached_property
    def log(self) -> RunLog:
        """The observations of the runs of the call."""
        of_zeros = self.subject.warns_of_zeros and self.layout.count > 0
        return RunLog(of_zeros=of_zeros, is_first=not self.prepared.is_checked)

    @cached_property
    def layout(self) -> Layout:
        if self.is_repeatable and self.prepared.replay is not None:
            return self.prepared.replay.layout
        targets, call = self.prepared.question, self.call
        both = (map(call.current, targets.params), map(call.current, targets.outputs))
        return lay_out(call, self.prepared.fields, *map(list, both))

    # --- results

    def jacobian(self) -> Any:
        """J in the structure of the outputs and params, in ``out`` if that was given."""
        repeated = self.form.repeated(self)
        if repeated is not None:
            self._warn_of_alerts()
            return repeated
        # a thread that a pipeline has started may compute a Jacobian of its own
        with backend.suspend_following(), self._checked_runs():
            blocks = self.form.blocks(self)
        return self.form.result(self, blocks)

    def value_and_jacobian(self) -> tuple[Any, Any]:
        """The outputs and J, in their structures."""
        with self.whole():
            result = self.jacobian()
            values = values_of(self.prepared, self.call, self.returned)
        return self.prepared.question.rebuild_outputs(values), result

    def blocks(self) -> list[list[Any]]:
        """J as ``[output][parameter]``: all columns at once or, to save memory, in several runs."""
        with self._checked_runs():
            return self.form.blocks(self)

    def _checked_runs(self) -> contextlib.AbstractContextManager[None]:
        """Check ``out``; within the context, a run that fails leaves everything as it was."""
        if self.out is not None:
            targets = (p.target for p in (*self.layout.params, *self.layout.outputs))
            others = [*(target.field for target in targets if target.field is not None), *self.call.args]
            check_out_is_separate(self.form.check_out(self), others)
        needs_state = self.least_runs > 1
        if self.call.kernel is None:
            needs_state |= self.form.may_begin_again or self.prepared.stores_to_arrays or not self.is_judged
        return self.undone_on_error(needs_state=needs_state)

    def column_blocks(
        self, count: int, first: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Yield successive blocks of columns: the first column, and the columns by output.

        A block has at most ``count`` columns, or fewer if the tangents of intermediates do not fit into memory.
        """
        end = self.column_count() if end is None else end
        while first < end:
            if not first:
                self.log.begin()
            is_partial = first > 0 or count < self.column_count()
            try:
                with backend.suspend_following(), self.undone_on_error(needs_state=is_partial or not self.is_judged):
                    _, columns = self.run(self.subject.target(), first, count)
            except StoresFoundError:
                if first:
                    warn_at_user(_EARLIER.format(first))
                continue
            except OverBudgetError:
                count = -(-count // 2)
                continue
            yield first, [values[:, : end - first] for values in columns]
            first += count

    # --- shapes

    def column_count(self) -> int:
        """The number of columns to compute: those of J, or the given directions."""
        return self.layout.count if self.directions is None else self.directions.shape[1]

    def parameter_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters, those of their elements included."""
        return [p.shape for p in self.layout.params]

    def output_shapes(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """The shapes of the outputs, those of their elements included, and their types."""
        return [(o.shape, o.result_dtype) for o in self.layout.outputs]

    # --- runs

    @property
    def what(self) -> Run:
        """What is run."""
        call = self.call
        args = call.args if call.kernel is None else call.full_args
        return Run(call.kernel, call.function, args, call.names, self.layout.passed)

    @contextlib.contextmanager
    def whole(self) -> Generator[None, None, None]:
        """A lock that keeps other threads out during all the runs of one kernel, and waits for one that moves params.

        The function of a pipeline may wait for other threads, so for pipelines only single launches are locked.
        """
        with backend.running(), backend.exclusive if self.call.kernel is not None else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def undone_on_error(self, *, needs_state: bool) -> Generator[None, None, None]:
        """Within the context, a run that fails leaves everything as it was."""
        with self.whole(), Stages(f"Jacobian of {self.call.name}", None if self.progress is False else stage_line()):
            may_go_over = self.call.kernel is None and self._max_memory() < math.inf
            if self.state is None and (needs_state or may_go_over):
                self.state = self.new_state()
            try:
                yield
            except (InvalidArgumentError, UnsupportedError):
                if self.state is not None:
                    self.state.undo()
                raise

    def new_state(self) -> State:
        """What keeps all that a run changes."""
        return State(self.call.python_state())

    def restore(self, reason: str = "", advice: str = "") -> None:
        """Put everything back as it was before the run: why there is another one, and how to avoid it."""
        self.state = self.state or State()  # of one kernel, which has not been launched
        self.state.restore(reason, advice)
        self.log.has_begun = False

    def run(
        self, target: DenseRows, first: int, count: int, *, is_repeated: bool = False
    ) -> tuple[Session, list[np.ndarray]]:
        """Run the kernel or pipeline for some columns, which are stored in ``target`` and returned by output.

        Every run after the first one starts from the same state; ``is_repeated``: whether there will be another one.
        All blocks of ``count`` columns share their kernels: the last one has columns of zeros behind those of J, which
        are not returned.
        """
        if self.log.has_begun and self.state is not None:
            self.restore()
        self.log.has_begun = True
        total = self.column_count()
        count = max(1, min(count, total))  # one column without tangents if the parameters have no entries
        is_part = self.call.kernel is None and (count < total or is_repeated)
        self.log.has_parts |= is_part
        restart = Restart(self.state, self.recorded(is_part=is_part), is_repeated, self._trace(first, count))
        session = self.session(target, first, count, restart)
        given, cuts = session.request.directions, ()
        with saying_once(self.said):
            if self.call.kernel is not None:
                planned = session.build(self.call.kernel, self.call.full_args, self.checked(session))
                self.returned = session.launch(planned).result
            else:
                assert isinstance(session, PipelineSession)
                pipeline = Pipeline(session)
                self.returned, cuts = pipeline.run(self.what), pipeline.cuts
                self.log.note_python_cuts(cuts, first)
            session.check_program()
            self._warn_of_alerts()
            shared, accesses = session.tangents.arrays.shared, session.accesses
            accessed = shared(accesses.read), shared(accesses.written)
            check_run(self.prepared, self.call, self.layout, accessed, has_launched=session.has_launched)
            rows = session.outputs()
            if first:
                rows = [values[:, : total - first] for values in rows]
            if self.call.kernel is None and not is_repeated and first + count >= total:
                self._judge(target, cuts)
            self.log.note_run(session, self.layout, self.prepared.fused.values())
            if given is None:
                self.log.note_columns(rows, first, is_last=first + count >= total)
            self.subject.note_run(session, self.layout)
        return session, rows

    def recorded(self, *, is_part: bool) -> RunRecord | None:
        """The launches and stores of a pipeline, if this may not be the only run; of parts, those that differ raise."""
        if self.call.kernel is not None or (self.is_judged and self.record is None and not is_part):
            return None
        self.record = self.record or RunRecord()
        self.record.begin(raises=is_part)
        return self.record

    def session(self, target: DenseRows, first: int, count: int, restart: Restart | None = None) -> Session:
        """A run for some columns that has not begun, see ``run``."""
        total = self.column_count()
        given = None if self.directions is None else self.directions[:, first : first + count]
        if given is not None and given.shape[1] < count:
            given = np.pad(given, ((0, 0), (0, count - given.shape[1])))
        blocks = max(1, -(-total // count))
        request = self.request(
            ColumnBlock(count, first if given is None else 0, blocks > 1 and given is None),
            directions=given,
            numbers=self.layout.numbers(given),
            max_memory=self._max_memory(),
            most_lines=self.form.most_lines(self),
            strategy=self.prepared.question.options.tangents,
            watch=self.watch,
            restart=restart or Restart(),
            energy=self.subject.energy(self.layout, is_product=given is not None, intermediates=target.of_energy),
        )
        self.prepared.fused.allow(blocks)
        kind = PipelineSession if self.call.kernel is None else Session
        return kind(request, self.prepared.fields, self.prepared.fused, target)

    def request(self, block: ColumnBlock, **options: Any) -> Request:
        """What one run computes; ``options`` are other attributes of the request."""
        layout = self.layout
        return Request(
            block=block,
            seeds=layout.seeds,
            arrays=layout.arrays,
            outputs=self.subject.outputs(layout),
            wants_return=any(o.target.kind == "return" for o in layout.outputs),
            **options,
        )

    def _trace(self, first: int, count: int) -> Trace | None:
        """What takes the numbers that the Python code of a pipeline passes on, in the first call of its kind."""
        if self._arbiter is None or not (first or self._arbiter.is_over):
            is_needed = not self.is_judged or self.prepared.stores_to_arrays
            self._arbiter = Arbiter(self.call, self.layout, self.directions) if is_needed else None
        if self._arbiter is None:
            return None
        self._arbiter.trace.begin(first, count)
        return self._arbiter.trace

    def _judge(self, target: DenseRows, cuts: Iterable[tuple[str, str, int]]) -> None:
        """Warn of derivatives that the Python code of a pipeline loses, in the first call of its kind.

        ``cuts``: where Python takes something of numbers that has no derivative.
        """
        prepared, arbiter = self.prepared, self._arbiter
        if arbiter is None or arbiter.is_over or self.state is None:
            return
        self._arbiter = None
        known = prepared.judged.get(self.path)
        if known is not None and not (known.seen and arbiter.is_doubtful(known)):
            return
        is_enough = self.directions is None or self.is_any or not arbiter.trace.found.events
        is_enough = target.tells_moves(arbiter.trace.found, [name for name, *_ in cuts], is_enough)
        findings, along = ArrayStores(), None if is_enough else self.judge_along
        if arbiter.may_find(has_all=is_enough):
            with backend.running(moves=True), self.state.including(arbiter.python):
                findings = arbiter.judge(self.state, list(prepared.fused.items()), prepared.fields, along)
        prepared.has_host_arrays |= any(event.is_array for event in arbiter.trace.found.events)
        if findings.seen or self.path not in prepared.judged:
            prepared.judged[self.path] = findings if known is None else known.plus(findings)
        if findings.equal:
            self._arbiter = arbiter
            arbiter.end(findings.equal)
            raise StoresFoundError

    def judge_along(self) -> ArrayStores:
        """Warn of derivatives that Python loses, by a run with a direction for each component of a param.

        Returns what Python stores, and notes of which components it takes something that has no derivative.
        """
        parts = [slice(p.first + k, p.first + p.size, p.element) for p in self.layout.params for k in range(p.element)]
        directions = np.zeros((self.layout.count, max(1, len(parts))))
        for n, part in enumerate(parts):
            directions[part, n] = np.random.default_rng(n).standard_normal(len(directions[part]))
        state = State()
        along = replace(self, directions=directions, is_any=True, state=state, record=None)
        try:
            for _ in along.column_blocks(directions.shape[1]):
                pass
        finally:
            state.undo()
        self.log.note_python_cuts_along(along.log, directions)
        return self.prepared.judged.get(self.path, ArrayStores())

    @property
    def is_repeatable(self) -> bool:
        """Whether this is one kernel without arguments, which can be launched without a session."""
        call = self.call
        return call.kernel is not None and not call.args and self.watch is None

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the fields and arrays of this call."""
        args: tuple[Any, ...] = self.call.args
        sized = (a for a in args if backend.is_array(a) or isinstance(a, backend.Field))
        return tuple(tuple(a.shape) for a in sized)

    @cached_property
    def _flags_before(self) -> Hashable:
        return flags_of(self.call.function) if self.call.kernel is None else ()

    @property
    def path(self) -> Hashable:
        """What a pipeline does may depend on flags, words and functions, and with arrays on numbers and shapes."""
        outside = self._flags_before if len(self.prepared.judged) < _MOST_PATHS else ()
        args = tuple(getattr(a, "__code__", a) for a in self.call.args)
        flags = tuple(a for a in args if isinstance(a, (bool, np.bool_, str, types.CodeType, type(None))))
        if not self.prepared.has_host_arrays:
            return flags, outside
        return flags, outside, self.sizes, tuple(a for a in args if isinstance(a, (int, np.integer)))

    @property
    def is_judged(self) -> bool:
        """Whether this is a single kernel, or an ``Arbiter`` has seen such a call."""
        return self.call.kernel is not None or self.path in self.prepared.judged

    def note_judged(self) -> None:
        """Note that Python loses no derivative in such calls."""
        if not self.is_judged:
            self.prepared.judged[self.path] = ArrayStores()

    def _max_memory(self) -> float:
        """Bytes available for tangents other than J."""
        limit = self.prepared.question.options.max_memory
        if limit is not None:
            return limit
        has_fit = self.least_runs == 1 and self.sizes in self.prepared.runs
        return math.inf if has_fit else available_memory() / 2

    # --- checks

    def places(self) -> list[object] | None:
        """For each output the memory of ``out`` in which its Jacobian can be computed."""
        if self.out is None or self.form.as_matrix or len(self.layout.params) != 1 or self.call.kernel is None:
            return None
        return [in_place(target, list(self.call.args)) for _, target in self.form.leaves(self)]

    def checked(self, session: Session) -> Callable[[JacobianKernel, Mapping[Key, Key]], None]:
        """A check that the kernel reads every parameter and writes every output."""
        shared = session.tangents.arrays.shared

        def check(fused: JacobianKernel, outer: Mapping[Key, Key]) -> None:
            read, written = (shared(outer.get(k, k) for k in keys) for keys in (fused.facts.read, fused.facts.written))
            check_accesses(self.call, self.layout, read, written)

        return check

    def _warn_of_alerts(self) -> None:
        alerts = backend.raised_alerts()
        if alerts:
            paths = [fused.facts.report.paths() for fused in self.prepared.fused.values()]
            warn_of_alerts(alerts, self.prepared.fields, self.layout, paths)


# J as dense arrays, in as few runs as memory allows.


class DenseForm:
    """J as dense arrays; ``as_matrix``: as one matrix over all outputs and parameters."""

    may_begin_again = False  # whether a run may show that another one is needed
    keeps_launch = True  # of a run for all columns, for ``repeated``

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
        rows = self.rows(evaluation)
        if rows is not None:
            return rows
        prepared, total, parts = evaluation.prepared, evaluation.column_count(), list[list[np.ndarray]]()
        while not parts:
            evaluation.log.begin()
            is_whole, count = evaluation.least_runs == 1, max(1, -(-total // evaluation.least_runs))
            places = evaluation.places() if is_whole else None
            progress = False if is_whole else evaluation.progress
            try:
                with progress_bar(progress, f"Columns of J, {evaluation.call.name}", total) as advance:
                    for first in range(0, max(1, total), count):
                        target, is_repeated = evaluation.subject.target(places), first + count < total
                        parts.append(evaluation.run(target, first, count, is_repeated=is_repeated)[1])
                        advance(count)
            except StoresFoundError:
                parts.clear()
            except OverBudgetError:
                parts.clear()
                evaluation.state = evaluation.state or State()  # of one kernel, which has not been launched
                evaluation.least_runs *= 2
        prepared.runs[evaluation.sizes] = evaluation.least_runs
        if evaluation.least_runs == 1 and evaluation.form.keeps_launch:
            kernels = list(prepared.fused.values()) if evaluation.is_repeatable else []
            prepared.replay = Replay.of_field(kernels, evaluation.layout)
        dense = [v[0] if len(v) == 1 else np.concatenate(v, axis=1) for v in map(list, zip(*parts, strict=True))]
        for n, values in enumerate(dense):  # an output that is named twice has memory of its own
            if any(np.may_share_memory(values, other) for other in dense[:n]):
                dense[n] = values.copy()
        return evaluation.subject.of_dense(dense, evaluation.layout)

    def most_lines(self, evaluation: Evaluation) -> float:
        """Of a kernel, from which on another way is tried."""
        return math.inf

    def rows(self, evaluation: Evaluation) -> list[list[np.ndarray]] | None:
        """The blocks of J by its rows, where these are computed; None otherwise."""
        return None

    def repeated(self, evaluation: Evaluation) -> Any:
        """J by a launch like that of the call before; None if there is no such launch."""
        replay, out = evaluation.prepared.replay, evaluation.out
        if replay is None or not evaluation.is_repeatable or not replay.is_current:
            return None
        if evaluation.state is not None:  # the run is undone
            return None
        rows = replay.dense(evaluation.call.full_args, out)
        return self.structured(evaluation, [[rows]]) if out is None and rows is not None else rows

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
