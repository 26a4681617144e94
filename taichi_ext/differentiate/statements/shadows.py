"""Fields and arrays in a differentiated program: seeds that are read, shadows that are read and stored to.

The entries of a parameter that is only read are seeds. Every other container with tangents has a *shadow*: a matrix
with one row per scalar entry (C order, components last) and one column per seed. An output's shadow is its Jacobian.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from taichi_ext.analysis.affine import Affine, value_of
from taichi_ext.analysis.loops import Extent, Loop
from taichi_ext.analysis.stores import StoreSite
from taichi_ext.cached import cached_property
from taichi_ext.differentiate.facts.decisions import Role, size_of
from taichi_ext.differentiate.facts.facts import (
    Condition,
    Declaration,
    PassState,
    ShadowMatrix,
    clamped,
    is_inside,
    where,
)
from taichi_ext.differentiate.forms import forms as linear
from taichi_ext.differentiate.forms.entry_sites import EntryTarget, check_sparse
from taichi_ext.differentiate.memory.rows import LocalRows
from taichi_ext.differentiate.plan.row_terms import ADDED, only_row
from taichi_ext.differentiate.sparse.entry_writer import EntryWriter
from taichi_ext.differentiate.storage.storages import GradientTerms, Storages
from taichi_ext.program import Container, Load, Value
from taichi_ext.program.build import Coefficient, add, cast, element, literal, negative, operation, select
from taichi_ext.program.keys import ADJOINTS


class ShadowFacts:
    """The findings of one walk.

    Attributes:
        read: containers whose tangents have been read.
        covered: containers all of whose tangents are overwritten.
        assumed_zero: containers whose tangents are assumed to be zero at the start.
    """

    def __init__(self) -> None:
        self.read: set[Container] = set()
        self.covered: set[Container] = set()
        self.assumed_zero: set[Container] = set()
        self._in_loop: set[Container] = set()

    def note_covered(self, container: Container) -> None:
        """Note that the current loop writes all tangents of a container that nothing has accessed before."""
        self._in_loop.add(container)

    def end_loop(self) -> None:
        """At the end of a parallel loop, note the containers that it covers and does not read."""
        self.covered |= self._in_loop - self.read
        self._in_loop.clear()


MOST_WRITTEN_OUT = 16  # columns up to which zeros are stored one by one


@dataclass(eq=False)
class ContainerTangents:
    """The tangents of one container.

    Attributes:
        role: its tangents when the kernel starts.
        storages: the storages of locals, whose rows may be parts of the shadow.
        coverage: the walk's findings about shadows.
        version: a number that each change increases.
        accesses: the number of accesses to single tangents.
    """

    walk: PassState
    container: Container
    role: Role
    matrix: ShadowMatrix | None
    storages: Storages
    coverage: ShadowFacts
    version: int = field(default=0, init=False)
    accesses: int = field(default=0, init=False)

    @property
    def components(self) -> int:
        """The count of numbers in an entry."""
        return math.prod(self.container.element_shape)

    @property
    def extent(self) -> Extent:
        return self.walk.facts.seeds.extents[self.container]

    @property
    def size(self) -> int:
        return size_of(self.container, self.walk.facts.seeds)

    # --- reading

    def row(self, load: Load) -> Affine:
        """The number of an entry's row."""
        component = self.component(load)
        return self.walk.naming.entry_number(self.extent, load.indices) * self.components + component

    def component(self, load: Load) -> Affine:
        return self.walk.naming.flat(load.component, self.container.element_shape)

    def entry(self, row: Coefficient, column: Coefficient, /) -> Load:
        assert self.matrix is not None
        self.accesses += 1
        return self.matrix.entry(row, column)

    def form(self, load: Load) -> linear.Form:
        condition = is_inside(self.walk, load)
        if condition is False:
            return {}
        if self.matrix is None:
            return self._seeds(load, condition)
        affine = self.row(load)
        index = self.walk.builder.keep(clamped(condition, value_of(affine)), "row")
        row = linear.Row(self.container, affine, self, index, self.version, self.walk.cursor.loops)
        return where(condition, {row: 1}, self.container.dtype)

    def _seeds(self, load: Load, condition: Condition) -> linear.Form:
        """The tangent of an entry of a parameter, or of a field some components of which are parameters."""
        first = self.role.first_column
        assert first is not None
        if not self.role.components:
            return self._seed(self.row(load) + Affine((), first), condition)
        component = self.component(load)
        entry, form, known = self.walk.naming.entry_number(self.extent, load.indices), {}, None
        for number, column in self.role.components:
            if component.is_constant:
                weight: Coefficient = int(component.constant == number)
            else:
                known = known or self.walk.builder.keep(value_of(component), "component")
                dtype = self.container.dtype
                weight = select(operation("eq", known, number), literal(1, dtype), literal(0, dtype))
            for seed, factor in self._seed(entry + Affine((), column), condition).items():
                if weight != 0:
                    form[seed] = linear.times(factor, weight)
        return form

    def _seed(self, column: Affine, condition: Condition) -> linear.Form:
        """The seed of an entry, by its column, where a condition holds; zero if it is outside of the computed block."""
        end, blocks = self.walk.facts.columns, self.walk.blocks
        if column.is_constant and not blocks.is_for_all:
            return (
                where(condition, {linear.Seed(column): 1}, self.container.dtype) if blocks.has(column.constant) else {}
            )
        if blocks.first is None:
            return self._guarded(condition, {linear.Seed(column): 1})
        k = operation("sub", value_of(column + Affine((), blocks.first)), self.walk.arguments.first_of_block())
        k = self.walk.builder.keep(k, "column")
        in_block = operation("logical_and", operation("ge", k, 0), operation("lt", k, end))
        if isinstance(condition, Value):
            in_block = operation("logical_and", condition, in_block)
        in_block = self.walk.builder.keep(in_block, "is_inside")
        within = self.walk.naming.named(self.walk.builder.keep(select(in_block, k, 0), "column"))
        return where(in_block, {linear.Seed(within): 1}, self.container.dtype)

    def _guarded(self, condition: Condition, form: linear.Form) -> linear.Form:
        """A form where a condition holds; its columns are kept within all columns."""
        if isinstance(condition, Value):
            self.walk.naming.note_guarded(form)
        return where(condition, form, self.container.dtype)

    # --- writing

    def store(self, site: StoreSite, targets: list[Load], forms: list[linear.Form]) -> None:
        """The tangents of ``entry = value``; of several components at once."""
        stores = self.walk.facts.stores
        if any(forms) or not (stores.is_untouched(site) and self._is_fresh()):
            self._store_forms(site, targets, forms)

    def _is_fresh(self) -> bool:
        """Whether the tangents are zero at the start; a kernel that uses this is only valid if they are."""
        if self.role.is_fresh:
            self.coverage.assumed_zero.add(self.container)
        return self.role.is_fresh

    def _store_forms(self, site: StoreSite, targets: list[Load], forms: list[linear.Form]) -> None:
        columns = self.walk.facts.columns
        covers = self.walk.facts.stores.covers(site)
        if covers and not self.accesses and not any(self._is_own(leaf) for f in forms for leaf in f):
            self.coverage.note_covered(self.container)
        if covers and columns <= MOST_WRITTEN_OUT:
            forms = [_written_out(form, columns) for form in forms]
        affines = list(map(self.row, targets))
        rows = list(map(value_of, affines))
        is_placed = covers and len(forms) == 1 and self._is_placed(only_row(forms[0]))
        has_rows = not is_placed and any(map(linear.has_row, forms))
        fresh = not has_rows and self._needs_no_clearing(site, forms, covers=covers)  # rows overwrite all columns
        kept = is_placed or all(map(self._keeps_row, forms, affines))
        if not kept and (has_rows or not fresh):
            self.walk.builder.loop(
                columns,
                lambda k: linear.assign_column(self.walk.builder, [self.entry(n, k) for n in rows], forms, k),
            )
        self._store_seeds(rows, forms, overwrites=fresh)
        self.version += 1

    def _needs_no_clearing(self, site: StoreSite, forms: list[linear.Form], *, covers: bool) -> bool:
        """Whether the columns that a store does not write are zero already, or are stored with the rest."""
        if covers:
            return all(_is_constant(form) and len(form) == self.walk.facts.columns for form in forms)
        return self.walk.facts.stores.is_first(site) and self._is_fresh()

    def _store_seeds(self, rows: list[Value], forms: list[linear.Form], *, overwrites: bool) -> None:
        """Store single columns; constant columns are distinct, index expressions may equal any other."""
        for index, form in zip(rows, forms, strict=True):
            for seed in sorted(linear.columns_of(form), key=lambda s: (not s.is_constant, s.column.constant)):
                entry = self.entry(index, self.walk.naming.column(seed))
                value = linear.coefficient(form[seed], self.container.dtype)
                is_alone = overwrites and (seed.is_constant or len(form) == 1)
                self.walk.builder.assign(entry, value if is_alone else add(entry, value))

    def _is_placed(self, row: linear.Row | None) -> bool:
        """Whether the row of a local that is stored unchanged is in this shadow from the start."""
        storage = self.storages.with_rows(row.source) if row is not None else None
        if storage is None or storage.rows is None:
            return False
        if self._can_hold(storage.declared, storage.rows):
            storage.rows.terms.note_stored(self.container, storage.rows.version)
        return self.walk.plan.row(storage.declared.local).container is self.container

    def _can_hold(self, declared: Declaration, rows: LocalRows) -> bool:
        """Whether the row of a local that is stored to this shadow can be in it from the start."""
        local, terms = declared.local, rows.terms
        is_declared_here = declared.block is self.walk.cursor.block and not local.shape
        # local memory pays for the copy if entries are added to, or whole rows updated: these are vectorised there
        is_better_local = rows.memory.is_local and (terms.row_loops > 0 or terms.found == ADDED)
        is_alike = local.dtype == self.container.dtype and self.components == 1
        return is_declared_here and not is_better_local and is_alike

    def _is_own(self, leaf: linear.Leaf) -> bool:
        return linear.is_row(leaf) and leaf.source is self.container

    def _keeps_row(self, form: linear.Form, row: Affine) -> bool:
        """Whether the only row of the form is the entry's own, with factor 1."""
        own = only_row(form)
        return own is not None and self._is_own(own) and own.key == row

    def add(self, site: StoreSite, targets: list[Load], forms: list[linear.Form], sign: int) -> None:
        """The tangents of ``entry += value`` (sign 1) or ``entry -= value`` (sign -1): atomic."""
        is_private = self.walk.facts.stores.is_private(site)
        rows = [value_of(self.row(target)) for target in targets]

        def plus(row: Value, column: Value, value: Coefficient) -> None:
            entry = self.entry(row, column)
            value = value if sign > 0 else negative(value)
            self.walk.builder.increase(entry, cast(value, entry.dtype), is_shared=not is_private)

        if any(map(linear.has_row, forms)):

            def body(k: Value) -> None:
                sums = [linear.row_sum(form, k) for form in forms]
                kept = [None if s is None else self.walk.builder.keep(cast(s, self.container.dtype), "w") for s in sums]
                for row, s in zip(rows, kept, strict=True):
                    if s is not None:
                        plus(row, k, s)

            self.walk.builder.loop(self.walk.facts.columns, body)
        for row, form in zip(rows, forms, strict=True):
            for seed, c in linear.columns_of(form).items():
                plus(row, self.walk.naming.column(seed), linear.coefficient(c, self.container.dtype))
        self.version += 1


