"""Tangents of containers that are not shadows: entries of a sparse Jacobian, and terms of an energy's gradient.

For an energy that is a field or an array, whose gradient is differentiated again, the tangents are the gradient.
Fields that the energy is computed from: for ``u[k] = f(x)``, ``energy = g(u)``, the gradient of
``g(u) + sum(adjoint[k] * f(x))`` is computed, with ``u`` as a parameter. With ``adjoint = dg/du``, the Jacobian of that
gradient contains the second derivatives of ``f``, and the tangents of ``u`` turn it into the Hessian with respect to
``x``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from taichi_ext.analysis.affine import Affine, value_of
from taichi_ext.analysis.loops import Loop
from taichi_ext.analysis.stores import StoreSite
from taichi_ext.cached import cached_property
from taichi_ext.differentiate.facts.facts import is_inside
from taichi_ext.differentiate.forms.entry_sites import DenseRowsError, EntryTarget
from taichi_ext.differentiate.forms.forms import Form, columns_of, has_row, negated, times
from taichi_ext.differentiate.sparse.entry_writer import EntryWriter
from taichi_ext.differentiate.statements.shadows import ContainerTangents
from taichi_ext.differentiate.storage.storages import GradientTerms
from taichi_ext.program import U32, Const, Load, Op, Value
from taichi_ext.program.build import cast, element, negative
from taichi_ext.program.keys import ADJOINTS


@dataclass(eq=False)
class SparseTangents(ContainerTangents):
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

    def leaves_out(self, target: Load, condition: Value) -> bool:
        """Whether a condition says that a row of a Hessian exists: others are left out, if blocks are not projected."""
        match condition:
            case Op("lt", (Op("cast", (index,), dtype), Const(end))) if dtype == U32 and end:
                known, asked = self.walk.facts.indices.form(index), self.writer.numbering.asked
            case _:
                return False
        if known is None or not asked.starts or asked.has_whole_blocks or self.target.key not in asked.outputs:
            return False
        factor = self.size // int(end)
        rest = self.walk.facts.indices.unclamped(self.row(target)) + known * -factor
        return rest.is_constant and 0 <= rest.constant < factor and factor * end == self.size

    def form(self, load: Load) -> Form:
        if self.matrix is not None:
            return super().form(load)
        condition = is_inside(self.walk.naming, load)
        if condition is False:
            return {}
        row = self.row(load)
        if self.has_entries:
            return self._guarded(condition, self.writer.read(self.target, row))
        form = self.writer.seed(self.target.key, row, self.size)
        is_first = all(check.axis == 0 for check in load.checks)  # else the number may be that of another entry
        is_needless = is_first and self.writer.numbering.is_alone(self.target.key)
        return form if is_needless else self._guarded(condition, form)

    def _store_tangents(self, site: StoreSite, targets: list[Load], forms: list[Form]) -> None:
        if self.has_entries:
            self.writer.store(self.target, site, list(map(self.row, targets)), forms)
        elif not self._require_columns(forms):
            super()._store_tangents(site, targets, forms)

    def _add_tangents(self, site: StoreSite, targets: list[Load], forms: list[Form], sign: int) -> None:
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


@dataclass(eq=False)
class EnergyTangents(ContainerTangents):
    """The tangents of an energy that is a container: they are the gradient."""

    gradient: GradientTerms = field(kw_only=True)

    def _store_forms(self, site: StoreSite, targets: list[Load], forms: list[Form]) -> None:
        if has_row(forms[0]):  # perhaps the gradient itself, so each column is read before it is stored
            super()._store_forms(site, targets, forms)
            return
        if not (self.walk.facts.stores.is_first(site) and self._is_fresh()):
            self.gradient.clear()
        self.gradient.add(forms[0])
        self.version += 1

    def _add_tangents(self, site: StoreSite, targets: list[Load], forms: list[Form], sign: int) -> None:
        self.gradient.add(forms[0] if sign > 0 else negated(forms[0]))
        self.version += 1


class IntermediateTangents(EnergyTangents):
    """A field that the energy is computed from: its entries are columns, as those of a parameter are.

    A value stored to it, times its adjoint, is a term of the energy. Each entry has one adjoint, so it must not change
    after its first read.
    """

    _is_read = False

    @property
    def _sites(self) -> list[StoreSite]:
        return self.walk.facts.stores.sites[self.container]

    def form(self, load: Load) -> Form:
        here = self.walk.cursor.loops
        self._is_read = True
        for site in self._sites:
            if not all(_is_own(site, loop) for loop in site.loops if loop in here):
                self._raise_dense()
        form = super().form(load)
        if any(site.loops == here[: len(site.loops)] for site in self._sites):
            self.gradient.same_loop.update(columns_of(form))
        return form

    def _store_tangents(self, site: StoreSite, targets: list[Load], forms: list[Form]) -> None:
        is_once = site in self._sites and all(_is_own(site, loop) for loop in site.loops)  # not ``entry *= value``
        if not is_once or any(map(self._is_before(site), self._sites)):
            self._raise_dense()
        self._add_tangents(site, targets, forms, 1)

    def _is_before(self, store: StoreSite) -> Callable[[StoreSite], bool]:
        """Whether an entry of a store may have been written to before."""
        at = self._sites.index(store)

        def is_before(site: StoreSite) -> bool:
            if site is store or site.is_disjoint_from(store):
                return False
            is_apart = site.loops[:1] != store.loops[:1] or self.walk.facts.stores.is_private(site)
            return site.is_store or self._sites.index(site) < at or not is_apart

        return is_before

    def _add_tangents(self, site: StoreSite, targets: list[Load], forms: list[Form], sign: int) -> None:
        if self._is_read and any(forms):
            self._raise_dense()
        earlier = self.gradient.same_loop
        if earlier and any(has_row(form) or earlier & form.keys() for form in forms):  # adjoints need it as a column
            raise DenseRowsError(
                f"the energy is computed from {self.container.name}, "
                "and that from another field that the same loop stores"
            )
        walk, first = self.walk, self.role.first_column
        for target, form in zip(targets, forms, strict=True):
            if form:
                row = self.row(target) + Affine((), first or 0)
                array = walk.arguments.find(ADJOINTS, "adjoints", self.gradient.sums.dtype)
                adjoint = self.walk.builder.keep(element(array, value_of(row)), "w")
                adjoint = cast(adjoint if sign > 0 else negative(adjoint), self.container.dtype)
                self.gradient.add({leaf: times(c, adjoint) for leaf, c in form.items()})
        self.version += 1

    def _raise_dense(self) -> NoReturn:
        raise DenseRowsError(
            f"the energy is computed from {self.container.name}, whose entries are stored twice, or after they are read"
        )


def _is_own(site: StoreSite, loop: Loop) -> bool:
    """Whether different iterations of a loop write to different entries."""
    return bool(loop.atoms) and site.covers(loop.atoms)
