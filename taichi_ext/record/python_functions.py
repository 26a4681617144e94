"""Plain Python functions that a kernel calls: run while the kernel is recorded, on its values."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
import itertools
import operator
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import taichi_ext.record.subscripts as subscripts
from taichi_ext import backend
from taichi_ext.backend import ti
from taichi_ext.errors import UnsupportedError, raise_baked
from taichi_ext.program import Known, Tensor, Value
from taichi_ext.record.assignments import update_place
from taichi_ext.record.constants import READS_PARAMETER
from taichi_ext.record.handles import HANDLES, Cell, Cells
from taichi_ext.record.operations import operate
from taichi_ext.record.python_source import is_rewritten, rewritten
from taichi_ext.record.recording import Recording
from taichi_ext.record.rewriter import PYTHON_NAMES

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_CONTAINERS = (list, tuple, dict, set, frozenset, str, range)
# Callables that only combine values into containers, or take them apart.
_STRUCTURE = (
    *(list, tuple, dict, set, zip, enumerate, reversed, range, iter, next, slice, callable, id, len),
    *(itertools.chain, itertools.product, itertools.permutations, itertools.combinations, itertools.repeat),
    *(itertools.cycle, itertools.islice, itertools.zip_longest, itertools.chain.from_iterable, itertools.pairwise),
)
_OF_VALUES = (abs, pow, round, int, float, bool, len, print)  # also of the recorder's own
_OF_PLAIN_VALUES = (isinstance, type, print, repr, str, hasattr, issubclass)


def is_python(function: object) -> bool:
    """Whether a callable is plain Python, with a source that can be rewritten."""
    if isinstance(function, types.FunctionType):
        is_marked = backend.is_known_in_kernels(function)
        return not is_marked and not backend.is_library(function)
    if isinstance(function, type):
        return type(function) is type and function.__module__ != "builtins" and not backend.is_library(function)
    is_wrapper = isinstance(function, (functools.partial, types.MethodType, functools._lru_cache_wrapper))
    return is_wrapper or isinstance(inspect.getattr_static(type(function), "__call__", None), types.FunctionType)


def call_python(r: Recording, function: object, args: list[object], keywords: dict[str, object]) -> object:
    """Call a plain Python function, method, class or object as Taichi does while it compiles."""
    if isinstance(function, functools.partial):
        return r.library.call(function.func, *function.args, *args, **{**function.keywords, **keywords})
    if isinstance(function, functools._lru_cache_wrapper):
        return r.library.call(function.__wrapped__, *args, **keywords)
    if isinstance(function, types.MethodType):
        return r.library.call(function.__func__, function.__self__, *args, **keywords)
    if isinstance(function, type):
        return _construct(r, function, args, keywords)
    if not isinstance(function, types.FunctionType):
        return r.library.call(type(function).__call__, function, *args, **keywords)
    if is_rewritten(function):
        return function(*args, **keywords)
    if all(map(_is_plain, [*args, *keywords.values()])):
        try:  # most such functions compute with numbers and indices
            with backend.sealed(), r.constants.watching() as watched:
                result = function(*args, **keywords)
            if not watched.may_read:
                return result
        except backend.SealedError:
            pass  # it reads or writes fields, or calls ti.funcs: that is recorded
    return _run(r, function, args, keywords)


def _run(r: Recording, function: types.FunctionType, args: Sequence[object], keywords: Mapping[str, object]) -> object:
    made = rewritten(function, PythonScope(r), r.constants.replaced)
    if made is None:
        raise UnsupportedError(
            f"The Python function {function.__qualname__!r} is called in a kernel, and its source is not to be found. "
            "Define it in a file, or write it as a @ti.func."
        )
    return made(*args, **keywords)


def _construct(r: Recording, kind: type, args: list[Any], keywords: dict[str, object]) -> object:
    """An object of a Python class."""
    is_record = dataclasses.is_dataclass(kind) and not hasattr(kind, "__post_init__")
    if is_record or issubclass(kind, (tuple, list, dict, BaseException)):
        return kind(*args, **keywords)
    initialise = kind.__init__
    if kind.__new__ is not object.__new__ or not isinstance(initialise, types.FunctionType):
        return _native(r, kind, args, keywords)
    made = object.__new__(kind)
    r.library.call(initialise, made, *args, **keywords)
    return made


def _native(r: Recording, function: Any, args: list[object], keywords: dict[str, object]) -> object:
    if not all(map(_is_plain, [*args, *keywords.values()])):
        raise UnsupportedError(f"{function!r} is called on a value of the kernel; write it as a @ti.func.")
    with backend.sealed(), r.constants.watching() as watched:
        result = function(*args, **keywords)
    if watched.may_read:
        raise UnsupportedError(READS_PARAMETER.format(repr(function)))
    return result


def _is_plain(x: object) -> bool:
    """Whether a value is known to contain nothing that is only known when the kernel runs."""
    if isinstance(x, (list, tuple, set)):
        return all(map(_is_plain, x))
    if isinstance(x, dict):
        return all(map(_is_plain, x.values()))
    return isinstance(x, _NUMBERS) or backend.is_expr(x) or (isinstance(x, np.ndarray) and x.dtype != object)


class PythonScope:
    """Operations called by rewritten Python functions, as ``<py>``: of Python, or of the recorder on its values."""

    def __init__(self, r: Recording) -> None:
        self.recording = r

    # --- operators

    def binary(self, name: str, a: Any, b: Any) -> object:
        found = self._own_operator(PYTHON_NAMES.get(name, name), a, b)
        if found is not NotImplemented:
            return found
        if (_is_array(a) and _is_object(b)) or (_is_array(b) and _is_object(a)):
            arrays = np.broadcast_arrays(*(x if _is_array(x) else _as_array([x], ()) for x in (a, b)))
            entries = [
                self.binary(name, _number(x), _number(y)) for x, y in zip(*(r.flat for r in arrays), strict=True)
            ]
            return _as_array(entries, arrays[0].shape)
        if isinstance(a, HANDLES) or isinstance(b, HANDLES):
            if name == "matmul":
                return self.recording.library.matmul(_number(a), _number(b))
            return operate(self.recording, name, _number(a), _number(b))
        return getattr(operator, f"__{PYTHON_NAMES.get(name, name)}__")(a, b)

    def _own_operator(self, name: str, a: object, b: object) -> object:
        """The result of an operator that a Python class defines; NotImplemented if it defines none."""
        for x, other, method in ((a, b, f"__{name}__"), (b, a, f"__r{name}__")):
            own = _method(x, method)
            if own is not None and not isinstance(x, HANDLES):
                found = self.recording.library.call(own, x, other)
                if found is not NotImplemented:
                    return found
        return NotImplemented

    def unary(self, name: str, x: Any) -> object:
        own = _method(x, f"__{name}__")
        if isinstance(x, HANDLES):
            return operate(self.recording, name, x)
        if own is not None:
            return self.recording.library.call(own, x)
        if _is_array(x) and x.dtype == object:
            return _as_array([self.unary(name, e) for e in x.flat], x.shape)
        return getattr(operator, name)(x)

    def compare(self, names: tuple[str, ...], *operands: object) -> object:
        result = True
        for n, name in enumerate(names):
            a, b = operands[n : n + 2]
            found = self._own_operator(name, a, b)
            if found is not NotImplemented:
                result = found
            elif isinstance(a, HANDLES) or isinstance(b, HANDLES):
                result = operate(self.recording, name, _number(a), _number(b))
            else:
                result = getattr(operator, name)(a, b)
            if isinstance(result, bool) and (isinstance(a, Known) or isinstance(b, Known)):
                raise_baked("A choice")
            if n + 1 < len(names) and not result:
                break
        return result

    def augmented(self, target: object, name: str, value: object) -> object:
        """``target += value``: changes a local or an entry of a field in place; otherwise returns a new object."""
        if isinstance(target, (Cell, Cells)):
            update_place(self.recording, target, name, value)
            return target
        if isinstance(target, (Value, Tensor)):
            raise backend.SyntaxFault(f"cannot use a non-writable target as the first operand of {name!r}")
        own = getattr(type(target), f"__i{PYTHON_NAMES.get(name, name)}__", None)
        if isinstance(own, types.FunctionType) and not backend.is_library(own):
            return self.recording.library.call(own, target, value)
        if isinstance(value, HANDLES) or own is None or (_is_array(target) and _has_objects(value)):
            return self.binary(name, target, value)
        return getattr(operator, f"__i{PYTHON_NAMES.get(name, name)}__")(target, value)

    def augment_item(self, base: Any, index: object, name: str, value: object) -> None:
        base[index] = self.augmented(self.item(base, index), name, value)

    def augment_attribute(self, base: object, attribute: str, name: str, value: object) -> None:
        after = self.augmented(self.attribute(base, attribute), name, value)
        if not isinstance(base, HANDLES):
            setattr(base, attribute, after)

    # --- reading

    def slice(self, start: object, stop: object, step: object) -> Any:
        return slice(start, stop, step)

    def item(self, base: Any, index: object) -> object:
        if isinstance(base, HANDLES):
            return subscripts.load(self.recording, base, index if isinstance(index, tuple) else (index,))
        own = _method(base, "__getitem__")
        if own is not None:
            return self.recording.library.call(own, base, index)
        return base[index]

    def attribute(self, base: object, name: str) -> object:
        if not isinstance(base, HANDLES):
            found = inspect.getattr_static(base, name, None)
            if isinstance(found, property) and isinstance(found.fget, types.FunctionType) and is_python(found.fget):
                return self.recording.library.call(found.fget, base)
            return self.recording.constants.read_attribute(base, name, getattr(base, name))
        return subscripts.attribute(self.recording, base, name)

    # --- calls

    def method(self, base: object, name: str, /, *args: object, **keywords: object) -> object:
        if isinstance(base, HANDLES) or (isinstance(base, backend.Field) and name == "fill"):
            return self.recording.library.method(base, name, *args, **keywords)
        function = self.attribute(base, name)
        if isinstance(base, _CONTAINERS) and isinstance(function, types.BuiltinMethodType):
            return function(*args, **keywords)
        return self.call(function, *args, **keywords)

    def run(self, function: object, /, *args: object, **keywords: object) -> None:
        """A call whose result is not used."""
        self._call(self.recording.library.run, function, args, keywords)

    def call(self, function: object, /, *args: object, **keywords: object) -> Any:
        return self._call(self.recording.library.call, function, args, keywords)

    def _call(self, otherwise: Any, function: Any, args: tuple[Any, ...], keywords: dict[str, object]) -> Any:
        if function is ti.static:
            return args[0] if len(args) == 1 else args
        if any(function is f for f in _OF_PLAIN_VALUES):
            return function(*args, **keywords)
        found = self.structure(function, args, keywords)
        if found is NotImplemented and isinstance(function, types.BuiltinFunctionType | type):
            found = self._builtin(function, args, keywords)
        return otherwise(function, *args, **keywords) if found is NotImplemented else found

    def structure(self, function: Any, args: tuple[Any, ...], keywords: dict[str, object]) -> object:
        """The result of a callable of Python that combines values; NotImplemented for any other."""
        if function is len and isinstance(args[0], HANDLES):
            return NotImplemented
        if any(function is f for f in _STRUCTURE):
            return function(*args, **keywords)
        if function is sum:
            return self.fold(operator.add, args[0], *(args[1:] or keywords.values() or (0,)))
        if function is functools.reduce:
            return self.fold(*args)
        if function is map:
            return (self.call(args[0], *values) for values in zip(*args[1:], strict=False))
        if function is filter:
            return (value for value in args[1] if (value if args[0] is None else self.call(args[0], value)))
        return NotImplemented

    def _builtin(self, function: Any, args: tuple[Any, ...], keywords: dict[str, object]) -> object:
        """The result of another built-in function of Python; NotImplemented for other callables."""
        if getattr(builtins, getattr(function, "__name__", ""), None) is not function:
            return NotImplemented
        if function is abs and isinstance(args[0], HANDLES):
            return self.recording.library.call(abs, args[0])
        if function is pow and len(args) == 2:
            return self.binary("pow", *args)
        if any(isinstance(a, HANDLES) for a in args) and function not in _OF_VALUES:
            raise UnsupportedError(
                f"Python's {function.__name__!r} is called on a value of the kernel in a plain Python function. Use "
                "Taichi's function of that name, or make the function a @ti.func."
            )
        return NotImplemented if any(isinstance(a, HANDLES) for a in args) else function(*args, **keywords)

    def fold(self, function: object, values: Iterable[object], *first: object) -> object:
        """``functools.reduce``."""
        iterator = iter(values)
        total = first[0] if first else next(iterator)
        for value in iterator:
            total = self.binary("add", total, value) if function is operator.add else self.call(function, total, value)
        return total


def _method(x: object, name: str) -> types.FunctionType | None:
    """A special method that a class of the user's defines."""
    own = getattr(type(x), name, None)
    return own if isinstance(own, types.FunctionType) and not backend.is_library(own) else None


def _is_object(x: object) -> bool:
    """Whether an array that is combined with x holds expressions or values with tangents."""
    return isinstance(x, HANDLES) or backend.is_expr(x) or _has_objects(x)


def _is_array(x: object) -> bool:
    return isinstance(x, np.ndarray)


def _has_objects(x: Any) -> bool:
    return _is_array(x) and x.dtype == object


def _as_array(entries: Sequence[object], shape: tuple[int, ...]) -> np.ndarray:
    """An array of objects, built so that NumPy does not look into them."""
    array = np.empty(len(entries), object)
    for n, entry in enumerate(entries):
        array[n] = entry
    return array.reshape(shape)


def _number(x: object) -> object:
    return x.item() if isinstance(x, np.generic) else x
