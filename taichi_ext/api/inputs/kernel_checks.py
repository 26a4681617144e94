"""Whether something is a kernel or a pipeline, and what to give instead where it is not."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from taichi_ext import backend
from taichi_ext.errors import InvalidArgumentError, shown


def check_initialised() -> None:
    """Raise before ``ti.init``, and after ``ti.reset``."""
    if backend.program() is None:
        raise InvalidArgumentError("Taichi is not initialised; call ti.init(...) first.")


def check_kernel(kernel: object) -> None:
    """Raise unless the object is a kernel or a pipeline."""
    problem = _kernel_problem(kernel)
    if problem:
        raise InvalidArgumentError(f"kernel is {problem}.")


def _kernel_problem(kernel: object) -> str:
    """Why an object is not a kernel or pipeline, and what to give instead; empty if it is one."""
    foreign = backend.foreign_problem(kernel)
    if foreign:
        return foreign.removeprefix("is ")
    bound = backend.primal_kernel(kernel)
    name = getattr(kernel, "__qualname__", "").split("<locals>.")[-1]
    if bound is not None:
        return _bound_problem(kernel, name, bound[0])
    if isinstance(kernel, type):
        return f"the class {name}; give a kernel or method of one of its objects"
    if not callable(kernel):
        return f"{shown(kernel)}; expected a @ti.kernel or a function that launches kernels, not its result"
    func = backend.taichi_func(kernel)
    if isinstance(kernel, types.BuiltinFunctionType):
        return (
            f"Python's built-in {name}, which launches no kernel; give a @ti.kernel or a function that launches kernels"
        )
    if func is not None:
        kind = "ti.real_func" if func.is_real_function else "ti.func"
        return f"the {kind} {name or kernel!r}, which runs in kernels only; give a @ti.kernel that calls it"
    function = kernel
    while isinstance(function, functools.partial):
        function = function.func
    for kind, is_kind in _DEFERRED.items():
        if is_kind(function) or is_kind(getattr(function, "__call__", None)):  # noqa: B004
            return f"the {kind} {name or shown(kernel)}, which does not run when it is called; give a plain function"
    return ""


_DEFERRED = {
    "coroutine function": inspect.iscoroutinefunction,
    "generator function": inspect.isgeneratorfunction,
    "asynchronous generator function": inspect.isasyncgenfunction,
}


def _bound_problem(kernel: object, name: str, primal: Any) -> str:
    if backend.is_reverse(primal):
        return "the gradient of a kernel (kernel.grad); give the kernel itself"
    if inspect.ismethod(kernel):
        return f"{name}, a method of a plain class; decorate {type(kernel.__self__).__name__} with @ti.data_oriented"
    if backend.is_class_kernel(primal) and backend.is_decorated(kernel):  # Taichi does not call it either
        return f"{name}, a method without its object; give the method of an object, such as solver.step"
    return ""
