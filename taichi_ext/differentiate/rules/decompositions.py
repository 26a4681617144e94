"""Derivatives of Taichi's small decompositions and solvers, from their matrix equations rather than their algorithms.

With ``W = U^T dA V`` for A = U S V^T, and antisymmetric ``dU = U Omega_U``, ``dV = V Omega_V``:

    dS_ii = W_ii,  Omega_U - Omega_V = (W_ij - W_ji) / (s_i + s_j),  Omega_U + Omega_V = (W_ij + W_ji) / (s_j - s_i)

(J. Townsend, "Differentiating the singular value decomposition", 2016, equations 8 to 22, regrouped so that U V^T keeps
its derivative where singular values are equal.)  For a symmetric A = Q L Q^T, ``dL_ii = W_ii`` and
``Omega_ij = W_ij / (l_j - l_i)`` (M. Giles, "An extended collection of matrix derivative results", 2008, section 3.1).
For A = R P, ``R^T dA - dA^T R = Omega P + P Omega`` with ``dR = R Omega``.  For A x = b, ``A dx = db - dA x``, and
``d(A^-1) = -A^-1 dA A^-1``.

Equal values are told apart where a kernel is recorded (``record/decompositions.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from taichi_ext.differentiate.forms.formula import Formula, Term
from taichi_ext.program import Call, Local, Place, Read, Tensor, Value
from taichi_ext.program.build import Builder

AT_A_POINT = ("svd_at", "sym_eig_at")  # take a matrix, and constants: where its decomposition is differentiated
Grid = list[list[Any]]
Partials = Callable[[int], list[Any]]  # of all results, in order, with respect to entry n of the arguments; None for 0


def partials_of(builder: Builder, call: Call, args: list[tuple[Value, ...]]) -> Partials | None:
    """The partials of a call whose results are already computed; None for an unknown function."""
    rule = _RULES.get(call.function)
    if rule is None:
        return None
    return rule(_RuleInputs(builder, call, args))


class _RuleInputs:
    """The inputs of a rule: the results, the arguments, and formulas of their type."""

    def __init__(self, builder: Builder, call: Call, args: list[tuple[Value, ...]]) -> None:
        self.builder = builder
        self.call = call
        self.args = args
        self.formula = Formula(builder, call.results[0].dtype)
        self.n = call.results[0].shape[0]

    def entry(self, x: Any) -> Term:
        return self.formula.term(x)

    def grid(self, local: Local) -> Grid:
        rows, columns = local.shape
        return [[self.entry(Read(local, (i, j))) for j in range(columns)] for i in range(rows)]

    def vector(self, local: Local) -> list[Term]:
        return [self.entry(Read(local, (i,))) for i in range(local.shape[0])]

    def inverse(self, entries: Sequence[object], n: int, place: Place | None) -> Grid:
        """The inverse of a matrix, in a local."""
        local = Local("inverse", self.formula.dtype, (n, n), "temporary")
        values: list[Any] = [e.value if isinstance(e, Term) else e for e in entries]
        matrix = Tensor(tuple(values), (n, n))
        self.builder.emit(Call("inverse", (matrix,), (local,), place=place))
        return self.grid(local)


def _antisymmetric(n: int, pair: Callable[[int, int], Any]) -> Grid:
    grid: Grid = [[None] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1, n):
            grid[i][j] = pair(i, j).kept()
            grid[j][i] = -grid[i][j]
    return grid


def _times(a: Grid, b: Grid) -> Grid:
    """Product of two matrices whose entries may be None (zero)."""
    result: Grid = []
    for row in a:
        line = []
        for j in range(len(b[0])):
            terms = [x * b[k][j] for k, x in enumerate(row) if x is not None and b[k][j] is not None]
            line.append(sum(terms[1:], terms[0]) if terms else None)
        result.append(line)
    return result


def _flat(grid: Grid) -> list[object]:
    return [x for row in grid for x in row]


def _svd(c: _RuleInputs) -> Partials:
    n = c.n
    u, s, v = map(c.grid, c.call.results)
    sums = {(i, j): (s[i][i] + s[j][j]).kept() for i in range(n) for j in range(i + 1, n)}
    gaps = {(i, j): (s[j][j] - s[i][i]).kept() for i in range(n) for j in range(i + 1, n)}

    def differential(entry: int) -> list[object]:
        row, column = divmod(entry, n)
        w = [[(u[row][k] * v[column][m]).kept() for m in range(n)] for k in range(n)]
        odd = _antisymmetric(n, lambda i, j: (w[i][j] - w[j][i]) / sums[i, j])
        even = _antisymmetric(n, lambda i, j: (w[i][j] + w[j][i]) / gaps[i, j])
        turn_u = [[None if i == j else (even[i][j] + odd[i][j]) * 0.5 for j in range(n)] for i in range(n)]
        turn_v = [[None if i == j else (even[i][j] - odd[i][j]) * 0.5 for j in range(n)] for i in range(n)]
        ds = [[w[i][i] if i == j else None for j in range(n)] for i in range(n)]
        return _flat(_times(u, turn_u)) + _flat(ds) + _flat(_times(v, turn_v))

    return differential


def _sym_eig(c: _RuleInputs) -> Partials:
    n = c.n
    values, vectors = c.call.results
    lam, q = c.vector(values), c.grid(vectors)
    gaps = {(i, j): (lam[j] - lam[i]).kept() for i in range(n) for j in range(i + 1, n)}

    def differential(entry: int) -> list[object]:
        row, column = divmod(entry, n)
        w = [[(q[row][k] * q[column][m]).kept() for m in range(n)] for k in range(n)]
        turn = _antisymmetric(n, lambda i, j: (w[i][j] + w[j][i]) * 0.5 / gaps[i, j])
        return [w[i][i] for i in range(n)] + _flat(_times(q, turn))

    return differential


def _polar(c: _RuleInputs) -> Partials:
    n, f = c.n, c.formula
    r, p = map(c.grid, c.call.results)
    trace = reduce(operator.add, (p[i][i] for i in range(n))).kept()
    if n == 3:
        shifted = [(trace if i == j else 0) - p[i][j] for i in range(3) for j in range(3)]
        inverse = c.inverse([e.kept() for e in shifted], 3, c.call.place)

    def differential(entry: int) -> list[object]:
        row, column = divmod(entry, n)
        # M = R^T dA has one column: M[k][column] = R[row][k]
        m: Grid = [[r[row][k] if j == column else 0 for j in range(n)] for k in range(n)]
        odd = lambda i, j: f.term(0) + m[i][j] - m[j][i]  # noqa: E731
        if n == 2:
            turn = _antisymmetric(2, lambda i, j: f.ratio(odd(i, j).value or 0, trace))
        else:
            axis = [odd(2, 1), odd(0, 2), odd(1, 0)]
            w = [sum((inverse[i][k] * axis[k] for k in range(3)), f.term(0)).kept() for i in range(3)]
            turn = [[None, -w[2], w[1]], [w[2], None, -w[0]], [-w[1], w[0], None]]
        turned = _times(turn, p)
        dp = [m[i][j] - turned[i][j] for i in range(n) for j in range(n)]
        return _flat(_times(r, turn)) + dp

    return differential


def _solve(c: _RuleInputs) -> Partials:
    n = c.n
    x = c.vector(c.call.results[0])
    inverse = c.inverse(list(c.args[0]), n, c.call.place)

    def differential(entry: int) -> list[object]:
        if entry >= n * n:
            return [inverse[k][entry - n * n] for k in range(n)]
        row, column = divmod(entry, n)
        return [-(inverse[k][row] * x[column]) for k in range(n)]

    return differential


def _inverse(c: _RuleInputs) -> Partials:
    n = c.n
    inverse = c.grid(c.call.results[0])

    def differential(entry: int) -> list[object]:
        row, column = divmod(entry, n)
        return [-(inverse[i][row] * inverse[column][j]) for i in range(n) for j in range(n)]

    return differential


def _atan2(c: _RuleInputs) -> Partials:
    """Entry by entry; Taichi computes it for vectors in float32, so it stays a call on vectors."""
    first, second = ([c.entry(v).kept() for v in group] for group in c.args)
    count = max(len(first), len(second))

    def differential(entry: int) -> list[object]:
        group, is_first = (first, True) if entry < len(first) else (second, False)
        k = entry if is_first else entry - len(first)
        partials: list[Any] = [None] * count
        for n in range(count) if len(group) == 1 else [k]:
            a, b = first[n % len(first)], second[n % len(second)]
            over = 1.0 / (a * a + b * b)
            partials[n] = b * over if is_first else -(a * over)
        return partials

    return differential


_RULES: dict[str, Callable[[_RuleInputs], Partials]] = {
    "svd_at": _svd,
    "sym_eig_at": _sym_eig,
    "polar_decompose": _polar,
    "solve": _solve,
    "inverse": _inverse,
    "atan2": _atan2,
}
