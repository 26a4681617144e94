"""Shadows: the arrays that hold tangents, including J, and the tables that identify containers."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import replace
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.backend import ti
from taichi_ext.errors import InvalidArgumentError, UnsupportedError
from taichi_ext.labels import Label, Labels
from taichi_ext.launches import ColumnBlock, ContainerInfo, FieldKey
from taichi_ext.program.keys import Key
from taichi_ext.runtime.memory.regions import View

INDEX_LIMIT = 2**31 - 1
_ALWAYS_ALLOWED = 2**26  # bytes; smaller arrays are made without asking how much memory is free
_ADVICE = (
    "If its rows are sparse, use format='csr' (hessian(..., format='csr') in place of hvp); else fewer parameters at a "
    "time, or products with J, which do not keep it (jvp, vjp, linear_operator)."
)


class FieldTable:
    """The fields used by kernels so far, by their placed components.

    Attributes:
        layout: the version of the layout of all fields when the table was made.
        infos: the fields as containers.
        changes: the fields and names of arguments that kernels without tangents change, by kernel and types of
            arguments, with the kernel; None where they are not known.
    """

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self.layout = backend.layout_version()
        self.infos: dict[Key, ContainerInfo] = {}
        self.changes: dict[object, tuple[object, list[Any] | None]] = {}
        self._parts: dict[Key, ContainerInfo] = {}  # components, by key
        self._components: dict[int, tuple[ContainerInfo, int, object]] = {}  # by id: container, number, the component
        self._nodes: dict[int, tuple[ContainerInfo, int]] = {}  # by the node of a component in the layout

    def field(self, field: Any) -> ContainerInfo | None:
        """The container of a scalar or matrix field, or of the field of a component; None for integer fields."""
        known = self._components.get(id(backend.field_components(field)[0]))
        if known is not None:
            return known[0]
        backend.check_not_ended(field, "A field that is used here")
        if not backend.is_real(field.dtype):
            return None
        with backend.exclusive:
            return self._added(backend.whole_field(field))

    def _added(self, field: Any) -> ContainerInfo:
        components = backend.field_components(field)
        known = self._components.get(id(components[0]))  # another thread may have added it
        if known is not None:
            return known[0]
        is_matrix = isinstance(field, backend.MatrixField)
        shape = () if not is_matrix else ((field.n,) if field.ndim == 1 else (field.n, field.m))
        key = FieldKey(id(components[0]))
        name = self._labels.field(field)
        if not backend.has_one_offset(field):
            raise UnsupportedError(
                f"The components of {name} are placed with different offsets. Place them with one offset, or use a "
                "scalar field for each of them."
            )
        offset = backend.field_offset(field)
        info = ContainerInfo(key, name, field, tuple(field.shape), shape, offset, field.dtype)
        self.infos[key] = info
        for number, component in enumerate(components):
            self._components[id(component)] = (info, number, component)
            self._nodes[backend.node_of(component)] = (info, number)
        return info

    def component(self, field: backend.Field) -> int | None:
        """Which component of its container a scalar field is; None for a whole field."""
        info, number, _ = self._components[id(backend.field_components(field)[0])]
        return number if info.element_shape and not isinstance(field, backend.MatrixField) else None

    def rows_by_component(self, field: backend.Field) -> list[slice]:
        _, first, _ = self._components[id(backend.field_components(field)[0])]
        count = len(backend.field_components(backend.whole_field(field)))
        return [slice(first + n, None, count) for n in range(len(backend.field_components(field)))]

    def part(self, field: backend.Field) -> ContainerInfo:
        """A field or a component of one, as a parameter or output, with a key for that field or component."""
        info = self.field(field)
        assert info is not None  # of real numbers
        component = self.component(field)
        if component is None:
            return info
        assert isinstance(info.key, FieldKey)
        key = replace(info.key, component=component)
        if key not in self._parts:  # once, while the field exists
            self._parts[key] = replace(info, key=key, name=self._labels.field(field), obj=field, element_shape=())
        return self._parts[key]

    def by_entry(self, entry: backend.FieldEntry) -> tuple[ContainerInfo, int] | None:
        """The container, and the component of it, that a number of a field belongs to."""
        return self._nodes.get(entry.node)


def view_of(array: backend.Array, name: str = "An array") -> View:
    """The memory of an array; that of a ti.ndarray, and of an empty array, is never shared."""
    dtype = backend.outer_array_dtype(array)
    if dtype is None:
        raise InvalidArgumentError(f"{name} {backend.array_problem(array)}.")
    space, start, is_fortran = backend.memory_place(array)
    return View(space, start, backend.full_shape(array), dtype.to_string(), numpy_dtype(dtype).itemsize, is_fortran)


def array_info(key: Key, name: Label | str, value: Any, element_shape: tuple[int, ...]) -> ContainerInfo | None:
    """An array argument as a container; None for integer arrays."""
    dtype = backend.outer_array_dtype(value)
    if not backend.is_real(dtype):
        return None
    shape = tuple(value.shape)
    if not isinstance(value, backend.Ndarray) and element_shape:
        shape = shape[: -len(element_shape)]
    return ContainerInfo(key, name, None, shape, element_shape, (), dtype)


def check_indices(what: str, count: int, advice: str) -> None:
    """Raise where an array would have more entries than Taichi can index."""
    if count > INDEX_LIMIT:
        raise InvalidArgumentError(f"{what}, more than the 2**31 - 1 that Taichi can index. {advice}")


class Shadow:
    """The tangent of one container: a matrix with a row per scalar entry and a column per seed.

    It is stored by rows on the CPU, where a thread writes whole rows, and by columns on a GPU, where neighbouring
    threads write neighbouring rows at the same time. ``is_fresh``: whether it is zero throughout.
    """

    def __init__(self, name: Label | str, rows: int, columns: int, dtype: Any, array: np.ndarray | None = None) -> None:
        check_indices(f"The tangent of {name} has {rows} x {columns} entries", rows * columns, _ADVICE)
        self.dtype = numpy_dtype(dtype)
        needed = rows * columns * self.dtype.itemsize
        if array is None:
            check_dense(f"The tangent of {name} with respect to {columns} parameters needs", needed)
        self.shape = (rows, columns)
        self.is_fresh = True
        self.is_dirty = False  # not yet set to zero
        self.on_host = backend.is_host_arch()
        self.by_column = backend.stores_by_column()
        self.array: Any
        if array is not None and array.size and self.on_host:
            self.array, self.is_dirty = array.reshape(-1), True
        else:
            self.array = new_array(rows * columns, dtype, is_zero=True)

    def clean(self) -> None:
        """Set it to zero if that has not been done."""
        if self.is_dirty:
            self.array.fill(0)
            self.is_dirty = False

    def set_identity(self, first_column: int, rows: slice | np.ndarray = slice(None)) -> None:
        """Set the rows to the identity, from a column on (negative: the first ones belong to another block)."""
        self.set_rows(rows, np.eye(self.row_count(rows), self.shape[1], k=first_column, dtype=self.dtype))

    def row_count(self, rows: slice | np.ndarray) -> int:
        return len(range(self.shape[0])[rows]) if isinstance(rows, slice) else len(rows)

    def clear_rows(self, rows: object) -> None:
        """Set the tangents of some entries to zero."""
        if not self.is_fresh:
            self.set_rows(rows, 0)

    def set_rows(self, rows: Any, tangents: object) -> None:
        """Replace the tangents of some entries."""
        values = self.to_numpy()
        values[rows] = tangents
        self.is_fresh = False
        if not self.on_host:
            flat = np.zeros(self.array.shape, self.dtype)
            flat[: values.size] = (values.T if self.by_column else values).reshape(-1)
            with backend.suspend_following():
                self.array.from_numpy(flat)

    def to_numpy(self) -> np.ndarray:
        self.clean()
        rows, columns = self.shape
        flat = to_numpy(self.array)[: rows * columns]
        return flat.reshape(columns, rows).T if self.by_column else flat.reshape(self.shape)


class OverBudgetError(Exception):
    """The tangents of intermediates need more memory than allowed; smaller blocks of columns are tried."""


class TangentColumns:
    """The columns of the tangents of one run, and the limit on their memory.

    Attributes:
        count: the number of columns.
        changes: the number of changes of the set of shadows, or of whether they are zero.
        directions: the tangents of the parameters; None if they are the columns of J.
    """

    def __init__(self, block: ColumnBlock, directions: np.ndarray | None, max_memory: float) -> None:
        self.count = block.count
        self.changes = 0
        self.first = block.first
        self.directions = directions
        self._left = max_memory

    def new_shadow(self, name: Label | str, rows: int, dtype: Any) -> Shadow:
        """A shadow that counts against the limit on memory."""
        self.spend(rows * self.count * numpy_dtype(dtype).itemsize)
        self.changes += 1
        return Shadow(name, rows, self.count, dtype)

    def rows_of(self, column: int, count: int) -> np.ndarray:
        """The tangents of a parameter's entries, whose columns are those from one on."""
        if self.directions is None:
            return np.eye(count, self.count, k=column - self.first)
        return self.directions[column : column + count]

    def along(self, column: int, count: int, direction: np.ndarray) -> np.ndarray:
        """The tangents of a parameter's entries, whose columns are those from one on, times a direction."""
        if self.directions is not None:
            return self.directions[column : column + count] @ direction
        result, places = np.zeros(count), np.arange(column, column + count) - self.first
        is_inside = (places >= 0) & (places < len(direction))
        result[is_inside] = direction[places[is_inside]]
        return result

    def seed_rows(self, shadow: Shadow, column: int, rows: Any) -> None:
        """Set the rows of a parameter to its seeds: its columns, or the given directions."""
        self.changes += 1
        if self.directions is None:
            shadow.set_identity(column - self.first, rows)
        else:
            shadow.set_rows(rows, self.directions[column : column + shadow.row_count(rows)])

    def spend(self, size: int) -> None:
        """Count the memory of tangents other than J against the limit; a single column is computed in any case."""
        self._left -= size
        if self._left < 0 and self.count > 1:
            raise OverBudgetError


