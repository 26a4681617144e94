"""Derivatives of Taichi's small decompositions and solvers, from their matrix equations rather than their algorithms.

With ``W = U^T dA V`` for A = U S V^T, and antisymmetric ``dU = U Omega_U``, ``dV = V Omega_V``:

    dS_ii = W_ii,  Omega_U - Omega_V = (W_ij - W_ji) / (s_i + s_j),  Omega_U + Omega_V = (W_ij + W_ji) / (s_j - s_i)

(J. Townsend, "Differentiating the singular value decomposition", 2016, equations 8 to 22, regrouped so that U V^T keeps
its derivative where singular values are equal.)  For a symmetric A = Q L Q^T, ``dL_ii = W_ii`` and
``Omega_ij = W_ij / (l_j - l_i)`` (M. Giles, "An extended collection of matrix derivative results", 2008, section 3.1).
For A = R P, ``R^T dA - dA^T R = Omega P + P Omega`` with ``dR = R Omega``.  For A x = b, ``A dx = db - dA x``, and
``d(A^-1) = -A^-1 dA A^-1``.

The equations become statements of the program, in ``dA``, whose value is 0 and whose tangent is that of A. The call
itself counts as a constant beside them. In a program that is differentiated again, they are written as what they give,
and the call is there once more. Equal values are told apart where a kernel is recorded (``record/decompositions.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import Any, Union

import taichi_ext.program as ir
from taichi_ext.program import Call, Declare, Local, Op, Read, Tensor, Type, Value
from taichi_ext.program.build import (
    REPLACED,
    Builder,
    Coefficient,
    add,
    literal,
    multiply,
    negative,
    operation,
    subtract,
)
from taichi_ext.simplify.pipeline import as_scalars

_AT_A_POINT = ("svd_at", "sym_eig_at")  # take a matrix, and constants: where its decomposition is differentiated
Grid = list[list[Any]]


def with_equations(body: ir.Body, has: Callable[[Value], bool]) -> ir.Body:
    """The block in which equations give the tangents of calls; ``has``: whether a value has a tangent."""
    calls = (s for s in ir.statements(body) if isinstance(s, Call) and any(map(has, ir.values_of(s))))
    made: dict[ir.Statement, ir.Body] = {s: equations(s) for s in calls}
    return as_scalars(ir.mapped(body, lambda s: made.get(s, s))) if made else body


def equations(call: Call) -> ir.Body:
    """A call, and what gives the tangents of its results; an unknown function stays as it is."""
    rule = _RULES.get(call.function)
    if rule is None:
        return (call,)
    c = _Equations(call)
    for local, tangents in zip(call.results, rule(c), strict=True):
        values = tuple([_moved(x.value, t) for x, t in zip(c.entries(local), tangents, strict=True)])
        c.builder.emit(Declare(local, values, place=call.place))
    return tuple(c.builder.body)


def _moved(value: Any, tangent: Any) -> Value:
    """A value with the tangent of another one."""
    tangent = tangent.value if isinstance(tangent, Term) else tangent
    dtype = value.dtype if isinstance(value, Value) else tangent.dtype
    return Op(REPLACED, tuple([x if isinstance(x, Value) else literal(x, dtype) for x in (value, tangent)]), dtype)


class _Equations:
    """One call as a constant, with results of its own, and the tangents of its arguments."""

    def __init__(self, call: Call) -> None:
        self.builder, self.call = Builder(), call
        self.builder.place = call.place
        self.formula = Formula(self.builder, call.results[0].dtype)
        self.n = call.results[0].shape[0]
        self._own = {x: Local(x.name, x.dtype, x.shape, x.kind) for x in call.results}
        self._known: dict[Local, list[Term]] = {}
        made = ir.with_values(call, lambda v: _moved(v, 0.0))
        assert isinstance(made, Call)
        self.builder.emit(replace(made, results=tuple(self._own.values())))
        groups = [ir.entries(a) for a in call.args if isinstance(a, (Value, Tensor))]
        self._args = groups[:1] if call.function in _AT_A_POINT else groups
        self.tangents = [[self.given(self.formula.term(v)) for v in group] for group in self._args]

    def fixed(self) -> list[list[Term]]:
        """The arguments as constants."""
        return [[self.formula.term(_moved(v, 0.0)).kept() for v in group] for group in self._args]

    def given(self, tangent: Term) -> Term:
        """0, with a tangent; it has a name."""
        return self.formula.term(_moved(0.0, tangent)).kept("d")

    def entries(self, local: Local) -> list[Term]:
        """The entries of a result, each of which has a name."""
        if local not in self._known:
            own = self._own[local]
            reads = [Read(own, index) for index in product(*map(range, own.shape))]
            self._known[local] = [self.formula.term(read).kept(local.name) for read in reads]
        return self._known[local]

    def grids(self) -> list[Grid]:
        """The results that are matrices."""
        return [self.grid(self.entries(local)) for local in self.call.results if len(local.shape) == 2]

    def grid(self, entries: list[Term]) -> Grid:
        """Numbers as a matrix."""
        return [entries[k : k + self.n] for k in range(0, self.n * self.n, self.n)]

    def times(self, a: Grid, b: Grid, *, is_named: bool = False) -> Grid:
        """The product of two matrices whose entries may be None (zero); ``is_named``: a tangent used more than once."""
        result: Grid = []
        for row in a:
            line = []
            for j in range(len(b[0])):
                terms = [x * b[k][j] for k, x in enumerate(row) if x is not None and b[k][j] is not None]
                total = reduce(operator.add, terms) if terms else None
                line.append(self.given(total) if is_named and total is not None else total)
            result.append(line)
        return result

    def turn(self, pair: Callable[[int, int], Term]) -> Grid:
        """An antisymmetric matrix of tangents."""
        n = self.n
        above = {(i, j): self.given(pair(i, j)) for i in range(n) for j in range(i + 1, n)}
        return [[None if i == j else above[i, j] if i < j else -above[j, i] for j in range(n)] for i in range(n)]

    def inverse(self, entries: Iterable[Any]) -> Grid:
        """The inverse of a matrix."""
        local = Local("inverse", self.formula.dtype, (self.n, self.n), "temporary")
        matrix = Tensor(tuple([e.value for e in entries]), local.shape)
        self.builder.emit(Call("inverse", (matrix,), (local,), place=self.call.place))
        self._own[local] = local
        return self.grid(self.entries(local))


Tangents = list[list[Any]]  # of the entries of all results, in order


def _flat(grid: Grid) -> list[Any]:
    return [0.0 if x is None else x for row in grid for x in row]


def _transposed(grid: Grid) -> Grid:
    return [list(column) for column in zip(*grid, strict=True)]


def _svd(c: _Equations) -> Tangents:
    u, s, v = c.grids()
    w = c.times(_transposed(u), c.times(c.grid(c.tangents[0]), v, is_named=True), is_named=True)
    pairs = [(i, j) for i in range(c.n) for j in range(i + 1, c.n)]
    odd = {(i, j): c.given((w[i][j] - w[j][i]) * (0.5 / (s[i][i] + s[j][j])).kept()) for i, j in pairs}
    even = {(i, j): c.given((w[i][j] + w[j][i]) * (0.5 / (s[j][j] - s[i][i])).kept()) for i, j in pairs}
    turn_u, turn_v = c.turn(lambda i, j: even[i, j] + odd[i, j]), c.turn(lambda i, j: even[i, j] - odd[i, j])
    ds = [[w[i][i] if i == j else None for j in range(c.n)] for i in range(c.n)]
    return [_flat(c.times(u, turn_u)), _flat(ds), _flat(c.times(v, turn_v))]


def _sym_eig(c: _Equations) -> Tangents:
    values, (q,) = c.entries(c.call.results[0]), c.grids()
    w = c.times(_transposed(q), c.times(c.grid(c.tangents[0]), q, is_named=True), is_named=True)
    turn = c.turn(lambda i, j: (w[i][j] + w[j][i]) * (0.5 / (values[j] - values[i])).kept())
    return [[w[i][i] for i in range(c.n)], _flat(c.times(q, turn))]


def _polar(c: _Equations) -> Tangents:
    r, p = c.grids()
    m = c.times(_transposed(r), c.grid(c.tangents[0]), is_named=True)
    trace = reduce(operator.add, (p[i][i] for i in range(c.n))).kept()
    if c.n == 2:
        over = c.formula.ratio(1.0, trace).kept()
        turn = c.turn(lambda i, j: (m[i][j] - m[j][i]) * over)
    else:
        inverse = c.inverse([(trace if i == j else 0.0) - p[i][j] for i in range(3) for j in range(3)])
        axis = [c.given(m[i][j] - m[j][i]) for i, j in ((2, 1), (0, 2), (1, 0))]
        x, y, z = (c.given(line[0]) for line in c.times(inverse, [[a] for a in axis]))
        turn = [[None, -z, y], [z, None, -x], [-y, x, None]]
    turned = c.times(turn, p)
    dp = [[m[i][j] - turned[i][j] for j in range(c.n)] for i in range(c.n)]
    return [_flat(c.times(r, turn)), _flat(dp)]


def _solve(c: _Equations) -> Tangents:
    x, da = [[e] for e in c.entries(c.call.results[0])], c.grid(c.tangents[0])
    inverse = c.inverse(c.fixed()[0])
    rest = [[c.given(b - line[0])] for b, line in zip(c.tangents[1], c.times(da, x), strict=True)]
    return [_flat(c.times(inverse, rest))]


def _inverse(c: _Equations) -> Tangents:
    (inverse,) = c.grids()
    moved = c.times(c.grid(c.tangents[0]), inverse, is_named=True)
    return [[-x for x in _flat(c.times(inverse, moved))]]


def _atan2(c: _Equations) -> Tangents:
    """Entry by entry; Taichi computes it for vectors in float32, so it stays a call on vectors."""
    given, count = (c.fixed(), c.tangents), max(map(len, c.tangents))
    (a, b), (da, db) = ([[x[k % len(x)] for k in range(count)] for x in group] for group in given)
    over = [(1.0 / (x * x + y * y)).kept() for x, y in zip(a, b, strict=True)]
    return [[(da[k] * b[k] - db[k] * a[k]) * over[k] for k in range(count)]]


_RULES: dict[str, Callable[[_Equations], Tangents]] = {
    "svd_at": _svd,
    "sym_eig_at": _sym_eig,
    "polar_decompose": _polar,
    "solve": _solve,
    "inverse": _inverse,
    "atan2": _atan2,
}


# Formulas in mathematical notation: terms with operators, evaluated into temporaries on request.

Operand = Union["Term", Coefficient]


def _operator(name: str) -> Callable[[Term, Operand], Term]:
    """An operator between terms: an operation of Taichi's."""
    return lambda a, b: a.formula.operation(name, a, b)


