"""The request and the result of a differentiation."""

from __future__ import annotations

from dataclasses import dataclass, field

from taichi_ext.analysis.activity import Activity
from taichi_ext.analysis.energy_sums import EnergySums
from taichi_ext.analysis.loops import Extents
from taichi_ext.differentiate.forms.entry_sites import SparseResult
from taichi_ext.differentiate.forms.keys import Purpose, Scratch
from taichi_ext.differentiate.plan.report import Report
from taichi_ext.differentiate.plan.sparse_numbering import SparseSeeds
from taichi_ext.differentiate.plan.storage_facts import Limits
from taichi_ext.program import Container, Local, Program, Type


@dataclass(frozen=True)
class Role:
    """Tangents of a container when the kernel starts: seeds from a first column on, or a shadow (perhaps all zero)."""

    first_column: int | None = None
    is_fresh: bool = True  # its tangents are zero at the start
    by_column: bool = False  # columns of the shadow are contiguous in memory
    components: tuple[tuple[int, int], ...] = ()  # if only some have columns: their numbers and first columns


@dataclass(frozen=True)
class Device:
    """The machine that a program is differentiated for.

    Attributes:
        is_host: whether it is a CPU.
        by_column: whether columns of shadows are contiguous in memory.
        threads: the number of threads of a parallel loop; 0 if threads cannot be numbered.
    """

    is_host: bool = True
    by_column: bool = False
    threads: int = 0


@dataclass(frozen=True)
class Seeds:
    """The request: roles of containers, first columns of arguments, the number of columns."""

    columns: int
    roles: dict[Container, Role]
    extents: Extents
    arguments: dict[Local, int] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    wants_return: bool = False
    device: Device = field(default_factory=Device)
    values: tuple[Type, int] | None = None  # if ``arguments`` are rows of a shadow: its type and row count
    is_reverse: bool = False  # for Taichi's reverse mode, which differentiates by itself
    sparse: SparseSeeds | None = None  # of a sparse Jacobian
    first_column: int | None = None  # of a block of columns, from which columns are counted; None: all columns
    is_again: bool = False  # the result is differentiated again
    ignored: frozenset[Container | Local] = frozenset()  # their tangents are not needed
    sums: EnergySums | None = None  # the energy whose gradient is summed, term by term
    intermediates: frozenset[Container] = frozenset()  # the energy's, if written here; they have columns

    @property
    def takes_derivative(self) -> bool:
        """Whether values have tangents, or Taichi's reverse mode differentiates them."""
        return self.columns > 0 or self.is_reverse or self.sparse is not None

    @property
    def start(self) -> set[Container]:
        """The containers that carry tangents when the kernel starts."""
        found = {c for c, role in self.roles.items() if role.first_column is not None or not role.is_fresh}
        if self.sparse is not None:
            found |= {c for c in self.roles if self.sparse.has_entries(c, self.sparse.columns.intermediates)}
        return found


@dataclass(frozen=True)
class Differentiated:
    """A program with tangents: its shadows in order, and facts about its containers."""

    program: Program
    shadows: tuple[tuple[Purpose, Container], ...]  # purpose (a container, "return", "scratch") and argument
    covered: frozenset[Container]  # containers all of whose tangents are overwritten
    scratch_sizes: dict[Scratch, int]  # of scratch memory, by purpose
    active: Activity  # the values that carry tangents in the original program
    walks: int
    relied: frozenset[Container] = frozenset()  # containers whose tangents must be zero at the start
    report: Report = field(default_factory=Report)  # the decisions, as text for users
    sparse: SparseResult | None = None  # the entries of a sparse Jacobian
    first_columns: range | None = None  # of blocks that the program is valid for; None: all columns
    first_column: Local | None = None  # the argument for the first column, if there is one
