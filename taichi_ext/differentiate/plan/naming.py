"""Columns and indices by name: integer locals that do not change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from taichi_ext.analysis.affine import Affine, Atom, IntegerForms, VectorEntry, source_of, value_of
from taichi_ext.analysis.loops import Extent, Loop, span
from taichi_ext.differentiate.forms.forms import Form, Scope, Seed, columns_of
from taichi_ext.differentiate.plan.sparse_numbering import RowNumbering
from taichi_ext.differentiate.plan.storage_facts import StorageFacts
from taichi_ext.program import Const, FoldedConst, Local, Read, Value
from taichi_ext.program.build import Coefficient, operation


@dataclass(frozen=True)
class Naming:
    """The names of columns in one walk."""

    indices: IntegerForms  # the normal forms of indices
    parameters: Mapping[str, tuple[int, int]]  # the first columns and sizes of parameters by name
    numbering: RowNumbering  # the columns of the walk
    # facts about the local that a column was read from, if it was in a slot
    owners: dict[Atom, StorageFacts] = field(default_factory=dict)
    conditional: set[Seed] = field(default_factory=set)  # seeds that may be out of range, with a coefficient of 0 then

    def named(self, column: Coefficient, owner: StorageFacts | None = None) -> Affine:
        """A column held by a local, as a normal form."""
        if isinstance(column, Read):
            if owner is not None:
                self.owners[column.local] = owner
            return self.normal(column)
        number = column.constant if isinstance(column, FoldedConst) else column
        value = number.value if isinstance(number, Const) else number
        assert not isinstance(value, Value)  # a kept value is a local or a number
        return Affine((), int(value))

    def normal(self, index: Value | int) -> Affine:
        """An index in normal form: those of entries with tangents, and the columns of slots, all have one."""
        form = self.indices.form(index)
        assert form is not None
        return form

    def flat(self, index: tuple[Value | int, ...], shape: tuple[int, ...]) -> Affine:
        """The number of an entry, or of a part of one, in C order."""
        total = Affine()
        for i, n in zip(index, shape, strict=True):
            total = total * n + self.normal(i)
        return total

    def entry_number(self, extent: Extent, indices: Iterable[Value | int]) -> Affine:
        """The number of an entry among those of a container, in C order."""
        affine = Affine()
        for index, (first, end) in zip(indices, extent.bounds, strict=True):
            affine = affine * (end - first) + self.normal(index) + Affine((), -first)
        return affine

    def column(self, seed: Seed) -> Value:
        """The number of a seed's column, kept in range even for a condition that does not hold."""
        return self.column_within(seed, 0, self.numbering.width)

    def column_within(self, seed: Seed, first: int, size: int) -> Value:
        """A seed's column, counted from ``first`` and kept within the ``size`` columns from there."""
        number = value_of(seed.column + Affine((), -first))
        if seed not in self.conditional or not self.numbering.is_in_rows(seed.column):
            return number
        return operation("max", 0, operation("min", number, size - 1))

    def note_conditional(self, seed: Seed, loops: Iterable[Loop]) -> None:
        """Note a column that a condition may guard: if that does not hold, the column may be out of range."""
        if seed.is_constant:
            return
        if not self.numbering.is_within(span(seed.column, loops)):
            self.conditional.add(seed)

    def note_guarded(self, form: Form) -> None:
        """Note the columns of a form, which may be out of range, with a coefficient of 0 then."""
        self.conditional.update(seed for seed in columns_of(form) if not seed.is_constant)

    def is_visible(self, seed: Seed, block: Scope) -> bool:
        return all(block.can_name(source_of(atom)) for atom, _ in seed.column.terms)

    def seed_name(self, seed: Seed) -> str:
        """The name of a register for a seed, after the parameter."""
        if seed.is_constant:
            for name, (first, size) in self.parameters.items():
                number = seed.column.constant - first
                if 0 <= number < size:
                    return f"{name}_{number}" if size > 1 else name
            return str(seed.column.constant)
        atoms = [a for a, _ in seed.column.terms]
        locals_ = [a.local if isinstance(a, VectorEntry) else a for a in atoms]
        names = [a.name for a in locals_ if isinstance(a, Local)]
        return "_".join([*names, str(seed.column.constant)])
