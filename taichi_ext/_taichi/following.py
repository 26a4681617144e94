"""Following a pipeline: what a thread does to fields and arrays is told to whoever follows it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from taichi.lang import impl, matrix
from taichi.lang._ndarray import Ndarray, ScalarNdarray
from taichi.lang.enums import AutodiffMode
from taichi.lang.field import ScalarField, SNodeHostAccess
from taichi.lang.kernel_impl import Kernel
from taichi.lang.matrix import MatrixField

from taichi_ext._taichi.kernels import is_library_kernel, process_args
from taichi_ext.errors import InvalidArgumentError, UnsupportedError

_followers: dict[int, Any] = {}


_lock = threading.Lock()


def _follower() -> Any:
    return _followers.get(threading.get_ident())


def _followed_call(self: Kernel, *args: Any, **kwargs: Any) -> Any:
    follower = _follower()
    if follower is None:
        return _originals["call"](self, *args, **kwargs)
    _refuse_gradient(self)
    return follower.launch(self, process_args(self, args, kwargs))


def _refuse_gradient(kernel: Kernel) -> None:
    """Raise for a kernel that computes a gradient, or clears those of ``ti.ad.Tape`` and ``ti.ad.FwdMode``."""
    is_clearing = is_library_kernel(kernel) and kernel.func.__name__ == "clear_gradients"
    if is_clearing or kernel.autodiff_mode != AutodiffMode.NONE:
        what = "A gradient" if is_clearing else f"The gradient of {kernel.func.__qualname__}"
        raise UnsupportedError(
            f"{what} is computed by Taichi in a pipeline that is differentiated: that would be a second derivative. "
            "Take gradients outside of the pipeline."
        )


def _followed_field_set(self: ScalarField, key: Any, value: Any) -> None:
    follower = _follower()
    if follower is not None:
        follower.before_host_write(self, value)
    _originals["field set"](self, key, value)
    if follower is not None:
        index = key if isinstance(key, tuple) else () if key is None else (key,)
        accessors: Any = self.host_accessors
        follower.host_write(accessors[0], index)


def _followed_entry_write(x: Any, value: Any) -> None:
    follower = _follower()
    if follower is not None:
        follower.before_host_write(x.accessor if isinstance(x, SNodeHostAccess) else x.ndarr, value)
    _originals["entry write"](x, value)
    if follower is not None:
        if isinstance(x, SNodeHostAccess):
            follower.host_write(x.accessor, x.key)
        else:
            follower.host_write_array(x.ndarr, x.indices)


def _followed_field_get(self: ScalarField, key: Any) -> Any:
    value = _originals["field get"](self, key)
    follower = _follower()
    accessors: Any = self.host_accessors
    return value if follower is None else follower.host_read(accessors[0], value)


def _followed_entry_read(x: Any) -> Any:
    value = _originals["entry read"](x)
    follower = _follower()
    if follower is None:
        return value
    return follower.host_read(x.accessor if isinstance(x, SNodeHostAccess) else x.ndarr, value)


def _followed_array_set(self: Any, key: Any, value: Any) -> None:
    follower = _follower()
    if follower is not None:
        follower.before_host_write(self, value)
    _originals["array set"](self, key, value)
    if follower is not None:
        follower.host_write_array(self, key)


def _followed_fill(self: Any, value: Any) -> None:
    follower = _follower()
    if follower is None:
        _originals["fill"](self, value)
        return
    follower.before_host_write(self, value)
    with suspend_following():
        _originals["fill"](self, value)
    follower.host_fill(self)


def _followed_to_numpy(name: str) -> Callable[..., Any]:
    def to_numpy(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = _originals[name](self, *args, **kwargs)
        follower = _follower()
        return values if follower is None else follower.host_read(self, values)

    return to_numpy


def _followed_from_numpy(name: str) -> Callable[..., Any]:
    def from_numpy(self: Any, arr: Any) -> None:
        follower = _follower()
        if follower is not None:
            follower.before_host_write(self, arr)
        _originals[name](self, arr)

    return from_numpy


# What a pipeline can do to a field or array: (owner, attribute, what stands in for it while a pipeline is followed)
_FOLLOWED = {
    "call": (Kernel, "__call__", _followed_call),
    "field set": (ScalarField, "__setitem__", _followed_field_set),
    "field get": (ScalarField, "__getitem__", _followed_field_get),
    "entry write": (matrix, "_write_host_access", _followed_entry_write),
    "entry read": (matrix, "_read_host_access", _followed_entry_read),
    "array set": (ScalarNdarray, "__setitem__", _followed_array_set),
    "fill": (Ndarray, "fill", _followed_fill),
}


for _class in (ScalarField, MatrixField, ScalarNdarray, matrix.MatrixNdarray, matrix.VectorNdarray):
    for _name, _follow in (("to_numpy", _followed_to_numpy), ("from_numpy", _followed_from_numpy)):
        _FOLLOWED[f"{_class.__name__}.{_name}"] = (_class, _name, _follow(f"{_class.__name__}.{_name}"))


_originals: dict[str, Any] = {name: getattr(owner, attribute) for name, (owner, attribute, _) in _FOLLOWED.items()}


@contextlib.contextmanager
def follow(follower: Any) -> Iterator[None]:
    """Within the context, what this thread does to fields and arrays is told to ``follower``.

    Kernels are not launched but given to ``follower.launch(kernel, args)``; assignments from Python happen and are
    told.
    """
    me = threading.get_ident()
    with _lock:
        if me in _followers:
            raise InvalidArgumentError(
                "A Jacobian is already being computed in this thread: jacobian cannot be called in a function that it "
                "differentiates. Compute the inner one before, and pass its numbers in a field."
            )
        _followers[me] = follower
        for owner, attribute, stand_in in _FOLLOWED.values():
            setattr(owner, attribute, stand_in)
    try:
        yield
    finally:
        with _lock:
            del _followers[me]
            if not _followers:
                for name, (owner, attribute, _) in _FOLLOWED.items():
                    setattr(owner, attribute, _originals[name])


@contextlib.contextmanager
def suspend_following() -> Iterator[None]:
    """Within the context, this thread is not followed."""
    me = threading.get_ident()
    follower = _followers.pop(me, None)
    try:
        yield
    finally:
        if follower is not None:
            _followers[me] = follower


def is_followed() -> bool:
    """Whether this thread is running a pipeline that is differentiated."""
    return _follower() is not None


def is_gradient_replaced() -> bool:
    """Whether a function decorated with ``ti.ad.no_grad`` or ``ti.ad.grad_replaced`` is running."""
    return bool(impl.get_runtime().grad_replaced)


def user_frame(frame: Any = None) -> Any:
    """The innermost frame, from the caller's or a given one on, that is neither Taichi's nor this package's."""
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if (module or "").split(".")[0] not in ("taichi", "taichi_ext", "contextlib"):
            return frame
        frame = frame.f_back
    return None
