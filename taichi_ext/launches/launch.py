"""Launches of kernels with tangents: kernel, arguments and seeds, and the kernel that computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taichi_ext import backend, stages
from taichi_ext.analysis.changes import read_containers, stages_of, written_containers
from taichi_ext.differentiate.facts.decisions import Role
from taichi_ext.differentiate.forms.entry_sites import Site, SparseColumns, SparseResult, check_sparse
from taichi_ext.differentiate.plan.report import Report
from taichi_ext.errors import UnsupportedError
from taichi_ext.labels import Label
from taichi_ext.program import Body, Program
from taichi_ext.program.keys import TERMS, Key, LaunchArray, Scratch
from taichi_ext.record.variables import Variable


@dataclass(frozen=True)
class ContainerInfo:
    """A field or array, as it is known outside of kernels."""

    key: Key
    name: Label | str
    obj: Any
    shape: tuple[int, ...]
    element_shape: tuple[int, ...]
    offset: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        n = 1
        for s in (*self.shape, *self.element_shape):
            n *= s
        return n


@dataclass(frozen=True)
class ColumnBlock:
    """The columns that are computed."""

    count: int  # how many there are
    first: int = 0  # the first of them
    is_part: bool = False  # whether there are others, which the kernel may compute if it is given their first one


@dataclass(frozen=True)
class NumberColumns:
    """The numbers that depend on parameters where a kernel is launched."""

    arguments: Mapping[str, int] = field(default_factory=dict)  # leaf ones by name, with their first column, or row
    constants: tuple[tuple[Variable, int], ...] = ()  # Python numbers that kernels read, likewise
    tangents: np.ndarray | None = None  # a row for each entry, if these are not columns of J

    @property
    def shadow(self) -> tuple[Any, int] | None:
        """The type and the number of rows of ``tangents``."""
        return None if self.tangents is None else (backend.default_type(float), len(self.tangents))

    @property
    def key(self) -> Any:
        """Equal for launches that can use the same kernel."""
        return tuple(self.arguments.items()), tuple(first for _, first in self.constants), self.shadow


@dataclass(frozen=True)
class SparseTarget:
    """The subject of a sparse Jacobian: its columns, and the keys of its outputs."""

    columns: SparseColumns
    outputs: frozenset[Key]

    @property
    def variant(self) -> object:
        """Equal for launches that can use the same kernel."""
        return tuple(self.columns.ranges()), frozenset(self.columns.in_rows), self.outputs


@dataclass(frozen=True)
class EnergyTarget:
    """The subject of second derivatives; without columns there are only first ones."""

    key: Key | None = None  # of the energy
    columns: int = 0  # of its gradient
    starts: Mapping[Key, int] = field(default_factory=dict)  # of which each parameter has its own, from there on
    dtype: Any = None  # its type
    carried: frozenset[Key] = frozenset()  # the containers with tangents of the first order from earlier launches
    adds_terms: bool = False  # whether the gradient is added up term by term
    has_whole_blocks: bool = False  # whether the blocks of a sparse Hessian are written with their zeros
    intermediates: frozenset[Key] = frozenset()  # fields that it is computed from, with columns behind the others
    is_mirrored: bool = False  # whether the entries of a dense Hessian above its diagonal are not needed
    has_gradient: bool = True  # whether the gradient itself is needed
    is_sum: bool = False  # whether the gradient must be a sum of terms of few params

    @property
    def order(self) -> int:
        """The order of the derivatives."""
        return 2 if self.columns else 1

    @property
    def variant(self) -> object:
        """Equal for launches that can use the same kernel."""
        return self.carried, self.has_gradient, self.has_whole_blocks


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel launch to be differentiated."""

    kernel: backend.Kernel  # the user's kernel
    args: tuple[Any, ...]
    block: ColumnBlock
    fields: Any  # the table of fields, ``runtime.memory.shadows.FieldTable``.
    arrays: Mapping[int, ContainerInfo]  # the arrays among the leaf arguments, by position
    numbers: NumberColumns  # those that depend on parameters
    is_repeated: bool  # whether the same kernel may be launched again, on rows of tangents that it has written
    roles: Mapping[Key, Role] = field(default_factory=dict)
    wants_return: bool = False  # whether the returned value is an output
    strategy: str = "auto"  # how tangents of locals are kept, a key of ``STRATEGIES``
    sparse: SparseTarget | None = None  # of a sparse Jacobian, its columns and outputs
    energy: EnergyTarget = field(default_factory=EnergyTarget)  # for second derivatives, the energy


@dataclass(frozen=True)
class KernelFacts:
    """The facts about a kernel that a session needs; containers are named by their keys."""

    read: frozenset[Key]
    written: frozenset[Key]
    covered: frozenset[Key]  # containers of which all tangents are written, whatever they were
    other_fields: tuple[object, ...] = ()  # integer fields that are written
    read_arguments: frozenset[str] = frozenset()  # names of array arguments of which entries are read
    kept_arguments: frozenset[str] = frozenset()  # of those that it only writes, which keep some tangents that they had
    changed_nodes: tuple[backend.SNode, ...] = ()  # of the layout, cells of which are activated and deactivated by name
    has_random: bool = False
    returns_active: bool = False  # its return value has a tangent
    report: Report = field(default_factory=Report)  # the decisions, for people
    namesakes: dict[Key, list[Variable]] = field(default_factory=dict)  # of parameters, imported from where they stand
    left_out: frozenset[Key] = frozenset()  # containers whose tangents it does not keep, since it reads none of them


