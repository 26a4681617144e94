"""Fields that tests use again, read and written in place."""

import ctypes
import math
import weakref
from typing import Any

import numpy as np
import taichi as ti
from runtimes import RUNTIME
from taichi._lib import core
from taichi.lang import impl
from taichi.lang.util import to_numpy_type

from taichi_ext.backend.opaque import tree_of

WORD = 8  # bytes
ROOTS, TREES = 11 * WORD, 512  # where Taichi's runtime has its table of trees of fields, and how many it can hold


class FieldPool:
    """Fields of the current Taichi program, handed out again in the next test.

    Taichi compiles two kernels for each field that is copied from and to NumPy, which takes longer than most tests. On
    the CPU, tests read and write dense fields where they lie in memory, found without another kernel for each of them.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[Any]] = {}
        self._taken: list[tuple[Any, Any]] = []
        self._memory: dict[int, np.ndarray] = {}  # by the id of a field, which the pool keeps alive
        self._roots: Any = None  # the address of each tree of fields of a program, once the table is found
        self._program: Any = None  # a weak reference to that program

    def take(self, element_shape: tuple[int, ...], dtype: Any, shape: tuple[int, ...], needs_grad: bool = False) -> Any:
        """A dense field; its values are undefined."""
        key = (element_shape, dtype, shape, needs_grad)
        free = self._free.setdefault(key, [])
        field = free.pop() if free else self._new(*key)
        self._taken.append((key, field))
        return field

    def memory(self, field: Any) -> np.ndarray | None:
        """A view of a field's memory, if Python can access it: for a dense field on the CPU."""
        if id(field) in self._memory:
            return self._memory[id(field)]
        if impl.current_cfg().arch != ti.cpu or not isinstance(field, (ti.ScalarField, ti.MatrixField)):
            return None
        impl.get_runtime().materialize()
        layout = _layout(field)
        if layout is None:
            return None
        tree, offset, shape, strides = layout
        program = impl.get_runtime().prog
        if self._roots is None or self._program() is not program:
            self._roots, self._program = _find_roots(field, tree, offset), weakref.ref(program)
        dtype = np.dtype(to_numpy_type(field.dtype))
        size = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        buffer = (ctypes.c_char * size).from_address(self._roots[tree] + offset)
        return np.ndarray(shape, dtype, buffer, strides=strides)

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
        self._roots = None

    def _new(self, element_shape: tuple[int, ...], dtype: Any, shape: tuple[int, ...], needs_grad: bool) -> Any:
        if len(element_shape) == 0:
            field = ti.field(dtype, shape=shape, needs_grad=needs_grad)
        elif len(element_shape) == 1:
            field = ti.Vector.field(*element_shape, dtype, shape=shape, needs_grad=needs_grad)
        else:
            field = ti.Matrix.field(*element_shape, dtype, shape=shape, needs_grad=needs_grad)
        impl.get_runtime().materialize()  # the next one has a tree of its own
        for part in (field, field.grad) if needs_grad else (field,):
            memory = self.memory(part)
            if memory is not None:
                self._memory[id(part)] = memory
        return field


def _layout(field: Any) -> tuple[int, int, tuple[int, ...], tuple[int, ...]] | None:
    """The tree of a field, its first byte in there, its shape with that of its elements, and the strides in bytes.

    None where a field lies otherwise than in one dense block, the parts of its elements one after the other.
    """
    if RUNTIME == "quadrants":  # its runtime is laid out otherwise
        return None
    nodes, kinds = [part.ptr.snode() for part in field.vars], core.SNodeType
    block, size = nodes[0].parent, np.dtype(to_numpy_type(field.dtype)).itemsize
    if any(n.parent.id != block.id for n in nodes) or block.type != kinds.dense or block.parent.type != kinds.root:
        return None
    shape, first = tuple(field.shape), nodes[0].offset_bytes_in_parent_cell
    is_in_order = [axis for axis in block.get_physical_index_position() if axis >= 0] == list(range(len(shape)))
    is_together = [n.offset_bytes_in_parent_cell for n in nodes] == [first + n * size for n in range(len(nodes))]
    if not is_in_order or not is_together or field.dtype == ti.u1:
        return None
    element_shape = _element_shape(field)
    strides = (*_strides(shape, block.cell_size_bytes), *_strides(element_shape, size))
    return tree_of(nodes[0]), block.offset_bytes_in_parent_cell + first, (*shape, *element_shape), strides


def _element_shape(field: Any) -> tuple[int, ...]:
    if isinstance(field, ti.ScalarField):
        return ()
    return (field.n,) if field.m == 1 else (field.n, field.m)  # as in to_numpy


def _strides(shape: tuple[int, ...], step: int) -> list[int]:
    return [step * math.prod(shape[n + 1 :]) for n in range(len(shape))]


def _find_roots(field: Any, tree: int, offset: int) -> Any:
    """Taichi's table of where each tree of fields begins, from a launch, which holds the address of Taichi's runtime.

    The launched kernel says where the given field lies: the table has to agree.
    """
    scalar = field if isinstance(field, ti.ScalarField) else field.get_scalar_field(*(0,) * field.ndim)
    origin = [0] * len(scalar.shape)

    @ti.kernel
    def find(found: ti.types.ndarray(ti.u64, ndim=1)):
        found[0] = ti.get_addr(scalar, origin)

    found = np.zeros(1, np.uint64)
    kernel, program = find._primal, impl.get_runtime().prog
    compiled = kernel.compiled_kernels[kernel.ensure_compiled(found)]
    launch = compiled.make_launch_context()
    launch.set_arg_external_array_with_shape((0,), found.ctypes.data, found.nbytes, found.shape, 0)
    program.launch_kernel(program.compile_kernel(program.config(), program.get_device_caps(), compiled), launch)
    builder = _pointer(id(launch) + object.__basicsize__)
    runtime = _pointer(_pointer(builder + 2 * WORD) + WORD)
    roots = (ctypes.c_uint64 * TREES).from_address(runtime + ROOTS)
    assert roots[tree] + offset == found[0], "Taichi's runtime is laid out otherwise than in Taichi 1.7.4"
    return roots


def _pointer(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


pool = FieldPool()
