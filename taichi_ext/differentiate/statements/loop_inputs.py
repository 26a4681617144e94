"""Sums that a loop adds to, by way of values from before the loop.

A loop may add multiples of a local h to a sum, where the tangent of h is a row or has several columns. Then it adds up
the factors of h, one number for each sum, and behind the loop their product with the tangent of h is added to that of
the sum, which is not touched in each iteration. So a layer of a network costs as much as in reverse mode::

    for j in range(8):                    for j in range(8):
        z = 0.0                               ...
        for k in ti.static(range(8)):         d_y_h_0 += v[j] * (1 - t * t) * w[j, 0]
            z += w[j, k] * h[k]               ...
        y += v[j] * ti.tanh(z)            d_y[...] += d_y_h_0 * ...  # the tangent of h[0]

This requires that the loop changes no tangents but those of its own locals and of sums that it does not read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import taichi_ext.program as ir
from taichi_ext.differentiate.facts.facts import Declaration, PassState
from taichi_ext.differentiate.forms import forms as linear
from taichi_ext.differentiate.memory.registers import OwnRegisters
from taichi_ext.differentiate.plan.storage_plan import StorageKey
from taichi_ext.differentiate.statements.reverse_loops import is_closed, only_added
from taichi_ext.differentiate.storage.storage import LocalStorage, Storage
from taichi_ext.differentiate.storage.storages import LocalForms, Storages
from taichi_ext.program.build import Index

LEAST_COLUMNS = 8  # with fewer, tangents are added as soon as their factors
MOST_FACTORS = 64  # numbers of one loop


class Factors:
    """The tangent of a sum within a loop, in place of its storage: by inputs of the loop, in registers of its own."""

    def __init__(self, storage: LocalStorage, factors: OwnRegisters, inputs: Collection[ir.Local]) -> None:
        self.storage, self.factors, self.inputs = storage, factors, inputs
        self.declared: Declaration = storage.declared
        self.own = storage.own

    def form(self, index: Index = 0) -> linear.Form:
        return {**self.storage.form(index), **self.factors.form()}

    def write(self, forms: list[linear.Form], indices: list[Index]) -> None:
        raise AssertionError("the loop only adds to its sums")

    def add(self, form: linear.Form, index: Index = 0) -> None:
        mine: linear.Form = {x: c for x, c in form.items() if isinstance(x, linear.Input) and x.local in self.inputs}
        self.factors.add_own(mine)
        self.storage.add({x: c for x, c in form.items() if x not in mine}, index)


@dataclass(frozen=True)
class Inside:
    """A loop whose inputs have factors: their tangents, and the sums."""

    inputs: dict[ir.Local, linear.Form]
    sums: dict[ir.Local, Factors]


@dataclass(frozen=True)
class LoopInputs:
    """The inputs of the loops of one walk."""

    walk: PassState
    storages: Storages
    forms: LocalForms

    def begin(self, s: ir.For | ir.While) -> Inside | None:
        """Declare the factors in front of a loop; None for a loop without."""
        sums = self._sums(s)
        inputs = self._inputs(s) if sums else {}
        if not inputs or len(inputs) * len(sums) > MOST_FACTORS:
            return None
        found: dict[ir.Local, Factors] = {}
        for local in sums:
            key = StorageKey(local, s, is_before=True)
            factors = OwnRegisters(self.walk, self.walk.declaration(local), self.walk.plan.facts(key))
            found[local] = self.storages.by_local[local] = Factors(self.storages.by_local[local], factors, inputs)
        self.forms.inputs.update(inputs)
        return Inside(inputs, found)

    def end(self, inside: Inside | None) -> None:
        """Add the tangents of the inputs behind the loop."""
        if inside is None:
            return
        self.forms.inputs.difference_update(inside.inputs)
        for local, factors in inside.sums.items():
            self.storages.by_local[local] = factors.storage
            total: linear.Form = {}
            for seed, factor in factors.factors.form().items():
                assert isinstance(factor, ir.Read)
                linear.accumulate(total, linear.where_nonzero(factor, inside.inputs[seed.local]))
            if total:
                factors.storage.add(linear.materialize(self.walk.builder, total))

    def _sums(self, s: ir.For | ir.While) -> tuple[ir.Local, ...]:
        """The numbers that a loop adds to; none where it changes other tangents, or reads a sum."""
        facts, loop = self.walk.facts, self.walk.facts.loops[s]
        is_wanted = not loop.is_parallel and s not in self.walk.plan.forward and self._is_wanted()
        if not is_wanted or not is_closed(s, facts):
            return ()
        changed = tuple(local for local in self.storages.by_local if local in loop.changes)
        is_added = only_added(s, changed).issuperset(changed) and not any(v.shape for v in changed)
        is_stored = all(isinstance(self.storages.by_local[v], (Storage, Factors)) for v in changed)
        return changed if is_added and is_stored and s.contents.locals.isdisjoint(changed) else ()

    def _is_wanted(self) -> bool:
        """Whether J is dense, and has enough columns."""
        seeds = self.walk.facts.seeds
        return seeds.values is None and not seeds.use.is_again and self.walk.numbering.all_in_rows >= LEAST_COLUMNS

    def _inputs(self, s: ir.For | ir.While) -> dict[ir.Local, linear.Form]:
        """The numbers from before a loop that it reads, with tangents of more than one term."""
        changes = self.walk.facts.loops[s].changes
        read = {local for x in s.within for local in x.contents.locals}
        result: dict[ir.Local, linear.Form] = {}
        for local in (*self.forms.forms, *self.storages.by_local):
            if local in read and local not in changes and not local.shape:
                form = self.forms.form(ir.Read(local))
                is_kept = not any(linear.is_row(leaf) and leaf.source in changes for leaf in form)
                if is_kept and (len(form) > 1 or linear.has_row(form)):
                    result[local] = form
        return result
