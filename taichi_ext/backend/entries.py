"""Single numbers of fields, as Python reads them and stores to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from taichi_ext.backend.lifetime import InTree, check_not_ended, tree_serial
from taichi_ext.backend.sparse_layouts import SparsePart, sparse_part


@dataclass(frozen=True)
class FieldEntry(InTree):
    """One number of a field, as Python reads it and stores to it."""

    accessor: Any
    index: tuple[int, ...]  # filled up with zeros
    node: int  # the place of the number's component in the layout
    tree_serial: int

    @classmethod
    def of(cls, accessor: Any, index: tuple[int, ...]) -> FieldEntry:
        """The entry that an accessor of Taichi's reads and writes, of a field that exists."""
        node = _node(accessor)
        return cls(accessor, index, int(node.id), tree_serial(node))

    @property
    def name(self) -> Any:
        return ("entry", self.node, tuple(self.index))

    def sparse_part(self) -> SparsePart | None:
        """The part of the layout that the number lies in, where that is not dense."""
        return sparse_part(_node(self.accessor))

    def read(self) -> object:
        check_not_ended(self)
        return self.accessor.getter(*self.index)

    def write(self, value: object) -> None:
        check_not_ended(self)
        self.accessor.setter(value, *self.index)


def _node(accessor: Any) -> Any:
    """The node of the layout that an accessor of Taichi's reads and writes."""
    setter = accessor.setter
    return setter.__closure__[setter.__code__.co_freevars.index("snode")].cell_contents
