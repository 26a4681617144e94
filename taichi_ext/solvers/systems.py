"""Normal equations that are solved: by QR decomposition of a small J, by Cholesky, or by SciPy's LU of sparse ones."""

# pyright knows no types of SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# J is the Jacobian, and no constant.
# pyright: reportConstantRedefinition=false

from __future__ import annotations

from typing import Any

import numpy as np

from taichi_ext.runtime.sparse.matrices import symmetric_factors
from taichi_ext.solvers.extra import require_scipy

_FEW_NUMBERS = 2**18  # of a J that is decomposed
_ROWS = 2**10  # rows of a dense J in one product: few, so that threads do not change the order of sums


def system_of(J: np.ndarray, r: np.ndarray, factors: np.ndarray | None) -> JacobianSystem | NormalSystem:
    """The system of a dense J, whose rows are multiplied by factors, and residuals r in float64."""
    if J.size <= _FEW_NUMBERS:
        return JacobianSystem(rows_times(factors, J.astype(np.float64, copy=False)), r)
    return NormalSystem(*products_of(J, r, factors))


def products_of(J: np.ndarray, r: np.ndarray, factors: np.ndarray | None) -> tuple[object, np.ndarray]:
    """JtJ and Jtr of a dense J, whose rows are multiplied by factors, in float64."""
    sums = np.zeros((J.shape[1] + 1, J.shape[1] + 1))
    for first in range(0, len(J), _ROWS):
        rows = slice(first, first + _ROWS)
        part = rows_times(None if factors is None else factors[rows], J[rows].astype(np.float64, copy=False))
        part = np.column_stack([part, r[rows]])
        sums += part.T @ part
    return sums[:-1, :-1].copy(), sums[:-1, -1].copy()


def rows_times(factors: np.ndarray | None, J: Any) -> Any:
    """J, dense or CSR, with its rows multiplied by factors; None stands for 1."""
    if factors is None:
        return J
    if isinstance(J, np.ndarray):
        return factors[:, None] * J
    scaled = J.copy()
    scaled.data *= np.repeat(factors, np.diff(J.indptr))
    return scaled


class NormalSystem:
    """JtJ, dense or CSR, and Jtr; see ``System``."""

    def __init__(self, JtJ: Any, gradient: np.ndarray) -> None:
        self.JtJ, self.gradient = JtJ, gradient
        self.diagonal: np.ndarray = JtJ.diagonal().astype(np.float64)

    def solve(self, damping: np.ndarray, fixed: np.ndarray) -> np.ndarray | None:
        """See ``System``."""
        return solve_symmetric(self.JtJ, damping, -(self.gradient + self.JtJ @ fixed))

    def curvature(self, step: np.ndarray) -> float:
        """See ``System``."""
        return float(step @ (self.JtJ @ step))


class JacobianSystem:
    """A dense J and r; see ``System``.  A QR decomposition keeps the digits that JtJ loses."""

    def __init__(self, J: np.ndarray, r: np.ndarray) -> None:
        self.J, self._r = J, r
        self.gradient: np.ndarray = J.T @ r
        self.diagonal: np.ndarray = (J * J).sum(axis=0)

    def solve(self, damping: np.ndarray, fixed: np.ndarray) -> np.ndarray | None:
        """See ``System``: the least squares of ``J s + r + J fixed`` and ``sqrt(damping) s``."""
        scale = 1 / np.sqrt(self.diagonal + damping)
        Q, R = np.linalg.qr(np.concatenate([self.J * scale, np.diag(np.sqrt(damping) * scale)]))
        b = self._r + self.J @ fixed
        try:
            return scale * np.linalg.solve(R, -Q[: len(b)].T @ b)
        except np.linalg.LinAlgError:
            return None

    def curvature(self, step: np.ndarray) -> float:
        """See ``System``."""
        return float(np.square(self.J @ step).sum())


def solve_symmetric(A: Any, damping: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    """The solution of ``(A + diag(damping)) x = b``; None where the matrix is not positive definite."""
    diagonal = A.diagonal() + damping
    if not ((diagonal > 0) & np.isfinite(diagonal)).all():
        return None
    scale = 1 / np.sqrt(diagonal)
    if isinstance(A, np.ndarray):
        matrix = A * scale * scale[:, None]
        np.fill_diagonal(matrix, 1.0)
        solved = _by_cholesky(matrix, scale * b)
        return None if solved is None else scale * solved
    sparse = require_scipy("sparse", "least_squares with format='csr'")
    D = sparse.diags_array(scale)
    factor = symmetric_factors(D @ (A + sparse.diags_array(damping)) @ D)
    return None if factor is None else scale * factor.solve(scale * b)


def _by_cholesky(matrix: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    """The solution; None where the matrix is not positive definite.  NumPy has no triangular solver, but takes LU."""
    try:
        lapack = require_scipy("linalg.lapack", "")
    except ImportError:
        try:
            np.linalg.cholesky(matrix)  # which raises where the matrix is not positive definite
            return np.linalg.solve(matrix, b)
        except np.linalg.LinAlgError:
            return None
    _, solved, status = lapack.dposv(matrix, b, lower=1)
    return solved if status == 0 else None
