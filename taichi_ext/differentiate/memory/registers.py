"""Registers: local variables that hold the coefficients of seeds.

For ``t = x[0]; if c: t = x[1] * x[1]`` with the parameter x, the local t has two: ``d_t_x_0`` and ``d_t_x_1``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Generic, TypeVar

from taichi_ext.differentiate.forms.build import Builder, Index, literal
from taichi_ext.differentiate.forms.cursor import Cursor
from taichi_ext.differentiate.forms.forms import Carried, OwnSeed, Seed, Weight, coefficient
from taichi_ext.program import Local, Read

S = TypeVar("S", bound=Seed | OwnSeed | Carried)


class Registers(Generic[S]):
    """The registers of one local, or arrays of them for each entry of a local array.

    Args:
        builder: the builder of their declarations.
        cursor: the place of the walk, first at the local's declaration.
        local: the local whose tangents they hold.
    """

    def __init__(self, builder: Builder, cursor: Cursor, local: Local) -> None:
        self.local = local
        self._builder = builder
        self._cursor = cursor
        self._block = cursor.block
        self._by_seed: dict[S, Local] = {}
        self._zeros: set[S] = set()  # seeds whose registers hold 0 so far in the declaration's block

    def __contains__(self, seed: object) -> bool:
        return seed in self._by_seed

    def __len__(self) -> int:
        return len(self._by_seed)

    @property
    def size(self) -> int:
        """The number of entries of the local."""
        return math.prod(self.local.shape)

    def declare(self, seed: S, name: str) -> None:
        """Declare a register with value 0."""
        name, dtype = f"d_{self.local.name}_{name}", self.local.dtype
        is_array = bool(self.local.shape)
        builder = self._builder
        new = builder.array(name, self.size, dtype) if is_array else builder.declare(name, literal(0, dtype)).local
        self._by_seed[seed] = new
        self._zeros.add(seed)

    def take_over(self, seed: S, other: Registers[S]) -> None:
        """Use the register of a seed from other registers."""
        self._by_seed[seed] = other._by_seed[seed]
        other.note_used(seed)

    def note_used(self, seed: S) -> None:
        """Note that other code writes the register of a seed."""
        self._zeros.discard(seed)

    def read(self, seed: S, index: Index = 0) -> Read:
        """The register of a seed."""
        return Read(self._by_seed[seed], (index,) if self.local.shape else ())

    def form(self, index: Index = 0) -> dict[S, Weight]:
        """The coefficients of one entry, except those known to be 0."""
        zeros = self._zeros if self._cursor.block is self._block else ()
        return {seed: self.read(seed, index) for seed in self._by_seed if seed not in zeros}

    def write(self, coefficients: Mapping[S, Weight], index: Index) -> None:
        """Replace the coefficients of one entry; missing ones are set to 0."""
        if self._cursor.block is self._block and not self.local.shape:
            self._zeros.update(self._by_seed)
        self._zeros -= coefficients.keys()
        for seed in self._by_seed:
            value = coefficient(coefficients.get(seed, 0), self.local.dtype)
            self._builder.assign(self.read(seed, index), value)

    def add(self, coefficients: Mapping[S, Weight], index: Index) -> None:
        """Add to the coefficients of one entry."""
        self._zeros -= coefficients.keys()
        for seed, c in coefficients.items():
            if seed in self._by_seed:
                self._builder.update(self.read(seed, index), coefficient(c, self.local.dtype))
