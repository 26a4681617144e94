"""Where the tangents of a program are kept, and why: found out in one pass, taken as it is by the next.

Both passes go over the same statements with the same code. What it needs, it *requires* of the plan: the ``Draft`` of
the planning pass takes it down, and the ``StoragePlan`` of the emitting pass, which cannot grow, compares. So a local
that was not planned is an internal error, never a wrong derivative. Of

    for i in y:
        s = 0.0
        for k in range(n):
            s += x[k]
        y[i] = s * s

the plan has a row for s, "since iterations of a loop add columns to it": ``plan.storages[StorageKey(s)].why_row``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.forms.keys import Key, SumKey
from taichi_ext.differentiate.plan.report import BACKWARDS, LocalChoice
from taichi_ext.differentiate.plan.row_terms import RowDecision
from taichi_ext.differentiate.plan.storage_facts import StorageFacts
from taichi_ext.program import Container, Local, Statement

K = TypeVar("K")
V = TypeVar("V")


class UnplannedError(Exception):
    """The emitting pass needs what its plan does not have: of what, and for which local, loop or container."""


class Table(Mapping[K, V]):
    """One table of the plan, by local, loop or container.

    Args:
        name: what the table is of.
        known: what it has at the start.
    """

    def __init__(self, name: str, known: Mapping[K, V] | None = None) -> None:
        self.name = name.replace("_", " ")
        self._known = dict(known or {})

    def __getitem__(self, key: K) -> V:
        return self._known[key]

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def __iter__(self) -> Iterator[K]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def note(self, key: K, value: V) -> None:
        """Require something for a key, unless there is something already."""
        if key not in self._known:
            self.require(key, value)

    @abstractmethod
    def require(self, key: K, value: V) -> None:
        """Have exactly this for a key."""

    @abstractmethod
    def drop(self, key: K) -> None:
        """Have nothing for a key."""


class DraftTable(Table[K, V]):
    """A table that records requirements."""

    def require(self, key: K, value: V) -> None:
        self._known[key] = value

    def drop(self, key: K) -> None:
        self._known.pop(key, None)


class FrozenTable(Table[K, V]):
    """A table that raises where something else is required."""

    def require(self, key: K, value: V) -> None:
        if key not in self._known or self._known[key] != value:
            raise UnplannedError(f"{self.name} of {_described(key)}: {value}, not {self._known.get(key)}")

    def drop(self, key: K) -> None:
        if key in self._known:
            raise UnplannedError(f"no {self.name} of {_described(key)}")


def _described(key: object) -> str:
    """The local, loop or container that a key of a table stands for."""
    if isinstance(key, StorageKey):
        return _described(key.local)
    if isinstance(key, (Local, Container)):
        return f"{type(key).__name__.lower()} {key.name}"
    if isinstance(key, Statement):
        return "the loop" if key.place is None else f"the loop at {key.place.file}:{key.place.line}"
    return str(key)


@dataclass(frozen=True)
class StorageKey:
    """One storage of a local: in an iteration of a reversed loop, it has another one than before."""

    local: Local
    loop: Statement | None = None
    is_before: bool = False


@dataclass(frozen=True)
class TapeSum:
    """The sum that one of the loops over the tape of a reversed loop adds up."""

    loop: Statement
    number: int


@dataclass(frozen=True)
class ColumnsPlan:
    """The plan of the columns of a sparse Jacobian.

    Attributes:
        in_rows: the parameters whose columns rows hold, and the locals that need them.
        intermediates: containers whose entries are columns, and their sizes.
        versions: how many versions of them are read.
        sums: locals that have columns of their own, and their numbers.
        no_sums: those that cannot have them, and why.
        counters: how many counters a loop has that counts what it writes.
    """

    in_rows: Table[Key, str]
    intermediates: Table[Key, int]
    versions: Table[Key, int]
    sums: Table[Local, int]
    no_sums: Table[Local, str]
    counters: Table[Statement, int]

    def give_up_sum(self, local: Local, why: str) -> None:
        """A local that had columns of its own gets none."""
        number = self.sums.get(local)
        self.no_sums.note(local, why)
        if number is not None:
            self.sums.drop(local)
            self.intermediates.drop(SumKey(local.name, number))
            self.versions.drop(SumKey(local.name, number))


@dataclass(frozen=True)
class Plan:
    """The requirements of the parts of a pass.

    Attributes:
        storages: of the locals that change: what reaches them.
        accumulated: locals whose tangent is accumulated where they are declared, and why.
        own_rows: locals that do not change and have a row of their own, and why.
        indexed: vectors that do not change and are indexed at run time, and where.
        serial: parallel loops that keep the order of their iterations, and why.
        rows: how the rows of locals are written, and where they lie.
        reversed_loops: loops that may be accumulated backwards, and what they carry.
        forward: those of them that go forward after all, and why.
        tape_widths: the numbers that each iteration of a reversed loop keeps.
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
    columns: ColumnsPlan

    def is_reversed(self, loop: Statement) -> bool:
        """Whether a loop is accumulated backwards."""
        return loop in self.reversed_loops and loop not in self.forward

    def key(self, local: Local) -> StorageKey:
        """The storage of a local that is declared: before the loop, where a reversed loop carries it."""
        is_carried = any(local in carried for s, carried in self.reversed_loops.items() if s not in self.forward)
        return StorageKey(local, is_before=is_carried)

    def row(self, local: Local) -> RowDecision:
        """How the row of a local is written."""
        return self.rows.get(local, RowDecision())

    def keep_order(self, loop: Loop | None, why: str) -> None:
        """The order of the iterations matters: if this is a parallel loop, it must run serially."""
        if loop is not None and loop.is_parallel:
            self.serial.note(loop.statement, why)


