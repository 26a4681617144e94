"""Partials of operators and of functions of NumPy and ``math``, by which dual numbers apply the chain rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def _by_exponent(y: float, a: float, b: float) -> float:
    if a == 0:
        return 0.0 if b > 0 else -math.inf
    return y * math.log(a) if a > 0 else math.nan


_ONE: tuple[Callable[..., float], ...] = (lambda y, x: 1.0,)
_ZERO: tuple[Callable[..., float], ...] = (lambda y, x: 0.0,)
# Partials at y = f(a, b) or y = f(x), by the names of operators, of functions of NumPy and of ``math``.
PARTIALS: dict[str, tuple[Callable[..., float], ...]] = {
    "add": (lambda y, a, b: 1.0, lambda y, a, b: 1.0),
    "sub": (lambda y, a, b: 1.0, lambda y, a, b: -1.0),
    "mul": (lambda y, a, b: b, lambda y, a, b: a),
    "truediv": (lambda y, a, b: 1 / b, lambda y, a, b: -y / b),
    "pow": (lambda y, a, b: b * a ** (b - 1) if b else 0.0, _by_exponent),
    # with whole quotients that are rounded down, to zero, or to the nearest (that of ``math``)
    **dict.fromkeys(("mod", "fmod", "remainder"), (lambda y, a, b: 1.0, lambda y, a, b: (y - a) / b)),
    "floordiv": (lambda y, a, b: 0.0, lambda y, a, b: 0.0),
    "arctan2": (lambda y, a, b: b / (a * a + b * b), lambda y, a, b: -a / (a * a + b * b)),
    "hypot": (lambda y, a, b: a / y if y else 0.0, lambda y, a, b: b / y if y else 0.0),
    "fma": (lambda y, a, b, c: b, lambda y, a, b, c: a, lambda y, a, b, c: 1.0),  # of Python 3.13
    "ldexp": (lambda y, a, b: 2.0**b, lambda y, a, b: 0.0),
    "heaviside": (lambda y, a, b: 0.0, lambda y, a, b: float(a == 0)),
    **dict.fromkeys(("maximum", "minimum"), (lambda y, a, b: float(y == a), lambda y, a, b: float(y != a))),
    "copysign": (lambda y, a, b: y / a if a else 0.0, lambda y, a, b: 0.0),
    "logaddexp": (lambda y, a, b: math.exp(a - y), lambda y, a, b: math.exp(b - y)),
    "logaddexp2": (lambda y, a, b: 2.0 ** (a - y), lambda y, a, b: 2.0 ** (b - y)),
    "neg": (lambda y, x: -1.0,),
    "pos": _ONE,
    "conjugate": _ONE,
    "abs": (lambda y, x: math.copysign(1.0, x) if x else 0.0,),
    "sqrt": (lambda y, x: 0.5 / y,),
    "cbrt": (lambda y, x: 1 / (3 * y * y),),
    "exp": (lambda y, x: y,),
    "exp2": (lambda y, x: y * math.log(2),),
    "expm1": (lambda y, x: y + 1,),
    "log": (lambda y, x: 1 / x,),
    "log1p": (lambda y, x: 1 / (1 + x),),
    "log2": (lambda y, x: 1 / (x * math.log(2)),),
    "log10": (lambda y, x: 1 / (x * math.log(10)),),
    "sin": (lambda y, x: math.cos(x),),
    "cos": (lambda y, x: -math.sin(x),),
    "tan": (lambda y, x: 1 + y * y,),
    "sinh": (lambda y, x: math.cosh(x),),
    "cosh": (lambda y, x: math.sinh(x),),
    "tanh": (lambda y, x: 1 - y * y,),
    "arcsin": (lambda y, x: 1 / math.sqrt(1 - x * x),),
    "arccos": (lambda y, x: -1 / math.sqrt(1 - x * x),),
    "arctan": (lambda y, x: 1 / (1 + x * x),),
    "arcsinh": (lambda y, x: 1 / math.sqrt(1 + x * x),),
    "arccosh": (lambda y, x: 1 / math.sqrt(x * x - 1),),
    "arctanh": (lambda y, x: 1 / (1 - x * x),),
    "erf": (lambda y, x: 2 / math.sqrt(math.pi) * math.exp(-x * x),),
    "erfc": (lambda y, x: -2 / math.sqrt(math.pi) * math.exp(-x * x),),
    "deg2rad": (lambda y, x: math.pi / 180,),
    "rad2deg": (lambda y, x: 180 / math.pi,),
    "square": (lambda y, x: 2 * x,),
    "reciprocal": (lambda y, x: -y * y,),
    **dict.fromkeys(("sign", "rint", "floor", "ceil", "trunc"), _ZERO),
}
# other names of the same functions: of NumPy, then of ``math``
_SAME = {"subtract": "sub", "multiply": "mul", "divide": "truediv", "true_divide": "truediv", "power": "pow"}
_SAME |= {"floor_divide": "floordiv", "negative": "neg", "positive": "pos", "absolute": "abs"}
_SAME |= {"fabs": "abs", "fmax": "maximum", "fmin": "minimum", "float_power": "pow", "degrees": "rad2deg"}
_SAME |= {"radians": "deg2rad", "acos": "arccos", "asin": "arcsin", "atan": "arctan", "atan2": "arctan2"}
_SAME |= {"acosh": "arccosh", "asinh": "arcsinh", "atanh": "arctanh"}
PARTIALS |= {name: PARTIALS[same] for name, same in _SAME.items()}


def ratios(count: int) -> list[Callable[..., Any]]:
    """Partials of a root of a sum of squares."""
    return [lambda y, *x, k=k: x[k] / y if y else 0.0 for k in range(count)]


def of_logarithm(count: int) -> tuple[Callable[..., Any], ...]:
    """Partials of a logarithm, to a base if there are two arguments."""
    if count == 1:
        return PARTIALS["log"]
    return lambda y, x, base: 1 / (x * math.log(base)), lambda y, x, base: -y / (base * math.log(base))
