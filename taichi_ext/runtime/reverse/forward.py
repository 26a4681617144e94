"""A kernel or pipeline runs forward: its launches are made stage by stage, and what the way back needs is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError
from taichi_ext.launches import ColumnBlock, Launch, NumberArgument, NumberColumns, PipelineArgument, check_unchanged
from taichi_ext.runtime.launching.fused_kernels import KernelName
from taichi_ext.runtime.launching.launch_checks import (
    STORED,
    check_arguments,
    check_gradient_is_own,
    check_same_program,
    warn_of_changes,
    warn_of_lost_tangents,
)
from taichi_ext.runtime.launching.request import Request
from taichi_ext.runtime.memory.array_stores import ArrayStores
from taichi_ext.runtime.memory.array_tangents import array_arguments, check_overlaps
from taichi_ext.runtime.memory.field_tangents import rows_under
from taichi_ext.runtime.memory.regions import Region
from taichi_ext.runtime.memory.shadows import rows_of_index, view_of
from taichi_ext.runtime.python.active_numbers import ActiveNumbers
from taichi_ext.runtime.python.passed_arguments import taken_out
from taichi_ext.runtime.python.passed_numbers import PassedNumber, PipelineRun, is_passed, with_tangents
from taichi_ext.runtime.python.warning import warn_at_user
from taichi_ext.runtime.python.watch import PythonRun, watching
from taichi_ext.runtime.reverse.cells import Cell, Copy
from taichi_ext.runtime.reverse.history import Call, Form, Launched, Read, StagePlan, Stored, accesses
from taichi_ext.runtime.reverse.kernels import StagedKernel, numpy_type, staged_kernel


@dataclass(eq=False)
class Kernels:
    """The kernels of one prepared form, kept between its calls.

    Attributes:
        staged: by name.
        capacity: entries of a thread's tape, of real numbers and of integers.
    """

    staged: dict[KernelName, StagedKernel]
    capacity: list[int]

    def find(self, name: KernelName, launch: Launch) -> StagedKernel:
        """The kernel for a launch."""
        known = self.staged.get(name)
        if known is None or not known.is_current():
            known = self.staged[name] = staged_kernel(launch)
        check_unchanged(known.kernel, known.captures.changed_at_launch())
        return known


class Forward:
    """Follows one run; ``backend.follow`` reports launches and Python's accesses to it.

    Args:
        request: the parameters and outputs.
        kernels: those of the prepared form.
        schedule: the cells, the log, and what has happened so far.
        width: the number of cotangents.

    Attributes:
        returned: the entries that the last launch of a kernel returned.
        read: the keys of what kernels have read.
        written: of what they have written.
    """

    def __init__(self, request: Request, kernels: Kernels, schedule: Any, width: int) -> None:
        self.request, self.kernels, self.schedule, self.width = request, kernels, schedule, width
        self.cells, self.log = schedule.cells, schedule.log
        self.table = self.cells.table
        self.returned: tuple[Cell, int, int] | None = None
        self.read: set[object] = set()
        self.written: set[object] = set()
        self._threads = backend.thread_count() or 1
        self._calls: dict[object, Call] = {}
        self._program = backend.program()
        self._count = max((s.first + s.size for s in request.seeds), default=0)  # of numbers, with those read
        self._count = max(self._count, request.block.count)
        self._python = PythonRun(ActiveNumbers(self._is_active_memory), ArrayStores())
        self._numbers = PipelineRun(warn_at_user)
        self._copies: dict[Region, np.ndarray] = {}  # bytes of arrays after the last launch
        for array in request.arrays:
            self.cells.of_array(array.view, array.name, array.value)
        for seed in request.seeds:
            self.cell_of(seed.key).is_active = True

    def cell_of(self, key: Any) -> Cell:
        """The cell of a parameter or output."""
        known = self.cells.find(key)
        return self.cells.of_field(self.table.infos[getattr(key, "whole", key)].obj) if known is None else known

    # --- runs

    def run(self, function: Any, args: tuple[Any, ...], names: list[str], passed: Mapping[int, int]) -> Any:
        """Run a function; see ``Pipeline``."""
        given = list(args)
        for position, column in passed.items():
            given[position] = with_tangents(args[position], names[position], column, self._numbers)
        self._remember()
        with backend.follow(self), watching(self._python, function), self._numbers:
            result = function(*given)
        self.read |= {PipelineArgument(name) for name in self._numbers.passed}
        check_same_program(self._program)
        self._follow_arrays()
        return result

    # --- launches

    def launch(self, kernel: backend.Kernel, args: tuple[Any, ...]) -> Any:
        """Run a kernel stage by stage."""
        with backend.exclusive, backend.suspend_following():
            check_same_program(self._program)
            if self._runs_plainly(kernel, args):
                return kernel(*args) if backend.is_reading_kernel(kernel) else None
            self._follow_arrays()
            warn_of_lost_tangents(kernel, backend.leaf_values(kernel, args), self._python.is_lost)
            event = self._launched(kernel, args)
            self._remember(event.written)
            return self._result(event)

    def _launched(self, kernel: backend.Kernel, args: tuple[Any, ...]) -> Launched:
        check_gradient_is_own(kernel)
        check_arguments(kernel, args, tuple(variable for variable, _ in self.request.numbers.constants))
        args = tuple(a.detach() if backend.is_torch_tensor(a) and a.requires_grad else a for a in args)
        args, values, passed = taken_out(kernel, args, self._numbers)
        args = _typed(kernel, args)
        self.schedule.begin()
        call = self._call(kernel, args, values, frozenset(passed))
        event = self._event(call, args, values, passed)
        self.schedule.add(event)
        event.plans += [self._plan(event, n) for n in range(len(call.kernel.staged.stages))]
        event.again(self.log)
        if not event.plans:
            kernel(*args)
        self.schedule.end()
        return event

    def _call(self, kernel: backend.Kernel, args: Any, values: Any, passed: frozenset[str]) -> Call:
        """A kernel as stages with the cells of its containers."""
        name = (id(kernel), passed, *(type(a) if isinstance(a, (int, float)) else id(a) for a in args))
        known = self._calls.get(name)
        if known is not None and known.is_current():
            check_unchanged(known.kernel.kernel, known.kernel.captures.changed_at_launch())
            return known
        registered = {id(array.value): array for array in self.request.arrays}
        binding = array_arguments(kernel, values, registered)
        known_numbers = self.request.numbers
        numbers = NumberColumns({**known_numbers.arguments, **dict.fromkeys(passed, 0)}, known_numbers.constants)
        launch = Launch(
            kernel=kernel,
            args=args,
            block=ColumnBlock(1),
            fields=self.table,
            roles={},
            arrays=binding.arrays,
            numbers=numbers,
            wants_return=False,
            strategy="auto",
            sparse=None,
            energy=None,
            is_repeated=True,
        )
        shapes = tuple((i, tuple(values[i].shape)) for i in backend.array_positions(kernel))
        same = tuple((i, info.key) for i, info in binding.arrays.items())
        variant = passed, tuple(numbers.arguments), tuple(variable.key for variable, _ in numbers.constants)
        features = backend.argument_features(kernel, args)
        staged = self.kernels.find(KernelName(id(kernel), features, (shapes, same), variant), launch)
        given = {backend.leaf_arguments(kernel)[n].name: g for n, g in self._positions(kernel, binding)}
        cells = {}
        for c in staged.program.containers:
            if c.is_argument:
                array = given[c.name]
                cells[c] = self.cells.of_array(array.view, array.name, array.value)
            else:
                cells[c] = self.cells.of_field(c.object)
        written = {c for n in range(len(staged.staged.stages)) for c in staged.forward(n).writes}
        check_overlaps(binding.given, {info.key for c, info in staged.infos.items() if c in written})
        made = self._calls[name] = Call(staged, args, cells, binding)
        return made

    @staticmethod
    def _positions(kernel: backend.Kernel, binding: Any) -> Any:
        return zip(backend.array_positions(kernel), binding.given, strict=True)

    def _event(self, call: Call, args: Any, values: Any, passed: Mapping[str, list[Form]]) -> Launched:
        """A launch with the numbers that it is given."""
        kernel, own = call.kernel, {}
        for c in kernel.own_containers:
            array = np.zeros(kernel.size_of(c), numpy_type(c))
            own[c] = Cell(None, array, array.shape, array.dtype)
        event = Launched(call, args, own, [])
        leaves = {leaf.name: n for n, leaf in enumerate(backend.leaf_arguments(kernel.kernel))}
        variables: dict[Any, Any] = {
            variable.key: (variable, first) for variable, first in self.request.numbers.constants
        }
        for place in kernel.numbers:
            cell = own[place.container]
            count = int(np.prod(place.shape, dtype=int))
            if place.key in variables:
                variable, first = variables[place.key]
                value, forms = variable.read(), [{first + n: 1.0} for n in range(count)]
            else:
                assert isinstance(place.key, NumberArgument)
                value, name = values[leaves[place.key.name]], place.key.name
                first = self.request.numbers.arguments.get(name, 0)
                forms = passed.get(name) or [{first + n: 1.0} for n in range(count)]
            numbers = value.to_list() if isinstance(value, backend.Matrix) else value
            cell.obj[place.start : place.start + count] = np.asarray(numbers, cell.dtype).reshape(-1)
            cell.is_active = True
            event.given += [(cell, place.start + n, form) for n, form in enumerate(forms) if form]
            self.read.add(place.key)
        return event

    def _plan(self, event: Launched, n: int) -> StagePlan:
        """A stage with its adjoint for what is active now, and what becomes active by it."""
        call, kernel = event.call, event.call.kernel
        forward = kernel.forward(n)
        touched = forward.reads | forward.writes
        active = frozenset(c for c in touched if c.dtype.is_real and event.cell(c).carries())
        name = n, active, self.width
        plan = call.plans.get(name)
        if plan is None:
            adjoint = kernel.adjoint(n, active, self._threads, self.width) if active else None
            results = [c for c in adjoint.active if c in forward.writes] if adjoint is not None else []
            reads = (
                [] if adjoint is None or not results else accesses(adjoint.stage, adjoint.stage.reads, is_store=False)
            )
            writes = accesses(forward, forward.writes, is_store=True)
            plan = call.plans[name] = StagePlan(forward, adjoint, reads, writes, results)
        for c in plan.results:
            event.cell(c).is_active = True
        infos = kernel.infos
        self.read |= {event.cell(c).key for c in forward.reads if c in infos}
        self.written |= {event.cell(c).key for c in forward.writes if c in infos}
        return plan

    def _result(self, event: Launched) -> Any:
        """The value that the launch returns; numbers in it that depend on parameters are followed."""
        staged = event.call.kernel.staged
        if staged.returned is None:
            return None
        name, start, count = staged.returned
        cell = event.own[staged.crossing[name]]
        self.returned = cell, start, count
        values = cell.obj[start : start + count].tolist()
        if cell.is_active and any(staged.crossing[name] in plan.results for plan in event.plans):
            values = [self._number(value, cell, start + n) for n, value in enumerate(values)]
        results, at = [], 0
        for kind in backend.returned_types(event.call.kernel.kernel):
            shape = tuple(kind.get_shape()) if isinstance(kind, backend.MatrixType) else ()
            size = int(np.prod(shape, dtype=int))
            part = values[at : at + size]
            at += size
            results.append(backend.Matrix(_nested(part, shape)) if shape else _converted(kind, part[0]))
        return results[0] if len(results) == 1 else results

    def _number(self, value: float, cell: Cell, row: int) -> Any:
        """A number that Python gets from an entry, which depends on parameters."""
        number, self._count = self._count, self._count + 1
        self.schedule.add(Read(cell, row, number))
        return PassedNumber(value, {number: 1.0}, frozenset({"a number that was read"}), self._numbers)

    def _runs_plainly(self, kernel: backend.Kernel, args: tuple[Any, ...]) -> bool:
        """Whether a kernel is one of Taichi's own that copies out, or deactivates nodes."""
        if backend.is_reading_kernel(kernel):
            for source in (a for a in args if isinstance(a, (backend.Field, backend.Ndarray))):
                self.host_read(source, None)
            return True
        node = backend.deactivated_node(kernel, args)
        if node is None:
            return False
        under = [c for c in self.cells if isinstance(c.obj, backend.Field) and backend.is_under(c.obj, node)]
        is_kept = backend.node_kind(node) == "bitmasked"  # Taichi keeps the memory of these nodes, and reads it
        for cell in under:
            info = None if is_kept else self.table.infos.get(cell.key)
            rows = None if info is None else rows_under(info, node)
            self._store([cell], rows, lambda: None, lambda: None)
        self._store(under, None, lambda: kernel(*args), lambda: kernel(*args))
        return True

    # --- stores and reads of Python

    def _store(
        self, cells: list[Cell], rows: Any, redo: Any, do: Any = None, box: Any = (), form: Any = None
    ) -> Stored:
        self.schedule.begin()
        event = Stored(cells, rows, redo, box)
        event.saved = [copy for cell in cells for copy in self.log.before_write(cell, (box,))]
        self.schedule.add(event)
        if do is not None:
            do()
        return event

    def before_host_write(self, obj: object, value: object) -> None:
        """Python is about to assign to a field or array, or through a host accessor of a matrix field."""
        if self._python.is_lost(value):
            warn_at_user(STORED)
        if isinstance(obj, backend.Field):  # kernels store to it, and are followed
            return
        with backend.suspend_following():
            place = self._place(obj, ...)
            if place is None:
                self.schedule.save_unknown(obj)
                return
            cell, box, _ = place
            box = box if isinstance(obj, backend.FieldEntry) else ()
            self._pending = self._store([cell], None, lambda: None, box=box)

    def host_write(self, obj: Any, index: object) -> None:
        """Python has stored to an entry of a field, or to an array: the index of a component may follow."""
        with backend.suspend_following():
            place = self._place(obj, index)
            if place is None:
                return
            cell, _, rows = place
            event = self._pending
            event.rows, event.redo = rows, Copy(cell, event.box).put_back
            self.written.add(cell.key)

    def _place(self, obj: Any, index: object) -> tuple[Cell, Any, Any] | None:
        """The cell that Python stores to, the part of it, and its rows; None for a field that nothing has used."""
        if isinstance(obj, backend.FieldEntry):
            found = self.cells.of_entry(obj)
            if found is None and self.table.by_entry(obj) is not None:
                self.cells.of_field(self.table.by_entry(obj)[0].obj)
                found = self.cells.of_entry(obj)
            return found
        cell = self.cells.of_array(view_of(obj), "an array", obj)
        return cell, (), slice(None) if index is ... else rows_of_index(obj, index)

    def host_read(self, obj: Any, value: object) -> object:
        """The value that Python reads; it is remembered if it depends on parameters."""
        if isinstance(obj, backend.FieldEntry):
            found = self.cells.of_entry(obj)
            if found is None or not found[0].carries():
                return value
            return self._number(float(value), found[0], found[2])  # type: ignore[arg-type]
        cell = self.cells.find(view_of(obj)) if isinstance(obj, backend.Ndarray) else self.cells.of_field(obj)
        if cell is None or not cell.carries():
            return value
        if isinstance(value, float):
            raise UnsupportedError("Python reads a number of a ti.ndarray that depends on parameters.")
        return self._python.read(value)

    def root(self, root: Any) -> Any:
        """The solver of an implicit function."""
        raise UnsupportedError(f"{root.name} solves an implicit equation.")

    # --- arrays that Python can change unnoticed

    def _is_active_memory(self, array: Any) -> bool:
        if not len(self.cells.regions):
            return False
        space, start, end = backend.memory_span(array)
        regions = self.cells.regions.between(space, start, end)
        return any(cell.carries() for region in regions for cell in self.cells.sharing(region.layout))

    def _remember(self, written: list[Cell] | None = None) -> None:
        """Copy the bytes of arrays that may have changed since the last copy."""
        self._python.stores.clear()
        changed = None if written is None else {self.cells.regions.find(c.key) for c in written if c.key is not None}
        for region in self.cells.regions:
            if region in self._copies and changed is not None and region not in changed:
                continue
            memory = _memory(region)
            if memory is not None:
                self._copies[region] = memory.copy()

    def _follow_arrays(self) -> None:
        """Notice entries of NumPy arrays and tensors that Python code changed since the last launch."""
        for region in self.cells.regions:
            memory, before = _memory(region), self._copies.get(region)
            stored = self._python.stores.within(region.layout)
            if memory is None or before is None or (stored is None and np.array_equal(memory, before)):
                continue
            self._note_changes(region, memory, before, stored)

    def _note_changes(self, region: Region, memory: np.ndarray, before: np.ndarray, stored: Any) -> None:
        dtype = backend.to_numpy_type(backend.named_type(region.layout.dtype))
        numbers, old = memory.view(dtype), before.view(dtype)
        changed = (numbers != old) & ~((numbers != numbers) & (old != old))
        if stored is not None:
            changed |= stored.reshape(-1, region.layout.itemsize).any(axis=1)
        if not changed.any():
            return
        if not memory.flags.writeable or backend.host_values(region.owners[-1][1]) is None:
            raise UnsupportedError("Python changes an array on a device between kernels.")
        cell = self.cells.of_array(region.layout, region.name, numbers)
        rows = region.changed_rows(changed)
        if cell.carries():
            warn_of_changes(region.name, len(rows))
        now = memory.copy()
        memory[...] = before
        put = partial(np.copyto, memory, now)
        self._store([cell], rows, put, put)
        self._copies[region] = now
        self.written.add(cell.key)


def _memory(region: Region) -> np.ndarray | None:
    """The bytes of a region; None if Python cannot change them unnoticed."""
    return backend.memory_of(region.owners[-1][1], region.layout.start, region.layout.end - region.layout.start)


def _typed(kernel: backend.Kernel, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with Python's floats for real numbers."""
    kinds = [a.annotation for a in kernel.arguments]
    is_real = [backend.is_scalar_type(k) and backend.is_real(backend.cook_dtype(k)) for k in kinds]
    return tuple(float(a) if real else a for a, real in zip(args, is_real, strict=True))


def _nested(values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Numbers as a vector or matrix takes them."""
    if len(shape) == 1:
        return values
    width = len(values) // shape[0]
    return [values[n * width : (n + 1) * width] for n in range(shape[0])]


def _converted(kind: Any, value: Any) -> Any:
    """A returned number as Taichi returns it."""
    return value if is_passed(value) or backend.is_real(backend.cook_dtype(kind)) else int(value)
