"""Python variables that hold numbers: globals, closure variables, attributes; found by name, read and set."""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError, raise_baked
from taichi_ext.labels import is_library_module, names_in_code, outside_names, plain_function
from taichi_ext.program import FoldedConst, Local, Read, Tensor
from taichi_ext.record.literals import as_value, type_of

_MOST_FUNCTIONS = 1000  # that are searched for a name
_DEEPEST = 3  # attributes in a path that is suggested


@dataclass(frozen=True, eq=False)
class Variable:
    """A name in a namespace: of a module, of a closure, of an object."""

    key: tuple[Any, ...]  # the same for each way to reach the variable; valid while the namespace exists
    name: str  # within its namespace
    read: Callable[[], object]  # its value now
    write: Callable[[object], None]  # assigns another value
    is_qualified: bool = False  # whether it was named by its module or object


def global_variable(function: types.FunctionType, name: str) -> Variable | None:
    """The meaning of a name in a function that does not assign it: a variable of its closure or module."""
    code = function.__code__
    if name in (*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *code.co_cellvars):
        return None
    if name in code.co_freevars:
        cell = (function.__closure__ or ())[code.co_freevars.index(name)]
        if cell == types.CellType():  # not assigned yet
            return None
        write = functools.partial(setattr, cell, "cell_contents")
        return Variable(("closure", id(cell)), name, lambda: cell.cell_contents, write)
    return _in_module(function.__globals__, name) if name in function.__globals__ else None


def attribute_variable(owner: object, name: str) -> Variable:
    """An attribute of a module or object, or of the class if all objects of the class share it."""
    if isinstance(owner, types.ModuleType):
        return _in_module(vars(owner), name)
    holder = owner
    if name not in getattr(owner, "__dict__", {}):
        classes = (owner if isinstance(owner, type) else type(owner)).__mro__
        shared = next((c for c in classes if name in vars(c)), None)
        if shared is not None and not hasattr(vars(shared)[name], "__get__"):
            holder = shared
    try:
        held: Any = weakref.ref(holder)
    except TypeError:
        held = lambda: holder  # noqa: E731  # it has no weak references
    if isinstance(owner, backend.Struct):  # assigning a vector to a member changes the one that is there
        read = lambda: copy.deepcopy(getattr(held(), name))  # noqa: E731
    else:
        read = lambda: getattr(held(), name)  # noqa: E731
    return Variable(("attribute", id(holder), name), name, read, lambda value: setattr(held(), name, value))


def _in_module(names: dict[str, object], name: str) -> Variable:
    return Variable(("global", id(names), name), name, lambda: names[name], lambda value: names.update({name: value}))


def find_variable(path: str, root: object, owner: tuple[object, ...] = ()) -> Variable | None:
    """The variable that ``a`` or ``a.b.c`` names in a kernel or function, or in the first that it can reach.

    ``owner`` holds the object that the first argument of ``root`` is bound to, if it is bound.
    """
    first, *attributes = path.split(".")
    if not all(part.isidentifier() for part in (first, *attributes)):
        return None
    functions = list(_reachable(root))
    if owner and functions and functions[0].__code__.co_varnames[:1] == (first,):
        return _attribute(owner[0], attributes)
    readers = [f for f in functions if first in names_in_code(f.__code__)]
    for function in (*readers, *functions):
        named = global_variable(function, first)
        if named is not None:
            return _attribute(named.read(), attributes) if attributes else named
    return None


def named_numbers(root: object, owner: tuple[object, ...] = ()) -> list[str]:
    """The names of real numbers that a kernel or function, and the functions it can reach, may read."""
    functions = list(_reachable(root))
    names = set().union(*(names_in_code(f.__code__) for f in functions))
    first = functions[0].__code__.co_varnames[:1] if functions and owner else ()
    bases = {name: owner[0] for name in first}  # noqa: C420  # there may be no owner
    for function in functions:
        bases = {**dict(outside_names(function)), **bases}
    return sorted(_numbers_under(bases, names, 0))


def _numbers_under(bases: Mapping[str, object], names: set[str], depth: int) -> Iterator[str]:
    """The paths of the numbers among some objects and, under some names, in their attributes."""
    for path, base in bases.items():
        if number_shape(base) is not None:
            entries = base if isinstance(base, (list, tuple)) else [base]
            if not all(isinstance(e, (int, np.integer)) for e in entries):
                yield path
        elif depth < _DEEPEST and _has_numbers(base):
            methods = filter(None, map(plain_function, vars(type(base)).values()))
            read = names.union(*(names_in_code(m.__code__) for m in methods))
            yield from _numbers_under({f"{path}.{n}": v for n, v in vars(base).items() if n in read}, read, depth + 1)


def _has_numbers(base: object) -> bool:
    """Whether an object is a module or object of the user."""
    name = base.__name__ if isinstance(base, types.ModuleType) else type(base).__module__
    return hasattr(base, "__dict__") and not callable(base) and not is_library_module(name)