class LocalPlan:
    """The plan for one storage, as far as the pass has come."""

    def __init__(self, plan: Plan, key: StorageKey) -> None:
        self._storages = plan.storages
        self._key = key

    @property
    def local(self) -> Local:
        """The local."""
        return self._key.local

    @property
    def facts(self) -> StorageFacts:
        """Facts about the tangents that reach it."""
        return self._storages.get(self._key, _NOTHING)

    def require(self, facts: StorageFacts) -> None:
        """These are the facts from here on: those of before with what is written."""
        if facts is not self.facts:
            self._storages.require(self._key, facts)


_NOTHING = StorageFacts()


@dataclass(frozen=True)
class DraftState:
    """A draft at one time: all of it, and the part that the numbers of columns depend on."""

    tables: list[dict[Any, Any]]
    columns: list[dict[Any, Any]]


class Draft(Plan):
    """The plan as it is found out: its tables are of the kind that grows."""

    @classmethod
    def empty(cls) -> Draft:
        """The draft that the planning pass starts with."""
        columns = ColumnsPlan(**{name: DraftTable(name) for name in _names(ColumnsPlan)})
        return cls(**{name: DraftTable(name) for name in _names(Plan)}, columns=columns)

    def begin_walk(self) -> None:
        """The statements are gone over once more."""
        for key, facts in list(self.storages.items()):
            self.storages.require(key, facts.begun())

    def state(self) -> DraftState:
        """The present findings of the walks; choices made between walks are not compared."""
        names = [name for name in _names(Plan) if name not in ("rows", "tape_sums")]
        counters = dict(self.columns.counters)
        return DraftState(
            [*(dict(getattr(self, name)) for name in names), counters],
            [dict(getattr(self.columns, name)) for name in _names(ColumnsPlan) if name != "counters"],
        )

    def forget_columns(self) -> None:
        """Columns get other numbers: what was found out about those of before does not hold."""
        for key in list(self.storages):
            self.storages.drop(key)
        for local in list(self.own_rows):
            self.own_rows.drop(local)

    def frozen(self, locals_: tuple[LocalChoice, ...], walks: int) -> StoragePlan:
        """The plan."""
        columns = ColumnsPlan(**{n: FrozenTable(n, getattr(self.columns, n)) for n in _names(ColumnsPlan)})
        tables = {name: FrozenTable(name, getattr(self, name)) for name in _names(Plan)}
        return StoragePlan(**tables, columns=columns, locals=locals_, walks=walks)


@dataclass(frozen=True)
class StoragePlan(Plan):
    """The findings, complete: nothing can be added.

    Attributes:
        locals: where the tangent of each local is, for people.
        walks: how often the statements were gone over.
    """

    locals: tuple[LocalChoice, ...] = ()
    walks: int = 0

    def loop_notes(self) -> dict[Statement, str]:
        """How the loops are differentiated that may be reversed, and why."""
        return {s: self._loop_note(s, carried) for s, carried in self.reversed_loops.items()}

    def _loop_note(self, s: Statement, carried: tuple[Local, ...]) -> str:
        if s in self.forward:
            return f"goes forward, since {self.forward[s]}"
        names, width = ", ".join(v.name for v in carried), self.tape_widths.get(s, 0)
        return f"{BACKWARDS}; it carries {names} and keeps {width} numbers of each iteration"


def _names(plan: type[Plan] | type[ColumnsPlan]) -> list[str]:
    """The tables of a plan."""
    return [f.name for f in fields(plan) if f.name != "columns"]
