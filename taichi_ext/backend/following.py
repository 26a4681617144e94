"""Report a thread's kernel launches and its reads and stores of fields and arrays to an observer."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple

import numpy as np

from taichi_ext.backend.arrays import as_indices, rows_of_index
from taichi_ext.backend.kernels import is_library_kernel, is_reading_kernel
from taichi_ext.backend.lifetime import InTree, check_not_ended, layout_version, tree_serial
from taichi_ext.backend.sparse_layouts import SparsePart, sparse_part
from taichi_ext.backend.threads import is_inside_kernel
from taichi_ext.errors import INNER, InvalidArgumentError, UnsupportedError
from taichi_ext.host import RUNTIME, AutodiffMode, Kernel, SNodeHostAccess, matrix, mesh, process_args, ti


@dataclass(eq=False, slots=True)
class FieldEntry(InTree):
    """One number of a field, as Python reads it and stores to it."""

    accessor: Any
    index: tuple[int, ...]  # filled up with zeros
    node: int  # the place of the number's component in the layout
    tree_serial: int

    @classmethod
    def of(cls, accessor: Any, index: tuple[int, ...]) -> FieldEntry:
        """The entry that an accessor of Taichi's reads and writes, of a field that exists."""
        known = _located(accessor)
        return cls(accessor, index, known.node, known.tree)

    @property
    def name(self) -> Any:
        return ("entry", self.node, tuple(self.index))

    def sparse_part(self) -> SparsePart | None:
        """The part of the layout that the number lies in, where that is not dense."""
        return sparse_part(_node(self.accessor))

    def copy(self) -> object:
        return self.accessor.getter(*self.index)

    def put_back(self, copy: object) -> None:
        check_not_ended(self)
        self.accessor.setter(copy, *self.index)


def storing(obj: Any, index: Any, number: object) -> Callable[[], None]:
    """Stores a number again, to an entry of a field or ti.ndarray: the index of a component may follow."""
    if isinstance(obj, FieldEntry):
        return functools.partial(obj.put_back, number)
    obj._initialize_host_accessor()
    return functools.partial(obj.host_accessor.setter, number, *map(int, obj._pad_key(index)))


class _Located(NamedTuple):
    """Where an accessor reads and writes, in one version of the layout."""

    version: int | None
    node: int
    tree: int
    dimensions: int = -1  # of the field, if it is known
    padding: tuple[int, ...] = ()  # of its indices


_LOCATED = "_taichi_ext_place"  # attribute of an accessor
_NOWHERE = _Located(None, 0, 0)


def _located(accessor: Any, field: Any = None) -> _Located:
    """Where an accessor reads and writes, looked for once in each layout; raises if its field has ended then."""
    known: _Located = accessor.__dict__.get(_LOCATED, _NOWHERE)
    version = layout_version()
    if known.version != version or (field is not None and known.dimensions < 0):
        check_not_ended(field)
        node = _node(accessor)
        known = _Located(version, int(node.id), tree_serial(node))
        if field is not None:
            dimensions = len(field.shape)
            known = known._replace(dimensions=dimensions, padding=field._pad_key((0,) * dimensions)[dimensions:])
        accessor.__dict__[_LOCATED] = known
    return known


def _accessor(field: Any) -> Any:
    """The accessor of a field's first component; raises if the field has ended."""
    if not field.host_accessors:
        check_not_ended(field)
        field._initialize_host_accessors()
    return field.host_accessors[0]


def _node(accessor: Any) -> Any:
    """The node of the layout that an accessor of Taichi's reads and writes."""
    setter = accessor.setter
    return setter.__closure__[setter.__code__.co_freevars.index("snode")].cell_contents


_followers: dict[int, Any] = {}  # by thread


_lock = threading.Lock()


class Follower:
    """What follows a thread, see ``follow``: by default, Python reads fields and arrays as they are."""

    runs_plainly = False  # whether a Jacobian may be computed in what is followed
    takes_dual_numbers = False  # whether numbers in Python have tangents

    def host_write(self, obj: Any, index: object, value: object) -> None:
        """Python has stored to an entry of a field, or to an array: the index of a component may follow."""

    def host_read(self, obj: Any, index: object, value: object) -> object:
        return value

    def note_field(self, field: Any) -> None:
        """Python accesses entries of a field, perhaps before a kernel does."""

    def with_tangents(self, entries: Any) -> np.ndarray | None:
        """The entries of a vector or matrix, if there are numbers with tangents among them."""


