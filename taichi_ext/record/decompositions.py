"""``ti.svd`` and ``ti.sym_eig``: derivatives at a matrix whose singular values, or eigenvalues, are apart.

Programs read the diagonal of S alone. Where two singular values are equal, the derivative of ``U f(S) V^T`` has
f'(s) beside the diagonal, the limit of ``(f(s_i) - f(s_j)) / (s_i - s_j)``. So everything that is computed from the
values and vectors is computed twice: as it is, and with tangents from values that are at least a step apart. Where
both meet memory, the value is the first, and the tangent that of the second. The step balances what J changes over it,
in proportion to it, with the rounding of such a quotient; for second derivatives with that of a quotient of quotients.
"""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportOptionalCall=false

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import taichi_ext.program as ir
from taichi_ext import backend
from taichi_ext.backend import ti
from taichi_ext.errors import UnsupportedError
from taichi_ext.record.assignments import declare
from taichi_ext.record.boundaries import stopped
from taichi_ext.record.effects import kept_call
from taichi_ext.record.handles import group_of, value_of
from taichi_ext.record.inlining import inline_call
from taichi_ext.record.operations import cast
from taichi_ext.record.recording import Recording

_AT = "_at"  # ends the name of a call whose results are its other arguments, with the derivative of the decomposition
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
def _singular_values(S, step):
    values = _apart(ti.Vector([S[k, k] for k in ti.static(range(S.n))]), step, False)
    return ti.Matrix([[values[i] if i == j else 0.0 for j in ti.static(range(S.n))] for i in ti.static(range(S.n))])


@ti.func
def _identity(A):
    one = 0.0 * A
    for k in ti.static(range(A.n)):
        one[k, k] = 1.0
    return one


@ti.func
def _eigenvectors(A, Q, step):
    """Eigenvalues that are apart, and orthogonal vectors, by Jacobi's rotations, in the order and with the signs of Q.

    Those of Taichi 1.7.4 are not orthogonal where eigenvalues are close, or A is diagonal.
    """
    n = ti.static(A.n)
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
    values = _apart(values, step, True)
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
    return values, V


def decomposition(r: Recording, matrix: object, dt: object = None, *, function: Any) -> object:
    """``ti.svd`` or ``ti.sym_eig``: a call without tangents, and one whose results have them."""
    kind = () if dt is None else (dt,)
    fixed: Any = stopped(r, value_of(matrix))
    if fixed.shape[0] not in _PAIRS:  # Quadrants has them
        raise UnsupportedError(
            f"{function.__name__} has a derivative for matrices of 2 and 3 rows; this has {fixed.shape[0]}."
        )
    found: Any = kept_call(r, fixed, *kind, function=function)
    results, dtype = declare(r, function.__name__, found), found[0].base.dtype
    step = ir.Const(_STEPS.get(dtype, _STEPS[ir.F32])[r.order - 1], dtype)

    def own(func: Any, *args: object) -> Any:
        return inline_call(r, backend.taichi_func(func), [*args, step], {})

    if function is ti.svd:
        at: Any = (found[0], own(_singular_values, found[1]), found[2])
    else:
        at = own(_eigenvectors, fixed, found[1])
    locals_ = tuple(ir.Local(f"{x.base.name}_at", dtype, x.shape, "temporary") for x in results)
    args = (value_of(matrix), *(cast(r, x, backend.named_type(dtype.name)) for x in at), *map(value_of, results))
    r.add(ir.Call(function.__name__ + _AT, tuple(map(group_of, args)), locals_, place=r.place()))
    return results


def with_tangents_at(body: ir.Body) -> ir.Body:
    """The block in which all that is computed from decompositions is computed again, where it has tangents.

    What is stored, returned or passed on to other derivatives has the value of the first and the tangent of the second.
    """
    everything = ir.statements(body)
    again: dict[ir.Local, ir.Local] = {}  # from a local to the one with tangents
    for s in everything:
        if isinstance(s, ir.Call) and s.function.endswith(_AT):
            primal = [v.local for v in s.args[-len(s.results) :] for v in ir.entries(v)[:1] if isinstance(v, ir.Read)]
            again |= zip(primal, s.results, strict=True)
    roots = frozenset(again)
    while again:
        new = {local for s in everything for local in _reached(s, again)} - again.keys()
        if not new:
            break
        again |= {local: ir.Local(f"{local.name}_at", local.dtype, local.shape, "temporary") for local in new}
    return ir.mapped(body, lambda s: s if roots.intersection(ir.declared(s)) else _with_twin(s, again))


def _reads(value: ir.Value, again: Collection[ir.Local]) -> bool:
    return value.dtype.is_real and not value.contents.locals.isdisjoint(again)


def _reached(s: ir.Statement, again: Collection[ir.Local]) -> Iterator[ir.Local]:
    """The locals of real numbers that a statement computes from others."""
    found: tuple[ir.Local, ...] = ()
    if isinstance(s, ir.Declare) or (isinstance(s, ir.Call) and not s.function.endswith(_AT)):
        found = ir.declared(s)
    elif isinstance(s, ir.Store) and isinstance(s.target, ir.Read):
        found = (s.target.local, *ir.declared(s))
    if found and any(_reads(v, again) for v in (*ir.values_of(s), *([s.target] if isinstance(s, ir.Atomic) else ()))):
        yield from (local for local in found if local.dtype.is_real)


def _with_twin(s: ir.Statement, again: Mapping[ir.Local, ir.Local]) -> ir.Statement | ir.Body:
    if isinstance(s, (ir.If, ir.While, ir.For)):
        return s

    def second(value: ir.Value) -> ir.Value:
        return ir.rebuilt(value, lambda node: ir.read_from(node, again))

    if isinstance(s, ir.Call) and s.function.endswith(_AT):  # of a matrix that comes from another decomposition
        matrix = ir.regrouped(s.args[0], tuple(map(second, ir.entries(s.args[0]))))
        return replace(s, args=(matrix, *s.args[1:]))
    if any(local in again for local in ir.declared(s)) or (isinstance(s, ir.Store) and s.target.memory in again):
        return s, _second(s, second, again)
    before: list[ir.Statement] = []

    def joined(value: ir.Value) -> ir.Value:
        if not _reads(value, again):
            return value
        local = ir.Local("joined", value.dtype, (), "temporary")
        given = {"surrogate": second(value)}
        before.append(ir.Boundary("replace_gradient", None, given, value, (local,), place=s.place))
        return ir.Read(local, place=value.place)

    is_open = not isinstance(s, ir.Boundary) or s.kind != "stop_gradient"
    made = ir.with_values(s, joined) if is_open else s  # which adds to ``before``
    return (*before, made)


def _second(s: Any, second: Callable[[ir.Value], ir.Value], again: Mapping[ir.Local, ir.Local]) -> ir.Statement:
    """The statement once more, for the locals with tangents."""
    if isinstance(s, ir.Declare):
        return replace(s, local=again[s.local], values=tuple(map(second, s.values)))
    if isinstance(s, ir.Call):
        made = ir.with_values(s, second)
        return replace(made, results=tuple(again.get(local, local) for local in s.results))
    result = {} if not isinstance(s, ir.Atomic) or s.result is None else {"result": again[s.result]}
    return replace(s, target=second(s.target), value=second(s.value), **result)