def check_dense(what: str, needed: float) -> None:
    """Raise, before it is made, if a dense J or part of it does not fit; ``what`` begins the message."""
    if needed > _ALWAYS_ALLOWED:
        check_fits(what, needed, _ADVICE)


def check_fits(what: str, needed: float, advice: str, share: float = 1.0) -> None:
    """Raise, before anything runs, if so many bytes are not free in a share of memory; ``what`` begins the message."""
    most, how = share * available_memory(), "are free" if share == 1.0 else "may be used"
    if needed > most:
        raise InvalidArgumentError(
            f"{what} {needed / 2**30:.1f} GiB, more than the {most / 2**30:.1f} GiB that {how}. {advice}"
        )


def available_memory() -> float:
    """Free memory of the host in bytes; infinity if the system does not report it."""
    try:
        with open("/proc/meminfo") as info:
            for line in info:
                if line.startswith("MemAvailable"):
                    return float(line.split()[1]) * 1024
    except OSError:
        pass
    return math.inf


def row_of_entry(info: ContainerInfo, component: int, index: tuple[int, ...]) -> int:
    """The row of one number; its index may be padded with zeros."""
    row = backend.row_at(map(operator.sub, index, info.offset) if info.offset else index[: len(info.shape)], info.shape)
    return row * math.prod(info.element_shape) + component