class _Stray:
    """Follows a thread that works for a pipeline, for the follower of that; it must not launch kernels, nor store."""

    def __init__(self, main: Any) -> None:
        self.main = main
        self.errors: list[Exception] = []  # of the run
        self.is_over = False  # the pipeline has returned

    def launch(self, kernel: Kernel, args: tuple[object, ...]) -> Any:
        if is_reading_kernel(kernel):
            return self.main.launch(kernel, args)
        raise self._error(f"{kernel.func.__qualname__} is launched in")

    def before_host_write(self, obj: object, value: object) -> None:
        raise self._error("A field or array is written in")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.main, name)

    def _error(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{what} a thread that works for a pipeline, whose derivatives would be lost. Launch kernels and "
            "write fields in the thread that computes the Jacobian."
        )


_strays: dict[int, _Stray] = {}  # by thread: who follows the threads that it starts


def _follower() -> Any:
    follower = _followers.get(threading.get_ident())
    return None if type(follower) is _Stray and follower.is_over else follower


def _followed_start(self: threading.Thread) -> None:
    self.run = _for_pipeline(self.run)
    _originals["thread start"](self)


def _for_pipeline(work: Callable[..., Any]) -> Callable[..., Any]:
    """Work that this thread gives to another one; if it is that of a pipeline, it is followed there."""
    stray = _strays.get(threading.get_ident())
    if stray is None or stray.is_over:
        return work

    def followed_work(*args: object, **kwargs: object) -> object:
        before = _begin(stray, stray)
        try:
            return work(*args, **kwargs)
        finally:
            _end(before)

    return followed_work


def _giving(name: str) -> Callable[..., object]:
    """A method that gives work to threads of a pool, which may have been started before."""

    def give(pool: object, /, *args: Any, **kwargs: Any) -> object:
        if args:
            args = (_for_pipeline(args[0]), *args[1:])
        elif "func" in kwargs:
            kwargs["func"] = _for_pipeline(kwargs["func"])
        return _originals[name](pool, *args, **kwargs)

    return give


def _followed_call(self: Kernel, *args: object, **kwargs: object) -> object:
    follower = _follower()
    if follower is None:
        return _originals["call"](self, *args, **kwargs)
    with ending:
        _check_no_gradient(self)
        given = [_with_numbers(argument) for argument in process_args(self, args, kwargs)]
        return follower.launch(self, tuple(given))  # of an iterator, Python makes a longer tuple, and keeps the cut one


def _with_numbers(argument: Any) -> Any:
    """An argument; of an entry of a field of vectors, its numbers, which Python reads."""
    is_entry = isinstance(argument, ti.Matrix) and argument.is_host_access
    return ti.Matrix(argument.to_list()) if is_entry else argument


class _Over(BaseException):  # which code of users does not catch
    """Python goes on in a pipeline after an error of this package."""


class _Ending:
    """Within the context, errors of this package end the run of a pipeline, though its code may catch them."""

    def __enter__(self) -> None:
        stray = _strays.get(threading.get_ident())
        if stray is not None and stray.errors and not stray.is_over:
            raise _Over

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception) and type(error).__module__.split(".")[0] == __name__.split(".")[0]:
            stray = _strays.get(threading.get_ident())
            if stray is not None:
                stray.errors.append(error)


ending = _Ending()


def _check_no_gradient(kernel: Kernel) -> None:
    """Raise for a kernel that computes a gradient, or clears those of ``ti.ad.Tape`` and ``ti.ad.FwdMode``."""
    is_clearing = is_library_kernel(kernel) and kernel.func.__name__ == "clear_gradients"
    if is_clearing or kernel.autodiff_mode != AutodiffMode.NONE:
        what = "A gradient" if is_clearing else f"The gradient of {kernel.func.__qualname__}"
        raise UnsupportedError(
            f"{what} is computed by Taichi in a pipeline that is differentiated: that would be a second derivative. "
            "Take gradients outside of the pipeline."
        )


Place = tuple[object, object]  # where an access reads or stores: an entry or array, and the index in an array


