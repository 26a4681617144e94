"""The storage of a program's tangents, with reasons: drafted by the planning pass, fixed for the emitting pass.

Both passes run the same code over the same statements. The code *requires* entries of the plan: the ``Draft`` of the
planning pass records them, and the ``StoragePlan`` of the emitting pass, which cannot grow, compares them. So a local
that was not planned is an internal error, never a wrong derivative. For

    for i in y:
        s = 0.0
        for k in range(n):
            s += x[k]
        y[i] = s * s

the plan has a row for s, "since iterations of a loop add columns to it": ``plan.storages[StorageKey(s)].why_row``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.plan.report import BACKWARDS, INPUTS, LocalChoice
from taichi_ext.differentiate.plan.row_terms import RowDecision
from taichi_ext.differentiate.plan.storage_facts import StorageFacts
from taichi_ext.program import Container, Local, Statement
from taichi_ext.program.keys import Key, SumKey

K = TypeVar("K")
V = TypeVar("V")


class UnplannedError(Exception):
    """The emitting pass needs an entry that its plan lacks, in a table and for a local, loop or container."""


class Table(dict[K, V]):
    """One table of the plan, by local, loop or container.

    Args:
        name: the name of the table.
        known: its initial entries.
        is_frozen: whether it raises if another value is required, in place of recording it.
    """

    def __init__(self, name: str, known: Mapping[K, V] | None = None, *, is_frozen: bool = False) -> None:
        super().__init__(known or {})
        self.name = name.replace("_", " ")
        self.is_frozen = is_frozen

    def note(self, key: K, value: V) -> None:
        """Require a value for a key, unless it has one already."""
        if key not in self:
            self.require(key, value)

    def require(self, key: K, value: V) -> None:
        """Require exactly this value for a key."""
        if not self.is_frozen:
            self[key] = value
        elif key not in self or self[key] != value:
            raise UnplannedError(f"{self.name} of {_described(key)}: {value}, not {self.get(key)}")

    def drop(self, key: K) -> None:
        """Remove the value of a key."""
        if key in self and self.is_frozen:
            raise UnplannedError(f"no {self.name} of {_described(key)}")
        self.pop(key, None)


def _described(key: object) -> str:
    """The description of a key: a local, loop or container."""
    if isinstance(key, StorageKey):
        return _described(key.local)
    if isinstance(key, (Local, Container)):
        return f"{type(key).__name__.lower()} {key.name}"
    if isinstance(key, Statement):
        return "the loop" if key.place is None else f"the loop at {key.place.file}:{key.place.line}"
    return str(key)


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
class ColumnDecisions:
    """The plan of the columns of a sparse Jacobian.

    Attributes:
        in_rows: the parameters whose columns rows hold, and the locals that need them.
        intermediates: containers whose entries are columns, and their sizes.
        versions: the number of their versions that are read.
        sums: locals that have separate columns, and their numbers.
        no_sums: locals that cannot have them, and why.
        counters: the number of counters of each loop that counts the slots it writes.
    """

    in_rows: Table[Key, str]
    intermediates: Table[Key, int]
    versions: Table[Key, int]
    sums: Table[Local, int]
    no_sums: Table[Local, str]
    counters: Table[Statement, int]

    def give_up_sum(self, local: Local, why: str) -> None:
        """Take separate columns away from a local."""
        number = self.sums.get(local)
        self.no_sums.note(local, why)
        if number is not None:
            self.sums.drop(local)
            self.intermediates.drop(SumKey(local.name, number))
            self.versions.drop(SumKey(local.name, number))


@dataclass(frozen=True)
class StorageDecisions:
    """The tables of requirements of a pass.

    Attributes:
        storages: facts about the tangents that reach locals that change.
        accumulated: locals whose tangent is accumulated at their declaration, and why.
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

    storages: Table[StorageKey, StorageFacts]
    accumulated: Table[Local, str]
    own_rows: Table[Local, str]
    indexed: Table[Local, str]
    serial: Table[Statement, str]
    rows: Table[Local, RowDecision]
    reversed_loops: Table[Statement, tuple[Local, ...]]
    forward: Table[Statement, str]
    tape_widths: Table[Statement, int]
    tape_sums: Table[TapeSum, Local]
    columns: ColumnDecisions

    def is_reversed(self, loop: Statement) -> bool:
        """Whether a loop is accumulated backwards."""
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
            self.serial.note(loop.statement, why)


@dataclass(frozen=True)
class LocalDecisions:
    """The plan for one storage, at the current state of the pass."""

    plan: StorageDecisions
    key: StorageKey

    @property
    def local(self) -> Local:
        """The local."""
        return self.key.local

    @property
    def facts(self) -> StorageFacts:
        """Facts about the tangents that reach it."""
        return self.plan.storages.get(self.key, _NOTHING)

    def require(self, facts: StorageFacts) -> None:
        """Replace the facts by those after a write."""
        if facts is not self.facts:
            self.plan.storages.require(self.key, facts)


_NOTHING = StorageFacts()


@dataclass(frozen=True)
class DraftState:
    """The state of a draft: all of it, and the part that the numbers of columns depend on."""

    tables: list[dict[Any, Any]]
    columns: list[dict[Any, Any]]


class Draft(StorageDecisions):
    """The plan under construction: its tables record requirements."""

    @classmethod
    def empty(cls) -> Draft:
        """The draft that the planning pass starts with."""
        columns = ColumnDecisions(**{name: Table(name) for name in _names(ColumnDecisions)})
        return cls(**{name: Table(name) for name in _names(StorageDecisions)}, columns=columns)

    def begin_walk(self) -> None:
        """Start another walk over the statements."""
        for key, facts in list(self.storages.items()):
            self.storages.require(key, facts.begun())

    def state(self) -> DraftState:
        """The current requirements, for comparison; choices made between walks are left out."""
        names = [name for name in _names(StorageDecisions) if name not in ("rows", "tape_sums")]
        counters = dict(self.columns.counters)
        return DraftState(
            [*(dict(getattr(self, name)) for name in names), counters],
            [dict(getattr(self.columns, name)) for name in _names(ColumnDecisions) if name != "counters"],
        )

    def forget_columns(self) -> None:
        """Forget facts that name columns, after these get other numbers."""
        self.storages.clear()
        self.own_rows.clear()

    def frozen(self, locals_: tuple[LocalChoice, ...], walks: int) -> StoragePlan:
        """The plan."""

        def tables(plan: StorageDecisions | ColumnDecisions) -> dict[str, Table[Any, Any]]:
            return {name: Table(name, getattr(plan, name), is_frozen=True) for name in _names(type(plan))}

        return StoragePlan(**tables(self), columns=ColumnDecisions(**tables(self.columns)), locals=locals_, walks=walks)


@dataclass(frozen=True)
class StoragePlan(StorageDecisions):
    """The complete plan: nothing can be added.

    Attributes:
        locals: the storage of each local's tangent, for reports.
        walks: the number of walks over the statements.
    """

    locals: tuple[LocalChoice, ...] = ()
    walks: int = 0

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


def _names(plan: type[StorageDecisions] | type[ColumnDecisions]) -> list[str]:
    """The names of the tables of a plan."""
    return [f.name for f in fields(plan) if f.name != "columns"]
