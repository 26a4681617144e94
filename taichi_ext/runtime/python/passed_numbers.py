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
        self._warn("converts it, or a number computed from it, to a plain float: the value computed from that")
        return self.value

    def _warn(self, use: str) -> None:
        if not self.run.is_over:
            self.run.warn(
                f"{quoted(self.names)} is a parameter, and Python {use} counts as a constant. "
                "Use operators or functions of NumPy, or compute it in a kernel."
            )

    def __getattr__(self, name: str) -> object:
        """Other attributes of floats."""
        return getattr(float(self) if hasattr(float, name) else self.value, name)

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **options: object) -> object:
        """Apply NumPy's functions by the operators and methods of this class; other functions take the floats."""
        as_objects = [np.array(x, object) if is_passed(x) else x for x in inputs]
        if function in _OF_VALUES:
            return getattr(function, method)(*map(plain_number, inputs), **options)
        if function.__name__ in _RULES and method == "__call__" and not options and all(map(_is_scalar, inputs)):
            return _rule(function.__name__)(*inputs)
        try:
            return getattr(function, method)(*as_objects, **options)
        except (TypeError, AttributeError):
            return getattr(function, method)(*(float(x) if is_passed(x) else x for x in inputs), **options)

    def __copy__(self) -> float | PassedNumber:
        return self.value if self.run.is_over else self

    def __deepcopy__(self, _: object) -> float | PassedNumber:
        return self.__copy__()

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)

    def __hash__(self) -> int:
        self._warn("looks up by its value, or that of a number computed from it: the value found")
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

    def __divmod__(self, other: Any) -> object:
        return (self // other, self % other) if _is_scalar(other) else NotImplemented

    def __rdivmod__(self, other: Any) -> object:
        return (other // self, other % self) if _is_scalar(other) else NotImplemented


def _combined(value: Any, parts: Sequence[tuple[PassedNumber, float]]) -> object:
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


def is_passed(x: object) -> bool:
    """Whether a value is a ``PassedNumber``."""
    return type(x) is PassedNumber


def _is_scalar(x: object) -> bool:
    return is_passed(x) or isinstance(x, (int, float, np.integer, np.floating, np.bool_))


def plain_number(x: Any) -> Any:
    """A number without its tangent."""
    return x.value if is_passed(x) else x


def _by_exponent(a: float, b: float) -> float:
    if a == 0:
        return 0.0 if b > 0 else -math.inf
    return a**b * math.log(a) if a > 0 else math.nan


# By name, as operators and NumPy's functions have it: the function, and its partials at y = f(a, b) or y = f(x).
_RULES: dict[str, tuple[Callable[..., Any], ...]] = {
    "add": (operator.add, lambda y, a, b: 1.0, lambda y, a, b: 1.0),
    "sub": (operator.sub, lambda y, a, b: 1.0, lambda y, a, b: -1.0),
    "mul": (operator.mul, lambda y, a, b: b, lambda y, a, b: a),
    "truediv": (operator.truediv, lambda y, a, b: 1 / b, lambda y, a, b: -a / (b * b)),
    "pow": (operator.pow, lambda y, a, b: b * a ** (b - 1) if b else 0.0, lambda y, a, b: _by_exponent(a, b)),
    "mod": (operator.mod, lambda y, a, b: 1.0, lambda y, a, b: -float(a // b)),
    "floordiv": (operator.floordiv, lambda y, a, b: 0.0, lambda y, a, b: 0.0),
    "arctan2": (math.atan2, lambda y, a, b: b / (a * a + b * b), lambda y, a, b: -a / (a * a + b * b)),
    "hypot": (math.hypot, lambda y, a, b: a / math.hypot(a, b), lambda y, a, b: b / math.hypot(a, b)),
    "__neg__": (operator.neg, lambda y, x: -1.0),
    "__pos__": (operator.pos, lambda y, x: 1.0),
    "__abs__": (abs, lambda y, x: math.copysign(1.0, x) if x else 0.0),
    "sqrt": (math.sqrt, lambda y, x: 0.5 / y if y else math.inf),
    "exp": (math.exp, lambda y, x: y),
    "log": (math.log, lambda y, x: 1 / x),
    "sin": (math.sin, lambda y, x: math.cos(x)),
    "cos": (math.cos, lambda y, x: -math.sin(x)),
    "tan": (math.tan, lambda y, x: 1 + y * y),
    "sinh": (math.sinh, lambda y, x: math.cosh(x)),
    "cosh": (math.cosh, lambda y, x: math.sinh(x)),
    "tanh": (math.tanh, lambda y, x: 1 - y * y),
    "expm1": (math.expm1, lambda y, x: y + 1),
    "log1p": (math.log1p, lambda y, x: 1 / (1 + x)),
    "log2": (math.log2, lambda y, x: 1 / (x * math.log(2))),
    "log10": (math.log10, lambda y, x: 1 / (x * math.log(10))),
    "arcsin": (math.asin, lambda y, x: 1 / math.sqrt(1 - x * x)),
    "arccos": (math.acos, lambda y, x: -1 / math.sqrt(1 - x * x)),
    "arctan": (math.atan, lambda y, x: 1 / (1 + x * x)),
    "deg2rad": (math.radians, lambda y, x: math.pi / 180),
    "radians": (math.radians, lambda y, x: math.pi / 180),
    "rad2deg": (math.degrees, lambda y, x: 180 / math.pi),
    "degrees": (math.degrees, lambda y, x: 180 / math.pi),
    "square": (lambda x: x * x, lambda y, x: 2 * x),
    "conjugate": (operator.pos, lambda y, x: 1.0),
    "rint": (lambda x: float(round(x)), lambda y, x: 0.0),
}
_OPERATORS = ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv")
# methods of the plain value; where they give numbers, their derivative is 0, as in kernels
_PLAIN = ("__repr__", "__str__", "__format__", "__bool__", "__int__", "__trunc__", "__floor__", "__ceil__", "__round__")
_OF_VALUES = (np.isfinite, np.isinf, np.isnan, np.signbit)


def _rule(name: str) -> Callable[..., object]:
    function, *partials = _RULES[name]

    def apply(*operands: Any) -> object:
        if not all(map(_is_scalar, operands)):
            is_other = any(isinstance(n, complex) or backend.is_torch_tensor(n) for n in operands)
            return function(*(float(n) if is_passed(n) else n for n in operands)) if is_other else NotImplemented
        values = [plain_number(n) for n in operands]
        value, floats = function(*values), list(map(float, values))
        pairs = zip(operands, partials, strict=True)
        return _combined(value, [(n, partial(value, *floats)) for n, partial in pairs if is_passed(n)])

    return apply


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: function(self.value, plain_number(other)) if _is_scalar(other) else NotImplemented


for _name in _RULES:
    _apply = _rule(_name)
    if _name in _OPERATORS:
        setattr(PassedNumber, f"__r{_name}__", lambda self, other, apply=_apply: apply(other, self))
    setattr(PassedNumber, f"__{_name}__" if _name in _OPERATORS else _name, _apply)
for _name in (*_PLAIN, "is_integer"):
    setattr(PassedNumber, _name, lambda self, *args, name=_name: getattr(self.value, name)(*args))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(PassedNumber, f"__{_name}__", _comparison(getattr(operator, _name)))


def with_tangents(value: Any, name: str, column: int, run: PipelineRun) -> object:
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