def _of_field(field: ti.ScalarField, key: object, *_: object) -> Place:
    accessor = _accessor(field)
    known = _located(accessor, field)
    given = as_indices(key)
    index = given + known.padding if len(given) == known.dimensions else tuple(field._pad_key(key))
    return FieldEntry(accessor, index, known.node, known.tree), None


def _of_access(x: Any, *_: object) -> Place:
    is_field = isinstance(x, SNodeHostAccess)
    return (FieldEntry.of(x.accessor, tuple(x.key)), None) if is_field else (x.ndarr, x.indices)


def _of_member(struct: Any, key: object, *_: object) -> Place | None:
    x = struct._Struct__entries[key]  # Python's name of a private attribute
    return _of_access(x) if isinstance(x, SNodeHostAccess) else None  # structs and matrices are followed themselves


def _of_whole(obj: object, *_: object) -> Place:
    check_not_ended(obj)
    return obj, ...


def _of_existing(obj: Any, *_: object) -> None:
    """Access to entries of a vector, matrix or struct field: the accessor reads and writes them."""
    if isinstance(obj, ti.MatrixField):
        _located(_accessor(obj), obj)
    else:
        check_not_ended(obj)


def _reading(name: str, place: Callable[..., Place | None]) -> Callable[..., object]:
    """A function that reads, and reports it."""

    def read(self: object, *args: object, **keywords: object) -> object:
        access, follower = place(self, *args), _follower()
        entry = None if access is None else access[0]
        if follower is not None and type(entry) is not FieldEntry:
            _check_inside(access)
        try:
            value = entry.accessor.getter(*entry.index) if type(entry) is FieldEntry else None
        except TypeError:  # of an index, for which Taichi has words
            value = None
        if value is None:
            value = _originals[name](self, *args, **keywords)
        if follower is None:
            _note_unfollowed(access)
            return value
        if access is None:
            if isinstance(self, ti.Field):
                follower.note_field(self)
            return value
        with ending:
            return follower.host_read(*access, value)

    return read


def _check_inside(access: Any) -> None:
    """Raise for an index outside of an array, where Taichi would access other memory, and may end the process."""
    if access is not None and access[1] is not ...:
        with ending, contextlib.suppress(TypeError):  # of an index, for which Taichi has words
            rows_of_index(*access)


def _note_unfollowed(access: Place | None) -> None:
    """Tell pipelines of a read by a thread that was started before."""
    if access is not None and threading.get_ident() not in _followers:
        for follower in list(_followers.values()):
            if follower is not None and type(follower) is not _Stray:
                follower.host_read(*access, None)


def _writing(name: str, place: Callable[..., Place | None]) -> Callable[..., None]:
    """A function that stores its last argument, and reports it."""

    def write(self: object, *args: object, **keywords: object) -> None:
        access, follower = place(self, *args), _follower()
        if follower is None or access is None:
            if follower is not None and isinstance(self, ti.Field):
                follower.note_field(self)
            _originals[name](self, *args, **keywords)
            return
        value = [*args, *keywords.values()][-1]
        if isinstance(self, ti.ScalarField):
            follower.note_field(self)
        entry = access[0]
        if type(entry) is FieldEntry:  # which is kept: arrays without dimensions, as indices, change in place
            entry.index = tuple(map(operator.index, entry.index))
        else:
            _check_inside(access)
        with ending:
            follower.before_host_write(entry, value)
            if type(entry) is FieldEntry:
                entry.accessor.setter(value, *entry.index)
            elif not name.endswith("from_numpy"):
                with suspend_following():
                    _originals[name](self, *args, **keywords)
            else:  # it launches kernels, which are followed
                _originals[name](self, *args, **keywords)
                return
            follower.host_write(*access, value)

    return write


def _matrix_made(self: Any, entries: Any, dt: object = None) -> None:
    """A matrix of numbers with tangents, of which NumPy would take the floats, keeps them."""
    _originals["matrix"](self, entries, dt)
    follower = None if self.is_host_access or is_inside_kernel() else _follower()
    if follower is not None:
        numbers = follower.with_tangents(entries)
        self.entries = self.entries if numbers is None else numbers


