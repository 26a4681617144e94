"""``newton``: an energy is minimised by Newton's method, with sparse second derivatives and a line search.

Directions come from a factorisation of the sparse Hessian, or from products with it.
"""

# pyright knows no types of Taichi, SciPy and CVXOPT, nor of arrays of any shape and type; H is no constant.
# pyright: reportConstantRedefinition=false, reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from taichi_ext.api.inputs.fixed import Fixed
from taichi_ext.api.inputs.options import (
    Options,
    check_count,
    check_flag,
    check_function,
    check_number,
    checked_choice,
    is_real,
)
from taichi_ext.api.jacobian import prepared_form
from taichi_ext.api.plans.plan import Plan
from taichi_ext.api.runs.second_order import point_along, point_of, with_choices
from taichi_ext.errors import InvalidArgumentError, UnsupportedError, shown, with_short_traceback
from taichi_ext.runtime.sparse.matrices import positive_factors
from taichi_ext.solvers.operator import require_scipy, required
from taichi_ext.solvers.parts import pieces_of
from taichi_ext.solvers.problem import Problem

# Directions: by a factorisation of the sparse Hessian, or by products with it.

Method = Literal["splu", "cholmod", "cg"]
_SHIFTS = (1e-4, 1e-2, 1.0, 100.0)  # of the diagonal of H, over the sums of the absolute values of its rows
_MOST_SOLVES = 30  # of an inverse iteration, or of random products, for a direction of negative curvature
_LEAST_EIGENVALUE = 1e-8  # of a block on the diagonal, over its largest


