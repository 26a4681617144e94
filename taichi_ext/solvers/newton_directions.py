"""Directions of Newton's method: by a factorisation of the sparse Hessian, or by products with it."""

# pyright knows no types of SciPy and CVXOPT, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# H is the Hessian, and no constant.
# pyright: reportConstantRedefinition=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from taichi_ext.api.inputs.fixed import Fixed
from taichi_ext.api.plans.plan import Plan
from taichi_ext.api.runs.second_order import point_along, point_of, with_choices
from taichi_ext.errors import UnsupportedError
from taichi_ext.solvers.operator import require_scipy, required
from taichi_ext.solvers.problem import Problem

Method = Literal["splu", "cholmod", "cg"]
_SHIFTS = (1e-4, 1e-2, 1.0, 100.0)  # of the diagonal of H, over the sums of the absolute values of its rows
_MOST_SOLVES = 30  # of an inverse iteration, or of random products, for a direction of negative curvature
_LEAST_EIGENVALUE = 1e-8  # of a block on the diagonal, over its largest


class FactoredDirections:
    """Directions by a factorisation of H, whose blocks are projected where it is not positive definite.

    Args:
        problem: the energy at points.
        plain: the plan of H in format="csr".
        projected: that of H with projected blocks.
        fixed: entries that do not move.
        factorise: takes H and gives something that has ``solve``; None where H is not positive definite.

    Attributes:
        hessians: how often H was computed, or multiplied with a vector.
    """

    def __init__(
        self, problem: Problem, plain: Plan, projected: Plan, fixed: Fixed, factorise: Callable[[Any], Any]
    ) -> None:
        self._problem, self._plain, self._projected = problem, plain, projected
        self._fixed, self._factorise = fixed, factorise
        self._H: Any = None
        self.hessians = 0

    def point(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """The energy and its gradient."""
        value, gradient, self._H = self._evaluated(x, self._plain, None)
        return value, gradient

    def _evaluated(self, x: np.ndarray, plan: Plan, projection: str | None) -> tuple[float, np.ndarray, Any]:
        value, gradient, blocks = point_of(with_choices(self._problem.start_at(x, plan), projection, self._fixed))
        self.hessians += 1
        is_single = len(blocks) == 1
        return value, gradient, blocks[0][0] if is_single else require_scipy("sparse", "newton").block_array(blocks)

    def directions(self, x: np.ndarray, gradient: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
        """Directions from the last point, each more cautious, and whether H was not positive definite there."""
        H, downhill = self._H, self._fixed.free(-gradient)
        factors = self._factorise(H)
        if factors is not None:
            yield factors.solve(downhill), False
        prepared = self._plain.prepared
        if not (prepared.dense_reason or prepared.energy_intermediates):  # with blocks of elements
            H = self._evaluated(x, self._projected, "abs")[2]
        for shift in _SHIFTS:
            factors = self._factorise(self._shifted(H, shift))
            if factors is not None:
                yield factors.solve(downhill), True
        yield downhill, True

    def _shifted(self, H: Any, shift: float) -> Any:
        """A matrix plus a share of the sums of H's rows on its diagonal: with all of it, H is semidefinite."""
        diagonal = require_scipy("sparse", "newton").diags_array(shift * _row_sums(self._H))
        return (H + diagonal).tocsr()

    def escape(self, x: np.ndarray) -> tuple[np.ndarray, float] | None:
        """A direction of negative curvature, by inverse iteration, and that; None where H is positive semidefinite."""
        H, shift = self._H, self._problem.noise
        if self._factorise(self._shifted(H, shift)) is not None:
            return None
        factors: Any = None
        sums = _row_sums(H)
        while factors is None and shift < _SHIFTS[-1]:
            shift *= 10
            factors = self._factorise(self._shifted(H, shift))
        along = self._fixed.free(np.random.default_rng(0).standard_normal(len(x)))
        if factors is None:
            return None
        for _ in range(_MOST_SOLVES):
            along = factors.solve(sums * along)
            along /= np.abs(along).max()
        curvature = float(along @ (H @ along))
        return (along, curvature) if curvature < 0 else None


class ConjugateDirections:
    """Directions by conjugate gradients on products with H, which end where H is not positive definite.

    Nocedal and Wright, Numerical Optimization, algorithm 7.1, with preconditioning as in algorithm 5.3.

    Args:
        problem: the energy at points.
        plan: that of products with H.
        projected: that of H in format="csr" with projected blocks, of which those on the diagonal are kept.
        fixed: entries that do not move.

    Attributes and methods are those of ``FactoredDirections``.
    """

    def __init__(self, problem: Problem, plan: Plan, projected: Plan, fixed: Fixed) -> None:
        self._problem, self._plan, self._fixed = problem, plan, fixed
        self._projected: Plan | None = projected  # None where the energy has no blocks of elements
        self.hessians = 0

    def point(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient, _ = self._along(x, np.zeros_like(x))
        return value, gradient

    def _along(self, x: np.ndarray, direction: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        self.hessians += 1
        return point_along(with_choices(self._problem.start_at(x, self._plan), None, self._fixed), direction)

    def directions(self, x: np.ndarray, gradient: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
        downhill, precondition = self._fixed.free(-gradient), self._preconditioner(x)
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
        right = self._fixed.free(np.random.default_rng(0).standard_normal(len(x)))
        bent = self._solve(x, right, self._preconditioner(x), 1e-4 * float(right @ right))[1]
        if bent is None:
            return None
        along, curvature = bent
        is_rounding = curvature > -self._problem.noise * float(np.abs(along) @ np.abs(self._along(x, along)[2]))
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
        if self._projected is None:
            return np.copy
        evaluation = with_choices(self._problem.start_at(x, self._projected), "clamp", self._fixed)
        try:
            _, _, blocks = point_of(evaluation)
        except UnsupportedError:  # no sum over elements
            self._projected = None
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
        found = self._cvxopt.matrix(right)
        self._cholmod.solve(self._symbolic, found)
        return np.array(found).reshape(right.shape)
