"""Taichi's callables that add statements without tangents to a kernel; those in no table may only give expressions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from taichi_ext import backend
from taichi_ext.backend import matrix_ops, ti

# Called on values without tangents, as Taichi calls them: they neither read nor write entries of fields.
WITHOUT_TANGENTS: frozenset[Any] = frozenset(
    (
        *(ti.random, ti.randn),  # marked in Facts.has_random
        *(ti.activate, ti.is_active, ti.length, ti.rescale_index, ti.get_addr),  # of the layout
        *(ti.block_local, ti.cache_read_only, ti.mesh_local, ti.no_activate, ti.assume_in_range, backend.loop_unique),
        *(ti.global_thread_idx, ti.mesh_patch_idx),
        *(ti.atomic_and, ti.atomic_or, ti.atomic_xor),  # of integers only
        *(ti.static_print, ti.static_assert),
        *(getattr(ti.Matrix, name) for name in ("zero", "one", "unit", "identity")),
        *backend.thread_functions(ti.simt.block, ti.simt.grid, ti.simt.warp, ti.simt.subgroup),
    )
)

_METHODS = (
    *("cast", "trace", "inverse", "normalized", "transpose", "determinant", "sum", "norm", "norm_inv", "norm_sqr"),
    *("max", "min", "any", "all", "fill", "dot", "cross", "outer_product"),
)
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge", "eq", "ne")
# Methods of matrices that are called on their class, and the functions for them.
BY_CLASS: dict[Any, Callable[..., Any]] = {getattr(ti.Matrix, name): getattr(matrix_ops, name) for name in _METHODS}
BY_CLASS.update({getattr(ti.Matrix, f"__{name}__"): getattr(operator, name) for name in _OPERATORS})


def is_without_tangents(function: object) -> bool:
    """Whether a callable is known not to propagate tangents."""
    try:
        return function in WITHOUT_TANGENTS
    except TypeError:  # it cannot be hashed
        return False
