"""The run of a pipeline: its launches, and the reads and stores of Python between them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.analysis.changes import written_containers
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.labels import Label
from taichi_ext.launches import FieldKey, JacobianKernel, PipelineArgument, container_key
from taichi_ext.program.keys import RETURN, Key
from taichi_ext.record import record
from taichi_ext.runtime.launching.session import (
    LaunchRecord,
    PlannedLaunch,
    Session,
    is_among,
    is_repeatable,
    warn_of_changes,
)
from taichi_ext.runtime.launching.tangents import Restart, save_stored
from taichi_ext.runtime.launching.trace import is_host_array
from taichi_ext.runtime.memory.regions import View
from taichi_ext.runtime.memory.shadows import FieldTable, Shadow, row_of_entry, rows_under, view_of
from taichi_ext.runtime.memory.state import State
from taichi_ext.runtime.python.dual_numbers import (
    UNKNOWN,
    DualFollower,
    DualNumber,
    PipelineRun,
    Run,
    dual_like,
    is_dual,
    plain_number,
    warn_at_user,
    warn_of_old_number,
)
from taichi_ext.runtime.python.reached import forget_tangents, reachable_arrays
from taichi_ext.runtime.python.run_record import entries_of, numbers_like, warn_of_captured

# Solvers of implicit functions in a pipeline: their unknowns get the tangents that their equation gives.
#
# If ``residual(x, p) = 0`` defines x, then ``dx = -(d residual / d x)^-1 (d residual / d p) dp`` (the implicit function
# theorem). ``(d residual / d p) dp`` are the tangents of the residuals in a run of ``residual`` in which the unknowns
# have none.


@dataclass(frozen=True)
class Root:
    """A call of the solver of an implicit function.

    Attributes:
        name: of the solver.
        solver: runs it.
        residual: computes the residuals.
        unknowns: the fields and arrays that it solves for.
        residuals: the fields and arrays that are zero at the solution.
        arrays: NumPy arrays and tensors that ``residual`` may read.
        step: at the solution, takes values of the residuals and columns of right-hand sides b, and gives the solution
            of ``(d residual / d x) dx = b`` for each; it warns if the residuals are far from zero.
    """

    name: str
    solver: Callable[[], object]
    residual: Callable[[], object]
    unknowns: Sequence[Any]
    residuals: Sequence[Any]
    arrays: Sequence[Any]
    step: Callable[..., np.ndarray]

    def solve(self, solving: Solving) -> Any:
        """Run the solver."""
        before = [(array, np.array(backend.as_numpy(array))) for array in self.arrays]
        with backend.FollowedBy(solving) if backend.pipeline_follower() else backend.follow(solving):
            result = self.solver()
        for array, numbers in before:
            if _differs(array, numbers):
                solving.note(array)
        return result

    def values(self, table: FieldTable, written: Set[object]) -> np.ndarray:
        """The residuals; raises if one of the fields and arrays was not written."""
        for obj in self.residuals:
            key, name = part_of(obj, table)
            if not is_among(container_key(key), written):
                raise InvalidArgumentError(f"The residual of {self.name} does not write {name}, one of its residuals.")
        with backend.suspend_following():
            return np.concatenate([np.array(backend.as_numpy(obj)).reshape(-1) for obj in self.residuals])

    def refuse(self, changed: Label | str) -> None:
        """Raise as the residual reads what the solver changes besides its unknowns."""
        raise InvalidArgumentError(
            f"The residual of {self.name} reads {changed}, which the solver changes, too, and which is not among the "
            "unknowns. Add it to unknowns, or compute it in the residual."
        )

    def warn(self, changed: Label | str) -> None:
        """Warn as something after the solver reads what that has changed besides its unknowns."""
        warn_at_user(
            f"{changed} was changed by {self.name}, which solves for other fields, and is read after it: it counts as "
            "a constant. Add it to unknowns, or compute it from the unknowns after the solver."
        )


class Solving(backend.Follower):
    """Follows a solver: its launches and stores are made as they are.

    Args:
        table: the fields of the pipeline.
        save: saves a field or array before it is changed.
        clear: takes a field or array that has changed, or an array or entry that Python has stored to with an index.

    Attributes:
        changed: the names of the fields and arrays that it has changed, by key.
    """

    runs_plainly = True  # so that solvers of this package can run in it

    def __init__(self, table: FieldTable, save: Callable[[Any], None], clear: Callable[..., object]) -> None:
        self._table, self._save, self._clear = table, save, clear
        self.changed: dict[Key, Label | str] = {}
        self._noted: set[int] = set()  # kernels of numbers alone, which change the same in each launch

    def note(self, obj: Any, *index: object) -> None:
        """A field, array or entry has changed."""
        if (part := part_of(obj, self._table)) is not None:
            self.changed[container_key(part[0])] = part[1]
            self._clear(obj, *index)

    def launch(self, kernel: backend.Kernel, args: tuple[object, ...]) -> Any:
        with backend.exclusive:
            if id(kernel) in self._noted:
                with backend.suspend_following():
                    return kernel(*args)
            changed = _changed_by(kernel, args, self._table)
            suspects = self._with_numbers(kernel, args) if changed is None else [(obj, None) for obj in changed]
            for obj, _ in suspects:
                self._save(obj)
            with backend.suspend_following():
                result = kernel(*args)
                touched = [obj for obj, before in suspects if before is None or _differs(obj, before)]
            for obj in touched:
                self.note(obj)
            if changed is not None and backend.takes_numbers_alone(kernel):
                self._noted.add(id(kernel))
            return result

    def _with_numbers(self, kernel: backend.Kernel, args: tuple[Any, ...]) -> list[tuple[Any, Any]]:
        """The fields and arrays that a kernel which cannot be recorded may change, with their numbers."""
        given = (v for v in backend.leaf_values(kernel, args) if backend.is_array(v) or isinstance(v, backend.Field))
        known = (info.obj for info in self._table.infos.values() if not backend.ended_problem(info.obj))
        with backend.suspend_following():
            return [(obj, np.array(backend.as_numpy(obj))) for obj in (*given, *known)]

    def before_host_write(self, obj: object, value: object) -> None:
        """Python is about to store to a field or array."""
        self._save(obj)

    def host_write(self, obj: Any, index: object, value: object) -> None:
        """Python has stored to an entry of a field, or to an array."""
        self.note(obj, index)

    def note_field(self, field: Any) -> None:
        """Python accesses entries of a field, perhaps before a kernel does."""
        for part in backend.leaf_fields(field):
            self._table.field(part)


def _changed_by(kernel: backend.Kernel, args: tuple[Any, ...], table: FieldTable) -> list[object] | None:
    """The fields and arrays that a launch changes; None if the kernel cannot be recorded."""
    if backend.is_reading_kernel(kernel):
        return []
    name = id(kernel), backend.argument_features(kernel, args)
    if name not in table.changes:
        try:
            written = written_containers(record(kernel, args).body)
        except UnsupportedError:
            written = None
        table.changes[name] = (
            kernel,
            None if written is None else [c.name if c.is_argument else c.object for c in written],
        )
    _, written = table.changes[name]
    if written is None:
        return None
    values = backend.leaf_values(kernel, args)
    positions = {leaf.name: leaf.position for leaf in backend.leaf_arguments(kernel)}
    return [values[positions[x]] if isinstance(x, str) else x for x in written]


def _differs(obj: Any, before: np.ndarray) -> bool:
    return not np.array_equal(backend.as_numpy(obj), before, equal_nan=True)


def part_of(obj: Any, table: FieldTable) -> Any:
    """The key and name of an array, field or component, or of the field of an entry; None if they are of integers."""
    if backend.is_array(obj):
        return (view_of(obj), "an array") if backend.is_real(backend.outer_array_dtype(obj)) else None
    if isinstance(obj, backend.FieldEntry):
        entry = table.by_entry(obj)
        return None if entry is None else (entry[0].key, entry[0].name)
    return None if table.field(obj) is None else (table.part(obj).key, table.part(obj).name)


class TangentMatrix:
    """The tangents of a list of fields and arrays as one matrix, a row for each number."""

    def __init__(self, objects: Sequence[Any], session: PipelineSession) -> None:
        self._tangents, self.keys = session.tangents, list[Any]()
        for obj in objects:
            self.keys.append(part_of(obj, session.table)[0])
            if backend.is_array(obj):
                session.tangents.arrays.include(obj, self.keys[-1])
        self.containers = set(map(container_key, self.keys))
        self._sizes = [backend.as_numpy(obj).size for obj in objects]

    def read(self) -> np.ndarray | None:
        tangents, parts = self._tangents, list[np.ndarray]()
        carries = [tangents.carries(container_key(key)) for key in self.keys]
        for key, size, is_active in zip(self.keys, self._sizes, carries, strict=True):
            if is_active:
                tangents.shadow(container_key(key))
            parts.append(tangents.values(key) if is_active else np.zeros((size, tangents.columns.count)))
        return np.concatenate(parts) if any(carries) else None

    def write(self, rows: np.ndarray) -> None:
        for key, part in zip(self.keys, np.split(rows, np.cumsum(self._sizes)[:-1]), strict=True):
            self._tangents.replace(key, part)


class PipelineSession(Session):
    """The launches of a pipeline, between which Python reads and stores numbers."""

    _kept: dict[Key, np.ndarray] | None = None  # tangents that are put back at the end of ``undone``

    @property
    def is_repeated(self) -> bool:
        return self.target.is_dense

    def wants_return(self, kernel: backend.Kernel) -> bool:
        """Whether Python gets the numbers that a kernel returns with their tangents."""
        dtype = None
        if kernel.return_type is not None and self.target.has_dual_numbers:
            dtype = backend.return_dtype(kernel)
        return dtype is not None and backend.is_real(dtype)

    def launched(self, kernel: backend.Kernel, args: tuple[object, ...], run: PipelineRun) -> LaunchRecord:
        """Run a kernel that the pipeline launches, and its tangents."""
        planned, trace = self.build(kernel, args, run=run), self.request.restart.trace
        if trace is None:
            return self.launch(planned)
        if run.has_numbers:
            warn_of_captured(planned.fused.kernel.captures, kernel, run)
        stores = trace.launch(kernel, planned.values, planned.fused.facts, planned.passed, self.tangents.along)
        if self.clear(stores):  # roles are others now
            planned = self.build(kernel, args, run=run)
        record = self.launch(planned)
        trace.after_launch(kernel, planned.values)
        return record

    def before_launch(self, planned: PlannedLaunch) -> None:
        """Also compare the arrays that the kernel reads with the run before, and make room for what it returns."""
        super().before_launch(planned)
        fused, outer, record = planned.fused, planned.binding.outer, self.request.restart.record
        if record is not None:
            record.arrays(fused.primal, fused.facts.read_arguments, planned.values)
        self.keep(outer.get(k, k) for k in fused.facts.written)
        if RETURN in fused.shadows:
            count = math.prod(backend.return_shape(fused.primal))
            dtype = backend.return_dtype(fused.primal)
            columns = self.tangents.columns.count
            self.tangents.hold(RETURN, Shadow("the return value", count, columns, dtype))

    def result(self, launched: LaunchRecord, run: PipelineRun) -> Any:
        """The value that a kernel has returned, its numbers with tangents."""
        value = launched.result
        if backend.return_dtype(launched.fused.primal) is None:
            return value
        is_known = RETURN in launched.fused.shadows
        return dual_like(value, iter(self.tangents.values(RETURN)) if is_known else repeat(UNKNOWN), run)

    def clear(self, stores: Iterable[tuple[View, np.ndarray]]) -> bool:
        """Clear the tangents of entries of arrays that Python has stored to; whether there were any."""
        is_changed = False
        for view, entries in stores:
            rows = self.tangents.rows(view)
            rows = np.arange(rows.start, rows.stop)[entries] if isinstance(rows, slice) else rows[entries]
            if self.tangents.clear(view, rows):
                is_changed = True
                if not self.accesses.overwritten:
                    warn_of_changes(self.tangents.carrier(view).name, len(rows))
                self.accesses.note_overwritten(self.tangents.arrays.shared([view]))
        return is_changed

    def follow_arrays(self) -> None:
        """Notice entries of NumPy arrays and tensors that Python code changed since the last launch."""
        self.clear((region.layout, rows) for region, rows in self.tangents.arrays.regions.changes())

    @contextlib.contextmanager
    def undone(self) -> Iterator[tuple[State, set[Key]]]:
        """Within the context, what launches store is saved in a state, and put back at the end, with its tangents.

        Gives the state, and the set of the containers that are written.
        """
        request, state, before, written = self.request, State(), self.accesses.written, set[Key]()
        kept, own = self._kept, dict[Key, np.ndarray]()
        self.request = replace(request, restart=Restart(state))
        self.accesses.written, self._kept = written, own
        try:
            yield state, written
        finally:
            for key in written:
                self.tangents.clear(key, self.tangents.rows(key))
            for key, rows in own.items():
                self.tangents.replace(key, rows)
            before |= written  # in place: another solver's residual may be around this one
            self.request, self.accesses.written, self._kept = request, before, kept
            state.undo()

    def keep(self, written: Iterable[Key]) -> None:
        """Keep the tangents of what is about to be written, within ``undone``."""
        kept = self._kept
        if kept is None:
            return
        for key in written:
            is_first = isinstance(key, (FieldKey, View)) and key not in kept and key not in self.accesses.written
            if is_first and self.tangents.carries(key):
                self.tangents.shadow(key)
                kept[key] = np.array(self.tangents.values(key))


class Pipeline(DualFollower):
    """Follows a Python function: ``backend.follow`` reports the function's accesses to fields and arrays to it."""

    def __init__(self, session: PipelineSession) -> None:
        super().__init__()
        restart = session.request.restart
        self._session = session
        self._tangents = session.tangents
        self._state, self._record, self._trace = restart.state, restart.record, restart.trace
        if self._trace is not None and self._trace.direction is not None:
            self._numbers.cuts = {}
        # by kernel and arguments, which the record keeps alive: the name contains their identities
        self._repeated: dict[object, tuple[LaunchRecord, backend.RepeatedLaunch]] = {}

    @property
    def cuts(self) -> Mapping[tuple[str, str, int], Any]:
        """Where Python takes something of numbers that has no derivative, see ``PipelineRun``."""
        return self._numbers.cuts or {}

    def run(self, run: Run) -> Any:
        """Run a function; returns its result."""
        session, numbers, rows_of = self._session, self._numbers, self._tangents.columns.rows_of
        if self._state is not None:
            for array in reachable_arrays(run.function, run.args):
                self._state.save(array)
        self._remember()
        if self._trace is not None:
            self._trace.remember(filter(is_host_array, run.args))
            if run.passed:
                self._trace.note_read()
        result = self.follow(run, lambda column: rows_of(column, 1)[0])
        if numbers.has_numbers:
            result = forget_tangents(result, run.function, run.args)
        session.accesses.note({PipelineArgument(name) for name in numbers.passed}, set())
        session.accesses.lost.note({container_key(output.key) for output in session.request.outputs}, set())
        session.check_program()
        if self._trace is not None:
            session.clear(self._trace.end(self._tangents.along))
        self._session.follow_arrays()
        if self._record is not None:
            self._record.end()
        session.target.end_pipeline(session.request.energy.key)
        return result

    def _remember(self) -> None:
        """Python goes on, and may read and change arrays."""
        arrays = self._tangents.arrays
        arrays.remember()
        if self._trace is not None and self._trace.sees_arrays and arrays.has_host_memory():
            self._trace.note_read()

    # --- launches

    def launch(self, kernel: backend.Kernel, args: tuple[object, ...]) -> Any:
        with backend.exclusive:
            if self._record is not None:
                self._record.launch(kernel, args)
            if backend.is_fill(kernel) and any(map(is_dual, entries_of(args[1]))):
                self._fill(*args)
                return None
            name = (id(kernel), *map(id, args))
            if self._is_as_before(name):
                return self._repeated[name][1]({})
            self._session.check_program()
            if self.runs_plainly_here(kernel, args, self._deactivate):
                return None
            self._session.follow_arrays()
            launched = self._session.launched(kernel, args, self._numbers)
            self._remember()  # before Python goes on
            if self._is_repeatable(kernel, launched.fused):  # if nothing is fresh any more, the next launch is the same
                repeated = backend.RepeatedLaunch(launched.fused.kernel, dict(enumerate(launched.passed)))
                self._repeated[name] = launched, repeated
            if not launched.fused.facts.returns_active:
                return launched.result
            if self._trace is not None:
                self._trace.note_read()
            return self._session.result(launched, self._numbers)

    def _fill(self, field: Any, value: Any) -> None:
        """Store numbers with tangents to each entry of a field."""
        self.before_host_write(field, value)
        info = self._session.table.field(field)
        numbers = entries_of(value)
        with backend.suspend_following():
            field.fill(numbers_like(value, map(plain_number, numbers)))
        if info is not None:
            for rows, number in zip(self._session.table.rows_by_component(field), numbers, strict=True):
                self._stored((info.key, rows), number)

    def _is_as_before(self, name: object) -> bool:
        """Whether a launch was made before and nothing that it depends on has changed."""
        if name not in self._repeated or backend.is_gradient_replaced():
            return False
        launched, _ = self._repeated[name]
        return launched.changes == self._tangents.changes and is_repeatable(launched.fused)

    def _is_repeatable(self, kernel: backend.Kernel, fused: JacobianKernel) -> bool:
        """Whether the containers that a kernel writes have been saved, and the launch does not depend on the call."""
        is_simple = not len(self._tangents.arrays.regions) and backend.is_plain_call(kernel)
        is_simple = is_simple and not any(array.is_scratch for array in fused.first_order)  # new in each launch
        params = set(map(container_key, self._session.accesses.params))
        return is_simple and not fused.sites and not fused.facts.written & params

    def _deactivate(self, node: backend.SNode, run: Callable[[], object]) -> None:
        """Clear the tangents under a node: its entries are constants from now on."""
        if self._state is not None:
            self._state.save_part(node)
        run()
        if backend.node_kind(node) == "bitmasked":
            return  # Taichi keeps the memory of these nodes, and reads it
        infos = self._session.table.infos
        for info in [infos[key] for key in self._tangents.field_keys() if key in infos]:
            if backend.is_under(info.obj, node):
                self._tangents.clear(info.key, rows_under(info, node))

    # --- solvers of implicit functions

    def root(self, root: Root) -> Any:
        """Run a solver, and give its unknowns the tangents of the implicit function."""
        session, tangents = self._session, self._tangents
        session.target.check_root(root.name)
        for unknown in root.unknowns:
            self._save(unknown)
        solving, lost = Solving(session.table, self._save, self._clear_changed), session.accesses.lost
        result = root.solve(solving)
        for region, rows in tangents.arrays.regions.changes():
            tangents.clear(region.layout, rows)
        tangents.arrays.remember()
        unknowns = TangentMatrix(root.unknowns, session)
        session.accesses.note(set(), tangents.arrays.shared(unknowns.containers))
        changed = {key: name for key, name in solving.changed.items() if not is_among(key, unknowns.containers)}
        lost.add(changed, root.refuse)
        with self._undone() as written:
            root.residual()
            right = TangentMatrix(root.residuals, session).read()
            values = root.values(session.table, written)
        lost.add(changed, root.warn)
        if right is not None:
            with backend.suspend_following():
                direction = -root.step(values, right)
            TangentMatrix(root.unknowns, session).write(direction)
        self._remember()
        if self._trace is not None:
            self._trace.remember(filter(is_host_array, root.unknowns))
            if result is not None:
                self._trace.note_read()
        return result

    def _clear_changed(self, obj: Any, *index: object) -> None:
        """A solver has changed a field, array or entry: it has no tangents any more."""
        key, _ = part_of(obj, self._session.table)
        if index:
            self.host_write(obj, index[0], None)
        elif self._tangents.carries(container_key(key)):
            if backend.is_array(obj):
                self._tangents.arrays.include(obj, key)
            self._tangents.clear(container_key(key), self._tangents.rows(key))

    @contextlib.contextmanager
    def _undone(self) -> Iterator[set[Key]]:
        """Within the context, what kernels and Python store is put back at the end, with its tangents."""
        before = self._state, self._record, self._trace, self._repeated
        with self._session.undone() as (self._state, written):
            self._record, self._trace, self._repeated = None, None, {}
            try:
                yield written
            finally:
                self._state, self._record, self._trace, self._repeated = before

    # --- stores and reads of Python between launches

    def before_host_write(self, obj: object, value: object) -> None:
        """Python is about to assign to a field or array, or through a host accessor of a matrix field."""
        if self._record is not None:
            self._record.store(obj, value)
        if self._trace is not None:
            self._trace.store(value)
        self._save(obj)

    def _save(self, obj: object) -> None:
        """Save a field, an array or an entry before it is changed."""
        if self._state is not None:
            save_stored(self._state, self._session.table, obj, self.touched)

    def host_write(self, obj: Any, index: object, value: object) -> None:
        """Python has stored a value to an entry of a field, or to an array: the index of a component may follow."""
        entries = entries_of(value) if isinstance(value, backend.Matrix) else [value]
        is_added = any(map(self.is_own, entries))
        place = self._place(obj, index, is_added=is_added)
        if is_added and place is not None and index is ...:  # a vector in each entry of an array
            for n, number in enumerate(entries):
                self._stored((place[0], slice(n, None, len(entries))), number)
        elif place is not None or is_dual(value):
            self._stored(place, value)

    def _stored(self, place: tuple[Key, Any] | None, value: object) -> None:
        """Rows of a container have got a value."""
        if isinstance(value, DualNumber) and value.run.is_over:
            warn_of_old_number()
        if place is None:
            return
        key, rows = place
        self._session.keep([key])
        info = self._session.table.infos.get(key)
        if isinstance(rows, slice) or (info is not None and info.size == 1):
            self._session.accesses.lost.note(set(), {key})
        if self.is_own(value):
            self._numbers.passed |= value.names
            self._session.accesses.note_stored(key)
            self._tangents.store_row(key, rows, value.tangent)
            return
        written = self._tangents.arrays.shared([key])
        self._session.accesses.written |= written
        if self._tangents.clear(key, rows):  # the entries are constants from now on
            self._session.accesses.note_overwritten(written)

    def host_read(self, obj: Any, index: object, value: object) -> object:
        """The value that Python reads, a number with its tangent."""
        if self._record is not None:
            self._record.note_read()
        place, trace = self._place(obj, index), self._trace
        if place is not None and self._session.accesses.lost.read(place[0], value) and trace is not None:
            trace.note_read()
        if place is not None and self._tangents.is_active(place[0]):
            if trace is not None:
                trace.note_read()
            self._session.accesses.note_read(place[0])
            if isinstance(value, float):
                tangent, column = self._session.target.number(self._tangents, place[0], int(place[1]))
                value = DualNumber(value, tangent, self._numbers, column=column)
        if trace is not None:
            trace.read(value)
        return value

    def _place(self, obj: Any, index: object, *, is_added: bool = False) -> tuple[Key, Any] | None:
        """The container of an access from Python, and the rows of its tangents; None for one that has none."""
        table = self._session.table
        if isinstance(obj, backend.Field):
            info = table.field(obj)
            return None if info is None else (info.key, slice(None))
        if isinstance(obj, backend.FieldEntry):
            entry = table.by_entry(obj)
            if entry is None and is_added:
                for field in self.touched():
                    table.field(field)
                entry = table.by_entry(obj)
            return None if entry is None else (entry[0].key, row_of_entry(*entry, obj.index))
        key = view_of(obj)
        if is_added and backend.is_real(obj.dtype):
            self._tangents.arrays.include(obj, key)
        if index is ...:
            return key, slice(None)
        return key, backend.rows_of_index(obj, index)
