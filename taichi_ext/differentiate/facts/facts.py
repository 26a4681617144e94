"""Facts about a program, derived before its tangents are computed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import taichi_ext.program as ir
from taichi_ext.analysis.activity import Activity
from taichi_ext.analysis.affine import IntegerForms, value_of
from taichi_ext.analysis.loops import Loop, find_loops, integer_forms
from taichi_ext.analysis.stores import Stores
from taichi_ext.differentiate.facts.decisions import DifferentiationRequest
from taichi_ext.differentiate.forms.entry_sites import Blocks
from taichi_ext.differentiate.forms.forms import Cursor, Form, LocalSeed, Row, Scope, is_row, times
from taichi_ext.differentiate.plan.naming import Naming
from taichi_ext.differentiate.plan.sparse_numbering import RowNumbering
from taichi_ext.differentiate.plan.storage_plan import StoragePlan
from taichi_ext.program.build import (
    Builder,
    Coefficient,
    Expressions,
    add,
    cast,
    element,
    literal,
    multiply,
    operation,
    select,
)
from taichi_ext.program.keys import VALUES, Purpose, Scratch
from taichi_ext.simplify.usage import assigned_locals

OwnSeeds = Mapping[ir.Local, Mapping[int, LocalSeed]]


@dataclass(frozen=True)
class Facts:
    """The request of a differentiation, and facts that follow from the text of the program."""

    program: ir.Program  # the program to differentiate
    seeds: DifferentiationRequest  # the request
    activity: Activity  # the values that carry tangents
    own_seeds: OwnSeeds  # seeds without a column, by local and entry: of positions of pixels and tangents of rules
    olds: Mapping[ir.Statement, ir.Local]  # locals for the old values that atomic operations return
    changed: AbstractSet[ir.Local]  # the locals that are assigned to
    indices: IntegerForms  # the normal forms of indices
    loops: Mapping[ir.Statement, Loop]
    stores: Stores
    columns: int  # the number of columns of a row
    serial: frozenset[ir.Statement] = frozenset()  # the parallel loops that run serially

    @classmethod
    def of(cls, program: ir.Program, seeds: DifferentiationRequest, activity: Activity, own_seeds: OwnSeeds) -> Facts:
        """The facts before any loop is known to need its order."""
        atomics = [s for s in ir.statements(program.body) if isinstance(s, ir.Atomic)]
        olds: dict[ir.Statement, ir.Local] = {}
        for s in atomics:
            olds[s] = s.result or ir.Local("old", s.target.dtype, (), "temporary")
        active = {olds[s] for s in atomics if s.target.memory in (activity.locals | activity.containers)}
        activity = replace(activity, locals=activity.locals | active)
        indices, loops = integer_forms(program.body, seeds.extents), find_loops(program.body, seeds.extents)
        stores, changed = Stores(program, indices, loops, seeds.extents), assigned_locals(program.body)
        return cls(program, seeds, activity, own_seeds, olds, changed, indices, loops, stores, seeds.columns)

    def with_serial(self, serial: AbstractSet[ir.Statement]) -> Facts:
        """The same facts, with these loops run serially."""
        loops = find_loops(self.program.body, self.seeds.extents, frozenset(serial))
        stores = Stores(self.program, self.indices, loops, self.seeds.extents)
        return replace(self, serial=frozenset(serial), loops=loops, stores=stores)

    def is_active(self, value: ir.Value) -> bool:
        return self.activity.has(value)


# The arguments of a differentiated kernel after the user's: shadows, and scratch memory for long rows.


def shadow_argument(c: ir.Container) -> ir.Argument:
    """The argument of a kernel for a shadow or scratch array."""
    return ir.Argument(c.name, f"ti.types.ndarray(dtype=ti.{c.dtype}, ndim=1)", c)


def first_column_argument(local: ir.Local) -> ir.Argument:
    """The argument of a kernel for the first column of the computed block."""
    return ir.Argument(local.name, "ti.i32", ir.Read(local))


Part = tuple[int, Coefficient]  # the number of parts of some memory, and the number of the one to use


class Arguments:
    """The arguments of one walk: the purpose of each, and the array."""

    def __init__(self, program: ir.Program) -> None:
        self.given: list[tuple[Purpose, ir.Container]] = []
        self.scratch_sizes: dict[Scratch, int] = {}
        self.first_column: ir.Local | None = None
        self._taken = {a.name for a in program.arguments} | {c.name for c in program.containers}

    def add(self, what: Purpose, name: str, dtype: ir.Type) -> ir.Container:
        """A new array of one dimension, with a unique name."""
        argument = ir.Container(self._unique(name if name.isidentifier() else "d_field"), dtype, 1, is_argument=True)
        self.given.append((what, argument))
        return argument

    def first_of_block(self) -> ir.Read:
        """The first column of the computed block, an argument of the kernel."""
        if self.first_column is None:
            self.first_column = ir.Local(self._unique("first_column"), ir.I32, (), "parameter")
        return ir.Read(self.first_column)

    def _unique(self, name: str) -> str:
        unique, count = name, 1
        while unique in self._taken:
            unique, count = f"{name}_{count}", count + 1
        self._taken.add(unique)
        return unique

    def find(self, what: Purpose, name: str, dtype: ir.Type) -> ir.Container:
        """The array for a purpose; a new one if there is none yet."""
        known = next((argument for key, argument in self.given if key == what), None)
        return self.add(what, name, dtype) if known is None else known

    def reserve_scratch(self, size: int, dtype: ir.Type, part: Part) -> tuple[ir.Container, Coefficient]:
        """Memory for a row of a length, in a part of it: the array, and the start of the row."""
        key = Scratch(dtype.name)
        parts, own = part
        start = self.scratch_sizes.get(key, 0)
        self.scratch_sizes[key] = start + size * parts
        return self.find(key, f"scratch_{dtype.name}", dtype), add(multiply(own, size), start)


@dataclass(frozen=True)
class ShadowMatrix:
    """An argument of one dimension as a matrix of tangents: a row for each number, a column for each column of J.

    It has one index: with two, Taichi keeps S[i, i] in a register while S[i, j] is stored to.
    """

    array: ir.Container
    rows: int
    columns: int
    by_column: bool  # columns are contiguous in memory
    version: int = 0  # of tangents of numbers that do not change

    @classmethod
    def of(cls, facts: Facts, array: ir.Container, rows: int) -> ShadowMatrix:
        return cls(array, rows, facts.columns, facts.seeds.device.by_column)

    def entry(self, row: Coefficient, column: Coefficient) -> ir.Load:
        outer, length, inner = row, self.columns, column
        if self.by_column:
            outer, length, inner = column, self.rows, row
        return element(self.array, add(multiply(outer, length), inner))

    def row(self, number: int) -> Form:
        """The tangent of a number that does not change in the kernel."""
        return {Row(self.array, number, self, number): 1}


def given_tangents(facts: Facts, arguments: Arguments) -> ShadowMatrix | None:
    """The tangents of arguments and Python numbers if these have rows instead of columns; None otherwise."""
    if facts.seeds.values is None or not facts.seeds.arguments:
        return None
    dtype, rows = facts.seeds.values
    return ShadowMatrix.of(facts, arguments.add(VALUES, "d_values", dtype), rows)


# The state shared by the parts of one walk over a program.


@dataclass(frozen=True)
class Declaration:
    """The declaration of a local: the block, the loops around it, the place in the source."""

    local: ir.Local
    block: Scope
    loops: tuple[Loop, ...]
    place: ir.Place | None


@dataclass(frozen=True)
class PassState:
    """One walk over the statements of a program."""

    facts: Facts  # facts about the program
    plan: StoragePlan  # the storage of tangents
    blocks: Blocks  # the blocks of columns that the program is valid for so far
    builder: Builder  # where statements are emitted
    expressions: Expressions  # the values of the statement, and those in temporaries
    cursor: Cursor  # the current statement of the walk
    naming: Naming  # the names of columns and indices
    numbering: RowNumbering  # the columns
    arguments: Arguments  # the arguments of the new kernel after those of the original one
    # errors in the program, raised at the end unless another walk may resolve them
    problems: list[str] = field(default_factory=list)

    def declaration(self, local: ir.Local) -> Declaration:
        """The declaration of a local that is declared at the current place."""
        return Declaration(local, self.cursor.block, self.cursor.loops, self.builder.place)


# Guards for entries whose indices may be out of range: no tangent is read or stored there.
#
# The kernel itself reads whatever is in memory there; tangents are in separate memory.

INSIDE = "inside"  # the name of locals that hold whether the indices of an entry are in range
Condition = ir.Value | bool  # a bool if it is known


def is_inside(walk: PassState, entry: ir.Load | ir.Read) -> Condition:
    """Whether the indices of an entry are in range, in a local that does not change."""
    if not entry.checks:
        return True
    builder = walk.builder
    indices = (*entry.indices, *entry.component) if isinstance(entry, ir.Load) else entry.index
    numbers = [int(i.value) if isinstance(i, ir.Const) else i for i in (indices[check.axis] for check in entry.checks)]
    checked = list(zip(numbers, entry.checks, strict=True))
    if not all(isinstance(n, ir.Value) or _is_within(n, check) for n, check in checked):
        builder.keep(operation("lt", literal(0, ir.I32), 0), INSIDE)  # read only by watched programs
        return False
    checked = [(n, check) for n, check in checked if isinstance(n, ir.Value)]
    if not checked:
        return True
    name = tuple((walk.naming.normal(n), check.first, check.end) for n, check in checked)
    known = builder.evaluated.get(name)
    if known is None:
        parts = (_lies_within(value_of(form), check) for (form, *_), (_, check) in zip(name, checked, strict=True))
        known = builder.evaluated[name] = builder.keep(functools.reduce(_and, parts), INSIDE)
    else:
        # read by watched programs
        builder.emit(ir.Declare(ir.Local(INSIDE, ir.U1, (), INSIDE), (known,), place=builder.place))
    return known


def _is_within(index: int, check: ir.Check) -> bool:
    return (check.first is None or index >= check.first) and (check.end is None or index < check.end)


def _and(a: ir.Value, b: ir.Value) -> ir.Value:
    return ir.Op("bit_and", (a, b), ir.U1)  # Taichi would branch for ``and``


def _lies_within(index: ir.Value, check: ir.Check) -> ir.Value:
    if check.end is None:
        return operation("ge", index, check.first or 0)
    if check.first is None:
        return operation("lt", index, check.end)
    start = index if not check.first else operation("sub", index, check.first)
    # as a number without a sign, one below 0 is larger than all
    return operation("lt", cast(start, ir.U32), literal(check.end - check.first, ir.U32))


def clamped(condition: Condition, index: ir.Value) -> ir.Value:
    """An index that is in range in any case."""
    return index if isinstance(condition, bool) else select(condition, index, literal(0, ir.I32))


def where(condition: Condition, form: Form, dtype: ir.Type) -> Form:
    """A form where a condition holds, and zero elsewhere, even if its rows are infinite there."""
    if isinstance(condition, bool):
        return form if condition else {}
    weight = select(condition, literal(1, dtype), literal(0, dtype))
    return {
        replace(leaf, condition=condition) if is_row(leaf) else leaf: c if is_row(leaf) else times(weight, c)
        for leaf, c in form.items()
    }


@contextlib.contextmanager
def only_inside(walk: PassState, entry: ir.Load | ir.Read) -> Iterator[bool]:
    """Within the context, emitted statements run only if the indices of an entry are in range; False if never."""
    builder = walk.builder
    condition = is_inside(walk, entry)
    if isinstance(condition, bool):
        yield condition
        return
    with walk.cursor.in_block(is_guard=True), builder.collecting() as body:
        yield True
    builder.emit(ir.If(condition, tuple(body), place=builder.place))
