"""Python objects that depend on numbers with tangents, within one run of a pipeline.

Only kernels are differentiated: numbers that Python stores, or passes to a kernel by value, count as constants.  A
run records the objects that were read from fields and arrays with tangents, and those computed from them, by
identity.  The objects themselves are unchanged, and the record is dropped after the run.
"""

from __future__ import annotations

import gc
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
from taichi_ext.labels import is_library_module
from taichi_ext.runtime.memory.array_stores import is_memory, memory_of

_NEVER = (bool, int, type(None), slice, range, type, np.integer, np.bool_, np.dtype)
_TEXTS = (str, bytes)  # may be written from numbers, and read as numbers
_HOLDERS = (backend.Field, backend.Ndarray)  # kernels read the numbers they hold
_SIMPLE = (float, *_NEVER, *_TEXTS, *_HOLDERS)  # objects without parts
KEEPING = (list, tuple, set, frozenset, deque, type({}.values()), type({}.items()), dict)  # hold their items
_OPEN = (types.FunctionType, types.ModuleType, types.GeneratorType, types.FrameType)  # may refer to any objects
_MOST_ITEMS = 10_000  # items of a list that are looked at
_MOST_HELD = 32  # objects reached from one that may write to them
_LEAST_KEPT = 4096  # count of objects from which those without another reference are dropped


class ActiveNumbers:
    """The objects of one run that depend on numbers with tangents.

    Attributes:
        reads: the number of reads of values with tangents.
        is_active_memory: whether the memory of an array carries tangents, which kernels then use.
    """

    def __init__(self, is_active_memory: Callable[[object], bool]) -> None:
        self.reads = 0
        self.is_active_memory = is_active_memory
        self._objects: dict[int, object] = {}  # by identity; kept alive, so that an identity is not used again
        self._most = _LEAST_KEPT

    def derive(self, result: object, *operands: object) -> None:
        """Mark a result that was computed from operands that depend on tangents, unless it is one of them."""
        if type(result) is not float and isinstance(result, _NEVER):
            return
        for operand in operands:
            if result is operand:
                return
        for operand in operands:
            if self.depends(operand):
                self.mark(result)
                return

    def mark(self, value: object) -> None:
        """Note that an object depends on numbers with tangents."""
        parts = None if _is_host_access(value) else _parts(value)
        if isinstance(value, _SIMPLE):
            if isinstance(value, float) or (isinstance(value, _TEXTS) and len(value) > 1):  # shorter ones are shared
                self._keep(value)
        elif is_memory(value):
            owner = _owner(value)
            if not is_memory(owner):
                self.mark(owner)
            elif _is_real(owner) and not self.is_active_memory(owner):
                self._objects[id(owner)] = weakref.ref(owner, partial(self._forget, id(owner)))
        elif parts is None:
            self._mark_held(value)
        else:
            for part in parts:
                self.mark(part)
            if isinstance(value, backend.Matrix):  # the others keep their items as they are
                self._keep(value)

    def _mark_held(self, value: object) -> None:
        """Mark an object, and those it refers to, which it may write numbers to: the file of a writer, for example."""
        pending, seen = [value], set[int]()
        while pending and len(seen) < _MOST_HELD:
            held = pending.pop(0)
            is_known = id(held) in seen or id(held) in self._objects
            is_open = isinstance(held, (*_SIMPLE, *_OPEN)) or backend.is_library(type(held))
            is_own = not is_library_module(type(held).__module__)  # whose stores are seen where its code makes them
            if is_known or is_memory(held) or (is_open and not _is_host_access(held)) or (is_own and held is not value):
                continue
            seen.add(id(held))
            if not isinstance(held, (*KEEPING, types.BuiltinFunctionType)):
                self._keep(held)
            pending += [] if is_own else gc.get_referents(held)

    def _keep(self, value: object) -> None:
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

    def marked(self, values: Iterable[object]) -> Iterator[object]:
        """Yield the items of an iterable that depends on numbers with tangents, marked."""
        for value in values:
            self.mark(value)
            yield value

    def depends(self, value: object, *, is_lost: bool = False, depth: int = 0) -> bool:
        """Whether an object, or an item of it, depends on numbers with tangents.

        With ``is_lost``, only those count that kernels take for constants: no text, no memory that carries tangents.
        """
        if type(value) is float or isinstance(value, _SIMPLE) or depth > 4:
            return id(value) in self._objects and not (is_lost and isinstance(value, _TEXTS))
        array = memory_of(value)
        if array is not None:
            is_marked, is_real = id(_owner(array)) in self._objects, _is_real(array)
            if is_lost:
                return is_marked and is_real and not self.is_active_memory(array)
            return is_marked or (is_real and self.is_active_memory(array))
        if id(value) in self._objects:
            return True
        parts = islice(_parts(value) or (), _MOST_ITEMS)
        return any(self.depends(part, is_lost=is_lost, depth=depth + 1) for part in parts)

    def clear(self) -> None:
        """Forget all objects, at the end of the run."""
        self._objects.clear()

    def _forget(self, key: int, _: object) -> None:
        self._objects.pop(key, None)

    def _drop(self) -> None:
        """Forget the objects without another reference."""
        for key in list(self._objects):
            is_weak = isinstance(self._objects[key], weakref.ref)
            if not is_weak and sys.getrefcount(self._objects[key]) <= 2:  # the table, and the argument of this call
                del self._objects[key]
        self._most = max(_LEAST_KEPT, 2 * len(self._objects))


def _is_real(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "fcOV"
    return array.dtype.is_floating_point or array.dtype.is_complex


def _owner(array: object) -> object:
    """The array, or another object with a buffer, that the memory of a view belongs to."""
    while isinstance(array, np.ndarray) and isinstance(array.base, (np.ndarray, memoryview)):
        array = array.base.obj if isinstance(array.base, memoryview) else array.base
    if backend.is_torch_tensor(array):
        return array if array._base is None else array._base
    return array


def _is_host_access(value: object) -> bool:
    """Whether an object is a vector or matrix of a field, whose numbers are read when it is used."""
    return isinstance(value, backend.Matrix) and value.is_host_access


def _parts(value: object) -> Iterable[object] | None:
    """The items of a list or dict, the numbers of a vector, matrix or struct; None for other objects."""
    if isinstance(value, KEEPING):
        return value.values() if isinstance(value, dict) else value
    if isinstance(value, backend.Struct):
        return [value[name] for name in value.keys]
    if isinstance(value, backend.Matrix):
        return value.to_list() if value.is_host_access else list(value.entries)
    return None
