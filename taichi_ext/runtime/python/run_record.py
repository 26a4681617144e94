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

_SEVERAL = (
    "The call takes several runs (chunk_size=, tangents that do not fit into max_memory, or a sparse Hessian of an "
    "energy of fields that kernels compute), and Python's state differs between them"
)
_ONE_PROGRAM = "Prepare changing objects before the call, or compute all columns in one run (a larger max_memory=)."
_ROUNDING = 1e-5  # relative difference between runs of parallel sums, and of numbers computed from them


@dataclass(frozen=True)
class _Object:
    """A field, kernel or other object of a launch, with its identifying key."""

    key: Any
    obj: Any  # kept alive, so that its identity is not used again


@dataclass(frozen=True)
class _Numbers:
    """The numbers of an array."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int
    sums: tuple[float, float]


@dataclass(frozen=True)
class _Event:
    what: str  # a sentence's beginning
    parts: tuple[Any, ...]


class RunRecord:
    """The launches and stores of the first run; those of later runs are compared with them one by one."""

    def __init__(self) -> None:
        self._events: list[_Event] = []
        self._at = 0
        self._is_first = True
        self._has_read = False
        self._start = backend.moment()
        self._others: dict[Any, tuple[Any, Any]] = {}  # by key of a later run's object: that of the first

    def begin(self) -> None:
        """Start the first run, or another one."""
        self._is_first = not self._events
        self._at, self._has_read = 0, False
        self._others.clear()

    def note_read(self) -> None:
        """Note that Python reads numbers written by kernels: sums of parallel loops can differ in rounding."""
        self._has_read = True

    def launch(self, kernel: backend.Kernel, args: tuple[Any, ...]) -> None:
        """Record a launch before it is made."""
        args = backend.leaf_values(kernel, args)
        self._add(_Event(_use(kernel), (_named(kernel), *(p for a in args for p in _parts(a)))))

    def arrays(self, kernel: backend.Kernel, read: Set[str], args: tuple[Any, ...]) -> None:
        """Record the numbers of NumPy arrays and tensors that this launch reads, by leaf arguments."""
        host = [n for n in backend.array_positions(kernel) if not isinstance(args[n], backend.Ndarray)]
        numbers = tuple(_numbers(args[n]) for n in host if backend.leaf_arguments(kernel)[n].name in read)
        if numbers:
            self._add(_Event(_use(kernel), numbers))
        if host and not backend.is_library_kernel(kernel):
            self.note_read()  # Python can read numbers that the kernel writes

    def store(self, obj: Any, value: Any) -> None:
        """Record a store from Python to a field or array before it is made."""
        is_entry = isinstance(obj, backend.FieldEntry)
        place = (_Object(("node", obj.node), obj), obj.index) if is_entry else (_named(obj),)
        self._add(_Event("stores", (*place, *_parts(value))))

    def end(self) -> None:
        """End the run."""
        if not self._is_first and self._at < len(self._events):
            raise InvalidArgumentError(f"{_SEVERAL}: a later run launches fewer kernels than the first. {_ONE_PROGRAM}")

    def _add(self, event: _Event) -> None:
        if self._is_first:
            self._events.append(event)
            return
        first = self._events[self._at] if self._at < len(self._events) else None
        self._at += 1
        if first is None or not self._is_same(first, event):
            raise InvalidArgumentError(
                f"{_SEVERAL}: a later run {event.what} other numbers, fields or arrays than in the run before, or does "
                f"it at another time. {_ONE_PROGRAM}"
            )

    def _is_same(self, first: _Event, now: _Event) -> bool:
        if len(first.parts) != len(now.parts):
            return False
        return all(self._is_same_part(a, b) for a, b in zip(first.parts, now.parts, strict=True))

    def _is_same_part(self, first: Any, now: Any) -> bool:
        if type(first) is not type(now):
            return False
        if isinstance(first, _Object):
            return self._is_same_object(first, now)
        if isinstance(first, _Numbers):
            if (first.shape, first.dtype) != (now.shape, now.dtype):
                return False
            return first.checksum == now.checksum or (self._has_read and _is_close(first.sums, now.sums))
        if isinstance(first, float):
            return repr(first) == repr(now) or (self._has_read and _is_close((first,), (now,)))
        return bool(first == now)

    def _is_same_object(self, first: _Object, now: _Object) -> bool:
        if now.key == first.key:
            return True
        if any(now.key == part.key for e in self._events for part in e.parts if isinstance(part, _Object)):
            return False
        if now.key not in self._others:
            self._others[now.key] = first.key, now.obj
            return type(now.obj) is type(first.obj) and self._is_made_alike(first.obj, now.obj)
        return self._others[now.key][0] == first.key

    def _is_made_alike(self, first: Any, now: Any) -> bool:
        """Whether both objects may have been created by the same code in their runs."""
        if isinstance(now, (backend.Field, backend.StructField, backend.Ndarray, backend.FieldEntry)):
            return backend.is_made_since(now, self._start)
        codes = [getattr(getattr(obj, "func", obj), "__code__", None) for obj in (first, now)]
        return codes[0] == codes[1] and self._is_same(*(_Event("", _contents(obj)) for obj in (first, now)))


def _parts(value: Any) -> Iterator[Any]:
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
    elif isinstance(value, np.floating):
        yield float(value)
    elif isinstance(value, np.generic):
        yield value.item()
    elif isinstance(value, (bool, int, float, str, type(None))):
        yield value
    elif isinstance(value, backend.Ndarray) or not backend.is_array(value):
        yield _named(value)
    else:
        yield tuple(value.shape), str(value.dtype)


def _contents(obj: Any) -> tuple[Any, ...]:
    """The outside variables of a kernel or function, or the attributes of another object."""
    function = getattr(obj, "func", obj)
    is_function = isinstance(function, types.FunctionType)
    found = inspect.getclosurevars(function).nonlocals if is_function else getattr(obj, "__dict__", {})
    return tuple(_parts(dict(found)))


def _named(obj: Any) -> _Object:
    is_field = isinstance(obj, backend.Field)  # a component is a new object at each access
    return _Object(backend.field_identity(obj) if is_field else id(obj), obj)


def _use(kernel: backend.Kernel) -> str:
    return "stores" if backend.is_library_kernel(kernel) else f"launches {kernel.func.__qualname__} and passes"


def _numbers(array: Any) -> _Numbers:
    values = array.detach().cpu().numpy() if backend.is_torch_tensor(array) else array
    flat = np.ascontiguousarray(values).reshape(-1)
    finite = np.nan_to_num(flat.astype(np.float64)) if flat.dtype.kind in "fiub" else np.zeros(1)
    weights = np.cos(np.arange(finite.size))
    sums = float(np.abs(finite).sum()), float(finite @ weights)
    return _Numbers(tuple(values.shape), str(values.dtype), zlib.crc32(flat.view(np.uint8).data), sums)


def _is_close(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    scale = max(map(abs, (*a, *b)))
    return all(abs(x - y) <= _ROUNDING * scale or x == y for x, y in zip(a, b, strict=True))