@dataclass(frozen=True, eq=False)
class Term:
    """A coefficient (a number or a value) with operators."""

    formula: Formula
    value: Coefficient

    def _with(self, value: Coefficient) -> Term:
        return Term(self.formula, value)

    def __add__(self, other: Operand) -> Term:
        return self._with(add(self.value, _value(other)))

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Term:
        return self._with(subtract(self.value, _value(other)))

    def __rsub__(self, other: Operand) -> Term:
        return self._with(subtract(_value(other), self.value))

    def __mul__(self, other: Operand) -> Term:
        return self._with(multiply(self.value, _value(other)))

    __rmul__ = __mul__

    def __rtruediv__(self, other: Operand) -> Term:
        return self.formula.operation("truediv", other, self)

    def __neg__(self) -> Term:
        return self._with(negative(self.value))

    __truediv__ = _operator("truediv")
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("lt", "le", "gt", "ge"))
    __and__, __or__, equals = map(_operator, ("logical_and", "logical_or", "eq"))

    def kept(self, name: str = "t") -> Term:
        """The same term, evaluated now."""
        return self._with(self.formula.builder.keep(self.value, name))


def _value(x: Operand) -> Coefficient:
    return x.value if isinstance(x, Term) else x


@dataclass(frozen=True)
class Formula:
    """Terms of one real type; ``kept`` terms are emitted by the builder."""

    builder: Builder
    dtype: Type

    def term(self, x: Coefficient) -> Term:
        return Term(self, x)

    def operation(self, name: str, *args: Operand) -> Term:
        """An operation of Taichi's; numbers are of the formula's type."""
        values = [a if isinstance(a, Value) else literal(a, self.dtype) for a in map(_value, args)]
        return Term(self, operation(name, *values))

    def select(self, condition: Operand, then: Operand, orelse: Operand) -> Term:
        return self.operation("select", condition, then, orelse)

    def ratio(self, a: Operand, b: Operand) -> Term:
        """A / b, and 0 where b is 0."""
        is_zero = self.term(_value(b)).equals(0)
        return self.select(is_zero, 0, self.term(_value(a)) / self.select(is_zero, 1, b))
