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
from taichi_ext.record.variables import Variable, number_shape
from taichi_ext.runtime.memory import Shadow

Tangent = dict[int, float]  # coefficients by column of J


@dataclass
class PipelineRun:
    """The run of a pipeline that numbers belong to.

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
    def __class__(self) -> type:  # type: ignore[override]  # for isinstance: Taichi checks what it is given
        return float

    @__class__.setter
    def __class__(self, _: type) -> None:
        raise TypeError("the class of a number cannot be changed")

    def __float__(self) -> float:
        if not self.run.is_over:
            self.run.warn(
                f"{_quoted(self.names)} is a parameter, and Python converts it, or a number computed from it, to a "
                "plain float: what is computed from that counts as a constant. Use operators or functions of NumPy, or "
                "compute it in a kernel."
            )
        return self.value

    def __reduce__(self) -> Any:
        return float, (self.value,)

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __hash__(self) -> int:
        return hash(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    # of derivative 0, as in kernels
    def __int__(self) -> int:
        return int(self.value)

    def __trunc__(self) -> int:
        return math.trunc(self.value)

    def __floor__(self) -> int:
        return math.floor(self.value)

    def __ceil__(self) -> int:
        return math.ceil(self.value)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.value, digits)

    def is_integer(self) -> bool:
        """Whether the value is a whole number."""
        return self.value.is_integer()


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
    """Whether something is such a number."""
    return type(x) is PassedNumber


def _is_scalar(x: Any) -> bool:
    return is_passed(x) or (isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool))


def _plain(x: Any) -> Any:
    return x.value if is_passed(x) else x


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


# by operator: the partials with respect to both operands, at them
_BINARY: dict[str, tuple[Callable[[Any, Any], Any], Callable[[float, float], float], Callable[[float, float], float]]]
_BINARY = {
    "add": (operator.add, lambda a, b: 1.0, lambda a, b: 1.0),
    "sub": (operator.sub, lambda a, b: 1.0, lambda a, b: -1.0),
    "mul": (operator.mul, lambda a, b: b, lambda a, b: a),
    "truediv": (operator.truediv, lambda a, b: 1 / b, lambda a, b: -a / (b * b)),
    "pow": (operator.pow, lambda a, b: b * a ** (b - 1) if b else 0.0, lambda a, b: a**b * _log(a)),
    "mod": (operator.mod, lambda a, b: 1.0, lambda a, b: -float(a // b)),
    "floordiv": (operator.floordiv, lambda a, b: 0.0, lambda a, b: 0.0),
}
# by method, which NumPy's functions of objects call, too: the derivative at x, where the function is y
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
    "tanh": (math.tanh, lambda x, y: 1 - y * y),
    "arcsin": (math.asin, lambda x, y: 1 / math.sqrt(1 - x * x)),
    "arccos": (math.acos, lambda x, y: -1 / math.sqrt(1 - x * x)),
    "arctan": (math.atan, lambda x, y: 1 / (1 + x * x)),
    "deg2rad": (math.radians, lambda x, y: math.pi / 180),
    "radians": (math.radians, lambda x, y: math.pi / 180),
    "rad2deg": (math.degrees, lambda x, y: 180 / math.pi),
    "degrees": (math.degrees, lambda x, y: 180 / math.pi),
    "square": (lambda x: x * x, lambda x, y: 2 * x),
    "conjugate": (operator.pos, lambda x, y: 1.0),
}


def _binary(name: str) -> Callable[[Any, Any], Any]:
    function, by_first, by_second = _BINARY[name]

    def apply(a: Any, b: Any) -> Any:
        if not (_is_scalar(a) and _is_scalar(b)):
            return NotImplemented
        x, y = _plain(a), _plain(b)
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
    return lambda self, other: function(self.value, _plain(other)) if _is_scalar(other) else NotImplemented


for _name in _BINARY:
    _apply = _binary(_name)
    setattr(PassedNumber, f"__{_name}__", _apply)
    setattr(PassedNumber, f"__r{_name}__", lambda self, other, apply=_apply: apply(other, self))
for _name in _UNARY:
    setattr(PassedNumber, _name, _unary(_name))
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


# --- the arguments of a launch


@dataclass(frozen=True)
class NumberSeeds:
    """The numbers that depend on parameters where a kernel is launched.

    Attributes:
        arguments: leaf arguments by name, each with its first column, or row of ``tangents``.
        constants: Python numbers that kernels read, each with its first column or row.
        tangents: a row for each entry, where these are not columns of J.
    """

    arguments: dict[str, int] = field(default_factory=dict)
    constants: tuple[tuple[Variable, int], ...] = ()
    tangents: np.ndarray | None = None

    @property
    def key(self) -> Any:
        """Equal for two launches that one kernel can do."""
        rows = None if self.tangents is None else len(self.tangents)
        return tuple(self.arguments.items()), tuple(first for _, first in self.constants), rows

    @property
    def shadow_type(self) -> tuple[Any, int]:
        """The type of the rows in memory and their number; None where there are none."""
        return (None, 0) if self.tangents is None else (backend.default_type(float), len(self.tangents))

    def shadow(self, columns: int) -> Shadow:
        """The rows in memory, as kernels take them."""
        assert self.tangents is not None
        made = Shadow("the numbers", len(self.tangents), columns, backend.default_type(float))
        made.set_rows(slice(None), self.tangents)
        return made

    def with_passed(
        self, passed: dict[str, list[Tangent]], directions: np.ndarray | None, first: int, columns: int
    ) -> NumberSeeds:
        """The same for a launch that is given numbers with tangents, by the names of its leaf arguments.

        The run computes the columns from the first on, or the products with directions.
        """
        if not passed:
            return self
        starts = {name: next(iter(entries[0]), 0) for name, entries in passed.items()}
        if (
            directions is None
            and self.tangents is None
            and all(
                entry == {starts[name] + n: 1.0} for name, entries in passed.items() for n, entry in enumerate(entries)
            )
        ):
            return NumberSeeds(starts, self.constants)  # the parameters themselves
        rows: list[Tangent] = []
        constants, given = self.constants, self.tangents
        if given is None:
            given, at = np.zeros((0, columns)), self.constants
            constants = ()
            for variable, column in at:
                constants += ((variable, first + len(rows)),)
                rows += [{column + n: 1.0} for n in range(math.prod(number_shape(variable.read()) or ()))]
        arguments: dict[str, int] = {}
        for name, entries in passed.items():
            arguments[name] = first + len(given) + len(rows)
            rows += entries
        return NumberSeeds(arguments, constants, np.concatenate([given, _matrix(rows, directions, first, columns)]))


def _matrix(rows: list[Tangent], directions: np.ndarray | None, first: int, columns: int) -> np.ndarray:
    """Tangents as rows: the columns of J from the first on, or the products with directions."""
    made = np.zeros((len(rows), columns))
    for row, tangent in zip(made, rows, strict=True):
        for column, coefficient in tangent.items():
            if directions is not None:
                row += coefficient * directions[column]
            elif first <= column < first + columns:
                row[column - first] += coefficient
    return made


def taken_out(
    kernel: Any, values: tuple[Any, ...], run: PipelineRun | None
) -> tuple[tuple[Any, ...], dict[str, list[Tangent]]]:
    """Leaf arguments of a launch as plain values; the tangents of the entries of those that have some, by name."""
    if run is None:
        return values, {}
    plain: list[Any] = []
    tangents: dict[str, list[Tangent]] = {}
    for leaf, value in zip(backend.leaf_arguments(kernel), values, strict=True):
        entries = _entries(value)
        names = frozenset().union(*(n.names for n in entries if is_passed(n) and n.run is run))
        if not any(map(is_passed, entries)):
            plain.append(value)
            continue
        if names and isinstance(leaf.annotation, backend.ti.template):
            raise UnsupportedError(
                f"{_quoted(names)} is a parameter, and is passed to {backend.short_name(kernel)} as the template "
                f"{leaf.name!r}, which is compiled into the kernel. Give the argument a type, such as ti.f32."
            )
        if names:
            run.passed |= names
            tangents[leaf.name] = [n.tangent if is_passed(n) and n.run is run else {} for n in entries]
        numbers = np.array([float(_plain(n)) for n in entries])
        plain.append(float(numbers[0]) if is_passed(value) else _like(value, numbers))
    return tuple(plain), tangents


def _entries(value: Any) -> list[Any]:
    if isinstance(value, backend.Matrix) and not value.is_host_access:
        return list(np.asarray(value.entries, object).flat)
    if isinstance(value, (list, tuple)):
        return [entry for part in value for entry in _entries(part)]
    return list(value.flat) if isinstance(value, np.ndarray) and value.dtype == object else [value]


def _like(value: Any, numbers: np.ndarray) -> Any:
    """A vector, matrix or list of numbers of the shape of another."""
    shape = np.shape(value.entries if isinstance(value, backend.Matrix) else np.array(value, object))
    return backend.Matrix(numbers.reshape(shape).tolist())


def _quoted(names: frozenset[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
