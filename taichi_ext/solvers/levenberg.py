"""The Levenberg-Marquardt iteration, whatever the normal equations come from."""

# pyright knows no types of arrays of any shape and type.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from taichi_ext.errors import InvalidArgumentError

_RADIUS = 1e4  # of the first step: the damping is the diagonal of JtJ, divided by the radius
_MOST_RADIUS, _LEAST_RADIUS = 1e16, 1e-32
_LEAST_COLUMN = 1e-5  # of the norm of a column of J that has to be left after a step
_MOST_VANISHED = 5  # steps in a row that are shortened for that reason
_LEAST_RATIO = 1e-3  # of the change of the cost to the predicted one, for a step to be accepted
_LEAST_SHRINKAGE = 0.05  # of the radius after a step that is rejected
_LEAST_DIAGONAL = 1e-6  # of the damping, as a share of the largest that an entry of the diagonal has been
_FIXED = 1e40  # the damping of fixed parameters, as a multiple of the diagonal


class System(Protocol):
    """The normal equations at a point, of P parameters.

    Attributes:
        gradient: Jtr, of shape (P,), with the robust weights.
        diagonal: that of JtJ, of shape (P,).
    """

    gradient: np.ndarray
    diagonal: np.ndarray

    def solve(self, damping: np.ndarray, fixed: np.ndarray) -> np.ndarray | None:
        """The s of ``(JtJ + diag(damping)) s = -(Jtr + JtJ fixed)``; None where the matrix is not positive definite."""
        ...

    def curvature(self, step: np.ndarray) -> float:
        """``step^T JtJ step``."""
        ...


class Point(NamedTuple):
    """The problem at one point.

    Attributes:
        x: the parameters as one vector.
        cost: the minimised cost, half the sum of squares or of the losses; NaN or infinite if it is not finite.
        system: gives the normal equations at this point; called once, mostly where the point is accepted.
        data: data of the caller, for use in the last point.
    """

    x: np.ndarray
    cost: float
    system: Callable[[], System]
    data: Any = None


@dataclass(frozen=True)
class Space:
    """The parameters as one vector of P numbers, and how a step changes them.

    Attributes:
        low: the least values, of shape (P,).
        high: the largest values, of shape (P,).
        plus: the point that a step from a point leads to, in the types in which the parameters are kept.
        coordinates: the numbers of a point that bounds and steps refer to, of shape (P,).
    """

    low: np.ndarray
    high: np.ndarray
    plus: Callable[[np.ndarray, np.ndarray], np.ndarray]
    coordinates: Callable[[np.ndarray], np.ndarray] = lambda x: x


@dataclass(frozen=True)
class Limits:
    """When the iteration ends.

    Attributes:
        ftol: if an accepted step lowers the cost by a smaller share.
        xtol: if a step is a smaller share of the parameters; both are measured in units of residuals, by the column
            norms of J, so that the units of parameters do not matter.
        gtol: if the largest cosine of the angle between a column of J and the residuals is smaller.
        max_iterations: after this many steps, accepted or not.
        noise: the relative rounding error of a cost.
    """

    ftol: float = 1e-8
    xtol: float = 1e-8
    gtol: float = 1e-8
    max_iterations: int = 100
    noise: float = 1e-14


class Iteration(NamedTuple):
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


@dataclass(frozen=True)
class Ended:
    """Where the iteration ended, and why.

    Attributes:
        point: the best one.
        gradient: of the cost there.
        status: 1 to 4 for a tolerance, 0 for the largest number of points, -1 for the callback, -2 for a failure.
        message: the reason in words.
        evaluations: how many points were computed.
        seconds: where the time went.
    """

    point: Point
    gradient: np.ndarray
    status: int
    message: str
    evaluations: int
    seconds: dict[str, float]


class History:
    """The lines of the report, each passed on as it is added.

    Args:
        tell: called with each line; True ends the iteration.
    """

    def __init__(self, tell: Callable[[Iteration], object]) -> None:
        self.lines: list[Iteration] = []
        self._tell = tell
        self._began = self._last = time.perf_counter()

    def add(
        self, x: np.ndarray, cost: float, change: float, gradient: float, step: float, ratio: float, radius: float
    ) -> bool:
        """Add a line; whether the callback ends the iteration."""
        now = time.perf_counter()
        times = (now - self._last, now - self._began)
        self.lines.append(Iteration(len(self.lines), cost, change, gradient, step, ratio, radius, *times, x))
        self._last = now
        return self._tell(self.lines[-1]) is True


