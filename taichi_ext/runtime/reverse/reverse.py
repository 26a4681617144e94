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
from taichi_ext.runtime.python.reached import reachable_arrays
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
        most: int | None = None,
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
            most: the most cotangents in one way back.

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
        width = max(1, -(-total // max(1, -(-total // min(MOST_ROWS, most or MOST_ROWS)))))
        is_undoable = run.kernel is None or restores or check is not None
        cells, log = Cells(self._table), Log(keeps_first=is_undoable, max_memory=max_memory)
        if request.directions is not None:
            cells.dots = CellAdjoints(cells, request.directions.shape[1])
        schedule = Schedule(cells, log)
        forward = Forward(request, self._kernels, schedule, width, known)
        if run.kernel is None and (restores or known is not None):  # it runs again
            for array in reachable_arrays(run.function, run.args):
                log.others.save(array)
        with _undone(log, InvalidArgumentError, UnsupportedError):
            returned = forward.run(run) if run.kernel is None else forward.launch(run.kernel, run.args)
            alerts = backend.raised_alerts()
        may_be_guarded = not any(alert.is_undefined for alert in alerts)
        ways = WaysBack(forward, self._kernels, may_be_guarded=may_be_guarded)
        dtype = np.result_type(*(c.dtype for c in cotangents)) if cotangents else np.dtype(np.float64)
        rows = np.zeros((total, request.block.count), dtype)
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
                moved = ways.back(block, rows[first : first + count], told)
        backend.raised_alerts()  # of what was run again
        if restores:
            log.undo()
        products = CotangentProducts(
            rows.T,
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
    def has_random(self) -> bool:
        """Whether kernels draw random numbers."""
        return any(stage.draws for kernel in self._kernels.staged.values() for stage in kernel.staged.stages)

    @property
    def paths(self) -> list[Paths]:
        """From where to where numbers go in the kernels."""
        return [kernel.paths for kernel in self._kernels.staged.values()]


class WaysBack:
    """Ways back over one run, for blocks of cotangents; they share memory for adjoints, and prepared launches.

    Args:
        forward: the run.
        kernels: those of the prepared form.
        may_be_guarded: whether there is a derivative everywhere, so that a product of 0 with what is not finite is
            meant to be 0.
    """

    def __init__(self, forward: Forward, kernels: Kernels, *, may_be_guarded: bool) -> None:
        self._forward, self._kernels, self._may_be_guarded = forward, kernels, may_be_guarded
        cells, width = forward.schedule.cells, forward.width
        moved = None if cells.dots is None else CellAdjoints(cells, width * cells.dots.width)
        self._backward = Backward(CellAdjoints(cells, width), kernels.capacity, moved)

    def back(self, cotangents: list[np.ndarray], rows: np.ndarray, advance: Any) -> np.ndarray | None:
        """One way back, which stores rows of J; another one if a tape was too short, or numbers are not finite.

        They may be products with 0: of a value that is not used, as ``a / b`` where ``b == 0`` is asked for later, or
        of one that is not moved. These are 0, as in a Jacobian, and the other way back takes them so.

        Returns:
            Second derivatives, a column for each direction.
        """
        forward, kernels, backward = self._forward, self._kernels, self._backward
        is_guarded = self._may_be_guarded and kernels.is_guarded
        while True:
            backward.begin(is_guarded=is_guarded)
            _seed(forward, backward.adjoints, cotangents)
            with backend.exclusive, backend.suspend_following():
                try:
                    forward.schedule.back(backward, advance)
                finally:
                    backward.restore()
            if backward.has_grown():
                continue
            second = None
            _gradient(forward, backward.adjoints, rows.T)
            if backward.moved is not None:
                second = np.zeros((forward.request.block.count, backward.moved.width), rows.dtype)
                _gradient(forward, backward.moved, second)
            is_final = is_guarded or not self._may_be_guarded
            if is_final or all(np.isfinite(part).all() for part in (rows, second) if part is not None):
                return second
            is_guarded = kernels.is_guarded = True


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
            adjoints.add(forward.cell_of(output.key), output.inner, given)


def _gradient(forward: Forward, adjoints: CellAdjoints, found: np.ndarray) -> None:
    """Store the adjoints of the parameters, a row for each column of J, to zeros."""
    count = found.shape[1]
    for seed in forward.request.seeds:
        cell, rows = forward.cell_of(seed.key), seed.inner
        if seed.size and adjoints.has(cell):
            found[seed.first : seed.first + seed.size] = adjoints.of(cell)[rows, :count]
    for column, number in adjoints.numbers.items():
        if column < len(found):  # others were read in between
            found[column] = number[:count]
