"""Subscripts in a traced kernel: places in containers, entries of tensors, items of Python containers."""

from __future__ import annotations

from typing import Any

import taichi as ti

from taichi_ext import backend
from taichi_ext.derivative.references import ByReference
from taichi_ext.derivative.values import (
    StructValue,
    TensorValue,
    entries_of,
    is_active,
    is_python_number,
    is_tensor_like,
    make_tensor,
    primal_of,
)
from taichi_ext.errors import UnsupportedError, refuse_baked
from taichi_ext.tracing.containers import Ref
from taichi_ext.tracing.local_variables import LocalEntry, LocalTensor


class StructRef:
    """An entry of a struct field: a place per member."""

    _data_oriented = True

    def __init__(self, tracer: Any, members: dict[str, Any], methods: dict[str, Any]) -> None:
        self.tracer = tracer
        self.members = members
        self.methods = methods

    def __getattr__(self, name: str) -> Any:
        members = self.__dict__.get("members", {})
        if name in members:
            return members[name]
        raise AttributeError(f"a struct with the members {list(members)} has no attribute {name!r}")

    def value(self) -> StructValue:
        return StructValue({n: self.tracer.value_of(m) for n, m in self.members.items()}, self.methods)

    def store(self, value: Any) -> None:
        members = self.tracer.struct_members(value)
        kept = {n: self.tracer.freeze(members[n], (self.tracer.path, "member", self.tracer.line(), n)) for n in members}
        for name, member in kept.items():
            self.tracer.assign_to(self.members[name], member)


class DynamicCell:
    """A list of a dynamic node, ``field[i]`` where each entry is ``field[i, j]``: it is appended to, not read."""

    _data_oriented = True

    def __init__(self, field: Any, indices: tuple[Any, ...]) -> None:
        self.field = field
        self.indices = indices


def flat_indices(tracer: Any, index: tuple[Any, ...]) -> tuple[Any, ...]:
    """Indices as numbers and integer expressions: vectors are expanded, None is no index."""
    flat: list[Any] = []
    for i in index:
        if id(i) in tracer.index_vectors:
            flat += [tracer.atoms[name] for name in tracer.index_vectors[id(i)][1]]
            continue
        if is_python_number(tracer.value_of(i)):
            refuse_baked("An index")
        i = i if isinstance(i, slice) else tracer.primal(i)
        if is_tensor_like(i):
            flat += entries_of(i)
        elif isinstance(i, (list, tuple)):
            flat += flat_indices(tracer, tuple(i))
        elif i is not None:
            flat.append(i)
    return tuple(flat)


def load(tracer: Any, base: Any, index: tuple[Any, ...]) -> Any:
    if isinstance(base, ByReference):
        base = base.value()
    if isinstance(base, (backend.Field, backend.AnyArray)):
        return _load_container(tracer, base, index)
    if isinstance(base, (LocalTensor, TensorValue, Ref)) and not isinstance(base, dict):
        return _load_entry(tracer, base, flat_indices(tracer, index))
    if backend.is_expr(base):
        return _load_expression(tracer, base, index)
    if isinstance(base, backend.Matrix):
        is_static = all(isinstance(i, int) for i in index)
        return base[index] if is_static else _load_expression(tracer, backend.Expr(base), index)
    if isinstance(base, (list, tuple, dict, str)) or not hasattr(base, "__module__"):
        key = tracer.value_of(index[0]) if len(index) == 1 else tuple(tracer.value_of(i) for i in index)
        if is_active(key):
            refuse_baked("An index")
        if backend.is_expr(key):
            raise UnsupportedError(
                f"A Python {type(base).__name__} is indexed at run time; its items are only known at compile time."
            )
        return base[key]
    return backend.element(base, tuple(tracer.primal(i) if not isinstance(i, slice) else i for i in index))


def _load_container(tracer: Any, base: Any, index: tuple[Any, ...]) -> Any:
    indices = flat_indices(tracer, index)
    backend.refuse_ended(base, "The field that is indexed here")
    if isinstance(base, backend.Field) and backend.is_dynamic_cell(base, len(indices)):
        return DynamicCell(base, indices)
    if isinstance(base, backend.StructField):
        members = {name: load(tracer, member, index) for name, member in base.field_dict.items()}
        return StructRef(tracer, members, base.struct_methods)
    container = tracer.container(base)
    tracer.note_access(base, indices, container)
    if container is None:
        if isinstance(base, backend.Field):
            tracer.facts.other_fields[id(base)] = base
        return backend.element(base, indices)
    component = container_component(tracer, base)
    count = len(container.shape)
    if len(indices) > count and component is None and container.element_shape:
        ref = Ref(tracer, container, base, indices[:count], None)
        return _load_entry(tracer, ref, indices[count:])
    return Ref(tracer, container, base, indices, component)


def container_component(tracer: Any, base: Any) -> int | None:
    return tracer.plan.component(base)


def _load_entry(tracer: Any, base: Any, index: tuple[Any, ...]) -> Any:
    shape = base.get_shape()
    if any(isinstance(i, slice) for i in index):
        return _load_slice(tracer, base, index, shape)
    if isinstance(base, Ref):
        if not shape:
            raise ti.TaichiSyntaxError("A scalar entry is indexed.")
        return base.at(tracer._flat(shape, index))
    flat = tracer._flat(shape, index)
    if isinstance(base, LocalTensor):
        return base.cells[flat] if base.cells and isinstance(flat, int) else LocalEntry(base, flat)
    return base.entries[flat] if isinstance(flat, int) else _select_entry(tracer, base, flat)


def _load_slice(tracer: Any, base: Any, index: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    entries = entries_of(tracer.value_of(base))
    ranges = [range(*i.indices(s)) if isinstance(i, slice) else i for i, s in zip(index, shape, strict=True)]
    if len(shape) == 1:
        return make_tensor([entries[i] for i in ranges[0]], (len(ranges[0]),))
    rows, cols = ranges
    new_shape = tuple(len(r) for r in ranges if isinstance(r, range))
    picked = [
        entries[i * shape[1] + j]
        for i in (rows if isinstance(rows, range) else [rows])
        for j in (cols if isinstance(cols, range) else [cols])
    ]
    return make_tensor(picked, new_shape)


def _select_entry(tracer: Any, base: TensorValue, index: Any) -> Any:
    """An entry, chosen at run time, of a value that is not a variable."""
    key = (tracer.path, "indexed value", tracer.line())
    tracer.facts.require_index(key)
    local = LocalTensor(tracer, key, base, base.shape, tracer_dtype(base))
    return local.entry(index)


def tracer_dtype(value: Any) -> Any:
    return backend.dtype_of(primal_of(value))


def _load_expression(tracer: Any, base: Any, index: tuple[Any, ...]) -> Any:
    index = tuple(i if isinstance(i, slice) else tracer.primal(i) for i in index)
    if any(backend.is_expr(i) for i in index):
        tracer.refuse_pieces()
    result = backend.element(base, index)
    declared = tracer.declarations.get(id(base))
    if declared is not None:
        is_fixed = all(isinstance(i, int) for i in index)
        key = (*declared[1], tracer._flat(backend.shape_of(base), index)) if is_fixed else declared[1]
        tracer.declarations[id(result)] = (result, key)
    known = tracer.index_vectors.get(id(base))
    if known is not None and len(index) == 1 and isinstance(index[0], int):
        return tracer.atoms[known[1][index[0]]]
    return result
