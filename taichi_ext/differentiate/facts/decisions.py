"""The request and the result of a differentiation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from taichi_ext.analysis.activity import Activity
from taichi_ext.analysis.energy_sums import EnergySums
from taichi_ext.analysis.loops import Extents
from taichi_ext.differentiate.forms.entry_sites import SparseResult
from taichi_ext.differentiate.plan.report import Report
from taichi_ext.differentiate.plan.sparse_numbering import RowNumbering, RowSeeds
from taichi_ext.differentiate.plan.storage_facts import StorageLimits
from taichi_ext.differentiate.rules.table import AGAIN, LAST, Rules
from taichi_ext.program import Container, Local, Program, Type
from taichi_ext.program.keys import Purpose, Scratch


@dataclass(frozen=True)
class Role:
    """Tangents of a container when the kernel starts: seeds from a first column on, or a shadow (perhaps all zero)."""

    first_column: int | None = None
    is_fresh: bool = True  # its tangents are zero at the start
    components: tuple[tuple[int, int], ...] = ()  # if only some have columns: their numbers and first columns

    def moved(self, by: int) -> Role:
        """The same with its columns numbered from another one on."""
        if self.first_column is None:
            return self
        components = tuple((number, column + by) for number, column in self.components)
        return Role(self.first_column + by, self.is_fresh, components)


@dataclass(frozen=True)
class Device:
    """The machine that a program is differentiated for."""

    is_host: bool = True  # whether it is a CPU
    by_column: bool = False  # whether columns of shadows are contiguous in memory
    threads: int = 0  # the number of threads of a parallel loop; 0 if threads cannot be numbered
    block: int = 1  # how many of them a block of a GPU has, unless the loop says it


@dataclass(frozen=True)
class Use:
    """The use of a program with tangents that is not launched as it is."""

    is_lowered: bool = False  # whether its boundaries become ``weighted`` sums, which an adjoint is made of
    is_again: bool = False  # whether it is the gradient of an energy, and is differentiated again
    sums: EnergySums | None = None  # the energy, if its gradient is added up term by term
    # the containers that the energy is computed from, if written here; they have columns
    intermediates: frozenset[Container] = frozenset()

    @property
    def rules(self) -> Rules:
        return AGAIN if self.is_again else LAST


@dataclass(frozen=True)
class DifferentiationRequest:
    """The request: roles of containers, first columns of arguments, the number of columns."""

    columns: int
    roles: dict[Container, Role]
    extents: Extents
    arguments: dict[Local, int] = field(default_factory=dict)
    limits: StorageLimits = field(default_factory=StorageLimits)
    wants_return: bool = False
    device: Device = field(default_factory=Device)
    values: tuple[Type, int] | None = None  # if ``arguments`` are rows of a shadow: its type and row count
    sparse: RowSeeds = field(default_factory=RowSeeds)  # ``SparseSeeds`` of a sparse Jacobian
    first_column: int | None = None  # of a block of columns, from which columns are counted; None: all columns
    ignored: frozenset[Container | Local] = frozenset()  # their tangents are not needed
    use: Use = field(default_factory=Use)

    @property
    def start(self) -> set[Container]:
        """The containers that carry tangents when the kernel starts."""
        result = {c for c, role in self.roles.items() if role.first_column is not None or not role.is_fresh}
        return result | set(filter(self.sparse.has_tangents, self.roles))


@dataclass(frozen=True)
class Differentiated:
    """A program with tangents: its shadows in order, and facts about its containers."""

    program: Program
    shadows: tuple[tuple[Purpose, Container], ...]  # purpose (a container, "return", "scratch") and argument
    covered: frozenset[Container]  # containers all of whose tangents are overwritten
    scratch_sizes: dict[Scratch, int]  # of scratch memory, by purpose
    active: Activity  # the values that carry tangents in the original program
    passes: int
    relied: frozenset[Container] = frozenset()  # containers whose tangents must be zero at the start
    report: Report = field(default_factory=Report)  # the decisions, as text for users
    sparse: SparseResult | None = None  # the entries of a sparse Jacobian
    first_columns: range | None = None  # of blocks that the program is valid for; None: all columns
    first_column: Local | None = None  # the argument for the first column, if there is one


def role_of(container: Container, seeds: DifferentiationRequest, numbering: RowNumbering) -> Role:
    """The role of a container; in a sparse Jacobian, its columns are numbered by this walk."""
    role = seeds.roles.get(container, Role())
    has_columns = role.first_column is not None or numbering.is_columns(container)
    first = numbering.first(container) if has_columns else None
    return role if first is None else replace(role, first_column=first, components=())


def size_of(container: Container, seeds: DifferentiationRequest) -> int:
    return math.prod(seeds.extents[container].shape) * math.prod(container.element_shape)


def named_columns(container: Container, role: Role, seeds: DifferentiationRequest) -> dict[str, tuple[int, int]]:
    """The first column and the number of columns of a parameter, or of each component that is one, by name."""
    first, name, size = role.first_column, container.name, size_of(container, seeds)
    if role.components:
        count = math.prod(container.element_shape)
        return {f"{name}_{n}": (column, size // count) for n, column in role.components}
    return {} if first is None else {name: (first, size)}
