"""The derivative table: one line per primitive operation.

A rule gives the operation itself (Taichi's own, so that the primal cannot drift) and its partials, one per argument: a
number, or a function of the arguments and the result ``o`` that builds the partial as an expression.  ``None`` marks an
argument whose tangent does not matter (an integer, a condition).

``kind`` says how the partials meet the tangents:

* ``smooth``: the product, accumulated in reverse within a statement.
* ``singular``: the partial can be infinite at points where the operation itself is finite (sqrt at 0); a tangent that
  is zero there stays zero.
* ``choice``: the operation picks one of its arguments, and the tangent of that one; what was not picked is not touched,
  not even by multiplying a NaN with zero.  ``picks`` then gives one condition per argument.
* ``constant``: the derivative is zero wherever it exists (floor, comparisons).

``domain`` is the set of intervals from which the tests draw the arguments.

Kinks follow Taichi: ``abs'(0) = 0``; at a tie, max and min take the right-hand operand; ``x % y`` has the partials 1
and ``-floor(x / y)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from taichi_ext.backend import dtype_of, is_expr, ops

Interval = tuple[float, float]


@dataclass(frozen=True)
class Rule:
    """How one primitive operation is differentiated."""

    name: str
    primal: Callable[..., Any]
    partials: tuple[Any, ...]
    kind: str = "smooth"
    picks: Callable[..., tuple[Any, ...]] | None = None
    domain: tuple[Interval, ...] = ()
    promotes: bool = True  # arguments are converted to the type of the result, as Taichi does
    is_whole: bool = False  # on vectors Taichi computes it in another precision, so they are not taken apart
    takes_result: bool = False  # a partial needs the result


def _sign(x: Any) -> Any:
    return ops.select(x > 0, _like(1.0, x), ops.select(x < 0, _like(-1.0, x), _like(0.0, x)))


def _like(value: float, x: Any) -> Any:
    """A literal of the type of x."""
    return ops.cast(value, dtype_of(x)) if is_expr(x) else value


def _pow_base(a: Any, b: Any, o: Any) -> Any:
    if not is_expr(b):
        if b == 0:
            return 0
        return 2 * a if b == 2 else b * ops.pow(a, b - 1)
    # b * a**(b - 1) is 0 * inf at a = b = 0, where the derivative of a**0 is 0
    return ops.select(b == 0, _like(0.0, o), b * ops.pow(a, b - 1))


def _pow_exponent(a: Any, b: Any, o: Any) -> Any:
    if not is_expr(a):
        return o * ops.log(a) if a > 0 else _like(0.0, o)
    # 0**b is 0 for every b > 0: no 0 * log(0)
    return ops.select(a == 0, _like(0.0, o), o * ops.log(ops.select(a == 0, _like(1.0, a), a)))


def _max_picks(a: Any, b: Any) -> tuple[Any, ...]:
    return (a > b, None)


def _min_picks(a: Any, b: Any) -> tuple[Any, ...]:
    return (a < b, None)


R = (-2.0, 2.0)
POSITIVE = (0.2, 3.0)
UNIT = (-0.9, 0.9)

_TABLE = [
    Rule("add", ops.add, (1, 1), domain=(R, R)),
    Rule("sub", ops.sub, (1, -1), domain=(R, R)),
    Rule("mul", ops.mul, (lambda a, b, o: b, lambda a, b, o: a), domain=(R, R)),
    Rule(
        "truediv",
        ops.truediv,
        (lambda a, b, o: 1 / b, lambda a, b, o: -o * (1 / b)),
        takes_result=True,
        domain=(R, POSITIVE),
    ),
    Rule(
        "raw_div",
        ops.raw_div,
        (lambda a, b, o: 1 / b, lambda a, b, o: -o * (1 / b)),
        takes_result=True,
        domain=(R, POSITIVE),
    ),
    Rule("mod", ops.mod, (1, lambda a, b, o: -ops.floor(a / b)), domain=(R, POSITIVE)),
    Rule("floordiv", ops.floordiv, (0, 0), kind="constant", domain=(R, POSITIVE)),
    Rule(
        "pow",
        ops.pow,
        (_pow_base, _pow_exponent),
        kind="singular",
        takes_result=True,
        domain=(POSITIVE, R),
        promotes=False,
    ),
    Rule("neg", ops.neg, (-1,), domain=(R,)),
    Rule("abs", ops.abs, (lambda a, o: _sign(a),), domain=(R,)),
    Rule("sin", ops.sin, (lambda a, o: ops.cos(a),), domain=(R,)),
    Rule("cos", ops.cos, (lambda a, o: -ops.sin(a),), domain=(R,)),
    Rule("tan", ops.tan, (lambda a, o: 1 + o * o,), takes_result=True, domain=((-1.2, 1.2),)),
    Rule("tanh", ops.tanh, (lambda a, o: 1 - o * o,), takes_result=True, domain=(R,)),
    Rule("asin", ops.asin, (lambda a, o: ops.rsqrt(1 - a * a),), kind="singular", domain=(UNIT,)),
    Rule("acos", ops.acos, (lambda a, o: -ops.rsqrt(1 - a * a),), kind="singular", domain=(UNIT,)),
    Rule("exp", ops.exp, (lambda a, o: o,), takes_result=True, domain=(R,)),
    Rule("log", ops.log, (lambda a, o: 1 / a,), kind="singular", domain=(POSITIVE,)),
    Rule("sqrt", ops.sqrt, (lambda a, o: 0.5 * (1 / o),), kind="singular", takes_result=True, domain=(POSITIVE,)),
    Rule("rsqrt", ops.rsqrt, (lambda a, o: -o * o * o / 2,), kind="singular", takes_result=True, domain=(POSITIVE,)),
    Rule(
        "atan2",
        ops.atan2,
        (lambda a, b, o: b * (1 / (a * a + b * b)), lambda a, b, o: -a * (1 / (a * a + b * b))),
        kind="singular",
        domain=(R, POSITIVE),
        is_whole=True,  # Taichi 1.7.4: in float32 on vectors of float64
    ),
    Rule("max", ops.max_impl, (1, 1), kind="choice", picks=_max_picks, domain=(R, R)),
    Rule("min", ops.min_impl, (1, 1), kind="choice", picks=_min_picks, domain=(R, R)),
    Rule("floor", ops.floor, (0,), kind="constant", domain=(R,)),
    Rule("ceil", ops.ceil, (0,), kind="constant", domain=(R,)),
    Rule("round", ops.round, (0,), kind="constant", domain=(R,)),
]

COPY = Rule("copy", lambda a: a, (1,))
SQUARE = Rule("square", lambda a: ops.mul(a, a), (lambda a, o: 2 * a,))  # a * a, whose operands are one value

# The same where the argument is certain to be positive: no partial is infinite, so that nothing need be guarded.
OF_POSITIVE = {rule.name: replace(rule, kind="smooth") for rule in _TABLE if rule.name in ("sqrt", "rsqrt", "log")}

# x ** 2, x ** 3.0: the partial of a whole power of 1 or more is finite; that of x ** 2.5 is NaN at negative x.
FIXED_POWER = replace(next(rule for rule in _TABLE if rule.name == "pow"), kind="smooth")

RULES: dict[str, Rule] = {rule.name: rule for rule in _TABLE}

# The operations of the table as Taichi functions: what a call in a kernel is looked up by.
RULE_OF_FUNCTION: dict[Any, Rule] = {rule.primal: rule for rule in _TABLE}
