"""Tangents of locals that change: registers, slots or a row.

* *registers*: one number per seed that is visible at the local's declaration;
* *slots*: pairs of a column and a coefficient, for a few seeds known only inside (``if t < nearest: nearest = t``);
* a *row*: one number per column, where seeds add up (a sum over a loop) or are too many.

Seeds without a column have registers in addition to these. Objects that replace a storage, such as a sum with
separate columns, implement ``LocalStorage``, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from taichi_ext.differentiate.facts.facts import Declaration, PassState
from taichi_ext.differentiate.forms import forms as linear
from taichi_ext.differentiate.memory.registers import LocalSlots, OwnRegisters, Registers
from taichi_ext.differentiate.memory.rows import LocalRows, local_row
from taichi_ext.differentiate.plan.naming import Naming
from taichi_ext.differentiate.plan.storage_facts import StorageFacts
from taichi_ext.differentiate.sparse.entry_writer import RowWriter
from taichi_ext.program import Local, Statement
from taichi_ext.program.build import Index


class LocalStorage(Protocol):
    """The interface of a storage of a local's tangent."""

    declared: Declaration  # of the local
    own: OwnRegisters  # its tangents with respect to seeds without a column

    def form(self, index: Index = 0) -> linear.Form:
        """The tangent of one element as it is now."""
        ...

    def write(self, forms: list[linear.Form], indices: list[Index]) -> None:
        """Replace the tangents of several elements at once."""

    def add(self, form: linear.Form, index: Index = 0) -> None:
        """Add to the tangent of one element."""


