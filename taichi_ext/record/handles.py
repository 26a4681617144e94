"""The meaning of names while a kernel is recorded: values, and places that can be stored to.

A scalar place is a value that is read: a local, or an entry of a vector, field or array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import Container, Load, Local, Read, Struct, Target, Tensor, Value
from taichi_ext.program.values import Format
from taichi_ext.record.literals import matrix_value


@dataclass(frozen=True, eq=False)
class VectorPlace:
    """A place of vector or matrix: a local, or an entry of a field or array."""

    base: Local | Container
    indices: tuple[Value, ...]
    shape: tuple[int, ...]

    def at(self, index: tuple[int | Value, ...]) -> Target:
        return Read(self.base, index) if isinstance(self.base, Local) else Load(self.base, self.indices, index)

    def cells(self) -> list[Target]:
        return [self.at(tuple(map(int, i))) for i in np.ndindex(self.shape)]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[object]:
        return iter(self.value())

    def value(self) -> Tensor:
        return Tensor(tuple(self.cells()), self.shape)


@dataclass(frozen=True, eq=False)
class Callback:
    """A user's function that code of this package calls, with further arguments to pass after the others."""

    function: Any
    args: tuple[Any, ...]
    kind: str = "pixel"


@dataclass(frozen=True, eq=False)
class Record:
    """A struct: its members, each a value or a place; ``kind`` is its type, where it has one."""

    members: dict[str, Any]
    methods: dict[str, object]
    kind: object = None

    def __getattr__(self, name: str) -> object:  # Python code that a kernel runs reads members so
        members = self.__dict__.get("members", {})
        if name in members:
            return members[name]
        raise AttributeError(f"a struct with the members {list(members)} has no attribute {name!r}")


@dataclass(frozen=True, eq=False)
class DynamicList:
    """A list of a dynamic node, ``field[i]`` where each entry is ``field[i, j]``: it is appended to, not read."""

    field: object
    container: Container
    indices: tuple[Value, ...]


HANDLES = (Value, Tensor, VectorPlace, Record, DynamicList, Format)


def value_of(x: Any) -> Any:
    """The value of a name or place, places in it included."""
    if isinstance(x, VectorPlace):
        return x.value()
    if isinstance(x, Record):
        return with_members(x, lambda _, member: value_of(member))
    if isinstance(x, (list, tuple)):
        return sequence_like(x, [value_of(e) for e in x])
    if isinstance(x, dict):
        return {k: value_of(v) for k, v in x.items()}
    if isinstance(x, backend.Matrix):
        return matrix_value(x)
    if isinstance(x, backend.Struct):
        return Record({k: value_of(backend.read_member(x, k)) for k in x.keys}, x.methods)
    if isinstance(x, backend.Expr):
        raise UnsupportedError(
            "A Taichi expression is used that was made outside of the recorded code. Compute it in the kernel, or in a "
            "@ti.func."
        )
    return x


def with_members(x: Record, change: Callable[[str, Any], object]) -> Record:
    """A struct like another one, with ``change`` applied to each member, which it takes with its name."""
    return Record({name: change(name, member) for name, member in x.members.items()}, x.methods, x.kind)


def sequence_like(x: Any, entries: Sequence[object]) -> Any:
    """A list, tuple or named tuple like another one, of other entries."""
    return type(x)(*entries) if hasattr(x, "_fields") else type(x)(entries)


def place_of_local(local: Local) -> Read | VectorPlace:
    return VectorPlace(local, (), local.shape) if local.shape else Read(local)


def shape_of(x: object) -> tuple[int, ...]:
    return x.shape if isinstance(x, (Tensor, VectorPlace)) else ()


def has_values(x: object) -> bool:
    """Whether an object contains values that are only known when the kernel runs."""
    if isinstance(x, (list, tuple)):
        return any(map(has_values, x))
    if isinstance(x, dict):
        return any(map(has_values, x.values()))
    return isinstance(x, HANDLES)


def group_of(x: object) -> Any:
    """A value as a group of a program: structs as such."""
    if isinstance(x, Record):
        return Struct({name: group_of(member) for name, member in x.members.items()}, x.kind)
    if isinstance(x, (list, tuple)):
        return tuple(map(group_of, x))
    return x


def flattened(x: object) -> Iterator[object]:
    """The entries of nested lists, vectors and matrices."""
    if isinstance(x, (list, tuple)):
        for e in x:
            yield from flattened(e)
    elif isinstance(x, np.ndarray):
        yield from x.ravel()
    elif isinstance(x, Tensor):
        yield from x.entries
    else:
        yield x
