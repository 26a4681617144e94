"""Subscripts and attributes of a recorded kernel: entries of fields and vectors, items of Python containers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError, raise_baked
from taichi_ext.program import Const, Declare, FoldedConst, Local, Size, Tensor, Value
from taichi_ext.program.values import I32
from taichi_ext.record.handles import DynamicList, Record, VectorPlace, value_of
from taichi_ext.record.literals import as_value, captured
from taichi_ext.record.recording import Recording


def index_list(index: Any) -> list[Any]:
    """Indices as numbers, values and slices: vectors are expanded, None is no index."""
    flat: list[Any] = []
    for i in index:
        if isinstance(i, slice):
            flat.append(slice(*map(value_of, (i.start, i.stop, i.step))))
            continue
        i = value_of(i)
        if isinstance(i, Tensor):
            flat += i.entries
        elif isinstance(i, (list, tuple)):
            flat += index_list(i)
        elif i is not None:
            if isinstance(i, FoldedConst):
                raise_baked("An index")
            flat.append(i if isinstance(i, Value) else _whole(i))
    return flat


def _whole(i: Any) -> int:
    if isinstance(i, float) or not hasattr(i, "__index__"):
        raise backend.TypeFault(f"{i!r} is used as an index; expected an integer.")
    return int(i)


def load(r: Recording, base: Any, index: Any) -> object:
    """``base[index]``: of a field or vector something that can also be stored to."""
    if isinstance(base, (backend.Field, backend.AnyArray)):
        return _load_container(r, base, index_list(index))
    if isinstance(base, backend.Matrix):
        return _item(r, base, index_list(index))
    if isinstance(base, (Tensor, VectorPlace)):
        return entry(r, base, index_list(index))
    if isinstance(base, Record):
        return base.members[index[0]]
    if isinstance(base, (Value, DynamicList)):
        raise backend.SyntaxFault("A scalar is indexed.")
    key = value_of(index[0]) if len(index) == 1 else tuple(value_of(i) for i in index)
    if isinstance(key, FoldedConst):
        raise_baked("An index")
    if isinstance(key, (Value, Tensor)):
        raise UnsupportedError(
            f"A Python {type(base).__name__} is indexed at run time; its items are only known at compile time. Use a "
            "ti.Vector or a field."
        )
    return base[key]


def _item(r: Recording, matrix: Any, index: list[Any]) -> object:
    """An entry of a matrix of Python numbers: a Python number where the index is known."""
    if any(isinstance(i, (Value, slice)) for i in index):
        return entry(r, captured(matrix), index)
    result = matrix.to_list()
    for i in index:
        result = result[i]
    return result


def _load_container(r: Recording, base: object, index: list[object]) -> object:
    backend.check_not_ended(base, "The field that is indexed here")
    if isinstance(base, backend.StructField):
        if backend.is_dynamic_cell(base, len(index)):
            first = backend.leaf_fields(base)[0]
            return DynamicList(base, r.container(first), tuple(map(as_value, index)))
        members = {name: _load_container(r, member, index) for name, member in base.field_dict.items()}
        return Record(members, base.struct_methods)
    c = r.container(base)
    outer, rest = index[: c.ndim], index[c.ndim :]
    if any(isinstance(i, slice) for i in outer):
        raise UnsupportedError("A field or array is indexed by a slice. Loop over its entries.")
    if len(outer) < c.ndim or (rest and not c.element_shape):
        if isinstance(base, backend.Field) and backend.is_dynamic_cell(base, len(index)):
            return DynamicList(base, c, tuple(map(as_value, index)))
        raise backend.SyntaxFault(f"{c.name} has {c.ndim} axes; {len(index)} indices are given.")
    place = VectorPlace(c, tuple(map(as_value, outer)), c.element_shape)
    if not c.element_shape:
        return place.at(())
    return entry(r, place, rest) if rest else place


def entry(r: Recording, base: Tensor | VectorPlace, index: list[Any]) -> object:
    """An entry of a vector or matrix, or a part of it."""
    if len(index) != len(base.shape):
        raise backend.SyntaxFault(f"{len(index)} indices are given for a value of shape {base.shape}.")
    if any(isinstance(i, slice) for i in index):
        axes = _axes(base, index)
        entries = tuple(as_value(entry(r, base, list(i))) for i in itertools.product(*axes))
        return Tensor(entries, tuple(len(a) for a, i in zip(axes, index, strict=True) if isinstance(i, slice)))
    if not any(isinstance(i, Value) for i in index):
        for i, size in zip(index, base.shape, strict=True):
            if not 0 <= i < size:
                raise backend.SyntaxFault(f"The index {i} is out of range for a value of shape {base.shape}.")
        if isinstance(base, VectorPlace):
            return base.at(tuple(index))
        return base.entries[index[0] if len(index) == 1 else index[0] * base.shape[1] + index[1]]
    if isinstance(base, Tensor):  # a run-time index needs something in memory
        local = Local("value", base.dtype, base.shape, "temporary")
        r.add(Declare(local, base.entries, place=r.place()))
        base = VectorPlace(local, (), base.shape)
    return base.at(tuple(i if isinstance(i, Value) else Const(i, I32) for i in index))


def _axes(base: Tensor | VectorPlace, index: Sequence[object]) -> list[Any]:
    """The indices along each axis of a part of a vector or matrix."""
    return [range(*i.indices(s)) if isinstance(i, slice) else [i] for i, s in zip(index, base.shape, strict=True)]


def places(r: Recording, base: Any, index: Any) -> object:
    """``base[index]`` to be stored to: a list of places where it is a part of a vector or matrix."""
    if isinstance(base, VectorPlace) and any(isinstance(i, slice) for i in index):
        return [entry(r, base, list(i)) for i in itertools.product(*_axes(base, index_list(index)))]
    return load(r, base, index)


def attribute(r: Recording, base: Any, name: str) -> object:
    """``base.name``."""
    if isinstance(base, Record):
        if name in base.members:
            return base.members[name]
        if name in base.methods:
            return base.methods[name]
        if name == "keys":
            return list(base.members)
        raise AttributeError(f"a struct with the members {list(base.members)} has no attribute {name!r}")
    if isinstance(base, backend.AnyArray) and name == "shape":
        c = r.container(base)
        return [Size(c, axis) for axis in range(c.ndim)]
    numbers = backend.swizzle_indices(name) if isinstance(base, backend.Matrix) else None
    if numbers is not None and len(numbers) == 1:
        return _item(r, base, numbers)
    base = captured(base)
    if isinstance(base, (Tensor, VectorPlace)):
        return _tensor_attribute(r, base, name)
    if isinstance(base, Value):
        raise AttributeError(f"a scalar has no attribute {name!r}")
    return backend.native_attribute(r.context, base, name)[0]


def _tensor_attribute(r: Recording, base: Tensor | VectorPlace, name: str) -> object:
    numbers = backend.swizzle_indices(name)
    if numbers is not None:
        if len(base.shape) != 1 or max(numbers) >= base.shape[0]:
            raise AttributeError(f"a vector or matrix of shape {base.shape} has no attribute {name!r}")
        if len(numbers) == 1:
            return entry(r, base, [numbers[0]])
        return Tensor(tuple(as_value(entry(r, base, [n])) for n in numbers), (len(numbers),))
    if name in ("n", "m"):
        return (*base.shape, 1)["nm".index(name)]
    known = {"shape": base.shape, "ndim": len(base.shape)}
    if name in known:
        return known[name]
    raise AttributeError(f"a vector or matrix of shape {base.shape} has no attribute {name!r}")


def spread(_: Recording, values: object) -> object:
    """``*values`` in a call."""
    numbers = value_of(values)
    return list(numbers) if not isinstance(values, VectorPlace) else [values.at((n,)) for n in range(values.shape[0])]
