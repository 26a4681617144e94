"""The columns of a sparse Jacobian in one walk: their numbers and owners, and which of them rows hold."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from taichi_ext.analysis.affine import Affine
from taichi_ext.differentiate.forms.entry_sites import FIRST_SPARSE, DenseRowsError, SparseColumns
from taichi_ext.differentiate.forms.forms import Form, Seed, columns_of
from taichi_ext.differentiate.plan.storage_plan import StoragePlan
from taichi_ext.program import Container, Local
from taichi_ext.program.keys import Key, Version

MOST_IN_ROWS = 4096  # most columns of rows


@dataclass(frozen=True)
class SparseSeeds:
    """The request for a sparse Jacobian.

    Attributes:
        outputs: the keys of its outputs.
        keys: those of containers and locals.
        starts: for a Hessian, whose output is a gradient, the row of the first entry of each parameter.
        has_whole_blocks: whether the symmetric blocks of a Hessian are written including zeros.
    """

    columns: SparseColumns
    outputs: frozenset[Key]
    keys: Mapping[Local | Container, Key]
    starts: Mapping[Key, int] = field(default_factory=dict)
    has_whole_blocks: bool = False

    def has_entries(self, container: Container, intermediates: Mapping[Key, int]) -> bool:
        """Whether stores to a container are entries of sparse rows."""
        return self.keys.get(container) in self.outputs or self.keys.get(container) in intermediates


class Numbering:
    """The columns of one walk."""

    def __init__(self, asked: SparseSeeds, plan: StoragePlan) -> None:
        self.asked = asked
        self._plan = plan
        planned = plan.columns
        self.columns = asked.columns.extended(set(planned.in_rows), dict(planned.intermediates), dict(planned.versions))
        self._ranges = self.columns.ranges()
        self._owners: dict[Affine, frozenset[Key]] = {}

    def has_entries(self, container: Container) -> bool:
        """Whether stores to a container are entries of sparse rows in this walk."""
        return self.asked.has_entries(container, self.columns.intermediates)

    def first(self, what: Local | Container) -> int | None:
        key = self.asked.keys.get(what)
        return self.columns.first(Version(key, 0) if key in self.columns.intermediates else key)

    def seed(self, key: Key, row: Affine, size: int, version: int) -> Form:
        """The tangent of an entry that is a column."""
        first, owner = self.columns.first(key), key
        if key in self.columns.intermediates:
            if version >= self.columns.versions.get(key, 1):
                known = self._plan.columns.versions
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

    def note_owners(self, column: Affine, owners: AbstractSet[Key]) -> None:
        if not column.is_constant:
            self._owners[column] = self.owners(column) | owners

    def is_alone(self, key: Key) -> bool:
        """Whether all columns are one parameter's entries, so that the host leaves out numbers outside of them."""
        is_sole = len(self._ranges) == 1 and self._ranges[0][2] == key
        return is_sole and key not in self.columns.in_rows and not self.asked.has_whole_blocks

    def no_column(self, owner: Key) -> int:
        """The number in a slot without a column: one that rows have, if the slot may be added to a row."""
        return self.columns.first(owner) or 0 if owner in self.columns.in_rows else -1

    def has_sparse(self, form: Form) -> bool:
        """Whether a form has columns that no row holds."""
        return any(not self.is_in_rows(seed.column) for seed in columns_of(form))

    def is_in_rows(self, column: Affine) -> bool:
        if column.is_constant:
            return column.constant < FIRST_SPARSE
        return self.owner(column) in self.columns.in_rows

    def is_in_window(self, column: Affine) -> bool:
        """Whether a column is, by its number, one of those that rows hold."""
        return column.is_constant and column.constant < self.columns.width

    # --- requirements of the plan

    def require_columns(self, key: Key, size: int) -> None:
        """Require that the entries of a container are separate columns."""
        self._plan.columns.intermediates[key] = size

    def require_rows(self, column: Affine, local: Local) -> None:
        """Require that rows hold a column, whose term is added to the row of a local."""
        owner = self.owner(column)
        if owner is None or owner not in self.columns.sizes:
            raise DenseRowsError(f"{local.name} adds up terms of parameters that are only known when the kernel runs")
        in_rows = self._plan.columns.in_rows
        if owner in in_rows:
            return
        in_rows[owner] = f"local {local.name}"
        total = sum(self.columns.sizes[key] for key in in_rows)
        if total > MOST_IN_ROWS:
            raise DenseRowsError(f"{local.name} adds up terms of {total} parameters, more than {MOST_IN_ROWS}")
