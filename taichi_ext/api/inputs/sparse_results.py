"""Formats of sparse Jacobians, and the objects accepted as ``out=`` for them."""

# The annotations of a kernel are values that Taichi reads, such as ti.template().
# pyright: reportInvalidTypeForm=false

from typing import Any, get_args

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.types import Format
from taichi_ext.backend import ti
from taichi_ext.errors import InvalidArgumentError, shown
from taichi_ext.runtime.sparse.matrices import scipy_sparse

FORMATS = get_args(Format)


def checked_format(given: object) -> str | None:
    """The option ``format``; raises for a value that cannot be used."""
    if given is None:
        return None
    if not isinstance(given, str) or given not in FORMATS:
        expected = ", ".join(map(repr, FORMATS))
        raise InvalidArgumentError(f"format is {shown(given)}; expected None for dense arrays, or one of {expected}.")
    try:
        scipy_sparse()
    except ImportError:
        raise InvalidArgumentError(
            f"format={given!r} needs SciPy, which is not installed: python -m pip install '.[scipy]' in a clone of "
            "taichi_ext"
        ) from None
    return given


def in_format(matrix: Any, kind: str, block: tuple[int, int], device: object) -> object:
    """A CSR array in another format; ``block`` is the size of an element of the output and of the parameter."""
    if kind in ("coo", "csc"):
        return matrix.asformat(kind)
    if kind == "bsr":
        return matrix.tobsr(blocksize=block)  # entries of a block that are not in the pattern are zeros
    if kind.startswith("torch"):
        return _as_torch(matrix, kind, device)
    return matrix


def _as_torch(matrix: Any, kind: str, device: Any) -> object:
    import torch

    if kind == "torch_csr":
        starts, columns = (torch.from_numpy(a.astype(np.int64)) for a in (matrix.indptr, matrix.indices))
        numbers = torch.from_numpy(matrix.data)
        tensor = torch.sparse_csr_tensor(starts, columns, numbers, matrix.shape, check_invariants=False)
    else:
        coo = matrix.tocoo()
        places = torch.from_numpy(np.stack([coo.row, coo.col]).astype(np.int64))
        tensor = torch.sparse_coo_tensor(
            places, torch.from_numpy(coo.data), coo.shape, is_coalesced=True, check_invariants=False
        )
    return tensor.to(device)


# --- out= -------------------------------------------------------------------------------------------------------------


def check_out(
    leaves: list[tuple[str, Any]], wanted: list[tuple[tuple[int, ...], np.dtype]]
) -> list[tuple[str, object]]:
    """Raise, before anything runs, for an ``out`` that cannot take sparse Jacobians of these shapes and types.

    Returns:
        The places of CSR arrays and the arrays of their numbers, which are to be filled.
    """
    numbers: list[tuple[str, Any]] = []
    for (path, target), (shape, dtype) in zip(leaves, wanted, strict=True):
        if _is_builder(target):
            given, found = (target.num_rows, target.num_cols), np.dtype(backend.to_numpy_type(target.dtype))
        elif _is_csr(target):
            given, found = target.shape, target.dtype
            numbers.append((path, target.data))
            if not target.data.flags.writeable:
                raise InvalidArgumentError(f"out{path} is read-only; give an array that can be written.")
        else:
            raise InvalidArgumentError(
                f"out{path} is {shown(target)}; with format= expected a scipy.sparse.csr_array of the same pattern, or "
                "a ti.linalg.SparseMatrixBuilder."
            )
        if tuple(given) != shape:
            raise InvalidArgumentError(f"out{path} has shape {tuple(given)}; the Jacobian has {shape}.")
        if found != dtype:
            raise InvalidArgumentError(f"out{path} has dtype {found}; the Jacobian has {dtype}.")
    return numbers


def _is_builder(target: object) -> bool:
    return isinstance(target, ti.linalg.SparseMatrixBuilder)


def _is_csr(target: Any) -> bool:
    return scipy_sparse().issparse(target) and target.format == "csr"


def fill_out(leaves: list[tuple[str, Any]], matrices: list[Any]) -> None:
    """Put CSR arrays into the objects given as ``out=``: all of them, or none."""
    added: dict[int, int] = {}  # by builder: one may take several matrices
    for (path, target), matrix in zip(leaves, matrices, strict=True):
        if _is_builder(target):
            added[id(target)] = added.get(id(target), 0) + matrix.nnz
            _check_room(path, target, added[id(target)])
        else:
            _check_pattern(path, target, matrix)
    for (_, target), matrix in zip(leaves, matrices, strict=True):
        if _is_builder(target):
            _append(target, matrix)
        else:
            target.data[:] = matrix.data


def _check_pattern(path: str, target: Any, matrix: Any) -> None:
    is_same = np.array_equal(target.indptr, matrix.indptr) and np.array_equal(target.indices, matrix.indices)
    if not is_same:
        counts = f"{target.nnz} entries, not {matrix.nnz}" if target.nnz != matrix.nnz else "entries at other places"
        raise InvalidArgumentError(
            f"out{path} has another pattern than the Jacobian: {counts}. Give the result of an earlier call, or leave "
            "out= out."
        )


def _check_room(path: str, builder: Any, count: int) -> None:
    """Raise if a builder has no room for ``count`` entries: Taichi would write outside of its memory."""
    room = backend.builder_room(builder)
    if room is not None and count > room:
        raise InvalidArgumentError(
            f"out{path} has room for {room} more entries, and the Jacobian has {count}; make the SparseMatrixBuilder "
            f"with max_num_triplets= of at least {count} for each call before build()."
        )


def _append(builder: Any, matrix: Any) -> None:
    """Add the entries of a matrix to a builder."""
    coo = matrix.tocoo()
    if not coo.nnz:
        return
    with backend.suspend_following():
        _appending(builder.dtype)(
            builder, coo.row.astype(np.int32), coo.col.astype(np.int32), np.ascontiguousarray(coo.data), coo.nnz
        )


def _appending(dtype: object) -> Any:
    @ti.kernel
    def append(
        target: ti.types.sparse_matrix_builder(),
        rows: ti.types.ndarray(dtype=ti.i32, ndim=1),
        columns: ti.types.ndarray(dtype=ti.i32, ndim=1),
        numbers: ti.types.ndarray(dtype=dtype, ndim=1),
        count: ti.i32,
    ):
        for k in range(count):
            target[rows[k], columns[k]] += numbers[k]

    return append


def check_size(reason: str, entries: int, dtype: np.dtype, free: float) -> None:
    """Raise if J has to be computed dense and does not fit into memory that way."""
    needed = entries * dtype.itemsize
    if needed > free:
        raise InvalidArgumentError(
            f"{reason}, so J has to be computed dense: {needed / 2**30:.1f} GiB, more than the {free / 2**30:.1f} GiB "
            "that may be used. Rewrite that part of the kernel, allow more max_memory=, or use fewer parameters."
        )
