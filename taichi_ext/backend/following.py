"""Report a thread's kernel launches and its reads and stores of fields and arrays to an observer."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from taichi_ext.backend.entries import FieldEntry
from taichi_ext.backend.kernels import is_library_kernel, is_reading_kernel, process_args
from taichi_ext.backend.lifetime import check_not_ended
from taichi_ext.backend.runtime import RUNTIME, AutodiffMode, Kernel, SNodeHostAccess, matrix, mesh, ti
from taichi_ext.errors import INNER, InvalidArgumentError, UnsupportedError

_followers: dict[int, Any] = {}


_lock = threading.Lock()


class _Stray:
    """Follows a thread that a pipeline has started: no derivative goes through its launches and stores."""

    def __init__(self) -> None:
        self.errors: list[UnsupportedError] = []
        self.is_over = False  # the pipeline has returned

    def launch(self, kernel: Kernel, args: tuple[Any, ...]) -> Any:
        if is_reading_kernel(kernel):
            with suspend_following():
                return kernel(*args)
        raise self._error(f"{kernel.func.__qualname__} is launched in")

    def before_host_write(self, obj: object, value: object) -> None:
        raise self._error("A field or array is written in")

    def host_read(self, obj: object, value: object) -> Any:
        return value

    def _error(self, what: str) -> UnsupportedError:
        self.errors.append(
            UnsupportedError(
                f"{what} a thread that was started in a pipeline, whose derivatives would be lost. Launch kernels and "
                "write fields in the thread that computes the Jacobian."
            )
        )
        return self.errors[-1]


_strays: dict[int, _Stray] = {}  # by thread: who follows the threads that it starts


def _follower() -> Any:
    follower = _followers.get(threading.get_ident())
    return None if type(follower) is _Stray and follower.is_over else follower


def _followed_start(self: threading.Thread) -> None:
    stray = _strays.get(threading.get_ident())
    if stray is not None and not stray.is_over:
        run = self.run

        def followed_run() -> None:
            _begin(stray, stray)
            try:
                run()
            finally:
                _end(None)

        self.run = followed_run
    _originals["thread start"](self)


def _followed_call(self: Kernel, *args: object, **kwargs: object) -> Any:
    follower = _follower()
    if follower is None:
        return _originals["call"](self, *args, **kwargs)
    _check_no_gradient(self)
    return follower.launch(self, process_args(self, args, kwargs))


def _check_no_gradient(kernel: Kernel) -> None:
    """Raise for a kernel that computes a gradient, or clears those of ``ti.ad.Tape`` and ``ti.ad.FwdMode``."""
    is_clearing = is_library_kernel(kernel) and kernel.func.__name__ == "clear_gradients"
    if is_clearing or kernel.autodiff_mode != AutodiffMode.NONE:
        what = "A gradient" if is_clearing else f"The gradient of {kernel.func.__qualname__}"
        raise UnsupportedError(
            f"{what} is computed by Taichi in a pipeline that is differentiated: that would be a second derivative. "
            "Take gradients outside of the pipeline."
        )


def _entry(field: Any, key: Any) -> FieldEntry:
    check_not_ended(field)
    field._initialize_host_accessors()
    accessors: Any = field.host_accessors
    return FieldEntry.of(accessors[0], tuple(field._pad_key(key)))


def _set_entry(entry: FieldEntry, value: object, store: Callable[[], None]) -> None:
    follower = _follower()
    if follower is None:
        store()
        return
    follower.before_host_write(entry, value)
    store()
    follower.host_write(entry)


def _get_entry(entry: FieldEntry, value: object) -> Any:
    follower = _follower()
    return value if follower is None else follower.host_read(entry, value)


def _followed_field_set(self: ti.ScalarField, key: object, value: object) -> None:
    _set_entry(_entry(self, key), value, lambda: _originals["field set"](self, key, value))


def _followed_field_get(self: ti.ScalarField, key: object) -> Any:
    check_not_ended(self)
    value = _originals["field get"](self, key)
    return _get_entry(_entry(self, key), value)


def _existing(name: str) -> Callable[..., Any]:
    """Access to entries of a vector, matrix or struct field, which has to exist: what is got reads and writes them."""

    def access(self: object, *args: object) -> Any:
        check_not_ended(self)
        return _originals[name](self, *args)

    return access


def _followed_proxy_set(self: Any, key: Any, value: Any) -> None:
    _set_entry(_entry(self, self.g2r_field[key]), value, lambda: _originals["proxy set"](self, key, value))


def _followed_proxy_get(self: Any, key: Any) -> Any:
    value = _originals["proxy get"](self, key)
    return _get_entry(_entry(self, self.g2r_field[key]), value)


def _followed_entry_write(x: Any, value: Any) -> None:
    if isinstance(x, SNodeHostAccess):
        _set_entry(FieldEntry.of(x.accessor, tuple(x.key)), value, lambda: _originals["entry write"](x, value))
        return
    follower = _follower()
    if follower is not None:
        follower.before_host_write(x.ndarr, value)
    _originals["entry write"](x, value)
    if follower is not None:
        follower.host_write_array(x.ndarr, x.indices)


def _followed_entry_read(x: Any) -> Any:
    value = _originals["entry read"](x)
    if isinstance(x, SNodeHostAccess):
        return _get_entry(FieldEntry.of(x.accessor, tuple(x.key)), value)
    follower = _follower()
    return value if follower is None else follower.host_read(x.ndarr, value)


def _followed_member_set(self: ti.Struct, key: object, value: object) -> None:
    x = self._Struct__entries[key]  # pyright: ignore[reportAttributeAccessIssue]  # as Python names what is private
    if isinstance(x, SNodeHostAccess):  # other members are structs and matrices, which are followed themselves
        _set_entry(FieldEntry.of(x.accessor, tuple(x.key)), value, lambda: _originals["member set"](self, key, value))
    else:
        _originals["member set"](self, key, value)


def _followed_member_get(self: ti.Struct, key: object) -> Any:
    value = _originals["member get"](self, key)
    x = self._Struct__entries[key]  # pyright: ignore[reportAttributeAccessIssue]  # as Python names what is private
    return _get_entry(FieldEntry.of(x.accessor, tuple(x.key)), value) if isinstance(x, SNodeHostAccess) else value


def _followed_array_set(self: object, key: object, value: object) -> None:
    follower = _follower()
    if follower is not None:
        follower.before_host_write(self, value)
    _originals["array set"](self, key, value)
    if follower is not None:
        follower.host_write_array(self, key)


def _followed_array_get(self: object, key: object) -> Any:
    value = _originals["array get"](self, key)
    follower = _follower()
    return value if follower is None else follower.host_read(self, value)


def _followed_fill(self: object, value: object) -> None:
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
        check_not_ended(self)
        values = _originals[name](self, *args, **kwargs)
        follower = _follower()
        return values if follower is None else follower.host_read(self, values)

    return to_numpy


def _followed_from_numpy(name: str) -> Callable[..., Any]:
    def from_numpy(self: Any, arr: Any) -> None:
        check_not_ended(self)
        follower = _follower()
        if follower is not None:
            follower.before_host_write(self, arr)
        _originals[name](self, arr)

    return from_numpy


# All that Python can do to a field or array.  Other calls end in one of these, or in a kernel of Taichi's own,
# whose launch is followed like any other:
#
#   field[i] = c, get_scalar_field(...)[i] = c, S.m[i] = c     field set
#   vector[i] = ..., vector[i][0] = c, S.v[i][0] = c           entry write
#   S[i].m = c, S[i] = {...}, nested structs                   member set, and entry write for vectors and matrices
#   mesh.verts.x[i] = c, of a mesh that is reordered           proxy set, and entry write
#   array[i] = c, array[i][0] = c of a ti.ndarray              array set, entry write
#   array.fill                                                 fill
#   from_numpy, from_torch, from_paddle, copy_from             kernels; from_numpy warns of numbers with a tangent
#   field.fill, S.fill, S.copy_from, S.from_numpy              kernels, for each member
#   deactivate_all of a node, ti.deactivate_all_snodes         kernels, which clear tangents (Pipeline._clear_under)
#   NumPy arrays and tensors, changed in place                 seen by rewritten code (runtime.python.watch)
#
# (owner, attribute, what stands in for it while a pipeline is followed)
_FOLLOWED = {
    "call": (Kernel, "__call__", _followed_call),
    "field set": (ti.ScalarField, "__setitem__", _followed_field_set),
    "field get": (ti.ScalarField, "__getitem__", _followed_field_get),
    "entry write": (matrix, "_write_host_access", _followed_entry_write),
    "entry read": (matrix, "_read_host_access", _followed_entry_read),
    "member set": (ti.Struct, "__setitem__", _followed_member_set),
    "member get": (ti.Struct, "__getitem__", _followed_member_get),
    "proxy set": (mesh.MeshReorderedScalarFieldProxy, "__setitem__", _followed_proxy_set),
    "proxy get": (mesh.MeshReorderedScalarFieldProxy, "__getitem__", _followed_proxy_get),
    "array set": (ti.ScalarNdarray, "__setitem__", _followed_array_set),
    "array get": (ti.ScalarNdarray, "__getitem__", _followed_array_get),
    "fill": (ti.Ndarray, "fill", _followed_fill),
    "thread start": (threading.Thread, "start", _followed_start),
}


for _class in (ti.ScalarField, ti.MatrixField, ti.ScalarNdarray, matrix.MatrixNdarray, matrix.VectorNdarray):
    for _name, _follow in (("to_numpy", _followed_to_numpy), ("from_numpy", _followed_from_numpy)):
        _FOLLOWED[f"{_class.__name__}.{_name}"] = (_class, _name, _follow(f"{_class.__name__}.{_name}"))
for _class in (ti.MatrixField, ti.StructField):
    for _name in ("__getitem__", "__setitem__"):
        _FOLLOWED[f"{_class.__name__}.{_name}"] = (_class, _name, _existing(f"{_class.__name__}.{_name}"))


_originals: dict[str, Any] = {name: getattr(owner, attribute) for name, (owner, attribute, _) in _FOLLOWED.items()}


@contextlib.contextmanager
def follow(follower: Any) -> Iterator[None]:
    """Within the context, this thread's operations on fields and arrays are reported to ``follower``.

    Kernels are not launched but given to ``follower.launch(kernel, args)``; assignments from Python happen and are
    told.
    """
    before = _followers.get(threading.get_ident())
    if before is not None and type(before) is not _Stray:
        raise InvalidArgumentError(
            "A Jacobian is already being computed in this thread: jacobian cannot be called in a function that it "
            "differentiates. Compute the inner one before, and pass its numbers in a field."
        )
    stray = _Stray()
    _begin(follower, stray)
    try:
        yield
    finally:
        stray.is_over = True
        _end(before)
    if stray.errors:
        raise stray.errors[0]


def _begin(follower: object, stray: _Stray) -> None:
    """Follow this thread, and those that it starts."""
    me = threading.get_ident()
    with _lock:
        _followers[me], _strays[me] = follower, stray
        for owner, attribute, stand_in in _FOLLOWED.values():
            setattr(owner, attribute, stand_in)


def _end(before: _Stray | None) -> None:
    """Follow this thread as before."""
    me = threading.get_ident()
    with _lock:
        if before is not None:
            _followers[me] = _strays[me] = before
            return
        _followers.pop(me, None)
        _strays.pop(me, None)
        if not _followers:
            for name, (owner, attribute, _) in _FOLLOWED.items():
                setattr(owner, attribute, _originals[name])


@contextlib.contextmanager
def suspend_following() -> Iterator[None]:
    """Within the context, this thread is not followed."""
    me = threading.get_ident()
    follower = _followers.get(me)
    if follower is None:
        yield
        return
    _followers[me] = None  # an entry all the same: with the last one, threads are no longer followed at all
    try:
        yield
    finally:
        _followers[me] = follower


def is_followed() -> bool:
    """Whether this thread is running a pipeline that is differentiated."""
    follower = _follower()
    return follower is not None and type(follower) is not _Stray


def is_gradient_replaced() -> bool:
    """Whether a function decorated with ``ti.ad.no_grad`` or ``ti.ad.grad_replaced`` is running."""
    return bool(RUNTIME.state().grad_replaced)


def is_recorded() -> bool:
    """Whether ``ti.ad.Tape`` records the launches of kernels, or ``ti.ad.FwdMode`` replaces the kernels."""
    runtime = RUNTIME.state()
    return (runtime.target_tape is not None or runtime.fwd_mode_manager is not None) and not runtime.grad_replaced


def user_frame(frame: Any = None) -> Any:
    """The innermost frame, from the caller's or a given one on, that is neither Taichi's nor this package's."""
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if (module or "").split(".")[0] not in INNER:
            return frame
        frame = frame.f_back
    return None


def local_variables(frame: Any) -> dict[str, Any]:
    """The local variables of a frame that runs, of which the frame itself keeps no copy.

    Until Python 3.12, a frame keeps the dictionary that ``f_locals`` gives, and so what it had then, even if the user's
    function deletes it.
    """
    found = frame.f_locals
    values = dict(found)
    is_snapshot = isinstance(found, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_snapshot and sys.getrefcount(found) == 3:  # the frame's, ours and the argument: nobody has called locals()
        found.clear()
    return values
