"""Formats of sparse Jacobians, and the objects accepted as ``out=`` for them."""

from typing import Any, get_args

import numpy as np

from taichi_ext.api.inputs.types import Format
from taichi_ext.errors import InvalidArgumentError, shown, unexpected
from taichi_ext.runtime.sparse.matrices import scipy_sparse

FORMATS = get_args(Format)


def checked_format(given: object) -> str | None:
    """The option ``format``; raises for a value that cannot be used."""
    if given is None:
        return None
    if not isinstance(given, str) or given not in FORMATS:
        expected = ", ".join(map(repr, FORMATS))
        raise unexpected("format", given, f"None for dense arrays, or one of {expected}")
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


def check_fit(place: str, host: np.ndarray | None, given: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
    """Raise for an array of another shape and type than the wanted ones, or memory that cannot be written."""
    if host is not None and not host.flags.writeable:
        raise InvalidArgumentError(f"{place} is read-only; give an array that can be written.")
    for what, own, expected in zip(("shape", "dtype"), given, wanted, strict=True):
        if own != expected:
            raise InvalidArgumentError(f"{place} has {what} {own}; the Jacobian has {expected}.")


def check_out(
    leaves: list[tuple[str, Any]], wanted: list[tuple[tuple[int, ...], np.dtype]]
) -> list[tuple[str, object]]:
    """Raise, before anything runs, for an ``out`` that cannot take sparse Jacobians of these shapes and types.

    Returns:
        The places of CSR arrays and the arrays of their numbers, which are to be filled.
    """
    numbers: list[tuple[str, Any]] = []
    for (path, target), (shape, dtype) in zip(leaves, wanted, strict=True):
        if not (scipy_sparse().issparse(target) and target.format == "csr"):
            raise InvalidArgumentError(
                f"out{path} is {shown(target)}; with format= expected a scipy.sparse.csr_array of the same pattern."
            )
        check_fit(f"out{path}", target.data, (tuple(target.shape), target.dtype), (shape, dtype))
        numbers.append((path, target.data))
    return numbers


def fill_out(leaves: list[tuple[str, Any]], matrices: list[Any]) -> None:
    """Put the numbers of CSR arrays into the ones given as ``out=``: all of them, or none."""
    for (path, target), matrix in zip(leaves, matrices, strict=True):
        if not all(map(np.array_equal, (target.indptr, target.indices), (matrix.indptr, matrix.indices))):
            counts = f"{target.nnz} entries, not {matrix.nnz}"
            counts = counts if target.nnz != matrix.nnz else "entries at other places"
            raise InvalidArgumentError(
                f"out{path} has another pattern than the Jacobian: {counts}. Give the result of an earlier call, or "
                "leave out= out."
            )
    for (_, target), matrix in zip(leaves, matrices, strict=True):
        target.data[:] = matrix.data
