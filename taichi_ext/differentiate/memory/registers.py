"""Registers and slots: local variables that hold coefficients.

For ``t = x[0]; if c: t = x[1] * x[1]`` with the parameter x, t has two registers: ``d_t_x_0`` and ``d_t_x_1``.
Slots are pairs of a column and a coefficient, for seeds that are only known inside of branches and loops:
``if x[n] < t: t = x[n]`` in a loop over n has one, ``column_0 = n`` and ``d_t_0 = 1``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from taichi_ext.differentiate.facts.facts import Declaration, PassState
from taichi_ext.differentiate.forms import forms as linear
from taichi_ext.differentiate.plan.storage_facts import StorageFacts
from taichi_ext.program import I32, Local, Read
from taichi_ext.program.build import Builder, Index, literal

S = TypeVar("S", bound=linear.Seed | linear.LocalSeed | linear.Carried)


class Registers(Generic[S]):
    """The registers of one local, or arrays of them for each entry of a local array."""

    def __init__(self, builder: Builder, cursor: linear.Cursor, local: Local) -> None:
        self.local, self.size = local, math.prod(local.shape)
        self._builder = builder
        self._cursor = cursor  # now at the local's declaration
        self._block = cursor.block
        self._by_seed: dict[S, Local] = {}
        self._zeros: set[S] = set()  # seeds whose registers hold 0 so far in the declaration's block

    def __contains__(self, seed: object) -> bool:
        return seed in self._by_seed

    def __len__(self) -> int:
        return len(self._by_seed)

    def declare(self, seed: S, name: str) -> None:
        name, dtype = f"d_{self.local.name}_{name}", self.local.dtype
        is_array = bool(self.local.shape)
        builder = self._builder
        new = builder.array(name, self.size, dtype) if is_array else builder.declare(name, literal(0, dtype)).local
        self._by_seed[seed] = new
        self._zeros.add(seed)

    def take_over(self, seed: S, other: Registers[S]) -> None:
        self._by_seed[seed] = other._by_seed[seed]
        other.note_used(seed)

    def note_used(self, seed: S) -> None:
        """Note that other code writes the register of a seed."""
        self._zeros.discard(seed)

    def read(self, seed: S, index: Index = 0) -> Read:
        return Read(self._by_seed[seed], (index,) if self.local.shape else ())

    def form(self, index: Index = 0) -> dict[S, linear.Weight]:
        """The coefficients of one entry, except those known to be 0."""
        zeros = self._zeros if self._cursor.block is self._block else ()
        return {seed: self.read(seed, index) for seed in self._by_seed if seed not in zeros}

    def write(self, coefficients: Mapping[S, linear.Weight], index: Index) -> None:
        """Replace the coefficients of one entry; missing ones are set to 0."""
        if self._cursor.block is self._block and not self.local.shape:
            self._zeros.update(self._by_seed)
        self._zeros -= coefficients.keys()
        for seed in self._by_seed:
            value = linear.coefficient(coefficients.get(seed, 0), self.local.dtype)
            self._builder.assign(self.read(seed, index), value)

    def add(self, coefficients: Mapping[S, linear.Weight], index: Index) -> None:
        self._zeros -= coefficients.keys()
        for seed, c in coefficients.items():
            if seed in self._by_seed:
                self._builder.update(self.read(seed, index), linear.coefficient(c, self.local.dtype))


class LocalSlots:
    """The slots of one local, ``count`` of them; ``no_column`` is the number in one without a column."""

    def __init__(self, walk: PassState, local: Local, count: int, no_column: int) -> None:
        self._walk = walk
        self._no_column = literal(no_column, I32)
        self._zero = literal(0, local.dtype)
        self._pairs: list[tuple[Read, Read]] = []
        self._used = 0  # number of slots that may be filled so far
        for n in range(count):
            column = walk.builder.declare(f"column_{n}", self._no_column)
            self._pairs.append((column, walk.builder.declare(f"d_{local.name}_{n}", self._zero)))

    def __len__(self) -> int:
        return len(self._pairs)

    def held(self, later: int) -> list[tuple[Read, Read]]:
        """The slots that may be filled, including ``later`` ones that a loop around this place writes."""
        return self._pairs[: max(self._used, later)]

    def write(self, terms: list[tuple[linear.Seed, linear.Weight]]) -> None:
        """Replace the contents of the slots."""
        builder = self._walk.builder
        terms = terms[: len(self._pairs)]
        self._used = max(self._used, len(terms))
        columns = [builder.keep(self._walk.naming.column(seed)) for seed, _ in terms]
        for n, (column, value) in enumerate(self._pairs):
            if n < len(terms):
                builder.assign(column, columns[n])
                builder.assign(value, linear.coefficient(terms[n][1], self._zero.dtype))
                continue
            if self._walk.numbering.frees_slots:
                builder.assign(column, self._no_column)
            builder.assign(value, self._zero)


# Registers for a local's tangents with respect to seeds without a column, in addition to the storage of its columns.
#
# The position of a pixel and the tangents of a rule have no number that would identify them in a row, a slot or an
# entry of a sparse Jacobian. There are few of them, so each has a register, however the columns are stored.


class OwnRegisters(Registers[linear.Unnumbered]):
    """The registers of one local; ``before`` are existing ones of these tangents, which a loop continues."""

    def __init__(
        self, walk: PassState, declared: Declaration, facts: StorageFacts, before: OwnRegisters | None = None
    ) -> None:
        super().__init__(walk.builder, walk.cursor, declared.local)
        self._declared = declared
        self._facts = facts
        for seed in facts.own:
            if before is not None and seed in before:
                self.take_over(seed, before)
            else:
                self.declare(seed, f"by_{_name(seed)}")

    def note(self, seeds: Iterable[linear.Unnumbered]) -> None:
        """Note that seeds reach the local and need registers."""
        self._facts.own.update(dict.fromkeys(seeds))

    @property
    def own_seeds(self) -> list[linear.LocalSeed]:
        """The seeds that reach the local, without carried ones."""
        return [seed for seed in self._facts.own if isinstance(seed, linear.LocalSeed)]

    def forget(self, seeds: Iterable[linear.LocalSeed]) -> None:
        """Drop the tangents with respect to these seeds, which a loop declares again in each iteration."""
        cursor, declared = self._cursor, self._declared
        if declared.loops == cursor.loops or not cursor.block.is_within(declared.block):
            return
        zero = literal(0, declared.local.dtype)
        for seed in seeds:
            if seed in self:
                for index in range(self.size):
                    self._builder.assign(self.read(seed, index), zero)

    def write_own(self, forms: list[linear.Form], indices: list[Index]) -> None:
        """Replace the tangents of several elements; the coefficients are evaluated."""
        for form, index in zip(forms, indices, strict=True):
            own = linear.unnumbered(form)
            self.note(own)
            self.write(own, index)

    def add_own(self, form: linear.Form, index: Index = 0) -> None:
        """Add to the tangent of one element; the coefficients are evaluated."""
        own = linear.unnumbered(form)
        self.note(own)
        self.add(own, index)

    def begin(self, seed: linear.Carried) -> None:
        """Make the local carried by a loop: its derivative with respect to its own seed is 1; others continue."""
        self._builder.assign(self.read(seed), 1)
        self.note_used(seed)


def _name(seed: linear.Unnumbered) -> str:
    """The name of a register for a seed, after the local."""
    return seed.local.name + (f"_{seed.entry}" if isinstance(seed, linear.LocalSeed) and seed.local.shape else "")
