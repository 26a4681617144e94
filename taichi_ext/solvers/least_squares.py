"""``least_squares``: SciPy's solver on a kernel's residuals, with value and J from one launch per point."""

# pyright knows no types of Taichi, torch and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# The parts of a Jacobian are private to the package, not to its module.
# pyright: reportPrivateUsage=false
# J is the Jacobian, and no constant.
# pyright: reportConstantRedefinition=false

from __future__ import annotations

import inspect
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.arguments import KernelCall, Target
from taichi_ext.api.jacobian import prepared_form
from taichi_ext.api.options import checked_options
from taichi_ext.api.plan import Plan
from taichi_ext.errors import InvalidArgumentError, shown
from taichi_ext.runtime.state import RANDOM_BEFORE, State
from taichi_ext.solvers.bounds import (
    Part,
    bounds_of,
    is_complex,
    refuse_not_finite,
    refuse_rows_not_finite,
    scale_of,
    start_within,
)
from taichi_ext.solvers.extra import require_scipy
from taichi_ext.solvers.stacked import residual_vector, stacked

_OWN = ("fun", "x0", "jac", "kwargs", "jac_sparsity", "diff_step", "workers")  # of SciPy's: given here by the kernel
_ADVICE = "; check_jacobian names the line where it arises."


def least_squares(
    kernel: Callable[..., Any],
    params: Any,
    residuals: Any = None,
    *,
    args: tuple[Any, ...] = (),
    bounds: tuple[Any, Any] = (-np.inf, np.inf),
    loss: str | Callable[..., Any] = "linear",
    format: str | None = None,
    progress: bool | Callable[[int, float], None] | None = None,
    **options: Any,
) -> Any:
    """Minimise half the sum of the squares of a kernel's residuals by ``scipy.optimize.least_squares``.

    It starts at what the parameters hold.  Each point costs one launch, which gives the residuals and J.  Every run
    begins at the state in which the call began.  Afterwards, the solution is in the parameters, and everything else is
    as after one plain run there.

    Args:
        kernel: see ``jacobian``.
        params: fields and arrays, see ``jacobian``; no names of numbers.
        residuals: see ``outputs`` of ``jacobian``; None means the kernel's return value.
        args: see ``jacobian``.
        bounds: the least and the largest values: two numbers, or two structures like ``params`` with, for each
            parameter, a number or an array of its shape, up to rounding to its type.  The start is within them.
            SciPy's method ``"lm"`` takes none.
        loss: see SciPy: ``"linear"``, ``"soft_l1"``, ``"huber"``, ``"cauchy"``, ``"arctan"`` or a function.
        format: "csr" for a sparse J, see ``jacobian``.
        progress: True prints a line for each iteration on stderr: its number, half the sum of the squares, and the
            seconds since the start.  A function is called with the first two.  None logs the line at level INFO.
        **options: others of SciPy's: ``method``, ``ftol``, ``xtol``, ``gtol``, ``max_nfev``, ``x_scale``, ``f_scale``,
            ``tr_solver``, ``tr_options``, ``verbose``, ``callback`` (SciPy 1.16).  ``x_scale`` may be structured like
            ``params``, as bounds are.

    Returns:
        SciPy's result: ``x`` (all parameters as one vector), ``cost``, ``fun``, ``jac``, ``nfev``, ``success``, ...

    Raises:
        ImportError: SciPy is not installed (the extra ``sparse``).
        InvalidArgumentError: an argument is invalid; or the start is outside of the bounds; or the residuals are not
            finite there, or J at any point; or the kernel draws random numbers or changes a field in a sparse layout,
            so that it cannot run again from the same state.
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
        >>> bool(result.success)
        True
    """
    scipy_optimize = require_scipy("optimize", "least_squares")
    known = set(inspect.signature(scipy_optimize.least_squares).parameters) - {*_OWN, "args", "bounds", "loss"}
    for name in options:
        if name not in known:
            raise InvalidArgumentError(
                f"{name!r} is no option of least_squares; expected one of {', '.join(sorted(known))}."
            )
        if is_complex(options[name]):  # of which SciPy drops the imaginary part
            raise InvalidArgumentError(f"{name} is {shown(options[name])}; expected real numbers.")
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise InvalidArgumentError(f"progress is {shown(progress)}; expected True, False, None or a function.")
    if format not in (None, "csr"):
        raise InvalidArgumentError(f"format is {shown(format)}; expected 'csr' or None.")
    options_of_J = checked_options(None, "auto", None, format)
    problem = _Problem(*prepared_form(kernel, params, residuals, args, options_of_J), progress)
    low, high = bounds_of(bounds, params, problem.shapes)
    start = start_within(problem.start, low, high, problem.parts)
    if "x_scale" in options:
        options["x_scale"] = scale_of(options["x_scale"], params, problem.shapes)
    try:
        result = scipy_optimize.least_squares(
            problem.residuals, start, problem.jacobian, bounds=(low, high), loss=loss, **options
        )
    except BaseException:
        problem.give_up()
        raise
    problem.finish(result.x)
    return result


