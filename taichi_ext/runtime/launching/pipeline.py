"""The run of a pipeline: its launches, and the reads and stores of Python between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.differentiate.forms.entry_sites import DenseRowsError
from taichi_ext.errors import UnsupportedError
from taichi_ext.launches import JacobianKernel, PipelineArgument, container_key
from taichi_ext.program.keys import Key
from taichi_ext.runtime.launching.roots import Root, Solving, TangentMatrix, part_of
from taichi_ext.runtime.launching.session import Session, is_among, is_repeatable, warn_of_changes
from taichi_ext.runtime.launching.tangents import save_stored
from taichi_ext.runtime.launching.trace import is_host_array
from taichi_ext.runtime.memory.shadows import row_of_entry, rows_under, view_of
from taichi_ext.runtime.python.dual_numbers import (
    DualFollower,
    DualNumber,
    Run,
    forget_tangents,
    is_dual,
    plain_number,
    reachable_arrays,
    warn_of_old_number,
)
from taichi_ext.runtime.python.run_record import entries_of, numbers_like


class Pipeline(DualFollower):
    """Follows a Python function: ``backend.follow`` reports the function's accesses to fields and arrays to it."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        restart = session.request.restart
        self._session = session
        self._tangents = session.tangents
        self._state, self._record, self._trace = restart.state, restart.record, restart.trace
        if self._trace is not None and self._trace.direction is not None and session.request.directions is None:
            self._numbers.cuts = {}
        self._repeated: dict[
            object, tuple[int, JacobianKernel, backend.RepeatedLaunch, object]
        ] = {}  # by kernel and arguments

    @property
    def cuts(self) -> Mapping[tuple[str, str, int], np.ndarray]:
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
        self._follow_host_arrays()
        if self._record is not None:
            self._record.end()
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
            if backend.is_fill(kernel) and any(map(is_dual, entries_of(args[1]))):
                self._fill(*args)
                return None
            if self._record is not None:
                self._record.launch(kernel, args)
            name = (id(kernel), *map(id, args))
            if self._is_as_before(name):
                return self._repeated[name][2]({})
            self._session.check_program()
            if self.runs_plainly_here(kernel, args, self._deactivate):
                return None
            self._follow_host_arrays()
            launched = self._session.launch(kernel, args, run=self._numbers)
            self._remember()  # before Python goes on
            if self._is_repeatable(kernel, launched.fused):  # if nothing is fresh any more, the next launch is the same
                repeated = backend.RepeatedLaunch(launched.fused.kernel, dict(enumerate(launched.passed)))
                # with its arguments, which stay alive: the name contains their identities
                self._repeated[name] = launched.changes, launched.fused, repeated, launched.args
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
        changes, fused, *_ = self._repeated[name]
        return changes == self._tangents.changes and is_repeatable(fused)

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
        if not session.is_dense:
            raise DenseRowsError(f"{root.name} solves for unknowns, which depend on all params")
        if session.request.energy is not None:
            raise UnsupportedError(
                f"Second derivatives of {root.name}, the root of an equation, are not supported: they need those of "
                "its residual along each tangent of its unknowns. Take differences of value_and_gradient instead."
            )
        for unknown in root.unknowns:
            self._save(unknown)
        solving, lost = Solving(session.table, self._save, self._clear_changed), session.accesses.lost
        result = root.solve(solving)
        for _, key, rows in list(tangents.arrays.changed()):
            tangents.clear(key, rows)
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
                found = -root.step(values, right)
            TangentMatrix(root.unknowns, session).write(found)
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
            save_stored(self._state, self._session.table, obj)

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
        written = self._tangents.arrays.shared([key])
        if self.is_own(value):
            self._numbers.passed |= value.names
            self._session.accesses.note(set(), written)
            self._tangents.store_row(key, rows, value.tangent)
            return
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
                tangent, column = self._tangents.row(place[0], int(place[1]))
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
            found = table.by_entry(obj)
            if found is None and is_added:
                for field in self.touched():
                    table.field(field)
                found = table.by_entry(obj)
            return None if found is None else (found[0].key, row_of_entry(*found, obj.index))
        key = view_of(obj)
        if is_added and backend.is_real(obj.dtype):
            self._tangents.arrays.include(obj, key)
        if index is ...:
            return key, slice(None)
        return key, backend.rows_of_index(obj, index)

    def _follow_host_arrays(self) -> None:
        """Notice entries of NumPy arrays and tensors that Python code changed since the last launch."""
        accesses, arrays = self._session.accesses, self._tangents.arrays
        for name, key, rows in list(arrays.changed()):
            self._tangents.clear(key, rows)
            if not accesses.overwritten:
                warn_of_changes(name, len(rows))
            accesses.note_overwritten(arrays.shared([key]))
