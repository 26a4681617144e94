"""Expressions of the kernel that is being traced: types, variables, places, control flow."""

# Taichi makes swizzles as it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from taichi_ext import host
from taichi_ext.backend.opaque import DataType
from taichi_ext.host import RUNTIME, core, matrix, primitive_types, ti


def builder() -> Any:
    """The AST builder of the kernel being traced."""
    return host.compiling().ast_builder()


def source_location() -> str:
    """File, line and source text of the user's statement being traced."""
    stack = RUNTIME.state().src_info_stack
    return stack[-1] if stack else ""


def is_tensor(x: object) -> bool:
    return isinstance(x, host.Expr) and x.ptr.is_tensor()


def shape_of(x: object) -> tuple[int, ...]:
    return tuple(x.ptr.get_shape()) if is_tensor(x) else ()


def dtype_of(x: object) -> DataType:
    """Element type of an expression, or the type a Python number gets in a kernel."""
    if isinstance(x, host.Expr):
        return x.ptr.get_rvalue_type().element_type() if x.ptr.is_tensor() else x.ptr.get_rvalue_type()
    if isinstance(x, bool):
        return primitive_types.u1
    return RUNTIME.state().default_fp if isinstance(x, float) else RUNTIME.state().default_ip


def default_type(kind: type) -> DataType:
    """The meaning of ``float`` and ``int`` in kernels."""
    runtime = RUNTIME.state()
    return runtime.default_fp if kind is float else runtime.default_ip


def is_real(dtype: object) -> bool:
    return dtype in host.real_types


def is_integer(dtype: object) -> bool:
    return dtype in host.integer_types or dtype == primitive_types.u1


def constant(x: float, dtype: DataType) -> host.Expr:
    """A literal of an exact type (literals in kernels otherwise get ``default_fp``)."""
    return host.Expr(float(x), dtype=dtype) if is_real(dtype) else host.Expr(int(x), dtype=dtype)


def tensor(entries: Sequence[object], shape: tuple[int, ...], dtype: DataType | None = None) -> host.Expr:
    exprs = [e if isinstance(e, host.Expr) else host.Expr(e) for e in entries]
    if dtype is None:
        dtype = exprs[0].ptr.get_rvalue_type()
        for e in exprs[1:]:
            dtype = core.promoted_type(dtype, e.ptr.get_rvalue_type())
    return matrix.make_matrix_with_shape(exprs, list(shape), dtype)


def temporary_field(dtype: Any, size: int) -> tuple[Any, Any]:
    """A field of zeros, and the tree to destroy when it is no longer needed."""
    layout, field = ti.FieldsBuilder(), ti.field(dtype)
    layout.dense(ti.i, size).place(field)
    return field, layout.finalize()


@contextlib.contextmanager
def for_range(n: int) -> Iterator[host.Expr]:
    """Emit ``for k in range(n)``; yields k."""
    b = builder()
    k = host.Expr(b.make_id_expr(""))
    first, end = constant(0, ti.i32), constant(n, ti.i32)
    b.begin_frontend_range_for(k.ptr, first.ptr, end.ptr, core.DebugInfo(source_location()))
    try:
        yield k
    finally:
        b.end_frontend_range_for()


def is_matrix_expression_method(name: str) -> bool:
    return hasattr(host.matrix_ops, name)


def swizzle_indices(name: str) -> list[int] | None:
    """Component numbers of a swizzle such as ``xy`` or ``bgr``; None for any other name."""
    group = ti.Matrix._swizzle_to_keygroup.get(name)
    return None if group is None else [group.index(c) for c in name]


def is_host_arch() -> bool:
    return RUNTIME.config().arch in (ti.x64, ti.arm64)


def confuses_local_arrays() -> bool:
    """Whether two loops of a kernel cannot both have local arrays.

    For devices that take SPIR-V, Taichi 1.7.4 cannot compile such a kernel: the second loop would take its indices, as
    constants, from the first ("Value ... does not yet exist").
    """
    return RUNTIME.config().arch not in (ti.x64, ti.arm64, ti.cuda, ti.amdgpu)


def most_buffers() -> int | None:
    """The number of arrays and trees of fields that one loop of a kernel may use; None if there is no limit.

    On devices that take SPIR-V, each is a buffer, as are the locals that loops share. A device has a limit, which
    Taichi 1.7.4 does not check: Mesa's llvmpipe has 32, gives wrong numbers with 33 and ends the process with 34.
    """
    return 31 if confuses_local_arrays() else None


def stores_by_column() -> bool:
    """Whether a column of a matrix of tangents lies together in memory, where threads side by side write to it."""
    return not is_host_arch()


def promoted_type(a: DataType, b: DataType) -> DataType:
    return core.promoted_type(a, b)


def array_type(array: object) -> tuple[object, tuple[int, ...]]:
    """The scalar type and the shape of the elements of an array argument that is being traced."""
    kind = array.get_type().element_type
    is_tensor = callable(getattr(kind, "shape", None))
    shape = tuple(kind.shape()) if is_tensor else ()
    return (kind.element_type() if shape else kind), shape


def is_debug() -> bool:
    """Whether kernels check their indices."""
    return bool(RUNTIME.config().debug)


def is_fast() -> bool:
    """Whether the compiler may reorder operations on real numbers."""
    return bool(RUNTIME.config().fast_math)


def thread_count() -> int:
    """How many threads can run iterations of a parallel loop at the same time; 0 where threads have no number."""
    config = RUNTIME.config()
    if is_host_arch():
        return int(config.cpu_max_num_threads)
    if config.arch in (ti.cuda, ti.amdgpu):
        return int(config.saturating_grid_dim or _MOST_BLOCKS) * block_size()
    return 0


def block_size() -> int:
    """How many threads a GPU's block has in a loop that does not say."""
    return int(RUNTIME.config().default_gpu_block_dim)


_MOST_BLOCKS = 1 << 14  # Taichi takes 64 for each multiprocessor, of which no device has more than 256


_NAMED_TYPES: dict[str, Any] = {dtype.to_string(): dtype for dtype in host.all_types if not isinstance(dtype, type)}


def named_type(name: str) -> DataType:
    return _NAMED_TYPES[name]


def type_names(kinds: Any) -> str:
    return ", ".join(map(_type_name, kinds))


def _type_name(kind: Any) -> str:
    if isinstance(kind, host.StructType):
        return f"a struct with {type_names(kind.members.values())}"
    return kind.to_string() if isinstance(kind, (DataType, host.MatrixType)) else str(kind)