@dataclass(eq=False)
class FactoredDirections:
    """Directions by a factorisation of H, whose blocks are projected where it is not positive definite."""

    problem: Problem  # the energy at points
    plain: Plan  # of H in format="csr"
    projected: Plan  # of H with projected blocks
    fixed: Fixed  # entries that do not move
    factorise: Callable[[Any], Any]  # gives something that has ``solve``; None where H is not positive definite
    hessians: int = 0  # how often H was computed, or multiplied with a vector
    _H: Any = None

    def point(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """The energy and its gradient."""
        value, gradient, self._H = self._evaluated(x, self.plain, None)
        return value, gradient

    def _evaluated(self, x: np.ndarray, plan: Plan, projection: str | None) -> tuple[float, np.ndarray, Any]:
        value, gradient, blocks = point_of(with_choices(self.problem.start_at(x, plan), projection, self.fixed))
        self.hessians += 1
        is_single = len(blocks) == 1
        return value, gradient, blocks[0][0] if is_single else require_scipy("sparse", "newton").block_array(blocks)

    def directions(self, x: np.ndarray, gradient: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
        """Directions from the last point, each more cautious, and whether H was not positive definite there."""
        H, downhill = self._H, self.fixed.free(-gradient)
        factors = self.factorise(H)
        if factors is not None:
            yield factors.solve(downhill), False
        prepared = self.plain.prepared
        if not (prepared.sparse.dense_reason or prepared.sparse.of_energy):  # with blocks of elements
            H = self._evaluated(x, self.projected, "abs")[2]
        for shift in _SHIFTS:
            factors = self.factorise(self._shifted(H, shift))
            if factors is not None:
                yield factors.solve(downhill), True
        yield downhill, True

    def _shifted(self, H: Any, shift: float) -> Any:
        """A matrix plus a share of the sums of H's rows on its diagonal: with all of it, H is semidefinite."""
        diagonal = require_scipy("sparse", "newton").diags_array(shift * _row_sums(self._H))
        return (H + diagonal).tocsr()

    def escape(self, x: np.ndarray) -> tuple[np.ndarray, float] | None:
        """A direction of negative curvature, by inverse iteration, and that; None where H is positive semidefinite."""
        H, shift = self._H, self.problem.noise
        if self.factorise(self._shifted(H, shift)) is not None:
            return None
        factors: Any = None
        sums = _row_sums(H)
        while factors is None and shift < _SHIFTS[-1]:
            shift *= 10
            factors = self.factorise(self._shifted(H, shift))
        along = self.fixed.free(np.random.default_rng(0).standard_normal(len(x)))
        if factors is None:
            return None
        for _ in range(_MOST_SOLVES):
            along = factors.solve(sums * along)
            along /= np.abs(along).max()
        curvature = float(along @ (H @ along))
        return (along, curvature) if curvature < 0 else None


@dataclass(eq=False)
class ConjugateDirections:
    """Directions by conjugate gradients on products with H, which end where H is not positive definite.

    Nocedal and Wright, Numerical Optimization, algorithm 7.1, with preconditioning as in algorithm 5.3.
    Methods are those of ``FactoredDirections``.
    """

    problem: Problem  # the energy at points
    plan: Plan  # of products with H
    projected: Plan | None  # of H with projected blocks in format="csr", for its diagonal; None where it has no blocks
    fixed: Fixed  # entries that do not move
    hessians: int = 0  # how often H was computed, or multiplied with a vector

    def point(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient, _ = self._along(x, np.zeros_like(x))
        return value, gradient

    def _along(self, x: np.ndarray, direction: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        self.hessians += 1
        return point_along(with_choices(self.problem.start_at(x, self.plan), None, self.fixed), direction)

    def directions(self, x: np.ndarray, gradient: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
        downhill, precondition = self.fixed.free(-gradient), self._preconditioner(x)
        size = float(downhill @ downhill)
        step, bent = self._solve(x, downhill, precondition, size * min(0.25, math.sqrt(size)))
        if bent is None:
            yield step, False
        else:
            yield (step if step.any() else bent[0]), True
        yield precondition(downhill), True
        yield downhill, True

    def escape(self, x: np.ndarray) -> tuple[np.ndarray, float] | None:
        """By conjugate gradients, for a random right side."""
        right = self.fixed.free(np.random.default_rng(0).standard_normal(len(x)))
        bent = self._solve(x, right, self._preconditioner(x), 1e-4 * float(right @ right))[1]
        if bent is None:
            return None
        along, curvature = bent
        is_rounding = curvature > -self.problem.noise * float(np.abs(along) @ np.abs(self._along(x, along)[2]))
        return None if is_rounding else bent

    def _solve(
        self, x: np.ndarray, residual: np.ndarray, precondition: Callable[[np.ndarray], np.ndarray], goal: float
    ) -> tuple[np.ndarray, tuple[np.ndarray, float] | None]:
        """The solution for a right side, up to the square of its residual; and what ended it before, if H is bent."""
        step, along = np.zeros_like(x), precondition(residual)
        square = float(residual @ along)
        for _ in range(2 * len(x)):
            if residual @ residual <= goal:
                break
            product = self._along(x, along)[2]
            curvature = float(along @ product)
            if not curvature > 0:
                return step, (along, curvature)
            factor = square / curvature
            step, residual = step + factor * along, residual - factor * product
            towards = precondition(residual)
            square, before = float(residual @ towards), square
            along = towards + (square / before) * along
        return step, None

    def _preconditioner(self, x: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """The inverse of the blocks on the diagonal of H, one for each element of a param."""
        if self.projected is None:
            return np.copy
        evaluation = with_choices(self.problem.start_at(x, self.projected), "clamp", self.fixed)
        try:
            _, _, blocks = point_of(evaluation)
        except UnsupportedError:  # no sum over elements
            self.projected = None
            return np.copy
        self.hessians += 1
        sizes = [param.element for param in evaluation.layout.params]
        inverses = [_inverse_blocks(row[n], sizes[n]) for n, row in enumerate(blocks)]
        ends = np.cumsum([len(inverse) * size for inverse, size in zip(inverses, sizes, strict=True)])

        def multiply(vector: np.ndarray) -> np.ndarray:
            parts = zip(inverses, np.split(vector, ends[:-1]), strict=True)
            return np.concatenate([(m @ v.reshape(len(m), -1, 1)).reshape(-1) for m, v in parts])

        return multiply


Directions = FactoredDirections | ConjugateDirections


def _row_sums(H: Any) -> np.ndarray:
    """The sums of the absolute values of rows; 1 for rows of zeros."""
    sums = np.asarray(abs(H).sum(axis=1)).reshape(-1)
    return np.where(sums > 0, sums, 1.0)


def _inverse_blocks(H: Any, size: int) -> np.ndarray:
    """The inverses of the blocks on the diagonal of a matrix, whose eigenvalues are at least a part of the largest."""
    entries = H.tocoo()
    row, column = entries.row, entries.col
    is_own = row // size == column // size
    blocks = np.zeros((H.shape[0] // size, size, size))
    np.add.at(blocks, (row[is_own] // size, row[is_own] % size, column[is_own] % size), entries.data[is_own])
    blocks[~np.isfinite(blocks).all(axis=(1, 2))] = np.eye(size)
    values, vectors = np.linalg.eigh(blocks)
    largest = values[:, -1:]
    values = np.where(largest > 0, np.maximum(values, _LEAST_EIGENVALUE * largest), 1.0)
    return (vectors / values[:, None, :]) @ vectors.transpose(0, 2, 1)


class Cholmod:
    """Factors by CHOLMOD, whose order of the unknowns is found once for each pattern (extra ``cholmod``)."""

    def __init__(self) -> None:
        user = "newton(method='cholmod')"
        self._cvxopt, self._cholmod = required("cvxopt", user), required("cvxopt.cholmod", user)
        self._pattern: tuple[np.ndarray, np.ndarray] | None = None

    def __call__(self, H: Any) -> Any:
        """A factor with ``solve``; None where H is not positive definite."""
        pattern = self._pattern
        if pattern is None or not all(map(np.array_equal, pattern, (H.indptr, H.indices))):
            self._begin(H)
        # rows of the upper triangle are columns of the lower one
        self._matrix.V = self._cvxopt.matrix(np.ascontiguousarray(H.data[self._lower], np.float64))
        try:
            self._cholmod.numeric(self._matrix, self._symbolic)
        except ArithmeticError:
            return None
        return self

    def _begin(self, H: Any) -> None:
        self._pattern = (H.indptr.copy(), H.indices.copy())
        rows = np.repeat(np.arange(H.shape[0]), np.diff(H.indptr))
        self._lower = np.flatnonzero(H.indices >= rows)
        places = (H.indices[self._lower].astype(int), rows[self._lower].astype(int))
        self._matrix = self._cvxopt.spmatrix(1.0, *map(self._cvxopt.matrix, places), H.shape)
        self._symbolic = self._cholmod.symbolic(self._matrix)

    @property
    def pivots(self) -> np.ndarray:
        return np.square(np.array(self._cholmod.diag(self._symbolic)).reshape(-1))

    def solve(self, right: np.ndarray, trans: str = "N") -> np.ndarray:
        """The solution of the last matrix, which is symmetric, for one right-hand side or for columns of them."""
        solution = self._cvxopt.matrix(right)
        self._cholmod.solve(self._symbolic, solution)
        return np.array(solution).reshape(right.shape)


# The iteration, and its line search.

_DECREASE = 1e-4  # least ratio of the energy's decrease to that predicted by its slope (Armijo)
_MOST_HALVED = 50  # times that a step is halved
_FEW_HALVED = 12  # before a more cautious direction is tried
_ESCAPE = 0.1  # first step from a saddle or maximum, over the largest of the params or 1
_MESSAGES = {
    1: "the gradient is smaller than gtol",
    2: "the step is smaller than xtol",
    0: "the largest number of iterations was reached",
    -1: "the callback asked to stop",
    -2: "no step lowers the energy by more than its rounding, or max_step or is_valid leave none",
}


class NewtonIteration(NamedTuple):
    """One line of the history.

    Attributes:
        number: of the iteration, 0 for the start.
        energy: at its end.
        gradient: the largest entry of the gradient there, without fixed entries.
        step: the factor of the direction that the line search took.
        change: the largest entry of the step.
        is_projected: whether H was not positive definite, so that blocks of elements were projected, or conjugate
            gradients ended.
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


@dataclass(frozen=True, repr=False)
class NewtonResult:
    """The minimum of an energy; P numbers in the params.

    Attributes:
        x: the params as one vector of shape (P,), each raveled in C order; they hold it, too.
        energy: there.
        gradient: there, of shape (P,), including fixed entries.
        success: whether a tolerance was reached.
        status: 1 for gtol, 2 for xtol, 0 for the largest number of iterations, -1 for the callback, -2 where no step
            lowers the energy by more than its rounding, or ``max_step`` or ``is_valid`` leave none.
        message: the reason in words.
        nfev: how often the energy alone was computed, in line searches.
        nhev: how often H was computed, or multiplied with a vector (``method="cg"``).
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

    __str__ = __repr__ = summary


_TITLE = "   n  energy            gradient   step      change"


@with_short_traceback
def newton(
    kernel: Callable[..., object],
    params: object,
    energy: object = None,
    *,
    args: tuple[object, ...] = (),
    fixed: object = None,
    method: Method = "splu",
    gtol: float = 1e-8,
    xtol: float = 1e-14,
    max_iterations: int = 100,
    is_valid: Callable[[object], bool] | None = None,
    max_step: Callable[[object], float] | None = None,
    callback: Callable[[NewtonIteration], object] | None = None,
    progress: bool = False,
) -> NewtonResult:
    """Minimise an energy, a number that a kernel computes, from where its params are; they hold the minimiser then.

    Newton's method: each iteration computes the energy, its gradient and its sparse Hessian H in one launch, and solves
    ``H p = -gradient`` by a sparse factorisation.  The step along p is halved until the energy falls enough (Armijo's
    condition; Nocedal and Wright, Numerical Optimization, section 3.1).  Where H is not positive definite, or no such
    step is found, the blocks of the elements are projected (see ``hessian``, ``project="abs"``) and a diagonal is
    added, more and more of it, up to a step along the gradient.  Where the gradient vanishes and H has a negative
    eigenvalue, as at saddles and maxima, a step along its eigenvector follows.  The kernel must compute the same energy
    from the same params each time; its other outputs are those of one plain run at the minimiser.

    Args:
        kernel, energy, args: see ``hessian``.
        params: fields and arrays, see ``hessian``.
        fixed: entries that do not move, structured like ``params``: for each an array of bools of its shape and
            element shape, or of its shape alone, or integer indices along its first axis; None means that all move.
        method: how steps are found: "splu" factorises H by SciPy's SuperLU, "cholmod" by CHOLMOD (extra ``cholmod``),
            whose order of the unknowns is found once for each pattern; "cg" keeps of H the diagonal blocks of its
            elements: conjugate gradients on products with H, preconditioned by these (Nocedal and Wright, algorithm
            7.1), which end where H is not positive definite.
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
        ImportError: SciPy is not installed (the extra ``scipy``), or CVXOPT (the extra ``cholmod``).
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
        check_number(name, value, meaning, least=0, is_optional=False)
    check_function("is_valid", is_valid, "the params")
    check_function("max_step", max_step, "a direction")
    check_function("callback", callback, "a NewtonIteration")
    check_count("max_iterations", max_iterations)
    check_flag("progress", progress)
    checked_choice("method", method, get_args(Method))
    prepared = partial(prepared_form, kernel, params, energy, args)
    plan, call = prepared(Options(), "gradient")
    problem = Problem(plan, call, user="newton")
    try:
        mask = Fixed(fixed, problem.shapes)
        free = ~mask.mask
        if not free.size:
            raise InvalidArgumentError("params have no entries, so newton has nothing to move.")
        if not free.any():
            raise InvalidArgumentError("fixed leaves nothing that moves; leave some entries False.")
        plain, projected = (prepared(Options(format="csr"), use)[0] for use in ("hessian", "projected"))
        directions: Directions
        if method == "cg":
            directions = ConjugateDirections(problem, prepared(Options(), "hvp")[0], projected, mask)
        else:
            factorise = positive_factors if method == "splu" else Cholmod()
            directions = FactoredDirections(problem, plain, projected, mask, factorise)
        search = _Search(problem, directions, plan.prepared.question.rebuild_params, is_valid, max_step)
        return search.run(free, gtol, xtol, max_iterations, callback, is_shown=progress)
    finally:
        problem.close()


class _Search:
    """One call: the energy at points, the directions, and how often the energy alone was computed."""

    def __init__(self, problem: Problem, directions: Directions, rebuild: Any, is_valid: Any, max_step: Any) -> None:
        self._problem, self._directions, self._rebuild = problem, directions, rebuild
        self._is_valid, self._max_step = is_valid, max_step
        self._values = 0

    def run(
        self, free: np.ndarray, gtol: float, xtol: float, most: int, callback: Any, *, is_shown: bool
    ) -> NewtonResult:
        x = self._problem.start.copy()
        value, gradient = self._directions.point(x)
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            raise InvalidArgumentError("The energy or its gradient is not finite at the start; begin elsewhere.")
        self._problem.best = x
        size = _largest(gradient, free)
        goal, history, status = gtol * max(1.0, size), [NewtonIteration(0, value, size, 0.0, 0.0, False)], 0
        self._show(history, is_shown=is_shown)
        for number in range(1, most + 1):
            if size <= goal or status == 2:
                factor, trial = self._escape(x, value, gradient)
                if trial is None:
                    break
                status, is_projected = 0, True
            else:
                factor, trial, is_projected = self._step(x, value, gradient)
            if trial is None:
                status = -2
                break
            change = float(np.abs(trial - x).max())
            x = self._problem.best = trial
            value, gradient = self._directions.point(x)
            size = _largest(gradient, free)
            history.append(NewtonIteration(number, value, size, factor, change, is_projected))
            self._show(history, is_shown=is_shown)
            if callback is not None and callback(history[-1]):
                status = -1
                break
            if change <= xtol * max(1.0, float(np.abs(x).max())):
                status = 2
        status = 1 if size <= goal and status == 0 else status
        counts = (self._values, self._directions.hessians)
        return NewtonResult(x, value, gradient, status > 0, status, _MESSAGES[status], *counts, tuple(history))

    def _show(self, history: list[NewtonIteration], *, is_shown: bool) -> None:
        if is_shown:
            lines = [_TITLE, str(history[-1])] if len(history) == 1 else [str(history[-1])]
            sys.stdout.write("\n".join([*lines, ""]))

    def _step(self, x: np.ndarray, value: float, gradient: np.ndarray) -> tuple[float, np.ndarray | None, bool]:
        """The factor of a direction, the point there, None where the energy falls along none, and how it was found."""
        direction, factor, trial, is_projected = -gradient, 0.0, None, True
        for direction, is_projected in self._directions.directions(x, gradient):
            slope = float(gradient @ direction)
            if np.isfinite(direction).all() and slope < 0:
                factor, trial = self._line_search(x, value, direction, (slope, 0.0), 1.0, _FEW_HALVED)
                if trial is not None:
                    return factor, trial, is_projected
        slope = float(gradient @ direction)
        return *self._line_search(x, value, direction, (slope, 0.0), 0.5**_FEW_HALVED, _MOST_HALVED), True

    def _escape(self, x: np.ndarray, value: float, gradient: np.ndarray) -> tuple[float, np.ndarray | None]:
        """A step along negative curvature; without a point where there is none, as at a minimum."""
        step = self._directions.escape(x)
        if step is None:
            return 0.0, None
        direction, curvature = step
        direction = direction if gradient @ direction <= 0 else -direction
        first = _ESCAPE * max(1.0, float(np.abs(x).max())) / float(np.abs(direction).max())
        for along in (direction, -direction):
            factor, trial = self._line_search(x, value, along, (0.0, curvature), first, _MOST_HALVED)
            if trial is not None:
                return factor, trial
        return 0.0, None

    def _line_search(
        self, x: np.ndarray, value: float, direction: np.ndarray, model: tuple[float, float], factor: float, most: int
    ) -> tuple[float, np.ndarray | None]:
        """The factor of the direction, halved so often at most, and the point there; None where the energy is higher.

        ``model`` is the slope and the curvature of the energy along the direction.
        """
        slope, curvature = model
        if self._max_step is not None:
            self._problem.store(x)
            longest = self._max_step(self._structured(direction))
            if not (is_real(longest) and longest >= 0):
                raise InvalidArgumentError(
                    f"max_step returned {shown(longest)}; expected the factor of a step, at least 0."
                )
            factor = min(factor, float(longest))
        # where rounding of the energy hides its change, a full Newton step is right
        noise = self._problem.noise * abs(value) if slope else 0.0
        for _ in range(most if factor else 0):
            trial = x + factor * direction
            if self._is_allowed(trial):
                energy = self._problem.value(trial)
                self._values += 1
                change = factor * slope + 0.5 * factor**2 * curvature
                if -np.inf < energy <= value + _DECREASE * change + noise and (slope or energy < value):
                    return factor, trial
            factor *= 0.5
        return 0.0, None

    def _is_allowed(self, trial: np.ndarray) -> bool:
        if self._is_valid is None:
            return True
        answer = self._is_valid(self._structured(trial))
        if not isinstance(answer, (bool, np.bool_)):
            raise InvalidArgumentError(f"is_valid returned {shown(answer)}; expected True or False.")
        return bool(answer)

    def _structured(self, vector: np.ndarray) -> Any:
        return self._rebuild(pieces_of(vector, self._problem.shapes))


def _largest(gradient: np.ndarray, free: np.ndarray) -> float:
    return float(np.abs(gradient[free]).max())
