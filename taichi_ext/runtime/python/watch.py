"""The Python code of a pipeline under watch: numbers computed from active ones, and stores to arrays.

During a run of a pipeline, the user's functions have rewritten code (``code``).  Their results are unchanged; the run
records which objects depend on numbers with tangents.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice, product
from typing import Any

from taichi_ext import backend
from taichi_ext.labels import is_library_module
from taichi_ext.record.rewriter import OPERATORS
from taichi_ext.runtime.memory.array_stores import everywhere, item_store, memory_of, stores_of
from taichi_ext.runtime.python.active_numbers import KEEPING, ActiveNumbers
from taichi_ext.runtime.python.code import rewritten_code

_OPERATORS = {kind: getattr(operator, f"__{name}__") for kind, name in OPERATORS.items()}
_OPERATORS |= {"UAdd": operator.pos, "USub": operator.neg, "Invert": operator.invert}
_IN_PLACE = {kind: getattr(operator, f"__i{name}__") for kind, name in OPERATORS.items()}
# Callables that return the objects passed to them, or containers and iterators of them.
_STRUCTURE = (
    *(list, tuple, set, frozenset, dict, zip, enumerate, iter, sorted, min, max),
    *(chain, islice, cycle, product),
)
_CONVERSIONS = {"": lambda value: value, "s": str, "r": repr, "a": ascii}  # of f-strings
_LOOKED_UP = ("__getattribute__", "__class__")  # run by any access to an object
_ITSELF = (*KEEPING, backend.Struct, range)


class Watch:
    """The functions called by rewritten code; they look at the run of their thread, if any."""

    def operate(self, name: str, *operands: Any) -> Any:
        """The result of an operator."""
        result = _OPERATORS[name](*operands)
        run = None if type(result) is int else current_run()
        if run is not None:
            run.numbers.derive(result, *operands)
        return result

    def augment(self, name: str, target: Any, value: Any) -> Any:
        """``target += value``."""
        result = _IN_PLACE[name](target, value)
        run = None if type(result) is int else current_run()
        if run is not None:
            if result is target and not isinstance(result, float):
                run.note_stores(stores_of(operator.iadd, (target, value), {}), value)
            run.numbers.derive(result, target, value)
        return result

    def item(self, base: Any, index: Any) -> Any:
        result = base[index]
        run = None if type(base) in _ITSELF or isinstance(base, backend.Field) else current_run()
        if run is not None:
            run.numbers.derive(result, base)
        return result

    def formatted(self, value: Any, conversion: str, form: str) -> str:
        """The text of a value in an f-string."""
        return self._derived(format(_CONVERSIONS[conversion](value), form), value)

    def text(self, *parts: str) -> str:
        """The text of an f-string."""
        return self._derived("".join(parts), *parts)

    def _derived(self, text: str, *operands: Any) -> str:
        run = current_run()
        if run is not None:
            run.numbers.derive(text, *operands)
        return text

    def slice(self, start: Any, stop: Any, step: Any) -> Any:
        return slice(start, stop, step)

    def part(self, owner: Any, name: str) -> Any:
        run = None if isinstance(owner, backend.Struct) else current_run()
        if run is None or run.is_exact(type(owner)):  # its properties are rewritten
            return getattr(owner, name)
        result = getattr(owner, name)
        run.numbers.derive(result, owner)
        return result

    def unseen(self, value: Any) -> Any:
        """Mark the result of code that is not rewritten."""
        run = current_run()
        if run is not None and run.numbers.reads:
            run.numbers.mark(value)
        return value

    def each(self, values: Any) -> Any:
        """The iterable of a loop, watched."""
        run = None if type(values) in _ITSELF else current_run()
        return values if run is None else run.items(values)

    def stored(self, target: Any) -> Any:
        """The target of a following item store, watched."""
        run = None if type(target) in _ITSELF or isinstance(target, backend.Field) else current_run()
        array = None if run is None else memory_of(target)
        return target if run is None or array is None else _Stored(run, target, array)

    def augmented(self, target: Any) -> Any:
        """The target of ``target[i] += value``, watched."""
        run = None if isinstance(target, backend.Field) else current_run()
        return target if run is None else _Stored(run, target, memory_of(target))

    def part_stored(self, target: Any) -> Any:
        """The target of a following store to all of its numbers, as in ``target.real = value``."""
        run, array = current_run(), memory_of(target)
        if run is not None and array is not None:
            run.note_stores([(array, everywhere)], run.operand)
        return target

    def operand(self, value: Any) -> Any:
        """The value of a store to a part."""
        run = current_run()
        if run is not None:
            run.operand = value
        return value

    def callee(self, function: Any) -> Any:
        """The callable; for a user's function the function itself, without a frame of ours before its caller."""
        run = current_run()
        return function if run is None or run.is_exact(function) else functools.partial(run.call, function)

    def stated(self, function: Any) -> Any:
        """The callable of an expression statement; the user's own if only its frame can matter."""
        found = self.callee(function)
        if found is function:
            return function
        inner, module = getattr(function, "__func__", function), backend.module_of(function)
        is_python = isinstance(inner, types.FunctionType) and not inner.__name__.endswith("_")
        is_standard = isinstance(function, types.BuiltinFunctionType) and module in sys.stdlib_module_names
        return function if is_python or (is_standard and module != "_operator") else found


