"""Conversions, choices and constructors in a traced kernel: of values of which some carry tangents."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import taichi as ti

from taichi_ext import backend
from taichi_ext.backend import ops
from taichi_ext.derivative.rules import Rule
from taichi_ext.derivative.values import (
    Scalar,
    StructValue,
    TensorValue,
    entries_of,
    is_active,
    is_python_number,
    is_tensor_like,
    make_tensor,
    number_of,
    primal_of,
    shape_of,
)
from taichi_ext.errors import refuse_baked

# --- operators without tangents ---------------------------------------------------------------------------------------


PLAIN_OPERATORS: dict[str, Callable[..., Any]] = {
    "bit_and": operator.and_,
    "bit_or": operator.or_,
    "bit_xor": operator.xor,
    "shift_left": operator.lshift,
    "shift_right": operator.rshift,
    "invert": operator.invert,
    "logical_not": ops.logical_not,
}
COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def _comparison(function: Callable[..., Any]) -> Callable[..., Any]:
    def compare(a: Any, b: Any) -> Any:
        result = function(a, b)
        return ops.cast(result, ti.u1) if backend.is_expr(result) or isinstance(result, backend.Matrix) else result

    return compare


PLAIN_OPERATORS.update({name: _comparison(function) for name, function in COMPARISONS.items()})


# --- conversions and choices ------------------------------------------------------------------------------------------


def cast(tracer: Any, x: Any, dtype: Any) -> Any:
    """Conversion to a type: linear to a real type, without tangent to an integer."""
    x = tracer.value_of(x)
    if dtype is float:
        dtype = backend.default_type(float)
    if dtype is int:
        dtype = backend.default_type(int)
    if isinstance(dtype, (backend.MatrixType, backend.StructType)):
        return dtype(x) if not is_active(x) else construct(tracer, dtype, [x], {})
    if not is_active(x):
        result = ops.cast(x, dtype)
        if isinstance(x, (int, float)):
            tracer.literals[id(result)] = (result, x)
        return result
    if not backend.is_real(backend.cook_dtype(dtype)):
        if is_python_number(x):
            refuse_baked("A whole number")
        return ops.cast(tracer.primal(x), dtype)
    if isinstance(x, TensorValue):
        return make_tensor([cast(tracer, e, dtype) for e in x.entries], x.shape)
    if not isinstance(x, Scalar):
        return ops.cast(x, dtype)
    rule = Rule("cast", lambda a: ops.cast(a, dtype), (1,))
    return Scalar(ops.cast(number_of(x), dtype), rule=rule, args=(x,), is_tangent=x.is_tangent)


def select(tracer: Any, condition: Any, then: Any, orelse: Any) -> Any:
    """``ti.select``, elementwise; the tangent of the side that is not chosen is not touched."""
    condition, then, orelse = tracer.primal(condition), tracer.value_of(then), tracer.value_of(orelse)
    if not is_active((then, orelse)):
        return ops.select(condition, then, orelse)
    shapes = {shape_of(x) for x in (condition, then, orelse) if is_tensor_like(x)}
    if not shapes:
        return _select_scalar(condition, then, orelse)
    shape = shapes.pop()
    count = 1
    for s in shape:
        count *= s
    parts = [entries_of(x) if is_tensor_like(x) else [x] * count for x in (condition, then, orelse)]
    return make_tensor([_select_scalar(*three) for three in zip(*parts, strict=True)], shape)


def _select_scalar(condition: Any, then: Any, orelse: Any) -> Any:
    primal = ops.select(condition, primal_of(then), primal_of(orelse))
    if not is_active((then, orelse)):
        return primal
    rule = Rule(
        "select",
        lambda a, b: ops.select(condition, a, b),
        (1, 1),
        kind="choice",
        picks=lambda a, b: (condition, None),
    )
    is_tangent = any(isinstance(x, Scalar) and x.is_tangent for x in (then, orelse))
    return Scalar(primal, rule=rule, args=(then, orelse), is_tangent=is_tangent)


def construct(tracer: Any, kind: Any, args: list[Any], keywords: dict[str, Any]) -> Any:
    """``ti.Vector``, ``ti.Matrix``, ``vec3(...)``, a struct type: from values of which some carry tangents."""
    if kind is ti.Struct:
        members = {**(args[0] if args else {}), **keywords}
        methods = members.pop("__struct_methods", {})
        return StructValue({name: _member(tracer, m) for name, m in members.items()}, methods)
    if kind in (ti.Vector, ti.Matrix):
        rows = tracer.value_of(args[0])
        dtype = keywords.get("dt", args[1] if len(args) > 1 else None)
        rows = list(rows)
        is_matrix = bool(rows) and (isinstance(rows[0], (list, tuple)) or is_tensor_like(rows[0]))
        if is_matrix:
            flat = [e for row in rows for e in (entries_of(row) if is_tensor_like(row) else row)]
            shape = (len(rows), len(flat) // len(rows))
        else:
            flat, shape = rows, (len(rows),)
        return _typed_tensor(tracer, flat, shape, dtype)
    if isinstance(kind, backend.StructType):
        return _construct_struct(tracer, kind, args, keywords)
    args = [tracer.value_of(a) for a in args]
    shape = (kind.n,) if kind.ndim == 1 else (kind.n, kind.m)
    if len(args) == 1 and is_tensor_like(args[0]):
        if shape_of(args[0]) == shape:
            return args[0]  # as Taichi: the element type stays
        args = entries_of(args[0])
    elif len(args) == 1 and isinstance(args[0], (list, tuple)):
        args = list(args[0])
    elif len(args) == 1:
        args = args * (shape[0] * (shape[1] if len(shape) > 1 else 1))
    flat = []
    for a in args:
        if is_tensor_like(a):
            flat += entries_of(a)
        elif isinstance(a, (list, tuple)):
            flat += list(a)
        else:
            flat.append(a)
    return _typed_tensor(tracer, flat, shape, kind.dtype)


def _rows(tracer: Any, rows: Any) -> Any:
    return construct(tracer, ti.Matrix, [list(rows)], {})


def _columns(tracer: Any, cols: Any) -> Any:
    columns = [entries_of(v) if is_tensor_like(v) else list(v) for v in cols]
    return construct(tracer, ti.Matrix, [[list(row) for row in zip(*columns, strict=True)]], {})


def _diagonal(tracer: Any, dim: int, val: Any) -> Any:
    return construct(tracer, ti.Matrix, [[[val if i == j else 0 for j in range(dim)] for i in range(dim)]], {})


FROM_PARTS: dict[str, Callable[..., Any]] = {"rows": _rows, "cols": _columns, "diag": _diagonal}


def _typed_tensor(tracer: Any, entries: list[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    size = 1
    for s in shape:
        size *= s
    if len(entries) != size:
        raise ti.TaichiSyntaxError(f"{len(entries)} entries given for a value of shape {shape}")
    values = [tracer.value_of(e) for e in entries]
    if dtype is None:
        dtype = backend.dtype_of(backend.tensor([number_of(v) for v in values], (size,)))
    return make_tensor([cast(tracer, v, dtype) for v in values], shape)


def _member(tracer: Any, value: Any) -> Any:
    """What becomes of a member of ``ti.Struct``: a dictionary is a struct, a list a vector or matrix."""
    value = tracer.value_of(value)
    if isinstance(value, dict):
        return construct(tracer, ti.Struct, [value], {})
    return construct(tracer, ti.Matrix, [list(value)], {}) if isinstance(value, (list, tuple)) else value


def _construct_struct(tracer: Any, kind: Any, args: list[Any], keywords: dict[str, Any]) -> StructValue:
    members: dict[str, Any] = {}
    for n, (name, dtype) in enumerate(kind.members.items()):
        value = tracer.value_of(args[n] if n < len(args) else keywords.get(name, 0))
        if isinstance(dtype, backend.StructType):
            is_struct = isinstance(value, (StructValue, backend.Struct, dict))
            parts = tracer.struct_members(value) if is_struct else {}
            members[name] = _construct_struct(tracer, dtype, [] if is_struct else [value], parts)
        elif isinstance(dtype, backend.MatrixType):
            members[name] = construct(tracer, dtype, [value], {}) if is_active(value) else dtype(value)
        else:
            members[name] = cast(tracer, value, dtype)
    return StructValue(members, kind.methods)
