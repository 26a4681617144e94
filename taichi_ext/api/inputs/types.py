"""Types of arguments, by which a type checker finds mistakes in users' programs, and knows which results are arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypedDict

import numpy as np

from taichi_ext.backend import ti
from taichi_ext.differentiate.plan.storage_facts import Strategy
from taichi_ext.runtime.sparse.streams import Projection

Format = Literal["csr", "csc", "coo", "bsr", "torch_csr", "torch_coo"]
Mode = Literal["forward", "reverse"]
Kernel = Callable[..., object]
Structure = list[Any] | tuple[Any, ...] | dict[Any, Any]


class _HasShape(Protocol):
    @property
    def shape(self) -> Any: ...


Leaf = str | _HasShape  # a single param or output, and no structure: a field, an array, a name
Plain = tuple[np.ndarray | float | ti.Ndarray | ti.Field | ti.Matrix, ...]  # args without tensors


# Keyword arguments, of calls whose results are NumPy arrays (Dense) and of any calls.


class _Product(TypedDict, total=False):
    max_memory: int | None
    chunk_size: int | None  # of jvp, vjp
    fixed: object  # of hvp
    progress: bool | None  # of vjp


class DenseProduct(_Product, total=False):
    args: Plain


class AnyProduct(_Product, total=False):
    args: tuple[object, ...]


class _Jacobian(TypedDict, total=False):
    out: object
    max_memory: int | None
    chunk_size: int | None
    tangents: Strategy
    as_matrix: bool
    progress: bool | None
    mode: Mode | None


class DenseJacobian(_Jacobian, total=False):
    args: Plain
    format: None


class AnyJacobian(_Jacobian, total=False):
    args: tuple[object, ...]
    format: Format | None


class _Hessian(_Product, total=False):
    out: object


class DenseHessian(_Hessian, total=False):
    args: Plain
    format: None


class AnyHessian(_Hessian, total=False):
    args: tuple[object, ...]
    format: Format | None
    project: Projection | None
