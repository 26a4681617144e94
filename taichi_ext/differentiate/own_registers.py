"""The tangents of a local by seeds that are no columns: registers, next to whatever holds its tangents by columns.

The position of a pixel and the tangents that a rule is given have no number that a row, a slot or an entry of a sparse
Jacobian could be found by. There are few of them, so each has a register of its own, whatever becomes of the columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from taichi_ext.differentiate.build import Builder, literal
from taichi_ext.differentiate.cursor import Cursor
from taichi_ext.differentiate.forms import Carried, Form, OwnSeed, Unnumbered, coefficient, unnumbered
from taichi_ext.differentiate.storage_plan import LocalPlan
from taichi_ext.program import Local, Read


class OwnRegisters:
    """The registers of one local, or arrays of them for each entry of a local array.

    Args:
        builder: where their declarations go.
        cursor: stands where the local is declared, and moves on.
        local: whose tangents they hold.
        known: what is planned for the local.
        before: registers that hold these tangents already, which a loop goes on with.
    """

    def __init__(
        self,
        builder: Builder,
        cursor: Cursor,
        local: Local,
        known: LocalPlan,
        before: OwnRegisters | None = None,
    ) -> None:
        self.local = local
        self._builder = builder
        self._cursor = cursor
        self._block = cursor.block
        self._loops = cursor.loops
        self._known = known
        self._zeros: set[Unnumbered] = set()  # whose registers hold 0, as far as the block of the declaration has come
        self.registers: dict[Unnumbered, Local] = {}
        for seed in known.facts.own:
            if before is not None and seed in before.registers:
                self.registers[seed] = before.registers[seed]
                before._zeros.discard(seed)
            else:
                self.registers[seed] = self._new(seed)
                self._zeros.add(seed)

    def _new(self, seed: Unnumbered) -> Local:
        name = f"d_{self.local.name}_by_{_name(seed)}"
        if self.local.shape:
            return self._builder.array(name, self._size, self.local.dtype)
        return self._builder.declare(name, literal(0, self.local.dtype)).local

    @property
    def _size(self) -> int:
        return math.prod(self.local.shape)

    def _register(self, seed: Unnumbered, index: Any) -> Read:
        return Read(self.registers[seed], (index,) if self.local.shape else ())

    def note(self, seeds: Iterable[Unnumbered]) -> None:
        """Seeds reach the local: they need registers."""
        self._known.require(self._known.facts.with_own(seeds))

    @property
    def own_seeds(self) -> list[OwnSeed]:
        """The seeds that reach the local, but what a loop carries."""
        return [seed for seed in self._known.facts.own if isinstance(seed, OwnSeed)]

    def forget(self, seeds: Iterable[OwnSeed]) -> None:
        """Values with these seeds are declared in a loop again: those of another iteration are dropped."""
        if self._loops == self._cursor.loops or not self._cursor.block.is_within(self._block):
            return
        for seed in seeds:
            if seed in self.registers:
                for index in range(self._size):
                    self._builder.assign(self._register(seed, index), literal(0, self.local.dtype))

    def form(self, index: Any = 0) -> Form:
        """The tangent of one element as it is now."""
        zeros = self._zeros if self._cursor.block is self._block else ()
        return {seed: self._register(seed, index) for seed in self.registers if seed not in zeros}

    def write(self, forms: list[Form], indices: list[Any]) -> None:
        """Replace the tangents of several elements; the coefficients are evaluated."""
        for form, index in zip(forms, indices, strict=True):
            own = unnumbered(form)
            self.note(own)
            if self._cursor.block is self._block and not self.local.shape:
                self._zeros.update(self.registers)
            self._zeros -= own.keys()
            for seed in self.registers:
                self._builder.assign(self._register(seed, index), coefficient(own.get(seed, 0), self.local.dtype))

    def add(self, form: Form, index: Any = 0) -> None:
        """Add to the tangent of one element; the coefficients are evaluated."""
        own = unnumbered(form)
        self.note(own)
        self._zeros -= own.keys()
        for seed, c in own.items():
            if seed in self.registers:
                self._builder.update(self._register(seed, index), coefficient(c, self.local.dtype))

    def begin(self, seed: Carried) -> None:
        """The local is what a loop carries: its tangent by itself is 1, and those that it had before go on."""
        self._builder.assign(self._register(seed, 0), 1)
        self._zeros.discard(seed)


def _name(seed: Unnumbered) -> str:
    """The name of a register for a seed, after the local."""
    return f"{seed.local.name}_{seed.entry}" if isinstance(seed, OwnSeed) and seed.local.shape else seed.local.name
