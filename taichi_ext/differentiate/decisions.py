"""What is asked of a differentiation, what it decides, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from taichi_ext.analysis.activity import Activity
from taichi_ext.analysis.energy_sums import EnergySums
from taichi_ext.analysis.loops import Extents, Loop
from taichi_ext.differentiate.column_blocks import Blocks
from taichi_ext.differentiate.entry_sites import SparseResult
from taichi_ext.differentiate.report import Report
from taichi_ext.differentiate.row_terms import RowDecisions
from taichi_ext.differentiate.sparse_numbering import SparseDecisions, SparseSeeds
from taichi_ext.differentiate.storage_facts import Limits, StorageFacts
from taichi_ext.program import Container, Local, Program, Statement, Type


@dataclass
class ReversalDecisions:
    """Which loops are reversed; what is refused once stays forward."""

    chosen: dict[Statement, tuple[Local, ...]] = field(default_factory=dict)  # and what they carry
    refused: set[Statement] = field(default_factory=set)
    widths: dict[Statement, int] = field(default_factory=dict)  # numbers on the tape for each iteration
    sums: dict[Any, Local] = field(default_factory=dict)  # what the loops over a tape add up, by their numbers

    def key(self, local: Local) -> Any:
        """What the storage of a local before the loop is known by."""
        return ("before", local) if any(local in carried for carried in self.chosen.values()) else local

    def refuse(self, s: Statement) -> None:
        """The loop is walked forward from the next walk on."""
        self.refused.add(s)
        self.chosen.pop(s, None)

    def state(self) -> tuple[Any, ...]:
        """What the text of a program depends on, as it is now."""
        return dict(self.chosen), frozenset(self.refused), dict(self.widths)


@dataclass
class Decisions:
    """What the walks have found out; it only grows.

    A walk changes it as it goes. Its text is right if the decisions at its end are those that it began with, which is
    found out by comparing them: nobody has to say that something has changed.
    """

    blocks: Blocks
    storages: dict[Any, StorageFacts] = field(default_factory=dict)
    accumulated: set[Local] = field(default_factory=set)  # used more than once: their tangent is accumulated at once
    own_rows: set[Local] = field(default_factory=set)  # their tangent is a row that changes while they are used
    serial: dict[Statement, str] = field(default_factory=dict)  # parallel loops that must keep their order, and why
    shadowed: set[Container] = field(default_factory=set)  # containers that need a shadow
    indexed: set[Local] = field(default_factory=set)  # vectors that do not change, indexed at run time
    rows: RowDecisions = field(default_factory=RowDecisions)
    reversals: ReversalDecisions = field(default_factory=ReversalDecisions)
    sparse: SparseDecisions = field(default_factory=SparseDecisions)
    walks: int = 0

    def state(self) -> tuple[Any, ...]:
        """What the text of a program depends on, as it is now: compared with what it was before a walk."""
        empty = StorageFacts().state()
        stored = {key: facts.state() for key, facts in self.storages.items() if facts.state() != empty}
        locals_ = frozenset(self.accumulated), frozenset(self.own_rows), frozenset(self.indexed)
        return (stored, locals_, frozenset(self.serial), self.reversals.state(), self.sparse.state())

    def keep_order(self, loop: Loop | None, why: str) -> None:
        """The order of the iterations matters: if this is a parallel loop, it must run serially."""
        if loop is not None and loop.is_parallel:
            self.serial.setdefault(loop.statement, why)

    def forget_columns(self) -> None:
        """Columns have other numbers from the next walk on: what was found out about those of before does not hold."""
        self.storages.clear()
        self.own_rows.clear()


@dataclass(frozen=True)
class Role:
    """What a container carries when the kernel starts: seeds from a first column on, or a shadow (perhaps all zero)."""

    first_column: int | None = None
    is_fresh: bool = True  # its tangents are zero at the start
    by_column: bool = False  # columns of the shadow lie together in memory
    components: tuple[tuple[int, int], ...] = ()  # that alone have columns, by number, each with its first one


@dataclass(frozen=True)
class Seeds:
    """What is asked for: roles of containers, first columns of arguments, the number of columns."""

    columns: int
    roles: dict[Container, Role]
    extents: Extents
    arguments: dict[Local, int] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    wants_return: bool = False
    by_column: bool = False  # columns of shadows lie together in memory
    is_host: bool = True  # a CPU
    values: tuple[Type, int] | None = None  # ``arguments`` are rows of a shadow: its type and how many there are
    is_reverse: bool = False  # for Taichi's reverse mode, which takes the derivative itself
    is_debug: bool = False  # the kernel checks what it computes
    threads: int = 0  # that run iterations of a parallel loop at the same time; 0 where they have no number
    sparse: SparseSeeds | None = None  # of a sparse Jacobian
    first_column: int | None = None  # of a block of columns, from which all columns here are counted; None: of all
    is_again: bool = False  # the result is differentiated again
    ignored: frozenset[Container | Local] = frozenset()  # whose tangents nobody asks for
    sums: EnergySums | None = None  # the energy whose gradient is added up, term by term

    @property
    def takes_derivative(self) -> bool:
        """Whether values have tangents, or Taichi's reverse mode is to take them."""
        return self.columns > 0 or self.is_reverse or self.sparse is not None

    @property
    def start(self) -> set[Container]:
        """The containers that carry tangents when the kernel starts."""
        found = {c for c, role in self.roles.items() if role.first_column is not None or not role.is_fresh}
        if self.sparse is not None:
            found |= {c for c in self.roles if self.sparse.is_sunk(c, self.sparse.columns.composed)}
        return found


@dataclass(frozen=True)
class Differentiated:
    """A program with tangents: its shadows in order, and what is known of its containers."""

    program: Program
    shadows: tuple[tuple[Any, Container], ...]  # what for (a container, "return", "scratch"), and the argument
    covered: frozenset[Container]  # of which all tangents are written, whatever they were
    scratch_sizes: dict[Any, int]  # of scratch memory, by what it is for
    active: Activity  # what carries tangents, of the program that was differentiated
    walks: int
    relied: frozenset[Container] = frozenset()  # of which the tangents must be zero at the start
    report: Report = field(default_factory=Report)  # the decisions, for people
    sparse: SparseResult | None = None  # the entries of a sparse Jacobian
    first_columns: range | None = None  # of the blocks that the program is right for; None: of all columns
    first_column: Local | None = None  # the argument that says which it is, where there is one
