"""Fields and arrays where a sparse Jacobian is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from taichi_ext.analysis.stores import Site
from taichi_ext.differentiate.facts.guards import is_inside
from taichi_ext.differentiate.forms.entry_sites import EntryTarget
from taichi_ext.differentiate.forms.forms import Form, negated
from taichi_ext.differentiate.sparse.entry_writer import EntryWriter
from taichi_ext.differentiate.statements.shadows import Tangents
from taichi_ext.program import Load


@dataclass(eq=False)
class SparseTangents(Tangents):
    """The tangents of one container: entries, columns, or rows of the columns that rows hold."""

    writer: EntryWriter = field(kw_only=True)

    @cached_property
    def target(self) -> EntryTarget:
        """Where its entries are written to."""
        key = self.writer.numbering.asked.keys[self.container]
        is_columns = key in self.writer.numbering.columns.intermediates
        return EntryTarget(key, self.container.name, self.size, self.container.dtype, is_columns)

    @property
    def has_entries(self) -> bool:
        """Whether stores to it are entries of sparse rows."""
        return self.writer.numbering.has_entries(self.container)

    def form(self, load: Load) -> Form:
        """The current tangent of an entry."""
        if self.matrix is not None:
            return super().form(load)
        condition = is_inside(self.walk.naming, load)
        if condition is False:
            return {}
        row = self.row(load)
        if self.has_entries:
            return self._guarded(condition, self.writer.read(self.target, row))
        return self._guarded(condition, self.writer.seed(self.target.key, row, self.size))

    def _store_tangents(self, site: Site, targets: list[Load], forms: list[Form]) -> None:
        if self.has_entries:
            self.writer.store(self.target, site, list(map(self.row, targets)), forms)
        elif not self._require_columns(forms):
            super()._store_tangents(site, targets, forms)

    def _add_tangents(self, site: Site, targets: list[Load], forms: list[Form], sign: int) -> None:
        if self.has_entries:
            forms = forms if sign > 0 else list(map(negated, forms))
            if any(forms):
                self.writer.add(self.target, site, list(map(self.row, targets)), forms)
        elif not self._require_columns(forms):
            super()._add_tangents(site, targets, forms, sign)

    def _require_columns(self, forms: list[Form]) -> bool:
        """Whether forms have columns that no row holds, so that the next walk needs entries here; requires them."""
        if not any(map(self.writer.numbering.has_sparse, forms)):
            return False
        self.writer.numbering.require_columns(self.target.key, self.size)
        return True
