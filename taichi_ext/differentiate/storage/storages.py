"""The storages of the locals of one walk: the kind of each, and the memory of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from taichi_ext.analysis.affine import atom_value
from taichi_ext.differentiate.facts.arguments import ShadowMatrix
from taichi_ext.differentiate.facts.walk import Walk
from taichi_ext.differentiate.forms.cursor import RowSources
from taichi_ext.differentiate.forms.forms import OwnSeed
from taichi_ext.differentiate.memory.own_registers import OwnRegisters
from taichi_ext.differentiate.memory.rows import RowMemory, Rows, local_row, placed_row, scratch_part, scratch_row
from taichi_ext.differentiate.plan.report import LOCAL_ARRAY, SCRATCH, LocalChoice, line_of
from taichi_ext.differentiate.plan.row_terms import FILLED, Terms
from taichi_ext.differentiate.plan.storage_plan import LocalPlan, StorageKey
from taichi_ext.differentiate.sparse.entry_writer import EntryWriter
from taichi_ext.differentiate.sparse.sparse_sums import LocalSum
from taichi_ext.differentiate.storage.energy_gradient import EnergyGradient, EnergyPart
from taichi_ext.differentiate.storage.storage import LocalStorage, Storage
from taichi_ext.program import Container, Local, declared, statements

MOST_IN_ROWS = 16  # with at most so many columns, a local whose form would have several rows gets a row


@dataclass(frozen=True)
class Storages:
    """The storages by local.

    Attributes:
        walk: the walk.
        sources: the owners of rows, to which each storage is added.
        writer: the writer of a sparse Jacobian's entries.
        matrices: the tangents of containers, which may contain rows.
        gradient: of an energy, if that is added up.
    """

    walk: Walk
    sources: RowSources
    writer: EntryWriter | None
    matrices: Mapping[Container, ShadowMatrix]
    gradient: EnergyGradient | None
    by_local: dict[Local, LocalStorage] = field(default_factory=dict)

    def put(self, local: Local, storage: LocalStorage) -> None:
        """Set the storage of a local from here on."""
        self.by_local[local] = storage
        self.sources.add(local, storage)

    def begin(self, local: Local) -> LocalStorage:
        """Create the storage of a local that is declared here."""
        walk, plan = self.walk, self.walk.plan
        key = plan.key(local)
        number = plan.columns.sums.get(local)
        is_part = self.gradient is not None and local in self.gradient.sums.weights
        if number is None and not is_part:
            return self.begin_with(local, key)
        declared = walk.declaration(local)
        own = OwnRegisters(walk, declared, LocalPlan(plan, key))
        if self.gradient is not None and is_part:
            self.put(local, EnergyPart(self.gradient, declared, own))
        elif self.writer is not None and number is not None:
            self.put(local, LocalSum(walk, self.writer, declared, number, own))
        return self.by_local[local]

    def begin_with(self, local: Local, key: StorageKey, before: OwnRegisters | None = None) -> Storage:
        """Create the storage planned under a key; ``before``: existing registers of its own seeds."""
        walk, known = self.walk, LocalPlan(self.walk.plan, key)
        declared, facts = walk.declaration(local), known.facts
        has_rows = facts.has_row or (local.shape and facts.slots)
        rows = Rows(walk, declared, self._memory(local)) if has_rows else None
        own = OwnRegisters(walk, declared, known, before)
        storage = Storage(walk, declared, known, rows, own, self.writer)
        self.put(local, storage)
        return storage

    def forget(self, seeds: Iterable[OwnSeed]) -> None:
        """Drop tangents with respect to seeds whose values are declared again."""
        for storage in self.by_local.values():
            storage.own.forget(seeds)

    def check_sums(self) -> None:
        """At the end of a walk, check the locals with separate columns."""
        for storage in self.by_local.values():
            if isinstance(storage, LocalSum):
                storage.check()

    def rows(self) -> dict[Local, tuple[Terms, int]]:
        """For each local with a row, its terms and the number of its changes."""
        stored = {local: s for local, s in self.by_local.items() if isinstance(s, Storage)}
        return {local: (s.rows.terms, s.version) for local, s in stored.items() if s.rows is not None}

    def choices(self) -> tuple[LocalChoice, ...]:
        """The storage of the tangents of locals, with reasons, for reports."""
        places = {local: s.place for s in statements(self.walk.facts.program.body) for local in declared(s)}
        places |= {local: storage.declared.place for local, storage in self.by_local.items()}
        found = []
        for local, place in places.items():
            choice = LocalChoice(local.name, line_of(place), notes=self._notes(local))
            storage = self.by_local.get(local)
            if storage is not None:
                choice = replace(choice, registers=len(storage.own), why="it changes")
            if isinstance(storage, Storage):
                choice = self._choice(choice, storage)
            if choice.registers or choice.slots or choice.row is not None or choice.notes:
                found.append(choice)
        return tuple(found)

    def _choice(self, choice: LocalChoice, storage: Storage) -> LocalChoice:
        plan, local = self.walk.plan, storage.declared.local
        registers, why = choice.registers + len(storage.registers), plan.indexed.get(local) or choice.why
        choice = replace(choice, registers=registers, slots=len(storage.slots), why=why)
        if storage.rows is None:
            return choice
        decision = plan.row(local)
        row = decision.container or (LOCAL_ARRAY if storage.rows.memory.is_local else SCRATCH)
        why = plan.own_rows.get(local) or storage.known.facts.why_row
        return replace(choice, row=row, terms=decision.terms, why=why)

    def _notes(self, local: Local) -> tuple[str, ...]:
        """Other decisions about a local, with their reasons."""
        plan, notes = self.walk.plan, []
        if local in plan.accumulated and local.kind != "temporary":  # those of users' functions
            notes.append(f"its tangent is computed where it is declared, since {plan.accumulated[local]}")
        if local in plan.columns.sums:
            notes.append("columns of its own in place of all columns")
        elif local in plan.columns.no_sums:
            reason = plan.columns.no_sums[local].splitlines()[-1].rstrip(".")
            notes.append(f"no columns of its own, since {reason}")
        return tuple(notes)

    def with_rows(self, local: Local | Container) -> Storage | None:
        """The storage of a local that has rows; None for all others."""
        storage = self.by_local.get(local) if isinstance(local, Local) else None
        return storage if isinstance(storage, Storage) and storage.rows is not None else None

    def _memory(self, local: Local) -> RowMemory:
        """Memory for the rows of a local's entries."""
        walk, decision = self.walk, self.walk.plan.row(local)
        builder, facts = walk.builder, walk.facts
        is_filled = decision.terms == FILLED
        if decision.container is not None:
            matrix, extent = self.matrices[decision.container], facts.seeds.extents[decision.container]
            number = walk.naming.entry_number(extent, map(atom_value, walk.cursor.loops[0].atoms))
            value = walk.naming.value_of(number)
            return placed_row(builder, value, matrix, is_filled=is_filled)
        size = math.prod(local.shape) * facts.columns
        is_shared = walk.cursor.block.is_kernel and size > MOST_IN_ROWS  # shared by loops, so in memory in any case
        if size <= facts.seeds.limits.local_array and not is_shared:
            return local_row(builder, f"d_{local.name}", size, local.dtype)
        part = scratch_part(walk, size, local.dtype)
        return scratch_row(builder, walk.arguments, size, local.dtype, part, is_filled=is_filled)
