"""Registers for a local's tangents with respect to seeds without a column, in addition to the storage of its columns.

The position of a pixel and the tangents of a rule have no number that would identify them in a row, a slot or an entry
of a sparse Jacobian. There are few of them, so each has a register, however the columns are stored.
"""

from __future__ import annotations

from collections.abc import Iterable

from taichi_ext.differentiate.facts.walk import Declaration, Walk
from taichi_ext.differentiate.forms.forms import Carried, Form, OwnSeed, Unnumbered, unnumbered
from taichi_ext.differentiate.memory.registers import Registers
from taichi_ext.differentiate.plan.storage_plan import LocalPlan
from taichi_ext.program.build import Index, literal


class OwnRegisters:
    """The registers of one local.

    Args:
        walk: the walk.
        declared: the declaration of the local.
        known: the plan for the local.
        before: existing registers of these tangents, which a loop continues.
    """

    def __init__(self, walk: Walk, declared: Declaration, known: LocalPlan, before: OwnRegisters | None = None) -> None:
        self._walk = walk
        self._declared = declared
        self._known = known
        self._registers: Registers[Unnumbered] = Registers(walk.builder, walk.cursor, declared.local)
        for seed in known.facts.own:
            if before is not None and seed in before._registers:
                self._registers.take_over(seed, before._registers)
            else:
                self._registers.declare(seed, f"by_{_name(seed)}")

    def __len__(self) -> int:
        return len(self._registers)

    def note(self, seeds: Iterable[Unnumbered]) -> None:
        """Note that seeds reach the local and need registers."""
        self._known.require(self._known.facts.with_own(seeds))

    @property
    def own_seeds(self) -> list[OwnSeed]:
        """The seeds that reach the local, without carried ones."""
        return [seed for seed in self._known.facts.own if isinstance(seed, OwnSeed)]

    def forget(self, seeds: Iterable[OwnSeed]) -> None:
        """Drop the tangents with respect to these seeds, which a loop declares again in each iteration."""
        cursor, declared = self._walk.cursor, self._declared
        if declared.loops == cursor.loops or not cursor.block.is_within(declared.block):
            return
        zero = literal(0, declared.local.dtype)
        for seed in seeds:
            if seed in self._registers:
                for index in range(self._registers.size):
                    self._walk.builder.assign(self._registers.read(seed, index), zero)

    def form(self, index: Index = 0) -> Form:
        """The current tangent of one element."""
        return {**self._registers.form(index)}

    def write(self, forms: list[Form], indices: list[Index]) -> None:
        """Replace the tangents of several elements; the coefficients are evaluated."""
        for form, index in zip(forms, indices, strict=True):
            own = unnumbered(form)
            self.note(own)
            self._registers.write(own, index)

    def add(self, form: Form, index: Index = 0) -> None:
        """Add to the tangent of one element; the coefficients are evaluated."""
        own = unnumbered(form)
        self.note(own)
        self._registers.add(own, index)

    def begin(self, seed: Carried) -> None:
        """Make the local carried by a loop: its derivative with respect to its own seed is 1; others continue."""
        self._walk.builder.assign(self._registers.read(seed), 1)
        self._registers.note_used(seed)


def _name(seed: Unnumbered) -> str:
    """The name of a register for a seed, after the local."""
    return f"{seed.local.name}_{seed.entry}" if isinstance(seed, OwnSeed) and seed.local.shape else seed.local.name
