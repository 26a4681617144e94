"""Numbers among the arguments of a pipeline that are parameters: they carry their tangent to the kernels.

The pipeline gets ``PassedNumber``s in their place. Python's operators, and NumPy's functions of single numbers, apply
the chain rule. A conversion to a plain float loses the tangent, which gives a warning.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError

Tangent = dict[int, float]  # coefficients by column of J


@dataclass
class PipelineRun:
    """One run of a pipeline, to which passed numbers belong.

    Attributes:
        warn: gives a warning at the user's line.
        is_over: whether the pipeline has returned; from then on the numbers are plain ones.
        passed: the names of the parameters that kernels were given.
    """

    warn: Callable[[str], None]
    is_over: bool = False
    passed: set[str] = field(default_factory=set)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.is_over = True


class PassedNumber:
    """A float that depends on parameters; to ``isinstance`` it is a float.

    Attributes:
        value: the float.
        tangent: its derivative.
        names: of the parameters that it depends on.
        run: the run of the pipeline that it belongs to.
    """

    __slots__ = ("names", "run", "tangent", "value")

    def __init__(self, value: float, tangent: Tangent, names: frozenset[str], run: PipelineRun) -> None:
        self.value, self.tangent, self.names, self.run = value, tangent, names, run

    @property
    def __class__(self) -> type:  # type: ignore[override]  # for isinstance: Taichi checks the types of arguments
        return float

    @__class__.setter
    def __class__(self, _: type) -> None:
        raise TypeError("the class of a number cannot be changed")

    def __float__(self) -> float:
        self._warn("converts it, or a number computed from it, to a plain float: what is computed from that")
        return self.value

    def _warn(self, use: str) -> None:
        if not self.run.is_over:
            self.run.warn(
                f"{quoted(self.names)} is a parameter, and Python {use} counts as a constant. "
                "Use operators or functions of NumPy, or compute it in a kernel."
            )

    def __getattr__(self, name: str) -> Any:
        """Other attributes of floats."""
        return getattr(float(self) if hasattr(float, name) else self.value, name)

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Apply NumPy's functions by the operators and methods of this class; other functions take the floats."""
        as_objects = [np.array(x, object) if is_passed(x) else x for x in inputs]
        if function in _OF_VALUES:
            return getattr(function, method)(*map(plain_number, inputs), **options)
        if function in _OF_TWO and method == "__call__" and not options and all(map(_is_scalar, inputs)):
            return _OF_TWO[function](*inputs)
        try:
            return getattr(function, method)(*as_objects, **options)
        except (TypeError, AttributeError):
            return getattr(function, method)(*(float(x) if is_passed(x) else x for x in inputs), **options)

    def __copy__(self) -> Any:
        return self.value if self.run.is_over else self

    def __deepcopy__(self, _: Any) -> Any:
        return self.__copy__()

    def __reduce__(self) -> Any:
        return float, (float(self),)

    def __hash__(self) -> int:
        self._warn("looks up by its value, or that of a number computed from it: what is found")
        return hash(self.value)

    def __index__(self) -> int:
        raise UnsupportedError(
            f"{quoted(self.names)} is a parameter, and Python uses it, or a number computed from it, as a count or an "
            "index. Whole numbers have no derivative: leave it out of params, or convert it: int(...)."
        )

    @property
    def real(self) -> PassedNumber:
        """The number itself."""
        return self

    def __divmod__(self, other: Any) -> Any:
        return (self // other, self % other) if _is_scalar(other) else NotImplemented

    def __rdivmod__(self, other: Any) -> Any:
        return (other // self, other % self) if _is_scalar(other) else NotImplemented


def _combined(value: Any, parts: Sequence[tuple[PassedNumber, float]]) -> Any:
    """A number computed from others, each with the partial derivative with respect to it."""
    run = parts[0][0].run
    if run.is_over:
        return value
    tangent: Tangent = {}
    for number, partial in parts:
        for column, coefficient in number.tangent.items():
            if coefficient:  # a tangent that is zero stays zero where the partial is infinite
                tangent[column] = tangent.get(column, 0.0) + partial * coefficient
    names = frozenset().union(*(number.names for number, _ in parts))
    return PassedNumber(float(value), tangent, names, run)


def is_passed(x: Any) -> bool:
    """Whether a value is a ``PassedNumber``."""
    return type(x) is PassedNumber


def _is_scalar(x: Any) -> bool:
    return is_passed(x) or isinstance(x, (int, float, np.integer, np.floating, np.bool_))


def plain_number(x: Any) -> Any:
    """A number without its tangent."""
    return x.value if is_passed(x) else x


def _by_exponent(a: float, b: float) -> float:
    if a == 0:
        return 0.0 if b > 0 else -math.inf
    return a**b * math.log(a) if a > 0 else math.nan


# by operator: the function, and the partials with respect to both operands
_BINARY: dict[str, tuple[Callable[[Any, Any], Any], Callable[[float, float], float], Callable[[float, float], float]]]
_BINARY = {
    "add": (operator.add, lambda a, b: 1.0, lambda a, b: 1.0),
    "sub": (operator.sub, lambda a, b: 1.0, lambda a, b: -1.0),
    "mul": (operator.mul, lambda a, b: b, lambda a, b: a),
    "truediv": (operator.truediv, lambda a, b: 1 / b, lambda a, b: -a / (b * b)),
    "pow": (operator.pow, lambda a, b: b * a ** (b - 1) if b else 0.0, _by_exponent),
    "mod": (operator.mod, lambda a, b: 1.0, lambda a, b: -float(a // b)),
    "floordiv": (operator.floordiv, lambda a, b: 0.0, lambda a, b: 0.0),
    "arctan2": (math.atan2, lambda a, b: b / (a * a + b * b), lambda a, b: -a / (a * a + b * b)),
    "hypot": (math.hypot, lambda a, b: a / math.hypot(a, b), lambda a, b: b / math.hypot(a, b)),
}
# by method (NumPy's functions of objects call these, too): the function y(x), and its derivative from x and y
_UNARY: dict[str, tuple[Callable[[float], float], Callable[[float, float], float]]] = {
    "__neg__": (operator.neg, lambda x, y: -1.0),
    "__pos__": (operator.pos, lambda x, y: 1.0),
    "__abs__": (abs, lambda x, y: math.copysign(1.0, x) if x else 0.0),
    "sqrt": (math.sqrt, lambda x, y: 0.5 / y if y else math.inf),
    "exp": (math.exp, lambda x, y: y),
    "log": (math.log, lambda x, y: 1 / x),
    "sin": (math.sin, lambda x, y: math.cos(x)),
    "cos": (math.cos, lambda x, y: -math.sin(x)),
    "tan": (math.tan, lambda x, y: 1 + y * y),
    "sinh": (math.sinh, lambda x, y: math.cosh(x)),
    "cosh": (math.cosh, lambda x, y: math.sinh(x)),
    "tanh": (math.tanh, lambda x, y: 1 - y * y),
    "expm1": (math.expm1, lambda x, y: y + 1),
    "log1p": (math.log1p, lambda x, y: 1 / (1 + x)),
    "log2": (math.log2, lambda x, y: 1 / (x * math.log(2))),
    "log10": (math.log10, lambda x, y: 1 / (x * math.log(10))),
    "arcsin": (math.asin, lambda x, y: 1 / math.sqrt(1 - x * x)),
    "arccos": (math.acos, lambda x, y: -1 / math.sqrt(1 - x * x)),
    "arctan": (math.atan, lambda x, y: 1 / (1 + x * x)),
    "deg2rad": (math.radians, lambda x, y: math.pi / 180),
    "radians": (math.radians, lambda x, y: math.pi / 180),
    "rad2deg": (math.degrees, lambda x, y: 180 / math.pi),
    "degrees": (math.degrees, lambda x, y: 180 / math.pi),
    "square": (lambda x: x * x, lambda x, y: 2 * x),
    "conjugate": (operator.pos, lambda x, y: 1.0),
    "rint": (lambda x: float(round(x)), lambda x, y: 0.0),
}
# methods of the plain value; where they give numbers, their derivative is 0, as in kernels
_PLAIN = ("__repr__", "__str__", "__format__", "__bool__", "__int__", "__trunc__", "__floor__", "__ceil__", "__round__")
_OF_VALUES = (np.isfinite, np.isinf, np.isnan, np.signbit)


def _binary(name: str) -> Callable[[Any, Any], Any]:
    function, by_first, by_second = _BINARY[name]

    def apply(a: Any, b: Any) -> Any:
        if not (_is_scalar(a) and _is_scalar(b)):
            other = b if is_passed(a) else a
            is_other = isinstance(other, complex) or backend.is_torch_tensor(other)
            return function(*(float(n) if is_passed(n) else n for n in (a, b))) if is_other else NotImplemented
        x, y = plain_number(a), plain_number(b)
        value = function(x, y)
        parts = [(n, p(float(x), float(y))) for n, p in ((a, by_first), (b, by_second)) if is_passed(n)]
        return _combined(value, parts)

    return apply


def _unary(name: str) -> Callable[[PassedNumber], Any]:
    function, derivative = _UNARY[name]

    def apply(self: PassedNumber) -> Any:
        value = function(self.value)
        return _combined(value, [(self, derivative(self.value, value))])

    return apply


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: function(self.value, plain_number(other)) if _is_scalar(other) else NotImplemented


for _name in _BINARY:
    _apply = _binary(_name)
    setattr(PassedNumber, f"__{_name}__", _apply)
    setattr(PassedNumber, f"__r{_name}__", lambda self, other, apply=_apply: apply(other, self))
_OF_TWO = {np.arctan2: _binary("arctan2"), np.hypot: _binary("hypot")}
for _name in _UNARY:
    setattr(PassedNumber, _name, _unary(_name))
for _name in (*_PLAIN, "is_integer"):
    setattr(PassedNumber, _name, lambda self, *args, name=_name: getattr(self.value, name)(*args))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(PassedNumber, f"__{_name}__", _comparison(getattr(operator, _name)))


def with_tangents(value: Any, name: str, column: int, run: PipelineRun) -> Any:
    """A number, vector or sequence of numbers like ``value`` that is a parameter, its columns from one on."""
    entries = np.array(value.to_numpy() if isinstance(value, backend.Matrix) else value, float)
    numbers = [PassedNumber(float(x), {column + n: 1.0}, frozenset({name}), run) for n, x in enumerate(entries.flat)]
    if entries.ndim == 0:
        return numbers[0]
    if isinstance(value, backend.Matrix):
        held = np.empty(entries.shape, object)
        held.ravel()[:] = numbers
        return backend.Matrix(held.tolist())
    return type(value)(*numbers) if hasattr(value, "_fields") else type(value)(numbers)


def quoted(names: frozenset[str]) -> str:
    """Names as messages show them."""
    return ", ".join(map(repr, sorted(names)))
