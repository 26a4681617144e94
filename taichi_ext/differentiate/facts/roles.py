"""The roles of containers when a kernel starts, in the column numbers of one walk."""

from __future__ import annotations

import math
from dataclasses import replace

from taichi_ext.differentiate.facts.decisions import Role, Seeds
from taichi_ext.differentiate.plan.sparse_numbering import Numbering
from taichi_ext.program import Container


def role_of(container: Container, seeds: Seeds, numbering: Numbering | None) -> Role:
    """The role of a container; in a sparse Jacobian, its columns are numbered by this walk."""
    role = seeds.roles.get(container, Role())
    if numbering is None:
        return role
    is_columns = numbering.asked.keys[container] in numbering.columns.intermediates
    if role.first_column is None and not is_columns:
        return role
    return replace(role, first_column=numbering.first(container), components=())


def size_of(container: Container, seeds: Seeds) -> int:
    """The count of numbers in a container."""
    return math.prod(seeds.extents[container].shape) * math.prod(container.element_shape)


def named_columns(container: Container, role: Role, seeds: Seeds) -> dict[str, tuple[int, int]]:
    """The first column and the number of columns of a parameter, or of each component that is one, by name."""
    first, name, size = role.first_column, container.name, size_of(container, seeds)
    if role.components:
        count = math.prod(container.element_shape)
        return {f"{name}_{n}": (column, size // count) for n, column in role.components}
    return {} if first is None else {name: (first, size)}
