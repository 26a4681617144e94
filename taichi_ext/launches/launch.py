"""Launches of kernels with tangents: what is asked for, and the kernel that does it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from taichi_ext import backend, stages
from taichi_ext.analysis.accesses import read_containers, stages_of
from taichi_ext.analysis.changes import written_containers
from taichi_ext.differentiate.entry_sites import Site
from taichi_ext.differentiate.keys import Key
from taichi_ext.differentiate.report import Report
from taichi_ext.differentiate.sparse_columns import Columns, DenseRowsError
from taichi_ext.errors import UnsupportedError
from taichi_ext.labels import Label
from taichi_ext.launches.keys import FieldKey
from taichi_ext.program import Body, Program
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


def rows_of(key: Key, info: ContainerInfo) -> slice:
    """The rows of a container's tangents that belong to a parameter or output in it."""
    component = key.component if isinstance(key, FieldKey) else None
    return slice(None) if component is None else slice(component, None, math.prod(info.element_shape))


@dataclass(frozen=True)
class Role:
    """What a container carries when a kernel starts: seeds from a first column on, or a shadow (perhaps all zero).

    ``components``: where single components of the container are parameters, the numbers and first columns of these.
    """

    first_column: int | None = None
    components: tuple[tuple[int, int], ...] = ()
    has_shadow: bool = False
    is_fresh: bool = False


@dataclass
class Launch:
    """One kernel launch to be differentiated."""

    kernel: Any
    args: tuple[Any, ...]
    columns: int
    fields: Any  # runtime.memory.FieldTable
    roles: dict[Any, Role]
    arrays: dict[int, ContainerInfo] = field(default_factory=dict)  # by position among the leaf arguments
    argument_columns: dict[str, int] = field(default_factory=dict)  # value arguments that are parameters
    wants_return: bool = False
    first_column: int = 0  # of the block of columns that is computed
    watch: Any = None
    strategy: str = "auto"  # a key of STRATEGIES
    constants: tuple[tuple[Variable, int], ...] = ()  # Python numbers that are parameters, each with its first column
    values_dtype: Any = None  # where arguments and numbers have tangents in a shadow of their own: its type
    values_rows: int = 0  # of that shadow
    sparse: Columns | None = None  # of a sparse Jacobian
    sinks: frozenset[Any] = frozenset()  # the outputs of a sparse Jacobian
    is_block: bool = False  # there are columns that are not computed, and the block may begin at others
    energy: Any = None  # the key of what the second derivatives are of, in place of first derivatives
    energy_columns: int = 0  # of its gradient
    energy_starts: dict[Any, int] = field(default_factory=dict)  # of which each parameter has its own, from there on
    adds_terms: bool = False  # whether the gradient is added up term by term
    is_repeated: bool = False  # the same kernel may be launched again, on tangents that it has left behind


@dataclass(frozen=True)
class KernelFacts:
    """What a session has to know of a kernel; containers are named by their keys."""

    read: frozenset[Any]
    written: frozenset[Any]
    covered: frozenset[Any]  # containers of which all tangents are written, whatever they were
    other_fields: tuple[Any, ...] = ()  # integer fields that are written
    read_arguments: frozenset[str] = frozenset()  # names of array arguments of which entries are read
    changed_nodes: tuple[Any, ...] = ()  # of the layout, cells of which are activated and deactivated by name
    has_random: bool = False
    returns_active: bool = False  # what it returns has a tangent
    rules: tuple[tuple[Any, Any], ...] = ()  # functions and marks, and the users' rules found for them, or None
    report: Report = field(default_factory=Report)  # the decisions, for people
    namesakes: dict[Any, list[Variable]] = field(default_factory=dict)  # of parameters, imported from where they stand


