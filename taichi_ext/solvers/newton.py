"""``newton``: an energy is minimised by Newton's method, with sparse second derivatives and a line search."""

# pyright knows no types of Taichi and SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# H is the Hessian, and no constant.
# pyright: reportConstantRedefinition=false

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from taichi_ext import backend
from taichi_ext.api.arguments import flatten
from taichi_ext.api.jacobian import prepared_form
from taichi_ext.api.options import check_number, is_whole
from taichi_ext.errors import InvalidArgumentError, shown, with_short_traceback
from taichi_ext.runtime.projection import positive_factors
from taichi_ext.solvers.bounds import pieces_of
from taichi_ext.solvers.extra import require_scipy
from taichi_ext.solvers.problem import Problem

_DECREASE = 1e-4  # of the energy over what its slope predicts, for a step to be accepted (Armijo)
_MOST_HALVED = 50  # times that a step is halved
_FIRST_SHIFT = 1e-8  # of the diagonal of H where it is not positive definite, over the largest entry
_MOST_SHIFT = 1e8
_MESSAGES = {
    1: "the gradient is smaller than gtol",
    2: "the step is smaller than xtol",
    0: "the largest number of iterations was reached",
    -1: "the callback asked to stop",
    -2: "no step along the direction lowers the energy",
}


class NewtonIteration(NamedTuple):
    """One line of the history.

    Attributes:
        number: of the iteration, 0 for the start.
        energy: at its end.
        gradient: the largest entry of the gradient there, of what is not fixed.
        step: the factor of the direction that the line search took.
        change: the largest entry of the step.
        is_projected: whether H was not positive definite, so that blocks of elements were projected.
    """

    number: int
    energy: float
    gradient: float
    step: float
    change: float
    is_projected: bool

    def __str__(self) -> str:
        projected = "  projected" if self.is_projected else ""
        numbers = f"{self.energy:<17.9e} {self.gradient:<10.2e} {self.step:<9.3g} {self.change:<9.2e}"
        return f"{self.number:>4}  {numbers}{projected}".rstrip()


@dataclass(frozen=True)
class NewtonResult:
    """The minimum of an energy; P numbers in the params.

    Attributes:
        x: the params as one vector of shape (P,), each raveled in C order; they hold it, too.
        energy: there.
        gradient: there, of shape (P,), also of what is fixed.
        success: whether a tolerance was reached.
        status: 1 for gtol, 2 for xtol, 0 for the largest number of iterations, -1 for the callback, -2 where no step
            lowers the energy.
        message: the reason in words.
        nfev: how often the energy alone was computed, in line searches.
        nhev: how often H was computed.
        history: a line for each iteration, the start included.
    """

    x: np.ndarray
    energy: float
    gradient: np.ndarray
    success: bool
    status: int
    message: str
    nfev: int
    nhev: int
    history: tuple[NewtonIteration, ...]

    def summary(self) -> str:
        """The iterations and the result as text."""
        lines = [_TITLE, *map(str, self.history)]
        return "\n".join([*lines, f"{self.message}; {self.nhev} Hessians, {self.nfev} energies in line searches"])


_TITLE = "   n  energy            gradient   step      change"


