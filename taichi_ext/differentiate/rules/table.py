"""The derivative table: one line per operation on real numbers.

A line gives the partials, one per argument: a number, or a function of the arguments and the result ``o``.
``kind`` says how partials meet tangents:

* ``smooth``: the product, accumulated in reverse within a statement.
* ``singular``: a partial can be infinite where the operation is finite (sqrt at 0); a zero tangent stays zero.
* ``choice``: one of the arguments is picked, and its tangent; ``picks`` gives one condition per argument, from the
  arguments and the result.
* ``guarded``: the product of a possibly zero tangent and a possibly infinite partial, differentiated again.
* ``unknown``: a value without a line: its tangent is that of what is read, or an error.

Kinks follow Taichi: ``abs'(0) = 0``; max and min take the operand that is the value, at a tie the right-hand one and
beside NaN the other; ``x % y`` has the partials 1 and ``-floor(x / y)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from taichi_ext.program import Const, FoldedConst, Op, Type, Value
from taichi_ext.program.build import (
    GUARDED,
    GUARDED_BOTH,
    INVERSE,
    REPLACED,
    Coefficient,
    add,
    is_number,
    is_same,
    literal,
    multiply,
    negative,
    operation,
    select,
    subtract,
    written_out,
)

Partial = Coefficient | Callable[..., Coefficient] | None  # from arguments and result; None: of a choice


@dataclass(frozen=True)
class Rule:
    """How one operation is differentiated."""

    name: str
    partials: tuple[Partial, ...]
    kind: str = "smooth"
    picks: Callable[..., tuple[Value | None, ...]] | None = None
    takes: str = "a"  # inputs of the partials: the arguments "a", the result "o", both "ao", none ""


def _div(a: Coefficient, b: Coefficient) -> Value:
    return operation("truediv", a, b)


def _square(a: Coefficient) -> Coefficient:
    return multiply(a, a)


def _sign(x: Value) -> Value:
    one, zero = literal(1, x.dtype), literal(0, x.dtype)
    return select(operation("gt", x, zero), one, select(operation("lt", x, zero), negative(one), zero))


def _pow_base(a: Value, b: Value, o: Value) -> Coefficient:
    if isinstance(b, Const):
        if b.value == 0:
            return 0
        return multiply(2, a) if b.value == 2 else multiply(b.value, operation("pow", a, Const(b.value - 1, b.dtype)))
    # b * a**(b - 1) is 0 * inf at a = b = 0, where the derivative of a**0 is 0
    power = operation("pow", a, operation("sub", b, 1))
    return select(operation("eq", b, 0), literal(0, o.dtype), multiply(b, power))


def _pow_exponent(a: Value, b: Value, o: Value) -> Coefficient:
    # 0**b is 0 for every b > 0: no 0 * log(0)
    is_zero = operation("eq", a, 0.0)
    log = operation("log", select(is_zero, 1.0, a) if not isinstance(a, Const) else a)
    return select(is_zero, 0.0, multiply(o, log))


def _inverse_square_sum(a: Coefficient, b: Coefficient) -> Value:
    return _div(1.0, add(_square(a), _square(b)))


_FIRST = lambda a, b, o: (operation("logical_not", operation("eq", o, b)), None)  # noqa: E731
_DIVISION = (lambda a, b, o: _div(1.0, b), lambda a, b, o: negative(multiply(o, _div(1.0, b))))

_TABLE = [
    Rule("add", (1, 1), takes=""),
    Rule("sub", (1, -1), takes=""),
    Rule("mul", (lambda a, b, o: b, lambda a, b, o: a)),
    Rule("truediv", _DIVISION, takes="ao"),
    Rule("raw_div", _DIVISION, takes="ao"),
    Rule("mod", (1, lambda a, b, o: negative(operation("floor", _div(a, b))))),
    Rule("pow", (_pow_base, _pow_exponent), kind="singular", takes="ao"),
    Rule("neg", (-1,), takes=""),
    Rule("cast", (1,), takes=""),
    Rule("abs", (lambda a, o: _sign(a),)),
    Rule("sin", (lambda a, o: operation("cos", a),)),
    Rule("cos", (lambda a, o: negative(operation("sin", a)),)),
    Rule("tan", (lambda a, o: add(1, _square(o)),), takes="o"),
    Rule("tanh", (lambda a, o: subtract(1, _square(o)),), takes="o"),
    Rule("asin", (lambda a, o: operation("rsqrt", subtract(1.0, _square(a))),), kind="singular"),
    Rule("acos", (lambda a, o: negative(operation("rsqrt", subtract(1.0, _square(a)))),), kind="singular"),
    Rule("exp", (lambda a, o: o,), takes="o"),
    Rule("log", (lambda a, o: _div(1.0, a),), kind="singular"),
    Rule("sqrt", (lambda a, o: multiply(0.5, _div(1.0, o)),), kind="singular", takes="o"),
    Rule("rsqrt", (lambda a, o: multiply(-0.5, multiply(o, multiply(o, o))),), kind="singular", takes="o"),
    Rule(
        "atan2",
        (
            lambda a, b, o: multiply(b, _inverse_square_sum(a, b)),
            lambda a, b, o: negative(multiply(a, _inverse_square_sum(a, b))),
        ),
        kind="singular",
    ),
    Rule("max", (1, 1), kind="choice", picks=_FIRST),
    Rule("min", (1, 1), kind="choice", picks=_FIRST),
    Rule("select", (None, 1, 1), kind="choice"),
    Rule(GUARDED, (None, None), kind="guarded"),
    Rule(GUARDED_BOTH, (None, None), kind="guarded"),
    # not 0 at 0: there the second derivative is infinite, and must not become 0
    Rule(REPLACED, (None, 1), takes=""),
    Rule(INVERSE, (lambda a, o: negative(_div(1.0, _square(a))),)),
]
RULES = {rule.name: rule for rule in _TABLE}
_UNKNOWN, _KNOWN = Rule("", (), kind="unknown"), Rule("known", (1,))
_SQUARE = Rule("square", (lambda a, b, o: multiply(2, a), 0))  # x * x: one argument, twice


# a norm: where it is 0, the tangents of the squares are 0 for any tangents of the numbers
_NORM = Rule("norm", (lambda a, o: select(operation("eq", o, 0.0), 0.0, _div(0.5, o)),), takes="o")


@dataclass(frozen=True)
class Rules:
    """The lines for a differentiation whose result is the end (``LAST``), or is differentiated again (``AGAIN``)."""

    lines: Mapping[str, Rule]
    norm: Rule
    finish: Callable[[Value], Value]  # writes products of a possibly infinite factor
    smooth_base: float = math.inf  # the sign of a base from which on its powers from 1 on have finite partials
    roots: frozenset[str] = frozenset()  # functions whose powers in a product are one factor


# where a tangent or exponent is 0, its derivative may be nonzero
_AGAIN = {
    "pow": Rule("pow", (lambda a, b, o: _pow_base_again(a, b, o), _pow_exponent), kind="singular", takes="ao"),
    "log": replace(RULES["log"], kind="smooth"),  # the value is infinite where the partial is
    "rsqrt": replace(RULES["rsqrt"], kind="smooth"),
}
_NORM_AGAIN = replace(_NORM, partials=(lambda a, o: multiply(0.5, operation(INVERSE, o)),))
LAST = Rules(RULES, _NORM, written_out)
AGAIN = Rules(RULES | _AGAIN, _NORM_AGAIN, lambda product: product, 0, frozenset(("sqrt",)))


def _pow_base_again(a: Value, b: Value, o: Value) -> Coefficient:
    if isinstance(b, Const):
        return _pow_base(a, b, o)
    return operation(GUARDED, b, operation("pow", a, operation("sub", b, 1)))


def rule_of(op: Value, definition: Callable[[Value], Value], rules: Rules) -> Rule:
    """The line for an operation; for all other values one of kind "unknown".

    ``definition`` gives the definition of a local that does not change.
    """
    if not isinstance(op, Op):
        return _KNOWN if isinstance(op, FoldedConst) else _UNKNOWN
    rule = rules.lines.get(op.name, _UNKNOWN)
    if op.name == "mul" and is_same(*op.args):
        return _SQUARE
    if op.name in ("sqrt", "rsqrt", "log") and sign_of(op.args[0], definition) > 0:
        return replace(rule, kind="smooth")
    if op.name == "sqrt" and _is_sum_of_squares(op.args[0], definition):
        return rules.norm
    exponent = op.args[1] if op.name == "pow" else None
    if isinstance(exponent, Const) and exponent.value >= 1:
        is_finite = float(exponent.value).is_integer() or sign_of(op.args[0], definition) >= rules.smooth_base
        return replace(rule, kind="smooth", takes="a") if is_finite else rule
    return rule


def partials_of_operation(
    node: Op, rule: Rule, keep: Callable[[Value, Type | None], Value], has: Callable[[Value], bool]
) -> Iterator[tuple[Value, Coefficient]]:
    """The operands that have tangents, each with its partial, unless that is 0.

    Args:
        node: the operation.
        rule: its line.
        keep: evaluates an operand or the result, in a type.
        has: whether an operand has a tangent.
    """
    values: list[Value | None] | None = None
    for arg, partial in zip(node.args, rule.partials, strict=False):
        if partial is None or not has(arg):
            continue
        if callable(partial):
            if values is None:
                dtype = None if node.name == "pow" else node.dtype
                values = [keep(a, dtype) if "a" in rule.takes else None for a in node.args]
                values.append(keep(node, None) if "o" in rule.takes else None)
            partial = partial(*values)
        if not is_number(partial, 0):
            yield arg, partial


def _is_sum_of_squares(x: Value, definition: Callable[[Value], Value]) -> bool:
    pending = [x]
    while pending:
        x = definition(pending.pop())
        if isinstance(x, Op) and x.name == "add":
            pending += x.args
        elif not _is_square(x):
            return False
    return True


def _is_square(x: Value) -> bool:
    if not isinstance(x, Op) or x.name not in ("mul", "pow"):
        return False
    a, b = x.args
    return is_number(b, 2) if x.name == "pow" else is_same(a, b)


def sign_of(x: Value, definition: Callable[[Value], Value]) -> float:
    """1 for a value known to be positive, 0 for one known to be nonnegative, else -1."""
    x = definition(x)
    if isinstance(x, Const):
        return (x.value > 0) - (x.value < 0)
    if isinstance(x, Op):
        if x.name == "add":
            signs = [sign_of(a, definition) for a in x.args]
            return max(signs) if min(signs) >= 0 else -1
        return 0 if _is_square(x) or x.name in ("abs", "sqrt", "exp") else -1
    return -1
