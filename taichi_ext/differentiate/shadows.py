"""Fields and arrays in a differentiated program: seeds that are read, shadows that are read and stored to.

A parameter that is only read is its own seed. Whatever else carries tangents has a *shadow*: a matrix with one row per
scalar entry (C order, components last) and one column per seed. An output's shadow is its Jacobian.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from taichi_ext.analysis.affine import Affine
from taichi_ext.analysis.stores import Site
from taichi_ext.differentiate.build import add, cast, is_number, literal, multiply, negative, operation, select
from taichi_ext.differentiate.decisions import Role
from taichi_ext.differentiate.forms import (
    Form,
    Row,
    Seed,
    coefficient,
    columns_of,
    columns_only,
    has_row,
    is_row,
    row_sum,
    settled,
)
from taichi_ext.differentiate.guards import Condition, clamped, is_inside, only_inside, where
from taichi_ext.differentiate.row_terms import ADDED, only_row
from taichi_ext.program import I32, Assign, Container, Load, Statement, Update, Value

if TYPE_CHECKING:
    from taichi_ext.differentiate.forward import Forward

MOST_WRITTEN_OUT = 16  # columns up to which zeros are stored one by one


class Tangents:
    """The tangents of one container."""

    def __init__(self, forward: Forward, container: Container, role: Role, shadow: Container | None) -> None:
        self.forward = forward
        self.builder = forward.builder
        self.container = container
        self.role = role
        self.shadow = shadow
        self.version = 0
        self.accesses = 0  # to single tangents
        self.components = math.prod(container.element_shape)
        self.extent = forward.seeds.extents[container]

    @property
    def size(self) -> int:
        return math.prod(self.extent.shape) * self.components

    def named_columns(self) -> dict[str, tuple[int, int]]:
        """The first column and the number of columns of a parameter, by name; of components that are parameters."""
        first, name, size = self.role.first_column, self.container.name, self.size
        if self.role.components:
            return {f"{name}_{n}": (column, size // self.components) for n, column in self.role.components}
        return {} if first is None else {name: (first, size)}

    # --- reading

    def row_number(self, indices: tuple[Value, ...], component: Affine) -> tuple[Affine, Value]:
        """The number of an entry's row, in normal form and as a value."""
        affine = self.entry_number(indices) * self.components + component
        return affine, self.forward.naming.value_of(affine)

    def entry_number(self, indices: tuple[Value, ...]) -> Affine:
        """The number of a vector or matrix, or of a number where the container holds these."""
        affine, offsets = Affine(), self.extent.offset or (0,) * self.container.ndim
        for index, size, offset in zip(indices, self.extent.shape, offsets, strict=True):
            affine = affine * size + self.forward.naming.normal(index) + Affine((), -offset)
        return affine

    def component(self, load: Load) -> Affine:
        total = Affine()
        for i, n in zip(load.component, self.container.element_shape, strict=True):
            total = total * n + self.forward.naming.normal(i)
        return total

    def entry(self, row: Any, column: Any) -> Load:
        """One entry of the shadow.

        Shadows have one index: with two, Taichi keeps S[i, i] in a register while S[i, j] is stored to.
        """
        self.accesses += 1
        return self.place(row, column)

    def place(self, row: Any, column: Any) -> Load:
        """One entry of the shadow, where it is not an access of its own."""
        assert self.shadow is not None
        outer, length, inner = row, self.forward.columns, column
        if self.role.by_column:
            outer, length, inner = column, self.size, row
        index = add(multiply(outer, length), inner)
        return Load(self.shadow, (index if isinstance(index, Value) else literal(index, I32),))

    def form(self, load: Load) -> Form:
        """The tangent of an entry as it is now."""
        condition = is_inside(self.forward.naming, load)
        if condition is False:
            return {}
        if self.shadow is None:
            return self._seeds(load, condition)
        affine, index = self.row_number(load.indices, self.component(load))
        index = self.builder.keep(clamped(condition, index), "row")
        row = Row(self.container, affine, self, index, self.version, self.forward.loop_sites())
        return where(condition, {row: 1}, self.container.dtype)

    def _seeds(self, load: Load, condition: Condition) -> Form:
        """The tangent of an entry of a parameter, or of a field some components of which are parameters."""
        component, first = self.component(load), self.role.first_column
        assert first is not None
        if not self.role.components:
            return self._seed(self.row_number(load.indices, component)[0], first, self.size, condition)
        entry, form, known = self.entry_number(load.indices), {}, None
        for number, column in self.role.components:
            if component.is_constant:
                weight: Any = int(component.constant == number)
            else:
                known = known or self.builder.keep(self.forward.naming.value_of(component), "component")
                dtype = self.container.dtype
                weight = select(operation("eq", known, number), literal(1, dtype), literal(0, dtype))
            for seed, factor in self._seed(entry, column, self.size // self.components, condition).items():
                if weight != 0:
                    form[seed] = multiply(factor, weight)
        return form

    def _seed(self, entry: Affine, first: int, size: int, condition: Condition) -> Form:
        """The seed of an entry where a condition holds, nothing where it is outside the block that is computed.

        ``first`` is the column of the first of ``size`` entries.
        """
        column, end, blocks = entry + Affine((), first), self.forward.columns, self.forward.decisions.blocks
        if column.is_constant:
            return where(condition, {Seed(column): 1}, self.container.dtype) if blocks.has(column.constant) else {}
        if blocks.has(first, size):
            return self._guarded(condition, {Seed(column): 1})
        k = self.forward.naming.value_of(column + Affine((), blocks.first or 0))
        if blocks.first is not None:
            k = operation("sub", k, self.forward.arguments.first_of_block())
        k = self.builder.keep(k, "column")
        in_block = operation("logical_and", operation("ge", k, 0), operation("lt", k, end))
        if isinstance(condition, Value):
            in_block = operation("logical_and", condition, in_block)
        in_block = self.builder.keep(in_block, "is_inside")
        within = self.forward.naming.named(self.builder.keep(select(in_block, k, 0), "column"))
        return where(in_block, {Seed(within): 1}, self.container.dtype)

    def _guarded(self, condition: Condition, form: Form) -> Form:
        """A form where a condition holds; its columns are kept within all columns."""
        if isinstance(condition, Value):
            self.forward.naming.note_guarded(form)
        return where(condition, form, self.container.dtype)

    # --- writing

    def store(self, site: Site, group: tuple[Statement, ...]) -> None:
        """``entry = value``, primal and tangent; of several components at once."""
        targets, forms, values = self._prepared(group)
        for s, target, value in zip(group, targets, values, strict=True):
            self.builder.emit(Assign(target, value, place=s.place))
        with only_inside(self.forward.naming, self.forward.cursor, targets[0]) as is_possible:
            if is_possible:
                self._store_tangents(site, targets, forms)

    def _store_tangents(self, site: Site, targets: list[Load], forms: list[Form]) -> None:
        stores = self.forward.facts.stores
        if any(forms) or not (stores.is_untouched(site) and self._is_fresh()):
            self._store_forms(site, targets, forms)

    def _prepared(self, group: tuple[Statement, ...]) -> tuple[list[Load], list[Form], list[Value]]:
        """Indices, forms and values, evaluated before anything is stored."""
        targets: list[Load] = []
        for s in group:
            load = s.target  # type: ignore[attr-defined]
            indices = (
                targets[0].indices if targets else tuple(self.forward.naming.settled_index(i) for i in load.indices)
            )
            component = tuple(i if isinstance(i, int) else self.forward.naming.settled_index(i) for i in load.component)
            targets.append(Load(self.container, indices, component, checks=load.checks, place=load.place))
        raw = [s.value for s in group]  # type: ignore[attr-defined]
        forms = [self.forward.form(v) for v in raw]
        forms = [settled(self.builder, columns_only(f, self.forward.is_column)) for f in forms]
        forms = [self.forward.reversals.swept(f, self) for f in forms]
        values = [self.forward.primal(v) for v in raw]
        if len(values) > 1:
            values = [self.builder.keep(v) for v in values]
        return targets, forms, values

    def _is_fresh(self) -> bool:
        """Whether the tangents are zero at the start; a kernel that makes use of that is only right where they are."""
        if self.role.is_fresh:
            self.forward.relied.add(self.container)
        return self.role.is_fresh

    def _store_forms(self, site: Site, targets: list[Load], forms: list[Form]) -> None:
        forward = self.forward
        covers = forward.facts.stores.covers(site)
        if covers and not self.accesses and not any(self._is_own(leaf) for f in forms for leaf in f):
            forward.note_covered(self)
        if covers and forward.columns <= MOST_WRITTEN_OUT:
            forms = [_written_out(form, forward.columns) for form in forms]
        rows = [self.row_number(t.indices, self.component(t)) for t in targets]
        is_placed = covers and len(forms) == 1 and self._is_placed(only_row(forms[0]))
        has_rows = not is_placed and any(map(has_row, forms))
        fresh = not has_rows and self._needs_no_clearing(site, forms, covers=covers)  # rows overwrite all columns
        kept = is_placed or all(self._keeps_row(form, affine) for form, (affine, _) in zip(forms, rows, strict=True))
        if not kept and (has_rows or not fresh):
            self.builder.loop(forward.columns, lambda k: self._store_column(rows, forms, k))
        self._store_seeds(rows, forms, overwrites=fresh)
        self.version += 1

    def _needs_no_clearing(self, site: Site, forms: list[Form], *, covers: bool) -> bool:
        """Whether all that a store leaves out is zero already, or is stored with the rest."""
        if covers:
            return all(_is_complete(form, self.forward.columns) for form in forms)
        return self.forward.facts.stores.is_first(site) and self._is_fresh()

    def _store_seeds(self, rows: list[Any], forms: list[Form], *, overwrites: bool) -> None:
        """Store what belongs to single columns; constant ones differ, index expressions may meet any other."""
        for (_, index), form in zip(rows, forms, strict=True):
            for seed in sorted(columns_of(form), key=lambda s: (not s.is_constant, s.column.constant)):
                entry = self.entry(index, self.forward.naming.column(seed))
                value = coefficient(form[seed], self.container.dtype)
                is_alone = overwrites and (seed.is_constant or len(form) == 1)
                self.builder.assign(entry, value if is_alone else add(entry, value))

    def _is_placed(self, row: Any) -> bool:
        """Whether the row of a local, which is stored as it is, lies here from the start."""
        storage = self.forward.locals.storages.get(row.source) if row is not None else None
        if storage is None or storage.row is None:
            return False
        decisions = self.forward.decisions.rows
        if self._can_hold(storage):
            decisions.note_stored_row(storage.local, storage.terms, storage.version, self.container)
        return decisions.of(storage.local).container is self.container

    def _can_hold(self, storage: Any) -> bool:
        """Whether the row of a local, which is stored here, may as well lie here."""
        is_declared_here = storage.block is self.forward.block and not storage.is_array
        # local memory pays for the copy where entries are added to, or all of a row is updated: it is vectorised there
        is_better_local = storage.row.is_local and (storage.terms.row_loops > 0 or storage.terms.found == ADDED)
        is_alike = storage.dtype == self.container.dtype and self.components == 1
        return is_declared_here and not is_better_local and is_alike

    def _store_column(self, rows: list[Any], forms: list[Form], k: Value) -> None:
        dtype = self.container.dtype
        sums = [row_sum(form, k) for form in forms]
        values = [literal(0, dtype) if s is None else cast(s, dtype) for s in sums]
        if len(values) > 1:
            values = [self.builder.keep(v, "w") for v in values]
        for (_, index), value in zip(rows, values, strict=True):
            self.builder.assign(self.entry(index, k), value)

    def _is_own(self, leaf: Any) -> bool:
        return is_row(leaf) and leaf.source is self.container

    def _keeps_row(self, form: Form, row: Affine) -> bool:
        """Whether the rows of the form are just the entry's own row, once."""
        rows = [(leaf, c) for leaf, c in form.items() if is_row(leaf)]
        return len(rows) == 1 and is_number(rows[0][1], 1) and self._is_own(rows[0][0]) and rows[0][0].key == row

    def add(self, site: Site, group: tuple[Statement, ...], sign: int) -> None:
        """``entry += value`` (sign 1) or ``entry -= value`` (sign -1): atomic, primal and tangent."""
        targets, forms, values = self._prepared(group)
        for s, target, value in zip(group, targets, values, strict=True):
            self.builder.emit(Update(target, s.op, value, place=s.place))  # type: ignore[attr-defined]
        with only_inside(self.forward.naming, self.forward.cursor, targets[0]) as is_possible:
            if is_possible:
                self._add_tangents(site, targets, forms, sign)

    def _add_tangents(self, site: Site, targets: list[Load], forms: list[Form], sign: int) -> None:
        is_private = self.forward.facts.stores.is_private(site)
        rows = [self.row_number(t.indices, self.component(t))[1] for t in targets]

        def plus(row: Any, column: Any, value: Any) -> None:
            entry = self.entry(row, column)
            value = value if sign > 0 else negative(value)
            if is_private:
                self.builder.assign(entry, add(entry, cast(value, entry.dtype)))
            else:
                self.builder.update(entry, value)

        if any(map(has_row, forms)):

            def body(k: Value) -> None:
                sums = [row_sum(form, k) for form in forms]
                kept = [None if s is None else self.builder.keep(cast(s, self.container.dtype), "w") for s in sums]
                for row, s in zip(rows, kept, strict=True):
                    if s is not None:
                        plus(row, k, s)

            self.builder.loop(self.forward.columns, body)
        for row, form in zip(rows, forms, strict=True):
            for seed, c in columns_of(form).items():
                plus(row, self.forward.naming.column(seed), coefficient(c, self.container.dtype))
        self.version += 1


def _written_out(form: Form, columns: int) -> Form:
    """A form over constant columns with its zeros."""
    if _is_constant(form):
        return {Seed(Affine((), k)): form.get(Seed(Affine((), k)), 0) for k in range(columns)}
    return form


def _is_complete(form: Form, columns: int) -> bool:
    return _is_constant(form) and len(form) == columns


def _is_constant(form: Form) -> bool:
    """Whether all leaves are columns by constant numbers."""
    return all(isinstance(leaf, Seed) and leaf.is_constant for leaf in form)