@with_short_traceback
def newton(
    kernel: Callable[..., Any],
    params: Any,
    energy: Any = None,
    *,
    args: tuple[Any, ...] = (),
    fixed: Any = None,
    gtol: float = 1e-8,
    xtol: float = 1e-14,
    max_iterations: int = 100,
    is_valid: Callable[[Any], bool] | None = None,
    max_step: Callable[[Any], float] | None = None,
    callback: Callable[[NewtonIteration], Any] | None = None,
    progress: bool = False,
) -> NewtonResult:
    """Minimise an energy, a number that a kernel computes, from where its params are; they hold the minimiser then.

    Newton's method: each iteration computes the energy, its gradient and its sparse Hessian H in one launch, and solves
    ``H p = -gradient`` by a sparse factorisation.  Where H is not positive definite, the blocks of the elements are
    projected (see ``hessian``, ``project="clamp"``); if that is not enough, a multiple of the identity is added.  The
    step along p is halved until the energy falls enough (Armijo's condition; Nocedal and Wright, Numerical
    Optimization, section 3.1).  The kernel must compute the same energy from the same params each time; what else it
    writes is that of one plain run at the minimiser.

    Args:
        kernel: see ``hessian``.
        params: fields and arrays, see ``hessian``.
        energy: see ``hessian``.
        args: see ``hessian``.
        fixed: what does not move, structured like ``params``: for each an array of bools of its shape and element
            shape, or of its shape alone; None means that all moves.
        gtol: largest entry of the gradient at which to stop, as a multiple of that at the start, or of 1 if that is
            smaller.
        xtol: largest entry of a step at which to stop, as a multiple of the largest of the params, or of 1.
        max_iterations: how many steps there may be.
        is_valid: called with the params of a trial point, structured like ``params``; if it returns False, the step is
            halved, whatever the energy is.
        max_step: called with the direction of a step, structured like ``params``, while the params hold the point where
            it begins; returns the largest factor that may be tried, such as the time of the first collision.
        callback: called after each iteration; iterations stop where it returns True.
        progress: whether to print a line for each iteration.

    Returns:
        See ``NewtonResult``.

    Raises:
        ImportError: SciPy is not installed (the extra ``scipy``).
        InvalidArgumentError: an argument is invalid; the energy or the gradient at the start is not finite.
        UnsupportedError: see ``hessian``.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import newton
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> x, energy = ti.field(ti.f64, shape=2), ti.field(ti.f64, shape=())
        >>> x[0], x[1] = -1.2, 1.0
        >>> @ti.kernel
        ... def rosenbrock():
        ...     energy[None] += (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
        >>> result = newton(rosenbrock, x, energy)
        >>> result.success, x.to_numpy().round(9).tolist()
        (True, [1.0, 1.0])
    """
    require_scipy("sparse.linalg", "newton")
    for name, value, meaning in (("gtol", gtol, "over the gradient at the start"), ("xtol", xtol, "over the params")):
        check_number(name, value, meaning, least=0)
    if not is_whole(max_iterations) or max_iterations < 0:
        raise InvalidArgumentError(f"max_iterations is {shown(max_iterations)}; expected a whole number of at least 0.")
    search = _Search(kernel, params, energy, args, fixed, is_valid, max_step)
    try:
        return search.run(gtol, xtol, max_iterations, callback, is_shown=progress)
    finally:
        search.problem.close()


