"""Calls of kernels in a run: the kernel as stages, the cells of its containers, and what is active in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.launches import ColumnBlock, Launch, NumberArgument, NumberColumns
from taichi_ext.runtime.launching.session import KernelName
from taichi_ext.runtime.memory.array_tangents import Binding, array_arguments, check_overlaps
from taichi_ext.runtime.reverse.cells import Cell, Cells
from taichi_ext.runtime.reverse.history import LaunchCall, LaunchEvent, NumberForm, StagePlan, Step
from taichi_ext.runtime.reverse.kernels import NumberPlace, StagedKernel, numpy_type, references_to, staged_kernel

Passed = Mapping[str, Sequence[NumberForm]]  # how the entries of leaf arguments depend on other numbers, by name


@dataclass(eq=False)
class Kernels:
    """The kernels of one prepared form, kept between its calls.

    Attributes:
        capacity: entries of a thread's tape, of real numbers and of integers.
        is_guarded: whether products of 0 with what is not finite were made in a way back.
    """

    staged: dict[KernelName, StagedKernel]
    capacity: list[int]
    is_guarded: bool = False

    def find(self, name: KernelName, launch: Launch, columns: int) -> StagedKernel:
        known = self.staged.get(name)
        if known is None or not known.is_current():
            known = self.staged[name] = staged_kernel(launch, columns)
        known.references = references_to(launch.args)  # adjoints for other active containers may be made with them
        return known


class Calls:
    """The calls of one run.

    Args:
        request: the parameters and outputs.
        kernels: those of the prepared form.
        width: the number of cotangents.

    Attributes:
        read: the keys of what kernels have read.
    """

    def __init__(self, request: Any, kernels: Kernels, cells: Cells, width: int) -> None:
        self.read: set[Any] = set()
        self.written: set[Any] = set()
        self._request, self._kernels, self._cells, self._width = request, kernels, cells, width
        self._known: dict[object, LaunchCall] = {}
        self._simple: dict[object, LaunchCall] = {}  # those that take numbers and templates alone
        self._last: backend.PassedArguments = {}

    def repeated(self, kernel: backend.Kernel, args: tuple[Any, ...]) -> LaunchEvent | None:
        """A launch like one before it that takes numbers and templates alone; None if there was none."""
        call = self._simple.get(_simple_name(kernel, args))
        if call is None or not call.kernel.is_current():
            return None
        event = LaunchEvent(call, args, {}, [])
        event.steps += self._steps(event)
        return event

    def launched(
        self, kernel: backend.Kernel, args: tuple[Any, ...], values: Sequence[Any], passed: Passed
    ) -> LaunchEvent:
        """A launch that is about to be made: its kernel, its numbers, and the plans of its stages.

        Args:
            kernel: the user's.
            args: all its arguments.
            values: its leaf arguments.
            passed: those that depend on parameters.
        """
        given, args = args, _typed(kernel, backend.as_they_are(kernel, args, values, self._last))
        call = self._call(kernel, args, values, frozenset(passed))
        if not (passed or call.kernel.staged.own or call.binding.given) and _is_simple(kernel, given):
            self._simple[_simple_name(kernel, given)] = call
        event = self._event(call, args, values, passed)
        for places, containers in zip((self.read, self.written), call.kernel.accessed, strict=True):
            places |= {call.cells[c].key for c in containers if c in call.cells}
        event.steps += self._steps(event)
        return event

    def _call(
        self, kernel: backend.Kernel, args: tuple[Any, ...], values: Sequence[Any], passed: frozenset[str]
    ) -> LaunchCall:
        leaves = backend.leaf_arguments(kernel)
        name = (id(kernel), passed, *map(_name, leaves, values))
        known = self._known.get(name)
        if known is not None and known.is_current() and known.kernel.is_current():
            return known
        registered = {id(array.value): array for array in self._request.arrays}
        binding = array_arguments(kernel, tuple(values), registered)
        staged = self._staged(kernel, args, values, passed, binding)
        arrays = backend.array_values(kernel, values)
        given = {leaf.name: array for (leaf, _, _), array in zip(arrays, binding.given, strict=True)}
        cells = {}
        for c in staged.program.containers:
            array = given.get(c.name) if c.is_argument else None
            if array is None:
                cells[c] = self._cells.of_field(c.object)
            else:
                cells[c] = self._cells.of_array(array.view, array.name, array.value)
        written = {c for n in range(len(staged.staged.stages)) for c in staged.forward(n).writes}
        check_overlaps(binding.given, {info.key for c, info in staged.infos.items() if c in written})
        made = self._known[name] = LaunchCall(staged, args, cells, binding)
        return made

    def _staged(
        self,
        kernel: backend.Kernel,
        args: tuple[Any, ...],
        values: Sequence[Any],
        passed: frozenset[str],
        binding: Binding,
    ) -> StagedKernel:
        """The kernel as stages, for arguments of these types and shapes."""
        numbers = self._request.numbers
        columns = NumberColumns({**numbers.arguments, **dict.fromkeys(passed, 0)}, numbers.constants)
        block, arrays = ColumnBlock(1), binding.arrays
        launch = Launch(
            kernel=kernel,
            args=args,
            block=block,
            fields=self._cells.table,
            arrays=arrays,
            numbers=columns,
            is_repeated=True,
        )
        shapes = tuple((n, tuple(value.shape)) for _, n, value in backend.array_values(kernel, values))
        same = tuple((i, info.key) for i, info in binding.arrays.items())
        count = 0 if self._cells.dots is None else self._cells.dots.width
        constants = tuple(variable.key for variable, _ in columns.constants)
        variant = (tuple(sorted(columns.arguments)), constants, count)
        features = backend.argument_features(kernel, args)
        return self._kernels.find((id(kernel), features, shapes, same, variant), launch, count)

    def _event(self, call: LaunchCall, args: tuple[Any, ...], values: Sequence[Any], passed: Passed) -> LaunchEvent:
        """A launch with the numbers that it is given."""
        kernel, own = call.kernel, {}
        for c, size in kernel.staged.own.items():
            array = np.zeros(size, numpy_type(c))
            own[c] = Cell(None, array, array.shape, array.dtype, dots=self._cells.dots)
        event = LaunchEvent(call, args, own, [])
        leaves = {leaf.name: value for leaf, value in zip(backend.leaf_arguments(kernel.kernel), values, strict=True)}
        for place in kernel.numbers:
            cell = own[place.container]
            value, forms = self._number(place, leaves, passed)
            numbers = value.to_list() if isinstance(value, backend.Matrix) else value
            cell.obj[place.start : place.start + len(forms)] = np.asarray(numbers, cell.dtype).reshape(-1)
            self._cells.activate(cell)
            event.given += [(cell, place.start + n, form) for n, form in enumerate(forms) if form]
            for n, form in enumerate(forms):
                if form.dots is not None:
                    cell.dots.store(cell, [place.start + n], form.dots)
            self.read.add(place.key)
        return event

    def _number(
        self, place: NumberPlace, leaves: Mapping[str, Any], passed: Passed
    ) -> tuple[Any, Sequence[NumberForm]]:
        """A number or vector that a launch is given, and how its entries depend on others."""
        numbers, count = self._request.numbers, math.prod(place.shape)
        if not isinstance(place.key, NumberArgument):
            variable, first = next((v, first) for v, first in numbers.constants if v.key == place.key)
            return variable.read(), [self.parameter(first + n) for n in range(count)]
        name = place.key.name
        if name in passed:
            return leaves[name], passed[name]
        first = numbers.arguments[name]
        return leaves[name], [self.parameter(first + n) for n in range(count)]

    def parameter(self, column: int) -> NumberForm:
        """A number that is a parameter itself."""
        directions = self._request.directions
        return NumberForm({column: 1.0}, None if directions is None else directions[column])

    def _steps(self, event: LaunchEvent) -> list[Step]:
        """The stages of a launch, for what is active now."""
        call, now = event.call, self._cells.version
        integers = tuple(event.args[position] for _, position in call.kernel.integers)
        version, steps = call.steps.get(integers, (-1, list[Step]()))
        if version != now or event.own:
            call.kernel.check_apart(event.integers, call.cells)
            plans = [self._plan(event, n) for n in range(len(call.kernel.staged.stages))]
            steps = [event.step(plan) for plan in plans]
            call.steps[integers] = now, steps
        return steps

    def _plan(self, event: LaunchEvent, n: int) -> StagePlan:
        """A stage with its adjoint for what is active now, and what becomes active by it."""
        call, kernel = event.call, event.call.kernel
        forward = kernel.forward(n)
        touched = forward.reads | forward.writes
        active = frozenset(c for c in touched if c.dtype.is_real and event.cell(c).carries())
        name = n, active
        plan = call.plans.get(name)
        if plan is None:
            results = kernel.results(n, active)
            adjoint = kernel.adjoint_of_state(n, active, self._width) if results else None
            moving = adjoint.active if adjoint is not None and kernel.columns else frozenset()
            recorded = None if adjoint is None else kernel.recorded(n, adjoint, self._width)
            forward = kernel.forward(n, active=moving)
            plan = call.plans[name] = StagePlan(forward, adjoint, results, active, moving, recorded)
            launched = [forward if recorded is None else kernel.forward(n, recorded=recorded.recorded)]
            launched += [] if adjoint is None else [(recorded or adjoint).stage]
            _ = [stage.kernel for stage in launched]  # compiled now, so that errors come before the launch
        for c in plan.results:
            self._cells.activate(event.cell(c))
        return plan


def _simple_name(kernel: backend.Kernel, args: tuple[Any, ...]) -> object:
    """Equal for launches of one ``Call`` if they take numbers and templates alone, see ``_is_simple``."""
    kinds = [type(a) if type(a) in (int, float) else id(a) for a in args]
    return (id(kernel), backend.layout_version(), *kinds)


def _is_simple(kernel: backend.Kernel, args: tuple[Any, ...]) -> bool:
    """Whether a launch takes numbers of its arguments' types, and templates that are objects, alone."""

    def is_one(kind: Any, value: object) -> bool:
        if backend.is_template(kind):
            return not isinstance(value, (int, float))
        own = backend.is_scalar_type(kind) and (float if backend.is_real(backend.cook_dtype(kind)) else int)
        return type(value) is own

    return all(is_one(a.annotation, value) for a, value in zip(backend.arguments(kernel), args, strict=True))


def _name(leaf: Any, value: Any) -> object:
    """What tells the calls of a kernel apart: arrays and templates, and the types of numbers and vectors."""
    is_template = isinstance(leaf.annotation, backend.ti.template)
    if not is_template and not backend.is_array_annotation(leaf.annotation):
        return type(value)
    return (type(value), value) if isinstance(value, (int, float)) else id(value)


def _typed(kernel: backend.Kernel, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with Python's floats for real numbers."""
    kinds = [a.annotation for a in backend.arguments(kernel)]
    is_real = [backend.is_scalar_type(k) and backend.is_real(backend.cook_dtype(k)) for k in kinds]
    return tuple(float(a) if real else a for a, real in zip(args, is_real, strict=True))
