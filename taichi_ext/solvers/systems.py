"""Normal equations: solved by QR decomposition of a small J, Cholesky, or SciPy's LU; and inverted for covariances."""

# pyright knows no types of SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import numpy as np

from taichi_ext.errors import InvalidArgumentError
from taichi_ext.runtime.sparse.matrices import positive_factors
from taichi_ext.solvers.operator import require_scipy
from taichi_ext.solvers.parts import Part, entry_name

_FEW_NUMBERS = 2**18  # of a J that is decomposed
_ROWS = 2**10  # rows of a dense J in one product: few, so that threads do not change the order of sums
_MOST_NAMES = 4  # of entries that are not determined
FIRST_DAMPING, LEAST_DAMPING = 1e-4, 1e-12  # of JtJ
_COLUMNS = 64  # columns of a sparse matrix's inverse in one solve


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

    first_damping, least_damping, width = FIRST_DAMPING, LEAST_DAMPING, 2.0

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
    """A dense J and r; see ``System``.  A QR decomposition keeps the digits that JtJ loses.

    Attributes:
        R: of the QR decomposition of J, of shape (min(M, P + 1), P).
        count: the larger number of rows and columns of J.
    """

    first_damping = least_damping = 1e-32  # of which QR keeps the square root
    width = 1.1

    def __init__(self, J: np.ndarray, r: np.ndarray) -> None:
        self.gradient: np.ndarray = J.T @ r
        self.diagonal: np.ndarray = (J * J).sum(axis=0)
        self.count = max(J.shape)
        triangle: Any = np.linalg.qr(np.column_stack([J, r]), mode="r")
        self.R, self._r = triangle[:, :-1], triangle[:, -1]  # in the basis of Q

    def solve(self, damping: np.ndarray, fixed: np.ndarray) -> np.ndarray | None:
        """See ``System``: the least squares of ``J s + r + J fixed`` and ``sqrt(damping) s``."""
        scale, count = 1 / np.sqrt(self.diagonal + damping), len(damping)
        rows = np.column_stack([self.R * scale, self._r + self.R @ fixed])
        damped = np.column_stack([np.diag(np.sqrt(damping) * scale), np.zeros(count)])
        triangle: Any = np.linalg.qr(np.concatenate([rows, damped]), mode="r")
        try:
            return -scale * np.linalg.solve(triangle[:count, :-1], triangle[:count, -1])
        except np.linalg.LinAlgError:
            return None

    def curvature(self, step: np.ndarray) -> float:
        """See ``System``."""
        return float(np.square(self.R @ step).sum())


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
    factor = positive_factors(D @ (A + sparse.diags_array(damping)) @ D)
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


def inverse_part(system: JacobianSystem | NormalSystem, entries: np.ndarray, parts: list[Part]) -> np.ndarray:
    """Rows and columns of the inverse of JtJ; raises where the residuals do not determine all parameters.

    Columns of J are scaled to length 1.  The inverse of a dense JtJ comes from a singular value decomposition of J,
    where that is kept, else from the eigenvalues of JtJ, and that of a sparse one from its LU decomposition.
    """
    norms = np.sqrt(system.diagonal)
    _check_determined(np.flatnonzero(norms == 0), parts)
    scale, eps = 1 / norms, np.finfo(np.float64).eps
    if isinstance(system, JacobianSystem):
        values, vectors = np.linalg.svd(system.R * scale, full_matrices=False)[1:]
        if len(values) < len(norms):
            _check_determined(np.arange(len(norms)), parts)
        values, least = values**2, (eps * system.count) ** 2
    elif isinstance(system.JtJ, np.ndarray):
        values, vectors = np.linalg.eigh(system.JtJ * scale * scale[:, None])
        vectors, least = vectors.T, eps * len(norms)
    else:
        return _sparse_part(system.JtJ, scale, entries, parts)
    is_open = values <= least * values.max()
    _check_determined(np.flatnonzero((np.abs(vectors[is_open]) > 0.1).any(axis=0)), parts)
    rows = vectors[:, entries] * scale[entries]
    return (rows.T / values) @ rows


def _sparse_part(JtJ: object, scale: np.ndarray, entries: np.ndarray, parts: list[Part]) -> np.ndarray:
    D = require_scipy("sparse", "format='csr'").diags_array(scale)
    factor = positive_factors(D @ JtJ @ D)
    if factor is None:
        return _check_determined(np.arange(len(scale)), parts)
    pivots = factor.U.diagonal()
    is_open = pivots <= len(scale) * np.finfo(np.float64).eps
    _check_determined(np.sort(factor.perm_c.argsort()[np.flatnonzero(is_open)]), parts)
    part = np.empty((len(entries), len(entries)))
    for first in range(0, len(entries), _COLUMNS):
        some = entries[first : first + _COLUMNS]
        unit = np.zeros((len(scale), len(some)))
        unit[some, np.arange(len(some))] = scale[some]
        part[:, first : first + len(some)] = factor.solve(unit)[entries] * scale[entries, None]
    return (part + part.T) / 2


def _check_determined(entries: np.ndarray, parts: list[Part]) -> Any:
    if len(entries):
        names = ", ".join(entry_name(int(n), parts) for n in entries[:_MOST_NAMES])
        more = f" and {len(entries) - _MOST_NAMES} more" if len(entries) > _MOST_NAMES else ""
        raise InvalidArgumentError(
            f"J^T J is singular: the residuals do not determine {names}{more}, or not all of them at once. Leave one "
            "out of params, or add a residual that holds it."
        )
