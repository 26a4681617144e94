"""A kernel's residuals and J as functions of one vector, with robust losses, and in local coordinates of manifolds."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type; J is no constant.
# pyright: reportConstantRedefinition=false, reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import KernelCall, flatten
from taichi_ext.api.inputs.options import check_number
from taichi_ext.api.inputs.results import joined
from taichi_ext.api.jacobian import jvp
from taichi_ext.api.plans.plan import Plan
from taichi_ext.api.runs.by_adjoint import value_and_row
from taichi_ext.api.runs.evaluation import Evaluation
from taichi_ext.api.runs.replay import values_of
from taichi_ext.errors import InvalidArgumentError, shown, unexpected
from taichi_ext.runtime.memory.state import RANDOM_BEFORE, State
from taichi_ext.solvers.elimination import BlockLayout, BlockProducts, SparseJacobian, SparseSystem, stacked, whole
from taichi_ext.solvers.levenberg import Point, System
from taichi_ext.solvers.manifolds import Manifold, retraction
from taichi_ext.solvers.operator import require_scipy
from taichi_ext.solvers.parts import Part, check_finite, check_rows_finite, entry_name, pieces_of, slices_of
from taichi_ext.solvers.systems import rows_times, system_of

# Robust losses: functions of squared residuals, and the scaling of residuals and rows of J.

_LEAST_CURVATURE = 0.1  # of a loss, as a share of its slope
Values = tuple[np.ndarray, np.ndarray, np.ndarray]  # rho(z), rho'(z), rho''(z)


def _soft_l1(z: np.ndarray) -> Values:
    t = 1 + z
    return 2 * np.expm1(0.5 * np.log1p(z)), t**-0.5, -0.5 * t**-1.5  # sqrt(t) - 1 loses the digits of a small z


def _huber(z: np.ndarray) -> Values:
    t = np.maximum(z, 1.0)
    return np.where(z <= 1, z, 2 * np.sqrt(t) - 1), t**-0.5, np.where(z <= 1, 0.0, -0.5 * t**-1.5)


def _cauchy(z: np.ndarray) -> Values:
    t = 1 / (1 + z)
    return np.log1p(z), t, -(t**2)


def _arctan(z: np.ndarray) -> Values:
    t = 1 / (1 + z**2)
    return np.arctan(z), t, -2 * z * t**2


def _tukey(z: np.ndarray) -> Values:
    t, inside = np.maximum(1 - z, 0.0), np.minimum(z, 1.0)
    return inside * (1 - inside * (1 - inside / 3)), t**2, -2 * t


# As in SciPy; Tukey's biweight as in Ceres, where residuals past the scale have no influence.
LOSSES: dict[str, Callable[[np.ndarray], Values]] = {
    "linear": lambda z: (z, np.ones_like(z), np.zeros_like(z)),
    "soft_l1": _soft_l1,
    "huber": _huber,
    "cauchy": _cauchy,
    "arctan": _arctan,
    "tukey": _tukey,
}

Loss = Literal["linear", "soft_l1", "huber", "cauchy", "arctan", "tukey"]
LossOver = Literal["entries", "last axis"]
assert get_args(Loss) == tuple(LOSSES)


class Robust:
    """The cost of residuals u: half the sum of ``s**2 rho(z / s**2)``, where z are their squares and s the scales.

    Args:
        loss: a name or a function, or a structure of those like the residuals.
        scale: a positive number, or such a structure.
        over: "entries", or "last axis" for the squared norms along the last axis of each output.
        residuals: the structure of the residuals.
        shapes: of the outputs.
    """

    def __init__(self, loss: Any, scale: Any, over: str, residuals: Any, shapes: list[tuple[int, ...]]) -> None:
        losses, scales = _for_each(loss, residuals, "loss"), _for_each(scale, residuals, "f_scale")
        for given in losses:
            if not callable(given) and not (isinstance(given, str) and given in LOSSES):
                names = ", ".join(map(repr, LOSSES))
                raise unexpected("loss", given, f"one of {names}, or a function")
        for given in scales:
            check_number("f_scale", given, "the size of an outlier", is_optional=False)
        self.is_linear = all(given == "linear" for given in losses)
        widths = [shape[-1] if over == "last axis" and shape else 1 for shape in shapes]
        self._is_single = all(width == 1 for width in widths)
        sizes = [math.prod(shape) // max(1, width) for shape, width in zip(shapes, widths, strict=True)]
        self._ends = np.cumsum(sizes)
        self._width = np.repeat(widths, sizes)
        self._losses = [LOSSES[given] if isinstance(given, str) else given for given in losses]
        self._scales = [float(given) ** 2 for given in scales]

    def rho(self, z: np.ndarray) -> np.ndarray:
        """The loss of squares, with its first two derivatives, of shape (3, m)."""
        parts = np.split(z, self._ends[:-1])
        return np.concatenate([_of(*p) for p in zip(self._losses, self._scales, parts, strict=True)], axis=1)

    def apply(self, u: np.ndarray) -> tuple[float, np.ndarray, np.ndarray | None]:
        """The cost of residuals; residuals and factors of rows of J that have its gradient, and nearly its curvature.

        The second derivative of the loss counts as in B. Triggs et al., Bundle adjustment: a modern synthesis, 2000,
        section 4.3, with a least curvature; that of norms does not, as in Ceres for losses that are concave.
        """
        if self.is_linear:
            with np.errstate(over="ignore"):
                return 0.5 * float((u * u).sum()), u, None  # which BLAS's threads do not change
        starts = np.cumsum(self._width) - self._width
        z = u * u if self._is_single else np.add.reduceat(u * u, starts)
        rho, slope, curvature = self.rho(z)
        weight = np.maximum(slope + 2 * z * curvature, _LEAST_CURVATURE * slope) if self._is_single else slope
        factor = np.sqrt(weight)
        share = np.divide(slope, factor, out=np.zeros_like(slope), where=factor > 0)
        if not self._is_single:
            share, factor = np.repeat(share, self._width), np.repeat(factor, self._width)
        return 0.5 * float(rho.sum()), share * u, factor


def _of(loss: Callable[[np.ndarray], object], scale: float, z: np.ndarray) -> np.ndarray:
    rho = np.asarray(loss(z / scale))
    if rho.shape != (3, len(z)) or rho.dtype.kind not in "fiu":
        raise InvalidArgumentError(
            f"loss returns an array of shape {rho.shape} and type {rho.dtype} for {len(z)} squares; expected real "
            f"numbers of shape (3, {len(z)}): the loss and its first and second derivative."
        )
    is_wrong = np.isfinite(z) & (~np.isfinite(rho).all(axis=0) | (rho[1] < 0))
    if is_wrong.any():
        n = int(np.argmax(is_wrong))
        raise InvalidArgumentError(
            f"loss and its derivatives of {z[n] / scale:g}, a square over f_scale**2, are {rho[:, n]}; expected "
            "finite numbers, and a first derivative that is not negative."
        )
    return rho * [[scale], [1.0], [1 / scale]]


def _for_each(given: object, residuals: object, what: str) -> list[Any]:
    """The option for each output: one for all of them, or a structure like that of the residuals."""
    outputs = flatten(residuals)[0]
    if not isinstance(given, (list, tuple, dict)):
        return [given] * len(outputs)
    items, places = flatten(given, what)[0], [path for path, _ in outputs]
    if [path for path, _ in items] != places:
        wanted = ", ".join(f"{what}{path}" for path in places if path) or "a single one, for the only residuals"
        raise InvalidArgumentError(
            f"{what} is {shown(given)}, with another structure than residuals; expected {wanted}, or one for all."
        )
    return [value for _, value in items]


# Parameters by local coordinates: how a step moves points of manifolds, and J by those coordinates.

_NEAR = 1e-3  # the largest distance of a start from its manifold


class Charts:
    """Local coordinates of all parameters; those without a manifold are their own.

    Args:
        given: a manifold for a single param, or for each param one or None; None for no manifolds.
        parts: the params as parts of a vector.

    Attributes:
        parts: local coordinates as parts of a vector.
    """

    def __init__(self, given: object, parts: list[Part]) -> None:
        self._points, self._manifolds = parts, [None] * len(parts)
        if given is not None:
            self._manifolds = [leaf for _, leaf in flatten(given, "retract")[0]]
        if len(self._manifolds) != len(parts) or not all(isinstance(m, Manifold | None) for m in self._manifolds):
            wanted = f"a Manifold or None for each of the {len(parts)} params, structured like them"
            raise unexpected("retract", given, wanted)
        for manifold, part in zip(self._manifolds, parts, strict=True):
            if manifold is not None and part.shape[-len(manifold.shape) :] != manifold.shape:
                raise InvalidArgumentError(
                    f"{part.name} has the shape {part.shape} with its elements; points of its manifold have the shape "
                    f"{manifold.shape}."
                )
        self.parts = [
            Part(f"local coordinates of {p.name}", (*p.shape[: -len(m.shape)], m.size), p.dtype) if m else p
            for p, m in zip(parts, self._manifolds, strict=True)
        ]
        self._triples = list(zip(self._manifolds, slices_of(parts), slices_of(self.parts), strict=True))

    def sizes(self, elements: list[int]) -> list[int]:
        """How many numbers belong together in each param, where it has no manifold, and in its local coordinates."""
        return [n if m is None else m.size for n, m in zip(elements, self._manifolds, strict=True)]

    def plus(self, x: np.ndarray, step: np.ndarray) -> np.ndarray:
        """The points that a step in local coordinates leads to."""
        result = np.empty_like(x)
        for n, (manifold, point, local) in enumerate(self._triples):
            if manifold is None:
                result[point] = x[point] + step[local]
            else:
                kernel, *arrays = self._arrays(n, x[point], step[local])
                kernel(*arrays)
                result[point] = arrays[2].reshape(-1)
        return result

    def of_points(self, values: np.ndarray, other: float) -> np.ndarray:
        """Numbers for the params as numbers for local coordinates: another number for those of manifolds."""
        parts = [values[p] if m is None else np.full(l.stop - l.start, other) for m, p, l in self._triples]
        return np.concatenate(parts)

    def check_bounds(self, low: np.ndarray, high: np.ndarray) -> None:
        for part, (manifold, point, _) in zip(self._points, self._triples, strict=True):
            if manifold is not None and (np.isfinite(low[point]).any() or np.isfinite(high[point]).any()):
                raise InvalidArgumentError(
                    f"bounds limits {part.name}, which moves on a manifold; give -inf and inf for it."
                )

    def projected(self, x: np.ndarray) -> np.ndarray:
        """A start, moved onto its manifolds by no more than rounding; raises where it is not on them."""
        try:
            result = self.plus(x, np.zeros(self._triples[-1][2].stop))
            self._derivatives(x)
        except (InvalidArgumentError, backend.CompilationError) as error:
            raise InvalidArgumentError(
                f"retract must be a ti.func of a point and of its local coordinates that reads both: {error}"
            ) from error
        with np.errstate(invalid="ignore"):
            is_off = ~(np.abs(result - x) <= _NEAR)
        if is_off.any():
            n = int(np.argmax(is_off))
            raise InvalidArgumentError(
                f"{entry_name(n, self._points)} is {x[n]:g}, and {result[n]:g} after a step of length 0 on its "
                "manifold; start at points of the manifold, such as quaternions of length 1."
            )
        return result

    def local_jacobian(self, J: Any, x: np.ndarray) -> Any:
        """J by local coordinates: blocks of J times the derivatives of the points by them."""
        derivatives = self._derivatives(x)
        if not derivatives:
            return J
        if isinstance(J, SparseJacobian):
            blocks = [list(row) for row in J.blocks]
            for n, P in derivatives.items():
                of_points = stacked(P, is_diagonal=True)
                for row in blocks:
                    row[n] = (row[n].tobsr((1, P.shape[1])) @ of_points).tocsr()
            return J._replace(blocks=blocks)
        parts: list[np.ndarray] = []
        for n, (_, point, _) in enumerate(self._triples):
            part = J[:, point]
            if n in derivatives:
                P = derivatives[n]
                part = np.matmul(part.reshape(len(J), len(P), 1, -1), P).reshape(len(J), -1)
            parts.append(part)
        return np.concatenate(parts, axis=1)

    def local_products(self, JtJ: object, Jtr: np.ndarray, x: np.ndarray) -> tuple[object, np.ndarray]:
        """JtJ, dense or CSR, and Jtr by local coordinates."""
        products = self._derivatives(x)
        if not products:
            return JtJ, Jtr
        if isinstance(JtJ, np.ndarray):
            P: Any = self.local_jacobian(np.eye(len(Jtr)), x)
        else:
            sparse = require_scipy("sparse", "format='csr'")
            blocks = [
                stacked(products[n], is_diagonal=True) if n in products else sparse.eye_array(local.stop - local.start)
                for n, (_, _, local) in enumerate(self._triples)
            ]
            P = sparse.csr_array(sparse.block_diag(blocks))
        return P.T @ JtJ @ P, P.T @ Jtr

    def _derivatives(self, x: np.ndarray) -> dict[int, np.ndarray]:
        """By param, for each point the matrix of its derivatives with respect to local coordinates."""
        result: dict[int, np.ndarray] = {}
        for n, (manifold, point, local) in enumerate(self._triples):
            if manifold is not None:
                kernel, *arrays = self._arrays(n, x[point], np.zeros(local.stop - local.start))
                directions = np.broadcast_to(np.eye(manifold.size)[:, None], (manifold.size, *arrays[1].shape))
                by_direction = jvp(kernel, "delta", directions, "moved", args=tuple(arrays))
                result[n] = np.moveaxis(by_direction.reshape(*directions.shape[:2], -1), 0, 2).astype(np.float64)
        return result

    def _arrays(self, n: int, points: np.ndarray, step: np.ndarray) -> tuple[Any, ...]:
        """The kernel of a manifold, and its arguments."""
        manifold = self._manifolds[n]
        assert manifold is not None
        dtype = np.float32 if self._points[n].dtype.itemsize < 8 else np.float64
        x = np.ascontiguousarray(points.reshape(-1, *manifold.shape), dtype)
        kernel = retraction(manifold, np.dtype(dtype))
        return kernel, x, np.ascontiguousarray(step.reshape(-1, manifold.size), dtype), np.zeros_like(x)


# The residuals and J of a plan.

_ADVICE = "; check_jacobian names the line where it arises."
_products: WeakKeyDictionary[Plan, BlockProducts] = WeakKeyDictionary()  # which repeated calls plan once


class _StateAtPoint(State):
    """The state at the start, but for the parameters, which are those of a point."""

    def __init__(self, store_point: Callable[[], None]) -> None:
        super().__init__()
        self._store_point = store_point

    def restore(self, reason: str = "", advice: str = "") -> None:
        """Put everything back, also before J is computed in another run."""
        super().restore(reason, advice)
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
        (energy,) = values_of(self._plan.prepared, self._call, returned)
        return float(_raveled(energy)[0])

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
    """A problem with weights and a robust cost; the data of its points are the residuals and J, without weights."""

    def __init__(self, problem: Problem, robust: Robust, weights: np.ndarray | None) -> None:
        self._problem, self.robust = problem, robust
        self.roots = None if weights is None else np.sqrt(weights)  # None where all are 1

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
        """J with weights but without the loss, which SciPy takes and scales in place, and the gradient of the cost."""
        r, J, _ = point.data
        self._problem.check_rows(J)
        J = whole(J).astype(np.float64, copy=not self.robust.is_linear)
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
