"""Fields, structs and arrays as Python sees them while the reference runs a pipeline.

A number that Python reads from a field or gets from a kernel keeps its derivative, through arithmetic and stores.  All
else is without one for Python: whole vectors and arrays, and entries of NumPy arrays and torch tensors, are read as real
parts, and stores of them clear the imaginary ones.  Pieces of arrays share their memory with the whole, as NumPy's and
torch's own do.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from program_containers import ELEMENTS
from program_functions import real
from program_reference import Array, Record

KINDS = {"ti.f32": "f", "ti.f64": "f", "tm.vec2": "v2", "tm.vec3": "v3", "tm.mat2": "m22"}


def plain(value: Any) -> Any:
    """A value for Python: without a derivative."""
    if isinstance(value, Array):
        value = value.data
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return real(value) if isinstance(value, np.ndarray) else value


class HostNumber:
    """A number of Python that has a derivative."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data.copy()

    def __float__(self) -> float:
        return float(real(self.data))

    def __gt__(self, other: Any) -> bool:
        return float(self) > float(other)


def lanes(value: Any) -> Any:
    return value.data if isinstance(value, HostNumber) else value


def on_numbers(function: Any) -> Any:
    """A function of arrays of lanes as one of numbers."""
    return lambda *args: HostNumber(function(*map(lanes, args)))


for _name in ("add", "sub", "mul", "truediv"):
    setattr(HostNumber, f"__{_name}__", on_numbers(getattr(operator, _name)))
    setattr(HostNumber, f"__r{_name}__", on_numbers(lambda b, a, f=getattr(operator, _name): f(a, b)))
MATH = {name: on_numbers(getattr(np, name)) for name in ("sin", "exp")}
MATH["fabs"] = on_numbers(lambda data: data * np.sign(data.real))


def put(data: np.ndarray, value: Any) -> None:
    """Store a number, or a constant, in memory that has lanes."""
    if isinstance(value, HostNumber):
        data[...] = value.data
        return
    value = np.asarray(plain(value))
    data[...] = value[..., None] if value.ndim else value


class HostField(Array):
    """A field or a ti.ndarray."""

    def fill(self, value: Any) -> None:
        put(self.data, value)

    def copy_from(self, other: Any) -> None:
        self.data[...] = other.data

    def from_numpy(self, value: Any) -> None:
        put(self.data, value)

    def to_numpy(self) -> np.ndarray:
        return np.array(real(self.data))

    def get_scalar_field(self, *component: int) -> HostField:
        return HostField(self.data[(*[slice(None)] * self.dims, *component)], self.dims)

    def part_at(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        return self.data[tuple(i for i in index if i is not None)]

    def __getitem__(self, index: Any) -> Any:
        found = self.part_at(index)
        return HostNumber(found) if found.ndim == 1 else HostEntry(found)

    def __setitem__(self, index: Any, value: Any) -> None:
        put(self.part_at(index), value)


class HostEntry:
    """A vector or matrix that Python got from a field: its entries are stored to where they came from."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def __getitem__(self, index: Any) -> HostNumber:
        return HostNumber(self.data[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        put(self.data[index], value)


class HostArray(HostField):
    """A NumPy array or torch tensor."""

    def __getitem__(self, index: Any) -> Any:
        found = self.data[index if isinstance(index, tuple) else (index,)]
        return float(real(found)) if found.ndim == 1 else HostArray(found, found.ndim - 1)

    def __iadd__(self, value: Any) -> HostArray:
        put(self.data, real(self.data) + np.asarray(plain(value)))
        return self

    fill_ = HostField.fill
    add_ = __iadd__

    @property
    def T(self) -> HostArray:
        axes = range(self.data.ndim - 1)
        return HostArray(self.data.transpose(*reversed(axes), len(axes)), self.dims)

    def reshape(self, *shape: int) -> HostArray:
        known = math.prod(n for n in shape if n >= 0)
        size = math.prod(self.data.shape[:-1])
        shape = tuple(size // known if n < 0 else n for n in shape)
        found = self.data.reshape(*shape, self.data.shape[-1])
        assert np.shares_memory(found, self.data)
        return HostArray(found, len(shape))

    view = reshape

    def ravel(self) -> HostArray:
        return self.reshape(-1)

    def copy(self) -> HostArray:
        return HostArray(real(self.data)[..., None] + np.zeros_like(self.data), self.dims)

    clone = copy


class Struct(Record):
    """A struct value, or the place of one: the members of a place are pieces of memory."""

    def __init__(self, members: dict[str, Any], kind: Any, is_place: bool = False) -> None:
        super().__init__(members)
        self.kind = kind
        self.is_place = is_place

    def put(self, name: str, value: Any) -> None:
        """Store a member, in memory where this is a place."""
        if not self.is_place:
            self.members[name] = value
        elif isinstance(value, Struct):
            for inner, part in value.members.items():
                self.members[name].put(inner, part)
        else:
            self.members[name][...] = value


class HostStructs:
    """A field of structs."""

    def __init__(self, members: dict[str, Any], kind: Any, dims: int) -> None:
        self.members, self.kind, self.dims = members, kind, dims
        self.__dict__.update(members)

    @property
    def v(self) -> HostStructs:
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return next(iter(self.members.values())).shape

    def place(self, index: tuple[Any, ...]) -> Struct:
        """The struct at an index, as memory."""
        members = {}
        for name, field in self.members.items():
            is_struct = isinstance(field, HostStructs)
            members[name] = field.place(index) if is_struct else field.data[(*index, ...)]
        return Struct(members, self.kind, True)

    def fill(self, value: Any) -> None:
        for field in self.members.values():
            field.fill(value)

    def copy_from(self, other: HostStructs) -> None:
        for name, field in self.members.items():
            field.copy_from(other.members[name])

    def __getitem__(self, index: Any) -> HostMembers:
        return HostMembers(self.place(index if isinstance(index, tuple) else (index,)))


class HostMembers:
    """A struct that Python got from a field: its members are stored to where they came from."""

    def __init__(self, place: Struct) -> None:
        self.__dict__["place"] = place

    def __getattr__(self, name: str) -> Any:
        found = self.place.members[name]
        return HostMembers(found) if isinstance(found, Struct) else np.array(real(found))

    def __setattr__(self, name: str, value: Any) -> None:
        put(self.place.members[name], value)


class StructType:
    """A model of a ``ti.dataclass``: members by name, and methods."""

    def __init__(self, reference: Any, members: dict[str, Any], methods: dict[str, Any]) -> None:
        self.reference, self.members, self.methods = reference, members, methods

    def __call__(self, *args: Any, **named: Any) -> Struct:
        given = {**dict(zip(self.members, args, strict=False)), **named}
        values = {}
        for name, kind in self.members.items():
            default = (
                kind() if isinstance(kind, StructType) else np.zeros((*ELEMENTS[kind], self.reference.lanes), complex)
            )
            values[name] = self.reference.copy(given.get(name, default))
        return Struct(values, self)

    def field(self, shape: Any) -> HostStructs:
        shape = shape if isinstance(shape, tuple) else (shape,)
        members = {}
        for name, kind in self.members.items():
            is_struct = isinstance(kind, StructType)
            members[name] = kind.field(shape) if is_struct else self.reference.zeros(HostField, shape, ELEMENTS[kind])
        return HostStructs(members, self, len(shape))
