"""The covariance of a solution, from its normal equations."""

# pyright knows no types of SciPy, nor of arrays of any shape and type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# J is the Jacobian, and no constant.
# pyright: reportConstantRedefinition=false

from __future__ import annotations

from typing import Any

import numpy as np

from taichi_ext.errors import InvalidArgumentError
from taichi_ext.runtime.sparse.matrices import symmetric_factors
from taichi_ext.solvers.bounds import Part, entry_name
from taichi_ext.solvers.extra import require_scipy
from taichi_ext.solvers.systems import JacobianSystem, NormalSystem

_MOST_NAMES = 4  # of entries that are not determined
_COLUMNS = 64  # columns of a sparse matrix's inverse in one solve


def inverse_part(system: JacobianSystem | NormalSystem, entries: np.ndarray, parts: list[Part]) -> np.ndarray:
    """Rows and columns of the inverse of JtJ; raises where the residuals do not determine all parameters.

    Columns of J are scaled to length 1.  The inverse of a dense JtJ comes from a singular value decomposition of J,
    where that is kept, else from the eigenvalues of JtJ, and that of a sparse one from its LU decomposition.
    """
    norms = np.sqrt(system.diagonal)
    _check_determined(np.flatnonzero(norms == 0), parts)
    scale, eps = 1 / norms, np.finfo(np.float64).eps
    if isinstance(system, JacobianSystem):
        values, vectors = np.linalg.svd(system.J * scale, full_matrices=False)[1:]
        if len(values) < len(norms):
            _check_determined(np.arange(len(norms)), parts)
        values, least = values**2, (eps * max(system.J.shape)) ** 2
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
    factor = symmetric_factors(D @ JtJ @ D)
    if factor is None:
        return _check_determined(np.arange(len(scale)), parts)
    pivots = factor.U.diagonal()
    is_open = pivots <= len(scale) * np.finfo(np.float64).eps
    _check_determined(np.sort(factor.perm_c.argsort()[np.flatnonzero(is_open)]), parts)
    found = np.empty((len(entries), len(entries)))
    for first in range(0, len(entries), _COLUMNS):
        some = entries[first : first + _COLUMNS]
        unit = np.zeros((len(scale), len(some)))
        unit[some, np.arange(len(some))] = scale[some]
        found[:, first : first + len(some)] = factor.solve(unit)[entries] * scale[entries, None]
    return (found + found.T) / 2


def _check_determined(entries: np.ndarray, parts: list[Part]) -> Any:
    """Raise for entries that the residuals do not determine."""
    if len(entries):
        names = ", ".join(entry_name(int(n), parts) for n in entries[:_MOST_NAMES])
        more = f" and {len(entries) - _MOST_NAMES} more" if len(entries) > _MOST_NAMES else ""
        raise InvalidArgumentError(
            f"J^T J is singular: the residuals do not determine {names}{more}, or not all of them at once. Leave one "
            "out of params, or add a residual that holds it."
        )
