"""The Python code of a pipeline under watch: numbers computed from active ones, and stores to arrays.

During a run of a pipeline, the user's functions have rewritten code (``code``).  Their results are unchanged; the run
records which objects depend on numbers with tangents.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import threading
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, islice, product
from typing import Any

from taichi_ext import backend
from taichi_ext.labels import is_library_module
from taichi_ext.record.rewriter import OPERATORS
from taichi_ext.runtime.memory.array_stores import is_memory, item_store, memory_of, stores_of
from taichi_ext.runtime.python.active_numbers import KEEPING, ActiveNumbers
from taichi_ext.runtime.python.code import rewritten_code

_CONVERSIONS = {"": lambda value: value, "s": str, "r": repr, "a": ascii}  # of f-strings
_OPERATORS = {kind: getattr(operator, f"__{name}__") for kind, name in OPERATORS.items()}
_OPERATORS |= {f"{kind}=": getattr(operator, f"__i{name}__") for kind, name in OPERATORS.items()}
_OPERATORS |= {"UAdd": operator.pos, "USub": operator.neg, "Invert": operator.invert, "slice": slice}
_OPERATORS |= {
    "text": lambda *parts: "".join(parts),
    "formatted": lambda value, conversion, form: format(_CONVERSIONS[conversion](value), form),
}
# Callables that return the objects passed to them, or containers and iterators of them.
_STRUCTURE = (
    *(list, tuple, set, frozenset, dict, zip, enumerate, iter, sorted, min, max),
    *(chain, islice, cycle, product),
)
_AT_FRAME = (warnings.warn, breakpoint)  # functions in C that look at the frame that calls them
_LOOKED_UP = ("__getattribute__", "__class__")  # run by any access to an object
_ITSELF = (*KEEPING, backend.Struct, range)


class Watch:
    """The functions called by rewritten code; they look at the run of their thread, if any."""

    def operate(self, name: str, *operands: object) -> object:
        """The result of an operator, a slice or a text."""
        function = _OPERATORS[name]
        run = current_run()
        if run is not None and name[-1] == "=" and is_memory(operands[0]):
            return run.call(function, *operands)
        result = function(*operands)
        if run is not None:
            run.numbers.derive(result, *operands)
        return result

    def item(self, base: Any, index: object) -> object:
        result = base[index]
        run = None if type(base) in _ITSELF or isinstance(base, backend.Field) else current_run()
        if run is not None:
            run.numbers.derive(result, base)
        return result

    def part(self, owner: object, name: str) -> object:
        run = None if isinstance(owner, backend.Struct) else current_run()
        is_exact = run is None or run.is_exact(type(owner))  # its properties are rewritten
        result = getattr(owner, name)
        if run is not None and not is_exact:
            run.numbers.derive(result, owner)
        return result

    def unseen(self, value: object) -> object:
        """Mark the result of code that is not rewritten."""
        run = current_run()
        if run is not None and run.numbers.reads:
            run.numbers.mark(value)
        return value

    def each(self, values: object) -> object:
        """The iterable of a loop, watched."""
        run = None if type(values) in _ITSELF else current_run()
        return values if run is None else run.items(values)

    def stored(self, target: object) -> object:
        """The target of a following store to an item or part, watched."""
        run = None if type(target) in _ITSELF or isinstance(target, (backend.Field, backend.Matrix)) else current_run()
        return target if run is None or run.is_exact(type(target)) else _Stored(run, target)

    def callee(self, function: object) -> object:
        """The callable; for a user's function the function itself, without a frame of ours before its caller."""
        run = current_run()
        return function if run is None or run.is_exact(function) else functools.partial(run.call, function)

    def stated(self, function: object, /, *args: object, **keywords: object) -> object:
        """The call of an expression statement, made by the user's frame, which library code may look at."""
        run = current_run()
        if not callable(function):
            return function  # which raises Python's own error
        if run is not None and not run.is_exact(function):
            is_python = isinstance(getattr(function, "__func__", function), types.FunctionType)
            if not is_python and not any(function is f for f in _AT_FRAME):
                return functools.partial(run.call, function, *args, **keywords)
            run.note_effects(function, args, keywords, None)
        return functools.partial(function, *args, **keywords)


class _Stored:
    """A watched target of stores; one with attributes keeps the objects stored to it."""

    run: PythonRun
    target: Any

    def __init__(self, run: PythonRun, target: object) -> None:
        self.__dict__.update(run=run, target=target)

    def __setitem__(self, index: object, value: object) -> None:
        self.target[index] = value
        array = memory_of(self.target)
        stores = [] if array is None else [(array, item_store(self.target, index))]
        self.run.note_stores(stores, value, self.target)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.target, name, value)
        if inspect.getattr_static(self.target, name, None) is not value:
            self.run.note_stores(stores_of(setattr, (self.target, name), {}), value, self.target)


