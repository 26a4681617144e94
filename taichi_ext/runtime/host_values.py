"""Numbers that Python code reads from fields with tangents: ordinary numbers that remember where they come from.

What they are stored to counts as a constant, because only kernels are differentiated; knowing them, a pipeline can say
so instead of dropping a derivative in silence.  They are subclasses of what is read without a derivative, and compute
as those do.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import DerivativeWarning


def _apply(self: Any, function: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
    """NumPy's function on such numbers: its result is one."""
    return as_active(getattr(function, method)(*map(_plain, inputs), **keywords))


def _plain(x: Any) -> Any:
    """A number without its mark."""
    for marked, plain in ((ActiveFloat, float), (ActiveFloat64, np.float64), (ActiveFloat32, np.float32)):
        if isinstance(x, marked):
            return plain(x)
    return x


class ActiveFloat(float):
    """A float that was computed from a value with a tangent."""

    __array_ufunc__ = _apply


class ActiveFloat64(np.float64):
    """The same for an entry of an array of float64."""

    __array_ufunc__ = _apply


class ActiveFloat32(np.float32):
    """The same for an entry of an array of float32."""

    __array_ufunc__ = _apply


class ActiveArray(np.ndarray):
    """An array that was computed from values with tangents."""

    def __getitem__(self, index: Any) -> Any:
        return as_active(super().__getitem__(index))

    def __array_function__(self, function: Any, types: Any, args: Any, keywords: Any) -> Any:
        return as_active(super().__array_function__(function, types, args, keywords))

    def tolist(self) -> Any:
        return as_active(super().tolist())

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        # without a subclass, a sum is a scalar
        return as_active(array[()] if array.ndim == 0 else array)


class GivenArray(ActiveArray):
    """An array that is a parameter, as a pipeline is given it: it and its views have tangents, and no mark.

    What Python computes or copies from it is marked.
    """


def as_given(value: Any) -> Any:
    """A NumPy array as such an array, in the same memory; anything else as it is, and what has no memory."""
    return value.view(GivenArray) if type(value) is np.ndarray and value.size else value


def as_active(value: Any) -> Any:
    """The value, marked: a number, an array, or what a kernel returns, which may be a vector, a struct or several."""
    if isinstance(value, (list, tuple)):
        marked = map(as_active, value)
        return type(value)(*marked) if hasattr(value, "_fields") else type(value)(marked)
    if isinstance(value, backend.Struct):
        for name in value.keys:
            value[name] = as_active(value[name])
        return value
    if isinstance(value, backend.Matrix):
        value.entries = as_active(value.entries)
        return value
    if isinstance(value, GivenArray):
        return value
    if isinstance(value, np.ndarray):
        return value.view(ActiveArray) if value.dtype.kind == "f" else np.asarray(value)
    if isinstance(value, np.float64):
        return ActiveFloat64(value)
    if isinstance(value, np.float32):  # pyright: ignore[reportArgumentType]  # its stub is an alias with an argument
        return ActiveFloat32(value)
    return ActiveFloat(value) if isinstance(value, float) else value


def is_active_on_host(value: Any) -> bool:
    """Whether a value, or an item of it, is marked; entries of fields are read for that."""
    if isinstance(value, backend.Struct):
        value = [value[name] for name in value.keys]
    if isinstance(value, backend.Matrix):
        value = value.to_list() if value.is_host_access else value.entries
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(is_active_on_host(v) for v in value)
    if isinstance(value, GivenArray) and not isinstance(_owner(value), GivenArray):
        return False
    if isinstance(value, ActiveArray):
        return value.dtype.kind == "f"  # views of other types have no derivative
    return isinstance(value, (ActiveFloat, ActiveFloat64, ActiveFloat32))


def _owner(array: np.ndarray) -> np.ndarray:
    """The array that the memory belongs to."""
    return _owner(array.base) if isinstance(array.base, np.ndarray) else array


def _marking(plain: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **keywords: Any) -> Any:
        return as_active(plain(*args, **keywords))

    method.__name__ = plain.__name__
    return method


_OPERATIONS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_METHODS = {
    ActiveFloat: (),
    ActiveFloat64: ("item",),
    ActiveFloat32: ("item",),
    ActiveArray: ("item", "mean", "std", "var", "dot", "trace"),
}
for _class, _names in _METHODS.items():
    _base = _class.__base__
    _wrapped = list(_names)
    if _class is not ActiveArray:
        _wrapped += [f"__{r}{name}__" for name in _OPERATIONS for r in ("", "r")]
        _wrapped += ["__neg__", "__pos__", "__abs__", "__round__"]
    for _name in _wrapped:
        setattr(_class, _name, _marking(getattr(_base, _name)))


_said: ContextVar[set[Any] | None] = ContextVar("_said", default=None)


@contextlib.contextmanager
def saying_once(said: set[Any]) -> Iterator[None]:
    """Within it no warning is repeated that is in a set, which grows: columns may be computed in many runs."""
    token = _said.set(said)
    try:
        yield
    finally:
        _said.reset(token)


def warn_at_user(message: str) -> None:
    """A warning at the line of the user's code that led here, once in each ``saying_once``."""
    frame, said = backend.user_frame(), _said.get()
    if said is not None:
        place = (message, frame and (frame.f_code.co_filename, frame.f_lineno))
        if place in said:
            return
        said.add(place)
    if frame is None:
        warnings.warn(message, DerivativeWarning, stacklevel=3)
    else:
        warnings.warn_explicit(message, DerivativeWarning, frame.f_code.co_filename, frame.f_lineno)
