"""Tangents of locals that change: registers, slots or a row.

* *registers*: one number per seed that can be named where the local is declared;
* *slots*: pairs of a column and a coefficient, for a few seeds known only inside (``if t < nearest: nearest = t``);
* a *row*: one number per column, where seeds add up (a sum over a loop) or are too many.

Seeds that are no columns have registers next to all of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taichi_ext.differentiate.build import add, cast, is_number, literal, multiply
from taichi_ext.differentiate.forms import (
    Form,
    Row,
    Seed,
    accumulate,
    coefficient,
    columns_of,
    has_row,
    is_row,
    row_sum,
    settled,
    unnumbered,
)
from taichi_ext.differentiate.naming import Naming
from taichi_ext.differentiate.own_registers import OwnRegisters
from taichi_ext.differentiate.row_terms import STORED, Terms
from taichi_ext.differentiate.sparse_numbering import Numbering
from taichi_ext.differentiate.sparse_sink import Sink
from taichi_ext.differentiate.sparse_sums import takes_sum
from taichi_ext.differentiate.storage_facts import Limits, StorageFacts
from taichi_ext.differentiate.storage_plan import LocalPlan
from taichi_ext.differentiate.walk import Walk
from taichi_ext.program import I32, Local, Read, Statement, Type, Value
from taichi_ext.program.statements import Target


class Storage:
    """Where the tangent of a local, or of each entry of a local array, is kept.

    Args:
        walk: the walk.
        local: the local.
        known: what is planned for it.
        new_row: makes a row for the local; takes its entries.
        sink: of a sparse Jacobian.
        before: registers that already hold its tangents by seeds that are no columns.
    """

    def __init__(
        self,
        walk: Walk,
        local: Local,
        known: LocalPlan,
        new_row: Callable[[Local, int], Any],
        sink: Sink | None,
        before: OwnRegisters | None = None,
    ) -> None:
        self.walk = walk
        self.builder = walk.builder
        self.local = local
        self.dtype: Type = local.dtype
        self.size = local.shape[0] if local.shape else 1
        self.size *= local.shape[1] if len(local.shape) > 1 else 1
        self.is_array = bool(local.shape)
        self.known = known
        facts = known.facts
        self.limits: Limits = walk.facts.seeds.limits
        self.version = 0
        self.is_zero = True
        self.changed: set[int | None] = set()  # elements, by their numbers; None for one that is only known at run time
        self.loops = walk.cursor.loops
        self.block = walk.cursor.block
        self.row: Any = None
        self.terms = Terms(walk.naming, walk.cursor, walk.facts.columns, is_array=self.is_array)
        self.place = walk.builder.place
        self.registers: dict[Seed, Local] = {}
        self.zeros: set[Seed] = set()  # whose registers hold 0, as far as the block of the declaration has come
        self.slots: list[tuple[Read, Read]] = []
        self.used = 0  # slots that may hold something by now
        self.sink = sink
        self.sparse = sink and sink.numbering
        self.owner = next(iter(facts.owners)) if len(facts.owners) == 1 else None
        self.no_column = 0 if self.sparse is None else self.sparse.no_column(self.owner)
        if facts.has_row or (self.is_array and facts.slots):
            self.row = new_row(local, self.size)
        has_all = self.is_array and self.row is not None and self.sparse is None  # registers would be in memory, too
        is_full = has_all or facts.is_full(self.limits)
        self.own = OwnRegisters(walk.builder, walk.cursor, local, known, before)
        for seed in () if is_full else facts.seeds:
            self.registers[seed] = self._new_register(seed)
            self.zeros.add(seed)
            if self.sparse is not None:
                self.sparse.note_owners(seed.column, facts.register_owners.get(seed, frozenset()))
            self.walk.naming.note_conditional(seed, self.loops)
        if self.row is None:
            for n in range(facts.slots):
                column = self.builder.declare(f"column_{n}", literal(self.no_column, I32))
                self.slots.append((column, self.builder.declare(f"d_{local.name}_{n}", literal(0, self.dtype))))

    def _new_register(self, seed: Seed) -> Local:
        name = f"d_{self.local.name}_{self.walk.naming.seed_name(seed)}"
        if self.is_array:
            return self.builder.array(name, self.size, self.dtype)
        return self.builder.declare(name, literal(0, self.dtype)).local

    def _register(self, seed: Seed, index: Any) -> Read:
        return Read(self.registers[seed], (index,) if self.is_array else ())

    # --- reading

    def entry(self, index: Any, column: Any) -> Target:
        """One entry of the row."""
        return self.row.entry(self._row_index(index, column))

    def _row_index(self, index: Any, column: Any) -> Any:
        if isinstance(index, int):
            return column if index == 0 else add(column, index * self.walk.facts.columns)
        return add(multiply(index, self.walk.facts.columns), column)

    def form(self, index: Any = 0) -> Form:
        """The tangent as it is now, of one element; registers whose seeds are only named later are still zero."""
        self.terms.note_read()
        key = index if isinstance(index, int) else self.walk.facts.indices.site(index)
        is_visible, block = self.walk.naming.is_visible, self.walk.cursor.block
        zeros = self.zeros if block is self.block else ()
        seeds = (seed for seed in self.registers if seed not in zeros and is_visible(seed, block))
        if self.sink is not None:
            is_later = self.sink.is_later
            seeds = (seed for seed in seeds if not is_later(seed.column))
        form: Form = {**self.own.form(index), **{seed: self._register(seed, index) for seed in seeds}}
        if self.row is not None:
            form[Row(self.local, key, self, index, self.version, self.walk.cursor.loops)] = 1
        for column, value in self._held_slots():
            named = self.walk.naming.named(self.builder.keep(column, "column"), self)
            if self.sparse is not None:
                self.sparse.note_owners(named, self.known.facts.owners)
            form[Seed(named)] = value
        return form

    def _held_slots(self) -> list[tuple[Read, Read]]:
        """The slots that may hold something: in a loop that starts after the local, also what it writes later."""
        return self.slots[: max(self.used, self._written_later())]

    def _written_later(self) -> int:
        """How many slots the outermost loop here writes, if it starts after the local."""
        loop = self._outer_loop()
        return 0 if loop is None else self.known.facts.in_loops.get(loop, 0)

    def _outer_loop(self) -> Statement | None:
        """The outermost loop here that starts after the local."""
        inside = self.walk.cursor.loops[len(self.loops) :]
        return inside[0].statement if inside else None

    # --- writing

    def _note(self, form: Form, *, grows: bool) -> None:
        loop, facts = self._outer_loop(), self.known.facts
        facts = facts.with_form(form, self._is_visible, self.limits, loop=loop, grows=grows)
        facts = facts.with_own(unnumbered(form))
        if self.sparse is not None:
            facts = self._with_owners(facts, form, self.sparse)
        self.known.require(facts)

    def _with_owners(self, facts: StorageFacts, form: Form, sparse: Numbering) -> StorageFacts:
        """The facts with whose columns come into registers and slots."""
        columns = {seed: sparse.owners(seed.column) for seed in columns_of(form) if not seed.is_constant}
        known = {seed: owners for seed, owners in columns.items() if seed in facts.seeds}
        inner = {owner for seed, owners in columns.items() if seed not in self.registers for owner in owners}
        return facts.with_owners(inner, known)

    def _in_row(self, form: Form) -> list[tuple[Seed, Any]]:
        """The seeds of a form that go to the row, and their coefficients; those that rows cannot hold yet are noted."""
        seeds = [(s, c) for s, c in columns_of(form).items() if s not in self.registers]
        if self.sparse is None:
            return seeds
        for seed, _ in seeds:
            if not self.sparse.is_in_rows(seed.column) and not self._takes_sum(seed, len(seeds)):
                self.sparse.require_rows(seed.column, self.local)
        return [(s, c) for s, c in seeds if self.sparse.is_in_rows(s.column)]

    def _takes_sum(self, seed: Seed, terms: int) -> bool:
        assert self.sparse is not None
        return takes_sum(self.walk, self.sparse, self.local, self.loops, seed.column, terms)

    def _is_visible(self, seed: Seed) -> bool:
        return self.walk.naming.is_visible(seed, self.block)

    def write(self, forms: list[Form], indices: list[Any]) -> None:
        """Replace the tangents of several elements at once, all read before any is written."""
        for form in forms:
            refers_to_itself = self._refers_to_itself(form)
            self._note(form, grows=refers_to_itself and self.walk.cursor.loops != self.loops)
        forms = [settled(self.builder, form) for form in forms]
        self.terms.note_write(is_zero=self.is_zero and not any(forms))
        if self.row is not None:
            self._write_rows(forms, indices)
        self.changed.update(map(_number, indices))
        self.own.write(forms, indices)
        for form, index in zip(forms, indices, strict=True):
            self._write_registers(columns_of(form), index)
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self.is_zero = False

    def _refers_to_itself(self, form: Form) -> bool:
        """Whether a form refers to what this held before, also through others, and to other index expressions."""
        inner = [s for s in columns_of(form) if not s.is_constant]
        sources = [_sources(self.walk.naming, s) for s in inner]
        self.known.require(self.known.facts.with_sources(set().union(*sources)))
        own = [found for found in sources if self.local in found]
        return bool(own) and len(own) < len(inner)

    def _write_registers(self, form: dict[Seed, Any], index: Any) -> None:
        if self.walk.cursor.block is self.block and not self.is_array:
            self.zeros.update(self.registers)
        self.zeros -= form.keys()
        for seed in self.registers:
            self.builder.assign(self._register(seed, index), coefficient(form.get(seed, 0), self.dtype))
        if not self.slots:
            return
        inner = [(s, c) for s, c in form.items() if s not in self.registers][: len(self.slots)]
        self.used = max(self.used, len(inner))
        columns = [self.builder.keep(self.walk.naming.column(s)) for s, _ in inner]
        for n, (column, value) in enumerate(self.slots):
            if n < len(inner):
                self.builder.assign(column, columns[n])
                self.builder.assign(value, coefficient(inner[n][1], self.dtype))
            else:
                if self.sparse is not None:
                    self.builder.assign(column, literal(self.no_column, I32))
                self.builder.assign(value, literal(0, self.dtype))

    def _write_rows(self, forms: list[Form], indices: list[Any]) -> None:
        has_rows = any(map(has_row, forms))
        keeps = all(self._keeps_row(f, i) for f, i in zip(forms, indices, strict=True))
        if (has_rows or not self._are_zero(indices)) and not keeps:
            self.terms.row_loops += 1
            self.builder.loop(self.walk.facts.columns, lambda k: self._write_column(forms, indices, k))
        for form, index in zip(forms, indices, strict=True):
            seeds = self._in_row(form)
            for seed, c in seeds:
                target, value = self.entry(index, self.walk.naming.column(seed)), coefficient(c, self.dtype)
                is_first = not has_rows and not keeps and len(seeds) == 1
                self.builder.assign(target, value if is_first else add(target, value))

    def _are_zero(self, indices: list[Any]) -> bool:
        """Whether elements have no tangents yet, as far as the block of the declaration has come."""
        numbers = set(map(_number, indices))
        is_told = self.walk.cursor.block is self.block and None not in self.changed | numbers
        return self.is_zero or (is_told and self.changed.isdisjoint(numbers))

    def _write_column(self, forms: list[Form], indices: list[Any], k: Value) -> None:
        sums = [row_sum(f, k) for f in forms]
        values = [literal(0, self.dtype) if s is None else cast(s, self.dtype) for s in sums]
        if len(values) > 1:
            values = [self.builder.keep(v, "w") for v in values]
        for index, value in zip(indices, values, strict=True):
            self.builder.assign(self.entry(index, k), value)

    def _keeps_row(self, form: Form, index: Any) -> bool:
        """Whether the rows of the form are just the element itself, once."""
        rows = [(leaf, c) for leaf, c in form.items() if is_row(leaf)]
        if len(rows) != 1 or not is_number(rows[0][1], 1) or not isinstance(index, int):
            return False
        return rows[0][0].source is self.local and rows[0][0].key == index

    def add(self, form: Form, index: Any = 0) -> None:
        """Add to the tangent of one element."""
        self._note(form, grows=self.walk.cursor.loops != self.loops)
        if self.row is None and self.slots:
            # a few index expressions, in straight-line code: old and new terms side by side
            total = dict(self.form(index))
            accumulate(total, form)
            self.write([total], [index])
            return
        form = settled(self.builder, form)
        columns = columns_of(form)
        self.own.add(form, index)
        self.zeros -= columns.keys()
        self.changed.add(_number(index))
        for seed, c in columns.items():
            if seed in self.registers:
                self.builder.update(self._register(seed, index), coefficient(c, self.dtype))
        if self.row is not None:
            if has_row(form):
                self._add_rows(form, index)
            self.terms.note_add(form, self.registers)
            is_stored = self.walk.plan.row(self.local).terms >= STORED
            for seed, c in self._in_row(form):
                place = self._row_index(index, self.walk.naming.column(seed))
                if is_stored:
                    self.builder.assign(self.row.entry(place), coefficient(c, self.dtype))
                else:
                    self.row.add(place, coefficient(c, self.dtype), is_shared=self._is_shared())
        self._changed()

    def _is_shared(self) -> bool:
        """Whether iterations of a parallel loop meet in this local."""
        return self.block.is_kernel and self.walk.cursor.parallel_loop is not None

    def _add_rows(self, form: Form, index: Any) -> None:
        self.terms.row_loops += 1

        def add_column(k: Value) -> None:
            total = row_sum(form, k)
            if total is not None:
                self.row.add(self._row_index(index, k), cast(total, self.dtype), is_shared=self._is_shared())

        self.builder.loop(self.walk.facts.columns, add_column)


def _sources(naming: Naming, seed: Seed) -> set[Local]:
    """The locals whose slots a column comes from, directly or through others, in this walk or in one before."""
    owners = {naming.slot_owner(atom) for atom, _ in seed.column.terms} - {None}
    return {owner.local for owner in owners}.union(*(owner.known.facts.sources for owner in owners))


def _number(index: Any) -> int | None:
    return index if isinstance(index, int) else None
