"""Facts about the tangents that reach a local, and the limits of registers, slots and rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from taichi_ext.differentiate.forms.forms import Form, Seed, Unnumbered, columns_of, has_row
from taichi_ext.program import Local, Statement
from taichi_ext.program.keys import Key

MAX_LOCAL_ARRAY = 512
_REGISTERS = 24
SHORTEST_ROW = 8  # least columns for which rows are worth their loops in kernels of many statements
MOST_GROWTHS = 8  # most passes in which slots grow: a local that gets slots in each pass would never end


@dataclass(frozen=True)
class StorageLimits:
    """Limits on the coefficients of a stored tangent, beyond which it becomes a row; limits on rows."""

    registers: int = _REGISTERS
    next_to_row: int = 8  # registers in addition to a row; each use costs a loop over columns, and a line each
    slots: int = 8
    local_array: int = MAX_LOCAL_ARRAY  # longer rows are in scratch memory
    statements: int = 1500  # of a kernel with tangents; each register adds one wherever its local occurs

    def within(self, statements: int, columns: int) -> StorageLimits:
        """The limits for a kernel; if it has too many statements, rows replace registers."""
        if statements <= self.statements or columns < SHORTEST_ROW:
            return self
        return replace(self, registers=min(self.registers, columns // 2), next_to_row=0)

    def of(self, local: Local) -> StorageLimits:
        """The limits for a local: a register of an array is a number for each entry, which takes time to compile."""
        most = max(SHORTEST_ROW, MAX_LOCAL_ARRAY // math.prod(local.shape))
        if most >= self.registers:
            return self
        return replace(self, registers=most, next_to_row=min(self.next_to_row, most))


MANY = 1 << 30
SPARSE = StorageLimits(256, 256, slots=64, statements=MANY)  # for sparse Jacobians: only few columns can be in rows
Strategy = Literal["auto", "sparse", "dense"]
STRATEGIES: dict[str, StorageLimits] = {
    "auto": StorageLimits(),
    "sparse": StorageLimits(MANY, MANY, slots=64, statements=MANY),
    "dense": StorageLimits(0, 0, 0),
}


@dataclass(eq=False)
class StorageFacts:
    """Facts about the tangents that reach one local; they only grow with each form that is written.

    After ``note_form({x[0]: 2, x[n]: 3}, ...)``, those of a local outside of the loop over n have ``x[0]`` among their
    seeds, and one slot for ``x[n]``, which is only visible in the loop.

    Attributes:
        seeds: seeds that are visible at the local's declaration, in the order found.
        own: seeds without a column.
        slots: the largest number of other columns in one form.
        why_row: why the local needs a row; empty if it needs none.
        owners: the owners of columns in slots, for a sparse Jacobian.
        register_owners: the owners of columns in registers.
        in_loops: the number of slots written in loops that start later.
        sources: the locals whose slots hold columns that were written to this one.
        begun_with: the number of slots at the start of the last pass.
        growths: the number of passes that started with more slots than the one before.
    """

    local: Local
    seeds: dict[Seed, None] = field(default_factory=dict)
    own: dict[Unnumbered, None] = field(default_factory=dict)
    slots: int = 0
    why_row: str = ""
    owners: set[Key] = field(default_factory=set)
    register_owners: dict[Seed, frozenset[Key]] = field(default_factory=dict)
    in_loops: dict[Statement, int] = field(default_factory=dict)
    sources: set[Local] = field(default_factory=set)
    begun_with: int = 0
    growths: int = 0

    def state(self) -> tuple[object, ...]:
        """A copy of all that another pass may add to."""
        grown = (self.seeds, self.own, self.owners, self.register_owners, self.in_loops, self.sources)
        return self.slots, self.why_row, *(facts.copy() for facts in grown)

    def begin_pass(self) -> None:
        self.growths += self.slots > self.begun_with
        self.begun_with = self.slots

    def note_form(
        self,
        form: Form,
        is_visible: Callable[[Seed], bool],
        limits: StorageLimits,
        *,
        loop: Statement | None,
        grows: bool,
    ) -> None:
        """Note that a form is written, perhaps in a loop that starts after the local."""
        columns = columns_of(form)
        outer = [seed for seed in columns if seed.is_constant or is_visible(seed)]
        inner = len(columns) - len(outer)
        self.seeds.update(dict.fromkeys(outer))
        self.slots = max(self.slots, inner)
        if loop is not None and inner:
            self.in_loops[loop] = max(inner, self.in_loops.get(loop, 0))
        self.why_row = self.why_row or _row_reason(self, form, limits, grows=grows and inner > 0)

    def is_full(self, limits: StorageLimits) -> bool:
        """Whether there are more seeds than registers."""
        return len(self.seeds) > (limits.next_to_row if self.why_row else limits.registers)


def _row_reason(facts: StorageFacts, form: Form, limits: StorageLimits, *, grows: bool) -> str:
    """Why a local needs a row after a form is written; ``grows``: whether each iteration adds columns."""
    if has_row(form):
        return "it is made of such locals"
    if grows:
        return "iterations of a loop add columns to it"
    if facts.slots > limits.slots or facts.growths > MOST_GROWTHS:
        return "more indexed columns reach it than are kept one by one"
    return "more columns reach it than are kept one by one" if facts.is_full(limits) else ""