class _StateAtPoint(State):
    """The state at the start, but for the parameters, which are those of a point."""

    def __init__(self, store_point: Callable[[], None]) -> None:
        super().__init__()
        self._store_point = store_point

    def restore(self) -> None:
        """Put everything back, also before J is computed in another run."""
        super().restore()
        self._store_point()


class _Problem:
    """The residuals and J as functions of one vector, each point computed once."""

    def __init__(self, plan: Plan, call: KernelCall, progress: bool | Callable[[int, float], None] | None) -> None:
        self._plan = plan
        self._call = call
        self._targets = [call.current(t) for t in plan.prepared.params]
        for target in self._targets:
            if self._call.is_value(target):
                raise InvalidArgumentError(
                    f"{target.name} is a number that is passed or captured by value, in which no solution can be "
                    "stored; put it in a field."
                )
        self._state = _StateAtPoint(self._store_point)
        self._state.reason, self._state.advice = "least_squares runs the kernels once for each point", RANDOM_BEFORE
        for target in self._targets:
            self._state.save(self._container(target))
        self.shapes = plan.start(call).parameter_shapes()
        values = [self._values(t) for t in self._targets]
        self.parts = [Part(str(t.name), s, v.dtype) for t, s, v in zip(self._targets, self.shapes, values, strict=True)]
        self.start = np.concatenate([v.astype(np.float64).reshape(-1) for v in values])
        self._progress = progress
        self._began = time.perf_counter()
        self._iterations = 0
        self._x = self.start
        self._point: np.ndarray | None = None
        self._r = np.empty(0)
        self._J: Any = None
        self._rows: list[Part] = []

    def residuals(self, x: np.ndarray) -> np.ndarray:
        self._evaluate(x)
        return self._r

    def jacobian(self, x: np.ndarray) -> Any:
        self._evaluate(x)
        refuse_rows_not_finite(self._J, self._rows, _ADVICE)
        self._tell(0.5 * float(self._r @ self._r))
        return self._J

    def finish(self, x: np.ndarray) -> None:
        """One plain run at the solution, which is in the parameters afterwards."""
        self._set(x)
        self._call.function(*self._call.given)
        self._store(x)

    def give_up(self) -> None:
        """Everything as it was."""
        self._state.undo()

    def _evaluate(self, x: np.ndarray) -> None:
        if self._point is not None and np.array_equal(x, self._point):
            return
        self._set(x)
        evaluation = self._plan.start(self._call, state=self._state)
        blocks = evaluation.blocks()
        self._r = residual_vector(evaluation)
        J = stacked(evaluation, blocks)
        self._J = J.astype(np.float64, copy=False)
        if self._point is None:
            names = [str(self._call.current(t).name) for t in self._plan.prepared.outputs]
            self._rows = [Part(n, *s) for n, s in zip(names, evaluation.output_shapes(), strict=True)]
            refuse_not_finite(self._r, self._rows, " at the start" + _ADVICE)
        self._point = x.copy()

    def _set(self, x: np.ndarray) -> None:
        self._x = x
        self._state.restore()

    def _store_point(self) -> None:
        for target in self._targets:
            self._state.save(self._container(target))  # while it holds what it did: it is changed now
        self._store(self._x)

    def _store(self, x: np.ndarray) -> None:
        at = 0
        for target, shape in zip(self._targets, self.shapes, strict=True):
            size = math.prod(shape)
            container, values = self._container(target), x[at : at + size].reshape(shape)
            values = np.array(values, self._values(target).dtype, order="C")  # a copy, of no axes too
            is_torch = backend.is_torch_tensor(container)
            backend.put_back(container, backend.torch_from_numpy(values, container.device) if is_torch else values)
            at += size

    def _container(self, target: Target) -> Any:
        return target.field if target.kind == "field" else self._call.value(target)

    def _values(self, target: Target) -> np.ndarray:
        copy = backend.copy_of(self._container(target))
        return copy.cpu().numpy() if backend.is_torch_tensor(copy) else np.asarray(copy)

    def _tell(self, cost: float) -> None:
        line = f"iteration {self._iterations}: cost {cost:.6e}, {time.perf_counter() - self._began:.2f} s"
        if self._progress is True:
            print(line, file=sys.stderr, flush=True)
        elif callable(self._progress):
            self._progress(self._iterations, cost)
        elif self._progress is None:
            logging.getLogger("taichi_ext").info(line)
        self._iterations += 1