def _written_out(form: linear.Form, columns: int) -> linear.Form:
    """A form over constant columns, with explicit zeros."""
    if _is_constant(form):
        return {linear.Seed(Affine((), k)): form.get(linear.Seed(Affine((), k)), 0) for k in range(columns)}
    return form


def _is_constant(form: linear.Form) -> bool:
    """Whether all leaves are columns with constant numbers."""
    return all(isinstance(leaf, linear.Seed) and leaf.is_constant for leaf in form)


# Tangents of containers that are not shadows: entries of a sparse Jacobian, and terms of an energy's gradient.
#
# For an energy that is a field or an array, whose gradient is differentiated again, the tangents are the gradient.
# Fields that the energy is computed from: for ``u[k] = f(x)``, ``energy = g(u)``, the gradient of
# ``g(u) + sum(adjoint[k] * f(x))`` is computed, with ``u`` as a parameter. With ``adjoint = dg/du``, the Jacobian of
# that gradient contains the second derivatives of ``f``, and the tangents of ``u`` turn it into the Hessian by ``x``.


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

    def form(self, load: Load) -> linear.Form:
        if self.matrix is not None:
            return super().form(load)
        condition = is_inside(self.walk, load)
        if condition is False:
            return {}
        row = self.row(load)
        if self.has_entries:
            return self._guarded(condition, self.writer.read(self.target, row))
        return self._guarded(condition, self.writer.seed(self.target.key, row, self.size))

    def store(self, site: StoreSite, targets: list[Load], forms: list[linear.Form]) -> None:
        if self.has_entries:
            self.writer.store(self.target, site, list(map(self.row, targets)), forms)
        elif not self._require_columns(forms):
            super().store(site, targets, forms)

    def add(self, site: StoreSite, targets: list[Load], forms: list[linear.Form], sign: int) -> None:
        if self.has_entries:
            forms = forms if sign > 0 else list(map(linear.negated, forms))
            if any(forms):
                self.writer.add(self.target, site, list(map(self.row, targets)), forms)
        elif not self._require_columns(forms):
            super().add(site, targets, forms, sign)

    def _require_columns(self, forms: list[linear.Form]) -> bool:
        """Whether forms have columns that no row holds, so that the next walk needs entries here; requires them."""
        columns = [seed.column for form in forms for seed in linear.columns_of(form)]
        if all(map(self.writer.numbering.is_in_rows, columns)):
            return False
        self.writer.numbering.require_columns(self.target.key, self.size)
        return True