def _attribute(base: object, names: list[str]) -> Variable | None:
    for name in names[:-1]:
        base = getattr(base, name, None)
    if not names or not hasattr(base, names[-1]):
        return None
    return replace(attribute_variable(base, names[-1]), is_qualified=True)


def python_reader(variable: Variable, root: object) -> types.FunctionType | None:
    """The pipeline, or the first plain Python function that it may call, whose own code names a variable."""
    is_attribute = variable.is_qualified or variable.key[0] == "attribute"
    for function in _reachable(root, in_python=True):
        reader = global_variable(function, variable.name) if variable.name in names_in_code(function.__code__) else None
        is_named = reader is not None and reader.key == variable.key
        if is_named or (is_attribute and variable.name in _attributes_in_code(function.__code__)):
            return function
    return None


def _attributes_in_code(code: types.CodeType) -> set[str]:
    """The names of the attributes that a function's code reads, including definitions in it."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_ATTR"}
    return names.union(*(_attributes_in_code(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _reachable(root: object, in_python: bool = False) -> Iterator[types.FunctionType]:
    """The functions that a kernel or function may call, itself first: those that its code names.

    ``in_python``: without kernels and ti.funcs.
    """
    pending, seen = [root], set()
    while pending and len(seen) < _MOST_FUNCTIONS:
        named = pending.pop(0)
        if in_python and (backend.primal_kernel(named) is not None or backend.taichi_func(named) is not None):
            continue
        function = plain_function(named)
        if function is None or id(function) in seen or backend.is_library(function):
            continue
        seen.add(id(function))
        yield function
        pending += _named(function)
        if in_python and isinstance(root, types.MethodType):
            pending += _members(root.__self__, names_in_code(function.__code__))


def _named(function: types.FunctionType) -> Iterator[object]:
    names = names_in_code(function.__code__)
    for _, value in sorted(outside_names(function), key=operator.itemgetter(0)):
        parts = value if isinstance(value, (list, tuple)) else [value]
        for part in parts:
            if isinstance(part, types.ModuleType):
                yield from (vars(part)[n] for n in names if callable(vars(part).get(n)))
            elif callable(part):
                yield part
            elif part is not None and not isinstance(part, (int, float, str)):
                yield from _members(part, names)


def _members(owner: object, names: set[str]) -> Iterator[object]:
    """The attributes of an object's class with some of these names."""
    return (m for n in names if (m := inspect.getattr_static(type(owner), n, None)) is not None)


# --- values of variables


