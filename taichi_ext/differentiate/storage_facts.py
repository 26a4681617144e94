"""What is known of the tangents that reach a local, and how much of them is kept in registers, slots or a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from taichi_ext.differentiate.forms import Form, Seed, Unnumbered, columns_of, has_row
from taichi_ext.program import Local, Statement

MAX_LOCAL_ARRAY = 512
MOST_GROWTHS = 8  # walks that find more slots than the one before: where each adds some, there is no end to it


@dataclass(frozen=True)
class Limits:
    """How many coefficients a stored tangent may have before it becomes a row of all columns; where rows are."""

    registers: int = 24
    next_to_row: int = 8  # registers: what has a row as well is a loop over all columns, and a line for each register
    slots: int = 8
    local_array: int = MAX_LOCAL_ARRAY  # of longer ones, rows are in scratch memory


SPARSE = Limits(registers=256, next_to_row=256, slots=64)  # of sparse Jacobians: only few columns can be in rows
STRATEGIES = {"auto": Limits(), "sparse": Limits(1 << 30, 1 << 30, slots=64), "dense": Limits(0, 0, 0)}


@dataclass
class StorageFacts:
    """What is known of the tangents that reach one local: it only ever grows."""

    seeds: dict[Seed, None] = field(default_factory=dict)  # that can be named where the local is declared
    own: dict[Unnumbered, None] = field(default_factory=dict)  # those that are no columns
    slots: int = 0
    has_row: bool = False
    owners: set[Any] = field(default_factory=set)  # the containers whose columns are in slots of a sparse Jacobian
    register_owners: dict[Seed, frozenset[Any]] = field(default_factory=dict)  # and those of which registers are
    in_loops: dict[Statement | None, int] = field(default_factory=dict)  # slots written in loops that start later
    sources: set[Local] = field(default_factory=set)  # whose slots hold the columns that have been written to this one
    begun_with: int = 0  # slots at the start of the last walk
    growths: int = 0  # walks that started with more slots than the one before

    def begin_walk(self) -> None:
        """The local is declared once more."""
        self.growths += self.slots > self.begun_with
        self.begun_with = self.slots

    def add(
        self, form: Form, visible: Callable[[Seed], bool], limits: Limits, *, loop: Statement | None, grows: bool
    ) -> None:
        """Take note of a form that is written, in a loop that starts after the local or not."""
        inner = 0
        self.has_row = self.has_row or has_row(form)
        for seed in columns_of(form):
            if seed.is_constant or visible(seed):
                self.seeds[seed] = None
            else:
                inner += 1
        self.slots = max(self.slots, inner)
        is_long = self.slots > limits.slots or self.growths > MOST_GROWTHS
        if is_long or (grows and inner) or self.is_full(limits):
            self.has_row = True
        if loop is not None:
            self.in_loops[loop] = max(self.in_loops.get(loop, 0), inner)

    def is_full(self, limits: Limits) -> bool:
        """Whether there are more seeds than registers."""
        return len(self.seeds) > (limits.next_to_row if self.has_row else limits.registers)

    def state(self) -> tuple[Any, ...]:
        """What the text of a program depends on, as it is now."""
        counts = (tuple(self.seeds), tuple(self.own), self.slots, self.has_row)
        return (*counts, frozenset(self.owners), dict(self.register_owners), dict(self.in_loops))
