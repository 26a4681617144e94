"""Where the rows of locals lie: in a local array, in scratch memory, in J."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taichi_ext.analysis.affine import Affine, atom_value
from taichi_ext.differentiate.build import Builder, add, literal
from taichi_ext.program import I32, Load, Read, Type, Value

if TYPE_CHECKING:
    from taichi_ext.differentiate.forward import Forward
    from taichi_ext.differentiate.shadows import Tangents


class LocalRow:
    """A row in a local array: the fastest to reach, slow to compile when it is long."""

    is_local = True

    def __init__(self, builder: Builder, name: str, size: int, dtype: Type) -> None:
        self.builder = builder
        self.array = builder.array(name, size, dtype)

    def entry(self, index: Any) -> Read:
        return Read(self.array, (index,))

    def add(self, index: Any, value: Value, *, is_shared: bool) -> None:
        target = self.entry(index)
        if is_shared:
            self.builder.update(target, value)
        else:
            self.builder.assign(target, add(target, value))


class ScratchRow:
    """A row in an extra argument of the kernel: a part of its own for each thread or iteration of a parallel loop."""

    is_local = False

    def __init__(self, forward: Forward, size: int, dtype: Type, *, is_filled: bool) -> None:
        self.builder = forward.builder
        self.array, start = forward.arguments.reserve_scratch(size, dtype, forward)
        self.start = self.builder.keep(start, "start") if isinstance(start, Value) else start
        if not is_filled:
            self.builder.loop(size, lambda k: self.builder.assign(self.entry(k), literal(0, dtype)))

    def entry(self, index: Any) -> Load:
        place = add(self.start, index)
        return Load(self.array, (place if isinstance(place, Value) else literal(place, I32),))

    def add(self, index: Any, value: Value, *, is_shared: bool) -> None:
        target = self.entry(index)
        if is_shared:
            self.builder.update(target, value)
        else:
            self.builder.assign(target, add(target, value))


class PlacedRow:
    """A row of J itself, which an iteration of the parallel loop over all of an output writes to as it goes."""

    is_local = False

    def __init__(self, forward: Forward, tangents: Tangents, *, is_filled: bool) -> None:
        self.builder = forward.builder
        self.tangents = tangents
        row = tangents.row_number(tuple(map(atom_value, forward.loops[0].atoms)), Affine())[1]
        self.number = self.builder.keep(row, "row")
        if not is_filled:
            zero = literal(0, tangents.container.dtype)
            self.builder.loop(forward.columns, lambda k: self.builder.assign(self.entry(k), zero))

    def entry(self, index: Any) -> Load:
        return self.tangents.place(self.number, index)

    def add(self, index: Any, value: Value, *, is_shared: bool) -> None:
        target = self.entry(index)
        self.builder.assign(target, add(target, value))