def is_number(value: object) -> bool:
    """Whether a value is a real number of Python or NumPy."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def number_shape(value: object) -> tuple[int, ...] | None:
    """The shape of a number, ``ti.Vector``, ``ti.Matrix``, or tuple or list of numbers; None for other objects."""
    if is_number(value):
        return ()
    if isinstance(value, backend.Matrix):
        return tuple(value.get_shape() or ()) if all(map(is_number, np.asarray(value.to_numpy()).flat)) else None
    if isinstance(value, (list, tuple)) and value and all(map(is_number, value)):
        return (len(value),)
    return None


def with_entries(value: Any, entries: np.ndarray) -> object:
    if is_number(value):
        return float(entries)
    if isinstance(value, backend.Matrix):
        return type(value)(entries.tolist())
    numbers = [float(e) for e in entries]
    return type(value)(*numbers) if hasattr(value, "_fields") else type(value)(numbers)


# Python numbers that are parameters: they become values with a derivative when a kernel reads them.
#
# The value stays a Python number, so that Python folds it with others exactly as for the plain kernel; the expression
# that computed it is kept with it. Python code that runs while the kernel is recorded is watched: if it names such a
# number, it runs rewritten, so that the number carries its derivative.

READS_PARAMETER = (
    "{} may read a Python number that is a parameter, and whether its results depend on it is unknown. Read the "
    "number in the kernel and pass it as an argument."
)
# packages whose code reads no number of the user's by its name
_NAMELESS = (backend.RUNTIME.name, "numpy", "taichi_ext")


class PythonNumber(FoldedConst):
    """A number that depends on parameters, in Python code; it must not decide what is compiled."""

    def __bool__(self) -> NoReturn:
        raise_baked("A choice")

    def __index__(self) -> NoReturn:
        raise_baked("A whole number")

    def __int__(self) -> NoReturn:
        raise_baked("A whole number")


def known(value: object, source: object) -> PythonNumber:
    """A Python number that was computed from parameters."""
    literal = as_value(value)
    return PythonNumber(literal.value, literal.dtype, source)  # type: ignore[attr-defined]


@dataclass
class Watched:
    """Whether Python code within the context may have read a number that is a parameter."""

    may_read: bool = False


@dataclass
class Constants:
    """The Python numbers that are parameters of one recording.

    Attributes:
        variables: the variables, in the order of the parameters.
        arguments: the names of arguments that are parameters.
        library: the functions of the recorder, by name.
        locals: the locals of the program for the variables that have been read, by their keys.
        namesakes: other variables of the same name that hold the same number, by the key of the parameter.
        static: the number of calls of ``ti.static`` around the current expression.
    """

    variables: tuple[Variable, ...] = ()
    arguments: frozenset[str] = frozenset()
    library: Any = None
    locals: dict[Any, Local] = field(default_factory=dict)
    namesakes: dict[Any, list[Variable]] = field(default_factory=dict)
    static: int = 0

    def __post_init__(self) -> None:
        self._by_key = {variable.key: variable for variable in self.variables}
        self._names = {variable.name for variable in self.variables}

    @property
    def is_empty(self) -> bool:
        return not self.variables

    # --- reading

    def enter_static(self, change: int) -> None:
        """``ti.static`` begins (1) or ends (-1)."""
        self.static += change

    def read_name(self, function: types.FunctionType, name: str, value: Any) -> Any:
        """The value of a name that a function does not assign."""
        if name in self.arguments:
            variable = global_variable(function, name)
            if variable is not None and number_shape(variable.read()) is not None:
                raise UnsupportedError(
                    f"params has {name!r}, which is an argument of the kernel and a Python number that "
                    f"{function.__qualname__} reads. Rename one of them."
                )
        if name not in self._names:
            return value
        variable = global_variable(function, name)
        if variable is None:
            return value
        if variable.key in self._by_key:
            return self._parameter(self._by_key[variable.key], value)
        for other in self.variables:
            if other.name == name and other.key[0] != "attribute" and number_shape(variable.read()) is not None:
                return self._namesake(other, variable, function, value)
        return value

    def _namesake(self, meant: Variable, namesake: Variable, function: types.FunctionType, value: object) -> object:
        """The value of another variable of the same name: the parameter if it was imported from there, else its own."""
        if namesake.read() is meant.read():
            same = self.namesakes.setdefault(meant.key, [])
            if all(variable.key != namesake.key for variable in same):
                same.append(namesake)
            return self._parameter(meant, value)
        if meant.is_qualified:
            return value
        raise UnsupportedError(
            f"The parameter {meant.name!r} is another variable than the {meant.name!r} that {function.__qualname__} of "
            f"{function.__module__} reads. Name the one that is meant by its module or object, as in "
            f"'{function.__module__.split('.')[-1]}.{meant.name}'."
        )

    def read_attribute(self, owner: object, name: str, value: object) -> object:
        if self.is_empty:
            return value
        attribute = inspect.getattr_static(type(owner), name, None)
        if isinstance(attribute, property) and isinstance(attribute.fget, types.FunctionType):
            if not backend.is_library(attribute.fget):
                value = self.library.call(attribute.fget, owner)
        elif attribute is None and hasattr(type(owner), "__getattr__") and not _is_nameless(type(owner).__module__):
            with self.watching() as watched:
                getattr(owner, name)
            if watched.may_read:
                raise UnsupportedError(
                    f"The attribute {name!r} is computed by __getattr__, which may read a Python number that is a "
                    "parameter. Read the number in the kernel."
                )
        if name not in self._names or number_shape(value) is None:
            return value
        variable = self._by_key.get(attribute_variable(owner, name).key)
        return value if variable is None else self._parameter(variable, value)

    def _parameter(self, variable: Variable, value: Any) -> object:
        """A number, or vector of numbers, with reads of the local that stands for the variable as its sources."""
        if self.static:
            raise UnsupportedError(
                f"The parameter {variable.name!r} is read in ti.static: the compiled code depends on it, which has no "
                "derivative. Read it outside of ti.static."
            )
        shape = number_shape(value)
        assert shape is not None
        if variable.key not in self.locals:
            self.locals[variable.key] = Local(variable.name, type_of(float), shape, "parameter")
        local = self.locals[variable.key]
        if is_number(value):
            return known(value, Read(local))
        if isinstance(value, (list, tuple)):
            numbers = [known(entry, Read(local, (n,))) for n, entry in enumerate(value)]
            make: Any = type(value)
            return make(*numbers) if hasattr(value, "_fields") else make(numbers)
        entries = zip(np.array(value.to_list(), object).flat, np.ndindex(shape), strict=True)
        return Tensor(tuple(known(entry, Read(local, index)) for entry, index in entries), shape)

    # --- Python code that runs while the kernel is recorded

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watched]:
        """Watch whether Python code within the context names one of the variables."""
        watched = Watched()
        if self.is_empty:
            yield watched
            return

        def notice(frame: types.FrameType, event: str, _: object) -> None:
            if event == "call" and not watched.may_read and not _is_nameless(frame.f_globals.get("__name__")):
                watched.may_read = not self._names.isdisjoint(names_in_code(frame.f_code))

        before = sys.getprofile()
        sys.setprofile(notice)
        try:
            yield watched
        finally:
            sys.setprofile(before)

    def replaced(self, function: types.FunctionType) -> dict[str, object]:
        """The names of a Python function for such numbers, with their replacements."""
        result = {}
        for name in self._names & names_in_code(function.__code__):
            variable = global_variable(function, name)
            if variable is not None:
                before = variable.read()
                value = self.read_name(function, name, before)
                if value is not before:
                    result[name] = value
        return result


def _is_nameless(module: object) -> bool:
    return str(module).split(".")[0] in _NAMELESS
