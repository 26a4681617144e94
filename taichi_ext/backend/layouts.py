"""Where fields are placed: nodes of the layout, trees, and which of them are dense."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from taichi_ext.backend.expressions import is_real
from taichi_ext.backend.lifetime import is_field_alive
from taichi_ext.backend.opaque import tree_of
from taichi_ext.backend.sparse_layouts import is_dense_node, sparse_part, upwards
from taichi_ext.host import RUNTIME, Expr, Field, core, ti

_WHOLE = "_taichi_ext_whole"  # of a component: the field that was made of it, which it does not keep alive


def whole_field(field: object) -> Any:
    """The vector or matrix field that a scalar field is a component of; the field itself where it is none."""
    if not isinstance(field, ti.ScalarField):
        return field
    reference = field.vars[0].__dict__.get(_WHOLE)
    whole = None if reference is None else reference()
    return field if whole is None else whole


def field_identity(field: ti.Field) -> tuple[Any, ...]:
    """Equal for objects of the same field or component, such as those that ``get_scalar_field`` makes at each call."""
    if isinstance(field, ti.StructField):
        return tuple((name, field_identity(member)) for name, member in field.field_dict.items())
    sizes = (field.n, field.m, field.ndim) if isinstance(field, ti.MatrixField) else ()
    return (*sizes, *map(id, field.vars))


def component_index(whole: object, field: Field) -> tuple[int, ...]:
    """Which component of a vector or matrix field a scalar field is; empty where both are the same field."""
    if not isinstance(whole, ti.MatrixField) or isinstance(field, ti.MatrixField):
        return ()
    number = next(n for n, component in enumerate(whole.vars) if component is field.vars[0])
    return (number,) if whole.ndim == 1 else divmod(number, whole.m)


def _note(field: ti.MatrixField) -> None:
    reference = weakref.ref(field)
    for component in field.vars:
        known = component.__dict__.get(_WHOLE)
        if known is None or known() is None:
            component.__dict__[_WHOLE] = reference


_make = ti.MatrixField.__init__


def _make_and_note(self: ti.MatrixField, *args: Any, **kwargs: object) -> None:
    _make(self, *args, **kwargs)
    _note(self)


ti.MatrixField.__init__ = _make_and_note
if RUNTIME.program() is not None:  # there may be fields that were made before this module was imported
    for _made in gc.get_objects():
        if type(_made) is ti.MatrixField and "vars" in _made.__dict__:
            _note(_made)


def node_of(component: Expr) -> int:
    """The place of a component of a field in the layout of all fields."""
    return int(component.ptr.snode().id)


def nodes_of(field: Field) -> set[int]:
    """The places of the components of a field."""
    return set(map(node_of, field.vars))


def has_one_offset(field: Field) -> bool:
    return len({tuple(v.ptr.snode().offset) for v in field.vars}) == 1


def is_flat(field: Field) -> bool:
    """Whether a field is placed in one dense level, its indices beginning at 0."""
    if isinstance(field, ti.StructField):
        return False
    node = field.vars[0].ptr.snode()
    is_single = node.parent is not None and node.parent.parent is not None and node.parent.parent.parent is None
    return is_single and is_dense(field) and not any(node.offset)


def tree_numbers(field: Field) -> set[int]:
    return {tree_of(v.ptr.snode()) for v in field.vars}


def is_dense(field: Field) -> bool:
    """Whether all levels of a field's layout are dense."""
    if isinstance(field, ti.StructField):
        return all(is_dense(member) for member in field.field_dict.values())
    return all(is_dense_node(v.ptr.snode()) for v in field.vars)


def storage_parts(obj: object) -> list[object]:
    """The holders of a scalar or matrix field: parts of the layout that are not dense, and dense ones, as fields."""
    if not isinstance(obj, (ti.ScalarField, ti.MatrixField)):
        return [obj]
    parts = [sparse_part(v.ptr.snode()) for v in obj.vars]
    if not any(parts):
        return [obj]
    fields = (ti.ScalarField(v) if part is None else part for v, part in zip(obj.vars, parts, strict=True))
    return list(dict.fromkeys(fields))


def components_under(field: Field, node: ti.SNode) -> list[int]:
    """The components of a field, by number, that are placed in a node of the layout, or in one below it."""
    if not is_field_alive(field):
        return []
    above = ({n.id for n in upwards(v.ptr.snode())} for v in field.vars)
    return [number for number, nodes in enumerate(above) if node.ptr.id in nodes]


def is_under(field: Field, node: ti.SNode) -> bool:
    """Whether a component of a field is placed in a node of the layout, or in one below it."""
    return bool(components_under(field, node))


def leaf_fields(field: object) -> list[Any]:
    """The scalar and matrix fields that a field consists of."""
    if isinstance(field, ti.StructField):
        return [leaf for member in field.field_dict.values() for leaf in leaf_fields(member)]
    return [field]


def has_real(field: object) -> bool:
    """Whether a field, or a member of a struct field, has real numbers."""
    return any(is_real(leaf.dtype) for leaf in leaf_fields(field))


def is_dynamic_cell(field: object, index_count: int) -> bool:
    """Whether this number of indices names a list of a dynamic node, for appending, rather than an entry."""
    node = leaf_fields(field)[0].vars[0].ptr.snode()
    if node is None:
        return False
    parent = node.parent
    is_dynamic = parent is not None and parent.type == core.SNodeType.dynamic
    return is_dynamic and node.num_active_indices() == index_count + 1


def layout_node(x: ti.SNode | Field) -> ti.SNode:
    return x._snode


def node_kind(node: ti.SNode) -> str:
    """``dense``, ``pointer``, ``dynamic``, ``bitmasked`` ..."""
    return node.ptr.type.name


def node_shape(node: ti.SNode) -> tuple[int, ...]:
    """How many cells a node has along each axis, those of the nodes above it included."""
    return tuple(node.shape)


def has_leading_axes(field: Field, node: ti.SNode) -> bool:
    """Whether the axes of a node are the first ones of a field that is placed in it, in order."""
    own, above = (n._physical_index_position() for n in (field._snode, node))
    return list(own) == sorted(own) and list(above) == list(own)[: len(above)]


def child_numbers(node: ti.SNode) -> list[int]:
    """Numbers of the nodes below a node, in order."""
    return [child.ptr.id for child in node._get_children()]


def component_numbers(field: Field) -> list[int]:
    return [node_of(v) for v in field.vars]
