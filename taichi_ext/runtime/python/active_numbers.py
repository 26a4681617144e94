"""Python objects that depend on numbers with tangents, within one run of a pipeline.

Only kernels are differentiated: numbers that Python stores, or passes to a kernel by value, count as constants.  A
run records the objects that were read from fields and arrays with tangents, and those computed from them, by
identity.  The objects themselves are unchanged, and the record is dropped after the run.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.runtime.memory.array_stores import is_memory, memory_of

_NEVER = (bool, int, type(None), slice, range, type, np.integer, np.bool_, np.dtype)
_TEXTS = (str, bytes)  # may be written from numbers, and read as numbers
_HOLDERS = (backend.Field, backend.Ndarray)  # kernels read the numbers they hold
_NO_NUMBERS = (*_NEVER, *_TEXTS, *_HOLDERS)
_SIMPLE = (float, *_NO_NUMBERS)  # objects without parts
_SEQUENCES = (list, tuple, set, frozenset, deque, type({}.values()), type({}.items()))
KEEPING = (*_SEQUENCES, dict)  # their items are the objects that were put into them
_MOST_ITEMS = 10_000  # items of a list that are looked at
_LEAST_KEPT = 4096  # count of objects from which those without another reference are dropped


class ActiveNumbers:
    """The objects of one run that depend on numbers with tangents.

    Attributes:
        reads: the number of reads of values with tangents.
    """

    def __init__(self, is_active_memory: Callable[[Any], bool]) -> None:
        self.reads = 0
        self._objects: dict[int, Any] = {}  # by identity; kept alive, so that an identity is not used again
        self._most = _LEAST_KEPT
        self._is_active_memory = is_active_memory

    def is_active_memory(self, array: Any) -> bool:
        """Whether the memory of an array carries tangents, which kernels then use."""
        return self._is_active_memory(array)

    def derive(self, result: Any, *operands: Any) -> None:
        """Mark a result that was computed from operands that depend on tangents, unless it is one of them."""
        if isinstance(result, _NEVER):
            return
        for operand in operands:
            if result is operand:
                return
        for operand in operands:
            if self.depends(operand):
                self.mark(result)
                return

    def mark(self, value: Any) -> None:
        """Note that an object depends on numbers with tangents."""
        if isinstance(value, float) or (isinstance(value, _TEXTS) and len(value) > 1):  # shorter ones are shared
            self._keep(value)
        elif isinstance(value, _NO_NUMBERS) or _is_no_value(value):
            return
        elif is_memory(value):
            value = _owner(value)
            if _is_real(value) and not self._is_active_memory(value):
                self._objects[id(value)] = weakref.ref(value, partial(self._forget, id(value)))
        else:
            for part in () if _is_host_access(value) else _parts(value) or ():
                self.mark(part)
            if not isinstance(value, (*KEEPING, backend.Struct)):  # these keep their items as they are
                self._keep(value)

    def _keep(self, value: Any) -> None:
        self._objects[id(value)] = value
        if len(self._objects) > self._most:
            self._drop()

    def mark_members(self, struct: Any, given: Any) -> None:
        """Mark members of a new struct whose given values depend on numbers with tangents."""
        for name in given.keys() if isinstance(given, dict) else given.keys:
            member = given[name]
            if isinstance(struct[name], backend.Struct) and isinstance(member, (dict, backend.Struct)):
                self.mark_members(struct[name], member)
            elif self.depends(member):
                self.mark(struct[name])

    def marked(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of an iterable that depends on numbers with tangents, marked."""
        for value in values:
            self.mark(value)
            yield value

    def depends(self, value: Any, depth: int = 0) -> bool:
        """Whether an object, or an item of it, depends on numbers with tangents."""
        if id(value) in self._objects:
            return True
        if isinstance(value, _SIMPLE) or depth > 3:
            return False
        parts = _parts(value)
        if parts is not None:
            return any(self.depends(part, depth + 1) for part in islice(parts, _MOST_ITEMS))
        array = memory_of(value)
        if array is None:
            return False
        return id(_owner(array)) in self._objects or (_is_real(array) and self._is_active_memory(array))

    def is_lost(self, value: Any) -> bool:
        """Whether a value that is stored or passed on depends on numbers with tangents but does not carry them."""
        if isinstance(value, _NO_NUMBERS):
            return False
        if is_memory(value):
            return _is_real(value) and id(_owner(value)) in self._objects and not self._is_active_memory(value)
        is_listed = isinstance(value, (list, tuple, dict, backend.Matrix, backend.Struct))
        parts = _parts(value) if is_listed else None
        return id(value) in self._objects or any(map(self.is_lost, parts or ()))

    def clear(self) -> None:
        """Forget all objects, at the end of the run."""
        self._objects.clear()

    def _forget(self, key: int, _: Any) -> None:
        self._objects.pop(key, None)

    def _drop(self) -> None:
        """Forget the objects without another reference."""
        for key in list(self._objects):
            is_weak = isinstance(self._objects[key], weakref.ref)
            if not is_weak and sys.getrefcount(self._objects[key]) <= 2:  # the table, and the argument of this call
                del self._objects[key]
        self._most = max(_LEAST_KEPT, 2 * len(self._objects))


def _is_no_value(value: Any) -> bool:
    """Whether an object is code, or an object of Taichi other than a vector, a matrix or a struct."""
    if isinstance(value, (backend.Matrix, backend.Struct)):
        return False
    return isinstance(value, (types.FunctionType, types.ModuleType)) or backend.is_library(type(value))


def _is_real(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "fcOV"
    return array.dtype.is_floating_point or array.dtype.is_complex


def _owner(array: Any) -> Any:
    """The array that the memory of a view belongs to."""
    while isinstance(array, np.ndarray) and isinstance(array.base, np.ndarray):
        array = array.base
    if backend.is_torch_tensor(array):
        return array if array._base is None else array._base
    return array


def _is_host_access(value: Any) -> bool:
    """Whether an object is a vector or matrix of a field, whose numbers are read when it is used."""
    return isinstance(value, backend.Matrix) and value.is_host_access


def _parts(value: Any) -> Iterable[Any] | None:
    """The items of a list or dict, the numbers of a vector, matrix or struct; None for other objects."""
    if isinstance(value, _SEQUENCES):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, backend.Struct):
        return [value[name] for name in value.keys]
    if isinstance(value, backend.Matrix):
        return value.to_list() if value.is_host_access else list(value.entries)
    return None
