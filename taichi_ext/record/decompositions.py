"""``ti.svd`` and ``ti.sym_eig``: derivatives at a matrix whose singular values, or eigenvalues, are apart.

Programs read the diagonal of S alone. Where two singular values are equal, the derivative of ``U f(S) V^T`` has
f'(s) beside the diagonal, the limit of ``(f(s_i) - f(s_j)) / (s_i - s_j)``. So everything that is computed from the
values and vectors is computed twice: as it is, and with tangents from values that are at least a step apart. Where
both meet memory, the value is the first, and the tangent that of the second. The step balances what J changes over it,
in proportion to it, with the rounding of such a quotient; for second derivatives with that of a quotient of quotients.
"""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportOptionalCall=false

from typing import Any

import taichi_ext.program as ir
from taichi_ext import backend
from taichi_ext.backend import ti
from taichi_ext.errors import UnsupportedError
from taichi_ext.record.assignments import declare
from taichi_ext.record.construct import inline_call
from taichi_ext.record.effects import kept_call
from taichi_ext.record.handles import group_of, value_of
from taichi_ext.record.operations import cast
from taichi_ext.record.recording import Recording
from taichi_ext.record.rules import stopped
from taichi_ext.record.twins import AT

_PAIRS = {2: ((0, 1),), 3: ((0, 1), (0, 2), (1, 2))}
_ASCENDING = backend.ASCENDING_EIGENVALUES
_STEPS = {ir.F64: (2.0**-26, 2.0**-17), ir.F32: (2.0**-11.5, 2.0**-7.7)}  # relative; for J, for H


@ti.func
def _apart(values, step, is_signed: ti.template()):
    """Values in descending order (``is_signed``: else of size), moved up until they are a step apart.

    The step is relative to the largest eigenvalue, since functions of them may be smooth at 0 (``exp``), and to the
    singular value itself, since those of matrices are not (``log``).
    """
    size = ti.abs(values).max()
    size = ti.select(size > 0.0, size, 1.0)
    for k in ti.static(range(values.n - 2, -1, -1)):
        if ti.static(is_signed):
            values[k] = ti.max(values[k], values[k + 1] + step * size)
        else:
            after = ti.abs(values[k + 1])
            after += step * ti.max(after, step * size)
            if ti.abs(values[k]) < after:
                values[k] = ti.select(values[k] < 0.0, -after, after)
    return values


@ti.func
def _ties(given, apart):
    """1 for each pair of neighbours whose distance was changed, else 0; then for those of opposite signs."""
    n = ti.static(given.n)
    ties = ti.Vector([0.0 for _ in ti.static(range(2 * n - 2))])
    for k in ti.static(range(n - 1)):
        sign = ti.select(given[k] * given[k + 1] < 0.0, -1.0, 1.0)
        gap = ti.abs(apart[k] - sign * apart[k + 1])
        is_tie = ti.abs(ti.abs(given[k] - sign * given[k + 1]) - gap) > 1e-3 * gap
        ties[k] = ti.select(is_tie and sign > 0.0, 1.0, 0.0)
        ties[n - 1 + k] = ti.select(is_tie and sign < 0.0, 1.0, 0.0)
    return ties


@ti.func
def _singular_values(S, step):
    n = ti.static(S.n)
    given = ti.Vector([S[k, k] for k in ti.static(range(n))])
    values = _apart(given, step, False)
    matrix = ti.Matrix([[values[i] if i == j else 0.0 for j in ti.static(range(n))] for i in ti.static(range(n))])
    return matrix, _ties(given, values)


@ti.func
def _identity(A):
    one = 0.0 * A
    for k in ti.static(range(A.n)):
        one[k, k] = 1.0
    return one


