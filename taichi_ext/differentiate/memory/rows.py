"""Rows: one number per column, where seeds add up (a sum over a loop) or are too many.

``for n in range(m): s += x[n] * x[n]`` adds to entry n of the row of s in each iteration; ``s = t`` copies that of t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from taichi_ext.analysis.affine import atom_value
from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.facts.facts import Arguments, Declaration, Facts, Part, PassState, ShadowMatrix
from taichi_ext.differentiate.forms.forms import Form, Seed, Weight, assign_column, coefficient, has_row, row_sum
from taichi_ext.differentiate.plan.row_terms import STORED, Terms, only_row
from taichi_ext.program import I32, For, Load, Local, Op, Read, Type, Value
from taichi_ext.program.build import Builder, Coefficient, Index, add, cast, element, literal, multiply
from taichi_ext.program.keys import Scratch

MOST_NUMBERS = 2**31 - 1  # in scratch memory: indices are of 32 bits


@dataclass(frozen=True)
class RowMemory:
    """Memory for the rows of one local."""

    entry: Callable[[Coefficient], Read | Load]  # gives one number
    is_local: bool = False


def local_row(builder: Builder, name: str, size: int, dtype: Type, *, is_filled: bool = False) -> RowMemory:
    """A row in a local array: fastest to access, but slow to compile if long."""
    array = builder.array(name, size, dtype, is_filled=is_filled)
    return RowMemory(lambda k: Read(array, (k if isinstance(k, Value) else int(k),)), is_local=True)


def scratch_row(
    builder: Builder, arguments: Arguments, size: int, dtype: Type, part: Part, *, is_filled: bool
) -> RowMemory:
    """A row in an extra argument of the kernel; ``part`` is the result of ``scratch_part``."""
    array, start = arguments.reserve_scratch(size, dtype, part)
    start = builder.keep(start, "start")
    return _cleared(builder, size, dtype, RowMemory(lambda k: element(array, add(start, k))), is_filled=is_filled)


def placed_row(builder: Builder, number: Value, matrix: ShadowMatrix, *, is_filled: bool) -> RowMemory:
    """A row of J itself, written directly by an iteration of the parallel loop over all of an output."""
    number = builder.keep(number, "row")
    memory = RowMemory(lambda k: matrix.entry(number, k))
    return _cleared(builder, matrix.columns, matrix.array.dtype, memory, is_filled=is_filled)


def _cleared(builder: Builder, size: int, dtype: Type, memory: RowMemory, *, is_filled: bool) -> RowMemory:
    """Set a row to zero, unless each entry is written before it is read."""
    if not is_filled:
        builder.loop(size, lambda k: builder.assign(memory.entry(k), literal(0, dtype)))
    return memory


def scratch_part(walk: PassState, size: int, dtype: Type) -> Part:
    """The number of parts of scratch memory, and the number of this iteration's part, for rows of a size.

    There is a part for each thread, or for each iteration if those are fewer or threads cannot be numbered.
    """
    loop, device = walk.cursor.parallel_loop, walk.facts.seeds.device
    if loop is None:
        return 1, 0
    parts, number = device.threads, Op("global_thread_idx", (), I32)
    if not device.is_host:
        assert isinstance(loop.statement, For)
        parts = parts // device.block * int(loop.statement.config.get("block_dim") or device.block)
        iterations = _numbered_iterations(loop, walk.facts)
        if iterations is not None and (not parts or iterations[0] < parts):
            parts, number = iterations
    taken = walk.arguments.scratch_sizes.get(Scratch(dtype.name), 0)
    if not parts or taken + parts * size > MOST_NUMBERS:
        why = f"rows of {parts} threads would have too many numbers" if parts else "threads have no numbers here"
        walk.plan.keep_order(loop, f"its locals have too many columns for local arrays, and {why}")
        return 1, 0
    return parts, number


def _numbered_iterations(loop: Loop, facts: Facts) -> Part | None:
    """How many iterations a loop has at most, and the number of this one."""
    if loop.reach is None or any(isinstance(a, Local) and a in facts.changed for a in loop.atoms):
        return None
    number: Coefficient = 0
    for atom, (first, end) in zip(loop.atoms, loop.reach, strict=True):
        number = add(multiply(number, end - first), add(cast(atom_value(atom), I32), -first))
    return math.prod(end - first for first, end in loop.reach), number


class LocalRows:
    """The rows of one local, one for each entry of a local array."""

    def __init__(self, walk: PassState, declared: Declaration, memory: RowMemory) -> None:
        self._walk = walk
        self._declared = declared
        self.memory = memory
        self.version = 0
        is_array = bool(declared.local.shape)
        self.terms = Terms(walk.naming, walk.cursor, walk.facts.columns, is_array=is_array)

    def entry(self, index: Index, column: Coefficient) -> Read | Load:
        return self.memory.entry(self._place(index, column))

    def _place(self, index: Index, column: Coefficient) -> Coefficient:
        columns = self._walk.facts.columns
        if isinstance(index, int):
            return add(column, index * columns)
        return add(multiply(index, columns), column)

    def write(self, forms: list[Form], indices: list[Index], *, are_zero: bool) -> None:
        """Replace the rows by the rows of forms, or clear them."""
        keeps = self.keeps(forms, indices)
        if (any(map(has_row, forms)) or not are_zero) and not keeps:
            self.terms.row_loops += 1
            builder, columns = self._walk.builder, self._walk.facts.columns
            builder.loop(columns, lambda k: assign_column(builder, [self.entry(i, k) for i in indices], forms, k))

    def write_terms(self, terms: list[tuple[Seed, Weight]], index: Index, *, replaces: bool) -> None:
        """Write the remaining columns of a form; ``replaces``: a single column replaces the whole row."""
        for seed, c in terms:
            target = self.entry(index, self._walk.naming.column(seed))
            value = coefficient(c, self._declared.local.dtype)
            self._walk.builder.assign(target, value if replaces and len(terms) == 1 else add(target, value))

    def keeps(self, forms: list[Form], indices: list[Index]) -> bool:
        """Whether the only row of each form is that of the entry itself, with factor 1."""
        return all(self._keeps(form, index) for form, index in zip(forms, indices, strict=True))

    def _keeps(self, form: Form, index: Index) -> bool:
        row = only_row(form)
        is_own = row is not None and row.source is self._declared.local and row.key == index
        return is_own and isinstance(index, int)

    def add(self, form: Form, index: Index, registers: Collection[Seed]) -> None:
        """Add the rows of a form; ``registers`` hold its other columns."""
        if has_row(form):
            self.terms.row_loops += 1
            self._walk.builder.loop(self._walk.facts.columns, lambda k: self._add_column(form, index, k))
        self.terms.note_add(form, registers)

    def _add_column(self, form: Form, index: Index, k: Value) -> None:
        total = row_sum(form, k)
        if total is not None:
            self._increase(index, k, cast(total, self._declared.local.dtype))

    def add_terms(self, terms: list[tuple[Seed, Weight]], index: Index) -> None:
        """Add the remaining columns of a form."""
        is_stored = self._walk.plan.row(self._declared.local).terms >= STORED
        for seed, c in terms:
            column, value = self._walk.naming.column(seed), coefficient(c, self._declared.local.dtype)
            if is_stored:
                self._walk.builder.assign(self.entry(index, column), value)
            else:
                self._increase(index, column, value)

    def _increase(self, index: Index, column: Value, value: Value) -> None:
        """Add to one number; atomically if iterations of a parallel loop share the local."""
        is_shared = self._declared.block.is_kernel and self._walk.cursor.parallel_loop is not None
        self._walk.builder.increase(self.entry(index, column), value, is_shared=is_shared)
