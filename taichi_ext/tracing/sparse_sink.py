"""Tangents that go into a sparse Jacobian: each store or addition writes its entries instead of a row of all columns.

Containers with a sink (the outputs, and what carries columns that no row can hold) have no shadow.  What is read from
them is a column of its own: the host multiplies the entries of one stage with the rows that the containers had before
it.  So a stage must not read what it has written itself, but for an entry that the same iteration stored before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from taichi_ext import backend
from taichi_ext.derivative.linear_form import Affine, Form, Seed, accumulate, as_expression, is_row
from taichi_ext.derivative.rows import rows_loop
from taichi_ext.derivative.storage import row_sum
from taichi_ext.differentiate.entry_sites import Axis, Entry, Group, Site
from taichi_ext.differentiate.sparse_columns import Columns, DenseRowsError, composed_key
from taichi_ext.tracing.facts import WriteSite

MOST_IN_ROWS = 4096  # columns that rows may have
MOST_SLOTS = 2**31 - 1


@dataclass(frozen=True)
class Access:
    """A read or write of a container with a sink."""

    order: int
    stage: int
    key: Any
    row: Affine
    loops: tuple[Any, ...]
    is_injective: bool = False  # no two iterations touch the same entry
    is_sum: bool = False
    since: int | None = None  # of a read: it takes a form that was stored within so many of these loops


@dataclass
class _Stored:
    """The form of an entry that this iteration has stored."""

    form: Form
    block: Any
    loops: tuple[Any, ...]


class Sink:
    """The entries that one trace of a kernel writes."""

    def __init__(self, tracer: Any, columns: Columns, arrays: dict[Any, Any]) -> None:
        self.tracer = tracer
        self.columns = columns
        self.arrays = arrays  # by name, those that the trace before knew
        self.sites: list[Site] = []
        self.sizes: dict[Any, int] = {}  # of the containers that are written to
        self.reads: list[Access] = []
        self.writes: list[Access] = []
        self._owners: dict[Affine, Any] = {}
        self._stored: dict[tuple[Any, Affine], _Stored] = {}
        self._order = 0
        self._ranges = columns.ranges()

    def names(self) -> tuple[Any, ...]:
        return tuple(name for site in self.sites for name in site.names())

    # --- reading

    def seed(self, ref: Any) -> Form:
        """The tangent of an entry that is a column."""
        row, _ = ref.row()
        c = ref.container
        owner, first = c.key, c.first_column
        if c.key in self.columns.composed:
            version = self._version(c.key)
            owner, first = composed_key(c.key, version), first + version * c.size
        column = row + Affine((), first)
        if not column.is_constant and self._owners.setdefault(column, owner) != owner:
            self._owners[column] = None
        return {Seed(column): 1}

    def _version(self, key: Any) -> int:
        """How many stages before this one have written to a container."""
        stages = {w.stage for w in self.writes if w.key == key} - {self.tracer.stage}
        known = self.tracer.facts.versions
        if len(stages) >= known.get(key, 1):
            known[key] = len(stages) + 1
            self.tracer.facts.changed = True
            return 0
        return len(stages)

    def read(self, ref: Any) -> Form:
        """The tangent of an entry of a container with a sink."""
        tracer, c = self.tracer, ref.container
        row, _ = ref.row()
        loops = tuple(tracer.loops)
        stored = self._stored.get((c.key, row))
        if stored is not None and stored.block in tracer.blocks:
            self._order += 1
            self.reads.append(Access(self._order, tracer.stage, c.key, row, loops, since=len(stored.loops)))
            return dict(stored.form)
        self._order += 1
        self.reads.append(Access(self._order, tracer.stage, c.key, row, loops))
        if c.first_column is None:
            self.require_columns(c)
            return {}
        return self.seed(ref)

    def require_columns(self, container: Any) -> None:
        """The entries of a container are to be columns of their own, from the next trace on."""
        facts = self.tracer.facts
        if container.key not in facts.composed:
            facts.composed[container.key] = container.size
            facts.changed = True

    def require_rows(self, column: Affine, key: Any) -> None:
        """Rows are to hold a column: that of a term which is added to a row."""
        owner = self.owner(column)
        if owner is None or owner not in self.columns.sizes:
            raise DenseRowsError(f"{_local(key)} adds up terms whose columns are not known before the launch")
        facts = self.tracer.facts
        if owner in facts.in_rows:
            return
        facts.in_rows.add(owner)
        facts.changed = True
        total = sum(self.columns.sizes[key] for key in facts.in_rows | self.columns.in_rows)
        if total > MOST_IN_ROWS:
            raise DenseRowsError(f"{_local(key)} needs a row of {total} columns")

    def owner(self, column: Affine) -> Any:
        """The container of a column, None where that is only known at run time."""
        if not column.is_constant:
            return self._owners.get(column)
        return next((key for first, end, key in self._ranges if first <= column.constant < end), None)

    def set_owner(self, column: Affine, owner: Any) -> None:
        """Say whose column a variable holds; None where it may be that of several containers."""
        self._owners[column] = owner

    def no_column(self, owner: Any) -> int:
        """What a slot holds as long as it has no column: one that rows have, where it may be added to a row."""
        return self.columns.first(owner) or 0 if owner in self.columns.in_rows else -1

    def has_sparse(self, form: Form) -> bool:
        """Whether a form has columns that no row holds."""
        return any(not is_row(leaf) and not self.is_in_rows(leaf.column) for leaf in form)

    def is_in_rows(self, column: Affine) -> bool:
        if column.is_constant:
            return column.constant < self.tracer.width
        return self.owner(column) in self.columns.in_rows

    def refuse(self, what: str) -> None:
        raise DenseRowsError(what)

    # --- writing

    def store(self, ref: Any, parts: list[Any], forms: list[Form]) -> None:
        """``entry = value``."""
        rows = [part.row()[0] for part in parts]
        is_injective = self._emit(ref, parts, forms, is_sum=False)
        loops = tuple(self.tracer.loops)
        for row, form in zip(rows, forms, strict=True):
            self._forget(ref.container.key, row)
            self._stored[ref.container.key, row] = _Stored(dict(form), self.tracer.block, loops)
            self._note(ref.container.key, row, is_injective, is_sum=False)
        self._end_statement()

    def add(self, ref: Any, parts: list[Any], forms: list[Form]) -> None:
        """``entry += value``."""
        rows = [part.row()[0] for part in parts]
        key, loops = ref.container.key, tuple(self.tracer.loops)
        is_injective = self._emit(ref, parts, forms, is_sum=True)
        is_private = self.tracer.is_private(ref.container, ref)
        for part, row, form in zip(parts, rows, forms, strict=True):
            before = self._stored.get((key, row))
            base: Form | None = None
            if before is not None and before.block is self.tracer.block and is_private:
                base = before.form
            elif is_private and is_injective and not self._is_written_before(key, row):
                base = self.seed(part) if part.container.first_column is not None else None
            self._forget(key, row)
            if base is not None:
                total = dict(base)
                accumulate(total, form)
                self._stored[key, row] = _Stored(total, self.tracer.block, loops)
            self._note(key, row, is_injective, is_sum=True)
        self._end_statement()

    def _is_written_before(self, key: Any, row: Affine) -> bool:
        stage = self.tracer.stage
        return any(w.key == key and w.stage == stage and not are_apart(w.row, row) for w in self.writes)

    def _forget(self, key: Any, row: Affine) -> None:
        for known in [k for k in self._stored if k[0] == key and not are_apart(k[1], row)]:
            del self._stored[known]

    def _note(self, key: Any, row: Affine, is_injective: bool, *, is_sum: bool) -> None:
        self._order += 1
        loops = tuple(self.tracer.loops)
        self.writes.append(Access(self._order, self.tracer.stage, key, row, loops, is_injective, is_sum))

    def _end_statement(self) -> None:
        """Statements at the top of a kernel run one after the other: each is a stage."""
        if len(self.tracer.blocks) == 1:
            self.tracer.stage += 1

    # --- one site

    def _emit(self, ref: Any, parts: list[Any], forms: list[Form], *, is_sum: bool) -> bool:
        """Take down a site, and write its entries; returns whether it writes each row once at most."""
        tracer, c = self.tracer, ref.container
        if c.first_column is not None:
            self.require_columns(c)
        axes = self._axes(c)
        variables = {axis.variable for axis in axes}
        rows = tuple(part.row()[0] for part in parts)
        groups = self._groups(forms)
        used = [a for row in rows for a, _ in row.terms]
        used += [a for group in groups for entry in group.entries for a, _ in entry.column.terms]
        atoms = tuple(a for a in dict.fromkeys(used) if a not in variables)
        write: WriteSite = tracer.writes[c.key][-1]
        is_injective = write.covers(variables)
        has_rows = any(is_row(leaf) for form in forms for leaf in form)
        number = len(self.sites)
        loops = tuple(loop.site for loop in tracer.loops)
        site = Site(
            number, tracer.stage, c.key, is_sum, axes, loops, self._is_conditional(), is_injective, rows, atoms, groups,
            has_rows,
        )  # fmt: skip
        self.sites.append(site)
        self.sizes[c.key] = c.size
        for size in (site.integers, *(len(group.entries) for group in groups)):
            if site.slots * size > MOST_SLOTS:
                raise DenseRowsError(f"{c.name} takes {site.slots} x {size} entries, more than Taichi can index")
        slot = self._slot(axes)
        self._write_integers(site, slot)
        self._write_values(site, slot, forms, c.dtype)
        return is_injective

    def _axes(self, container: Any) -> tuple[Axis, ...]:
        axes = []
        for loop in self.tracer.loops:
            bounds = loop.bounds()
            if bounds is None or not loop.variables or any(v not in self.tracer.atoms for v in loop.variables):
                raise DenseRowsError(f"{container.name} is written in a loop whose number of iterations is not known")
            axes += [Axis(v, first, end) for v, (first, end) in zip(loop.variables, bounds, strict=True)]
        return tuple(axes)

    def _is_conditional(self) -> bool:
        tracer = self.tracer
        is_branch = any(block.loop is None for block in tracer.blocks[1:])
        return is_branch or any(loop.site in tracer.facts.interrupted for loop in tracer.loops)

    def _groups(self, forms: list[Form]) -> tuple[Group, ...]:
        found: dict[Any, list[Entry]] = {}
        for part, form in enumerate(forms):
            columns = {leaf.column for leaf in form if not is_row(leaf)}
            if any(is_row(leaf) for leaf in form):
                width = self.columns.width
                columns = {c for c in columns if not self.is_in_rows(c)} | {Affine((), k) for k in range(width)}
            for column in sorted(columns, key=lambda c: (repr(c.terms), c.constant)):
                found.setdefault(self.owner(column), []).append(Entry(part, column))
        return tuple(Group(owner, tuple(entries)) for owner, entries in found.items())

    def _slot(self, axes: tuple[Axis, ...]) -> Any:
        number: Any = 0
        for axis in axes:
            number = number * axis.length + (self.tracer.atoms[axis.variable] - axis.first)
        return backend.variable(number) if backend.is_expr(number) else number

    def _write_integers(self, site: Site, slot: Any) -> None:
        array = self.arrays.get(("site", site.number, "integers", site.key))
        if array is None or not site.integers:
            return
        values = [self.tracer.atoms[a] for a in site.atoms] + [1] * site.is_conditional
        for n, value in enumerate(values):
            place = backend.element(array, (slot * site.integers + n,))
            backend.assign(place, backend.cast(value, backend.i32) if backend.is_expr(value) else value)

    def _write_values(self, site: Site, slot: Any, forms: list[Form], dtype: Any) -> None:
        self.tracer.note_seeds(forms)
        for group in site.groups:
            array = self.arrays.get(("site", site.number, group.owner, site.key))
            if array is None:
                continue
            start = slot * len(group.entries)
            start = backend.variable(start) if backend.is_expr(start) else start
            places = {(e.part, e.column): n for n, e in enumerate(group.entries)}
            for part, form in enumerate(forms):
                self._write_part(array, start, part, form, places, dtype)

    def _write_part(self, array: Any, start: Any, part: int, form: Form, places: dict[Any, int], dtype: Any) -> None:
        has_rows = any(is_row(leaf) for leaf in form)
        if has_rows:
            in_rows = sorted((c.constant, n) for (p, c), n in places.items() if p == part and self._is_in_window(c))
            if in_rows:
                self._write_row(array, start, form, in_rows, dtype)
        for leaf, coefficient in form.items():
            if is_row(leaf):
                continue
            value = as_expression(coefficient, dtype)
            place = places.get((part, leaf.column))
            if has_rows and self.is_in_rows(leaf.column):
                self._add_to_row(array, start, part, leaf.column, places, value)
            elif place is not None:
                backend.assign(backend.element(array, (start + place,)), value)

    def _is_in_window(self, column: Affine) -> bool:
        return column.is_constant and column.constant < self.columns.width

    def _write_row(self, array: Any, start: Any, form: Form, places: list[tuple[int, int]], dtype: Any) -> None:
        """The rows of a form, column by column, to places that come one after the other."""
        first, place = places[0]
        self.tracer.note_rows([form])

        def body(k: Any) -> None:
            value = backend.variable(as_expression(row_sum(form, k + first, dtype), dtype))
            backend.assign(backend.element(array, (start + place + k,)), value)

        rows_loop(len(places), body, reads_memory=True)

    def _add_to_row(
        self, array: Any, start: Any, part: int, column: Affine, places: dict[Any, int], value: Any
    ) -> None:
        owner = self.owner(column)
        first = self.columns.first(owner)
        place = places.get((part, Affine((), first or 0)))
        if place is None:
            return  # of another group
        number = self.tracer.affine_expression(column + Affine((), -(first or 0)))
        entry = backend.element(array, (start + place + number,))
        backend.assign(entry, entry + value)

    # --- the end of a trace

    def check(self) -> None:
        """Raise where a stage reads what it has written, or stores twice to one entry."""
        for read in self.reads:
            for write in self.writes:
                if write.key == read.key and write.stage == read.stage and _meet(read, write):
                    raise DenseRowsError("an entry is read in the loop that writes it, by another iteration or twice")
        for n, one in enumerate(self.writes):
            for other in self.writes[:n]:
                if one.key == other.key and one.stage == other.stage and not _are_in_order(other, one):
                    raise DenseRowsError("entries are stored to twice in one loop, in an order that is not known")


def _local(key: Any) -> str:
    """What messages call a local."""
    _, name, line, *part = key
    return f"the tangent of {name}{''.join(f'[{p}]' for p in part)} (line {line})"


def are_apart(a: Affine, b: Affine) -> bool:
    """Whether two rows differ, whatever their variables are."""
    if a.is_constant and b.is_constant:
        return a.constant != b.constant
    divisor = math.gcd(*(factor for _, factor in (*a.terms, *b.terms)))
    return (a.constant - b.constant) % divisor != 0


def _meet(read: Access, write: Access) -> bool:
    """Whether a read may see what a write of the same stage has stored, and is not known to."""
    if are_apart(read.row, write.row):
        return False
    if read.since is not None:  # what this iteration stored before: it holds as long as nothing stores in between
        is_later = write.order > read.order
        inner = read.loops[read.since :]
        return is_later and bool(inner) and write.loops[: read.since + 1] == read.loops[: read.since + 1]
    is_before = read.order < write.order and read.row == write.row
    return not (is_before and write.is_injective and not (write.is_sum and not write.is_injective))


def _are_in_order(first: Access, second: Access) -> bool:
    """Whether the host can tell which of two writes of a stage counts; the first is earlier in the text."""
    if (first.is_sum and second.is_sum) or are_apart(first.row, second.row):
        return True
    is_same_row = first.row == second.row
    if not second.is_sum:
        return is_same_row and first.loops == second.loops and first.is_injective and second.is_injective
    is_around = second.loops[: len(first.loops)] == first.loops
    return is_same_row and first.is_injective and is_around
