"""Types of the objects of Taichi's C++ library, which declares none, and of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from taichi_ext.host import RUNTIME, Ndarray
from taichi_ext.host import DataType as HostDataType

if TYPE_CHECKING:
    from torch import Tensor, device
    from typing_extensions import TypeIs as TypeIs

    Array = np.ndarray | Ndarray | Tensor
    Device = device

    class DataType:
        """A scalar type, such as ``ti.f32``."""

        def to_string(self) -> str:
            """Its short name, ``f32``."""
            ...
else:
    Array = np.ndarray | Ndarray  # there may be no torch
    DataType = HostDataType


class CoreNode(Protocol):
    """A node of the layout of fields: a level, or the place of a component."""

    @property
    def id(self) -> int: ...
    @property
    def type(self) -> object: ...
    @property
    def parent(self) -> CoreNode | None: ...
    @property
    def offset(self) -> Sequence[int]: ...
    @property
    def offset_bytes_in_parent_cell(self) -> int: ...
    @property
    def cell_size_bytes(self) -> int: ...
    def get_num_ch(self) -> int: ...
    def get_ch(self, number: int, /) -> CoreNode: ...
    def get_physical_index_position(self) -> Sequence[int]: ...
    def num_active_indices(self) -> int: ...
    def is_place(self) -> bool: ...
    def get_expr(self) -> CoreExpression: ...
    def get_snode_tree_id(self) -> int: ...


class CoreExpression(Protocol):
    """The C++ object that an expression of Taichi refers to."""

    def get_underlying_ptr_address(self) -> int: ...


class WalkedFunction(Protocol):
    """The kernel or function that is walked."""

    @property
    def func(self) -> FunctionType: ...


class TracingState(Protocol):
    """The state of Taichi's walk over the tree of a kernel or function."""

    @property
    def func(self) -> WalkedFunction: ...
    @property
    def file(self) -> str: ...
    @property
    def lineno_offset(self) -> int: ...
    @property
    def global_vars(self) -> Mapping[str, object]: ...
    @property
    def local_scopes(self) -> Sequence[Mapping[str, object]]: ...


# Which tree of fields a node is in: Taichi 1.7.4 says it, before that it is looked up.


def tree_of(node: CoreNode) -> int:
    """The number of the tree that a node, as Taichi's core has it, is in."""
    if hasattr(node, "get_snode_tree_id"):
        return int(node.get_snode_tree_id())
    while node.parent is not None:
        node = node.parent
    program: Any = RUNTIME.program()
    roots = [program.get_snode_root(n).id for n in range(program.get_snode_tree_size())]
    return roots.index(node.id)