def rows_under(info: ContainerInfo, node: backend.SNode) -> np.ndarray:
    """The rows of the components that are placed in a node of the layout."""
    rows = np.arange(info.size).reshape(-1, math.prod(info.element_shape))
    return rows[:, backend.components_under(info.obj, node)].reshape(-1)


# One-dimensional arrays that kernels of this package's own take: of NumPy on the CPU, ``ti.ndarray``s on a GPU.


@functools.cache
def numpy_dtype(dtype: Any) -> np.dtype:
    """NumPy's type of Taichi's one, which looks it up in a chain of comparisons."""
    return np.dtype(backend.to_numpy_type(dtype))


def new_array(size: int, dtype: Any, *, is_zero: bool = False) -> Any:
    """An array of at least one number."""
    if backend.is_host_arch():
        return (np.zeros if is_zero else np.empty)(max(1, size), numpy_dtype(dtype))
    with backend.suspend_following():  # it is no array of the user's
        backend.enter_thread()
        array = ti.ndarray(dtype, shape=max(1, size))
        if is_zero:
            array.fill(0)
    return array


def array_of(integers: np.ndarray) -> Any:
    """An array of given integers of 32 bits; on the CPU these themselves."""
    if backend.is_host_arch():
        return integers
    array = new_array(len(integers), backend.i32)
    with backend.suspend_following():
        array.from_numpy(integers)
    return array


def to_numpy(array: Any) -> np.ndarray:
    """The numbers; on the CPU the array itself."""
    if isinstance(array, np.ndarray):
        return array
    with backend.suspend_following():
        return array.to_numpy()
