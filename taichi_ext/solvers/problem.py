"""A kernel's residuals and J as functions of one vector, each point computed once."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# J is the Jacobian, and no constant.
# pyright: reportConstantRedefinition=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall
from taichi_ext.api.inputs.results import joined
from taichi_ext.api.plans.plan import Plan
from taichi_ext.api.runs.by_adjoint import value_and_row
from taichi_ext.api.runs.evaluation import Evaluation
from taichi_ext.api.runs.replay import values_of
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.runtime.memory.state import RANDOM_BEFORE, State
from taichi_ext.solvers.blocks import BlockProducts
from taichi_ext.solvers.bounds import Part, check_finite, check_rows_finite, pieces_of
from taichi_ext.solvers.charts import Charts
from taichi_ext.solvers.elimination import BlockLayout, SparseJacobian, SparseSystem, whole
from taichi_ext.solvers.levenberg import Point, System
from taichi_ext.solvers.losses import Robust
from taichi_ext.solvers.systems import rows_times, system_of

_ADVICE = "; check_jacobian names the line where it arises."
_products: WeakKeyDictionary[Plan, BlockProducts] = WeakKeyDictionary()  # which repeated calls plan once


class _StateAtPoint(State):
    """The state at the start, but for the parameters, which are those of a point."""

    def __init__(self, store_point: Callable[[], None]) -> None:
        super().__init__()
        self._store_point = store_point

    def restore(self) -> None:
        """Put everything back, also before J is computed in another run."""
        super().restore()
        self._store_point()


class Problem:
    """The residuals and J of a plan.

    Attributes:
        parts: the parameters as parts of a vector.
        rows: the residuals as parts of a vector.
        charts: the local coordinates of the parameters.
        start: the initial values of the parameters, as one vector.
        best: the best point so far, which ``close`` leaves in the parameters; None before the first one.
    """

    def __init__(
        self,
        plan: Plan,
        call: KernelCall,
        eliminated: Sequence[int] | None = (),
        retract: object = None,
        user: str = "least_squares",
    ) -> None:
        self._plan = plan
        self._call = call
        self._targets = [call.current(t) for t in plan.prepared.params]
        for target in self._targets:
            if call.is_value(target):
                raise InvalidArgumentError(
                    f"{target.name} is a number that is passed or captured by value, in which no solution can be "
                    "stored; put it in a field."
                )
            container = call.value(target)
            if isinstance(container, np.ndarray) and not container.flags.writeable:
                raise InvalidArgumentError(f"{target.name} is read-only, so no solution can be stored; pass a copy.")
        self._state = _StateAtPoint(self._save_and_store)
        self._state.reason, self._state.advice = f"{user} runs the kernels once for each point", RANDOM_BEFORE
        for target in self._targets:
            self._state.save(call.value(target))
        evaluation = plan.start(call)
        values = [backend.as_numpy(backend.copy_of(call.value(t))) for t in self._targets]
        shapes = evaluation.parameter_shapes()
        self.parts = [Part(str(t.name), s, v.dtype) for t, s, v in zip(self._targets, shapes, values, strict=True)]
        self.rows = output_parts(evaluation)
        self.start = np.concatenate([v.astype(np.float64).reshape(-1) for v in values])
        self.best: np.ndarray | None = None
        self._x = self.start
        self.charts = Charts(retract, self.parts)
        self._layout: BlockLayout | None = None
        if plan.prepared.format is not None:
            layout = evaluation.layout
            heights, widths = ([p.element for p in placed] for placed in (layout.outputs, layout.params))
            widths = self.charts.sizes(widths)
            rows = list(zip(self.rows, heights, strict=True))
            columns = list(zip(self.charts.parts, widths, strict=True))
            products = _products.setdefault(plan, BlockProducts(is_compiled=True))
            self._layout = BlockLayout(rows, columns, eliminated, products)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters, those of their elements included."""
        return [part.shape for part in self.parts]

    @property
    def noise(self) -> float:
        """The relative rounding error of the cost."""
        return 64 * max(float(np.finfo(part.dtype).eps) for part in self.rows)

    def compute(self, x: np.ndarray) -> tuple[np.ndarray, Any]:
        """The residuals in float64, and J as one dense matrix or as a ``SparseJacobian``."""
        evaluation = self.start_at(x)
        blocks = evaluation.blocks()
        J = joined(blocks, evaluation.layout) if self._layout is None else SparseJacobian(blocks, self._layout)
        return residual_vector(evaluation), J

    def jacobian(self, x: np.ndarray) -> tuple[Any, np.ndarray]:
        """J in the structure of the outputs and parameters, and the residuals in float64."""
        evaluation = self.start_at(x)
        J = self._plan.prepared.question.result(evaluation.blocks())
        return J, residual_vector(evaluation)

    def gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """The only output, which is one number, and its gradient, in float64."""
        value, row = value_and_row(self.start_at(x))
        return float(_raveled(value)[0]), row.astype(np.float64)

    def start_at(self, x: np.ndarray, plan: Plan | None = None) -> Evaluation:
        """An evaluation at a point, also of another plan of the same kernel."""
        self._x = x
        self._state.restore()
        return (plan or self._plan).start(self._call, state=self._state)

    def value(self, x: np.ndarray) -> float:
        """The only output, which is one number, from a plain run at a point, after an evaluation at another one."""
        self._x = x
        self._state.restore()
        returned = self._call.function(*self._call.given)
        (found,) = values_of(self._plan.prepared, self._call, returned)
        return float(_raveled(found)[0])

    def check_residuals(self, r: np.ndarray, where: str = "") -> None:
        check_finite(r, self.rows, where + _ADVICE)

    def check_rows(self, J: object) -> None:
        if not isinstance(J, SparseJacobian):
            check_rows_finite(J, self.rows, _ADVICE)
            return
        for part, row in zip(self.rows, J.blocks, strict=True):
            for block in row:
                check_rows_finite(block, [part], _ADVICE)

    def close(self) -> None:
        """One plain run at the best point, which is in the parameters afterwards; before that, everything as it was."""
        if self.best is None:
            self._state.undo()
            return
        self._x = self.best
        self._state.restore()
        self._call.function(*self._call.given)
        self.store(self.best)

    def _save_and_store(self) -> None:
        for target in self._targets:
            self._state.save(self._call.value(target))  # before it is changed
        self.store(self._x)

    def store(self, x: np.ndarray) -> None:
        for target, piece in zip(self._targets, pieces_of(x, self.shapes), strict=True):
            container = self._call.value(target)
            dtype = backend.as_numpy(backend.copy_of(container)).dtype
            backend.put_back(container, np.array(piece, dtype, order="C"))  # a copy, of no axes too


