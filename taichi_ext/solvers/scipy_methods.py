"""SciPy's methods for least squares, reported and ended like ours."""

# pyright knows no types of SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# J is the Jacobian, and no constant.
# pyright: reportConstantRedefinition=false

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from taichi_ext.solvers.extra import require_scipy
from taichi_ext.solvers.history import History
from taichi_ext.solvers.levenberg import Ended, Point
from taichi_ext.solvers.problem import Weighted


class _CallbackEndedError(Exception):
    pass


def by_scipy(weighted: Weighted, start: np.ndarray, history: History, options: Mapping[str, object]) -> Ended:
    """The minimum by ``scipy.optimize.least_squares``, each point computed once."""
    optimize = require_scipy("optimize", f"least_squares with method={options['method']!r}")
    points, robust = _Points(weighted, history), weighted.robust
    loss = "linear" if robust.is_linear else robust.rho
    try:
        result = optimize.least_squares(points.residuals, start, points.jacobian, loss=loss, **options)
        status, message = result.status, result.message
    except _CallbackEndedError:
        status, message = -1, "The callback ended it."
    point, gradient = points.accepted
    return Ended(point, gradient, status, message, points.evaluations, points.seconds)


class _Points:
    """Residuals and J, with weights; a point whose J SciPy asks for is one that it has accepted."""

    def __init__(self, weighted: Weighted, history: History) -> None:
        self._weighted, self._history = weighted, history
        self._point: Point | None = None
        self.accepted: Any = None
        self.evaluations = 0
        self.seconds = {"residuals and J": 0.0}

    def _at(self, x: np.ndarray) -> Point:
        if self._point is None or not np.array_equal(x, self._point.x):
            began = time.perf_counter()
            self._point = self._weighted.point(x.copy())
            self.seconds["residuals and J"] += time.perf_counter() - began
            self.evaluations += 1
        return self._point

    def residuals(self, x: np.ndarray) -> np.ndarray:
        r, roots = self._at(x).data[0], self._weighted.roots
        return r if roots is None else roots * r

    def jacobian(self, x: np.ndarray) -> Any:
        point = self._at(x)
        J, gradient = self._weighted.rows_and_gradient(point)
        before = point if self.accepted is None else self.accepted[0]
        self.accepted = point, gradient
        change, length = before.cost - point.cost, float(np.linalg.norm(point.x - before.x))
        slope = float(np.abs(gradient).max(initial=0.0))
        if self._history.add(point.x, point.cost, change, slope, length, np.nan, np.nan):
            raise _CallbackEndedError
        return J
