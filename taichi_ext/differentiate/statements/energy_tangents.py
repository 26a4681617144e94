"""The tangents of an energy that is a field or an array, where its gradient is differentiated again."""

from __future__ import annotations

from taichi_ext.analysis.stores import Site
from taichi_ext.differentiate.facts.arguments import ShadowMatrix
from taichi_ext.differentiate.facts.decisions import Role
from taichi_ext.differentiate.facts.walk import Walk
from taichi_ext.differentiate.forms.coverage import Coverage
from taichi_ext.differentiate.forms.forms import Form, has_row, negated
from taichi_ext.differentiate.statements.shadows import Tangents
from taichi_ext.differentiate.storage.energy_gradient import EnergyGradient
from taichi_ext.differentiate.storage.storages import Storages
from taichi_ext.program import Container, Load


class EnergyTangents(Tangents):
    """The tangents of an energy that is a container: they are the gradient."""

    def __init__(
        self,
        walk: Walk,
        container: Container,
        role: Role,
        matrix: ShadowMatrix | None,
        storages: Storages,
        coverage: Coverage,
        gradient: EnergyGradient,
    ) -> None:
        super().__init__(walk, container, role, matrix, storages, coverage)
        self.gradient = gradient

    def _store_forms(self, site: Site, targets: list[Load], forms: list[Form]) -> None:
        if has_row(forms[0]):  # it may be the gradient itself, so each column is read before it is stored
            super()._store_forms(site, targets, forms)
            return
        if not (self.walk.facts.stores.is_first(site) and self._is_fresh()):
            self.gradient.clear()
        self.gradient.add(forms[0])
        self.version += 1

    def _add_tangents(self, site: Site, targets: list[Load], forms: list[Form], sign: int) -> None:
        self.gradient.add(forms[0] if sign > 0 else negated(forms[0]))
        self.version += 1
