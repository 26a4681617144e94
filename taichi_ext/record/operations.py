"""Operators, conversions and choices of a recorded kernel: values in, values out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import raise_baked
from taichi_ext.program import F64, Call, FoldedConst, Local, Op, Tensor, Type, Value
from taichi_ext.record.handles import place_of_local, value_of
from taichi_ext.record.literals import COMPARISONS, FUNCTIONS, as_value, convert, dummy, promoted, result_type, type_of
from taichi_ext.record.recording import Recording
from taichi_ext.record.variables import known

_ROUNDING = ("floor", "ceil", "round")


def tensor(rows: Any, dtype: Type | None = None) -> Tensor:
    """A vector of scalars, or a matrix of rows."""
    rows = list(value_of(rows))
    is_matrix = bool(rows) and isinstance(rows[0], (list, tuple, Tensor, np.ndarray))
    flat = [e for r in rows for e in (r.entries if isinstance(r, Tensor) else r)] if is_matrix else rows
    return typed_tensor(flat, (len(rows), len(flat) // len(rows)) if is_matrix else (len(rows),), dtype)


def typed_tensor(flat: Sequence[object], shape: tuple[int, ...], dtype: Type | None = None) -> Tensor:
    """A vector or matrix of given entries; its type is by default the common type of the entries."""
    values = [as_value(e) for e in flat]
    if len(values) != math.prod(shape):
        raise backend.SyntaxFault(f"{len(values)} entries are given for a value of shape {shape}")
    if not values:  # the index of a field without dimensions
        return Tensor((), shape)
    kind = promoted([v.dtype for v in values]) if dtype is None else dtype
    return Tensor(tuple(convert(v, kind) for v in values), shape)


def operate(r: Recording, name: str, *args: object) -> Any:
    """An operation, entry by entry on vectors and matrices."""
    given = [value_of(a) for a in args]
    if any(isinstance(a, Tensor) for a in given):
        given = [tensor(a) if isinstance(a, (list, tuple)) else a for a in given]
    shapes = {a.shape for a in given if isinstance(a, Tensor)}
    if not shapes:
        return scalar_operation(r, name, given)
    if len(shapes) > 1:
        raise backend.TypeFault(f"operands of the shapes {sorted(shapes)} do not fit in {name!r}")
    (shape,) = shapes
    if name == "atan2" and any(e.dtype == F64 for a in given if isinstance(a, Tensor) for e in a.entries):
        return whole_call(r, name, given, shape)
    parts = [a.entries if isinstance(a, Tensor) else [a] * math.prod(shape) for a in given]
    made = (as_value(scalar_operation(r, name, list(p))) for p in zip(*parts, strict=True))
    return Tensor(tuple(made), shape)


def whole_call(r: Recording, name: str, given: Sequence[object], shape: tuple[int, ...]) -> Tensor:
    """An operation on whole vectors, which Taichi does not compute entry by entry."""
    args = tuple(a if isinstance(a, Tensor) else as_value(a) for a in given)
    result = Local(name, result_type(name, tuple(a.dtype for a in args)), shape, "temporary")
    r.add(Call(name, args, (result,), place=r.place()))
    return value_of(place_of_local(result))


def scalar_operation(r: Recording, name: str, args: Sequence[object]) -> object:
    """An operation on scalars; if all are Python numbers, Python computes it, as in Taichi."""
    if name in _ROUNDING and len(args) == 2:
        done = scalar_operation(r, name, args[:1])
        return done if args[1] is None else convert(as_value(done), type_of(args[1]))
    if not any(isinstance(a, Value) for a in args):
        return FUNCTIONS[name](*args)
    if all(isinstance(a, FoldedConst) or not isinstance(a, Value) for a in args):
        return _of_python_numbers(name, args)
    values = tuple(map(as_value, args))
    kind = result_type(name, tuple(v.dtype for v in values))
    if kind.is_integer and name not in COMPARISONS and any(isinstance(a, FoldedConst) for a in args):
        raise_baked("A whole number")
    return Op(name, values, kind, place=r.place())


def _of_python_numbers(name: str, args: Sequence[object]) -> object:
    """An operation on Python numbers of which some are parameters: computed by Python, as for the plain kernel."""
    if name in (*_ROUNDING, "floordiv") or name.startswith(("bit", "shift", "invert")):
        raise_baked("A whole number")
    if name in ("select", "ifte"):
        condition, then, orelse = args
        return then if condition else orelse
    result = FUNCTIONS[name](*(a.value if isinstance(a, FoldedConst) else a for a in args))
    if isinstance(result, (bool, np.bool_)):
        return result
    return known(result, Op(name, tuple(map(as_value, args)), type_of(float)))


def cast(r: Recording, x: object, dtype: Any) -> Any:
    """``ti.cast`` to a scalar type, also of vectors and matrices."""
    x = value_of(x)
    kind = type_of(dtype)
    if isinstance(x, Tensor):
        return Tensor(tuple(convert(e, kind) for e in x.entries), x.shape)
    return convert(as_value(x), kind)


def bit_cast(r: Recording, x: object, dtype: Any) -> object:
    x, kind = value_of(x), type_of(dtype)
    if isinstance(x, FoldedConst):
        raise_baked("A whole number")
    if isinstance(x, Tensor):
        return Tensor(tuple(Op("bit_cast", (e,), kind, place=r.place()) for e in x.entries), x.shape)
    return Op("bit_cast", (as_value(x),), kind, place=r.place())


def compare(r: Recording, names: tuple[str, ...], *operands: object) -> object:
    """A chain of comparisons."""
    result: Any = None
    for name, a, b in zip(names, operands, operands[1:], strict=False):
        now = operate(r, name, a, b)
        result = now if result is None else operate(r, "logical_and", result, now)
    return result


def bool_op(r: Recording, kind: str, *values: object) -> object:
    """``and``, ``or``: of Python values as in Python, else nested to the right as in Taichi."""
    given = [value_of(v) for v in values]
    if r.context.is_in_static_scope() or not any(isinstance(v, (Value, Tensor)) for v in given):
        result = given[0]
        for v in given[1:]:
            result = (result and v) if kind == "and" else (result or v)
        return result
    result = given[-1]
    for v in reversed(given[:-1]):
        result = operate(r, f"logical_{kind}", v, result)
    return result


def where(r: Recording, condition: object, then: object, orelse: object) -> Any:
    """``then if condition else orelse``: only the side that is taken is evaluated."""
    condition, then, orelse = value_of(condition), value_of(then), value_of(orelse)
    if any(isinstance(x, Tensor) for x in (condition, then, orelse)):
        return operate(r, "select", condition, then, orelse)
    if not isinstance(condition, Value):
        return then if condition else orelse
    return scalar_operation(r, "ifte", [condition, then, orelse])


def native(x: object) -> object:
    """An object of Taichi of the same type, for its transformer and its functions."""
    if isinstance(x, Value):
        return dummy(x.dtype)
    if isinstance(x, Tensor):
        return backend.tensor([dummy(e.dtype) for e in x.entries], x.shape)
    return type(x)(map(native, x)) if isinstance(x, (list, tuple)) else x
