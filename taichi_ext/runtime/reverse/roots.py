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
from taichi_ext.runtime.launching.pipeline import Root, Solving
from taichi_ext.runtime.launching.session import Lost, is_among
from taichi_ext.runtime.memory.shadows import view_of
from taichi_ext.runtime.reverse.cells import Cell, Cells, Copy, Log
from taichi_ext.runtime.reverse.history import Event, LaunchEvent


@dataclass(eq=False)
class SolverRun(Event):
    """A solver runs, and what it changes is constant but for its equation; or what its residuals stored is put back.

    Attributes:
        redo: does it, and calls its arguments for each cell that may be about to change, and that has changed.
        undone: after a solver, the change that puts back what was there before the residuals.
        cells: that may have changed.
        changed: those that have.
        saved: what the way back needs.
        adjoints: on the way back, those of what was put back.
    """

    redo: Callable[[Callable[[Cell], None], Callable[[Cell], object]], object]
    undone: SolverRun | None = None
    cells: dict[Cell, None] = field(default_factory=dict)
    changed: dict[Cell, None] = field(default_factory=dict)
    saved: list[Copy] = field(default_factory=list)
    adjoints: dict[Cell, np.ndarray] = field(default_factory=dict)

    def again(self, log: Log) -> Any:
        """Do it, once more."""

        def save(cell: Cell) -> None:
            self.cells[cell] = None
            with backend.suspend_following():
                self.saved += log.before_write(cell, ((),))

        self.saved = []
        return self.redo(save, self.changed.setdefault)

    def forget(self) -> None:
        """Drop what is kept for the way back."""
        self.saved = []

    @property
    def written(self) -> list[Cell]:
        return list(self.cells)

    def back(self, adjoints: Any, undo: Callable[[list[Copy]], None]) -> None:
        """Go back over it."""
        for cell, rows in {} if self.undone is None else self.undone.adjoints.items():
            adjoints.add(cell, slice(None), rows)
        undo(self.saved)
        if self.undone is None:
            self.adjoints = {cell: adjoints.of(cell).copy() for cell in self.changed if adjoints.has(cell)}
        for cell in self.changed:
            adjoints.clear(cell, slice(None))


@dataclass(frozen=True, eq=False)
class Transposed(Event):
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

    def back(self, adjoints: Any, undo: object) -> None:
        if not any(adjoints.has(cell) for cell in self.unknowns):
            return
        given = np.concatenate([adjoints.of(cell) for cell in self.unknowns]).astype(np.float64)
        direction = -self.step(self.values, given, transposed=True)
        parts = np.split(direction, np.cumsum([cell.size for cell in self.residuals])[:-1])
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
        lost: what they have changed besides their unknowns.
    """

    def __init__(self, cells: Cells, schedule: Any) -> None:
        self._cells, self._schedule = cells, schedule
        self._whole: list[Any] = []  # those of the log around the residuals that are computed
        self.lost = Lost()

    def run(self, root: Root, follow_arrays: Callable[[], None]) -> tuple[Any, list[Cell]]:
        """Run a solver, and its residuals for the way back; returns its result and the cells of its unknowns."""
        schedule, log, table = self._schedule, self._schedule.log, self._cells.table
        unknowns, residuals = ([self._cell(obj) for obj in objs] for objs in (root.unknowns, root.residuals))
        schedule.begin()
        changed: dict[Any, Any] = {}
        undone = SolverRun(self._put_back)
        solved = SolverRun(lambda *found: self._solve(root, unknowns, changed, *found), undone)
        with schedule.held():
            result = solved.again(log)
            schedule.add(solved)
            self._cells.remember(unknowns)
            follow_arrays()
            self.lost.note(set(), {cell.key for cell in unknowns})
            self.lost.add(changed, root.refuse)
            first = len(schedule.events)
            root.residual()
            launched = [event for event in schedule.events[first:] if isinstance(event, LaunchEvent)]
            written = {cell.key for event in schedule.events[first:] for cell in event.written}
            values = root.values(table, written)
            if any(cell.carries() for cell in residuals):
                read = {
                    event.cell(c): None for event in launched for step in event.steps for c in step.plan.forward.reads
                }
                own = [cell for cell in read if cell.key is not None and cell not in log.whole]
                transposed = Transposed(unknowns, residuals, values, own, root.step)
                schedule.add(transposed)
                transposed.again(log)
                for cell in unknowns:
                    self._cells.activate(cell)
            undone.again(log)
            schedule.add(undone)
            self.lost.add(changed, root.warn)
        return result, unknowns

    def _solve(
        self,
        root: Root,
        unknowns: list[Cell],
        names: dict[Any, Any],
        save: Callable[[Cell], None],
        change: Callable[[Cell], object],
    ) -> Any:
        """Run the solver as it is; what is stored from then on is put back by ``_put_back``."""
        for cell in unknowns:
            save(cell)
            change(cell)

        def save_object(obj: Any) -> None:
            cell = self._cell(obj)
            if cell is None:
                self._schedule.log.save_unknown(obj)
            else:
                save(cell)

        solving = Solving(self._cells.table, save_object, lambda obj, *_: change(self._cell(obj)))
        result, own = root.solve(solving), {cell.key for cell in unknowns}
        names |= {key: name for key, name in solving.changed.items() if not is_among(key, own)}
        log = self._schedule.log
        self._whole.append(log.whole)
        log.whole = {}
        return result

    def _put_back(self, save: Callable[[Cell], None], change: Callable[[Cell], object]) -> None:
        log = self._schedule.log
        copies, log.whole = log.whole, self._whole.pop()
        for cell, copy in copies.items():
            save(cell)
            copy.put_back()
            change(cell)

    def _cell(self, obj: Any) -> Any:
        """The cell of a field, array or entry; None for an entry of a field that is not known."""
        if not isinstance(obj, backend.FieldEntry):
            is_array = backend.is_array(obj)
            return self._cells.of_array(view_of(obj), "an array", obj) if is_array else self._cells.of_field(obj)
        known = self._cells.of_entry(obj)
        return None if known is None else known[0]
