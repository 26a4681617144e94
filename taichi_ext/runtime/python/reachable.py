"""The objects that a Python function can access and that can be found without running it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

from taichi_ext import backend
from taichi_ext.labels import outside_names
from taichi_ext.runtime.python.dual_numbers import is_dual, plain_number

_DEEPEST = 4  # containers in containers
_SIMPLE = (int, float, str, bytes, types.ModuleType, type)
_OPEN = (types.FunctionType, types.MethodType)
_LIBRARIES = (backend.RUNTIME.name, "taichi_ext", "numpy", "torch", "scipy")


def reachable_arrays(function: object, args: object) -> Iterator[object]:
    """NumPy arrays and tensors among the arguments, in closures, globals and attributes that the function names.

    Those in lists, tuples, dicts and objects with attributes are found too, and those of functions that it calls.
    """
    seen: set[int] = set()
    yield from _within(args, seen, 0)
    yield from _within(function, seen, 0)


def forget_tangents(result: Any, function: object, args: object) -> Any:
    """Put floats in place of numbers with tangents that a run has left in objects that the function can access.

    Returns the result of the function, also without tangents.
    """
    _forget((result, function, args), set(), 0)
    return _plain(result)


def _forget(value: Any, seen: set[int], depth: int) -> None:
    if id(value) in seen or depth > _DEEPEST or isinstance(value, _SIMPLE) or backend.is_array(value):
        return
    seen.add(id(value))
    holder = value if isinstance(value, (list, dict)) else getattr(value, "__dict__", None)
    if isinstance(holder, (list, dict)) and not isinstance(value, _OPEN):
        for key, inner in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if is_dual(inner) or (isinstance(inner, tuple) and _plain(inner) is not inner):
                holder[key] = _plain(inner)
    for inner in _items(value):
        _forget(inner, seen, depth + 1)


def _plain(value: Any) -> Any:
    """A number, or a tuple of some, without tangents."""
    if type(value) is tuple and any(map(is_dual, value)):
        return tuple(map(plain_number, value))
    return plain_number(value)


def _within(value: Any, seen: set[int], depth: int) -> Iterator[object]:
    if id(value) in seen or depth > _DEEPEST or isinstance(value, _SIMPLE):
        return
    if not backend.is_array(value):
        seen.add(id(value))
        for inner in _items(value):
            yield from _within(inner, seen, depth + 1)
    elif not isinstance(value, backend.Ndarray) and not getattr(value.dtype, "hasobject", False):
        yield value


def _items(value: Any) -> Iterable[object]:
    """The objects within an object that may be arrays, or hold some."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    method = backend.bound(value)
    if method is not None:
        return method
    module = backend.module_of(value if callable(value) else type(value))
    if module.split(".")[0] in _LIBRARIES:
        return ()
    if inspect.isfunction(value) or backend.is_decorated(value):
        if backend.primal_kernel(value) is not None or backend.taichi_func(value) is not None:
            return ()  # kernels get their arrays as arguments
        outside = [found for _, found in outside_names(value)]
        return [*outside, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    attributes = getattr(value, "__dict__", None)
    return list(attributes.values()) if isinstance(attributes, dict) else ()
