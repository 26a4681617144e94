"""Types of Taichi as types of a program and back; types of operations, as Taichi's own expressions have them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.backend import ops, ti
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import F16, F32, F64, TYPES, U1, Type

_UNARY = "neg abs sin cos tan tanh asin acos exp log sqrt rsqrt floor ceil round bit_not popcnt clz logical_not"
_BINARY = "add sub mul truediv floordiv mod pow atan2 raw_div raw_mod bit_shl bit_sar bit_shr logical_and logical_or"
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
# The operations of a program and the functions of Taichi that compute them.
FUNCTIONS: dict[str, Callable[..., Any]] = {n: getattr(ops, n) for n in (*_UNARY.split(), *_BINARY.split())}
FUNCTIONS |= {"select": ops.select, "ifte": ops.ifte, "max": ops.max_impl, "min": ops.min_impl}
FUNCTIONS |= {"bit_and": operator.and_, "bit_or": operator.or_, "bit_xor": operator.xor, "invert": operator.invert}
FUNCTIONS |= {"shift_left": operator.lshift, "shift_right": operator.rshift}
FUNCTIONS |= {name: getattr(operator, name) for name in COMPARISONS}
NAME_OF = {function: name for name, function in FUNCTIONS.items()}
NAME_OF |= {getattr(ops, f"bit_{n}"): f"bit_{n}" for n in ("and", "or", "xor")} | {ops.bit_not: "invert"}
NAME_OF |= {getattr(ops, f"cmp_{n}"): n for n in COMPARISONS}

_NUMPY = {F16: np.float16, F32: np.float32, F64: np.float64}
_known: dict[Any, Type] = {}
_types: dict[Any, Type] = {}


def type_of(dtype: Any) -> Type:
    """The type of a program for a scalar type of Taichi's."""
    if dtype is float or dtype is int:
        dtype = backend.default_type(dtype)
    try:
        found = _types.get(dtype)
    except RuntimeError:  # quantised types have no hash
        return _named(dtype)
    if found is None:
        found = _types[dtype] = _named(dtype)
    return found


def _named(dtype: Any) -> Type:
    if dtype is bool:
        return U1
    name = backend.cook_dtype(dtype).to_string()
    if name not in TYPES:
        raise UnsupportedError(
            f"The type {name} is quantised. Kernels that use quantised types are not differentiated; use f32 or i32."
        )
    return TYPES[name]


def taichi_type(kind: Type) -> backend.DataType:
    return getattr(ti, kind.name)


def default_types() -> tuple[Type, Type]:
    """The types of literals with and without a point."""
    return type_of(float), type_of(int)


def dummy(kind: Type) -> object:
    """An expression of a type, for Taichi to compute with."""
    return backend.Expr(True) if kind is U1 else backend.constant(1, taichi_type(kind))


def result_type(name: str, kinds: tuple[Type, ...]) -> Type:
    """The type of an operation on values of some types; only while a kernel is being traced."""
    if name in COMPARISONS:
        return U1
    key = (name, kinds, default_types())
    if key not in _known:
        _known[key] = type_of(backend.dtype_of(FUNCTIONS[name](*map(dummy, kinds))))
    return _known[key]


def promoted(kinds: list[Type]) -> Type:
    """The type of the entries of a vector that is made of values of some types."""
    dtype = taichi_type(kinds[0])
    for kind in kinds[1:]:
        dtype = backend.promoted_type(dtype, taichi_type(kind))
    return type_of(dtype)


def rounded(value: float, kind: Type) -> float:
    """A number as a real type holds it."""
    with np.errstate(over="ignore"):
        return float(_NUMPY[kind](value))
