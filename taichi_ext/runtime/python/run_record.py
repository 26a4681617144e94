"""A record of the numbers that runs pass to kernels and store: runs for different columns must agree."""

from __future__ import annotations

import inspect
import types
import zlib
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import InvalidArgumentError

_DIFFERENT = (
    "The call takes several runs (chunk_size=, tangents that do not fit into max_memory, or a sparse Hessian of an "
    "energy of fields that kernels compute), and Python's state differs between them: a later run {}. Prepare "
    "changing objects before the call, or compute all columns in one run (a larger max_memory=)."
)
_ROUNDING = 1e-5  # relative difference between runs of parallel sums, and of numbers computed from them


@dataclass(frozen=True)
class _Object:
    """A field, kernel or other object of a launch, with its identifying key."""

    key: Any
    obj: object  # kept alive, so that its identity is not used again


class RunRecord:
    """The launches and stores of the first run; those of later runs are compared with them one by one."""

    def __init__(self) -> None:
        self._events: list[tuple[object, ...]] = []  # the numbers and objects of each
        self._at = 0
        self._is_first = True
        self._has_read = False
        self._start = backend.moment()
        self._others: dict[object, tuple[object, object]] = {}  # by key of a later run's object: that of the first

    def begin(self) -> None:
        """Start the first run, or another one."""
        self._is_first = not self._events
        self._at, self._has_read = 0, False
        self._others.clear()

    def note_read(self) -> None:
        """Note that Python reads numbers written by kernels: sums of parallel loops can differ in rounding."""
        self._has_read = True

    def launch(self, kernel: backend.Kernel, args: tuple[object, ...]) -> None:
        """Record a launch before it is made."""
        args = backend.leaf_values(kernel, args)
        self._add(_use(kernel), _named(kernel), *(part for a in args for part in _parts(a)))

    def arrays(self, kernel: backend.Kernel, read: Set[str], args: tuple[object, ...]) -> None:
        """Record the numbers of NumPy arrays and tensors that this launch reads, by leaf arguments."""
        host = [n for n in backend.array_positions(kernel) if not isinstance(args[n], backend.Ndarray)]
        known = [n for n in host if backend.leaf_arguments(kernel)[n].name in read]
        if known:
            self._add(_use(kernel), *(part for n in known for part in _numbers(args[n], self._has_read)))
        if host and not backend.is_library_kernel(kernel):
            self.note_read()  # Python can read numbers that the kernel writes

    def store(self, obj: object, value: object) -> None:
        """Record a store from Python to a field or array before it is made."""
        is_entry = isinstance(obj, backend.FieldEntry)
        place = (_Object(("node", obj.node), obj), obj.index) if is_entry else (_named(obj),)
        self._add("stores", *place, *_parts(value))

    def end(self) -> None:
        """End the run."""
        if not self._is_first and self._at < len(self._events):
            raise InvalidArgumentError(_DIFFERENT.format("launches fewer kernels than the first"))

    def _add(self, use: str, *parts: object) -> None:
        if self._is_first:
            self._events.append(parts)
            return
        first = self._events[self._at] if self._at < len(self._events) else None
        self._at += 1
        if first is None or not self._are_same(first, parts):
            raise InvalidArgumentError(
                _DIFFERENT.format(
                    f"{use} other numbers, fields or arrays than in the run before, or does it at another time"
                )
            )

    def _are_same(self, first: tuple[object, ...], now: tuple[object, ...]) -> bool:
        return len(first) == len(now) and all(map(self._is_same, first, now))

    def _is_same(self, first: Any, now: Any) -> bool:
        if type(first) is not type(now):
            return False
        if isinstance(first, _Object):
            return self._is_same_object(first, now)
        if isinstance(first, float):
            is_close = self._has_read and abs(first - now) <= _ROUNDING * max(abs(first), abs(now))
            return is_close or repr(first) == repr(now)
        return bool(first == now)

    def _is_same_object(self, first: _Object, now: _Object) -> bool:
        if now.key == first.key:
            return True
        if any(now.key == part.key for parts in self._events for part in parts if isinstance(part, _Object)):
            return False
        if now.key not in self._others:
            self._others[now.key] = first.key, now.obj
            return type(now.obj) is type(first.obj) and self._is_made_alike(first.obj, now.obj)
        return self._others[now.key][0] == first.key

    def _is_made_alike(self, first: object, now: object) -> bool:
        """Whether both objects may have been created by the same code in their runs."""
        if isinstance(now, (backend.Field, backend.StructField, backend.Ndarray, backend.FieldEntry)):
            return backend.is_made_since(now, self._start)
        codes = [getattr(getattr(obj, "func", obj), "__code__", None) for obj in (first, now)]
        return codes[0] == codes[1] and self._are_same(_contents(first), _contents(now))


def _parts(value: Any) -> Iterator[object]:
    """Yield the numbers and objects in a value that a run passes on."""
    if isinstance(value, backend.Matrix):
        value = value.to_list()
    if isinstance(value, backend.Struct):
        value = {key: value[key] for key in value.keys}
    if isinstance(value, dict):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, (list, tuple)):
        yield len(value)
        for item in value:
            yield from _parts(item)
    elif isinstance(value, np.generic):
        yield float(value) if isinstance(value, np.floating) else value.item()
    elif isinstance(value, (bool, int, float, str, type(None))):
        yield value
    elif isinstance(value, backend.Ndarray) or not backend.is_array(value):
        yield _named(value)
    else:
        yield tuple(value.shape), str(value.dtype)


def _contents(obj: object) -> tuple[object, ...]:
    """The outside variables of a kernel or function, or the attributes of another object."""
    function = getattr(obj, "func", obj)
    is_function = isinstance(function, types.FunctionType)
    found = inspect.getclosurevars(function).nonlocals if is_function else getattr(obj, "__dict__", {})
    return tuple(_parts(dict(found)))


def _named(obj: object) -> _Object:
    is_field = isinstance(obj, backend.Field)  # a component is a new object at each access
    return _Object(backend.field_identity(obj) if is_field else id(obj), obj)


def _use(kernel: backend.Kernel) -> str:
    return "stores" if backend.is_library_kernel(kernel) else f"launches {kernel.func.__qualname__} and passes"


def _numbers(array: object, is_rounded: bool) -> tuple[object, ...]:
    """The numbers of an array: exactly, or by two sums where they may differ in rounding."""
    values = backend.as_numpy(array)
    flat = np.ascontiguousarray(values).reshape(-1)
    if not is_rounded or flat.dtype.kind not in "fiub":
        return values.shape, str(values.dtype), zlib.crc32(flat.view(np.uint8).data)
    finite = np.nan_to_num(flat.astype(np.float64))
    total = float(np.abs(finite).sum())
    return values.shape, str(values.dtype), total, 2 * total + float(finite @ np.cos(np.arange(finite.size)))
