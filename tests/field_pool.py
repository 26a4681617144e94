"""Fields that tests use again, read and written in place."""

import ctypes
import math
from typing import Any

import numpy as np
import taichi as ti
from taichi.lang import impl
from taichi.lang.util import to_numpy_type

AT_ONCE = 2  # fields that are made together: most tests take several of a kind


class FieldPool:
    """Fields of the current Taichi program, handed out again in the next test.

    Taichi compiles two kernels for each field that is copied from and to NumPy, which takes longer than most tests. On
    the CPU, one kernel finds the addresses of several fields, through which tests read and write them.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[Any]] = {}
        self._taken: list[tuple[Any, Any]] = []
        self._memory: dict[int, np.ndarray] = {}  # by the id of a field, which the pool keeps alive

    def take(self, element_shape: tuple[int, ...], dtype: Any, shape: tuple[int, ...], needs_grad: bool = False) -> Any:
        """A dense field; what it holds is not defined."""
        key = (element_shape, dtype, shape, needs_grad)
        free = self._free.setdefault(key, [])
        if not free:
            free.extend(_field(*key) for _ in range(AT_ONCE))
            if impl.current_cfg().arch == ti.cpu:
                self._find([part for field in free for part in ((field, field.grad) if needs_grad else (field,))])
        field = free.pop()
        self._taken.append((key, field))
        return field

    def memory(self, field: Any) -> np.ndarray | None:
        """A view of what a field of the pool holds, where Python can reach it."""
        return self._memory.get(id(field))

    def give_back(self) -> None:
        """The test is over: all fields are free."""
        for key, field in self._taken:
            self._free[key].append(field)
        self._taken.clear()

    def forget(self) -> None:
        """The Taichi program is over: its fields no longer exist."""
        self._free.clear()
        self._taken.clear()
        self._memory.clear()

    def _find(self, fields: list[Any]) -> None:
        for field, address in zip(fields, _addresses(fields), strict=True):
            shape = (*field.shape, *_element_shape(field))
            dtype = np.dtype(to_numpy_type(field.dtype))
            buffer = (ctypes.c_char * (dtype.itemsize * math.prod(shape))).from_address(address)
            self._memory[id(field)] = np.frombuffer(buffer, dtype).reshape(shape)


def _field(element_shape: tuple[int, ...], dtype: Any, shape: tuple[int, ...], needs_grad: bool) -> Any:
    if len(element_shape) == 0:
        field = ti.field(dtype, shape=shape, needs_grad=needs_grad)
    elif len(element_shape) == 1:
        field = ti.Vector.field(*element_shape, dtype, shape=shape, needs_grad=needs_grad)
    else:
        field = ti.Matrix.field(*element_shape, dtype, shape=shape, needs_grad=needs_grad)
    impl.get_runtime().materialize()  # the next one has a tree of its own
    return field


def _element_shape(field: Any) -> tuple[int, ...]:
    if isinstance(field, ti.ScalarField):
        return ()
    return (field.n,) if field.m == 1 else (field.n, field.m)  # as in to_numpy


def _addresses(fields: list[Any]) -> list[int]:
    scalars = [f if isinstance(f, ti.ScalarField) else f.get_scalar_field(*(0,) * f.ndim) for f in fields]
    origins, count = [[0] * len(f.shape) for f in scalars], len(scalars)

    @ti.kernel
    def find(found: ti.types.ndarray(ti.u64, ndim=1)):
        for n in ti.static(range(count)):
            found[n] = ti.get_addr(scalars[n], origins[n])

    found = np.zeros(count, np.uint64)
    find(found)
    return [int(address) for address in found]


pool = FieldPool()
