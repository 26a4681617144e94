"""Locals whose tangents add up terms of many columns in a sparse Jacobian: each gets separate columns.

``s += w[nodes[i, k]] * x[k]`` in a loop over k has few terms in each iteration i, but their columns are all over w. A
row of all columns would be long and nearly empty. Instead, s counts as an entry of a container that has one entry for
each iteration of the loops around its declaration. The loop writes the derivatives of s with respect to w, later uses
of s write derivatives with respect to s, and the host multiplies the two, as it does for a field between two kernels.

All writes come in steps, in the order of the text, and a read of s sees all earlier steps. That is correct unless a
loop since the declaration contains both a read and a write, or two writes one of which is not a sum. In that case the
local gets a row.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from taichi_ext.analysis.affine import Affine
from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.facts.facts import Declaration, PassState
from taichi_ext.differentiate.forms.entry_sites import OPEN_ENTRIES, DenseRowsError, EntryTarget
from taichi_ext.differentiate.forms.forms import Form, columns_of, materialize, numbered
from taichi_ext.differentiate.memory.registers import OwnRegisters
from taichi_ext.differentiate.sparse.entry_writer import LAST_STEP, EntryWriter
from taichi_ext.program.build import Index
from taichi_ext.program.keys import SumKey, is_of_sum

Loops = tuple[Loop, ...]


@dataclass(frozen=True)
class _Write:
    stage: int
    step: int
    loops: Loops
    is_sum: bool


class LocalSum:
    """The tangent of a local with separate columns, in place of its storage; ``number``: of the sum in the kernel."""

    def __init__(
        self, walk: PassState, writer: EntryWriter, number: int, declared: Declaration, own: OwnRegisters
    ) -> None:
        self.declared, self.own = declared, own
        self.walk = walk
        self.writer = writer
        local = declared.local
        self._reads: list[Loops] = []
        self._writes: list[_Write] = []
        self._is_open = False  # whether a following addition belongs to the current step
        self._first = Affine()
        size, opened = self._count()
        key = SumKey(local.name, number)
        self.target = EntryTarget(key, local.name, size, local.dtype, is_columns=True, opened=opened)
        if local not in walk.plan.columns.no_sums:
            self.writer.numbering.require_columns(self.target.key, size if opened is None else OPEN_ENTRIES)

    def _count(self) -> tuple[int, int | None]:
        """The number of entries for all iterations, or for one of the open loop; and the open loop's number."""
        try:
            around = self.writer.iteration(self.declared.local.name)
        except DenseRowsError as error:
            self._give_up(str(error))
            return 1, None
        count = math.prod(axis.length for axis in around.axes)
        if around.opened is None:
            for axis in around.axes:
                self._first = self._first * axis.length + Affine(((axis.variable, 1),), -axis.first)
        else:
            number = self.walk.builder.keep(self.writer.counts.number(around), "number")
            self._first = self.walk.naming.named(number)
        self._first = self._first * math.prod(self.declared.local.shape)
        return max(1, count * math.prod(self.declared.local.shape)), around.opened

    def _give_up(self, why: str) -> None:
        """Give the local a row from the next walk on."""
        self.walk.plan.columns.give_up_sum(self.declared.local, why)

    def _entry(self, index: Index) -> Affine:
        return self._first + (Affine((), index) if isinstance(index, int) else self.walk.naming.normal(index))

    # --- reading

    def form(self, index: Index = 0) -> Form:
        """The current tangent: a separate column."""
        self._reads.append(self.walk.cursor.loops)
        self._is_open = False
        return {**self._seed(index), **self.own.form(index)}

    def _seed(self, index: Index) -> Form:
        versions = self.writer.versions(self.target.key, (self.writer.stage, LAST_STEP))
        return self.writer.numbering.seed(self.target.key, self._entry(index), self.target.size, versions)

    def check(self) -> None:
        """At the end of a walk, give the local a row if steps in the order of the text are not correct."""
        pairs = itertools.combinations(self._writes, 2)
        is_mixed = any(self._share(a.loops, b.loops) and not (a.is_sum and b.is_sum) for a, b in pairs)
        if is_mixed or any(self._share(write.loops, read) for write in self._writes for read in self._reads):
            self._give_up("a loop holds both a read and a write of it")

    def _share(self, one: Loops, other: Loops) -> bool:
        """Whether two places share a loop since the declaration."""
        deep = len(self.declared.loops)
        return len(one) > deep and len(other) > deep and one[deep] is other[deep]

    # --- writing

    def write(self, forms: list[Form], indices: list[Index]) -> None:
        """Replace the tangents of several elements at once."""
        forms = [materialize(self.walk.builder, form) for form in forms]
        self.own.write_own(forms, indices)
        forms = [numbered(form) for form in forms]
        rests = [self._without_own(f, i) for f, i in zip(forms, indices, strict=True)]
        if len(rests) == 1 and rests[0] is not None:  # s = s + t
            self._reads.pop()
            self._add_terms(rests[0], indices[0])
        elif self._writes or any(forms):
            self._emit(forms, indices, is_sum=False)

    def _without_own(self, form: Form, index: Index) -> Form | None:
        """The form added to the element; None if the element is replaced."""
        ((own, _),) = self._seed(index).items()
        if form.get(own) != 1 or not self._reads:
            return None
        return {leaf: c for leaf, c in form.items() if leaf != own}

    def add(self, form: Form, index: Index = 0) -> None:
        form = materialize(self.walk.builder, form)
        self.own.add_own(form, index)
        self._add_terms(numbered(form), index)

    def _add_terms(self, form: Form, index: Index) -> None:
        if form:
            self._emit([form], [index], is_sum=True)

    def _emit(self, forms: list[Form], indices: list[Index], *, is_sum: bool) -> None:
        step, loops = self._step(forms, is_sum=is_sum), self.walk.cursor.loops
        self._writes.append(_Write(self.writer.stage, step, loops, is_sum))
        rows = [self._entry(index) for index in indices]
        try:
            self.writer.emit(self.target, loops == self.declared.loops, rows, forms, is_sum=is_sum, step=step)
        except DenseRowsError as error:
            self._give_up(str(error))
        self._is_open = is_sum

    def _step(self, forms: list[Form], *, is_sum: bool) -> int:
        """The number of the step: that of the previous sum in the stage, unless it was read or another sum is used."""
        owners = {self.writer.numbering.owner(s.column) for form in forms for s in columns_of(form)}
        uses_sums = any(owner is None or is_of_sum(owner) for owner in owners)
        is_same = self._is_open and is_sum and not uses_sums and self._writes[-1].stage == self.writer.stage
        return self._writes[-1].step if is_same else self.writer.next_step()
