"""Programs for Taichi's own reverse mode: constants without a derivative, replacements of missing operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import taichi_ext.program as ir
from taichi_ext.errors import UnsupportedError
from taichi_ext.program.build import cast, literal, operation, select

# By type: the factor of a number before it is rounded, and the magnitude from which on all numbers are whole
_SCALES: dict[ir.Type, tuple[float, float]] = {ir.F64: (2.0**512, 2.0**53), ir.F32: (2.0**64, 2.0**24)}


def as_constant(x: ir.Value) -> ir.Value:
    """The same number without its derivative: Taichi does not differentiate floor.

    It is exact from 2**-460 on in float64, and from 2**-41 on in float32; below, the error is at most 1 / scale.
    """
    if x.dtype == ir.F16:  # too small for the scale
        return cast(as_constant(cast(x, ir.F32)), ir.F16)
    scale, whole = _SCALES[x.dtype]
    rounded = operation("floor", operation("mul", x, literal(scale, x.dtype)))
    small = operation("mul", rounded, literal(1 / scale, x.dtype))
    is_whole = operation("ge", operation("abs", x), literal(whole, x.dtype))
    return ir.Op("select", (is_whole, operation("floor", x), small), x.dtype)


def with_known_operations(program: ir.Program) -> ir.Program:
    """The program without operations that Taichi's reverse mode does not support.

    Raises:
        UnsupportedError: an operation has no replacement.
    """
    body = ir.mapped(program.body, lambda s: ir.with_nodes(s, lambda node: _with_others(node, s)))
    return replace(program, body=body)


def _with_others(value: ir.Value, s: ir.Statement) -> ir.Value:
    if not isinstance(value, ir.Op):
        return value
    if value.name in _OTHERS:
        return _OTHERS[value.name](*value.args)
    if value.name in _UNKNOWN:
        raise UnsupportedError(
            f"{ir.cited(value.place or s.place)}"
            f"Taichi's reverse mode cannot compile {value.name!r}. Use jacobian, which differentiates this "
            "kernel, or compute this value in a kernel before."
        )
    return value


def _rounded(x: ir.Value) -> ir.Value:
    """The nearest whole number; at a tie, the one farther from 0."""
    size = operation("abs", x)
    below = operation("floor", size)
    is_above = operation("ge", operation("sub", size, below), 0.5)
    nearest = select(is_above, operation("add", below, 1.0), below)
    return select(operation("lt", x, 0.0), operation("neg", nearest), nearest)


def _tangent(x: ir.Value) -> ir.Value:
    return operation("truediv", operation("sin", x), operation("cos", x))


def _inverted(n: ir.Value) -> ir.Value:
    """The bits of a whole number, each inverted."""
    return operation("bit_xor", n, literal(-1 if n.dtype.is_signed else 2**n.dtype.bits - 1, n.dtype))


_OTHERS: dict[str, Callable[[ir.Value], ir.Value]] = {"round": _rounded, "tan": _tangent, "invert": _inverted}
_UNKNOWN = frozenset(("random", "bit_cast", "popcnt", "clz"))
