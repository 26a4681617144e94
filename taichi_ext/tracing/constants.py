"""Python numbers that are parameters: where a kernel reads them, they become values with a tangent.

The value stays Python's own number, so that Python folds it with others exactly as it does for the plain kernel; only
the tangent is added. Python code that runs while the kernel is traced is watched: where it names such a number, it is
run rewritten, so that the number takes its tangent along.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from taichi_ext import backend
from taichi_ext.derivative.linear_form import Form
from taichi_ext.derivative.values import Scalar, entries_of, make_tensor
from taichi_ext.errors import UnsupportedError
from taichi_ext.record.variables import (
    Variable,
    attribute_variable,
    global_variable,
    is_number,
    names_in_code,
    number_shape,
)

_NAMELESS = ("numpy", "taichi", "taichi_ext")  # packages whose code reads no number of the user's by its name


@dataclass
class Watched:
    """Whether Python code that ran in the meantime may have read a number that is a parameter."""

    may_read: bool = False


@dataclass
class Constants:
    """The Python numbers that are parameters of one launch, each with its first column.

    Attributes:
        tracer: the trace.
        columns: by the key of the variable.
        variables: the variables, in the order of the parameters.
        seed: gives the tangent of a column.
        arguments: the names of arguments that are parameters.
        read: the keys that have been read.
        namesakes: other variables of the same name that hold the same number, by the key of the parameter.
        static: calls of ``ti.static`` around what is evaluated.
    """

    tracer: Any
    columns: dict[Any, int]
    variables: tuple[Variable, ...]
    seed: Callable[[int], Form]
    arguments: frozenset[str] = frozenset()
    read: set[Any] = field(default_factory=set)
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
        """What a name that a function does not assign reads as."""
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
            return self._seeded(self._by_key[variable.key], value)
        for other in self.variables:
            if other.name == name and other.key[0] != "attribute" and number_shape(variable.read()) is not None:
                return self._namesake(other, variable, function, value)
        return value

    def _namesake(self, known: Variable, found: Variable, function: types.FunctionType, value: Any) -> Any:
        """Another variable of the same name: the same number where it was imported from there, else another one."""
        if found.read() is known.read():
            same = self.namesakes.setdefault(known.key, [])
            if all(variable.key != found.key for variable in same):
                same.append(found)
            return self._seeded(known, value)
        if known.is_qualified:
            return value
        raise UnsupportedError(
            f"The parameter {known.name!r} is another variable than the {known.name!r} that {function.__qualname__} of "
            f"{function.__module__} reads. Name the one that is meant by its module or object, as in "
            f"'{function.__module__.split('.')[-1]}.{known.name}'."
        )

    def read_attribute(self, owner: Any, name: str, value: Any) -> Any:
        """What an attribute reads as."""
        if self.is_empty or owner is self.tracer:
            return value
        found = inspect.getattr_static(type(owner), name, None)
        if isinstance(found, property) and isinstance(found.fget, types.FunctionType):
            if not backend.is_library(found.fget):
                value = self.tracer.call(found.fget, owner)
        elif found is None and hasattr(type(owner), "__getattr__") and not _is_library(owner):
            with self.watching() as watched:
                getattr(owner, name)
            if watched.may_read:
                raise UnsupportedError(
                    f"The attribute {name!r} is computed by __getattr__, which may read a Python number that is a "
                    "parameter. Read the number in the kernel."
                )
        if name not in self._names or (number_shape(value) is None and not backend.is_expr(value)):
            return value
        variable = self._by_key.get(attribute_variable(owner, name).key)
        return value if variable is None else self._seeded(variable, value)

    def _seeded(self, variable: Variable, value: Any) -> Any:
        if self.static:
            raise UnsupportedError(
                f"The parameter {variable.name!r} is read in ti.static: what is compiled depends on it, which has no "
                "derivative. Read it outside of ti.static."
            )
        self.read.add(variable.key)
        column = self.columns[variable.key]
        if is_number(value):
            return self._scalar(value, column)
        if isinstance(value, (list, tuple)):
            numbers = [self._scalar(entry, column + n) for n, entry in enumerate(value)]
            return type(value)(*numbers) if hasattr(value, "_fields") else type(value)(numbers)
        shape = tuple(value.get_shape() or ())
        return make_tensor([self._scalar(entry, column + n) for n, entry in enumerate(entries_of(value))], shape)

    def _scalar(self, value: Any, column: int) -> Scalar:
        return Scalar(value, form=self.seed(column))

    # --- Python code that runs while the kernel is traced

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watched]:
        """Notice whether Python code that runs in the meantime names one of the variables."""
        watched = Watched()
        if self.is_empty:
            yield watched
            return

        def notice(frame: types.FrameType, event: str, _: Any) -> None:
            if event == "call" and not watched.may_read and _package(frame) not in _NAMELESS:
                watched.may_read = not self._names.isdisjoint(names_in_code(frame.f_code))

        before = sys.getprofile()
        sys.setprofile(notice)
        try:
            yield watched
        finally:
            sys.setprofile(before)

    def replaced(self, function: types.FunctionType) -> dict[str, Any]:
        """The names of a Python function that stand for such numbers, with what they read as."""
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


def _is_library(owner: Any) -> bool:
    return type(owner).__module__.split(".")[0] in _NAMELESS
