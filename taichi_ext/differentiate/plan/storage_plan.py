"""The storage of a program's tangents, with reasons: it grows in passes until one requires nothing new.

For

    for i in y:
        s = 0.0
        for k in range(n):
            s += x[k]
        y[i] = s * s

the plan has a row for s, "since iterations of a loop add columns to it": ``plan.storages[StorageKey(s)].why_row``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.plan.report import BACKWARDS, INPUTS
from taichi_ext.differentiate.plan.row_terms import RowDecision
from taichi_ext.differentiate.plan.sparse_numbering import ColumnDecisions
from taichi_ext.differentiate.plan.storage_facts import StorageFacts
from taichi_ext.program import Local, Statement


@dataclass(frozen=True)
class StorageKey:
    """The key of a storage of a local: in an iteration of a reversed loop, the local has another one than before.

    With a loop and ``is_before``: of its factors of the inputs of the loop.
    """

    local: Local
    loop: Statement | None = None
    is_before: bool = False


@dataclass(frozen=True)
class TapeSum:
    """The key of a sum that a loop over the tape of a reversed loop computes."""

    loop: Statement
    number: int


@dataclass(frozen=True)
class StoragePlan:
    """The tables of requirements, to which a pass adds.

    Attributes:
        storages: facts about the tangents that reach locals that change.
        accumulated: locals whose tangent is accumulated at their declaration, and why.
        settled: locals that keep a form over columns, although they could be pivots, and why.
        own_rows: locals that do not change but have a row, and why.
        indexed: vectors that do not change and are indexed at run time, and where.
        serial: parallel loops that keep the order of their iterations, and why.
        rows: how the rows of locals are written, and their memory.
        reversed_loops: loops that may be accumulated backwards, and the locals they carry.
        forward: those of them that are accumulated forward after all, and why.
        tape_widths: the count of numbers that each iteration of a reversed loop keeps.
        tape_sums: the sums of the loops over a tape.
        columns: those of a sparse Jacobian.
    """

    storages: dict[StorageKey, StorageFacts] = field(default_factory=dict)
    accumulated: dict[Local, str] = field(default_factory=dict)
    settled: dict[Local, str] = field(default_factory=dict)
    own_rows: dict[Local, str] = field(default_factory=dict)
    indexed: dict[Local, str] = field(default_factory=dict)
    serial: dict[Statement, str] = field(default_factory=dict)
    rows: dict[Local, RowDecision] = field(default_factory=dict)
    reversed_loops: dict[Statement, tuple[Local, ...]] = field(default_factory=dict)
    forward: dict[Statement, str] = field(default_factory=dict)
    tape_widths: dict[Statement, int] = field(default_factory=dict)
    tape_sums: dict[TapeSum, Local] = field(default_factory=dict)
    columns: ColumnDecisions = field(default_factory=ColumnDecisions)

    def is_reversed(self, loop: Statement) -> bool:
        return loop in self.reversed_loops and loop not in self.forward

    def key(self, local: Local) -> StorageKey:
        """The key of the storage of a declared local; if a reversed loop carries it, of the one before the loop."""
        is_carried = any(local in carried for s, carried in self.reversed_loops.items() if s not in self.forward)
        return StorageKey(local, is_before=is_carried)

    def row(self, local: Local) -> RowDecision:
        """How the row of a local is written."""
        return self.rows.get(local, RowDecision())

    def keep_order(self, loop: Loop | None, why: str) -> None:
        """Require the order of iterations: a parallel loop must run serially."""
        if loop is not None and loop.is_parallel:
            self.serial.setdefault(loop.statement, why)

    def facts(self, key: StorageKey) -> StorageFacts:
        return self.storages.setdefault(key, StorageFacts(key.local))

    # --- the passes

    def begin_pass(self) -> None:
        """Start another pass over the statements."""
        for facts in self.storages.values():
            facts.begin_pass()

    def state(self) -> PlanState:
        """The current requirements, for comparison; choices made between passes are left out."""
        storages = {key: state for key, facts in self.storages.items() if any(state := facts.state())}
        tables = [storages, *_tables(self, "storages", "rows", "tape_sums", "columns"), dict(self.columns.counters)]
        return PlanState(tables, _tables(self.columns, "counters"))

    def forget_columns(self) -> None:
        """Forget facts that name columns, after these get other numbers."""
        self.storages.clear()
        self.own_rows.clear()

    def loop_notes(self) -> dict[Statement, str]:
        """How loops within others are differentiated, and why."""
        inputs = {
            key.loop: dict.fromkeys(seed.local.name for seed in facts.own)
            for key, facts in self.storages.items()
            if key.is_before and key.loop is not None and key.loop not in self.forward and facts.own
        }
        return {
            **{s: f"{INPUTS} {', '.join(names)}" for s, names in inputs.items()},
            **{s: self._loop_note(s, carried) for s, carried in self.reversed_loops.items()},
        }

    def _loop_note(self, s: Statement, carried: tuple[Local, ...]) -> str:
        if s in self.forward:
            return f"goes forward, since {self.forward[s]}"
        names, width = ", ".join(v.name for v in carried), self.tape_widths.get(s, 0)
        return f"{BACKWARDS}; it carries {names} and keeps {width} numbers of each iteration"


@dataclass(frozen=True)
class PlanState:
    """The state of a plan: all of it, and the part that the numbers of columns depend on."""

    tables: list[dict[Any, Any]]
    columns: list[dict[Any, Any]]


def _tables(plan: StoragePlan | ColumnDecisions, *left_out: str) -> list[dict[Any, Any]]:
    return [dict(getattr(plan, f.name)) for f in fields(plan) if f.name not in left_out]