@dataclass(eq=False)
class Storage:
    """The tangent of a local, or of each entry of a local array, in registers, slots or rows."""

    walk: PassState
    declared: Declaration  # the declaration of the local
    facts: StorageFacts  # those about the storage
    rows: LocalRows | None  # its rows, if it has some
    own: OwnRegisters  # its tangents with respect to seeds without a column
    writer: RowWriter  # the writer of what is stored besides rows
    _is_zero: bool = True

    def __post_init__(self) -> None:
        walk, facts, rows, declared, local = self.walk, self.facts, self.rows, self.declared, self.declared.local
        # registers would be in memory, too
        has_all = bool(local.shape) and rows is not None and bool(walk.numbering.all_in_rows)
        is_full = has_all or facts.is_full(walk.facts.seeds.limits.of(local))
        self.registers: Registers[linear.Seed] = Registers(walk.builder, walk.cursor, local)
        for seed in () if is_full else facts.seeds:
            self.registers.declare(seed, walk.naming.seed_name(seed))
            walk.numbering.note_owners(seed.column, facts.register_owners.get(seed, frozenset()))
            walk.naming.note_conditional(seed, declared.loops)
        owner = next(iter(facts.owners)) if len(facts.owners) == 1 else None
        self.slots = LocalSlots(walk, local, facts.slots if rows is None else 0, walk.numbering.no_column(owner))

    # --- reading

    def form(self, index: Index = 0) -> linear.Form:
        """The current tangent of one element; registers whose seeds only become visible later are still zero."""
        walk, writer, local = self.walk, self.writer, self.declared.local
        form: linear.Form = {**self.own.form(index)}
        for seed, register in self.registers.form(index).items():
            if walk.naming.is_visible(seed, walk.cursor.block) and not writer.is_later(seed.column):
                form[seed] = register
        if self.rows is not None:
            self.rows.terms.note_read()
            key = index if isinstance(index, int) else walk.facts.indices.site(index)
            form[linear.Row(local, key, self.rows, index, self.rows.version, walk.cursor.loops)] = 1
        loop = self._outer_loop()
        later = 0 if loop is None else self.facts.in_loops.get(loop, 0)  # slots that it writes
        for column, value in self.slots.held(later):
            named = walk.naming.named(walk.builder.keep(column, "column"), self.facts)
            walk.numbering.note_owners(named, self.facts.owners)
            form[linear.Seed(named)] = value
        return form

    def _outer_loop(self) -> Statement | None:
        """The outermost loop here that starts after the local."""
        inside = self.walk.cursor.loops[len(self.declared.loops) :]
        return inside[0].statement if inside else None

    # --- writing

    def _note(self, form: linear.Form, *, grows: bool) -> None:
        facts, limits = self.facts, self.walk.facts.seeds.limits.of(self.declared.local)
        is_visible = partial(self.walk.naming.is_visible, block=self.declared.block)
        facts.note_form(form, is_visible, limits, loop=self._outer_loop(), grows=grows)
        facts.own.update(dict.fromkeys(linear.unnumbered(form)))
        self.walk.numbering.note_form(facts, form, self.registers)
        columns = self.walk.numbering.all_in_rows
        if facts.why_row and self.rows is None and columns:
            # rows that are made of this one are found in the same pass; in a sparse J, it may get columns instead
            local = self.declared.local
            memory = local_row(self.walk.builder, local.name, math.prod(local.shape) * columns, local.dtype)
            self.rows = LocalRows(self.walk, self.declared, memory)

    def _in_rows(self, form: linear.Form) -> list[tuple[linear.Seed, linear.Weight]]:
        """The seeds of a form that are written to a row, and their coefficients; requires that rows can hold them."""
        since = self.walk.cursor.loops[len(self.declared.loops) :]
        return self.walk.numbering.in_rows(self._beyond_registers(form), self.declared.local, since)

    def _beyond_registers(self, form: linear.Form) -> list[tuple[linear.Seed, linear.Weight]]:
        return [(s, c) for s, c in linear.columns_of(form).items() if s not in self.registers]

    def write(self, forms: list[linear.Form], indices: list[Index]) -> None:
        """Replace the tangents of several elements at once, all read before any is written."""
        for form in forms:
            refers_to_itself = self._refers_to_itself(form)
            self._note(form, grows=refers_to_itself and self.walk.cursor.loops != self.declared.loops)
        forms = [linear.materialize(self.walk.builder, form) for form in forms]
        if self.rows is not None:
            self.rows.terms.note_write(is_zero=self._is_zero and not any(forms))
            self.rows.write(forms, indices, are_zero=self._is_zero)
            replaces = not any(map(linear.has_row, forms)) and not self.rows.keeps(forms, indices)
            for form, index in zip(forms, indices, strict=True):
                self.rows.write_terms(self._in_rows(form), index, replaces=replaces)
        self.own.write_own(forms, indices)
        for form, index in zip(forms, indices, strict=True):
            self.registers.write(linear.columns_of(form), index)
            if self.slots:
                self.slots.write(self._beyond_registers(form))
        self._note_change()

    def forget_zeros(self) -> None:
        """Assume nothing about the tangent from here on: following statements may be in a loop."""
        self._is_zero = False

    def _note_change(self) -> None:
        if self.rows is not None:
            self.rows.version += 1
        self._is_zero = False

    def _refers_to_itself(self, form: linear.Form) -> bool:
        """Whether a form refers to this storage, perhaps through others, and to other index expressions."""
        inner = [s for s in linear.columns_of(form) if not s.is_constant]
        sources = [_sources(self.walk.naming, s) for s in inner]
        self.facts.sources.update(*sources)
        own = [each for each in sources if self.declared.local in each]
        return bool(own) and len(own) < len(inner)

    def add(self, form: linear.Form, index: Index = 0) -> None:
        self._note(form, grows=self.walk.cursor.loops != self.declared.loops)
        if self.rows is None and self.slots:
            # a few index expressions, in straight-line code: keep old and new terms in separate slots
            total = dict(self.form(index))
            linear.accumulate(total, form)
            self.write([total], [index])
            return
        form = linear.materialize(self.walk.builder, form)
        columns = linear.columns_of(form)
        self.own.add_own(form, index)
        self.registers.add(columns, index)
        if self.rows is not None:
            self.rows.add(form, index, [seed for seed in columns if seed in self.registers])
            self.rows.add_terms(self._in_rows(form), index)
        self._note_change()


def _sources(naming: Naming, seed: linear.Seed) -> set[Local]:
    """The locals whose slots a column comes from, directly or through others, in this walk or an earlier one."""
    owners = [naming.owners[atom] for atom, _ in seed.column.terms if atom in naming.owners]
    return {owner.local for owner in owners}.union(*(owner.sources for owner in owners))