def _matrix_read(self: Any) -> object:
    """The numbers of a matrix: with tangents for Taichi's operators, floats for others."""
    is_operator = (sys._getframe(1).f_globals.get("__name__") or "").split(".")[0] == RUNTIME.name
    if not is_operator or not self.is_host_access:
        numbers: Any = _originals["matrix to_numpy"](self)
        return numbers.astype(float) if numbers.dtype == object and not is_operator else numbers
    values, follower = self.to_list(), _follower()
    numbers = None if follower is None else follower.with_tangents(values)
    return np.array(values) if numbers is None else numbers


# All that Python can do to a field or array.  Other calls end in one of these, or in a kernel of Taichi's own,
# whose launch is followed like any other:
#
#   field[i] = c, get_scalar_field(...)[i] = c, S.m[i] = c     ScalarField
#   vector[i] = ..., vector[i][0] = c, S.v[i][0] = c           _write_host_access
#   S[i].m = c, S[i] = {...}, nested structs                   Struct; _write_host_access for vectors and matrices
#   mesh.verts.x[i] = c, of a mesh that is reordered           the proxy, and _write_host_access
#   array[i] = c, array[i][0] = c of a ti.ndarray              ScalarNdarray, _write_host_access
#   array.fill                                                 Ndarray.fill
#   from_numpy, from_torch, from_paddle, copy_from             kernels; from_numpy warns of numbers with a tangent
#   field.fill, S.fill, S.copy_from, S.from_numpy              kernels, for each member
#   deactivate_all of a node, ti.deactivate_all_snodes         kernels, which clear tangents (Pipeline._clear_under)
#   NumPy arrays and tensors, changed in place                 seen by their numbers
#
# (owner, attribute, its replacement while a pipeline is followed)
_FOLLOWED: dict[str, tuple[object, str, Callable[..., object]]] = {
    "call": (Kernel, "__call__", _followed_call),
    "thread start": (threading.Thread, "start", _followed_start),
    "matrix": (ti.Matrix, "__init__", _matrix_made),
    "matrix to_numpy": (ti.Matrix, "to_numpy", _matrix_read),
}
_POOLS: dict[str, type] = dict.fromkeys(("apply_async", "_map_async", "imap", "imap_unordered"), ThreadPool)
_POOLS["submit"] = ThreadPoolExecutor
_FOLLOWED |= {f"pool {_name}": (_pool, _name, _giving(f"pool {_name}")) for _name, _pool in _POOLS.items()}
_NDARRAYS = (ti.ScalarNdarray, matrix.MatrixNdarray, matrix.VectorNdarray)
_ITEMS = ("__getitem__", "__setitem__")
_ACCESSES: list[tuple[type | types.ModuleType, str, str, Callable[..., Place | None]]] = [
    (ti.ScalarField, *_ITEMS, _of_field),
    (matrix, "_read_host_access", "_write_host_access", _of_access),
    (ti.Struct, *_ITEMS, _of_member),
    (mesh.MeshReorderedScalarFieldProxy, *_ITEMS, lambda proxy, key, *_: _of_field(proxy, proxy.g2r_field[key])),
    (ti.ScalarNdarray, *_ITEMS, lambda array, key, *_: (array, key)),
    (ti.Ndarray, "", "fill", _of_whole),
    *((kind, "to_numpy", "from_numpy", _of_whole) for kind in (ti.ScalarField, ti.MatrixField, *_NDARRAYS)),
    *((kind, *_ITEMS, _of_existing) for kind in (ti.MatrixField, ti.StructField)),
]
for _owner, _read, _write, _place in _ACCESSES:
    for _attribute, _make in ((_read, _reading), (_write, _writing)):
        _name = f"{_owner.__name__}.{_attribute}"
        if _attribute:
            _FOLLOWED[_name] = (_owner, _attribute, _make(_name, _place))


_originals: dict[str, Any] = {name: getattr(owner, attribute) for name, (owner, attribute, _) in _FOLLOWED.items()}


@contextlib.contextmanager
def follow(follower: object) -> Iterator[None]:
    """Within the context, this thread's operations on fields and arrays are reported to ``follower``.

    Kernels are not launched but passed to ``follower.launch(kernel, args)``; assignments from Python are done and
    reported.
    """
    if is_followed():
        raise InvalidArgumentError(
            "A Jacobian is already being computed in this thread: jacobian cannot be called in a function that it "
            "differentiates. Compute the inner one before, and pass its numbers in a field."
        )
    stray = _Stray(follower)
    before = _begin(follower, stray)
    try:
        yield
    except (Exception, _Over):
        if not stray.errors:
            raise
    finally:
        stray.is_over = True
        _end(before)
    if stray.errors:
        raise stray.errors[0]


