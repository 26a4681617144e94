"""The arrays that a Python function can get at, as far as they can be found without running it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

from taichi_ext import backend

_DEEPEST = 4  # containers in containers
_LIBRARIES = (backend.RUNTIME.name, "taichi_ext", "numpy", "torch", "scipy")


def reachable_arrays(function: Any, args: Any) -> Iterator[Any]:
    """NumPy arrays and tensors among the arguments, in closures, globals and attributes that the function names.

    Those in lists, tuples, dicts and objects with attributes are found too, and those of functions that it calls.
    """
    seen: set[int] = set()
    yield from _within(args, seen, 0)
    yield from _within(function, seen, 0)


def _within(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if id(value) in seen or depth > _DEEPEST:
        return
    if backend.is_array(value):
        if not isinstance(value, backend.Ndarray) and not getattr(value.dtype, "hasobject", False):
            yield value
        return
    seen.add(id(value))
    for inner in _items(value):
        if not isinstance(inner, (int, float, str, bytes, types.ModuleType, type)):
            yield from _within(inner, seen, depth + 1)


def _items(value: Any) -> list[Any]:
    """The objects within an object that may be arrays, or hold some."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if _is_library(value):
        return []
    if inspect.isfunction(value):
        return _named(value)
    attributes = getattr(value, "__dict__", None)
    return list(attributes.values()) if isinstance(attributes, dict) else []


def _named(function: types.FunctionType) -> list[Any]:
    """Closure variables, globals and defaults of a function."""
    if backend.primal_kernel(function) is not None or backend.taichi_func(function) is not None:
        return []  # kernels get their arrays as arguments
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
    scope = function.__globals__
    found = [scope[name] for name in function.__code__.co_names if name in scope]
    return [*cells, *found, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_library(value: Any) -> bool:
    module = backend.module_of(value if callable(value) else type(value))
    return module.split(".")[0] in _LIBRARIES
