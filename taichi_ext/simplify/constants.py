"""Arithmetic on constants, done in their own type; products with one and sums with zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from taichi_ext.program import F32, F64, Const, Op, Type, Value

_NUMPY: dict[Type, Callable[[Any], Any]] = {F32: np.float32, F64: np.float64}
_COMPUTE: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
}


def tidied(value: Value) -> Value:
    """The same value, where that is simpler."""
    if not isinstance(value, Op) or not (value.dtype in _NUMPY or value.dtype.is_integer):
        return value
    numbers = [a.value if isinstance(a, Const) and not isinstance(a.value, bool) else None for a in value.args]
    if all(n is None for n in numbers):
        return value
    if value.dtype.is_integer:
        return _without_unit(value, numbers) if value.name in ("mul", "add", "sub") else value
    if value.name == "neg":
        return Const(-numbers[0], value.dtype, place=value.place)  # type: ignore[operator]
    if value.name in _COMPUTE and None not in numbers:
        kind = _NUMPY[value.dtype]
        with np.errstate(all="ignore"):
            return Const(float(_COMPUTE[value.name](*map(kind, numbers))), value.dtype, place=value.place)
    return _without_unit(value, numbers) if value.name in ("mul", "add", "sub") else value


def _without_unit(value: Op, numbers: list[Any]) -> Value:
    unit = 1 if value.name == "mul" else 0
    a, b = value.args
    if numbers[1] == unit and a.dtype == value.dtype:
        return a
    if numbers[0] == unit and b.dtype == value.dtype and value.name != "sub":
        return b
    return value
