"""Derivatives of Taichi's small decompositions and solvers, from their matrix equations rather than their algorithms.

With ``W = U^T dA V`` for A = U S V^T, and antisymmetric ``dU = U Omega_U``, ``dV = V Omega_V``:

    dS_ii = W_ii,  Omega_U - Omega_V = (W_ij - W_ji) / (s_i + s_j),  Omega_U + Omega_V = (W_ij + W_ji) / (s_j - s_i)

(J. Townsend, "Differentiating the singular value decomposition", 2016, equations 8 to 22, regrouped so that U V^T keeps
its derivative where singular values are equal.)  For a symmetric A = Q L Q^T, ``dL_ii = W_ii`` and
``Omega_ij = W_ij / (l_j - l_i)`` (M. Giles, "An extended collection of matrix derivative results", 2008, section 3.1).
For A = R P, ``R^T dA - dA^T R = Omega P + P Omega`` with ``dR = R Omega``.  For A x = b, ``A dx = db - dA x``, and
``d(A^-1) = -A^-1 dA A^-1``.

Where two singular values are equal, the vectors that belong to them are only determined up to a rotation.  It is taken
not to change, and S gets the off-diagonal entries that make up for it: U S V^T, V S V^T, U S U^T and U V^T keep their
exact derivatives there; a function of the diagonal of S alone, put between U and V, does not.  Where two eigenvalues of
a symmetric matrix are equal and the tangent would part them, that of the eigenvectors is infinite, and so it is here;
eigenvalues and their symmetric functions keep their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import taichi as ti

from taichi_ext import backend
from taichi_ext.backend import matrix_ops, ops
from taichi_ext.derivative.rules import Rule
from taichi_ext.derivative.values import Scalar, entries_of, is_active, make_tensor, primal_of, shape_of

Grid = list[list[Any]]


def _grid(x: Any) -> Grid:
    """The entries of a matrix expression, each in a variable."""
    rows, columns = backend.shape_of(x)
    kept = backend.variable(x)
    return [[backend.variable(backend.element(kept, (i, j))) for j in range(columns)] for i in range(rows)]


def _kept(x: Any) -> Any:
    return backend.variable(x) if backend.is_expr(x) else x


def _ratio(a: Any, b: Any) -> Any:
    """A / b, and 0 where b is 0."""
    one = ops.cast(1.0, backend.dtype_of(b))
    return ops.select(b == 0, one * 0, a / ops.select(b == 0, one, b))


def _tied(a: Any, b: Any) -> Any:
    """A / b, and 0 only where both are 0."""
    a, b = _kept(a), _kept(b)
    both = (a == 0) & (b == 0)
    return ops.select(both, a * 0, a / ops.select(both, b * 0 + 1, b))


def _nodes(outputs: list[Any], inputs: list[Any], differential: Callable[[int], list[Any]]) -> list[Any]:
    """Scalars for the outputs, given their partials by input n: ``differential(n)``, one per output (None for 0)."""
    active = [n for n, x in enumerate(inputs) if isinstance(x, Scalar)]
    table = {n: [p if p is None else _kept(p) for p in differential(n)] for n in active}
    nodes = []
    for k, output in enumerate(outputs):
        mine = [n for n in active if table[n][k] is not None]
        if not mine:
            nodes.append(output)
            continue
        rule = Rule("decomposition", lambda *a: None, tuple(table[n][k] for n in mine))
        node = Scalar(output, rule=rule, args=tuple(inputs[n] for n in mine))
        node.variable = output
        nodes.append(node)
    return nodes


def _antisymmetric(n: int, pair: Callable[[int, int], Any]) -> Grid:
    grid: Grid = [[None] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1, n):
            grid[i][j] = _kept(pair(i, j))
            grid[j][i] = -grid[i][j]
    return grid


def _times(a: Grid, b: Grid) -> Grid:
    """Product of two matrices whose entries may be None (zero)."""
    result: Grid = []
    for row in a:
        line = []
        for j in range(len(b[0])):
            total = None
            for k, x in enumerate(row):
                if x is not None and b[k][j] is not None:
                    term = x * b[k][j]
                    total = term if total is None else total + term
            line.append(total)
        result.append(line)
    return result


def _flat(grid: Grid) -> list[Any]:
    return [x for row in grid for x in row]


def _matrix(entries: list[Any], n: int) -> Any:
    return make_tensor(entries, (n, n))


def _svd(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    a = tracer.freeze(args[0], None)
    n = shape_of(a)[0]
    u, s, v = (_grid(x) for x in function(primal_of(a), *args[1:], **keywords))
    if not is_active(a):
        return tuple(_matrix(_flat(g), n) for g in (u, s, v))
    sums = {(i, j): _kept(s[i][i] + s[j][j]) for i in range(n) for j in range(n)}
    gaps = {(i, j): _kept(s[j][j] - s[i][i]) for i in range(n) for j in range(n)}

    def shared(w: Grid, i: int, j: int) -> Any:
        """What is left of the turning of U and V where two singular values are equal."""
        return ops.select(gaps[i, j] == 0, (w[i][j] + w[j][i]) * 0.5, w[i][j] * 0)

    def differential(entry: int) -> list[Any]:
        row, column = divmod(entry, n)
        w = [[_kept(u[row][k] * v[column][m]) for m in range(n)] for k in range(n)]
        odd = _antisymmetric(n, lambda i, j: _ratio(w[i][j] - w[j][i], sums[i, j]))
        even = _antisymmetric(n, lambda i, j: _ratio(w[i][j] + w[j][i], gaps[i, j]))
        turn_u = _combine(odd, even, 0.5)
        turn_v = _combine(odd, even, -0.5)
        ds = [[w[i][i] if i == j else shared(w, i, j) for j in range(n)] for i in range(n)]
        return _flat(_times(u, turn_u)) + _flat(ds) + _flat(_times(v, turn_v))

    nodes = _nodes(_flat(u) + _flat(s) + _flat(v), entries_of(a), differential)
    size = n * n
    return tuple(_matrix(nodes[k * size : (k + 1) * size], n) for k in range(3))


def _combine(odd: Grid, even: Grid, factor: float) -> Grid:
    """(even + odd) / 2 for a positive factor, (even - odd) / 2 for a negative one."""
    sign = 1 if factor > 0 else -1
    n = len(odd)
    return [[None if i == j else _kept((even[i][j] + odd[i][j] * sign) * 0.5) for j in range(n)] for i in range(n)]


def _sym_eig(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    a = tracer.freeze(args[0], None)
    n = shape_of(a)[0]
    values, vectors = function(primal_of(a), *args[1:], **keywords)
    kept = backend.variable(values)
    lam = [backend.variable(backend.element(kept, (i,))) for i in range(n)]
    q = _grid(vectors)
    gaps = {(i, j): _kept(lam[j] - lam[i]) for i in range(n) for j in range(n)}

    def differential(entry: int) -> list[Any]:
        row, column = divmod(entry, n)
        w = [[q[row][k] * q[column][m] for m in range(n)] for k in range(n)]
        turn = _antisymmetric(n, lambda i, j: _tied((w[i][j] + w[j][i]) * 0.5, gaps[i, j]))
        return [w[i][i] for i in range(n)] + _flat(_times(q, turn))

    nodes = _nodes(lam + _flat(q), entries_of(a), differential)
    return make_tensor(nodes[:n], (n,)), _matrix(nodes[n:], n)


def _polar(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    a = tracer.freeze(args[0], None)
    n = shape_of(a)[0]
    r, p = (_grid(x) for x in function(primal_of(a), *args[1:], **keywords))
    trace = _kept(p[0][0] + p[1][1] if n == 2 else p[0][0] + p[1][1] + p[2][2])
    if n == 3:
        shifted = [[(trace if i == j else 0) - p[i][j] for j in range(3)] for i in range(3)]
        inverse = _grid(matrix_ops.inverse(backend.tensor(_flat(shifted), (3, 3))))

    def differential(entry: int) -> list[Any]:
        row, column = divmod(entry, n)
        # M = R^T dA has one column: M[k][column] = R[row][k]
        m: Grid = [[r[row][k] if j == column else None for j in range(n)] for k in range(n)]

        def odd(i: int, j: int) -> Any:
            left = m[i][j] if m[i][j] is not None else 0
            right = m[j][i] if m[j][i] is not None else 0
            return left - right

        if n == 2:
            turn = _antisymmetric(2, lambda i, j: _ratio(_expression(odd(i, j), trace), trace))
        else:
            axis = [odd(2, 1), odd(0, 2), odd(1, 0)]
            w = [_kept(sum((inverse[i][k] * axis[k] for k in range(3)), 0)) for i in range(3)]
            turn = [[None, -w[2], w[1]], [w[2], None, -w[0]], [-w[1], w[0], None]]
        turned = _times(turn, p)
        dp = [[-turned[i][j] if m[i][j] is None else m[i][j] - turned[i][j] for j in range(n)] for i in range(n)]
        return _flat(_times(r, turn)) + _flat(dp)

    nodes = _nodes(_flat(r) + _flat(p), entries_of(a), differential)
    return _matrix(nodes[: n * n], n), _matrix(nodes[n * n :], n)


def _expression(x: Any, like: Any) -> Any:
    return x if backend.is_expr(x) else backend.constant(x, backend.dtype_of(like))


def _solve(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    a, b = tracer.freeze(args[0], None), tracer.freeze(args[1], (tracer.path, "right-hand side", tracer.line()))
    n = shape_of(a)[0]
    solution = backend.variable(function(primal_of(a), primal_of(b), *args[2:], **keywords))
    x = [backend.variable(backend.element(solution, (i,))) for i in range(n)]
    inverse = _grid(matrix_ops.inverse(primal_of(a)))

    def differential(entry: int) -> list[Any]:
        if entry >= n * n:
            return [inverse[k][entry - n * n] for k in range(n)]
        row, column = divmod(entry, n)
        return [-(inverse[k][row] * x[column]) for k in range(n)]

    return make_tensor(_nodes(x, entries_of(a) + entries_of(b), differential), (n,))


def _inverse(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """A^-1: ``d(A^-1) = -A^-1 dA A^-1``."""
    a = tracer.freeze(args[0], None)
    n = shape_of(a)[0]
    inverse = _grid(function(primal_of(a)))

    def differential(entry: int) -> list[Any]:
        row, column = divmod(entry, n)
        return [-(inverse[i][row] * inverse[column][j]) for i in range(n) for j in range(n)]

    return _matrix(_nodes(_flat(inverse), entries_of(a), differential), n)


def _eig(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """Eigenvalues of a 2 x 2 matrix in complex form: Taichi's own algorithm is differentiated."""
    from_call = keywords.get("dt", args[1] if len(args) > 1 else None)
    return tracer.call(backend.eig_function, args[0], from_call or backend.default_type(float))


def _if_active(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Apply the rule where a tangent comes in, else call the function as an ordinary kernel does."""

    def evaluate(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
        if not is_active([tracer.value_of(a) for a in args]):
            return function(*[tracer.primal(a) for a in args], **keywords)
        return rule(tracer, function, args, keywords, is_statement)

    return evaluate


SPECIAL: dict[Any, Callable[..., Any]] = {
    ti.svd: _if_active(_svd),
    ti.sym_eig: _if_active(_sym_eig),
    ti.polar_decompose: _if_active(_polar),
    ti.eig: _if_active(_eig),
    ti.solve: _if_active(_solve),
    matrix_ops.inverse: _if_active(_inverse),
}