def minimize(
    evaluate: Callable[[np.ndarray], Point], start: np.ndarray, space: Space, limits: Limits, history: History
) -> Ended:
    """Minimise from a start on, by the method of Levenberg and Marquardt.

    The damping is the diagonal of JtJ divided by a radius.  The radius grows as in H. B. Nielsen, Damping parameter in
    Marquardt's method, IMM-REP-1999-05, section 3, and in Ceres, and shrinks as in MINPACK.  A step that leaves the
    bounds is computed again with the coordinates that left them held at the bound.  A step that takes away all
    influence of a parameter on the residuals has mostly gone too far, to where ``exp(-b * x)`` is zero, and is
    shortened.  Where costs differ by no more than their rounding, the gradient decides.

    Args:
        evaluate: gives the point for a vector.
        start: within the bounds.
        space: the bounds, and how steps are added.
        limits: when it ends.
        history: gets a line for each step; its last line holds the best point, also after an exception.
    """
    return _Run(evaluate, space, limits, history).run(start)


class _Trial(NamedTuple):
    """A step from a point, or none: the point where it ends, and its normal equations if they are known."""

    point: Point
    system: System | None = None
    change: float = 0.0
    ratio: float = 0.0
    length: float = 0.0
    is_better: bool = False


@dataclass
class _Run:
    evaluate: Callable[[np.ndarray], Point]
    space: Space
    limits: Limits
    history: History
    evaluations: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("residuals and J", "normal equations", "linear solver"), 0.0)
    )

    def run(self, start: np.ndarray) -> Ended:
        limits, radius = self.limits, _RADIUS
        point = self._at(start)
        if not np.isfinite(point.cost):
            raise InvalidArgumentError(
                f"The cost at the start is {point.cost}: residuals are too large to be squared; scale them."
            )
        system = self._system(point)
        most = system.diagonal.copy()
        free, slope, cosine = self._slope(point, system)
        is_over = self.history.add(point.x, point.cost, 0.0, slope, 0.0, 0.0, radius)
        vanished = 0
        while True:
            reason = self._reason(point, cosine, radius, is_over)
            if reason is not None:
                break
            most = np.maximum(most, system.diagonal)
            # a column that has been zero everywhere still needs some damping, in any unit
            scale = np.maximum(system.diagonal, _LEAST_DIAGONAL * np.where(most > 0, most, most.max() or 1.0))
            step, predicted = self._step(point, system, scale / radius, free)
            trial = _Trial(point)
            if step is not None and predicted > 0:
                trial = self._trial(point, step, predicted, cosine)
                if trial.is_better and vanished < _MOST_VANISHED:
                    trial, has_vanished = self._without_vanished(trial, system, free)
                    vanished += has_vanished
            before, (end, found, change, ratio, length, is_better) = point, trial
            if is_better:
                point, system = end, found or self._system(end)
                free, slope, cosine = self._slope(point, system)
                radius = min(_MOST_RADIUS, radius / max(1 / 3, 1 - (2 * min(ratio, 1.0) - 1) ** 3))
                vanished = 0
            else:
                radius *= _shrinkage(0.0 if step is None else -float(system.gradient @ step), change)
            is_over = self.history.add(point.x, point.cost, change, slope, length, ratio, radius)
            if not is_over and step is not None:
                is_noise = found is not None and cosine <= 10 * np.sqrt(limits.noise)
                reason = self._small(before, system, step, change, is_better, is_noise)
                if reason is not None:
                    break
        return Ended(point, system.gradient, *reason, self.evaluations, self.seconds)

    def _trial(self, point: Point, step: np.ndarray, predicted: float, cosine: float) -> _Trial:
        """The point at the end of a step, and whether it is better: by its cost, or by its gradient within rounding."""
        end, found = self._at(self.space.plus(point.x, step)), None
        change = point.cost - end.cost if np.isfinite(end.cost) else -np.inf
        ratio = change / predicted
        is_better = change > 0 and ratio > _LEAST_RATIO
        if max(predicted, abs(change)) <= self.limits.noise * point.cost:
            found = self._system(end)
            is_better = self._slope(end, found)[2] < 0.5 * cosine
        return _Trial(end, found, change, ratio, float(np.linalg.norm(step)), is_better)

    def _without_vanished(self, trial: _Trial, system: System, free: np.ndarray) -> tuple[_Trial, bool]:
        """The same, but rejected where it takes away all influence of a parameter; whether it does."""
        found = trial.system or self._system(trial.point)
        has_vanished = not (found.diagonal >= _LEAST_COLUMN**2 * system.diagonal)[free].all()
        if has_vanished:
            return trial._replace(system=found, change=0.0, ratio=0.0, is_better=False), True
        return trial._replace(system=found), False

    def _reason(self, point: Point, cosine: float, radius: float, is_over: bool) -> tuple[int, str] | None:
        """Why the iteration ends before the next step."""
        limits = self.limits
        if is_over:
            return -1, "The callback ended it."
        if cosine <= limits.gtol:
            return 1, f"The gradient is small: the largest cosine of a column of J and r, {cosine:.1e}, is <= gtol."
        if len(self.history.lines) > limits.max_iterations:
            return 0, f"The largest number of iterations, {limits.max_iterations}, is reached (max_nfev)."
        if radius < _LEAST_RADIUS:
            return -2, "No step lowers the cost, however short; check_jacobian tells whether J is right."
        return None

    def _small(
        self, before: Point, system: System, step: np.ndarray, change: float, is_better: bool, is_noise: bool
    ) -> tuple[int, str] | None:
        """Why a step was the last one."""
        limits, norms = self.limits, np.sqrt(system.diagonal)
        if is_better and not is_noise and change <= limits.ftol * before.cost:
            return 2, f"The cost changes little: by {change:.1e}, which is <= ftol = {limits.ftol:.0e} of it."
        length, size = (float(np.linalg.norm(norms * v)) for v in (step, self.space.coordinates(before.x)))
        if length <= limits.xtol * (size + limits.xtol):
            return (
                3,
                f"The step is small: {length:.1e} in units of residuals, <= xtol = {limits.xtol:.0e} of {size:.1e}.",
            )
        if is_noise and not is_better:
            return 4, "The cost and its gradient are at the limit of rounding."
        return None

    def _at(self, x: np.ndarray) -> Point:
        self.evaluations += 1
        return self._timed("residuals and J", lambda: self.evaluate(x))

    def _system(self, point: Point) -> System:
        return self._timed("normal equations", point.system)

    def _timed(self, part: str, function: Callable[[], object]) -> Any:
        began = time.perf_counter()
        found = function()
        self.seconds[part] += time.perf_counter() - began
        return found

    def _slope(self, point: Point, system: System) -> tuple[np.ndarray, float, float]:
        """The coordinates that bounds allow to descend, their largest gradient, and largest cosine to the residuals."""
        at, g = self.space.coordinates(point.x), system.gradient
        free = ~((at <= self.space.low) & (g > 0)) & ~((at >= self.space.high) & (g < 0))
        down = np.where(free, np.abs(g), 0.0)
        norms = np.sqrt(system.diagonal * 2 * point.cost)
        cosines = np.divide(down, norms, out=np.zeros_like(down), where=norms > 0)
        return free, float(down.max(initial=0.0)), float(cosines.max(initial=0.0))

    def _step(
        self, point: Point, system: System, damping: np.ndarray, free: np.ndarray
    ) -> tuple[np.ndarray | None, float]:
        """A step within the bounds, and by how much it lowers the quadratic model."""
        at, fixed, step = self.space.coordinates(point.x), np.zeros_like(damping), np.zeros_like(damping)
        for _ in range(4):
            weights = np.where(free, damping, _FIXED * np.maximum(system.diagonal, damping))
            solved = self._timed("linear solver", lambda w=weights, f=fixed: system.solve(w, f))
            if solved is None or not np.isfinite(solved).all():
                return None, 0.0
            step = np.where(free, solved, fixed)
            within = np.minimum(np.maximum(at + step, self.space.low), self.space.high)
            is_out = free & (within != at + step)
            if not is_out.any():
                break
            step[is_out] = fixed[is_out] = within[is_out] - at[is_out]
            free = free & ~is_out
        return step, -float(system.gradient @ step) - 0.5 * system.curvature(step)


def _shrinkage(slope: float, change: float) -> float:
    """By how much the radius shrinks after a step that is rejected.

    It is the share of the step at which the parabola through the cost, its slope along the step and the cost at its end
    is least, but at most 0.5, and not less than a least one; as in MINPACK, see J. J. More, The Levenberg-Marquardt
    algorithm, 1978.
    """
    if not (slope > 0 and np.isfinite(change)):
        return _LEAST_SHRINKAGE
    return min(max(0.5 * slope / (slope - min(change, 0.0)), _LEAST_SHRINKAGE), 0.5)


def print_line(line: Iteration) -> None:
    """A line on stderr, below a title at first, as in Ceres."""
    print(f"{TITLE}\n{line}" if line.number == 0 else line, file=sys.stderr, flush=True)
