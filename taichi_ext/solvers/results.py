"""The result of ``least_squares``."""

from __future__ import annotations

import copy
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from taichi_ext.api.inputs.arguments import flatten
from taichi_ext.api.inputs.options import is_positive
from taichi_ext.errors import InvalidArgumentError, shown, unexpected
from taichi_ext.solvers.parts import Part, pieces_of, slices_of
from taichi_ext.solvers.systems import inverse_part


def place_of(leaf: object, given: Sequence[object], what: str) -> int:
    """The number of a param among those that were given."""
    for n, param in enumerate(given):
        if param is leaf or (isinstance(leaf, str) and isinstance(param, str) and param == leaf):
            return n
    raise InvalidArgumentError(
        f"{what} names {shown(leaf)}, which is none of the params of least_squares (with shards, of the arrays in "
        "start); give the same object."
    )


@dataclass(frozen=True)
class Solved:
    """The problem that a result is of; a pickled one has no fields and arrays."""

    params: list[object]  # as they were given, one after the other
    structure: object  # theirs, of their numbers
    shapes: list[tuple[int, ...]]  # theirs
    parts: list[Part]  # of a vector of local coordinates
    residuals: int  # how many there are
    system: Callable[[], Any]  # the normal equations at the solution

    def __deepcopy__(self, _: object) -> Solved:
        return self

    def __getstate__(self) -> dict[str, object]:
        names = [param if isinstance(param, str) else None for param in self.params]
        return {**vars(self), "params": names, "system": functools.partial(copy.copy, self.system())}


@dataclass(frozen=True, repr=False)
class LeastSquaresResult:
    """The solution of a least-squares problem; P numbers in the params, M residuals.

    Where params are points of manifolds (``retract=``), ``jacobian``, ``grad`` and covariances are those of local
    coordinates, and P in their shapes is the number of these.

    Attributes:
        x: the params as one vector of shape (P,), each raveled in C order; they hold it, too.
        cost: half the sum of squares there, or of the losses.
        fun: the residuals there, of shape (M,), without weights; None with shards.
        jacobian: J there, of shape (M, P), dense or CSR, without weights; None with shards.
        grad: the gradient of the cost there, of shape (P,).
        status: 1 to 4 for the tolerance that was reached, 0 for the largest number of iterations, -1 for the callback,
            -2 where no step lowers the cost; SciPy's for its methods.
        message: the reason in words.
        nfev: how many points were computed.
        history: a line for each iteration, the start included; ``np.array([h.cost for h in result.history])``.
        method: which was used.
        seconds: where the time went, by part.
    """

    x: np.ndarray
    cost: float
    fun: np.ndarray | None
    jacobian: object
    grad: np.ndarray
    status: int
    message: str
    nfev: int
    history: list[LeastSquaresIteration]
    method: str
    seconds: dict[str, float]
    _problem: Solved

    @property
    def success(self) -> bool:
        """Whether a tolerance was reached."""
        return self.status > 0

    @property
    def njev(self) -> int:
        """How many points were accepted."""
        return 1 + sum(line.change > 0 for line in self.history)

    def split(self, vector: np.ndarray) -> Any:
        """A vector of P numbers as arrays structured like the params, of their shapes or those of local coordinates."""
        values = np.asarray(vector)
        if values.shape not in (self.x.shape, self.grad.shape):
            raise InvalidArgumentError(f"vector has shape {values.shape}; expected {self.x.shape}.")
        shapes = self._problem.shapes if values.shape == self.x.shape else [part.shape for part in self._problem.parts]
        return flatten(self._problem.structure)[1](pieces_of(values, shapes))

    def covariance(self, params: object = None, *, variance: float | None = None) -> np.ndarray:
        """The covariance of the parameters, if residuals are independent: their variance times the inverse of JtJ.

        JtJ has the weights and the slopes of losses.  Parameters at bounds count as free.

        Args:
            params: some of the params, or a list of those; None for all.
            variance: of a residual of weight 1; None estimates it by ``2 * cost / (M - P)``.

        Returns:
            A matrix with a row and a column for each entry of these params, raveled in C order, in float64.

        Raises:
            InvalidArgumentError: the residuals do not determine all parameters; the message names those concerned.
        """
        places = slices_of(self._problem.parts)
        asked: Any = range(len(places))
        if params is not None:
            asked = [place_of(leaf, self._problem.params, "params") for _, leaf in flatten(params)[0]]
        entries = np.concatenate([np.r_[places[n]] for n in asked])
        if variance is None:
            count = self._problem.residuals
            if count <= len(self.grad):
                raise InvalidArgumentError(
                    f"variance is missing: {count} residuals of {len(self.grad)} parameters leave none to estimate."
                )
            variance = 2 * self.cost / (count - len(self.grad))
        elif not is_positive(variance):
            raise unexpected("variance", variance, "a positive number")
        return variance * inverse_part(self._problem.system(), entries, self._problem.parts)

    def standard_errors(self, *, variance: float | None = None) -> Any:
        """The square roots of the diagonal of ``covariance``, as ``split`` gives them."""
        return self.split(np.sqrt(self.covariance(variance=variance).diagonal()))

    def summary(self) -> str:
        """A report as text: the history, the reason of the end, where the time went."""
        total = self.history[-1].total if self.history else 0.0
        times = "".join(f"{part:>18}: {1e3 * s:10.3f} ms\n" for part, s in {**self.seconds, "total": total}.items())
        first = self.history[0].cost if self.history else np.nan
        return (
            f"{TITLE}\n" + "".join(f"{line}\n" for line in self.history) + f"\n{'method':>18}: {self.method}, "
            f"{self._problem.residuals} residuals, {len(self.grad)} parameters\n"
            f"{'cost':>18}: {first:.6e} at the start, {self.cost:.6e} at the end\n"
            f"{'points':>18}: {self.nfev}, of which {self.njev} accepted\n{times}{'end':>18}: {self.message}"
        )

    __str__ = __repr__ = summary


