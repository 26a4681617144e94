"""Arithmetic on constants, done in their own type; products with one and sums with zero; signs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from taichi_ext.program import F32, F64, I32, U1, Const, Op, Type, Value

_NUMPY: dict[Type, Callable[[Any], Any]] = {F32: np.float32, F64: np.float64}
_COMPUTE: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
}


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def tidied(value: Value) -> Value:
    """The same value, where that is simpler."""
    if not isinstance(value, Op):
        return value
    if value.name in _COMPARE and all(map(_is_whole, value.args)):
        a, b = (x.value for x in value.args)  # type: ignore[attr-defined]
        return Const(_COMPARE[value.name](a, b), U1, place=value.place)
    if value.dtype.is_integer:
        return _without_unit(value)
    bare = _with_signs_outside(value) if value.dtype in _NUMPY else value
    return _computed(bare) if isinstance(bare, Op) and bare.dtype in _NUMPY else bare


def _computed(op: Op) -> Value:
    """The result of an operation on real constants, or the operation without units."""
    numbers = _numbers(op)
    if op.name == "neg" and numbers[0] is not None:
        return Const(-float(numbers[0]), op.dtype, place=op.place)
    if op.name not in _COMPUTE or None in numbers:
        return _without_unit(op)
    if any(a.dtype not in (I32, op.dtype) for a in op.args):
        return op  # rounded to a type of its own before
    with np.errstate(all="ignore"):
        return Const(float(_COMPUTE[op.name](*map(_NUMPY[op.dtype], numbers))), op.dtype, place=op.place)


def _numbers(op: Op) -> list[float | None]:
    """The constants among the operands."""
    return [a.value if isinstance(a, Const) and not isinstance(a.value, bool) else None for a in op.args]


def _with_signs_outside(op: Op) -> Value:
    """The same value, bit by bit, with fewer changes of sign; those of whole numbers stay, which may wrap."""
    args, dtype, place = op.args, op.dtype, op.place
    if op.name == "neg":
        return _opposite(args[0]) or op
    if op.name in ("add", "sub"):
        b = _opposite(args[1])
        if b is not None:
            return Op("sub" if op.name == "add" else "add", (args[0], b), dtype, place=place)
        a = _negated(args[0])
        return op if a is None or op.name == "sub" else Op("sub", (args[1], a), dtype, place=place)
    if op.name == "mul" and any(_negated(a) is not None for a in args):
        bare = tuple(_negated(a) or a for a in args)
        product = Op("mul", bare, dtype, place=place)
        is_even = all(_negated(a) is not None for a in args)
        return product if is_even else _with_signs_outside(Op("neg", (product,), dtype, place=place))
    return op


def _negated(value: Value) -> Value | None:
    """``x`` of ``-x``, a real number."""
    return value.args[0] if is_op(value, "neg") and value.dtype.is_real else None  # type: ignore[attr-defined]


def _opposite(value: Value) -> Value | None:
    """The real number that a value is the negative of, where that is simpler: ``2 * x`` of ``-2 * x``."""
    if is_op(value, "neg"):
        return _negated(value)
    if not is_op(value, "mul") or not value.dtype.is_real:
        return None
    factor, x = value.args  # type: ignore[attr-defined]
    if isinstance(factor, Const):
        is_least = factor.dtype.is_integer and factor.value == -(2 ** (factor.dtype.bits - 1))
        opposite: Value | None = Const(-factor.value, factor.dtype) if factor.value < 0 and not is_least else None
    else:
        opposite = _opposite(factor)
    return None if opposite is None else Op("mul", (opposite, x), value.dtype, place=value.place)


def _is_whole(value: Value) -> bool:
    return isinstance(value, Const) and value.dtype == I32 and not isinstance(value.value, bool)


def is_op(value: Value, name: str) -> bool:
    """Whether a value is an operation of this name."""
    return isinstance(value, Op) and value.name == name


def _without_unit(op: Op) -> Value:
    """The other operand of a product with 1 or of a sum with 0."""
    if op.name not in ("mul", "add", "sub"):
        return op
    unit, numbers = (1 if op.name == "mul" else 0), _numbers(op)
    a, b = op.args
    if numbers[1] == unit and a.dtype == op.dtype:
        return a
    return b if numbers[0] == unit and b.dtype == op.dtype and op.name != "sub" else op
