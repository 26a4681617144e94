"""Tangents in a sparse Jacobian: each store or addition writes its entries instead of a row of all columns.

Containers whose tangents are written as entries (outputs, and containers with columns that no row can hold) have no
shadow. An entry that is read from them is a separate column: the host multiplies the entries of one stage with the
rows that the containers had before it. So a stage must not read its own writes, except for an entry that the same
iteration has stored before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from taichi_ext.analysis.affine import Affine, Atom, atom_value
from taichi_ext.analysis.loops import Loop
from taichi_ext.analysis.stores import StoreSite
from taichi_ext.differentiate.facts.facts import PassState, ShadowMatrix
from taichi_ext.differentiate.forms import forms as linear
from taichi_ext.differentiate.forms.entry_sites import (
    EntryTarget,
    Group,
    Site,
    SiteEntry,
    SiteLoops,
    SparseResult,
    check_sparse,
)
from taichi_ext.differentiate.plan.sparse_numbering import Numbering
from taichi_ext.differentiate.sparse.sparse_counts import Around, Counts
from taichi_ext.program import I32, Container, For, Type, Value, While
from taichi_ext.program.build import Coefficient, add, element, literal, multiply
from taichi_ext.program.keys import RETURN, Key, SiteArray, is_of_sum


@dataclass(frozen=True)
class SparseAccess:
    """A read or write of a container with sparse rows."""

    order: int
    stage: int
    key: Key
    row: Affine
    loops: tuple[Loop, ...]
    is_injective: bool = False  # no two iterations touch the same entry
    is_sum: bool = False
    since: int | None = None  # for a read of a form stored by this iteration: the number of loops around the store


def check_order(reads: list[SparseAccess], writes: list[SparseAccess]) -> None:
    """Raise if a stage reads its own writes, or stores twice to one entry."""
    accesses, pairs = itertools.product(reads, writes), itertools.combinations(writes, 2)
    is_read = any(r.key == w.key and r.stage == w.stage and _meet(r, w) for r, w in accesses)
    is_twice = any(a.key == b.key and a.stage == b.stage and not _are_in_order(a, b) for a, b in pairs)
    check_sparse(
        ("an entry is read in the loop that writes it, by another iteration or twice", is_read),
        ("entries are stored to twice in one loop, in an order that is not known", is_twice),
    )


def _meet(read: SparseAccess, write: SparseAccess) -> bool:
    """Whether a read may or may not see a write of the same stage."""
    if read.row.is_apart_from(write.row):
        return False
    if read.since is not None:  # stored before by this iteration: valid unless another store comes in between
        is_later = write.order > read.order
        inner = read.loops[read.since :]
        return is_later and bool(inner) and write.loops[: read.since + 1] == read.loops[: read.since + 1]
    is_before = read.order < write.order and read.row == write.row
    return not (is_before and write.is_injective)


def _are_in_order(first: SparseAccess, second: SparseAccess) -> bool:
    """Whether the host can decide which of two writes of a stage counts; the first is earlier in the text."""
    if (first.is_sum and second.is_sum) or first.row.is_apart_from(second.row):
        return True
    is_same_row = first.row == second.row
    if not second.is_sum:
        return is_same_row and first.loops == second.loops and first.is_injective and second.is_injective
    is_around = second.loops[: len(first.loops)] == first.loops
    return is_same_row and first.is_injective and is_around


MOST_SLOTS = 2**31 - 1
_UNCOUNTED = "{} in a loop whose number of iterations is not known"
LAST_STEP = 2**31  # of a stage: containers are written after all locals that it uses


@dataclass
class _Stored:
    """The form of an entry that this iteration has stored."""

    form: linear.Form
    block: linear.Scope
    loops: tuple[Loop, ...]


class RowWriter:
    """What one walk writes of a dense J besides rows in shadows and locals: those of returned values."""

    def __init__(self, walk: PassState) -> None:
        self.walk = walk

    def begin_statement(self) -> None:
        """The next statement of a block begins."""

    def before(self, s: For | While) -> None:
        """Emit what a loop needs before it."""

    def after(self, s: For | While) -> None:
        """Emit what a loop needs after it."""

    def is_later(self, column: Affine) -> bool:
        """Whether a column is that of a local whose rows are only written in a later step."""
        return False

    def returned(self, forms: Iterable[linear.Form], count: int, dtype: Type) -> None:
        """Store the tangents of so many returned values, one row each; ``forms`` are made as they are taken."""
        builder, columns = self.walk.builder, self.walk.facts.columns
        shadow = self.walk.arguments.add(RETURN, "d_result", dtype)
        entry = ShadowMatrix.of(self.walk.facts, shadow, count).entry
        for n, form in enumerate(forms):
            if linear.has_row(form):
                builder.loop(columns, lambda k, n=n, f=form: builder.assign(entry(n, k), linear.row_value(f, k, dtype)))
            for seed, c in linear.columns_of(form).items():
                target = entry(n, self.walk.naming.column(seed))
                builder.assign(target, add(target, linear.coefficient(c, dtype)))

    def forget_unused(self) -> None:
        """At the end of a walk, drop what only earlier walks needed."""

    def result(self) -> SparseResult | None:
        """The entries of a sparse Jacobian; raises if its rows cannot follow the order of reads and writes."""
        return None


@dataclass(eq=False)
class EntryWriter(RowWriter):
    """The entries that one walk writes."""

    walk: PassState
    numbering: Numbering
    counts: Counts  # the counters of slots
    sites: list[Site] = field(default_factory=list)  # the sites so far
    containers: dict[Key, EntryTarget] = field(default_factory=dict)  # what they write to
    stage: int = 0  # the number of the top-level statement
    _steps: dict[Key, set[tuple[int, int]]] = field(default_factory=dict)  # in which each container is written
    _reads: list[SparseAccess] = field(default_factory=list)
    _writes: list[SparseAccess] = field(default_factory=list)
    _stored: dict[tuple[Key, Affine], _Stored] = field(default_factory=dict)
    _order: int = 0

    def result(self) -> SparseResult:
        check_order(self._reads, self._writes)
        return SparseResult(tuple(self.sites), self.numbering.columns, self.containers)

    def begin_statement(self) -> None:
        self.stage += self.walk.cursor.block.is_kernel

    def before(self, s: For | While) -> None:
        self.counts.before(s)

    def after(self, s: For | While) -> None:
        self.counts.after(s)

    def forget_unused(self) -> None:
        self.counts.forget_unused(self.sites)

    # --- reading

    def seed(self, key: Key, row: Affine, size: int) -> linear.Form:
        """The tangent of an entry that is a column: of the container's version before this stage."""
        return self.numbering.seed(key, row, size, self.versions(key, (self.stage, 0)))

    def versions(self, key: Key, before: tuple[int, int]) -> int:
        """The number of versions of a container before a step, without the first: one for each step that writes it.

        The host counts the same steps, from the sites.
        """
        return sum(step < before for step in self._steps.get(key, ()))

    def is_later(self, column: Affine, step: tuple[int, int] | None = None) -> bool:
        owners, step = self.numbering.owners(column), step or (self.stage, LAST_STEP)
        return any(is_of_sum(o) and o.number > self.versions(o.of, step) for o in owners)

    def read(self, target: EntryTarget, row: Affine) -> linear.Form:
        """The tangent of an entry of such a container."""
        cursor, loops = self.walk.cursor, self.walk.cursor.loops
        stored = self._stored.get((target.key, row))
        self._order += 1
        if stored is not None and cursor.block.is_within(stored.block) and not cursor.is_stale(stored.form):
            self._reads.append(SparseAccess(self._order, self.stage, target.key, row, loops, since=len(stored.loops)))
            return dict(stored.form)
        self._reads.append(SparseAccess(self._order, self.stage, target.key, row, loops))
        if not target.is_columns:
            self.numbering.require_columns(target.key, target.size)
            return {}
        return self.seed(target.key, row, target.size)

    def _block(self) -> linear.Scope:
        """The block of the statement, without a guard: reads by the same index are guarded, too."""
        block = self.walk.cursor.block
        return block.outer if block.is_guard and block.outer is not None else block

    # --- writing

    def store(self, target: EntryTarget, site: StoreSite | None, rows: list[Affine], forms: list[linear.Form]) -> None:
        """``entry = value``."""
        is_injective = self.emit(target, True if site is None else site, rows, forms, is_sum=False)
        for row, form in zip(rows, forms, strict=True):
            self._forget(target.key, row)
            self._stored[target.key, row] = _Stored(dict(form), self._block(), self.walk.cursor.loops)
            self._note(target.key, row, is_injective, is_sum=False)

    def returned(self, forms: Iterable[linear.Form], count: int, dtype: Type) -> None:
        target = EntryTarget(RETURN, "the return value", count, dtype, is_columns=False)
        self.store(target, None, [Affine((), n) for n in range(count)], list(forms))

    def add(self, target: EntryTarget, site: StoreSite, rows: list[Affine], forms: list[linear.Form]) -> None:
        """``entry += value``."""
        is_injective = self.emit(target, site, rows, forms, is_sum=True)
        is_private = self.walk.facts.stores.is_private(site)
        loops = self.walk.cursor.loops
        for row, form in zip(rows, forms, strict=True):
            before = self._stored.get((target.key, row))
            base: linear.Form | None = None
            if before is not None and before.block is self._block() and is_private:
                base = before.form
            elif is_private and is_injective and not self._is_written_before(target.key, row):
                base = self.seed(target.key, row, target.size) if target.is_columns else None
            self._forget(target.key, row)
            if base is not None:
                total = dict(base)
                linear.accumulate(total, form)
                self._stored[target.key, row] = _Stored(total, self._block(), loops)
            self._note(target.key, row, is_injective, is_sum=True)

    def next_step(self) -> int:
        """The number of the next step in which locals with separate columns are written."""
        self._order += 1
        return self._order

    def _is_written_before(self, key: Key, row: Affine) -> bool:
        return any(w.key == key and w.stage == self.stage and not row.is_apart_from(w.row) for w in self._writes)

    def _forget(self, key: Key, row: Affine) -> None:
        for known in [k for k in self._stored if k[0] == key and not row.is_apart_from(k[1])]:
            del self._stored[known]

    def _note(self, key: Key, row: Affine, is_injective: bool, *, is_sum: bool) -> None:
        self._order += 1
        loops = self.walk.cursor.loops
        self._writes.append(SparseAccess(self._order, self.stage, key, row, loops, is_injective, is_sum))

    # --- one site

    def emit(
        self,
        target: EntryTarget,
        place: StoreSite | bool,
        rows: list[Affine],
        forms: list[linear.Form],
        *,
        is_sum: bool,
        step: int | None = None,
    ) -> bool:
        """Register an entry site, and write its entries; returns whether it writes each row at most once."""
        around = self._around(f"{target.name} is written")
        counter, slot, is_shared = (None, None, False) if around.counted is None else self.counts.slot(around)
        variables = [axis.variable for axis in around.axes]
        parts: dict[Affine, int] | None = None
        if self.numbering.asked.starts and target.key in self.numbering.asked.outputs:
            rows = [self.walk.facts.indices.unclamped(row) for row in rows]
            parts = self._mirror(rows, forms)
        groups = self._groups(forms, rows if parts is not None else None)
        used = [a for form in (*rows, *(e.column for g in groups for e in g.entries)) for a, _ in form.terms]
        site = Site(
            number=len(self.sites),
            stage=(self.stage, LAST_STEP) if step is None else (self.stage, step),
            key=target.key,
            is_sum=is_sum,
            around=SiteLoops(self.walk.cursor.loops, around.axes, around.opened, counter),
            is_conditional=self._is_conditional() if counter is None else is_shared and self._is_interrupted(),
            is_injective=counter is None and self._is_once(place, variables),
            rows=tuple(rows),
            atoms=tuple(a for a in dict.fromkeys(used) if a not in variables),
            groups=groups,
            has_rows=any(map(linear.has_row, forms)),
            parts=parts,
        )
        self._register(site, target)
        slot = self.walk.builder.keep(self.counts.number(around), "slot") if slot is None else slot
        self._write_integers(site, slot)
        self._write_values(site, target, slot, forms)
        return site.is_injective

    def _register(self, site: Site, target: EntryTarget) -> None:
        """Add a site to the others; raises if its entries cannot be multiplied or indexed."""
        self.sites.append(site)
        self._steps.setdefault(site.key, set()).add(site.stage)
        columns = [e.column for group in site.groups for e in group.entries]
        is_later = site.stage[1] != LAST_STEP and any(self.is_later(column, site.stage) for column in columns)
        size = max(site.integers, *(len(group.entries) for group in site.groups), 0)
        is_large, sizes = site.slots * size > MOST_SLOTS, f"{site.slots} x {size}"
        check_sparse(
            (f"the tangent of {target.name} uses values that are computed later in the same loop", is_later),
            (f"{target.name} takes {sizes} entries, more than Taichi can index", is_large),
        )
        self.containers[target.key] = target

    def _mirror(self, rows: list[Affine], forms: list[linear.Form]) -> dict[Affine, int] | None:
        """For a Hessian, copy the entries above the diagonal of a block to those below it.

        Returns:
            The number of each column among the rows; None if the block has rows of tangents, or if its columns are not
            the parameters' entries that its rows are.
        """
        starts, numbers, seeds = self.numbering.asked.starts, {row: n for n, row in enumerate(rows)}, {}
        for seed in {seed: None for form in forms for seed in linear.columns_of(form)}:
            owner = self.numbering.owner(seed.column)
            first = starts[owner] - (self.numbering.columns.first(owner) or 0) if owner in starts else 0
            number = numbers.get(seed.column + Affine((), first))
            if owner not in starts or number is None:
                return None
            seeds[number] = seed
        if any(map(linear.has_row, forms)) or len(numbers) < len(rows):
            return None
        for above, below in itertools.combinations(range(len(rows)), 2):
            for n, m in ((above, below), (below, above)):
                if seeds.get(m) in forms[n]:
                    if n not in seeds:
                        return None
                    forms[m][seeds[n]] = forms[n][seeds[m]]
                    break
        if self.numbering.asked.has_whole_blocks:
            for number, other in itertools.product(seeds, seeds.values()):
                forms[number].setdefault(other, 0)
        return {seed.column: number for number, seed in seeds.items()}

    def iteration(self, name: str) -> Around:
        """The loops around this place; raises if their iterations cannot be numbered."""
        around = self._around(f"{name} is declared")
        check_sparse((_UNCOUNTED.format(f"{name} is declared"), around.counted is not None))
        return around

    def _around(self, what: str) -> Around:
        around = self.counts.around(self.walk.cursor.loops)
        check_sparse((_UNCOUNTED.format(what), around is None))
        assert around is not None
        return around

    def _is_conditional(self) -> bool:
        """Whether an iteration may skip the place."""
        is_branch = self.walk.cursor.block.depth > 1 + len(self.walk.cursor.loops)
        return is_branch or self._is_interrupted() or self.counts.is_partial(self.walk.cursor.loops)

    def _is_interrupted(self) -> bool:
        return any(loop.is_interrupted for loop in self.walk.cursor.loops)

    def _is_once(self, place: StoreSite | bool, variables: list[Atom]) -> bool:
        """Whether no two slots have the same row."""
        if not isinstance(place, StoreSite):
            return place
        opened = [a for loop in self.walk.cursor.loops[:1] for a in loop.atoms]
        return place.covers([*opened, *variables], has_component=True)

    def _groups(self, forms: list[linear.Form], rows: list[Affine] | None) -> tuple[Group, ...]:
        """The entries, row by row; those of a Hessian, whose ``rows`` are given, by pairs of vertices, as in H."""
        groups: dict[Key, list[SiteEntry]] = {}
        order: dict[tuple[tuple[Atom, int], ...], int] = {(): 0}  # by first appearance
        for part, form in enumerate(forms):
            columns = {seed.column: None for seed in linear.columns_of(form)}
            if linear.has_row(form):
                width = self.numbering.columns.width
                columns = {c: None for c in columns if not self.numbering.is_in_rows(c)}
                columns.update((Affine((), k), None) for k in range(width))
            for column in columns:
                order.setdefault(column.terms, len(order))
            for column in sorted(columns, key=lambda c: (order[c.terms], c.constant)):
                groups.setdefault(self.numbering.owner(column), []).append(SiteEntry(part, column))
        if rows is not None:
            places = [(order.get(row.terms, -1), row.constant) for row in rows]
            for entries in groups.values():
                entries.sort(key=lambda e: (places[e.part][0], order[e.column.terms], places[e.part][1]))
        return tuple(Group(owner, tuple(entries)) for owner, entries in groups.items())

    def _write_integers(self, site: Site, slot: Coefficient) -> None:
        if not site.integers:
            return
        array = self.walk.arguments.add(SiteArray(site.number, "integers"), f"integers_{site.number}", I32)
        values = [*map(atom_value, site.atoms), *([literal(1, I32)] * site.is_conditional)]
        start = self.walk.builder.keep(multiply(slot, site.integers), "start")
        for n, value in enumerate(values):
            self.walk.builder.assign(element(array, add(start, n)), value)

    def _write_values(self, site: Site, target: EntryTarget, slot: Coefficient, forms: list[linear.Form]) -> None:
        for group in site.groups:
            array = self.walk.arguments.add(site.entries(group.owner), f"entries_{site.number}", target.dtype)
            start = self.walk.builder.keep(multiply(slot, len(group.entries)), "start")
            places = {(e.part, e.column): n for n, e in enumerate(group.entries)}
            for part, form in enumerate(forms):
                own = {column: n for (p, column), n in places.items() if p == part}
                self._write_part(array, start, form, own)

    def _write_part(self, array: Container, start: Coefficient, form: linear.Form, places: dict[Affine, int]) -> None:
        has_rows, width = linear.has_row(form), self.numbering.width
        numbered = ((c.constant, n) for c, n in places.items() if has_rows and c.is_constant)
        in_rows = sorted((number, n) for number, n in numbered if number < width)
        if in_rows:
            self._write_row(array, start, form, in_rows)
        for seed, c in linear.columns_of(form).items():
            value = linear.coefficient(c, array.dtype)
            if has_rows and self.numbering.is_in_rows(seed.column):
                self._add_to_row(array, start, seed, places, value)
            elif seed.column in places:
                self.walk.builder.assign(element(array, add(start, places[seed.column])), value)

    def _write_row(self, array: Container, start: Coefficient, form: linear.Form, to: list[tuple[int, int]]) -> None:
        """Write the rows of a form, column by column, to consecutive places."""
        first, place = to[0]
        base = self.walk.builder.keep(add(start, place), "start")

        def body(k: Value) -> None:
            self.walk.builder.assign(element(array, add(base, k)), linear.row_value(form, add(k, first), array.dtype))

        self.walk.builder.loop(len(to), body)

    def _add_to_row(
        self, array: Container, start: Coefficient, seed: linear.Seed, places: dict[Affine, int], value: Value
    ) -> None:
        owner = self.numbering.owner(seed.column)
        if owner is None:  # a local that has separate columns from the next walk on
            return
        first = self.numbering.columns.first(owner) or 0
        place = places.get(Affine((), first))
        if place is None:
            return  # it belongs to another group
        number = self.walk.naming.column_within(seed, first, self.numbering.columns.sizes[owner])
        entry = element(array, self.walk.builder.keep(add(add(start, place), number), "place"))
        self.walk.builder.assign(entry, add(entry, value))
