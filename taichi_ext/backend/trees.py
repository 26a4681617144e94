"""Which tree of fields a node is in: Taichi 1.7.4 says it, before that it is looked up."""

from typing import Any

from taichi_ext.backend.opaque import CoreNode
from taichi_ext.backend.runtime import RUNTIME


def tree_of(node: CoreNode) -> int:
    """The number of the tree that a node, as Taichi's core has it, is in."""
    if hasattr(node, "get_snode_tree_id"):
        return int(node.get_snode_tree_id())
    while node.parent is not None:
        node = node.parent
    program: Any = RUNTIME.program()
    roots = [program.get_snode_root(n).id for n in range(program.get_snode_tree_size())]
    return roots.index(node.id)
