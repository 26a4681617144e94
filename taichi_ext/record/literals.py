"""Python numbers, and vectors of them, as values of a program."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.backend import ops, ti
from taichi_ext.errors import UnsupportedError, raise_baked
from taichi_ext.program import F16, F32, F64, TYPES, U1, Const, FoldedConst, Op, Tensor, Type, Value
from taichi_ext.program.values import COMPARISONS, PYTHON, Format


def as_value(x: object) -> Value:
    """A scalar value; Python numbers get the types that literals have."""
    if isinstance(x, Value):
        return x
    if isinstance(x, (bool, np.bool_)):
        return Const(bool(x), U1)
    if isinstance(x, (float, np.floating)):
        return Const(float(x), type_of(float))
    if isinstance(x, (int, np.integer)):
        return Const(int(x), type_of(int))
    if isinstance(x, np.ndarray) and not x.shape:
        return as_value(x.item())
    raise UnsupportedError(f"A {described(x)} stands where a number is expected.")


def described(x: Any) -> str:
    if getattr(x, "shape", ()):
        return f"value of shape {x.shape}"
    if hasattr(x, "members"):
        return f"struct with the members {', '.join(x.members)}"
    return "text" if isinstance(x, (str, Format)) else type(x).__name__


def convert(x: Value, kind: Type) -> Value:
    """A scalar in another type. A literal first gets the type that literals have."""
    if isinstance(x, FoldedConst):
        return known_in(x, kind)
    if x.dtype == kind:
        return x
    if isinstance(x, Const) and kind.is_real and _is_rounded_once(x) and x.dtype != F16 and kind != F16:
        return Const(rounded(x.value, F32) if x.dtype == F32 else float(x.value), kind)
    return Op("cast", (x,), kind, place=x.place)


def _is_rounded_once(x: Const) -> bool:
    """Whether a literal is a number of float64: a larger whole number would be rounded to that before its own type."""
    return not isinstance(x.value, bool) and (x.dtype.is_real or abs(x.value) <= 2**53)


def known_in(x: FoldedConst, kind: Type, *, is_exact: bool = False) -> FoldedConst:
    """A number that depends on parameters, in another type; ``is_exact``: not rounded to its own type before."""
    if not kind.is_real:
        raise_baked("A whole number")
    is_rounded = x.dtype == F32 and kind != F32 and not is_exact
    return replace(x, value=rounded(x.value, F32) if is_rounded else float(x.value), dtype=kind)


def matrix_value(x: Any) -> Tensor:
    """A vector or matrix of Python numbers, as a kernel captures it."""
    rows = x.to_list()
    values = [as_value(e) for row in rows for e in (row if isinstance(row, list) else [row])]
    kind = promoted([v.dtype for v in values])
    shape = (x.n,) if x.ndim == 1 else (x.n, x.m)
    return Tensor(tuple(convert(v, kind) for v in values), shape)


def captured(x: object) -> Any:
    """A matrix of Python numbers as a value; other objects unchanged."""
    return matrix_value(x) if isinstance(x, backend.Matrix) else x


# Types of Taichi as types of a program and back; types of operations, as Taichi's own expressions have them.

_UNARY = "neg abs sin cos tan tanh asin acos exp log sqrt rsqrt floor ceil round bit_not popcnt clz logical_not"
_BINARY = "add sub mul truediv floordiv mod pow atan2 raw_div raw_mod bit_shl bit_sar bit_shr logical_and logical_or"
# The operations of a program and the functions of Taichi that compute them.
FUNCTIONS: dict[str, Callable[..., Any]] = {n: getattr(ops, n) for n in (*_UNARY.split(), *_BINARY.split())}
FUNCTIONS |= {"select": ops.select, "ifte": ops.ifte, "max": ops.max_impl, "min": ops.min_impl}
FUNCTIONS = {**PYTHON, "invert": operator.invert, **FUNCTIONS}
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
        result = _types.get(dtype)
    except RuntimeError:  # quantised types have no hash
        return _named(dtype)
    if result is None:
        result = _types[dtype] = _named(dtype)
    return result


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