@dataclass(frozen=True)
class KernelColumns:
    """The columns that a kernel computes: a block of ``count`` columns."""

    count: int  # how many there are
    firsts: range | None  # the first columns of the blocks that it can compute; None: it computes all columns
    takes_first: bool  # whether the first column is its last argument

    def has_block(self, first: int) -> bool:
        return self.firsts is None or first in self.firsts


@dataclass
class KernelMemory:
    """The memory that a kernel keeps from launch to launch."""

    rules: Any  # those of users that it was built with, ``boundary.registry.RulesInUse``.
    scratch: dict[Key, Any] = field(default_factory=dict)  # memory for rows, by key
    streams: Any = None  # the memory of the entries that it writes


@dataclass(frozen=True, kw_only=True, eq=False)
class JacobianKernel:
    """A kernel with tangents, and the meaning of its extra arguments."""

    primal: backend.Kernel  # the user's kernel, kept alive so that its identity is not used again
    kernel: backend.EmittedKernel
    shadows: tuple[Key, ...]  # the purposes of the arrays after the user's arguments, in order
    facts: KernelFacts  # the facts about the kernel that a session needs
    scratch_sizes: Mapping[Scratch, int]  # of its memory for rows
    columns: KernelColumns
    entries: SparseResult | None  # for a sparse Jacobian, the sites at which entries are written
    program: Program | None  # the program that the kernel was emitted from, as long as the Taichi program lives
    arrays: Mapping[int, ContainerInfo]  # the arrays among the leaf arguments, by position
    first_order: tuple[Any, ...]  # its arrays of tangents of the first order, if it has those of the second
    assumed: Mapping[Key, Role] | None  # the roles that it is valid for; None: those at its first launch
    memory: KernelMemory  # memory kept between launches

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where entries of a sparse Jacobian are written."""
        return () if self.entries is None else self.entries.sites

    def suits(self, roles: Mapping[Key, Role]) -> bool:
        """Whether the kernel is valid for these roles; expected tangents may be zero."""
        if self.assumed is None:
            return False
        return all(role in (ANY_TANGENTS, roles.get(key, Role())) for key, role in self.assumed.items())

    def launch(self, args: tuple[object, ...], given: Sequence[object]) -> Any:
        """Run it; ``given`` are the shadows, in the order of the keys, and the first column if it takes that."""
        if self.kernel.compiled is None:
            start = stages.begin(f"compiling {backend.short_name(self.primal)} with tangents")
            self.kernel.compile()
            stages.note(f"{backend.short_name(self.primal)} compiled", start)
        return self.kernel.launch(*args, *given)


def check_buffers(kernel: backend.Kernel, program: Program, *, is_sparse: bool) -> None:
    """Raise where a loop uses more arrays and fields than the device may have buffers."""
    most = backend.most_buffers()
    if most is None:
        return
    count = max(map(_buffers, stages_of(program.body)), default=0)
    if count > most:
        problem = f"a loop of {backend.short_name(kernel)} and its derivatives uses {count} arrays and trees of fields"
        check_sparse((f"{problem}, more than the {most} that are safe on this device", is_sparse))
        raise UnsupportedError(
            f"{problem}. This device may have 32 buffers for them, and Taichi gives wrong numbers beyond. "
            "Place fields together (ti.root.dense(...).place(a, b)), or split the loop into several kernels."
        )


def _buffers(stage: Body) -> int:
    used = read_containers(stage) | written_containers(stage)
    trees = {tree for c in used if not c.is_argument for tree in backend.tree_numbers(c.object)}
    return len(trees) + sum(c.is_argument for c in used)


# The keys of fields and arguments outside of kernels; an array is known by the view of memory that it is.


@dataclass(frozen=True)
class FieldKey:
    """A field, or one component of it."""

    identity: int  # of the first component that is placed
    component: int | None = None  # its number; None for the whole field

    def __hash__(self) -> int:
        return self.identity

    @property
    def whole(self) -> FieldKey:
        """The field that it is, or is a component of."""
        return self if self.component is None else FieldKey(self.identity)


@dataclass(frozen=True)
class ArrayArgument:
    """An array that a kernel is given, by its position among the leaf arguments."""

    position: int

    def __hash__(self) -> int:
        return self.position


@dataclass(frozen=True)
class NumberArgument:
    """An argument of a kernel that is passed by value."""

    name: str


@dataclass(frozen=True)
class PipelineArgument:
    """An argument of a pipeline that is passed by value."""

    name: str


@dataclass(frozen=True)
class GradientKey:
    """Tangents of the first order, of a container or of scratch memory, which have tangents themselves."""

    of: Key


ANY_TANGENTS = Role(is_fresh=False)  # also zero ones, or seeds
GRADIENT, TERMS_GRADIENT = GradientKey("energy"), GradientKey(TERMS)


@dataclass(frozen=True)
class FirstOrderArray(LaunchArray):
    """Such an array itself, as opposed to its tangents."""

    key: Key


def container_key(key: Key) -> Key:
    """The key of the container of a parameter or output, which may be a component of it."""
    return key.whole if isinstance(key, FieldKey) else key
