"""Dual numbers: floats with a tangent, which Python gets in a pipeline in place of numbers that depend on params.

They are read from fields and arrays, returned by kernels, or arguments of the pipeline.  Python's operators, and
functions of NumPy and ``math``, apply the chain rule; all else takes them for floats.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeGuard

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import DerivativeWarning, UnsupportedError
from taichi_ext.runtime.python.partials import PARTIALS, of_logarithm, ratios


@dataclass(eq=False)
class PipelineRun:
    """One run of a pipeline, to which dual numbers belong.

    Attributes:
        is_over: whether the pipeline has returned; from then on the numbers are plain ones.
        passed: the names of arguments of the pipeline that kernels were given.
        has_numbers: whether Python got a number with a tangent.
        cuts: the columns that numbers depend on where Python takes something of them that has no derivative, by the
            operation, file and line; True where the columns are not known, None if nobody asks for them.
    """

    is_over: bool = False
    passed: set[str] = field(default_factory=set)
    has_numbers: bool = False
    cuts: dict[tuple[str, str, int], Any] | None = None

    def note_cut(self, name: str, number: DualNumber) -> None:
        """Python takes something of a number that has no derivative."""
        if self.cuts is None or self.is_over or number.is_stopped:
            return
        frame = backend.user_frame(sys._getframe(2))
        if frame is not None:
            place = name, frame.f_code.co_filename, frame.f_lineno
            is_known = isinstance(number.tangent, np.ndarray)
            self.cuts[place] = self.cuts.get(place, False) | (number.tangent != 0 if is_known else True)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.is_over = True


class _Unknown:
    """The tangent of a number that Python reads while entries of a sparse J or H are computed, scaled or not."""

    __array_ufunc__ = None

    def _same(self, _: object) -> _Unknown:
        return self

    __mul__ = __rmul__ = __add__ = __radd__ = _same


UNKNOWN = _Unknown()


class DualNumber(float):
    """A float that depends on parameters, as Python reads floats; it has the methods of those that NumPy returns, too.

    Attributes:
        value: the float.
        tangent: its derivative, a row for the columns of the run, or another vector: it can be added and scaled.
        run: the run of the pipeline that it belongs to.
        names: of the arguments of the pipeline that it depends on.
        column: the column of J that it stands for, if it is an entry of a parameter itself.
        is_stopped: whether ``stop_gradient`` is a part of it, so that it may move without a tangent.
    """

    __slots__ = ("column", "is_stopped", "names", "run", "tangent", "value")

    value: float
    tangent: Any
    run: PipelineRun
    names: frozenset[str]
    column: int | None
    is_stopped: bool

    def __new__(
        cls,
        value: Any = 0.0,
        tangent: Any = None,
        run: PipelineRun | None = None,
        names: frozenset[str] = frozenset(),
        *,
        column: int | None = None,
        is_stopped: bool = False,
    ) -> Any:
        if run is None:  # libraries convert to the type of a number: ``type(x)(total)``
            return value if type(value) is DualNumber else float(value)
        self = float.__new__(cls, value)
        self.value, self.tangent, self.run, self.names = value, tangent, run, names
        self.column, self.is_stopped = column, is_stopped
        run.has_numbers = True
        return self

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **options: Any) -> object:
        """NumPy's functions of single numbers give dual numbers; those of arrays take the floats."""
        name = function.__name__
        if method == "__call__" and not options and name in PARTIALS and all(isinstance(x, _SCALARS) for x in inputs):
            return _applied(function, PARTIALS[name], inputs)
        is_exact = any(isinstance(x, np.ndarray) and x.dtype == object for x in inputs)  # entries may be dual numbers
        given = (np.array(x, object) if is_exact and is_dual(x) else plain_number(x) for x in inputs)
        return getattr(function, method)(*given, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # by which libraries would take it for a number of NumPy: of float64
            raise AttributeError(name)
        return getattr(np.float64(self.value), name)

    def clip(self, least: Any = None, most: Any = None, **options: Any) -> Any:
        """The number within bounds, as ``np.clip`` calls it."""
        has_options = any(v is not None for v in options.values())
        if has_options or not all(x is None or isinstance(x, _SCALARS) for x in (least, most)):
            return np.clip(self.value, plain_number(least), plain_number(most), **options)
        result: Any = self if least is None else np.maximum(self, least)
        return result if most is None else np.minimum(result, most)

    def stopped(self) -> float | DualNumber:
        """The number with a derivative of zero, as the user wants it."""
        return self.value if self.run.is_over else DualNumber(self.value, self.tangent * 0.0, self.run, is_stopped=True)

    def __copy__(self, _: object = None) -> float | DualNumber:
        return self.value if self.run.is_over else self

    __deepcopy__ = __copy__

    def __reduce__(self) -> tuple[type[float], tuple[float]]:  # type: ignore[override]
        return float, (self.value,)

    def __hash__(self) -> int:
        return hash(self.value)

    @property
    def real(self) -> DualNumber:  # type: ignore[override]
        """The number itself."""
        return self

    def __divmod__(self, other: Any) -> Any:
        return (self // other, self % other) if isinstance(other, _SCALARS) else divmod(self.value, other)

    def __rdivmod__(self, other: Any) -> Any:
        return (other // self, other % self) if isinstance(other, _SCALARS) else divmod(other, self.value)


def is_dual(x: object) -> bool:
    return type(x) is DualNumber


def dual_entries(rows: Any) -> np.ndarray | None:
    """The entries of a vector or matrix as objects, if there are dual numbers among them."""
    rows = rows if isinstance(rows, (list, tuple)) else ()
    if any(map(is_dual, rows)) or any(is_dual(n) for row in rows if isinstance(row, (list, tuple)) for n in row):
        return np.array(rows, object)
    return None


@dataclass(frozen=True)
class Run:
    """What is run."""

    kernel: Any  # a kernel, or None
    function: Any  # a function that launches kernels, if it is no kernel
    args: tuple[Any, ...]
    names: Sequence[str]  # of the arguments of a function
    passed: Mapping[int, int]  # the first columns of its arguments that are numbers and parameters, by position


class DualFollower(backend.Follower):
    """Follows a pipeline whose numbers in Python have tangents."""

    takes_dual_numbers = True

    def __init__(self) -> None:
        self._numbers = PipelineRun()
        self._touched: dict[int, Any] = {}  # fields whose entries Python has accessed

    def follow(self, run: Run, tangent: Callable[[int], Any]) -> Any:
        """Run a function; ``tangent`` gives the tangent of a number that it takes, by its column."""
        given = list(run.args)
        for position, column in run.passed.items():
            tangents = map(tangent, count(column))
            given[position] = dual_like(given[position], tangents, self._numbers, run.names[position], column)
        with backend.follow(self), dual_math(), self._numbers:
            try:
                return run.function(*given)
            except TypeError as error:  # of ``range(n)``, ``items[n]``, ``np.zeros(n)``
                whole = [repr(run.names[p]) for p in run.passed if isinstance(run.args[p], int)]
                if not whole or "integer" not in str(error):
                    raise
                problem = f"the pipeline uses it as an integer ({error}); whole numbers have no derivative"
                raise UnsupportedError(
                    f"{' or '.join(whole)} is a parameter, and {problem}. Leave it out of params."
                ) from error

    def note_field(self, field: Any) -> None:
        """Python accesses entries of a field, perhaps before a kernel does."""
        self._touched[id(field)] = field

    def touched(self) -> list[Any]:
        """The fields whose entries Python has accessed, without structure."""
        return [part for field in self._touched.values() for part in backend.leaf_fields(field)]

    def with_tangents(self, entries: Any) -> np.ndarray | None:
        """The entries of a vector or matrix, if there are numbers with tangents among them."""
        return dual_entries(entries)

    def runs_plainly_here(
        self, kernel: backend.Kernel, args: tuple[Any, ...], deactivate: Callable[[Any, Callable[[], object]], None]
    ) -> bool:
        """Run a kernel of Taichi's own that copies out, or deactivates a node; whether it was one."""
        node = backend.deactivated_node(kernel, args)
        with backend.suspend_following():
            if node is not None:
                deactivate(node, lambda: kernel(*args))
            elif backend.is_reading_kernel(kernel):
                for source in (a for a in args if isinstance(a, (backend.Field, backend.Ndarray))):
                    self.host_read(source, ..., None)
                kernel(*args)
            else:
                return False
        return True

    def is_own(self, value: object) -> TypeGuard[DualNumber]:
        """Whether a number depends on parameters of this run."""
        return isinstance(value, DualNumber) and value.run is self._numbers


def plain_number(x: Any) -> Any:
    return x.value if type(x) is DualNumber else x


def warn_of_old_number() -> None:
    """Warn if a number of an earlier run is used in the run of a pipeline: a cache has kept it, for example."""
    if getattr(backend.pipeline_follower(), "takes_dual_numbers", False):
        warn_at_user(
            "A number that an earlier run of a pipeline has left, in a cache for example, is used in another one: it "
            "counts as a constant, its tangent is lost. Compute it in each run."
        )


_SCALARS: Any = (float, int, np.floating, np.integer, np.bool_)
_NAMELESS = frozenset[str]()


def _applied(function: Callable[..., Any], partials: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
    """The result of a function of single numbers by the chain rule."""
    plain = [x.value if type(x) is DualNumber else x for x in operands]
    value = function(*plain)
    if not isinstance(value, _SCALARS):
        return value
    floats = _with_dots([float(value), *map(float, plain)], partials, operands)
    total, first, names, is_stopped = None, None, _NAMELESS, False
    for number, partial in zip(operands, partials, strict=True):
        if type(number) is not DualNumber:
            continue
        if number.run.is_over:
            warn_of_old_number()
            continue
        factor, term = _number(partial, floats), number.tangent
        if math.isfinite(factor) or not isinstance(term, np.ndarray):
            term = term * factor
        else:  # a tangent that is zero stays zero
            term = np.array([t * factor if t else 0.0 for t in term])
        if partials in _CUTTING:
            number.run.note_cut(f"`{function.__name__}`", number)
        total, first = term if total is None else total + term, number
        names, is_stopped = names | number.names if number.names else names, is_stopped or number.is_stopped
    return value if first is None else DualNumber(float(floats[0]), total, first.run, names, is_stopped=is_stopped)


_INNER = PipelineRun()  # of numbers whose tangents are those of other numbers


def _with_dots(
    floats: list[float], partials: Sequence[Callable[..., Any]], operands: Sequence[Any]
) -> Sequence[float | DualNumber]:
    """The result and the operands of a function; with their own tangents, where second derivatives need them."""
    moves = [x.tangent.dots if is_dual(x) and getattr(x.tangent, "dots", None) is not None else None for x in operands]
    pairs = [(partial, move) for partial, move in zip(partials, moves, strict=False) if move is not None]
    if not pairs:
        return floats
    total = sum(_number(partial, floats) * move for partial, move in pairs)
    both = zip(floats, (total, *moves), strict=True)
    return [x if move is None else DualNumber(x, move, _INNER) for x, move in both]


def _number(partial: Callable[..., float], floats: Sequence[float]) -> float:
    try:
        return partial(*floats)
    except (ZeroDivisionError, OverflowError):
        return math.inf
    except (ValueError, TypeError):  # where the function itself is NaN, or not real
        return math.nan


_COMPARISON, _FORMAT, _TRUTH = "a comparison", "a format", "`bool`"
ASKING = frozenset({_COMPARISON, _FORMAT, _TRUTH})  # operations by which Python asks what a number is
_OPERATORS = ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv")

# methods of the plain value; where they give numbers, their derivative is 0, as in kernels
_PLAIN = {name: f"`{name}`" for name in ("int", "trunc", "floor", "ceil", "round", "as_integer_ratio")}
_PLAIN |= {"bool": _TRUTH, "is_integer": _TRUTH} | dict.fromkeys(("repr", "str", "format", "hex"), _FORMAT)
_CUTTING = PARTIALS["floordiv"], PARTIALS["floor"]  # operations whose derivative is 0


def _operator(name: str, *, is_reflected: bool = False) -> Callable[..., Any]:
    function, partials = getattr(operator, name), PARTIALS[name]

    def apply(self: DualNumber, *others: Any) -> Any:
        if others and not isinstance(others[0], _SCALARS):
            return NotImplemented
        return _applied(function, partials, (*others, self) if is_reflected else (self, *others))

    return apply


def _plain_method(name: str, word: str) -> Callable[..., Any]:
    def method(self: DualNumber, *args: Any) -> Any:
        self.run.note_cut(word, self)
        return getattr(self.value, name)(*args)

    return method


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compare(self: DualNumber, other: Any) -> Any:
        for number in (self, other):
            if type(number) is DualNumber:
                number.run.note_cut(_COMPARISON, number)
        return function(self.value, plain_number(other)) if isinstance(other, _SCALARS) else NotImplemented

    return compare


for _name in _OPERATORS:
    setattr(DualNumber, f"__{_name}__", _operator(_name))
    setattr(DualNumber, f"__r{_name}__", _operator(_name, is_reflected=True))
for _name in ("neg", "pos", "abs"):
    setattr(DualNumber, f"__{_name}__", _operator(_name))
for _name, _word in _PLAIN.items():
    _method = _name if hasattr(float, _name) else f"__{_name}__"
    setattr(DualNumber, _method, _plain_method(_method, _word))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(DualNumber, f"__{_name}__", _comparison(getattr(operator, _name)))


def dual_like(value: Any, rows: Iterator[Any], run: PipelineRun, name: str = "", column: int | None = None) -> Any:
    """A number, vector, matrix or sequence of numbers like ``value``, each with its tangent.

    Args:
        value: the numbers.
        rows: their tangents.
        run: the run that they belong to.
        name: of the argument of the pipeline that it is, if any.
        column: the first of the columns that it stands for, if any.
    """
    if isinstance(value, (list, tuple)):
        duals = []
        for part in value:
            duals.append(dual_like(part, rows, run, name, column))
            column = None if column is None else column + 1
        return type(value)(*duals) if hasattr(value, "_fields") else type(value)(duals)
    if isinstance(value, backend.Matrix):
        entries = np.array(value.to_list(), object)
        return matrix_of(dual_like(list(entries.flat), rows, run, name, column), entries.shape)
    names = frozenset({name} if name else ())
    return DualNumber(float(plain_number(value)), next(rows), run, names, column=column)


def matrix_of(numbers: list[Any], shape: tuple[int, ...]) -> backend.Matrix:
    """A vector or matrix, which keeps the tangents of its entries."""
    made = backend.Matrix(np.reshape([float(plain_number(n)) for n in numbers], shape).tolist())
    if any(map(is_dual, numbers)):
        made.entries = np.empty(shape, object)
        made.entries.ravel()[:] = numbers
    return made


# --- math, whose functions take the float of any number ---------------------------------------------------------------

_WHOLE = ("floor", "ceil", "trunc")
_MATH = {name: getattr(math, name) for name in PARTIALS if hasattr(math, name) and name not in _WHOLE}
_lock = threading.Lock()
_users = 0  # runs of pipelines


def _of_math(original: Callable[..., Any], partials: Callable[[int], Sequence[Callable[..., Any]]]) -> Any:
    """A function of numbers that takes dual numbers, too; ``partials`` are those for a number of arguments."""

    @functools.wraps(original)
    def function(*args: Any) -> Any:
        for x in args:
            if type(x) is DualNumber and all(isinstance(y, _SCALARS) for y in args):
                weights = partials(len(args))
                return _applied(original, weights, args) if len(weights) == len(args) else original(*args)
        return original(*args)

    return function


def _sum(numbers: Iterable[Any], /) -> Any:
    x = tuple(numbers)
    return _of_math(lambda *x: _MATH["fsum"](x), lambda count: [lambda y, *x: 1.0] * count)(*x)


def _distance(p: Iterable[Any], q: Iterable[Any], /) -> Any:
    p, q = tuple(p), tuple(q)
    if len(p) != len(q):
        return _MATH["dist"](p, q)
    n = len(p)
    partials = [lambda y, *x, k=k: (x[k] - x[k - n]) / y if y else 0.0 for k in range(2 * n)]
    return _of_math(lambda *x: _MATH["dist"](x[:n], x[n:]), lambda _: partials)(*p, *q)


_STAND_INS = {name: _of_math(function, lambda _, name=name: PARTIALS[name]) for name, function in _MATH.items()}
_STAND_INS |= {"hypot": _of_math(math.hypot, ratios), "log": _of_math(math.log, of_logarithm)}
_STAND_INS |= {"fsum": functools.wraps(math.fsum)(_sum), "dist": functools.wraps(math.dist)(_distance)}
_MATH |= {"fsum": math.fsum, "dist": math.dist}


@contextmanager
def dual_math() -> Iterator[None]:
    """Within the context, functions that are looked up in the module ``math`` take dual numbers."""
    global _users
    with _lock:
        _users += 1
        math.__dict__.update(_STAND_INS)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                math.__dict__.update(_MATH)


# Warnings at the user's line, once in each call.

_said: ContextVar[set[Any] | None] = ContextVar("_said", default=None)


@contextlib.contextmanager
def saying_once(said: set[object]) -> Iterator[None]:
    """Within the context, warnings in ``said`` are not repeated, and new ones are added to it."""
    token = _said.set(said)
    try:
        yield
    finally:
        _said.reset(token)


def warn_at_user(message: str) -> None:
    """A warning at the line of the user's code that led here, once in each ``saying_once``."""
    frame = backend.user_frame()
    warn_at(message, None if frame is None else (frame.f_code.co_filename, frame.f_lineno))


def warn_at(message: str, place: tuple[str, int] | None) -> None:
    """A warning at a file and line, once in each ``saying_once``."""
    said = _said.get()
    if said is not None:
        if (message, place) in said:
            return
        said.add((message, place))
    if place is None:
        warnings.warn(message, DerivativeWarning, stacklevel=4)
    else:
        warnings.warn_explicit(message, DerivativeWarning, *place)