def _begin(follower: object, stray: _Stray) -> tuple[object, _Stray] | None:
    """Follow this thread, and those that it starts; gives who followed them before."""
    me = threading.get_ident()
    before = (_followers[me], _strays[me]) if me in _followers else None
    with _lock:
        _followers[me], _strays[me] = follower, stray
        for owner, attribute, stand_in in _FOLLOWED.values():
            setattr(owner, attribute, stand_in)
    return before


def _end(before: tuple[object, _Stray] | None) -> None:
    """Follow this thread as before: who followed it and those that it starts."""
    me = threading.get_ident()
    with _lock:
        if before is not None:
            _followers[me], _strays[me] = before
            return
        _followers.pop(me, None)
        _strays.pop(me, None)
        if not _followers:
            for name, (owner, attribute, _) in _FOLLOWED.items():
                setattr(owner, attribute, _originals[name])


class FollowedBy:
    """Within the context, a thread that is followed reports to another observer; to none if that is None.

    No generator, as each launch enters one.
    """

    def __init__(self, follower: object) -> None:
        self._follower = follower

    def __enter__(self) -> None:
        self._me = threading.get_ident()
        self._before = _followers.get(self._me)
        if self._before is not None:
            _followers[self._me] = self._follower  # keep an entry: without any, no thread is followed

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _followers[self._me] = self._before


def suspend_following() -> contextlib.AbstractContextManager[None]:
    """Within the context, this thread is not followed."""
    return FollowedBy(None)


def pipeline_follower() -> Any:
    """The observer of the pipeline that this thread runs; None if it runs none that is differentiated."""
    return _follower() if is_followed() else None


def works_for_pipeline() -> bool:
    """Whether a pipeline that is differentiated runs in this thread, or has given it work."""
    stray = _strays.get(threading.get_ident())
    return stray is not None and not stray.is_over


def is_followed() -> bool:
    """Whether this thread is running a pipeline that is differentiated, and no solver in it that runs as it is."""
    follower = _follower()
    return follower is not None and type(follower) is not _Stray and not follower.runs_plainly


def is_gradient_replaced() -> bool:
    """Whether a function decorated with ``ti.ad.no_grad`` or ``ti.ad.grad_replaced`` is running."""
    return bool(RUNTIME.state().grad_replaced)


def is_recorded() -> bool:
    """Whether ``ti.ad.Tape`` records the launches of kernels, or ``ti.ad.FwdMode`` replaces the kernels."""
    runtime = RUNTIME.state()
    return (runtime.target_tape is not None or runtime.fwd_mode_manager is not None) and not runtime.grad_replaced


@functools.lru_cache(maxsize=1024)
def _kind(name: str) -> bool | None:
    """Of a module, whether it belongs to the standard library, or to Taichi or this package; None for neither."""
    module = name.split(".")[0]
    return False if module in INNER else True if module != "__main__" and module in sys.stdlib_module_names else None


def user_frame(frame: types.FrameType | None = None) -> types.FrameType | None:
    """The innermost frame, from the caller's or a given one on, that is neither Taichi's nor this package's.

    Frames of the standard library, which calls functions of users, are given only where there is no other.
    """
    frame, library = sys._getframe(1) if frame is None else frame, None
    while frame is not None:
        kind = _kind(str(frame.f_globals.get("__name__")))
        if kind is None:
            return frame
        library = library or (frame if kind else None)
        frame = frame.f_back
    return library


def local_variables(frame: types.FrameType) -> dict[str, object]:
    """The local variables of a running frame, without leaving a copy in the frame.

    Until Python 3.12, a frame keeps the dictionary from ``f_locals``, and so the objects in it, even if the user's
    function deletes them.
    """
    variables = frame.f_locals
    values = dict(variables)
    is_snapshot = isinstance(variables, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    # 3: the frame's reference, ours and the argument; locals() has not been called
    if is_snapshot and sys.getrefcount(variables) == 3:
        variables.clear()
    return values
