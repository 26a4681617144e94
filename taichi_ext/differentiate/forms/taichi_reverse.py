"""Programs for Taichi's own reverse mode: values that it takes for constants, operations that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from taichi_ext.differentiate.forms.build import cast, literal, operation, select
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import (
    F16,
    F32,
    F64,
    Op,
    Program,
    Statement,
    Type,
    Value,
    mapped,
    rebuilt,
    with_values,
)

# By type: the factor of a number before it is rounded, and from where on all numbers are whole
_SCALES: dict[Type, tuple[float, float]] = {F64: (2.0**512, 2.0**53), F32: (2.0**64, 2.0**24)}


def as_constant(x: Value) -> Value:
    """The same number without its derivative: Taichi does not differentiate floor.

    It is exact from 2**-460 on in float64, and from 2**-41 on in float32; below, the error is at most 1 / scale.
    """
    if x.dtype == F16:  # too small for the scale
        return cast(as_constant(cast(x, F32)), F16)
    scale, whole = _SCALES[x.dtype]
    rounded = operation("floor", operation("mul", x, literal(scale, x.dtype)))
    small = operation("mul", rounded, literal(1 / scale, x.dtype))
    is_whole = operation("ge", operation("abs", x), literal(whole, x.dtype))
    return Op("select", (is_whole, operation("floor", x), small), x.dtype)


def with_known_operations(program: Program) -> Program:
    """The program without the operations that Taichi's reverse mode does not take.

    Raises:
        UnsupportedError: there are no others for one of them.
    """

    def change(s: Statement) -> Statement:
        memo: dict[Value, Value] = {}
        return with_values(s, lambda v: rebuilt(v, lambda node: _with_others(node, s), memo))

    return replace(program, body=mapped(program.body, change))


def _with_others(value: Value, s: Statement) -> Value:
    if not isinstance(value, Op):
        return value
    if value.name in _OTHERS:
        return _OTHERS[value.name](*value.args)
    if value.name in _UNKNOWN:
        place = value.place or s.place
        start = "" if place is None else place.message() + "\n"
        raise UnsupportedError(
            f"{start}Taichi's reverse mode cannot compile {value.name!r}. Use jacobian, which differentiates this "
            "kernel, or compute this value in a kernel before."
        )
    return value


def _rounded(x: Value) -> Value:
    """The nearest whole number; of two, the one that is farther from 0."""
    size = operation("abs", x)
    below = operation("floor", size)
    is_above = operation("ge", operation("sub", size, below), 0.5)
    nearest = select(is_above, operation("add", below, 1.0), below)
    return select(operation("lt", x, 0.0), operation("neg", nearest), nearest)


def _tangent(x: Value) -> Value:
    return operation("truediv", operation("sin", x), operation("cos", x))


def _inverted(n: Value) -> Value:
    """The bits of a whole number, each inverted."""
    return operation("bit_xor", n, literal(-1 if n.dtype.is_signed else 2**n.dtype.bits - 1, n.dtype))


_OTHERS: dict[str, Callable[[Value], Value]] = {"round": _rounded, "tan": _tangent, "invert": _inverted}
_UNKNOWN = frozenset(("random", "bit_cast", "popcnt", "clz"))
