"""The Levenberg-Marquardt iteration, whatever the normal equations come from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from taichi_ext.errors import InvalidArgumentError
from taichi_ext.solvers.results import History

_FIRST_RADIUS = 100.0  # as a multiple of the length of the params, both measured like steps
_LEAST_RATIO = 1e-4  # of the change of the cost to the predicted one, for a step to be accepted
_LEAST_SHRINKAGE = 0.1  # of the radius after a step that is rejected
_LESS = 0.1  # damping after a good step that the radius did not limit
_TINY = np.finfo(float).tiny
_MOST_SOLVES = 10  # for one step
_LEAST_COLUMN = 1e-5  # of the norm of a column of J that has to be left after a step
_MOST_VANISHED = 5  # steps in a row that are shortened for that reason
_FIXED = 1e40  # the damping of fixed parameters, as a multiple of the diagonal


class System(Protocol):
    """The normal equations at a point, of P parameters.

    Attributes:
        gradient: Jtr, of shape (P,), with the robust weights.
        diagonal: that of JtJ, of shape (P,).
        first_damping, least_damping: what stands for none at first, and after good steps, as multiples of the diagonal:
            more where directions that the residuals do not determine would suffer from rounding.
        width: by what factor the length of a step may differ from the radius: more where solutions take time.
    """

    gradient: np.ndarray
    diagonal: np.ndarray
    first_damping: float
    least_damping: float
    width: float

    def solve(self, damping: np.ndarray, fixed: np.ndarray) -> np.ndarray | None:
        """The s of ``(JtJ + diag(damping)) s = -(Jtr + JtJ fixed)``; None where the matrix is not positive definite."""
        ...

    def curvature(self, step: np.ndarray) -> float:
        """``step^T JtJ step``."""
        ...


class Point(NamedTuple):
    """The problem at one point."""

    x: np.ndarray  # the parameters as one vector
    cost: float  # the minimised cost, half the sum of squares or of the losses; NaN or infinite if it is not finite
    system: Callable[[], System]  # gives the normal equations; called once, mostly where the point is accepted
    data: Any = None  # data of the caller, for use in the last point


@dataclass(frozen=True)
class Space:
    """The parameters as one vector of P numbers, and how a step changes them."""

    low: np.ndarray  # the least values, of shape (P,)
    high: np.ndarray  # the largest values, of shape (P,)
    plus: Callable[[np.ndarray, np.ndarray], np.ndarray]  # where a step from a point leads, as the parameters are kept
    coordinates: Callable[[np.ndarray], np.ndarray] = lambda x: x  # of a point: what bounds and steps refer to


@dataclass(frozen=True)
class StoppingCriteria:
    """When the iteration ends.

    Attributes:
        ftol: if an accepted step lowers the cost by a smaller share, other than a good one that the radius limits.
        xtol: if a step is a smaller share of the parameters; both are measured in units of residuals, by the column
            norms of J, so that the units of parameters do not matter.
    """

    ftol: float = 1e-8
    xtol: float = 1e-8
    gtol: float = 1e-8  # if the largest cosine of the angle between a column of J and the residuals is smaller
    max_iterations: int = 100  # after this many steps, accepted or not
    noise: float = 1e-14  # the relative rounding error of a cost


@dataclass(frozen=True)
class Ended:
    """Where the iteration ended, and why."""

    point: Point  # the best one
    gradient: np.ndarray  # of the cost there
    status: int  # 1 to 4 for a tolerance, 0 for the largest number of iterations, -1 for the callback, -2 for a failure
    message: str  # the reason in words
    evaluations: int  # how many points were computed
    seconds: dict[str, float]  # where the time went


def minimize(
    evaluate: Callable[[np.ndarray], Point], start: np.ndarray, space: Space, limits: StoppingCriteria, history: History
) -> Ended:
    """Minimise from a start on, by the method of Levenberg and Marquardt as MINPACK has it.

    A step s minimises the quadratic model within ``norm(D s) <= radius``, where D has the largest norms of columns of J
    so far; see J. J. More, The Levenberg-Marquardt algorithm: implementation and theory, 1978.  Its damping is found by
    the secant method on ``1 / norm(D s)``.  A step that leaves the bounds is computed again with the coordinates that
    left them held at the bound.  A step that takes away all influence of a parameter on the residuals has mostly gone
    too far, to where ``exp(-b * x)`` is zero, and is shortened.  Where costs differ by no more than their rounding, the
    gradient decides.

    Args:
        evaluate: gives the point for a vector.
        start: within the bounds.
        space: the bounds, and how steps are added.
        limits: when it ends.
        history: gets a line for each step; its last line holds the best point, also after an exception.
    """
    return _Minimisation(evaluate, space, limits, history).run(start)


class _Step(NamedTuple):
    """A step within the bounds."""

    vector: np.ndarray  # in local coordinates
    length: float  # in units of residuals; infinite where the normal equations could not be solved
    slope: float  # of the cost along the step
    predicted: float  # by how much it lowers the quadratic model
    damping: float  # as a multiple of D**2; 0 where the radius did not matter


class _Place(NamedTuple):
    """A point and its normal equations."""

    point: Point
    system: System
    at: np.ndarray  # the coordinates of the point
    norms: np.ndarray  # of the columns of J
    free: np.ndarray  # the coordinates that bounds allow to descend
    slope: float  # the largest entry of their gradient
    cosine: float  # the largest one of the angle between their columns and the residuals


class _Trial(NamedTuple):
    """The point at the end of a step, with its normal equations if it is better, and if rounding hides the change."""

    point: Point
    change: float
    better: _Place | None = None
    is_noise: bool = False


_MEASURABLE = 100.0  # changes of a cost, as a multiple of its rounding error
_WRONG = "A short step changes the cost by another amount than J says; check_jacobian tells whether J is right."


@dataclass
class _Minimisation:
    evaluate: Callable[[np.ndarray], Point]
    space: Space
    limits: StoppingCriteria
    history: History
    evaluations: int = 0
    vanished: int = 0  # steps in a row that were shortened for that reason
    least: float = 0.0  # damping with which normal equations can be solved, as a multiple of the diagonal
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("residuals and J", "normal equations", "linear solver"), 0.0)
    )

    def run(self, start: np.ndarray) -> Ended:
        point = self._at(start)
        if not np.isfinite(point.cost):
            raise InvalidArgumentError(
                f"The cost at the start is {point.cost}: residuals are too large to be squared; scale them."
            )
        here, damping, is_moved = self._place(point), 0.0, False
        self.least = here.system.first_damping
        norms = here.norms  # at least the length of the residuals: params that start near 0 tell no scale
        radius = max(_FIRST_RADIUS * _length(norms * here.at), math.sqrt(2 * point.cost))
        is_over = self.history.add(point.x, point.cost, 0.0, here.slope, 0.0, 0.0, radius)
        while True:
            reason = self._reason(here.cosine, is_over)
            if reason is not None:
                break
            norms = np.maximum(norms, here.norms)
            step = self._step(here, norms, radius, damping)
            trial = self._trial(here, step)
            is_first = len(self.history.lines) == 1
            radius, damping = _next_radius(min(radius, step.length) if is_first else radius, step, here, trial.change)
            before, here = here, trial.better or here
            if trial.better and step.damping == 0.0 and trial.change > 0.75 * step.predicted:
                self.least = max(_LESS * self.least, min(self.least, here.system.least_damping))
            is_moved = is_moved or here is not before
            change = trial.change if trial.better else min(trial.change, 0.0)
            ratio = trial.change / step.predicted if step.predicted else 0.0
            point, moved = here.point, _length(step.vector)
            is_over = self.history.add(point.x, point.cost, change, here.slope, moved, ratio, radius)
            if not is_over:
                is_known = is_moved or (is_first and not step.damping)
                reason = self._small(before, step, trial, norms, radius, is_moved=is_known)
                if reason is not None:
                    is_right = reason[0] not in (2, 3) or self._fits(before, step, trial)
                    reason = reason if is_right else (-2, _WRONG)
                    break
        return Ended(here.point, here.system.gradient, *reason, self.evaluations, self.seconds)

    def _trial(self, here: _Place, step: _Step) -> _Trial:
        """The point at the end of a step, which is better by its cost, or by its gradient within rounding."""
        if not step.predicted > 0:
            return _Trial(here.point, 0.0)
        end, cost = self._at(self.space.plus(here.point.x, step.vector)), here.point.cost
        change = cost - end.cost if np.isfinite(end.cost) else -np.inf
        if max(step.predicted, abs(change)) <= self.limits.noise * cost:
            there = self._place(end)
            return _Trial(end, change, there if there.cosine < 0.5 * here.cosine else None, is_noise=True)
        if change < _LEAST_RATIO * step.predicted:
            return _Trial(end, change)
        there = self._place(end)
        has_vanished = (there.norms < _LEAST_COLUMN * here.norms)[here.free].any()
        if has_vanished and self.vanished < _MOST_VANISHED:
            self.vanished += 1
            return _Trial(end, 0.0)
        self.vanished = 0
        return _Trial(end, change, there)

    def _reason(self, cosine: float, is_over: bool) -> tuple[int, str] | None:
        """Why the iteration ends before the next step."""
        limits = self.limits
        if is_over:
            return -1, "The callback ended it."
        if cosine <= limits.gtol:
            return 1, f"The gradient is small: the largest cosine of a column of J and r, {cosine:.1e}, is <= gtol."
        if len(self.history.lines) > limits.max_iterations:
            return 0, f"The largest number of iterations, {limits.max_iterations}, is reached."
        return None

    def _small(
        self, before: _Place, step: _Step, trial: _Trial, norms: np.ndarray, radius: float, *, is_moved: bool
    ) -> tuple[int, str] | None:
        """Why a step was the last one; without any accepted one, short steps are no success."""
        ftol, xtol, noise = self.limits.ftol, self.limits.xtol, self.limits.noise
        cost, change = before.point.cost, trial.change
        is_noise = trial.is_noise and before.cosine <= 10 * np.sqrt(noise)
        # a step that the radius limits is small for that reason; the radius grows after a good one, else shrinks
        is_limited = step.damping > 0 and (trial.better is None or change > 0.75 * step.predicted)
        is_moved = is_moved and step.predicted > 0
        if is_moved and not (is_noise or is_limited) and max(abs(change), step.predicted) <= ftol * cost:
            return 2, f"The cost changes little: by {change:.1e}, which is <= ftol = {ftol:.0e} of it."
        length, size = (_length(before.norms * v) for v in (step.vector, before.at))
        is_whole = step.damping == 0.0 or (trial.better is None and step.predicted <= max(ftol, noise) * cost)
        if is_moved and is_whole and length <= xtol * size and radius <= xtol * _length(norms * before.at):
            return 3, f"The step is small: {length:.1e} in units of residuals, <= xtol = {xtol:.0e} of {size:.1e}."
        if is_noise and trial.better is None:
            return 4, "The cost and its gradient are at the limit of rounding."
        if trial.better is None and radius <= np.finfo(float).eps * np.sqrt(cost):
            return -2, "No step lowers the cost, however short; check_jacobian tells whether J is right."
        return None

    def _fits(self, here: _Place, step: _Step, trial: _Trial) -> bool:
        """Whether the cost at both ends of a short step agrees with J, or has a kink there.

        A smooth cost changes by opposite amounts; a right J says by how much.
        """
        ahead, least = trial.change, _MEASURABLE * self.limits.noise * here.point.cost
        if not np.isfinite(ahead) or ahead >= 0.25 * step.predicted or step.predicted <= least:
            return True
        x = self.space.plus(here.point.x, -step.vector)
        at = self.space.coordinates(x)
        if (at < self.space.low).any() or (at > self.space.high).any():
            return True
        back = here.point.cost - self._at(x).cost
        size = abs(ahead) + abs(back)
        is_smooth = abs(ahead + back) <= 0.1 * size
        return not (np.isfinite(back) and (is_smooth or size <= 0.5 * abs(step.slope)))

    def _at(self, x: np.ndarray) -> Point:
        self.evaluations += 1
        return self._timed("residuals and J", lambda: self.evaluate(x))

    def _timed(self, part: str, function: Callable[[], object]) -> Any:
        began = time.perf_counter()
        result = function()
        self.seconds[part] += time.perf_counter() - began
        return result

    def _place(self, point: Point) -> _Place:
        system: System = self._timed("normal equations", point.system)
        at, g, norms = self.space.coordinates(point.x), system.gradient, np.sqrt(system.diagonal)
        free = ~((at <= self.space.low) & (g > 0)) & ~((at >= self.space.high) & (g < 0))
        down = np.where(free, np.abs(g), 0.0)
        lengths = norms * np.sqrt(2 * point.cost)
        cosines = np.divide(down, lengths, out=np.zeros_like(down), where=lengths > 0)
        slope, cosine = (float(v.max(initial=0.0)) for v in (down, cosines))
        return _Place(point, system, at, norms, free, slope, cosine)

    def _step(self, here: _Place, norms: np.ndarray, radius: float, damping: float) -> _Step:
        """The step for a radius; the damping is that of the last one, to begin with."""
        D: np.ndarray = np.where(norms > 0, norms, 1.0)  # a column that has been zero everywhere is not moved
        steepest = _length((here.system.gradient / D)[here.free])
        rounding = self.least * np.where(here.norms > 0, here.norms, D) ** 2
        least = float((rounding / D**2).min(initial=1.0))
        most = max(steepest / max(radius, _TINY), least)
        bounds = [(least, np.nan), (most, np.nan)]  # and the lengths of their steps
        damping = min(max(damping, least), most)
        vector, length, is_least, width = None, np.inf, False, here.system.width
        for n in range(_MOST_SOLVES):
            vector = self._damped(here, np.maximum(damping * D**2, rounding))
            if vector is None:
                break
            length = _length(D * vector)
            is_shorter, is_least = length <= radius, damping == least
            if radius <= width * length <= width**2 * radius or (is_shorter and is_least):
                break
            bounds[is_shorter] = damping, length
            damping = _between(bounds[0], bounds[1], radius, steepest, is_secant=n % 3 != 2)
        if vector is None:
            if self.least >= 1.0:
                return _Step(np.zeros_like(D), np.inf, 0.0, 0.0, damping)
            self.least = 100 * max(self.least, damping)  # singular to rounding
            return self._step(here, norms, radius, damping)
        slope = float(here.system.gradient @ vector)
        predicted = -slope - 0.5 * here.system.curvature(vector)
        return _Step(vector, length, slope, predicted, 0.0 if is_least else damping)

    def _damped(self, here: _Place, damping: np.ndarray) -> np.ndarray | None:
        """A step within the bounds."""
        at, free, solve = here.at, here.free, here.system.solve
        fixed, step = np.zeros_like(damping), np.zeros_like(damping)
        for _ in range(4):
            weights = np.where(free, damping, _FIXED * np.maximum(here.norms**2, damping))
            solved = self._timed("linear solver", lambda w=weights, f=fixed: solve(w, f))
            if solved is None or not np.isfinite(solved).all():
                return None
            step = np.where(free, solved, fixed)
            within = np.minimum(np.maximum(at + step, self.space.low), self.space.high)
            is_out = free & (within != at + step)
            if not is_out.any():
                break
            step[is_out] = fixed[is_out] = within[is_out] - at[is_out]
            free = free & ~is_out
        return step


def _between(
    longer: tuple[float, float], shorter: tuple[float, float], radius: float, steepest: float, *, is_secant: bool
) -> float:
    """A damping to try between two, given with the lengths of their steps, which are NaN where they are not known."""
    (low, too_long), (high, too_short) = longer, shorter
    if np.isnan(too_long):
        return low
    if np.isnan(too_short):
        guess = max(steepest / too_long, low * (too_long / radius) ** 2)
        return guess if low < guess < high else high
    if too_short == 0.0:
        return np.sqrt(low * high)
    if is_secant:
        return low + (high - low) * (1 / radius - 1 / too_long) / (1 / too_short - 1 / too_long)
    return low * (high / low) ** (np.log(too_long / radius) / np.log(too_long / too_short))


def _next_radius(radius: float, step: _Step, here: _Place, change: float) -> tuple[float, float]:
    """The radius and the damping after a step, as in MINPACK.

    After a bad step it shrinks to the share at which the parabola through the cost, its slope along the step and the
    cost at its end is least, within limits.
    """
    if step.predicted > 0 and change > 0.25 * step.predicted:
        if step.damping and change < 0.75 * step.predicted:
            return radius, step.damping
        return 2 * step.length, 0.5 * step.damping
    share = 0.5
    if change < 0:
        share = 0.5 * step.slope / (step.slope + change) if change > -99 * here.point.cost else 0.0
    share = max(share, _LEAST_SHRINKAGE)
    return share * min(radius, (step.length or radius) / _LEAST_SHRINKAGE), step.damping / share


def _length(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector))
