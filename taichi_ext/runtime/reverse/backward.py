"""The way back: adjoints of what a run has computed, from the last launch to the first."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.adjoint import Tape, own_width
from taichi_ext.program import Container
from taichi_ext.runtime.memory.regions import Region, View
from taichi_ext.runtime.memory.shadows import check_indices
from taichi_ext.runtime.python.dual_numbers import is_dual
from taichi_ext.runtime.reverse.cells import Cell, Cells, Copy
from taichi_ext.runtime.reverse.history import Event, Launcher, LaunchEvent, Lent, NumberForm, ReadEvent, Stored
from taichi_ext.runtime.reverse.kernels import AdjointKernel, numpy_type
from taichi_ext.runtime.reverse.roots import SolverRun, Transposed


class CellAdjoints:
    """The adjoints of cells and of numbers in Python; arrays that share memory share them.

    Args:
        cells: the fields and arrays of the run.
        width: the number of cotangents.

    Attributes:
        numbers: the adjoints of numbers in Python.
    """

    def __init__(self, cells: Cells, width: int) -> None:
        self.cells, self.width = cells, width
        self._arrays: dict[Hashable, np.ndarray] = {}
        self.numbers: dict[int, np.ndarray] = {}

    def _owner(self, cell: Cell) -> Any:
        """The holder of the adjoints: the region of an array, or else the cell."""
        return self.cells.regions.find(cell.key) if isinstance(cell.key, View) else cell

    def has(self, cell: Cell) -> bool:
        return self._owner(cell) in self._arrays

    def whole(self, cell: Cell) -> np.ndarray:
        """The adjoints of all the memory that a cell lies in, zeros at first."""
        owner = self._owner(cell)
        if owner not in self._arrays:
            self._arrays[owner] = np.zeros(max(1, owner.size) * self.width, cell.dtype)
        return self._arrays[owner]

    def rows(self, cell: Cell) -> slice | np.ndarray:
        """Which of these belong to the cell, in the order of its entries."""
        owner = self._owner(cell)
        return slice(None) if owner is cell or owner.is_whole(cell.key) else owner.rows(cell.key)

    def matrix(self, cell: Cell) -> np.ndarray:
        """``whole``, a row for each number."""
        return self.whole(cell).reshape(-1, self.width)

    def of(self, cell: Cell, rows: Any = slice(None)) -> np.ndarray:
        """A row for each entry of a cell, or for some."""
        return self.matrix(cell)[self._places(cell, rows)]

    def _places(self, cell: Cell, rows: Any) -> Any:
        """Where entries of a cell are in its matrix."""
        own = self.rows(cell)
        if isinstance(own, slice) and own == slice(None):
            return rows
        return own if isinstance(rows, slice) and rows == slice(None) else np.arange(len(self.matrix(cell)))[own][rows]

    def add(self, cell: Cell, rows: Any, values: np.ndarray) -> None:
        """Add to the adjoints of entries, each of which is named once."""
        if values.size:
            self.matrix(cell)[self._places(cell, rows)] += values

    def store(self, cell: Cell, rows: Any, values: Any) -> None:
        """Let entries have these numbers."""
        self.matrix(cell)[self._places(cell, rows)] = values

    def clear(self, cell: Cell, rows: Any) -> None:
        """Entries have become constants."""
        if any(map(self.has, cell.all)):
            self.store(cell, rows, 0)

    def forget(self) -> None:
        """Drop all adjoints of entries."""
        self._arrays.clear()

    def clear_all(self) -> None:
        """Let all adjoints be 0."""
        self.numbers.clear()
        for array in self._arrays.values():
            array.fill(0)

    def move(self, replaced: Iterable[Region], cell: Cell) -> None:
        """Take the rows of regions that the region of an array has replaced."""
        for region in replaced:
            rows = self._arrays.pop(region, None)
            if rows is not None:
                self.matrix(cell)[self._owner(cell).rows(region.layout)] = rows.reshape(-1, self.width)

    def borrow(self, cell: Cell, *, is_shared: bool) -> tuple[np.ndarray, Any]:
        """The adjoints of a cell as a kernel takes them, and a function to call after the launch, if there is one.

        ``is_shared``: whether the kernel is given another part of the same memory, too, and only reads both.
        """
        whole, rows = self.whole(cell), self.rows(cell)
        if isinstance(rows, slice) and not is_shared:
            if rows == slice(None):
                return whole, None
            start, stop, _ = rows.indices(len(whole) // self.width)
            return whole[start * self.width : stop * self.width], None
        part = np.zeros((max(1, cell.size), self.width), whole.dtype)
        if is_shared:
            return part.reshape(-1), lambda: self.add(cell, slice(None), part[: cell.size])
        part[: cell.size] = self.of(cell)

        def give_back() -> None:
            self.matrix(cell)[rows] = part[: cell.size]

        return part.reshape(-1), give_back

    def add_number(self, key: int, values: np.ndarray) -> None:
        known = self.numbers.get(key)
        self.numbers[key] = values if known is None else known + values


class Backward:
    """Goes back over events.

    Args:
        adjoints: with the cotangents of the outputs.
        capacity: entries of a thread's tape, of real numbers and of integers; they grow where that is too little.
        moved: takes the tangents of adjoints, for second derivatives.

    Attributes:
        final: copies of what has been undone, with the numbers from after the run.
    """

    def __init__(self, adjoints: CellAdjoints, capacity: list[int], moved: CellAdjoints | None) -> None:
        self.adjoints, self.moved = adjoints, moved
        self._stores = [adjoints] if moved is None else [adjoints, moved]
        self.final: dict[Hashable, Copy] = {}
        self._missing = [0, 0]  # entries of a thread's tape
        self._keeps_final, self._is_guarded = True, False
        self._capacity = capacity
        self._threads = backend.thread_count() or 1
        self._memory: dict[Hashable, np.ndarray] = {}  # of threads: tapes and sums
        self._repeated: dict[Hashable, tuple[AdjointKernel, list[Launcher]]] = {}  # launches with the same arrays

    def begin(self, *, is_guarded: bool) -> None:
        """Be ready for a way back, with adjoints that are 0.

        ``is_guarded``: whether a product of 0 with what is infinite or not a number is 0.
        """
        if is_guarded != self._is_guarded:
            self._forget()
        self._keeps_final, self._is_guarded = True, is_guarded
        for store in self._stores:
            store.clear_all()

    def event(self, event: Event) -> None:
        """Go back over one event: memory is afterwards as before it, as far as adjoints read it."""
        if isinstance(event, LaunchEvent):
            for n in reversed(range(len(event.steps))):
                self._undo(event.saved[n])
                self._stage(event, n)
            for cell, row, form in event.given:
                self._pass_on(form, cell, [row])
        elif isinstance(event, Stored):
            self._undo(event.saved)
            if event.form:
                self._pass_on(event.form, event.cells[0], event.rows)
            if event.rows is not None:
                for store in self._stores:
                    store.clear(event.cells[0], event.rows)
        elif isinstance(event, (SolverRun, Transposed)):
            event.back(self.adjoints, self._undo)
        elif isinstance(event, ReadEvent):
            for store in self._stores:
                adjoint = store.numbers.get(event.number)
                if adjoint is not None:
                    store.add(event.cell, [event.row], adjoint[None])

    def _pass_on(self, form: NumberForm, cell: Cell, rows: Any) -> None:
        """Pass the adjoint of entries that hold a number on to those that it was computed from."""
        if not self.adjoints.has(cell):
            return
        stored = (np.atleast_2d(store.of(cell, rows)) for store in self._stores)
        values, *moved = (a.reshape(-1, a.shape[-1]).astype(np.float64).sum(0) for a in stored)
        for key, partial in form.items():
            number = float(partial)
            self.adjoints.add_number(key, _times(number, values))
            if self.moved is not None:
                change = partial.tangent * values if is_dual(partial) else 0.0  # type: ignore[attr-defined]
                self.moved.add_number(key, _times(number, moved[0]) + change)

    def keep_final(self, cells: Iterable[Cell]) -> None:
        """Keep what cells hold now: nothing else will be undone."""
        for cell in cells:
            self.final.setdefault((cell, ()), Copy(cell, ()))
        self._keeps_final = False

    def restore(self) -> None:
        """Store the numbers from after the run again."""
        for copy in reversed(self.final.values()):  # parts may overlap: the one that was saved first counts
            copy.put_back()
        self.final.clear()

    def _undo(self, saved: list[Copy]) -> None:
        for copy in reversed(saved):
            name = copy.cell, copy.box
            if self._keeps_final and name not in self.final:  # another way back may follow, of other cotangents
                self.final[name] = Copy(copy.cell, copy.box)
            copy.put_back()

    def _stage(self, event: LaunchEvent, n: int) -> None:
        plan = event.steps[n].plan
        arrays = {} if self._is_guarded else event.recordings.get(n, {})
        name, adjoint = (event.call, plan, bool(arrays)), plan.recorded if arrays else plan.adjoint
        known = self._repeated.get(name)
        if known is None:
            if adjoint is None or not any(self.adjoints.has(event.cell(c)) for c in plan.results):
                return
            if self._is_guarded:
                adjoint = event.call.kernel.adjoint(n, adjoint.before, self.adjoints.width, is_guarded=True)
            lent = Lent(adjoint.stage)
            extra = [self._argument(event, n, adjoint, c, lent) for c in adjoint.stage.extra]
            is_same = not event.own and not lent.is_copied
            launchers = []
            by_cotangent = {*adjoint.arrays.values(), *(own for _, own in adjoint.own)}
            for first in range(0, self.adjoints.width, adjoint.rows):
                both = zip(adjoint.stage.extra, extra, strict=True)
                launchers.append(Launcher(adjoint.stage, event.args))
                launchers[-1](event.args, [x[first:] if c in by_cotangent else x for c, x in both], keep=is_same)
            lent.give_back()
            if all(launcher.is_prepared for launcher in launchers):
                self._repeated[name] = adjoint, launchers
        else:
            adjoint, launchers = known
            for launcher in launchers:
                launcher.again(event.args, arrays)
        for c, own in adjoint.own:
            cell = event.cell(c)
            for store in self._stores:
                sums = self._sums(own, store)
                total = sums.reshape(self._threads, -1)[:, : cell.size * store.width].sum(axis=0)
                store.add(cell, slice(None), total.reshape(-1, store.width))
                sums[:] = 0
        if adjoint.tape is not None:
            status = self._memory["status"]
            self._missing = [max(known, int(count)) for known, count in zip(self._missing, status, strict=False)]
            status[:2] = 0

    def _argument(self, event: LaunchEvent, n: int, adjoint: AdjointKernel, c: Container, lent: Lent) -> np.ndarray:
        if c in adjoint.recorded:
            return event.recordings[n][c]
        what = adjoint.stage.tangents.get(c)
        if what is None:
            store = self.adjoints
        elif isinstance(what, Container) and self.moved is not None:
            c, store = what, self.moved
        else:
            return lent.tangents(c, event.cell)
        primal = next((p for p, array in adjoint.arrays.items() if array is c), None)
        if primal is not None:
            cell = event.cell(primal)
            others = [event.cell(other) for other in adjoint.arrays if other is not primal]
            is_shared = any(other in cell.related for other in others) and isinstance(cell.key, View)
            return lent.borrow(store, cell, is_shared=is_shared)
        if any(own is c for _, own in adjoint.own):
            return self._sums(c, store)
        if adjoint.tape is not None and c in adjoint.tape.arrays:
            return self._tape(adjoint.tape, c, store)
        cell = event.cell(c)
        return event.own[c].obj if what is None else lent.borrow(cell.dots, cell)

    def _sums(self, c: Container, store: CellAdjoints) -> np.ndarray:
        """Sums of each thread."""
        assert c.shape is not None
        return self._of_threads((c, store), own_width(c.shape[0]), c, store)

    def _forget(self) -> None:
        """Drop the adjoints, and the launches that have their arrays."""
        self._repeated.clear()
        for store in self._stores:
            store.forget()

    def has_grown(self) -> bool:
        """Whether a tape was too short, so that the next way back has longer ones; raises where that is too long."""
        if not any(self._missing):
            return False
        for part, missing in enumerate(self._missing):
            self._capacity[part] += int(missing * 1.25)
        self._missing = [0, 0]
        self._memory.clear()
        self._forget()
        columns = max(store.width for store in self._stores) // self.adjoints.width
        count = max(self._capacity) * self._threads * columns
        what = f"What one iteration keeps for its way back takes {max(self._capacity)} entries in each thread"
        advice = "Split its loop over several launches, or use fewer threads (ti.init(cpu_max_num_threads=...))."
        check_indices(f"{what}, for all {count}", count, advice)
        return True

    def _tape(self, tape: Tape, c: Container, store: CellAdjoints) -> np.ndarray:
        if c is tape.status:
            return self._memory.setdefault("status", np.array([0, 0, *self._capacity], np.int32))
        is_real = c is tape.reals
        return self._of_threads((c.dtype, is_real, store), self._capacity[0 if is_real else 1], c, store)

    def _of_threads(self, name: Hashable, size: int, c: Container, store: CellAdjoints) -> np.ndarray:
        """So many numbers of each thread, for each column of a store; zeros at first."""
        if name not in self._memory:
            size *= self._threads * (store.width // self.adjoints.width)
            self._memory[name] = np.zeros(size, numpy_type(c))
        return self._memory[name]


def _times(partial: float, values: np.ndarray) -> np.ndarray:
    """A product; 0 stays 0 where a partial is infinite."""
    return np.where(values == 0, 0.0, partial * values)
