"""The report of an iteration: its lines, each passed on as it is added."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


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
    """The lines of the report, each passed on as it is added.

    Args:
        tell: called with each line; True ends the iteration.
    """

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
        self.lines.append(
            LeastSquaresIteration(len(self.lines), cost, change, gradient, step, ratio, radius, *times, x)
        )
        self._last = now
        return self._tell(self.lines[-1]) is True


def print_line(line: LeastSquaresIteration) -> None:
    """A line on stderr, below a title at first, as in Ceres."""
    print(f"{TITLE}\n{line}" if line.number == 0 else line, file=sys.stderr, flush=True)
