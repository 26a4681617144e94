"""Python numbers, and vectors of them, as values of a program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError, raise_baked
from taichi_ext.program import F16, F32, U1, Const, Known, Op, Tensor, Type, Value
from taichi_ext.program.values import Format
from taichi_ext.record.taichi_types import promoted, rounded, type_of


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
    target = getattr(x, "target", None)  # a place that is read
    if isinstance(target, Value):
        return target
    raise UnsupportedError(f"A {described(x)} stands where a number is expected.")


def described(x: Any) -> str:
    if getattr(x, "shape", ()):
        return f"value of shape {x.shape}"
    if hasattr(x, "members"):
        return f"struct with the members {', '.join(x.members)}"
    return "text" if isinstance(x, (str, Format)) else type(x).__name__


def convert(x: Value, kind: Type) -> Value:
    """A scalar in another type. A literal first gets the type that literals have."""
    if isinstance(x, Known):
        return known_in(x, kind)
    if x.dtype == kind:
        return x
    if isinstance(x, Const) and kind.is_real and _is_rounded_once(x) and x.dtype != F16 and kind != F16:
        return Const(rounded(x.value, F32) if x.dtype == F32 else float(x.value), kind)
    return Op("cast", (x,), kind, place=x.place)


def _is_rounded_once(x: Const) -> bool:
    """Whether a literal is a number of float64: a larger whole number would be rounded to that before its own type."""
    return not isinstance(x.value, bool) and (x.dtype.is_real or abs(x.value) <= 2**53)


def known_in(x: Known, kind: Type, *, is_exact: bool = False) -> Known:
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