class _Search:
    """One call: the prepared forms, and what has been computed."""

    def __init__(
        self, kernel: Any, params: Any, energy: Any, args: tuple[Any, ...], fixed: Any, is_valid: Any, max_step: Any
    ) -> None:
        options = (None, "auto", None, "csr")
        plan, call = prepared_form(kernel, params, energy, args, (None, "auto", None, None), "gradient")
        self._plain, _ = prepared_form(kernel, params, energy, args, options, "hessian")
        self._projected, _ = prepared_form(kernel, params, energy, args, options, "projected")
        self.problem = Problem(plan, call, user="newton")
        self._rebuild = plan.prepared.rebuild_params
        self._is_valid, self._max_step = is_valid, max_step
        self._free = np.flatnonzero(~self._fixed(fixed))
        self._values = self._hessians = 0

    def _fixed(self, fixed: Any) -> np.ndarray:
        shapes = self.problem.shapes
        total = sum(map(math.prod, shapes))
        if fixed is None:
            return np.zeros(total, bool)
        mask = np.concatenate([found.reshape(-1) for found in _bools(fixed, shapes)])
        if mask.all():
            raise InvalidArgumentError("fixed leaves nothing that moves; leave some entries False.")
        return mask

    def run(self, gtol: float, xtol: float, most: int, callback: Any, *, is_shown: bool) -> NewtonResult:
        x = self.problem.start.copy()
        value, gradient, H = self._point(x)
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            raise InvalidArgumentError("The energy or its gradient is not finite at the start; begin elsewhere.")
        self.problem.best = x
        size = self._size(gradient)
        goal, history, status = gtol * max(1.0, size), [NewtonIteration(0, value, size, 0.0, 0.0, False)], 0
        self._show(history, is_shown=is_shown)
        for number in range(1, most + 1):
            if size <= goal:
                break
            direction, is_projected = self._direction(x, gradient, H)
            factor, trial = self._line_search(x, value, gradient, direction)
            if trial is None:
                status = -2
                break
            change = float(np.abs(trial - x).max())
            x = self.problem.best = trial
            value, gradient, H = self._point(x)
            size = self._size(gradient)
            history.append(NewtonIteration(number, value, size, factor, change, is_projected))
            self._show(history, is_shown=is_shown)
            if callback is not None and callback(history[-1]):
                status = -1
                break
            if change <= xtol * max(1.0, float(np.abs(x).max())):
                status = 2
                break
        status = 1 if size <= goal and status == 0 else status
        counts = (self._values, self._hessians)
        return NewtonResult(x, value, gradient, status > 0, status, _MESSAGES[status], *counts, tuple(history))

    def _show(self, history: list[NewtonIteration], *, is_shown: bool) -> None:
        if is_shown:
            lines = [_TITLE, str(history[-1])] if len(history) == 1 else [str(history[-1])]
            sys.stdout.write("\n".join([*lines, ""]))

    def _size(self, gradient: np.ndarray) -> float:
        return float(np.abs(gradient[self._free]).max())

    def _point(self, x: np.ndarray, *, is_projected: bool = False) -> tuple[float, np.ndarray, Any]:
        """The energy, its gradient, and H of what moves as a CSC array."""
        evaluation: Any = self.problem.start_at(x, self._projected if is_projected else self._plain)
        evaluation.projection = "clamp" if is_projected else None
        value, gradient, blocks = evaluation.point()
        self._hessians += 1
        H = require_scipy("sparse", "newton").block_array(blocks, format="csr")
        if len(self._free) < len(gradient):
            H = H[self._free][:, self._free]
        return value, gradient, H.tocsc()

    def _direction(self, x: np.ndarray, gradient: np.ndarray, H: Any) -> tuple[np.ndarray, bool]:
        """A direction along which the energy falls, and whether blocks were projected for it."""
        factors, is_projected = positive_factors(H), False
        if factors is None:
            is_projected = True
            H = self._point(x, is_projected=True)[2]
            factors = positive_factors(H)
        shift = _FIRST_SHIFT * max(float(np.abs(H.diagonal()).max()), np.finfo(float).tiny)
        for _ in range(round(math.log10(_MOST_SHIFT / _FIRST_SHIFT))):
            if factors is not None:
                break
            eye = require_scipy("sparse", "newton").eye_array(H.shape[0], format="csc")
            factors, shift = positive_factors(H + shift * eye), 10 * shift
        direction = np.zeros_like(gradient)
        found = None if factors is None else factors.solve(-gradient[self._free])
        is_downhill = found is not None and np.isfinite(found).all() and found @ gradient[self._free] < 0
        direction[self._free] = found if is_downhill else -gradient[self._free]
        return direction, is_projected

    def _line_search(
        self, x: np.ndarray, value: float, gradient: np.ndarray, direction: np.ndarray
    ) -> tuple[float, np.ndarray | None]:
        """The factor of the direction, and the point there; None where no factor lowers the energy."""
        factor, slope = 1.0, float(gradient @ direction)
        if self._max_step is not None:
            self.problem.store(x)
            factor = min(factor, float(self._max_step(self._structured(direction))))
        for _ in range(_MOST_HALVED):
            trial = x + factor * direction
            if self._is_valid is None or self._is_valid(self._structured(trial)):
                found = self.problem.value(trial)
                self._values += 1
                # where rounding of the energy hides its change, a full Newton step is right
                if found <= value + _DECREASE * factor * slope + self.problem.noise * abs(value):
                    return factor, trial
            factor *= 0.5
        return 0.0, None

    def _structured(self, vector: np.ndarray) -> Any:
        return self._rebuild(pieces_of(vector, self.problem.shapes))


def _bools(given: Any, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """For each param an array of its shape; what is given for an element holds for all of its entries."""
    leaves = [leaf for _, leaf in flatten(given, "fixed")[0]] if isinstance(given, (list, tuple, dict)) else [given]
    if len(leaves) != len(shapes):
        raise InvalidArgumentError(f"fixed has {len(leaves)} arrays; expected one for each of {len(shapes)} params.")
    found: list[np.ndarray] = []
    for n, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True)):
        values = np.asarray(backend.as_numpy(leaf))
        if values.ndim < len(shape) and values.shape == shape[: values.ndim]:
            values = np.broadcast_to(values.reshape(*values.shape, *[1] * (len(shape) - values.ndim)), shape)
        if values.shape != shape or values.dtype.kind not in "bui":
            raise InvalidArgumentError(
                f"fixed[{n}] has shape {values.shape} and type {values.dtype}; expected bools of shape {shape}, or of "
                "its first axes."
            )
        found.append(values != 0)
    return found
