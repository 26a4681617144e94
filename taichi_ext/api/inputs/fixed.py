"""Entries of params that are fixed: their rows and columns of H are those of the identity matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.api.inputs.arguments import check_not_ended, flatten
from taichi_ext.errors import InvalidArgumentError
from taichi_ext.runtime.sparse.matrices import scipy_sparse

Shapes = list[tuple[int, ...]]


class Fixed:
    """Which entries of the params are fixed.

    Args:
        given: bools or indices, structured like the params; None, whole or for a param, where nothing is fixed.
        shapes: of the params, those of their elements included.

    Attributes:
        mask: of shape (P,), P numbers in the params.

    Raises:
        InvalidArgumentError: they are not structured like the params, or could be the one or the other.
    """

    def __init__(self, given: object, shapes: Shapes) -> None:
        self._masks = [flags.reshape(-1) for flags in _bools(given, shapes)]
        self.mask = np.concatenate(self._masks)

    def __bool__(self) -> bool:
        return bool(self.mask.any())

    def mask_matrix(self, H: np.ndarray) -> None:
        """Change a dense Hessian in place."""
        H[self.mask] = 0.0
        H[:, self.mask] = 0.0
        H[self.mask, self.mask] = 1.0

    def free(self, vectors: np.ndarray) -> np.ndarray:
        return np.where(self.mask if vectors.ndim == 1 else self.mask[:, None], 0.0, vectors)

    def mask_blocks(self, blocks: Sequence[Sequence[object]]) -> list[list[object]]:
        """The CSR arrays of a sparse Hessian, changed in place.

        A block is a new array only if it lacks a diagonal entry, which no term of the energy has.
        """
        return [[self._mask_block(block, m, n) for n, block in enumerate(row)] for m, row in enumerate(blocks)]

    def _mask_block(self, block: Any, m: int, n: int) -> object:
        counts, fixed = np.diff(block.indptr), np.flatnonzero(self._masks[m])
        in_rows = np.repeat(self._masks[m], counts)
        block.data[in_rows | self._masks[n][block.indices]] = 0.0
        if m != n:
            return block
        entries, rows = np.flatnonzero(in_rows), np.repeat(fixed, counts[fixed])
        is_diagonal = block.indices[entries] == rows
        block.data[entries[is_diagonal]] = 1.0
        missing = np.setdiff1d(fixed, rows[is_diagonal])
        if len(missing):
            ones = np.ones(len(missing), block.dtype)
            block = block + scipy_sparse().csr_array((ones, (missing, missing)), shape=block.shape)
        return block


def _bools(given: object, shapes: Shapes) -> list[np.ndarray]:
    """For each param an array of its shape; a bool or index for an element applies to all of its entries."""
    if given is None:
        return [np.zeros(shape, bool) for shape in shapes]
    if len(shapes) == 1 and isinstance(given, (list, tuple)) and all(isinstance(x, (int, np.integer)) for x in given):
        given = np.array(given, bool if all(isinstance(x, bool) for x in given) else int)
    leaves = [leaf for _, leaf in flatten(given, "fixed")[0]] if isinstance(given, (list, tuple, dict)) else [given]
    if len(leaves) != len(shapes):
        raise InvalidArgumentError(f"fixed has {len(leaves)} arrays; expected one for each of {len(shapes)} params.")
    result: list[np.ndarray] = []
    for n, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True)):
        check_not_ended(f"fixed[{n}]", leaf)
        values = np.zeros(shape, bool) if leaf is None else np.asarray(backend.as_numpy(leaf))
        if values.dtype.kind in "ui":
            values = _mask_of(f"fixed[{n}]", values, shape)
        if values.ndim < len(shape) and values.shape == shape[: values.ndim]:
            values = np.broadcast_to(values.reshape(*values.shape, *[1] * (len(shape) - values.ndim)), shape)
        if values.shape != shape or values.dtype.kind != "b":
            raise InvalidArgumentError(
                f"fixed[{n}] has shape {values.shape} and type {values.dtype}; expected bools of shape {shape}, or of "
                "its first axes, or indices along its first axis."
            )
        result.append(values)
    return result


def _mask_of(name: str, indices: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The bools along the first axis of a param that indices mean; 0 and 1 in the shape of a mask are refused."""
    if indices.shape == shape[: indices.ndim] and np.isin(indices, (0, 1)).all():
        raise InvalidArgumentError(
            f"{name} has type {indices.dtype}, and could be indices or a mask; give bools: of a mask, fixed != 0; of "
            "indices, mask = np.zeros(shape, bool) with mask[indices] = True."
        )
    size = shape[0] if shape else 0
    if indices.ndim != 1 or (indices.size and not (0 <= indices.min() and indices.max() < size)):
        raise InvalidArgumentError(
            f"{name} has integers of shape {indices.shape}; expected a list of indices from 0 to {size - 1}, along the "
            f"first axis of the param, or bools of shape {shape}."
        )
    mask = np.zeros(size, bool)
    mask[indices] = True
    if mask.sum() < indices.size:
        raise InvalidArgumentError(f"{name} has an index twice; a mask has to be of bools, fixed != 0.")
    return mask
