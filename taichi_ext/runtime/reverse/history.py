"""What has happened in a run: launches by stages, and stores of Python, each of which can be undone and done again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.program import Container, Local
from taichi_ext.runtime.memory.array_tangents import Binding
from taichi_ext.runtime.memory.regions import View
from taichi_ext.runtime.reverse.boxes import Place
from taichi_ext.runtime.reverse.cells import Box, Cell, Copy, Log
from taichi_ext.runtime.reverse.kernels import AdjointKernel, StagedKernel, StageKernel, numpy_type


class NumberForm(dict[int, float]):
    """How a number in Python depends on others: partials by their numbers. It can be added and scaled.

    Attributes:
        dots: for second derivatives, the tangent of the number; then partials may be numbers with tangents.
    """

    __slots__ = ("dots",)
    __array_ufunc__ = None

    def __init__(self, partials: Mapping[int, float] | None = None, dots: np.ndarray | None = None) -> None:
        super().__init__(partials or {})
        self.dots = dots

    def __mul__(self, factor: float) -> NumberForm:
        dots = None if self.dots is None else self.dots * float(factor)
        return NumberForm({key: partial * factor for key, partial in self.items()}, dots)

    __rmul__ = __mul__

    def __add__(self, other: NumberForm) -> NumberForm:
        partials = {key: self.get(key, 0.0) + other.get(key, 0.0) for key in {**self, **other}}
        if self.dots is None or other.dots is None:
            return NumberForm(partials, other.dots if self.dots is None else self.dots)
        return NumberForm(partials, self.dots + other.dots)


_CONSTANT = NumberForm()


class Event:
    """Something that has happened in a run; by default, nothing of it is kept and nothing has changed."""

    __slots__ = ()

    def again(self, log: Log) -> object:
        """Let it happen once more, with everything as it was before."""

    def forget(self) -> None:
        """Drop what is kept for the way back."""

    @property
    def written(self) -> list[Cell]:
        return []


@dataclass(frozen=True, eq=False)
class LaunchCall:
    """A kernel and its arguments; launches that differ in numbers alone share it.

    Attributes:
        args: the user's arguments, kept alive.
        cells: of the containers that it names.
        binding: the arrays among the arguments.
        plans: of its stages, by number and active containers.
        steps: of its launches, by the integers that indices may be computed from, each with ``Cells.version``.
    """

    kernel: StagedKernel
    args: tuple[Any, ...]
    cells: Mapping[Container, Cell]
    binding: Binding
    plans: dict[Hashable, StagePlan] = field(default_factory=dict)
    steps: dict[Hashable, tuple[int, list[Step]]] = field(default_factory=dict)
    launchers: dict[StageKernel, Launcher] = field(default_factory=dict)

    def is_current(self) -> bool:
        """Whether its arrays are where they were."""
        return self.binding.is_current()


@dataclass(frozen=True, eq=False)
class StagePlan:
    """A stage with its adjoint, for some active containers.

    Attributes:
        forward: the stage.
        adjoint: None if nothing in it has a derivative.
        results: containers with derivatives that it writes.
        before: the containers that have derivatives before it.
        moving: containers with tangents, for second derivatives.
        recorded: the adjoint where values that the stage has computed are recorded; None if none are.
    """

    forward: StageKernel
    adjoint: AdjointKernel | None
    results: list[Container]
    before: frozenset[Container]
    moving: frozenset[Container] = frozenset()
    recorded: AdjointKernel | None = None


Parts = list[tuple[Cell, Sequence[Box]]]


@dataclass(frozen=True, eq=False)
class Step:
    """A stage of a launch.

    Attributes:
        plan: what runs forward and back.
        reads: the parts of cells that the adjoint reads.
        writes: those that the stage writes.
    """

    plan: StagePlan
    reads: Parts
    writes: Parts

    @property
    def seen(self) -> frozenset[Container]:
        """What the stage reads that depends on parameters."""
        return self.plan.before & self.plan.forward.reads if self.plan.results else frozenset()


@dataclass(eq=False)
class LaunchEvent(Event):
    """A launch.

    Attributes:
        call: the kernel and its arguments.
        args: those of this launch.
        own: arrays of numbers that it is given, that cross its stages, and that it returns.
        given: the numbers that depend on parameters: entries of arrays among these, and how.
        steps: its stages.
        saved: by stage, what it has overwritten and the way back needs.
        has_run: whether random numbers have been drawn.
        recordings: by stage, arrays of values that it has computed.
    """

    call: LaunchCall
    args: tuple[Any, ...]
    own: dict[Container, Cell]
    given: list[tuple[Cell, int, NumberForm]]
    steps: list[Step] = field(default_factory=list)
    saved: list[list[Copy]] = field(default_factory=list)
    has_run: bool = False
    recordings: dict[int, dict[Container, np.ndarray]] = field(default_factory=dict)

    def cell(self, c: Container) -> Cell:
        return self.own[c] if c in self.own else self.call.cells[c]

    @property
    def integers(self) -> dict[Local, int]:
        """The integers among the arguments that indices may be computed from."""
        return {local: local.dtype.wrapped(int(self.args[n])) for local, n in self.call.kernel.integers}

    def step(self, plan: StagePlan) -> Step:
        """A stage of this launch."""
        adjoint, forward = plan.adjoint, plan.forward
        reads = [] if adjoint is None else self._parts(adjoint.stage, adjoint.stage.reads, adjoint.stage.places.loads)
        return Step(plan, reads, self._parts(forward, forward.writes, forward.places.stores))

    def _parts(
        self, kernel: StageKernel, containers: frozenset[Container], known: Mapping[Container, list[Place]]
    ) -> Parts:
        """The parts of cells that a stage reads or writes."""
        arguments = self.integers
        return [(self.cell(c), kernel.places.boxes(known.get(c, [()]), c, arguments)) for c in containers]

    def again(self, log: Log) -> None:
        """Launch it, or once more with everything as it was before."""
        self.saved = [self._run(step, n, log) for n, step in enumerate(self.steps)]
        self.has_run = True

    def _run(self, step: Step, n: int, log: Log) -> list[Copy]:
        """Launch a stage; returns copies of what it overwrites and the way back needs."""
        for cell, boxes in step.reads:
            log.want(cell, boxes)
        saved = [copy for cell, boxes in step.writes for copy in log.before_write(cell, boxes)]
        kernel, moving, recorded = step.plan.forward, step.plan.moving, step.plan.recorded
        arrays: dict[Container, np.ndarray] = {}
        if self.has_run:
            kernel = self.call.kernel.forward(n, is_again=True, active=moving)
        elif recorded is not None and log.records(recorded.recorded_nbytes):
            kernel = self.call.kernel.forward(n, recorded=recorded.recorded)
            arrays = self.recordings[n] = {c: np.empty(c.shape or (), numpy_type(c)) for c in recorded.recorded}
        launcher = self.call.launchers.get(kernel)
        if launcher is None:
            launcher = self.call.launchers[kernel] = Launcher(kernel, self.args)
        if launcher.is_prepared:
            launcher.again(self.args, arrays)
            return saved
        lent = Lent(kernel)
        own = {**arrays, **{c: cell.obj for c, cell in self.own.items()}}
        extra = [own[c] if c in own else lent.tangents(c, self.cell) for c in kernel.extra]
        launcher(self.args, extra, keep=not self.own and not lent.is_copied)
        lent.give_back()
        return saved

    def forget(self) -> None:
        """Drop what is kept for the way back."""
        self.saved = [[] for _ in self.steps]
        self.recordings.clear()

    @property
    def written(self) -> list[Cell]:
        return [cell for step in self.steps for cell, _ in step.writes]


class Launcher:
    """Launches a stage of a call; one that takes numbers and NumPy arrays alone is set up once.

    Attributes:
        is_prepared: whether ``again`` launches it.
    """

    def __init__(self, kernel: StageKernel, args: tuple[Any, ...]) -> None:
        self._kernel, self._extra = kernel.kernel, kernel.extra
        self._positions = [p for p in self._kernel.positions if p < len(args)]
        has_numbers = all(type(args[p]) in (int, float) for p in self._positions)
        self._is_simple = has_numbers and not backend.is_debug()
        self.is_prepared = False
        self._prepared: backend.RepeatedLaunch | None = None
        self._args: tuple[Any, ...] = ()  # of the last launch

    def __call__(self, args: tuple[Any, ...], extra: Sequence[Any], *, keep: bool) -> None:
        """Launch it; ``keep``: whether ``extra`` are the same arrays in each launch."""
        if not self._is_simple or not keep or not all(isinstance(x, np.ndarray) for x in extra):
            self._kernel.launch(*args, *extra)
            return
        passed = [*(args[p] for p in self._positions), *extra]
        self._prepared, self._args = backend.RepeatedLaunch(self._kernel, dict(enumerate(passed))), args
        self.is_prepared = True
        self._prepared({})

    def again(self, args: tuple[Any, ...], arrays: Mapping[Container, np.ndarray]) -> None:
        """Launch it as the last time, apart from numbers and these arrays."""
        assert self._prepared is not None
        before, self._args = self._args, args
        given: dict[int, Any] = {n: args[p] for n, p in enumerate(self._positions) if args[p] is not before[p]}
        first = len(self._positions)
        given.update((first + n, arrays[c]) for n, c in enumerate(self._extra) if c in arrays)
        self._prepared(given)


class Lent:
    """Tangents that a kernel is given, for second derivatives."""

    def __init__(self, kernel: StageKernel) -> None:
        self._kernel = kernel
        self._after: list[Callable[[], None]] = []
        self.is_copied = bool(kernel.scratch)  # whether other arrays are given in each launch

    def tangents(self, c: Container, cell_of: Callable[[Container], Cell]) -> np.ndarray:
        """The array for one of the kernel's own arguments."""
        what = self._kernel.tangents[c]
        if not isinstance(what, Container):
            return np.zeros(max(1, self._kernel.scratch[what]), numpy_type(c))
        cell = cell_of(what)
        self.is_copied |= isinstance(cell.key, View)  # its tangents move where a larger part of its memory is used
        return self.borrow(cell.dots, cell)

    def borrow(self, store: Any, cell: Cell, *, is_shared: bool = False) -> np.ndarray:
        """The numbers of a cell, from a store of tangents or adjoints."""
        array, after = store.borrow(cell, is_shared=is_shared)
        if after is not None:
            self._after.append(after)
            self.is_copied = True
        return array

    def give_back(self) -> None:
        """Store what was only a copy."""
        for after in self._after:
            after()


