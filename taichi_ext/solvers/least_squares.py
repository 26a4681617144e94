"""``least_squares``: residuals of a kernel, minimised with value and J from one launch per point."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from taichi_ext.api.inputs.arguments import flatten
from taichi_ext.api.inputs.options import check_count, check_function, check_number, checked_choice, checked_options
from taichi_ext.api.inputs.progress import check_progress
from taichi_ext.api.inputs.types import Structure
from taichi_ext.api.jacobian import prepared_form
from taichi_ext.errors import InvalidArgumentError, shown, unexpected, with_short_traceback
from taichi_ext.solvers.elimination import whole
from taichi_ext.solvers.levenberg import Ended, Point, Space, StoppingCriteria, minimize
from taichi_ext.solvers.normal_equations import check_matrix_format, weights_of
from taichi_ext.solvers.operator import require_scipy
from taichi_ext.solvers.parts import bounds_of, is_complex, rounded, scale_of, start_within
from taichi_ext.solvers.problem import Loss, LossOver, Problem, Robust, Weighted
from taichi_ext.solvers.results import History, LeastSquaresIteration, LeastSquaresResult, Solved, place_of, print_line
from taichi_ext.solvers.shards import AnyExecutor, ShardedProblem, Shards, check_shard_options

_Method = Literal["lm", "trf", "dogbox"]


@with_short_traceback
def least_squares(
    kernel: Callable[..., object] | str,
    params: object = None,
    residuals: object = None,
    *,
    args: tuple[object, ...] = (),
    method: _Method = "lm",
    bounds: tuple[object, object] = (-np.inf, np.inf),
    loss: Loss | Callable[[np.ndarray], object] | Structure = "linear",
    f_scale: object = 1.0,
    loss_over: LossOver = "entries",
    weights: object = None,
    eliminate: object = None,
    retract: object = None,
    ftol: float = 1e-8,
    xtol: float = 1e-8,
    gtol: float = 1e-8,
    max_iterations: int | None = None,
    max_nfev: int | None = None,
    format: Literal["csr"] | None = None,
    callback: Callable[[LeastSquaresIteration], object] | None = None,
    progress: bool | None = None,
    shards: Sequence[tuple[object, ...]] | None = None,
    start: object = None,
    executor: AnyExecutor = None,
    init: Mapping[str, object] | None = None,
    x_scale: object = None,
    tr_solver: Literal["exact", "lsmr"] | None = None,
    tr_options: Mapping[str, object] | None = None,
    verbose: Literal[0, 1, 2] | None = None,
) -> LeastSquaresResult:
    """Minimise half the sum of the squares of a kernel's residuals, or of robust losses of them.

    It starts at the current values of the parameters.  Each point costs one launch, which gives the residuals and J.
    Every run begins at the state in which the call began.  Afterwards, the solution is in the parameters, and
    everything else is as after one plain run there; after an exception or an interrupt, this holds for the best point
    so far.

    ``method="lm"`` is the method of Levenberg and Marquardt as in MINPACK, with a trust region that does not depend on
    the units of the parameters.  It solves the normal equations, or with up to 2**18 numbers in a dense J those
    of its QR decomposition.  It needs NumPy alone, or SciPy for a sparse J.  ``"trf"`` and ``"dogbox"`` are those of
    ``scipy.optimize.least_squares``.

    With ``shards``, workers compute residuals and J, see ``map_jacobian``: ``kernel`` is the factory, ``start`` has the
    values of the params to start from, and the solution is in the result alone: ``result.split(result.x)``.  All sums
    are added in the order of the shards, so that points and steps do not depend on the executor, nor on lost workers.

    Args:
        kernel: see ``jacobian``; with ``shards``, the factory.
        params: fields and arrays, see ``jacobian``; no names of numbers.
        residuals: see ``outputs`` of ``jacobian``; None means the kernel's return value.
        args: see ``jacobian``.
        method: "lm", "trf" or "dogbox".
        bounds: the least and the largest values: two numbers, or two structures like ``params`` with, for each
            parameter, a number or an array of its shape, up to rounding to its type.  The start is within them.
        loss: rho in the cost ``0.5 * sum(s**2 * rho((r / s)**2))``, where s is ``f_scale``: "linear", "soft_l1",
            "huber", "cauchy", "arctan" (see SciPy) or "tukey" (of no influence where ``|r| > s``); or a function of an
            array z of shape (m,) that returns rho and its first two derivatives as an array of shape (3, m); or a
            structure of those like ``residuals``.
        f_scale: a positive number, or a structure of those like ``residuals``.
        loss_over: "entries", or "last axis": the loss is one of the squared norm of residuals that share all indices
            but the last, such as the two of an observation in an image.  For ``method="lm"``.
        weights: the weight of each residual, not negative, structured like ``residuals``; None for 1.  Residuals are
            multiplied by their square roots, before the loss.
        eliminate: some of the params, or a list of those, whose parts of JtJ are block diagonal, such as the points of
            a bundle adjustment: no residual depends on two of their elements (or, in arrays of numbers, on numbers with
            other first indices).  They are eliminated one after the other, so a param may be block diagonal thanks to
            those before it.  Steps are the same, in less time.  For ``method="lm"``; J is sparse then.  With
            ``shards``, arrays of ``start``.  By default, with ``format="csr"`` and without ``shards``, params whose
            blocks leave up to 4096 numbers are found and eliminated; ``[]`` eliminates none.
        retract: a ``Manifold`` for a single param whose elements are points of it, such as ``manifolds.so3`` for
            rotation matrices, or a structure like ``params`` (with ``shards``, like ``start``) of those and of None.
            Steps, J, the gradient and covariances are then in local coordinates of these points.  For ``method="lm"``.
        ftol: it ends where a step lowers the cost by a smaller share.
        xtol: it ends where a step is a smaller share of the parameters.  In "lm", both are weighted with the column
            norms of J.
        gtol: it ends where the gradient is smaller: in "lm", the largest cosine of a column of J and the residuals; in
            SciPy's methods, the largest entry.
        max_iterations: how many steps there may be, accepted or not; by default 100 for each number in the params.
        max_nfev: the same limit as SciPy counts it, at how many points the residuals are computed at most, the start
            included; instead of ``max_iterations``.
        format: "csr" for a sparse J, see ``jacobian`` (extra ``scipy``).
        callback: is given each ``LeastSquaresIteration``, the start included; if it returns True, the best point so far
            is the result.
        progress: True prints a line for each iteration on stderr: cost, change, gradient, step, ratio, radius, seconds.
            None logs it at level INFO.
        shards: the arguments of the factory, a tuple for each shard; with ``method="lm"``.
        start: with ``shards``: the values of the params to start from, structured like them.
        executor: with ``shards``: see ``map_jacobian``.
        init: with ``shards``: see ``map_jacobian``.
        x_scale: for SciPy's methods: the scale of each param, a number, "jac", or structured like ``params`` as bounds.
        tr_solver: for SciPy's methods, see there.
        tr_options: for SciPy's methods, see there.
        verbose: for SciPy's methods, see there.

    Returns:
        The result: ``x`` (all parameters as one vector), ``cost``, ``history``, ``summary()``, ...

    Raises:
        ImportError: SciPy is needed and not installed (the extra ``scipy``).
        InvalidArgumentError: an argument is invalid; or the start is outside of the bounds; or the residuals are not
            finite there, or J at a point that is accepted; or the kernel draws random numbers or changes a field in a
            sparse layout, so that it cannot run again from the same state.
        ShardError: a shard could not be computed; its ``best`` are the best params so far.
        UnsupportedError: the derivative of a construct is not known.
        ValueError: SciPy refuses an option.

    Example:
        >>> import numpy as np
        >>> import taichi as ti
        >>> from taichi_ext import least_squares
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> line, r = ti.field(ti.f64, shape=2), ti.field(ti.f64, shape=3)
        >>> @ti.kernel
        ... def compare():
        ...     for i in r:
        ...         r[i] = line[0] + line[1] * i - (1.0 + 2.0 * i)
        >>> result = least_squares(compare, line, r)
        >>> line.to_numpy().round(6).tolist()
        [1.0, 2.0]
        >>> result.success
        True
    """
    tolerances = {"ftol": ftol, "xtol": xtol, "gtol": gtol}
    of_scipy = {"x_scale": x_scale, "tr_solver": tr_solver, "tr_options": tr_options, "verbose": verbose}
    options = {name: value for name, value in of_scipy.items() if value is not None}
    max_iterations = _most_steps(max_iterations, max_nfev)
    checked_choice("method", method, get_args(_Method))
    for name, value in options.items():
        if method == "lm":
            raise InvalidArgumentError(f"{name} is an option of SciPy's methods; give method='trf', or leave it out.")
        if is_complex(value):  # of which SciPy drops the imaginary part
            raise unexpected(name, value, "real numbers")
    for name, value in tolerances.items():
        check_number(name, value, "a tolerance", least=0, is_optional=False)
    checked_choice("loss_over", loss_over, get_args(LossOver))
    if loss_over != "entries" and method != "lm":
        raise InvalidArgumentError(f"loss_over={loss_over!r} needs method='lm'.")
    check_function("callback", callback, "a LeastSquaresIteration")
    check_progress(progress)
    check_matrix_format(format)
    for name, value in {"eliminate": eliminate, "retract": retract}.items():
        if value is not None and method != "lm":
            raise InvalidArgumentError(f"{name} needs method='lm'; method is {method!r}.")
    of_kernels = {"params": params, "residuals": residuals, "weights": weights, "args": args or None}
    check_shard_options(shards, of_kernels, {"start": start, "executor": executor, "init": init})
    params = params if shards is None else start
    eliminated = _eliminated(eliminate, params)
    format = "csr" if eliminated else format
    points: Weighted | ShardedProblem
    if shards is None:
        prepared = prepared_form(kernel, params, residuals, args, checked_options(format=format))
        problem = Problem(*prepared, None if eliminate is None else eliminated, retract)
        shapes = [part.shape for part in problem.rows]
        robust = Robust(loss, f_scale, loss_over, residuals, shapes)
        points = Weighted(problem, robust, weights_of(weights, residuals, shapes))
    else:
        if method != "lm":
            raise InvalidArgumentError(f"method is {method!r}; with shards, expected 'lm'.")
        parts = Shards(kernel, shards, start, "start", init, format)
        problem = points = ShardedProblem(parts, executor, (loss, f_scale, loss_over), eliminated, retract)
    history = _history(problem, callback, progress)
    try:
        limits = {**tolerances, "max_iterations": max_iterations}
        ended = _ended(points, problem, params, bounds, method, limits, options, history)
    finally:
        problem.close()
    return _result(ended, problem, params, method, history)


def _most_steps(max_iterations: Any, max_nfev: Any) -> Any:
    """The limit of the number of steps, which may be given as one of points."""
    if max_nfev is None:
        if max_iterations is not None:
            check_count("max_iterations", max_iterations)
        return max_iterations
    if max_iterations is not None:
        raise InvalidArgumentError(
            f"max_iterations is {shown(max_iterations)} and max_nfev is {shown(max_nfev)}; expected one of the two."
        )
    check_count("max_nfev", max_nfev, least=1)
    return max_nfev - 1


def _history(problem: Problem | ShardedProblem, callback: Any, progress: bool | None) -> History:
    """The report, which keeps the best point in the problem."""

    def tell(line: LeastSquaresIteration) -> object:
        problem.best = line.x
        if progress is True:
            print_line(line)
        elif progress is None:
            logging.getLogger("taichi_ext").info(str(line))
        return callback(line) if callback is not None else None

    return History(tell)


def _ended(
    points: Weighted | ShardedProblem,
    problem: Problem | ShardedProblem,
    params: object,
    bounds: object,
    method: str,
    limits: dict[str, Any],
    options: dict[str, object],
    history: History,
) -> Ended:
    """The end of the iteration; ``limits`` are the tolerances and ``max_iterations``, ``options`` those of SciPy."""
    low, high = bounds_of(bounds, params, problem.shapes)
    first = start_within(problem.start, low, high, problem.parts)
    low, high = np.broadcast_to(low, first.shape), np.broadcast_to(high, first.shape)
    given = limits.pop("max_iterations")
    most = 100 * len(first) if given is None else given
    if isinstance(points, ShardedProblem) or method == "lm":
        charts = problem.charts
        charts.check_bounds(low, high)
        space = Space(
            charts.of_points(low, -np.inf),
            charts.of_points(high, np.inf),
            lambda x, step: np.clip(rounded(charts.plus(x, step), problem.parts), low, high),
            lambda x: charts.of_points(x, 1.0),
        )
        first = np.clip(rounded(charts.projected(first), problem.parts), low, high)
        criteria = StoppingCriteria(**limits, max_iterations=most, noise=problem.noise)
        return minimize(points.point, first, space, criteria, history)
    if "x_scale" in options:
        options["x_scale"] = scale_of(options["x_scale"], params, problem.shapes)
    limits["max_nfev"] = most + 1  # of which one is the start
    return by_scipy(points, first, history, {**options, **limits, "method": method, "bounds": (low, high)})


def _result(
    ended: Ended, problem: Problem | ShardedProblem, params: object, method: str, history: History
) -> LeastSquaresResult:
    r, J, count = ended.point.data
    leaves, rebuild = flatten(params)
    return LeastSquaresResult(
        x=ended.point.x,
        cost=ended.point.cost,
        fun=r,
        jacobian=whole(problem.charts.local_jacobian(J, ended.point.x) if isinstance(problem, Problem) else J),
        grad=ended.gradient,
        status=ended.status,
        message=ended.message,
        nfev=ended.evaluations,
        history=history.lines,
        method=method,
        seconds=ended.seconds,
        _problem=Solved(
            [leaf for _, leaf in leaves],
            rebuild([*range(len(leaves))]),
            problem.shapes,
            problem.charts.parts,
            count,
            ended.point.system,
        ),
    )


def _eliminated(eliminate: object, params: object) -> list[int]:
    if eliminate is None:
        return []
    given = [leaf for _, leaf in flatten(params)[0]]
    result = [place_of(leaf, given, "eliminate") for _, leaf in flatten(eliminate, "eliminate")[0]]
    if len(set(result)) < len(result):
        raise InvalidArgumentError("eliminate names a param twice.")
    return result


# SciPy's methods for least squares, reported and ended like ours.


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
        return r.copy() if roots is None else roots * r  # SciPy before 1.16 scales it in place

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
