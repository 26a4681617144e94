"""The columns of J in one walk: their numbers and owners, and which of them rows hold: all of them in a dense J."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field

from taichi_ext.analysis.affine import Affine
from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.forms.entry_sites import FIRST_SPARSE, Blocks, SparseColumns, check_sparse
from taichi_ext.differentiate.forms.forms import Form, Seed, Weight, columns_of
from taichi_ext.differentiate.plan.storage_facts import StorageFacts
from taichi_ext.program import Container, Local, Statement
from taichi_ext.program.keys import Key, SumKey, Version

SHORT_ROW = 64  # columns that a row may have in any case: a few parameters that all iterations use
Terms = list[tuple[Seed, Weight]]


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

    in_rows: dict[Key, str] = field(default_factory=dict)
    intermediates: dict[Key, int] = field(default_factory=dict)
    versions: dict[Key, int] = field(default_factory=dict)
    sums: dict[Local, int] = field(default_factory=dict)
    no_sums: dict[Local, str] = field(default_factory=dict)
    counters: dict[Statement, int] = field(default_factory=dict)

    def give_up_sum(self, local: Local, why: str) -> None:
        """Take separate columns away from a local."""
        number = self.sums.pop(local, None)
        self.no_sums.setdefault(local, why)
        if number is not None:
            self.intermediates.pop(SumKey(local.name, number), None)
            self.versions.pop(SumKey(local.name, number), None)


class RowSeeds:
    """The request for rows of all columns: a dense Jacobian, or the gradient of an energy."""

    starts: Mapping[Key, int] = {}

    def has_tangents(self, container: Container) -> bool:
        """Whether a container has columns of its own, or rows of entries, when the kernel starts."""
        return False

    def numbering(self, width: int, planned: ColumnDecisions) -> RowNumbering:
        """The columns of a walk."""
        return RowNumbering(width)


@dataclass(frozen=True)
class SparseSeeds(RowSeeds):
    """The request for a sparse Jacobian."""

    columns: SparseColumns
    outputs: frozenset[Key]  # the keys of its outputs
    keys: Mapping[Local | Container, Key]  # those of containers and locals
    # for a Hessian, whose output is a gradient, the row of the first entry of each parameter
    starts: Mapping[Key, int] = field(default_factory=dict)
    has_whole_blocks: bool = False  # whether the symmetric blocks of a Hessian are written including zeros

    def has_entries(self, container: Container, intermediates: Mapping[Key, int]) -> bool:
        """Whether stores to a container are entries of sparse rows."""
        return self.keys.get(container) in self.outputs or self.keys.get(container) in intermediates

    def has_tangents(self, container: Container) -> bool:
        return self.has_entries(container, self.columns.intermediates)

    def numbering(self, width: int, planned: ColumnDecisions) -> RowNumbering:
        return Numbering(self, planned)


class RowNumbering:
    """The columns of a dense J in one walk: rows hold all of them."""

    frees_slots = False  # whether a slot that is not used says that it has no column

    def __init__(self, width: int) -> None:
        self.width = self.all_in_rows = width  # the number of columns of rows; 0 where they do not hold all columns

    def has_entries(self, container: Container) -> bool:
        """Whether stores to a container are entries of sparse rows in this walk."""
        return False

    def is_columns(self, container: Container) -> bool:
        """Whether the entries of a container that is written are separate columns."""
        return False

    def first(self, what: Local | Container) -> int | None:
        """The first column of a parameter, if it has another number here than in the request."""
        return None

    def is_column(self, number: int) -> bool:
        return 0 <= number < self.width

    def is_computed(self, number: int, blocks: Blocks) -> bool:
        """Whether a column of an argument is computed."""
        return blocks.has(number)

    def is_within(self, numbers: tuple[int, int] | None) -> bool:
        """Whether columns, of which the least and the largest number are given if known, are certain to be in rows."""
        return numbers is not None and numbers[0] >= 0 and numbers[1] < self.width

    def is_in_rows(self, column: Affine) -> bool:
        return True

    def no_column(self, owner: Key) -> int:
        """The number in a slot without a column: one that rows have, if the slot may be added to a row."""
        return 0

    def note_owners(self, column: Affine, owners: abc.Set[Key]) -> None:
        """Note the owners of a column by a computed index."""

    def note_form(self, facts: StorageFacts, form: Form, registers: abc.Container[Seed]) -> None:
        """Note the owners of the columns of a form that a local gets."""

    def in_rows(self, terms: Terms, local: Local, loops: tuple[Loop, ...]) -> Terms:
        """Those of the terms of a local that are added to its row, within ``loops`` since its declaration."""
        return terms


class Numbering(RowNumbering):
    """The columns of a sparse J in one walk: rows hold some of them."""

    frees_slots = True

    def __init__(self, asked: SparseSeeds, planned: ColumnDecisions) -> None:
        self.asked = asked
        self._planned = planned
        self.columns = asked.columns.extended(set(planned.in_rows), dict(planned.intermediates), dict(planned.versions))
        self.width, self.all_in_rows = self.columns.width, 0
        self._ranges = self.columns.ranges()
        self._owners: dict[Affine, frozenset[Key]] = {}

    def has_entries(self, container: Container) -> bool:
        return self.asked.has_entries(container, self.columns.intermediates)

    def is_columns(self, container: Container) -> bool:
        return self.asked.keys[container] in self.columns.intermediates

    def is_column(self, number: int) -> bool:
        return super().is_column(number) or number >= FIRST_SPARSE

    def is_computed(self, number: int, blocks: Blocks) -> bool:
        return self.is_column(number)

    def is_within(self, numbers: tuple[int, int] | None) -> bool:
        return False

    def first(self, what: Local | Container) -> int | None:
        key = self.asked.keys.get(what)
        return self.columns.first(Version(key, 0) if key in self.columns.intermediates else key)

    def seed(self, key: Key, row: Affine, size: int, version: int) -> Form:
        """The tangent of an entry that is a column."""
        first, owner = self.columns.first(key), key
        if key in self.columns.intermediates:
            if version >= self.columns.versions.get(key, 1):
                known = self._planned.versions
                known[key] = max(version + 1, known.get(key, 1))
                version = 0
            owner = Version(key, version)
            first = self.columns.first(owner)
        column = row + Affine((), first or 0)
        self.note_owners(column, {owner})
        return {Seed(column): 1}

    def owner(self, column: Affine) -> Key:
        """The owner of a column; None if it is only known at run time."""
        owners = self.owners(column)
        return next(iter(owners)) if len(owners) == 1 else None

    def owners(self, column: Affine) -> frozenset[Key]:
        if not column.is_constant:
            return self._owners.get(column, frozenset())
        return frozenset(key for first, end, key in self._ranges if first <= column.constant < end)

    def note_owners(self, column: Affine, owners: abc.Set[Key]) -> None:
        if not column.is_constant:
            self._owners[column] = self.owners(column) | owners

    def no_column(self, owner: Key) -> int:
        return self.columns.first(owner) or 0 if owner in self.columns.in_rows else -1

    def is_in_rows(self, column: Affine) -> bool:
        if column.is_constant:
            return column.constant < FIRST_SPARSE
        return self.owner(column) in self.columns.in_rows

    def note_form(self, facts: StorageFacts, form: Form, registers: abc.Container[Seed]) -> None:
        indexed = [seed for seed in columns_of(form) if not seed.is_constant]
        facts.register_owners.update({seed: self.owners(seed.column) for seed in indexed if seed in facts.seeds})
        facts.owners.update(*(self.owners(seed.column) for seed in indexed if seed not in registers))

    # --- requirements of the plan

    def require_columns(self, key: Key, size: int) -> None:
        """Require that the entries of a container are separate columns."""
        self._planned.intermediates[key] = size

    def in_rows(self, terms: Terms, local: Local, loops: tuple[Loop, ...]) -> Terms:
        for seed, _ in terms:
            if not self.is_in_rows(seed.column) and not self._takes_sum(local, loops, seed.column, len(terms)):
                self._require_rows(seed.column, local)
        return [(seed, c) for seed, c in terms if self.is_in_rows(seed.column)]

    def _takes_sum(self, local: Local, loops: tuple[Loop, ...], column: Affine, terms: int) -> bool:
        """Whether a term that no row holds yet makes its local a sum with separate columns, from the next walk on.

        If there are as many terms each time as a row has entries, a row is not longer.
        """
        planned = self._planned
        if local in planned.no_sums:
            return False
        size = self.columns.sizes.get(self.owner(column))
        times = math.prod(loop.iterations or 0 for loop in loops)  # zero: not known
        if size is not None and size <= max(SHORT_ROW, terms * times):
            return False
        planned.sums.setdefault(local, len(planned.sums) + len(planned.no_sums))
        return True

    def _require_rows(self, column: Affine, local: Local) -> None:
        """Require that rows hold a column, whose term is added to the row of a local."""
        owner = self.owner(column)
        reason = f"{local.name} adds up terms of parameters that are only known when the kernel runs"
        check_sparse((reason, owner not in self.columns.sizes))
        self._planned.in_rows.setdefault(owner, f"local {local.name}")