class PythonRun:
    """The Python code of one run of a pipeline.

    Attributes:
        numbers: the objects that depend on numbers with tangents.
        stores: the stores from Python to arrays since the last launch.
    """

    def __init__(self, numbers: ActiveNumbers, stores: Any) -> None:
        self.numbers = numbers
        self.stores = stores
        self._has_unseen_reads = False  # by functions that are not rewritten
        self._known: dict[int, tuple[Any, bool]] = {}  # functions and classes, kept alive, and whether they are exact
        self._rewritten: list[types.FunctionType] = []

    def call(self, function: Any, /, *args: Any, **keywords: Any) -> object:
        """Call a function that is not the user's code; its result depends on its arguments and on values it reads."""
        while isinstance(function, functools.partial):
            args, keywords = (*function.args, *args), {**function.keywords, **keywords}
            function = function.func
        owner, numbers, before = getattr(function, "__self__", None), self.numbers, self.numbers.reads
        if isinstance(owner, KEEPING):
            return function(*args, **keywords)
        if any(function is f for f in _STRUCTURE) or (function is map and self.is_exact(args[0])):
            return function(*map(self.items, args), **keywords)
        stores = stores_of(function, args, keywords)
        result = function(*args, **keywords)
        if isinstance(result, backend.Struct) and isinstance(function, backend.StructType):
            numbers.mark_members(result, {**dict(zip(result.keys, args, strict=False)), **keywords})
        elif numbers.reads != before:
            numbers.mark(result)
        else:
            numbers.derive(result, owner, *args, *keywords.values())
        self.note_effects(function, args, keywords, result, stores)
        return result

    def note_effects(
        self, function: Any, args: tuple[Any, ...], keywords: dict[str, object], result: object, stores: Any = None
    ) -> None:
        """Note stores of a function to arrays, and to objects that may return them in another form, as files do."""
        owner, given = getattr(function, "__self__", None), [*args, *keywords.values()]
        is_held = isinstance(result, (int, types.NoneType)) or result is owner
        holders = [owner, *((*given, sys.stdout) if result is None else ())] if is_held else []
        self.note_stores(stores_of(function, args, keywords) if stores is None else stores, given, *holders)

    def note_stores(self, stores: Sequence[tuple[object, object]], value: object, *holders: object) -> None:
        """Note stores of a value to arrays, and to holders that may return it in another form."""
        others = [h for h in holders if not isinstance(h, (*KEEPING, float, types.NoneType)) and memory_of(h) is None]
        for array, store in stores:
            if self.numbers.is_active_memory(array):
                self.stores.note(array, store)
            else:
                others.append(array)
        if others and self.numbers.depends(value):
            for other in others:
                self.numbers.mark(other)

    def items(self, values: Any) -> Any:
        """An iterable whose items are marked if they depend on numbers with tangents."""
        if isinstance(values, (*KEEPING, float)) or getattr(values, "ndim", 1) == 0:
            return values
        is_some = isinstance(values, Iterable) and self.numbers.depends(values)
        return self.numbers.marked(values) if is_some else values

    def read(self, value: object) -> object:
        """Mark a value with a tangent that is read, perhaps by code that is not rewritten."""
        if not self._has_unseen_reads:
            frame = backend.user_frame()
            self._has_unseen_reads = frame is not None and not is_watched(frame.f_code)
        self.numbers.reads += 1
        self.numbers.mark(value)
        return value

    def is_lost(self, value: object) -> bool:
        """Whether a value that is stored or passed on was, or may have been, computed from numbers with tangents."""
        if self.numbers.depends(value, is_lost=True):
            return True
        if not self._has_unseen_reads or not isinstance(value, float):
            return False
        frame = backend.user_frame()
        if frame is None or is_watched(frame.f_code):
            return False
        return all(value is not constant for constant in frame.f_code.co_consts)

    # --- functions

    def is_exact(self, function: object) -> bool:
        """Whether a callable is a kernel or the user's own code; the latter is rewritten."""
        known = self._known.get(id(function))
        if known is not None:
            return known[1]
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
            own, users = _swapped.get(function, (function.__code__, 0))
            if is_watched(own):  # defined by rewritten code
                return True
            code = rewritten_code(own, function.__qualname__, WATCH)
            if code is None:
                return False
            _swapped[function] = own, users + 1
            function.__code__ = code
        self._rewritten.append(function)
        return True

    def end(self) -> None:
        """Restore the code of all functions, and forget all objects."""
        with _lock:
            for function in self._rewritten:
                own, users = _swapped.pop(function)
                if users > 1:
                    _swapped[function] = own, users - 1
                else:
                    function.__code__ = own
        self._rewritten.clear()
        self._known.clear()
        self.numbers.clear()


WATCH = Watch()
_lock = threading.Lock()
_swapped: dict[types.FunctionType, tuple[types.CodeType, int]] = {}  # their own code, and how many runs need the other
_runs: dict[int, PythonRun] = {}  # by thread


def current_run() -> PythonRun | None:
    """The run that this thread is in, if any."""
    return _runs.get(threading.get_ident())


def is_watched(code: types.CodeType) -> bool:
    """Whether code is rewritten."""
    return any(constant is WATCH for constant in code.co_consts)


@contextlib.contextmanager
def watching(run: PythonRun, function: object) -> Iterator[None]:
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
