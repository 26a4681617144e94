"""The gradient of a kernel or pipeline in reverse mode: products of cotangents with J, for a few plain runs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.analysis.cuts import Paths
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.program.keys import RETURN
from taichi_ext.runtime.memory.shadows import FieldTable
from taichi_ext.runtime.python.dual_numbers import Run
from taichi_ext.runtime.reverse.backward import Backward, CellAdjoints
from taichi_ext.runtime.reverse.calls import Kernels
from taichi_ext.runtime.reverse.cells import Cells, Log
from taichi_ext.runtime.reverse.forward import Forward
from taichi_ext.runtime.reverse.schedule import Schedule

MOST_ROWS = 8  # cotangents in one way back
_CAPACITY = 1 << 10  # entries of a thread's tape at first


@dataclass(frozen=True)
class CotangentProducts:
    """Cotangents times J.

    Attributes:
        rows: an array with a row for each column of J, and a column for each cotangent.
        moved: second derivatives: likewise, with a column for each direction; None if there are none.
        returned: what the kernel or function has returned.
        launches: how many there were.
        snapshots: the most that were held at one time.
        repeated: launches that were made again on the way back.
        peak: the most bytes that were kept.
        alerts: what kernels have said.
    """

    rows: np.ndarray
    moved: np.ndarray | None
    returned: Any
    launches: int
    snapshots: int
    repeated: int
    peak: int
    alerts: list[Any]

    def __str__(self) -> str:
        again = f", {self.repeated} of them made again from at most {self.snapshots} snapshots" if self.repeated else ""
        return f"{self.launches} launches and stores{again}; {self.peak} bytes kept for the way back"


class Reverse:
    """A kernel or pipeline prepared for reverse mode; calls from several threads share its kernels.

    Args:
        table: the fields that kernels use.

    Attributes:
        report: what the last call has kept, and computed again.
    """

    def __init__(self, table: FieldTable) -> None:
        self._table = table
        self._kernels = Kernels({}, [_CAPACITY, _CAPACITY])
        self._program = weakref.ref(backend.program())
        self.report = ""

    def vjp(
        self,
        run: Run,
        request: Any,
        cotangents: Sequence[np.ndarray],
        *,
        max_memory: float | None = None,
        advance: Callable[[int, int], None] = lambda done, total: None,
        check: Callable[[Forward], None] | None = None,
        known: Set[int] | None = None,
        restores: bool = False,
    ) -> CotangentProducts:
        """Run it once, and multiply cotangents with its Jacobian.

        Args:
            run: the call.
            request: its parameters and outputs, see ``Request``. If it has directions, there is one cotangent, and the
                product is differentiated along them.
            cotangents: for each output a matrix with a row for each entry and a column for each cotangent.
            max_memory: bytes for what is kept for the way back; half of the free memory if None.
            advance: is told how many events of how many the ways back have passed.
            check: called with the run before the way back; if it raises, everything is as it was before.
            known: see ``Forward``.
            restores: whether everything is put back as it was before the run.

        Raises:
            UnsupportedError: the adjoint of something in it is not known; everything is as it was before.
            InvalidArgumentError: ``max_memory`` is too small.
        """
        if not backend.is_host_arch():
            raise UnsupportedError("Reverse mode of pipelines runs on the CPU.")
        if self._program() is not backend.program():
            self._kernels = Kernels({}, self._kernels.capacity)  # those of a program that has ended are of no use
            self._program = weakref.ref(backend.program())
        total = cotangents[0].shape[1] if cotangents else 0
        width = max(1, -(-total // max(1, -(-total // MOST_ROWS))))
        is_undoable = run.kernel is None or restores or check is not None
        cells, log = Cells(self._table), Log(keeps_first=is_undoable)
        if request.directions is not None:
            cells.dots = CellAdjoints(cells, request.directions.shape[1])
        schedule = Schedule(cells, log, max_memory)
        forward = Forward(request, self._kernels, schedule, width, known)
        with _undone(log, InvalidArgumentError, UnsupportedError):
            returned = self._forward(forward, run)
            alerts = backend.raised_alerts()
        is_undefined = any(alert.is_undefined for alert in alerts)
        parts: list[np.ndarray] = []
        moved: np.ndarray | None = None
        with _undone(log, *([BaseException] if restores else [])):
            if check is not None:
                with _undone(log, Exception):
                    check(forward)
            blocks = max(1, -(-total // width))
            for number, first in enumerate(range(0, total, width)):

                def told(done: int, events: int, number: int = number) -> None:
                    advance(number * events + done, blocks * events)

                block = [c[:, first : first + width] for c in cotangents]
                count = block[0].shape[1]
                if count < width:
                    block = [np.pad(c, ((0, 0), (0, width - count))) for c in block]
                found, moved = self._back(forward, block, told, may_be_guarded=not is_undefined)
                parts.append(found[:, :count])
        backend.raised_alerts()  # of what was run again
        if restores:
            log.undo()
        if total > width:
            parts = [np.concatenate(parts, axis=1)]
        rows = parts[0] if parts else np.zeros((request.block.count, 0))
        products = CotangentProducts(
            rows,
            moved,
            returned,
            len(schedule.events),
            schedule.most,
            schedule.repeated,
            schedule.peak,
            alerts,
        )
        self.report = str(products)
        return products

    @property
    def source(self) -> str:
        """The text of the kernels, each stage with its adjoint."""
        return "\n\n".join(text for kernel in self._kernels.staged.values() for text in kernel.texts())

    @property
    def paths(self) -> list[Paths]:
        """From where to where numbers go in the kernels."""
        return [kernel.paths for kernel in self._kernels.staged.values()]

    def _forward(self, forward: Forward, run: Run) -> Any:
        if run.kernel is None:
            return forward.run(run)
        return forward.launch(run.kernel, run.args)

    def _back(
        self, forward: Forward, cotangents: list[np.ndarray], advance: Any, *, may_be_guarded: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """One way back; another one if a tape was too short, or numbers are not finite.

        They may be products with 0: of a value that is not used, as ``a / b`` where ``b == 0`` is asked for later, or
        of one that is not moved. These are 0, as in a Jacobian, and the other way back takes them so.

        ``may_be_guarded``: whether there is a derivative everywhere, so that such a product is meant to be 0.
        """
        schedule, capacity = forward.schedule, self._kernels.capacity
        is_guarded = may_be_guarded and self._kernels.is_guarded
        while True:
            adjoints, dots = CellAdjoints(schedule.cells, forward.width), schedule.cells.dots
            moved = None if dots is None else CellAdjoints(schedule.cells, forward.width * dots.width)
            backward = Backward(adjoints, capacity, is_guarded=is_guarded, moved=moved)
            _seed(forward, adjoints, cotangents)
            with backend.exclusive, backend.suspend_following():
                try:
                    schedule.back(backward, advance)
                finally:
                    backward.restore()
            if any(backward.missing):
                for part, missing in enumerate(backward.missing):
                    capacity[part] += int(missing * 1.25)
                continue
            is_final = is_guarded or not may_be_guarded
            del backward  # and the sums of threads
            found = _gradient(forward, adjoints, cotangents)
            second = None if moved is None else _gradient(forward, moved, cotangents)
            if is_final or all(np.isfinite(part).all() for part in (found, second) if part is not None):
                return found, second
            is_guarded = self._kernels.is_guarded = True


@contextlib.contextmanager
def _undone(log: Log, *errors: Any) -> Iterator[None]:
    """Within the context, these errors leave everything as it was before the run."""
    try:
        yield
    except errors:
        log.undo()
        raise


def _seed(forward: Forward, adjoints: CellAdjoints, cotangents: list[np.ndarray]) -> None:
    """Start with the cotangents of the outputs."""
    for output, given in zip(forward.request.outputs, cotangents, strict=True):
        if output.key == RETURN:
            assert forward.returned is not None
            cell, start, count = forward.returned
            adjoints.add(cell, slice(start, start + count), given)
        else:
            adjoints.add(forward.cell_of(output.key), forward.rows_of(output.key), given)


def _gradient(forward: Forward, adjoints: CellAdjoints, cotangents: list[np.ndarray]) -> np.ndarray:
    """The adjoints of the parameters, a row for each column of J."""
    request = forward.request
    dtype = np.result_type(*(c.dtype for c in cotangents)) if cotangents else np.dtype(np.float64)
    found = np.zeros((request.block.count, adjoints.width), dtype)
    for seed in request.seeds:
        cell, rows = forward.cell_of(seed.key), forward.rows_of(seed.key)
        if seed.size and adjoints.has(cell):
            found[seed.first : seed.first + seed.size] = adjoints.of(cell)[rows]
    for column, number in adjoints.numbers.items():
        if column < request.block.count:  # others were read in between
            found[column] = number
    return found