@dataclass
class Fused:
    """A kernel with tangents, and what its extra arguments are."""

    primal: Any  # the user's kernel, kept alive so that its identity stays its own
    kernel: Any
    shadows: tuple[Any, ...]  # keys of the containers whose shadows are passed, in order
    facts: KernelFacts
    text: str
    scratch_sizes: dict[Any, int]
    rules_version: Hashable
    columns: int
    scratch: dict[Any, Any] = field(default_factory=dict)  # memory for rows, kept from launch to launch
    paired: frozenset[Any] = frozenset()  # shadows that are stored to two numbers at a time
    sites: tuple[Site, ...] = ()  # where entries of a sparse Jacobian are written
    sparse: Columns | None = None  # of a sparse Jacobian
    row_counts: dict[Any, int] = field(default_factory=dict)  # of the containers that sites write to
    row_loops: dict[Any, int] = field(default_factory=dict)  # open loops, for each iteration of which there are so many
    row_types: dict[Any, Any] = field(default_factory=dict)
    streams: Any = None  # the memory of the sites, kept from launch to launch
    program: Program | None = None  # what the kernel was emitted from
    arrays: dict[int, ContainerInfo] = field(default_factory=dict)  # by position among the leaf arguments
    first_columns: range | None = None  # of the blocks of columns that it can compute; None: of all columns
    takes_first_column: bool = False  # as its last argument
    first_order: tuple[Any, ...] = ()  # its arrays of tangents of the first order, where it has those of the second
    assumed: dict[Any, Role] | None = None  # what the containers that it uses may carry; None: as at its first launch

    def refuse_changed(self) -> None:
        """Raise where a Python number that the kernel was compiled with has changed."""
        refuse_changed(self.primal, self.kernel.captures.changed_number())

    def has_block(self, first: int) -> bool:
        """Whether the kernel can compute the block of columns that begins there."""
        return self.first_columns is None or first in self.first_columns

    def suits(self, roles: dict[Any, Role]) -> bool:
        """Whether the kernel is right for containers that carry this: tangents that it reckons with may be zero."""
        if self.assumed is None:
            return False
        given = ((assumed, roles.get(key, Role())) for key, assumed in self.assumed.items())
        return all(a.has_shadow or replace(a, is_fresh=False) == replace(r, is_fresh=False) for a, r in given)

    def launch(self, args: tuple[Any, ...], given: list[Any]) -> Any:
        """Run it; ``given`` are the shadows, in the order of the keys, and the first column if it takes that."""
        if self.kernel.compiled is None:
            start = time.perf_counter()
            self.kernel.compile()
            stages.note(f"{backend.short_name(self.primal)} compiled", start)
        return self.kernel.launch(*args, *self.passed(given))

    def passed(self, given: list[Any]) -> list[Any]:
        """What it is given as it takes it: shadows that it stores to in pairs as arrays of pairs."""
        if not self.paired:
            return given
        arrays = [a.view(np.uint64) if k in self.paired else a for k, a in zip(self.shadows, given, strict=False)]
        return [*arrays, *given[len(arrays) :]]


class Relaunch:
    """Launches of one kernel with arrays of the same types, set up at the first one."""

    def __init__(self, fused: Fused) -> None:
        self._fused = fused
        self._repeated: backend.RepeatedLaunch | None = None

    def __call__(self, args: tuple[Any, ...], given: list[Any], kept: Collection[Any] = ()) -> None:
        """Run it; the arrays of the keys ``kept`` are the same ones in each call."""
        fused, passed = self._fused, self._fused.passed(given)
        if self._repeated is not None:
            self._repeated(None if k in kept else a for k, a in zip(fused.shadows, passed, strict=True))
            return
        fused.launch(args, given)
        if backend.is_plain_call(fused.primal):
            same = [a if k in kept else None for k, a in zip(fused.shadows, passed, strict=True)]
            self._repeated = backend.RepeatedLaunch(fused.kernel, same)


def refuse_buffers(kernel: Any, program: Program, *, is_sparse: bool) -> None:
    """Raise where a loop uses more arrays and fields than the device may have buffers."""
    most = backend.most_buffers()
    if most is None:
        return
    count = max(map(_buffers, stages_of(program.body)), default=0)
    if count > most:
        problem = f"a loop of {backend.short_name(kernel)} and its derivatives uses {count} arrays and trees of fields"
        if is_sparse:
            raise DenseRowsError(f"{problem}, more than the {most} that are safe on this device")
        raise UnsupportedError(
            f"{problem}. This device may have 32 buffers for them, and Taichi gives wrong numbers beyond. "
            "Place fields together (ti.root.dense(...).place(a, b)), or split the loop into several kernels."
        )


def _buffers(stage: Body) -> int:
    used = read_containers(stage) | written_containers(stage)
    trees = {tree for c in used if not c.is_argument for tree in backend.tree_numbers(c.object)}
    return len(trees) + sum(c.is_argument for c in used)


def refuse_changed(kernel: Any, changed: Any) -> None:
    """Raise where a Python value is another one than when the kernel was first compiled."""
    if changed is not None:
        values = f" from {changed.value!r} to {changed.current()!r}" if changed.is_number else ""
        raise UnsupportedError(
            f"{changed.place}\n{changed.text} has changed{values} since {kernel.func.__qualname__} was compiled. "
            "Taichi puts Python values into a kernel when it first compiles it, and does not notice when they change. "
            "Pass what changes as an argument of the kernel (a field as a ti.template()), or keep numbers in a field."
        )
