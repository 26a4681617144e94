"""Python numbers that are parameters: they become values with a derivative when a kernel reads them.

The value stays a Python number, so that Python folds it with others exactly as for the plain kernel; the expression
that computed it is kept with it. Python code that runs while the kernel is recorded is watched: if it names such a
number, it runs rewritten, so that the number carries its derivative.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError, raise_baked
from taichi_ext.program import Known, Local, Read, Tensor
from taichi_ext.record.literals import as_value, type_of
from taichi_ext.record.variables import (
    Variable,
    attribute_variable,
    global_variable,
    is_number,
    names_in_code,
    number_shape,
)

READS_PARAMETER = (
    "{} may read a Python number that is a parameter, and whether its results depend on it is unknown. Read the "
    "number in the kernel and pass it as an argument."
)
# packages whose code reads no number of the user's by its name
_NAMELESS = (backend.RUNTIME.name, "numpy", "taichi_ext")


class PythonNumber(Known):
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

    def _namesake(self, meant: Variable, found: Variable, function: types.FunctionType, value: object) -> object:
        """The value of another variable of the same name: the parameter if it was imported from there, else its own."""
        if found.read() is meant.read():
            same = self.namesakes.setdefault(meant.key, [])
            if all(variable.key != found.key for variable in same):
                same.append(found)
            return self._parameter(meant, value)
        if meant.is_qualified:
            return value
        raise UnsupportedError(
            f"The parameter {meant.name!r} is another variable than the {meant.name!r} that {function.__qualname__} of "
            f"{function.__module__} reads. Name the one that is meant by its module or object, as in "
            f"'{function.__module__.split('.')[-1]}.{meant.name}'."
        )

    def read_attribute(self, owner: object, name: str, value: object) -> object:
        """The value of an attribute."""
        if self.is_empty:
            return value
        found = inspect.getattr_static(type(owner), name, None)
        if isinstance(found, property) and isinstance(found.fget, types.FunctionType):
            if not backend.is_library(found.fget):
                value = self.library.call(found.fget, owner)
        elif found is None and hasattr(type(owner), "__getattr__") and not _is_library(owner):
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
            if event == "call" and not watched.may_read and _package(frame) not in _NAMELESS:
                watched.may_read = not self._names.isdisjoint(names_in_code(frame.f_code))

        before = sys.getprofile()
        sys.setprofile(notice)
        try:
            yield watched
        finally:
            sys.setprofile(before)

    def replaced(self, function: types.FunctionType) -> dict[str, object]:
        """The names of a Python function for such numbers, with their replacements."""
        found = {}
        for name in self._names & names_in_code(function.__code__):
            variable = global_variable(function, name)
            if variable is not None:
                before = variable.read()
                value = self.read_name(function, name, before)
                if value is not before:
                    found[name] = value
        return found


def _package(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".")[0]


def _is_library(owner: object) -> bool:
    return type(owner).__module__.split(".")[0] in _NAMELESS