@ti.func
def _eigenvectors(A, L, Q, step):
    """Eigenvalues that are apart, and orthogonal vectors, by Jacobi's rotations, in the order and with the signs of Q.

    Those of Taichi 1.7.4 are not orthogonal where eigenvalues are close, or A is diagonal. With the ties, and at last
    1 where that is so.
    """
    n = ti.static(A.n)
    D = _identity(A)
    for k in ti.static(range(n)):
        D[k, k] = L[k]
    residual = ti.abs(0.5 * (A + A.transpose()) @ Q - Q @ D).sum() / ti.max(ti.abs(L).max(), 1e-30)
    is_wrong = ti.select(residual + ti.abs(Q.transpose() @ Q - _identity(A)).sum() < 100.0 * step, 0.0, 1.0)
    B, V = 0.5 * (A + A.transpose()), _identity(A)
    for _ in range(10):
        for p, q in ti.static(_PAIRS[n]):
            if ti.abs(B[p, q]) > 1e-16 * (ti.abs(B[p, p]) + ti.abs(B[q, q])):
                tau = 0.5 * (B[q, q] - B[p, p]) / B[p, q]
                t = ti.select(tau < 0.0, -1.0, 1.0) / (ti.abs(tau) + ti.sqrt(1.0 + tau * tau))
                c = 1.0 / ti.sqrt(1.0 + t * t)
                turn = _identity(A)
                turn[p, p], turn[q, q], turn[p, q], turn[q, p] = c, c, t * c, -t * c
                B, V = turn.transpose() @ B @ turn, V @ turn
    values = ti.Vector([B[k, k] for k in ti.static(range(n))])
    for p, q in ti.static(_PAIRS[n]):  # in descending order
        if values[p] < values[q]:
            values[p], values[q] = values[q], values[p]
            for i in ti.static(range(n)):
                V[i, p], V[i, q] = V[i, q], V[i, p]
    given = values
    values = _apart(values, step, True)
    ties = _ties(given, values)
    for k in ti.static(range(n // 2 if n in _ASCENDING else 0)):
        m = ti.static(n - 1 - k)
        values[k], values[m] = values[m], values[k]
        for i in ti.static(range(n)):
            V[i, k], V[i, m] = V[i, m], V[i, k]
    for k in ti.static(range(n)):
        along = 0.0
        for i in ti.static(range(n)):
            along += V[i, k] * Q[i, k]
        if along < 0.0:
            for i in ti.static(range(n)):
                V[i, k] = -V[i, k]
    facts = ti.Vector([is_wrong for _ in ti.static(range(n))])
    for k in ti.static(range(n - 1)):
        facts[k] = ties[ti.static(n - 2 - k if n in _ASCENDING else k)]
    return values, V, facts


def decomposition(r: Recording, matrix: object, dt: object = None, *, function: Any) -> object:
    """``ti.svd`` or ``ti.sym_eig``: a call without tangents, and one whose results have them."""
    kind = () if dt is None else (dt,)
    fixed: Any = stopped(r, value_of(matrix))
    if fixed.shape[0] not in _PAIRS:  # Quadrants has them
        raise UnsupportedError(
            f"{function.__name__} has a derivative for matrices of 2 and 3 rows; this has {fixed.shape[0]}."
        )
    parts: Any = kept_call(r, fixed, *kind, function=function)
    results, dtype = declare(r, function.__name__, parts), parts[0].base.dtype
    step = ir.Const(_STEPS.get(dtype, _STEPS[ir.F32])[r.order - 1], dtype)

    def own(func: Any, *args: object) -> Any:
        return inline_call(r, backend.taichi_func(func), [*args, step], {})

    if function is ti.svd:
        apart, facts = own(_singular_values, parts[1])
        at: Any = parts[0], apart, parts[2]
    else:
        *at, facts = own(_eigenvectors, fixed, *parts)
    locals_ = tuple(ir.Local(f"{x.base.name}_at", dtype, x.shape, "temporary") for x in results)
    kept = (cast(r, x, backend.named_type(dtype.name)) for x in (*at, facts))
    args = (value_of(matrix), *kept, *map(value_of, results))
    r.add(ir.Call(function.__name__ + AT, tuple(map(group_of, args)), locals_, place=r.place()))
    return results
