"""A kernel or pipeline runs forward: its launches are made stage by stage, and what the way back needs is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError
from taichi_ext.launches import FieldKey, PipelineArgument, container_key
from taichi_ext.runtime.launching.pipeline import Root
from taichi_ext.runtime.launching.session import (
    check_gradient_is_own,
    check_same_program,
    checked_arguments,
    warn_of_changes,
)
from taichi_ext.runtime.launching.tangents import Request
from taichi_ext.runtime.launching.trace import is_made
from taichi_ext.runtime.memory.regions import View
from taichi_ext.runtime.memory.shadows import rows_under, view_of
from taichi_ext.runtime.python.dual_numbers import DualFollower, DualNumber, Run, is_dual, matrix_of, plain_number
from taichi_ext.runtime.python.reached import forget_tangents
from taichi_ext.runtime.python.run_record import entries_of, numbers_like
from taichi_ext.runtime.reverse.calls import Calls, Kernels
from taichi_ext.runtime.reverse.cells import Box, Cell, Copy
from taichi_ext.runtime.reverse.history import LaunchCall, LaunchEvent, NumberForm, ReadEvent, Stored
from taichi_ext.runtime.reverse.roots import Roots


class Forward(DualFollower):
    """Follows one run; ``backend.follow`` reports launches and Python's accesses to it.

    Args:
        request: the parameters and outputs.
        kernels: those of the prepared form.
        schedule: the cells, the log, and what has happened so far.
        width: the number of cotangents.
        known: the identities of objects that the run can reach before it begins.

    Attributes:
        returned: the entries that the last launch of a kernel returned.
        read: the keys of what kernels have read.
        written: of what they have written.
        passed: the numbers that Python passes to kernels and stores, in order; NaN for what is not seen in numbers:
            arrays that Python may change, objects and kernels made in the run. None without ``known``.
    """

    def __init__(
        self, request: Request, kernels: Kernels, schedule: Any, width: int, known: Set[int] | None = None
    ) -> None:
        super().__init__()
        self.passed: list[float] | None = None if known is None else []
        self._known, self._kernels_before = known or frozenset(), backend.kernels_made()
        self.request, self.schedule, self.width = request, schedule, width
        self._record = request.restart.record
        self.cells, self.log = schedule.cells, schedule.log
        self.table = self.cells.table
        self.returned: tuple[Cell, int, int] | None = None
        self._has_reads = False  # of numbers that depend on parameters
        self._calls = Calls(request, kernels, self.cells, width)
        self.read, self.written = self._calls.read, self._calls.written
        self._program = backend.program()
        self._count = max((s.first + s.size for s in request.seeds), default=0)  # of numbers, with those read
        self._count = max(self._count, request.block.count)
        self._is_pipeline = False
        self._pending: tuple[Stored, Any] | None = None  # a store of Python, and its rows
        self._roots = Roots(self.cells, schedule)
        for array in request.arrays:
            self.cells.of_array(array.view, array.name, array.value)
        for seed in request.seeds:
            cell = self.cell_of(seed.key)
            self.cells.activate(cell)
            if request.directions is not None:
                cell.dots.store(cell, seed.inner, request.directions[seed.first : seed.first + seed.size])

    def cell_of(self, key: Any) -> Cell:
        """The cell of a parameter or output."""
        known = self.cells.find(key)
        return self.cells.of_field(self.table.infos[getattr(key, "whole", key)].obj) if known is None else known

    @property
    def may_lose(self) -> bool:
        """Whether Python may have read numbers that depend on parameters, and lost their derivatives."""
        return self._has_reads or any(cell.carries() for cell in self.cells if isinstance(cell.key, View))

    def tangents_between(self) -> tuple[float, list[tuple[backend.Kernel, tuple[Any, ...]]]]:
        """What a run with tangents of all columns would do with those of other numbers than params and outputs.

        Returns:
            The operations on them, infinity if that is not known; and the launches of kernels, one of each kind, that
            read none of them.
        """
        ends = {container_key(part.key) for part in (*self.request.seeds, *self.request.outputs)}
        total, calls = 0.0, dict[LaunchCall, tuple[Any, ...]]()
        for event in self.schedule.events:
            if not isinstance(event, LaunchEvent):  # of a number in Python, or a solver
                total += self.request.block.count if isinstance(event, (ReadEvent, Stored)) else math.inf
                continue
            reading = [n for n, step in enumerate(event.steps) if any(event.cell(c).key not in ends for c in step.seen)]
            total += sum(map(event.call.kernel.work, reading)) * self.request.block.count
            if not reading:
                calls[event.call] = event.args
        return total, [(call.kernel.kernel, args) for call, args in calls.items()]

    # --- runs

    def run(self, run: Run) -> Any:
        """Run a function; returns its result."""
        self._is_pipeline = True
        self._has_reads |= bool(run.passed)
        self.cells.remember()
        result = self.follow(run, self._calls.parameter)
        if self._numbers.has_numbers:
            result = forget_tangents(result, run.function, run.args)
        if self._record is not None:
            self._record.end()
        self.read |= {PipelineArgument(name) for name in self._numbers.passed}
        check_same_program(self._program)
        self._follow_arrays()
        self._roots.lost.note({container_key(output.key) for output in self.request.outputs}, set())
        for cell in self.cells:
            problem = backend.ended_problem(cell.obj)
            if problem:
                raise UnsupportedError(f"A field or array of the pipeline {problem}: the way back cannot use it.")
        return result

    # --- launches

    def launch(self, kernel: backend.Kernel, args: tuple[Any, ...]) -> Any:
        """Run a kernel stage by stage."""
        with backend.exclusive, backend.suspend_following():
            check_same_program(self._program)
            if self.passed is not None:
                self._note_launch(kernel, args)
            if self._record is not None:
                self._record.launch(kernel, args)
            if backend.is_library_kernel(kernel) and self.runs_plainly_here(kernel, args, self._deactivate):
                return None
            if self.cells.regions:
                self._follow_arrays()
            if backend.is_fill(kernel) and any(map(self.is_own, entries_of(args[1]))):
                return self._fill(*args)
            event = self._launched(kernel, args)
            if self._is_pipeline and self.cells.regions:  # after which Python may change arrays
                self.cells.remember(event.written)
            if self._roots.lost:
                read = {event.cell(c).key for step in event.steps for c in step.plan.forward.reads}
                self._roots.lost.note(read, {cell.key for cell in event.written})
            return self._result(event)

    def _note_launch(self, kernel: backend.Kernel, args: tuple[Any, ...]) -> None:
        is_unseen = backend.is_kernel_since(kernel, self._kernels_before) or backend.is_reading_kernel(kernel)
        self._note_passed([math.nan] if is_unseen else [])
        for value in backend.leaf_values(kernel, args):
            self._note_passed(entries_of(value))

    def _note_passed(self, numbers: Iterable[Any]) -> None:
        passed = self.passed if self.passed is not None else []
        for number in numbers:
            is_unseen = backend.is_array(number) and not isinstance(number, backend.Ndarray)
            if is_unseen or is_made(number, self._known):
                passed.append(math.nan)
            elif isinstance(number, (float, np.floating)):
                passed.append(float(plain_number(number)))

    def root(self, root: Root) -> Any:
        """Run the solver of an implicit function."""
        self._note_passed([math.nan])
        if self.cells.dots is not None:
            raise UnsupportedError(
                "The second derivative of an implicit function (custom_root) is not known: only its first derivative "
                "is given. Use jacobian or value_and_gradient."
            )
        result, unknowns = self._roots.run(root, self._follow_arrays)
        self.written |= {cell.key for cell in unknowns}
        self._has_reads |= result is not None
        self.cells.remember()
        return result

    def _launched(self, kernel: backend.Kernel, args: tuple[Any, ...]) -> LaunchEvent:
        check_gradient_is_own(kernel)
        event = self._calls.repeated(kernel, args) or self._first_launched(kernel, args)
        if self._record is not None:
            read = {c.name for c in event.call.kernel.accessed[0] if c.is_argument}
            self._record.arrays(kernel, read, backend.leaf_values(kernel, args))
        self.schedule.begin()
        self.schedule.add(event)
        event.again(self.log)
        if not event.steps:
            kernel(*args)
        self.schedule.end()
        return event

    def _first_launched(self, kernel: backend.Kernel, args: tuple[Any, ...]) -> LaunchEvent:
        args, values, passed = checked_arguments(kernel, args, self.request.numbers, self._numbers)
        forms = {k: [n.tangent if is_dual(n) else NumberForm() for n in entries] for k, entries in passed.items()}
        return self._calls.launched(kernel, args, values, forms)

    def _follow_arrays(self) -> None:
        """Notice entries of NumPy arrays and tensors that Python code changed since the last launch."""
        for cell, name, rows, redo in self.cells.changes():
            if cell.carries():
                warn_of_changes(name, len(rows))
            self._store([cell], rows, redo)
            self.written.add(cell.key)

    def _result(self, event: LaunchEvent) -> Any:
        """The value that the launch returns; numbers in it that depend on parameters are followed."""
        staged = event.call.kernel.staged
        if staged.returned is None:
            return None
        array, start, count = staged.returned
        cell = event.own[array]
        self.returned = cell, start, count
        values = cell.obj[start : start + count].tolist()
        if cell.is_active and any(array in step.plan.results for step in event.steps):
            values = [self._number(value, cell, start + n) for n, value in enumerate(values)]
        entries = iter(values)
        results = [_returned(kind, entries) for kind in backend.returned_types(event.call.kernel.kernel)]
        return results[0] if len(results) == 1 else results

    def _number(self, value: float, cell: Cell, row: int) -> Any:
        """A number that Python gets from an entry, which depends on parameters."""
        number, self._count = self._count, self._count + 1
        self._has_reads = True
        self.schedule.add(ReadEvent(cell, row, number))
        dots = None if self.cells.dots is None else self.cells.dots.of(cell)[row].copy()
        return DualNumber(value, NumberForm({number: 1.0}, dots), self._numbers)

    def _deactivate(self, node: backend.SNode, run: Callable[[], object]) -> None:
        """Deactivate a node: its entries are constants from now on."""
        under = [c for c in self.cells if isinstance(c.obj, backend.Field) and backend.is_under(c.obj, node)]
        is_kept = backend.node_kind(node) == "bitmasked"  # Taichi keeps the memory of these nodes, and reads it
        for cell in under:
            info = None if is_kept else self.table.infos.get(cell.key)
            rows = None if info is None else rows_under(info, node)
            self._store([cell], rows, lambda: None)
        if not under and self.log.keeps_first:
            self.log.others.save_part(node)
        self._store(under, None, run)

    # --- stores and reads of Python

    def _store(self, cells: list[Cell], rows: Any, redo: Any, box: Box = ()) -> Stored:
        self.schedule.begin()
        event = Stored(cells, rows, redo, box)
        event.again(self.log)
        self.schedule.add(event)
        return event

    def _fill(self, field: Any, value: Any) -> None:
        """Store numbers, some with tangents, to each entry of a field."""
        numbers, cell = entries_of(value), self.cells.of_field(field)
        plain = numbers_like(value, map(plain_number, numbers))
        self._store([cell], None, lambda: field.fill(plain))
        self.written.add(cell.key)
        if isinstance(cell.key, FieldKey):
            for rows, number in zip(self.table.rows_by_component(field), numbers, strict=True):
                self._set_form(self._store([cell], rows, lambda: None), number)

    def before_host_write(self, obj: object, value: object) -> None:
        """Python is about to assign to a field or array, or through a host accessor of a matrix field."""
        if isinstance(obj, backend.Field):  # kernels store to it, and are followed
            return
        if self._record is not None:
            self._record.store(obj, value)
        with backend.suspend_following():
            place = self._place(obj, ..., is_added=self.is_own(value))
            self._pending = None if place is None else (self._store([place[0]], None, lambda: None, place[1]), place[2])
            if place is None:
                self.log.save_unknown(obj, self.touched)

    def host_write(self, obj: Any, index: object, value: object) -> None:
        """Python has stored to an entry of a field, or to an array: the index of a component may follow."""
        if self.passed is not None:
            self._note_passed(entries_of(value))
        if self._pending is None:
            return
        (event, rows), number = self._pending, plain_number(value)
        cell, is_array = event.cells[0], isinstance(obj, backend.Ndarray)
        event.rows = rows = backend.rows_of_index(obj, index) if is_array and index is not ... else rows
        if index is not ... and isinstance(number, (int, float, np.generic)):
            event.redo = backend.storing(obj, index, number)
        else:
            with backend.suspend_following():
                event.redo = Copy(cell, event.box).put_back
        if isinstance(rows, slice) or cell.size == 1:
            self._roots.lost.note(set(), {cell.key})
        self.written.add(cell.key)
        self._set_form(event, value)
        numbers = entries_of(value) if index is ... and isinstance(value, backend.Matrix) else []
        if any(map(self.is_own, numbers)):  # a vector in each entry of an array
            with backend.suspend_following():
                for n, number in enumerate(numbers):
                    self._set_form(self._store([cell], slice(n, None, len(numbers)), lambda: None), number)

    def _set_form(self, event: Stored, value: object) -> None:
        """Note how a stored value depends on others."""
        if self.is_own(value):
            self._numbers.passed |= value.names
            event.form = value.tangent
            self.cells.activate(event.cells[0])
        event.settle()

    def _place(self, obj: Any, index: object, *, is_added: bool = False) -> tuple[Cell, Any, Any] | None:
        """The cell that Python accesses, the part of it, and its rows; None for a field that nothing has used."""
        if isinstance(obj, backend.FieldEntry):
            known = self.cells.of_entry(obj)
            if known is None and is_added:
                for field in self.touched():
                    self.cells.of_field(field)
                return self.cells.of_entry(obj)
            return known
        cell = self.cells.of_array(view_of(obj), "an array", obj)
        return cell, (), slice(None) if index is ... else backend.rows_of_index(obj, index)

    def host_read(self, obj: Any, index: object, value: object) -> object:
        """The value that Python reads, a number with its tangent."""
        if self._record is not None:
            self._record.note_read()
        if isinstance(obj, backend.Field):
            cell = self.cells.of_field(obj)
            self._has_reads |= self._roots.lost.read(cell.key, None) or cell.carries()
            return value
        if isinstance(obj, backend.Ndarray) and self.cells.find(view_of(obj)) is None:
            return value
        place = self._place(obj, index)
        if place is None:
            return value
        cell, _, rows = place
        carries = cell.carries()
        self._has_reads |= self._roots.lost.read(cell.key, value) or carries
        if not carries:
            return value
        self.read.add(cell.key)
        return self._number(value, cell, rows) if isinstance(value, float) and isinstance(rows, int) else value


def _returned(kind: Any, entries: Iterator[Any]) -> Any:
    """A result as Taichi returns it, of the next entries; those of structs lose their tangents, as in forward mode."""
    if isinstance(kind, backend.StructType):
        return kind(**{name: _returned(member, entries) for name, member in kind.members.items()})
    if isinstance(kind, backend.MatrixType):
        shape = tuple(kind.get_shape())
        return matrix_of([next(entries) for _ in range(math.prod(shape))], shape)
    value = next(entries)
    return value if is_dual(value) or backend.is_real(backend.cook_dtype(kind)) else int(value)
