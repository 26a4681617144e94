"""The tangents of locals: deferred ones, forms, storages; and how they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.facts.guards import clamped, is_inside, where
from taichi_ext.differentiate.facts.walk import Walk
from taichi_ext.differentiate.forms.cursor import Block, RowSources
from taichi_ext.differentiate.forms.forms import Form, Input, OwnSeed, Row, is_row
from taichi_ext.differentiate.storage.storages import Storages
from taichi_ext.program import I32, Local, Read, Value
from taichi_ext.program.build import Coefficient, Index, add, cast, multiply


@dataclass(eq=False)
class Deferred:
    """A local that is used once: its tangent is accumulated at the use, from the partials kept here."""

    local: Local
    root: Value  # its definition
    loops: tuple[Loop, ...]  # around its definition
    sweep: int = 0


class LocalForms:
    """The tangents of the locals of one walk.

    Attributes:
        definitions: the first values of locals that do not change.
        deferred: locals whose tangent is deferred to their use.
        forms: the tangents of other numbers that do not change.
        entry_forms: the tangents of vectors and matrices that do not change.
        inputs: numbers from before a loop, while that adds up their factors.
        roots: for each ``sqrt_edge``, the level, the block in which it is visible, and its motion in a divided pixel.
    """

    def __init__(self, walk: Walk, storages: Storages, sources: RowSources) -> None:
        self._walk = walk
        self._storages = storages
        self._sources = sources
        self.definitions: dict[Local, Value] = {}
        self.deferred: dict[Local, Deferred] = {}
        self.forms: dict[Local, Form] = {}
        self.entry_forms: dict[Local, list[Form]] = {}
        self.inputs: set[Local] = set()
        self.roots: dict[OwnSeed, tuple[Value, Block, Any]] = {}

    def form(self, value: Read) -> Form:
        """The tangent of a local, or of one of its entries."""
        local = value.local
        if local in self.inputs:
            return {Input(local): 1}
        if local in self._storages.by_local and value.checks:
            return self._guarded(value)
        if local in self._storages.by_local:
            return self._storages.by_local[local].form(self.flat_index(value))
        if local in self.entry_forms:
            index = self.flat_index(value)
            if isinstance(index, int):
                return self._fresh(self.entry_forms[local][index], local)
            self._walk.plan.indexed.note(local, "its entries are read by an index that is known at run time")
            return {}
        return self._fresh(self.forms.get(local, {}), local)

    def _guarded(self, value: Read) -> Form:
        """The tangent of an entry whose index may be out of range."""
        condition = is_inside(self._walk.naming, value)
        if condition is False:
            return {}
        index = self._walk.builder.keep(clamped(condition, cast(self.flat_index(value), I32)), "index")
        return where(condition, self._storages.by_local[value.local].form(index), value.dtype)

    def _fresh(self, form: Form, local: Local) -> Form:
        """The form of a local, or of one of its entries, with rows that have not changed since it was computed."""
        for leaf in form:
            if is_row(leaf):
                self._check_fresh(leaf, local)
        return form

    def flat_index(self, value: Read) -> Index:
        """The number of an entry of a local."""
        if not value.index:
            return 0
        flat: Coefficient = 0
        for i, n in zip(value.index, value.local.shape, strict=True):
            i = i if isinstance(i, int) else self._walk.naming.settled_index(i)
            flat = add(multiply(flat, n), i)
        if isinstance(flat, Value):
            affine = self._walk.facts.indices.form(flat)
            return self._walk.builder.keep(flat, "index") if affine is None else self._walk.naming.value_of(affine)
        return int(flat)

    def _check_fresh(self, leaf: Row, local: Local) -> None:
        """If a row may have changed since it became part of a local's form, require a separate row for the local."""
        if self._sources.is_stale(leaf):
            self._walk.plan.own_rows.note(local, "a local that it is made of changes while it is used")

    def note_sweep(self, deferred: Deferred, sweep: int) -> None:
        """Note that an accumulation uses a local with a deferred tangent."""
        is_repeated = deferred.loops != self._walk.cursor.loops
        is_second = is_repeated or (deferred.sweep and deferred.sweep != sweep)
        if is_second:
            why = "it is used in an inner loop" if is_repeated else "it is used more than once"
            self._walk.plan.accumulated.note(deferred.local, why)
        deferred.sweep = sweep

    def with_own(self, local: Local, forms: list[Form]) -> list[Form]:
        """The forms of the entries of a local, with its own seeds."""
        own = self._walk.facts.own_seeds.get(local)
        if own is None:
            return forms
        return [{**form, own[n]: 1} if n in own else form for n, form in enumerate(forms)]

    def set_entries(self, local: Local, forms: list[Form]) -> None:
        """Set the tangents of the entries of a vector or matrix that does not change."""
        forms = self.with_own(local, forms)
        if local in self._walk.plan.indexed or local in self._walk.plan.own_rows:
            self._storages.begin(local).write(forms, list(range(len(forms))))
        else:
            self.entry_forms[local] = forms