class _Stored:
    """A container that an item is stored to."""

    def __init__(self, run: PythonRun, target: Any, array: Any) -> None:
        self._run, self._target, self._array = run, target, array
        self._before: list[Any] = []

    def __getitem__(self, index: Any) -> Any:  # of an augmented assignment
        item = self._target[index]
        self._run.numbers.derive(item, self._target)
        self._before = [item]
        return item

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._before:
            self._run.numbers.derive(value, *self._before, self._run.operand)
            self._run.operand = None
        self._target[index] = value
        if self._array is None:
            return
        self._run.note_stores([(self._array, item_store(self._target, index))], value)


class PythonRun:
    """The Python code of one run of a pipeline.

    Attributes:
        numbers: the objects that depend on numbers with tangents.
        stores: the stores from Python to arrays since the last launch.
        operand: the value of the current augmented assignment.
    """

    def __init__(self, numbers: ActiveNumbers, stores: Any) -> None:
        self.numbers = numbers
        self.stores = stores
        self.operand: Any = None
        self._has_unseen_reads = False  # by functions that are not rewritten
        self._known: dict[int, tuple[Any, bool]] = {}  # functions and classes, kept alive, and whether they are exact
        self._codes: dict[int, tuple[types.CodeType, bool]] = {}  # kept alive, and whether they are rewritten
        self._rewritten: list[types.FunctionType] = []

    def call(self, function: Any, /, *args: Any, **keywords: Any) -> Any:
        """Call a function that is not the user's code; its result depends on its arguments and on values it reads."""
        while isinstance(function, functools.partial):
            args, keywords = (*function.args, *args), {**function.keywords, **keywords}
            function = function.func
        numbers, before = self.numbers, self.numbers.reads
        owner = getattr(function, "__self__", None)
        if isinstance(owner, KEEPING):
            return function(*args, **keywords)
        if any(function is f for f in _STRUCTURE) or (function is map and self.is_exact(args[0])):
            return function(*map(self.items, args), **keywords)
        stores = stores_of(function, args, keywords)
        result = function(*args, **keywords)
        given = [*args, *keywords.values()]
        self.note_stores(stores, given)
        if isinstance(result, backend.Struct) and isinstance(function, backend.StructType):
            members = {**dict(zip(result.keys, args, strict=False)), **keywords}
            numbers.mark_members(result, members)
        elif numbers.reads != before:
            numbers.mark(result)
        else:
            numbers.derive(result, owner, *given)
        if isinstance(result, (int, types.NoneType)) and numbers.depends(given):
            for holder in (owner, *(given if result is None else ())):  # may return them as other objects
                if not isinstance(holder, (*KEEPING, float)) and memory_of(holder) is None:
                    numbers.mark(holder)
        return result

    def items(self, values: Any) -> Any:
        """An iterable whose items are marked if they depend on numbers with tangents."""
        if isinstance(values, (*KEEPING, float)) or getattr(values, "ndim", 1) == 0:
            return values
        is_some = isinstance(values, Iterable) and self.numbers.depends(values)
        return self.numbers.marked(values) if is_some else values

    def note_stores(self, stores: list[tuple[Any, Any]], value: Any) -> None:
        """Note stores from Python to arrays, perhaps of numbers that depend on tangents."""
        for array, store in stores:
            if self.numbers.is_active_memory(array):
                self.stores.note(array, store)
            elif self.numbers.depends(value):
                self.numbers.mark(array)

    def read(self, value: Any) -> Any:
        """Mark a value with a tangent that is read, perhaps by code that is not rewritten."""
        if not self._has_unseen_reads:
            frame = backend.user_frame()
            self._has_unseen_reads = frame is not None and not self._is_watched(frame.f_code)
        self.numbers.reads += 1
        self.numbers.mark(value)
        return value

    def is_lost(self, value: Any) -> bool:
        """Whether a value that is stored or passed on was, or may have been, computed from numbers with tangents."""
        if self.numbers.is_lost(value):
            return True
        if not self._has_unseen_reads or not isinstance(value, float):
            return False
        frame = backend.user_frame()
        if frame is None or self._is_watched(frame.f_code):
            return False
        return all(value is not constant for constant in frame.f_code.co_consts)

    def _is_watched(self, code: types.CodeType) -> bool:
        known = self._codes.get(id(code))
        if known is None:
            known = self._codes[id(code)] = (code, is_watched(code))
        return known[1]

    # --- functions

    def is_exact(self, function: Any) -> bool:
        """Whether a callable is a kernel or the user's own code; the latter is rewritten."""
        while isinstance(function, (types.MethodType, functools.partial, functools._lru_cache_wrapper)):
            if isinstance(function, types.MethodType):
                self.is_exact(type(function.__self__))
                function = function.__func__
            else:
                function = function.func if isinstance(function, functools.partial) else function.__wrapped__
        if isinstance(function, (types.BuiltinFunctionType, types.MethodWrapperType)):
            return False
        if not isinstance(function, (types.FunctionType, type)):  # a new object at each access, so not remembered
            if backend.primal_kernel(function) is not None or backend.taichi_func(function) is not None:
                return True
            function = type(function)
            if not isinstance(function.__call__, types.FunctionType):  # for example of Cython
                return False
        known = self._known.get(id(function))
        if known is None:
            self._known[id(function)] = known = (function, False)  # while it is looked at
            self._known[id(function)] = known = (function, self._look_at(function))
        return known[1]

    def _look_at(self, function: types.FunctionType | type) -> bool:
        if backend.primal_kernel(function) is not None or backend.taichi_func(function) is not None:
            return True
        if isinstance(function, types.FunctionType):
            return not is_library_module(backend.module_of(function)) and self._rewrite(function)
        if function.__module__ == "builtins" or is_library_module(function.__module__):
            return False
        for base in function.__mro__:
            if base.__module__ != "builtins" and not is_library_module(base.__module__):
                self._look_at_members(base)
        return True

    def _look_at_members(self, kind: type) -> None:
        for name, member in list(vars(kind).items()):
            if name in _LOOKED_UP:
                continue
            inner = (member.fget, member.fset) if isinstance(member, property) else (member,)
            for function in inner:
                function = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
                function = function.func if isinstance(function, functools.cached_property) else function
                if isinstance(function, types.FunctionType):
                    self.is_exact(function)

    def _rewrite(self, function: types.FunctionType) -> bool:
        """Replace a function's code by rewritten code; False if that is not possible."""
        with _lock:
            swapped = _swapped.get(function)
            own = function.__code__ if swapped is None else swapped.code
            if is_watched(own):  # defined by rewritten code
                return True
            code = rewritten_code(own, function.__qualname__, WATCH)
            if code is None:
                return False
            if swapped is None:
                _swapped[function] = _Swapped(own, 1)
                function.__code__ = code
            else:
                swapped.users += 1
        self._rewritten.append(function)
        return True

    def end(self) -> None:
        """Restore the code of all functions, and forget all objects."""
        with _lock:
            for function in self._rewritten:
                swapped = _swapped[function]
                swapped.users -= 1
                if not swapped.users:
                    function.__code__ = swapped.code
                    del _swapped[function]
        self._rewritten.clear()
        self._known.clear()
        self.numbers.clear()


class _Swapped:
    """A function's own code, and the number of runs that need the rewritten code."""

    def __init__(self, code: types.CodeType, users: int) -> None:
        self.code, self.users = code, users


WATCH = Watch()
_lock = threading.Lock()
_swapped: dict[types.FunctionType, _Swapped] = {}
_runs: dict[int, PythonRun] = {}  # by thread


def current_run() -> PythonRun | None:
    """The run that this thread is in, if any."""
    return _runs.get(threading.get_ident())


def is_watched(code: types.CodeType) -> bool:
    """Whether code is rewritten."""
    return any(constant is WATCH for constant in code.co_consts)


@contextlib.contextmanager
def watching(run: PythonRun, function: Any) -> Iterator[None]:
    """Within the context, calls of the function by this thread, and of functions it calls, are watched."""
    me = threading.get_ident()
    before = _runs.get(me)
    run.is_exact(function)
    _runs[me] = run
    try:
        yield
    finally:
        if before is None:
            del _runs[me]
        else:
            _runs[me] = before
        run.end()
