"""Calls in a traced kernel that change a field as a whole: fill, append, deactivate."""

from __future__ import annotations

import math
from typing import Any

import taichi as ti

from taichi_ext import backend
from taichi_ext.derivative.values import StructValue, entries_of, is_active, is_tensor_like, make_tensor, primal_of
from taichi_ext.errors import UnsupportedError
from taichi_ext.tracing.constructors import construct
from taichi_ext.tracing.containers import Container, Ref
from taichi_ext.tracing.subscripts import DynamicCell, flat_indices

# --- fill -------------------------------------------------------------------------------------------------------------


def fill_by_class(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> None:
    """``field.fill(value)``, the field being the first argument: a store to each entry."""
    field, value = args
    if isinstance(field, backend.MatrixField):
        value = _entry(tracer, field, value)
    tracer.call(backend.fill_function, field, value)


def _entry(tracer: Any, field: Any, value: Any) -> Any:
    """What ``fill`` stores to each entry of a matrix field: it takes a number, a vector or matrix, or lists."""
    shape = (field.n,) if field.ndim == 1 else (field.n, field.m)
    given = tracer.value_of(value)
    if isinstance(given, (list, tuple)):
        rows = [list(row) if isinstance(row, (list, tuple)) else row for row in given]
        return tracer.call(ti.Matrix, rows)
    if is_tensor_like(given):
        return value
    return make_tensor([given] * math.prod(shape), shape)


# --- dynamic nodes ----------------------------------------------------------------------------------------------------


def cell_method(tracer: Any, cell: DynamicCell, name: str, args: list[Any]) -> Any:
    """``field[i].append(value)``, ``field[i].length()`` and ``field[i].deactivate()``."""
    node = cell.field.parent()
    if name == "append":
        return _append(tracer, node, cell.indices, tracer.value_of(args[0]), cell.field)
    tracer.note_effect()
    if name == "length":
        return ti.length(node, list(cell.indices))
    return _deactivate(tracer, node, cell.indices)


def append(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """``ti.append(node, indices, value)``."""
    node, indices, value = args
    node = backend.layout_node(node)
    return _append(tracer, node, flat_indices(tracer, (indices,)), tracer.value_of(value), None)


def _append(tracer: Any, node: Any, indices: tuple[Any, ...], value: Any, field: Any) -> Any:
    """Append a value to a dynamic node: its tangents go to the entry that Taichi tells."""
    tracer.note_effect()
    tracer.refuse_in_rule()
    indices = tuple(tracer.settled_index(i) for i in indices)
    if isinstance(value, (StructValue, backend.Struct, dict)):
        value = tracer.freeze(value, (tracer.path, "appended", tracer.line()))
    elif isinstance(value, (list, tuple)):
        value = construct(tracer, ti.Matrix, [list(value)], {})
    place = ti.append(node, list(indices), primal_of(value))
    parts = dict(zip(backend.child_numbers(node), _scalars(tracer, value), strict=False))
    for leaf in _leaves(tracer, node, field):
        numbers = backend.component_numbers(leaf)
        container = tracer.container(leaf)
        if container is None:
            tracer.facts.other_fields[id(leaf)] = leaf
        if container is None or not all(n in parts for n in numbers):
            continue
        entries = [parts.pop(n) for n in numbers]
        appended = make_tensor(entries, container.element_shape) if container.element_shape else entries[0]
        ref = Ref(tracer, container, leaf, (*indices, place), tracer.plan.component(leaf)).settled()
        tracer.note_write(container, ref, is_active(appended))
        if container.keeps_tangents:
            ref.store_tangent(appended)
    lost = any(is_active(p) and backend.is_real(backend.dtype_of(primal_of(p))) for p in parts.values())
    key = (tracer.path, tracer.line())
    if lost and key not in tracer.facts.appended:  # a field that is only read after this is known in the next trace
        tracer.facts.note(tracer.facts.appended, key)
    elif lost:
        raise UnsupportedError(
            "A value with a tangent is appended, and the field that it goes to is not known. Append to the field "
            "itself: field.append(value), or field[i].append(value)."
        )
    return place


def _scalars(tracer: Any, value: Any) -> list[Any]:
    """The numbers that a value consists of, in the order in which Taichi stores them."""
    if isinstance(value, (StructValue, backend.Struct, dict)):
        return [s for member in tracer.struct_members(value).values() for s in _scalars(tracer, member)]
    return entries_of(value) if is_tensor_like(value) else [value]


def _leaves(tracer: Any, node: Any, field: Any) -> list[Any]:
    """The scalar and matrix fields that are placed in a node, as far as they are known."""
    found = [] if field is None else backend.leaf_fields(field)
    known = [info.obj for info in tracer.plan.launch.fields.infos.values() if backend.is_under(info.obj, node)]
    return found + [f for f in known if all(f is not other for other in found)]


# --- deactivation -----------------------------------------------------------------------------------------------------


def deactivate(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """``ti.deactivate(node, indices)``."""
    return _deactivate(tracer, backend.layout_node(args[0]), flat_indices(tracer, (args[1],)))


def _deactivate(tracer: Any, node: Any, indices: tuple[Any, ...]) -> Any:
    """Deactivate a cell: what it held becomes zero, and so do its tangents."""
    tracer.note_effect()
    tracer.refuse_in_rule()
    indices = tuple(tracer.settled_index(i) for i in indices)
    if backend.node_kind(node) != "bitmasked":  # there the memory, and what is read from it, stays as it was
        for container, field in _carrying(tracer, node):
            _clear_cell(tracer, node, indices, container, field)
    return ti.deactivate(node, list(indices))


def _carrying(tracer: Any, node: Any) -> list[tuple[Container, Any]]:
    """The containers in a node, each with its field."""
    infos = list(tracer.plan.launch.fields.infos.values())
    return [(tracer.container(info.obj), info.obj) for info in infos if backend.is_under(info.obj, node)]


def _clear_cell(tracer: Any, node: Any, indices: tuple[Any, ...], container: Container, field: Any) -> None:
    kind = backend.node_kind(node)
    carries = container.is_active
    if carries and (kind not in ("dynamic", "pointer") or not backend.has_leading_axes(field, node)):
        raise UnsupportedError(
            f"{container.name} carries tangents and a part of its layout, a {kind} node, is deactivated in a kernel. "
            "Deactivate it from Python between kernels (snode.deactivate_all()), or store zeros."
        )
    if carries and kind == "pointer" and _is_written_here(tracer, container):
        raise UnsupportedError(
            f"{container.name} carries tangents and is stored to in the loop that deactivates a part of it: Taichi may "
            "still read there what was stored. Deactivate it in a loop of its own."
        )
    sizes = [n // m for n, m in zip(container.shape, backend.node_shape(node), strict=False)]
    sizes += container.shape[len(sizes) :]
    counts: list[Any] = list(sizes)
    firsts: list[Any] = [i * size for i, size in zip(indices, sizes, strict=False)]
    if kind == "dynamic":
        counts[len(indices)] = sizes[len(indices)] * ti.length(node, list(indices))
    firsts += [0] * (len(sizes) - len(firsts))
    offsets = container.offset or (0,) * len(sizes)
    total = backend.variable(math.prod(counts[1:], start=counts[0]))
    with backend.for_range(total) as number:
        place = []
        for first, count, offset in reversed(list(zip(firsts, counts, offsets, strict=True))):
            place.insert(0, backend.variable(first + number % count + offset))
            number = backend.variable(number // count)
        ref = Ref(tracer, container, field, tuple(place), None).settled()
        tracer.note_write(container, ref, False)
        tracer.facts.clearing.add(tracer.writes[container.key][-1])
        if container.keeps_tangents:
            ref.store_tangent(0)


def _is_written_here(tracer: Any, container: Container) -> bool:
    """Whether the loop that is being traced stores to a container elsewhere."""
    here = [loop.site for loop in tracer.loops[:1]]
    sites = set(tracer.facts.writes.get(container.key, ())) - tracer.facts.clearing
    return any([site for site, _, _ in s.loops[:1]] == here for s in sites)
