"""Fields and arrays where a sparse Jacobian is computed."""

from __future__ import annotations

from taichi_ext.analysis.stores import Site
from taichi_ext.differentiate.facts.arguments import ShadowMatrix
from taichi_ext.differentiate.facts.decisions import Role
from taichi_ext.differentiate.facts.guards import is_inside
from taichi_ext.differentiate.facts.walk import Walk
from taichi_ext.differentiate.forms.coverage import Coverage
from taichi_ext.differentiate.forms.entry_sites import Sunk
from taichi_ext.differentiate.forms.forms import Form, negated
from taichi_ext.differentiate.sparse.sparse_sink import Sink
from taichi_ext.differentiate.statements.shadows import Tangents
from taichi_ext.differentiate.storage.storages import Storages
from taichi_ext.program import Container, Load


class SparseTangents(Tangents):
    """The tangents of one container: with a sink, columns, or with rows of the columns that rows hold."""

    def __init__(
        self,
        walk: Walk,
        container: Container,
        role: Role,
        matrix: ShadowMatrix | None,
        storages: Storages,
        coverage: Coverage,
        sink: Sink,
    ) -> None:
        super().__init__(walk, container, role, matrix, storages, coverage)
        numbering = sink.numbering
        self.key = numbering.asked.keys[container]
        self.sink = sink
        self.is_sunk = numbering.is_sunk(container)
        is_columns = self.key in numbering.columns.composed
        self.sunk = Sunk(self.key, container.name, self.size, container.dtype, is_columns)

    def form(self, load: Load) -> Form:
        """The tangent of an entry as it is now."""
        if self.matrix is not None:
            return super().form(load)
        condition = is_inside(self.walk.naming, load)
        if condition is False:
            return {}
        row = self.row_number(load.indices, self.component(load))[0]
        form = self.sink.read(self.sunk, row) if self.is_sunk else self.sink.seed(self.key, row, self.size)
        return self._guarded(condition, form)

    def _store_tangents(self, site: Site, targets: list[Load], forms: list[Form]) -> None:
        if self.is_sunk:
            self.sink.store(self.sunk, site, [self.row_number(t.indices, self.component(t))[0] for t in targets], forms)
        elif not self._require_columns(forms):
            super()._store_tangents(site, targets, forms)

    def _add_tangents(self, site: Site, targets: list[Load], forms: list[Form], sign: int) -> None:
        if self.is_sunk:
            forms = forms if sign > 0 else [negated(form) for form in forms]
            if any(forms):
                rows = [self.row_number(t.indices, self.component(t))[0] for t in targets]
                self.sink.add(self.sunk, site, rows, forms)
        elif not self._require_columns(forms):
            super()._add_tangents(site, targets, forms, sign)

    def _require_columns(self, forms: list[Form]) -> bool:
        """Whether forms have columns that no row holds, so that the next walk needs a sink here."""
        if not any(map(self.sink.numbering.has_sparse, forms)):
            return False
        self.sink.numbering.require_columns(self.key, self.size)
        return True