@dataclass(eq=False)
class EnergyTangents(ContainerTangents):
    """The tangents of an energy that is a container: they are the gradient."""

    gradient: GradientTerms = field(kw_only=True)

    def _store_forms(self, site: StoreSite, targets: list[Load], forms: list[linear.Form]) -> None:
        if linear.has_row(forms[0]):  # perhaps the gradient itself, so each column is read before it is stored
            super()._store_forms(site, targets, forms)
            return
        if not (self.walk.facts.stores.is_first(site) and self._is_fresh()):
            self.gradient.clear()
        self.gradient.add(forms[0])
        self.version += 1

    def add(self, site: StoreSite, targets: list[Load], forms: list[linear.Form], sign: int) -> None:
        self.gradient.add(forms[0] if sign > 0 else linear.negated(forms[0]))
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

    def form(self, load: Load) -> linear.Form:
        here = self.walk.cursor.loops
        self._is_read = True
        for site in self._sites:
            self._check(is_twice=not all(_is_own(site, loop) for loop in site.loops if loop in here))
        form = super().form(load)
        if any(site.loops == here[: len(site.loops)] for site in self._sites):
            self.gradient.same_loop.update(linear.columns_of(form))
        return form

    def store(self, site: StoreSite, targets: list[Load], forms: list[linear.Form]) -> None:
        is_once = site in self._sites and all(_is_own(site, loop) for loop in site.loops)  # not ``entry *= value``
        self._check(is_twice=not is_once or any(map(self._is_before(site), self._sites)))
        self.add(site, targets, forms, 1)

    def _is_before(self, store: StoreSite) -> Callable[[StoreSite], bool]:
        """Whether an entry of a store may have been written to before."""
        at = self._sites.index(store)

        def is_before(site: StoreSite) -> bool:
            if site is store or site.is_disjoint_from(store):
                return False
            is_apart = site.loops[:1] != store.loops[:1] or self.walk.facts.stores.is_private(site)
            return site.is_store or self._sites.index(site) < at or not is_apart

        return is_before

    def add(self, site: StoreSite, targets: list[Load], forms: list[linear.Form], sign: int) -> None:
        earlier = self.gradient.same_loop  # adjoints need it as a column
        is_of_other = bool(earlier) and any(linear.has_row(form) or earlier & form.keys() for form in forms)
        self._check(is_twice=self._is_read and any(forms), is_of_other=is_of_other)
        walk, first = self.walk, self.role.first_column
        for target, form in zip(targets, forms, strict=True):
            if form:
                row = self.row(target) + Affine((), first or 0)
                array = walk.arguments.find(ADJOINTS, "adjoints", self.gradient.sums.dtype)
                adjoint = self.walk.builder.keep(element(array, value_of(row)), "w")
                adjoint = cast(adjoint if sign > 0 else negative(adjoint), self.container.dtype)
                self.gradient.add({leaf: linear.times(c, adjoint) for leaf, c in form.items()})
        self.version += 1

    def _check(self, *, is_twice: bool, is_of_other: bool = False) -> None:
        reason = f"the energy is computed from {self.container.name}, "
        check_sparse(
            (f"{reason}whose entries are stored twice, or after they are read", is_twice),
            (f"{reason}and that from another field that the same loop stores", is_of_other),
        )


def _is_own(site: StoreSite, loop: Loop) -> bool:
    """Whether different iterations of a loop write to different entries."""
    return bool(loop.atoms) and site.covers(loop.atoms)