class Weighted:
    """A problem with weights and a robust cost; the data of its points are the residuals and J, without weights.

    Attributes:
        robust: the losses.
        roots: the square roots of the weights; None where all are 1.
    """

    def __init__(self, problem: Problem, robust: Robust, weights: np.ndarray | None) -> None:
        self._problem, self.robust = problem, robust
        self.roots = None if weights is None else np.sqrt(weights)

    def point(self, x: np.ndarray) -> Point:
        """See ``minimize``."""
        r, J = self._problem.compute(x)
        if self._problem.best is None:
            self._problem.check_residuals(r, " at the start")
        cost, scaled, factors = self._scaled(r) if np.isfinite(r).all() else (np.inf, r, None)

        def system() -> System:
            self._problem.check_rows(J)
            local = self._problem.charts.local_jacobian(J, x)
            if isinstance(local, SparseJacobian):
                return SparseSystem.of(local, scaled, factors)
            return system_of(local, scaled, factors)

        return Point(x, cost, system, (r, J, len(r)))

    def _scaled(self, r: np.ndarray) -> tuple[float, np.ndarray, np.ndarray | None]:
        """The cost of residuals; residuals and factors of the rows of J with its gradient and curvature."""
        if self.roots is None:
            return self.robust.apply(r)
        cost, scaled, factors = self.robust.apply(self.roots * r)
        return cost, scaled, self.roots if factors is None else self.roots * factors

    def rows_and_gradient(self, point: Point) -> tuple[object, np.ndarray]:
        """J with weights but without the loss, as SciPy takes it, and the gradient of the cost."""
        r, J, _ = point.data
        self._problem.check_rows(J)
        J = whole(J).astype(np.float64, copy=False)
        _, scaled, factors = self._scaled(r)
        gradient = J.T @ (scaled if factors is None else factors * scaled)
        return J if self.roots is None else rows_times(self.roots, J), gradient


def output_parts(evaluation: Evaluation) -> list[Part]:
    return [Part(str(o.target.name), o.shape, o.result_dtype) for o in evaluation.layout.outputs]


def residual_vector(evaluation: Evaluation) -> np.ndarray:
    """The outputs after a run, in float64."""
    values = values_of(evaluation.prepared, evaluation.call, evaluation.returned)
    return np.concatenate([_raveled(value) for value in values])


def _raveled(value: object) -> np.ndarray:
    """The values of an output, or of a kernel's return: numbers, vectors and matrices."""
    if isinstance(value, (list, tuple)):
        return np.concatenate([_raveled(v) for v in value])
    return np.asarray(backend.as_numpy(value), np.float64).reshape(-1)
