"""The run of a pipeline: its launches, and the reads and stores of Python between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.differentiate.forms.keys import Key
from taichi_ext.differentiate.forms.sparse_columns import DenseRowsError
from taichi_ext.errors import UnsupportedError
from taichi_ext.launches import Fused, PipelineArgument, container_key
from taichi_ext.runtime.launching.launch_checks import STORED, warn_of_changes, warn_of_lost_tangents
from taichi_ext.runtime.launching.lookahead import Lookahead
from taichi_ext.runtime.launching.repetitions import Repetition
from taichi_ext.runtime.launching.roots import Root, Rows, Solving
from taichi_ext.runtime.launching.session import Launched, Session
from taichi_ext.runtime.memory.field_tangents import row_of_entry, rows_under
from taichi_ext.runtime.memory.shadows import rows_of_index, view_of
from taichi_ext.runtime.python.active_numbers import ActiveNumbers
from taichi_ext.runtime.python.passed_numbers import PipelineRun, with_tangents
from taichi_ext.runtime.python.reachable import reachable_arrays
from taichi_ext.runtime.python.warning import warn_at_user
from taichi_ext.runtime.python.watch import PythonRun, watching


class Pipeline:
    """Follows a Python function: ``backend.follow`` reports the function's accesses to fields and arrays to it."""

    def __init__(self, session: Session) -> None:
        arrays, restart = session.tangents.arrays, session.request.restart
        self._session = session
        self._tangents = session.tangents
        self._state, self._record = restart.state, restart.record
        self._python = PythonRun(ActiveNumbers(arrays.is_active_memory), arrays.stores)
        self._numbers: PipelineRun | None = None  # if arguments of the function are parameters
        self._repetitions: dict[object, tuple[int, Repetition, object]] = {}  # by kernel and arguments
        self._lookahead = Lookahead(Pipeline.run.__code__)

    def run(self, function: Any, args: tuple[object, ...], names: list[str], passed: dict[int, int]) -> Any:
        """Run a function; returns its result.

        Args:
            function: the pipeline.
            args: its arguments.
            names: the names of the arguments.
            passed: the first columns of arguments that are numbers and parameters, by position.
        """
        session, given, numbers = self._session, list(args), PipelineRun(warn_at_user)
        if self._state is not None:
            for array in reachable_arrays(function, args):
                self._state.save(array)
        self._tangents.arrays.remember()
        for position, column in passed.items():
            self._numbers = numbers
            given[position] = with_tangents(args[position], names[position], column, numbers)
        with backend.follow(self), watching(self._python, function), numbers:
            result = function(*given)
        session.accesses.note({PipelineArgument(name) for name in numbers.passed}, set())
        session.check_program()
        self._follow_host_arrays()
        if self._record is not None:
            self._record.end()
        return result

    # --- launches

    def launch(self, kernel: backend.Kernel, args: tuple[object, ...]) -> Any:
        """Run a kernel and its tangents."""
        with backend.exclusive:
            if self._record is not None:
                self._record.launch(kernel, args)
            name = (id(kernel), *map(id, args))
            if self._is_as_before(name):
                return self._repetitions[name][1].again()
            self._session.check_program()
            if self._runs_plainly(kernel, args):
                with backend.suspend_following():
                    return kernel(*args)
            self._follow_host_arrays()
            warn_of_lost_tangents(kernel, backend.leaf_values(kernel, args), self._python.is_lost)
            launched = self._session.launch(kernel, args, lookahead=self._lookahead, run=self._numbers)
            self._tangents.arrays.remember()  # before Python goes on
            if self._is_repeatable(kernel, launched.fused):  # if nothing is fresh any more, the next launch is the same
                self._keep(name, launched)
            is_active = launched.fused.facts.returns_active
            return self._python.read(launched.result) if is_active else launched.result

    def _is_as_before(self, name: object) -> bool:
        """Whether a launch was made before and nothing that it depends on has changed."""
        if name not in self._repetitions or backend.is_gradient_replaced():
            return False
        changes, repetition, _ = self._repetitions[name]
        return changes == self._tangents.changes and repetition.is_current()

    def _keep(self, name: object, launched: Launched) -> None:
        """Keep a launch for repetition, with its arguments alive, since the name contains their identities."""
        fused, passed = launched.fused, launched.passed
        repetition = Repetition(fused, dict(zip(fused.shadows, passed, strict=False)), passed)
        self._repetitions[name] = launched.changes, repetition, launched.args

    def _is_repeatable(self, kernel: backend.Kernel, fused: Fused) -> bool:
        """Whether the containers that a kernel writes have been saved, and the launch does not depend on the call."""
        is_simple = not len(self._tangents.arrays.regions) and backend.is_plain_call(kernel)
        is_simple = is_simple and not any(array.is_scratch for array in fused.first_order)  # new in each launch
        params = set(map(container_key, self._session.accesses.params))
        return is_simple and not fused.sites and not fused.facts.written & params

    def _runs_plainly(self, kernel: backend.Kernel, args: tuple[object, ...]) -> bool:
        """Whether a kernel is one of Taichi's own without tangents; if it deactivates nodes, clear their tangents."""
        if backend.is_reading_kernel(kernel):
            for source in (a for a in args if isinstance(a, (backend.Field, backend.Ndarray))):
                self.host_read(source, None)
            return True
        node = backend.deactivated_node(kernel, args)
        if node is not None:
            self._clear_under(node)
        return node is not None

    def _clear_under(self, node: backend.SNode) -> None:
        """Clear the tangents under a node that is deactivated: its entries are constants from now on."""
        if self._state is not None:
            self._state.save_part(node)
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
            raise UnsupportedError(f"Second derivatives of {root.name}, the root of an equation, are not supported.")
        for unknown in root.unknowns:
            self._save(unknown)
        solving = Solving(session, self._save, self.host_write)
        with backend.follow_by(solving):
            result = root.solve()
        for _, key, rows in list(tangents.arrays.changed()):
            tangents.clear(key, rows)
        tangents.arrays.remember()
        unknowns = Rows(root.unknowns, session)
        changed = {key: name for key, name in solving.changed.items() if key not in unknowns.containers}
        session.accesses.lost |= {key: root.refuses(name) for key, name in changed.items()}
        with self._undone() as written:
            root.residual()
            residuals = Rows(root.residuals, session)
            right = residuals.read()
            values = np.concatenate([backend.as_numpy(r).reshape(-1) for r in root.residuals])
        for key in written:
            tangents.clear(key, tangents.rows(key))
        session.accesses.lost |= {key: root.warns(name) for key, name in changed.items()}
        if right is not None:
            with backend.suspend_following():
                found = -root.step(values, right)
            Rows(root.unknowns, session).write(found)
        session.accesses.note(set(), tangents.arrays.shared(unknowns.containers))
        tangents.arrays.remember()
        return result

    @contextlib.contextmanager
    def _undone(self) -> Iterator[set[Key]]:
        """Within the context, what kernels and Python store is put back at the end; tangents stay."""
        before = self._state, self._record, self._repetitions
        with self._session.undone() as (self._state, written):
            self._record, self._repetitions = None, {}
            try:
                yield written
            finally:
                self._state, self._record, self._repetitions = before

    # --- stores and reads of Python between launches

    def before_host_write(self, obj: object, value: object) -> None:
        """Python is about to assign to a field or array, or through a host accessor of a matrix field."""
        if self._python.is_lost(value):
            warn_at_user(STORED)
        if self._record is not None:
            self._record.store(obj, value)
        self._save(obj)

    def _save(self, obj: object) -> None:
        """Save a field, an array or an entry before it is changed."""
        if self._state is None:
            return
        found = self._session.table.by_entry(obj) if isinstance(obj, backend.FieldEntry) else None
        if isinstance(obj, backend.FieldEntry) and found is None:
            self._state.save_entry(obj)
        else:
            self._state.save(obj if found is None else found[0].obj)

    def host_write(self, obj: Any, index: object) -> None:
        """Python has stored to an entry of a field, or to an array: the index of a component may follow."""
        if not isinstance(obj, backend.FieldEntry):
            self._clear(view_of(obj), slice(None) if index is ... else rows_of_index(obj, index))
            return
        found = self._session.table.by_entry(obj)
        if found is not None:
            info, component = found
            self._clear(info.key, row_of_entry(info, component, obj.index))

    def _clear(self, key: Key, rows: object) -> None:
        """Clear the tangents of entries that Python has stored to; they are constants from now on."""
        if self._tangents.clear(key, rows):
            self._session.accesses.note_overwritten(self._tangents.arrays.shared([key]))

    def host_read(self, obj: Any, value: object) -> object:
        """The value that Python reads; it is remembered if it has a tangent."""
        if self._record is not None:
            self._record.note_read()
        table = self._session.table
        if isinstance(obj, backend.Ndarray):
            key = view_of(obj)
        elif isinstance(obj, backend.Field):
            info = table.field(obj)
            key = None if info is None else info.key
        else:
            found = table.by_entry(obj)
            key = None if found is None else found[0].key
        return self._python.read(value) if key is not None and self._tangents.carries(key) else value

    def _follow_host_arrays(self) -> None:
        """Notice entries of NumPy arrays and tensors that Python code changed since the last launch."""
        accesses, arrays = self._session.accesses, self._tangents.arrays
        for name, key, rows in list(arrays.changed()):
            self._tangents.clear(key, rows)
            if not accesses.overwritten:
                warn_of_changes(name, len(rows))
            accesses.note_overwritten(arrays.shared([key]))