@dataclass(eq=False, slots=True)
class Stored(Event):
    """A store of Python to a field or array, or another change that no kernel of the user makes.

    Attributes:
        cells: that it changes.
        rows: of the first of them, whose entries are constants from then on; None for none.
        redo: makes the change again.
        saved: what the way back needs.
        form: how the stored number depends on others.
    """

    cells: list[Cell]
    rows: Any
    redo: Callable[[], object]
    box: Box = ()
    saved: list[Copy] = field(default_factory=list)
    form: NumberForm = field(default_factory=lambda: _CONSTANT)

    def again(self, log: Log) -> None:
        """Make the change once more."""
        self.saved = [copy for cell in self.cells for copy in log.before_write(cell, (self.box,))]
        self.redo()
        self.settle()

    def settle(self) -> None:
        """Give what was stored its tangents, for second derivatives."""
        cell = self.cells[0] if self.cells else None
        if self.rows is not None and cell is not None and cell.dots is not None:
            cell.dots.clear(cell, self.rows)
            if self.form.dots is not None:
                cell.dots.store(cell, self.rows if isinstance(self.rows, slice) else [self.rows], self.form.dots)

    def forget(self) -> None:
        """Drop what is kept for the way back."""
        self.saved = []

    @property
    def written(self) -> list[Cell]:
        return self.cells


@dataclass(eq=False, slots=True)
class ReadEvent(Event):
    """A number that Python has read from an entry."""

    cell: Cell
    row: int
    number: int
