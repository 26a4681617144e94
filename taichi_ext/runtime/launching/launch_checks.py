"""Checks before a launch with tangents: errors, and warnings where tangents are lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from taichi_ext import backend
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.record.variables import Variable, attribute_variable
from taichi_ext.runtime.memory.regions import View
from taichi_ext.runtime.python.dual_numbers import warn_at_user


def check_gradient_is_own(kernel: backend.Kernel) -> None:
    """Raise if a kernel is launched in a function with ``ti.ad.no_grad`` or ``ti.ad.grad_replaced``."""
    if backend.is_gradient_replaced():
        raise UnsupportedError(
            f"{kernel.func.__qualname__} is launched in a function decorated with ti.ad.no_grad or "
            "ti.ad.grad_replaced, whose gradient is only defined in reverse mode. Call it without the decorator, "
            "or stop the gradient in the kernel."
        )


def check_same_program(program: object) -> None:
    """Raise if a run began in another program; ``program`` is None if that has ended."""
    if program is None or program is not backend.program():
        raise InvalidArgumentError(
            "ti.init or ti.reset was called while a Jacobian was computed, in the pipeline or in another thread: "
            "the fields and kernels from before no longer exist. Call it before."
        )


def check_arguments(kernel: backend.Kernel, args: tuple[object, ...], parameters: tuple[Variable, ...]) -> None:
    """Raise for a field or array of a program that has ended, and for a struct that holds a parameter."""
    keys = {variable.key for variable in parameters}
    for position, value in enumerate(args):
        problem = backend.ended_problem(value)
        if problem:
            raise InvalidArgumentError(f"Argument {position} of {kernel.func.__qualname__} {problem}.")
        member = _parameter_in(value, keys)
        if member and not backend.is_template(backend.arguments(kernel)[position].annotation):
            raise UnsupportedError(
                f"Argument {position} of {kernel.func.__qualname__} is a struct whose member {member!r} is a "
                "parameter, and a struct that is passed is a constant. Read it in the kernel by its name."
            )


def _parameter_in(value: object, keys: Set[object]) -> str:
    """The member of a struct of Python numbers that is one of the parameters, if any."""
    if not isinstance(value, backend.Struct) or not keys:
        return ""
    found = (name for name in value.keys if attribute_variable(value, name).key in keys)
    return next(found, "") or next(filter(None, (_parameter_in(getattr(value, m), keys) for m in value.keys)), "")


class Lost:
    """The fields and arrays that solvers have made constants of, and what to do if one of them is read."""

    def __init__(self) -> None:
        self._found: dict[object, tuple[object, Callable[[object], None]]] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._found)

    def add(self, names: Mapping[Any, object], found: Callable[[Any], None]) -> None:
        """These are constants, by key; ``found`` is called with the name of one that is read before it is written."""
        self._found |= {key: (name, found) for key, name in names.items()}

    def note(self, read: Set[object], written: Set[object]) -> None:
        """A kernel or Python reads and writes."""
        for key in list(self._found):
            if is_among(key, written):
                del self._found[key]
            elif is_among(key, read):
                name, found = self._found.pop(key)
                found(name)

    def read(self, key: object, value: object) -> bool:
        """Python reads a number, or a whole field or array; whether that is one of them."""
        is_lost = any(is_among(found, {key}) for found in self._found)
        if isinstance(value, float):
            self.note({key}, set())
        return is_lost


def is_among(key: object, keys: Set[object]) -> bool:
    """Whether a field is among the keys, or an array shares memory with one of them."""
    return key in keys or (isinstance(key, View) and any(isinstance(k, View) and k.overlaps(key) for k in keys))


def warn_of_changes(name: object, count: int) -> None:
    """Warn of entries of an array that Python has stored to."""
    warn_at_user(
        f"{count} entries of {name} were changed from Python between kernels: they count as constants, their tangents "
        "are lost. Change them in a kernel."
    )
