"""Solvers of implicit functions in reverse mode: one solution of the transposed system on the way back.

In the run, the solver is one event.  Its residuals are computed at the solution, as launches like others, and what they
store is put back.  On the way back, the adjoint of the unknowns x becomes that of the residuals,
``-(d residual / d x)^-T x_bar``, and goes back through their launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.runtime.launching.roots import Root, Solving
from taichi_ext.runtime.memory.shadows import view_of
from taichi_ext.runtime.reverse.cells import Cell, Cells, Copy, Log
from taichi_ext.runtime.reverse.history import Launched


@dataclass(eq=False)
class Constants:
    """Something happens to cells that makes constants of them: a solver runs, or what residuals stored is put back.

    Attributes:
        cells: that it changes, with the names in messages.
        redo: makes it happen, and calls its argument for each field or array that is about to change.
        saved: what the way back needs.
    """

    redo: Callable[[Callable[[Cell], None]], object]
    cells: dict[Cell, None] = field(default_factory=dict)
    saved: list[Copy] = field(default_factory=list)

    def again(self, log: Log) -> Any:
        """Let it happen, once more."""

        def save(cell: Cell) -> None:
            self.cells[cell] = None
            with backend.suspend_following():
                self.saved += log.before_write(cell, ((),))

        self.saved = []
        return self.redo(save)

    def forget(self) -> None:
        """Drop what is kept for the way back."""
        self.saved = []

    @property
    def written(self) -> list[Cell]:
        """The cells that it changes."""
        return list(self.cells)

    def back(self, adjoints: Any, undo: Callable[[list[Copy]], None]) -> None:
        """Go back over it."""
        undo(self.saved)
        for cell in self.cells:
            adjoints.clear(cell, slice(None))


@dataclass(frozen=True, eq=False)
class Transposed:
    """The adjoints of unknowns become those of residuals.

    Attributes:
        unknowns: their cells.
        residuals: likewise.
        values: of the residuals.
        read: the cells that the residuals are computed from.
        step: see ``Root``.
    """

    unknowns: list[Cell]
    residuals: list[Cell]
    values: np.ndarray
    read: list[Cell]
    step: Callable[..., np.ndarray]

    def again(self, log: Log) -> None:
        """The linear system will be computed from these numbers."""
        for cell in self.read:
            log.want(cell, ((),))

    def forget(self) -> None:
        """Nothing."""

    @property
    def written(self) -> list[Cell]:
        """Nothing."""
        return []

    def back(self, adjoints: Any, undo: object) -> None:
        """Solve the transposed system."""
        if not any(adjoints.has(cell) for cell in self.unknowns):
            return
        given = np.concatenate([adjoints.of(cell) for cell in self.unknowns]).astype(np.float64)
        found = -self.step(self.values, given, transposed=True)
        parts = np.split(found, np.cumsum([cell.size for cell in self.residuals])[:-1])
        for cell, part in zip(self.residuals, parts, strict=True):
            adjoints.clear(cell, slice(None))
            adjoints.add(cell, slice(None), part)
        for cell in self.unknowns:
            adjoints.clear(cell, slice(None))


class Roots:
    """The solvers of one run.

    Args:
        cells: the fields and arrays of the run.
        schedule: takes the events.

    Attributes:
        lost: what to do if a kernel reads cells that a solver has changed besides its unknowns.
    """

    def __init__(self, cells: Cells, schedule: Any) -> None:
        self._cells, self._schedule = cells, schedule
        self.lost: dict[Cell, Callable[[], None]] = {}

    def note(self, event: Launched) -> None:
        """A kernel has been launched."""
        if self.lost:
            read = {event.cell(c) for step in event.steps for c in step.plan.forward.reads}
            for cell in self.lost.keys() & (read | {*event.written}):
                found = self.lost.pop(cell)
                if cell not in event.written:
                    found()

    def run(self, root: Root, follow_arrays: Callable[[], None]) -> Any:
        """Run a solver, and its residuals for the way back."""
        schedule, log = self._schedule, self._schedule.log
        unknowns, residuals = ([self._cell(obj) for obj in objs] for objs in (root.unknowns, root.residuals))
        schedule.begin()
        solved, undone = Constants(lambda save: self._solve(root, unknowns, save)), Constants(self._put_back)
        with schedule.held():
            result = solved.again(log)
            schedule.add(solved)
            follow_arrays()
            names = {cell: self._name(cell) for cell in solved.cells if cell not in unknowns}
            self.lost |= {cell: root.refuses(name) for cell, name in names.items()}
            first = len(schedule.events)
            root.residual()
            with backend.suspend_following():
                values = np.concatenate([np.array(backend.as_numpy(r)).reshape(-1) for r in root.residuals])
            launched = [event for event in schedule.events[first:] if isinstance(event, Launched)]
            read = {event.cell(c): None for event in launched for step in event.steps for c in step.plan.forward.reads}
            is_active = any(cell.carries() for cell in residuals)
            if is_active:
                own = [cell for cell in read if cell.key is not None and cell not in log.whole]
                transposed = Transposed(unknowns, residuals, values, own, root.step)
                schedule.add(transposed)
                transposed.again(log)
            undone.again(log)
            schedule.add(undone)
            self.lost |= {cell: root.warns(name) for cell, name in names.items()}
        for cell in unknowns:
            if is_active:
                self._cells.activate(cell)
        return result

    def _solve(self, root: Root, unknowns: list[Cell], save: Callable[[Cell], None]) -> Any:
        """Run the solver as it is; what is stored from then on is put back by ``_put_back``."""
        for cell in unknowns:
            save(cell)

        def save_object(obj: Any) -> None:
            save(self._cell(obj))

        solving = Solving(self._cells.table, save_object, lambda obj: None, lambda *_: None)
        is_first = backend.pipeline_follower() is not None
        with backend.follow_by(solving) if is_first else backend.follow(solving):
            result = root.solve()
        self._schedule.log.whole = {}
        return result

    def _put_back(self, save: Callable[[Cell], None]) -> None:
        log = self._schedule.log
        copies, log.whole = log.whole, None
        for cell, copy in copies.items():
            save(cell)
            copy.put_back()

    def _cell(self, obj: Any) -> Cell:
        if isinstance(obj, backend.FieldEntry):
            found = self._cells.of_entry(obj)
            assert found is not None
            return found[0]
        return (
            self._cells.of_array(view_of(obj), "an array", obj) if backend.is_array(obj) else self._cells.of_field(obj)
        )

    def _name(self, cell: Cell) -> Any:
        info = self._cells.table.infos.get(cell.key)
        return "an array" if info is None else info.name