# The report of an iteration: its lines, each passed on as it is added.


class LeastSquaresIteration(NamedTuple):
    """One line of the report; NaN where a method has no such number.

    Attributes:
        number: 0 is the start; rejected steps count.
        cost: of ``x``.
        change: by how much the step lowered the cost; the step was rejected if this is not positive.
        gradient: the largest entry of the gradient, those left out that push against a bound.
        step: the length of the step.
        ratio: the change divided by the one that the quadratic model predicted.
        radius: of the trust region after the step.
        seconds: of this iteration.
        total: seconds since the start.
        x: the best point so far, as one vector.
    """

    number: int
    cost: float
    change: float
    gradient: float
    step: float
    ratio: float
    radius: float
    seconds: float
    total: float
    x: np.ndarray

    def __str__(self) -> str:
        numbers = (self.change, self.gradient, self.step, self.ratio, self.radius, self.seconds, self.total)
        return f"{self.number:4d}  {self.cost:14.8e}" + "".join(f"  {n:10.2e}" for n in numbers)


_COLUMNS = ("cost_change", "|gradient|", "|step|", "tr_ratio", "tr_radius", "iter_time", "total_time")
TITLE = f"{'iter':>4}  {'cost':>14}" + "".join(f"  {c:>10}" for c in _COLUMNS)


class History:
    """The lines of the report, each given to ``tell`` as it is added; if that returns True, the iteration ends."""

    def __init__(self, tell: Callable[[LeastSquaresIteration], object]) -> None:
        self.lines: list[LeastSquaresIteration] = []
        self._tell = tell
        self._began = self._last = time.perf_counter()

    def add(
        self, x: np.ndarray, cost: float, change: float, gradient: float, step: float, ratio: float, radius: float
    ) -> bool:
        """Add a line; whether the callback ends the iteration."""
        now = time.perf_counter()
        times = (now - self._last, now - self._began)
        line = LeastSquaresIteration(len(self.lines), cost, change, gradient, step, ratio, radius, *times, x)
        self.lines.append(line)
        self._last = now
        return self._tell(line) is True


def print_line(line: LeastSquaresIteration) -> None:
    """A line on stderr, below a title at first, as in Ceres."""
    print(f"{TITLE}\n{line}" if line.number == 0 else line, file=sys.stderr, flush=True)
