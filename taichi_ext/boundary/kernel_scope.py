"""Functions that only have a meaning in kernels: how kernels know them, and the error that they raise elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError, bound_arguments

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def require_kernel(name: str, given: object) -> None:
    """Raise unless Taichi is compiling a kernel; ``name`` is the function, ``given`` its first value."""
    if backend.is_inside_kernel():
        return
    frame = backend.user_frame()
    place = "" if frame is None else f'File "{frame.f_code.co_filename}", line {frame.f_lineno}:\n'
    raise UnsupportedError(
        f"{place}{name} is called from Python, with a value of type {type(given).__name__}. It can only be called in "
        "a kernel: call it in a @ti.kernel, or in a @ti.func that a kernel calls."
    )


def recorded(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Allow kernels to call a function that the recorder recognises by name; raises for arguments that do not fit."""

    @functools.wraps(function)
    def call(*args: _Args.args, **keywords: _Args.kwargs) -> _Result:
        bound_arguments(function, args, keywords)
        return function(*args, **keywords)

    call.boundary_kind = function.__name__  # type: ignore[attr-defined]
    return backend.known_in_kernels(call)


def leave_to_engine(name: str, given: object) -> NoReturn:
    """Make the engine build the kernel that Taichi is compiling; raise outside of kernels, and in forward mode."""
    require_kernel(name, given)
    backend.is_gradient_kernel()
    raise backend.NeedsEngine(name)
