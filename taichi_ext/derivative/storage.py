"""Tangents of locals that are written under control flow: where they are kept, and how they are joined.

A local that is only rebound in straight-line code needs no storage, its form is simply replaced.  One that is written
in a loop or a branch keeps its tangent in

* *registers*, one per constant seed that ever reaches it;
* *slots*, pairs of a column number and a coefficient, where the seeds are index expressions but only a few at a time
  (``if t < nearest: nearest = t``); or
* a *row*, one number per column in memory private to the iteration, to which ``acc += e`` scatters the few terms of e
  with plain stores, where the seeds add up (a sum over a loop).

Which of them is found by tracing the kernel until the facts no longer change (``trace.Facts``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from taichi_ext import backend
from taichi_ext.derivative.linear_form import (
    Form,
    Seed,
    accumulate,
    apply_to_row,
    as_expression,
    is_one,
    is_row,
    is_zero,
)
from taichi_ext.derivative.rows import MAX_LOCAL_ARRAY, LocalArray, Scratch, SharedRow, rows_loop

ADDED = 0  # terms that go to a row are added to what is there
STORED = 1  # each entry gets one term at most, which can be stored
FILLED = 2  # and each does get one, before anything reads it: the row need not be zero before


@dataclass(frozen=True)
class Limits:
    """How many coefficients a stored tangent may have before it becomes a row of all columns."""

    registers: int = 24
    slots: int = 8


SPARSE = Limits(registers=256, slots=64)  # of sparse Jacobians: only few columns can be in rows


@dataclass
class StorageFacts:
    """What is known about the tangents that reach one storage."""

    limits: Limits = field(default_factory=Limits)
    needed: bool = False
    constants: set[Seed] = field(default_factory=set)
    slots: int = 0
    has_row: bool = False
    owners: set[Any] = field(default_factory=set)  # the containers whose columns are in slots of a sparse Jacobian

    def add(self, form: Form, accumulates: bool, is_fixed: Callable[[Seed], bool]) -> bool:
        """Take note of a form that is written; True if that is news.

        ``is_fixed`` tells columns that do not change as long as the storage is in use.
        """
        before = (self.needed, len(self.constants), self.slots, self.has_row)
        self.needed = True
        symbolic = 0
        for leaf in form:
            if is_row(leaf):
                self.has_row = True
            elif leaf.is_constant or is_fixed(leaf):
                self.constants.add(leaf)
            else:
                symbolic += 1
        self.slots = max(self.slots, symbolic)
        if self.slots > self.limits.slots or (accumulates and symbolic) or self.has_many_columns:
            self.has_row = True
        return before != (self.needed, len(self.constants), self.slots, self.has_row)

    @property
    def has_many_columns(self) -> bool:
        """More constant columns than registers; the seeds of a user's rule (negative) are no columns."""
        count = sum(seed.column.constant >= 0 or not seed.is_constant for seed in self.constants)
        return count > self.limits.registers


@dataclass(frozen=True)
class LocalRow:
    """The tangent of one element of a storage that is kept as a row."""

    storage: Any
    element: Any  # number, or the normal form of an index
    index: Any = field(compare=False)
    version: int = 0
    loops: tuple[Any, ...] = ()
    owner: Any = None

    @property
    def place(self) -> Any:
        return self.storage.key

    @property
    def current_version(self) -> int:
        return self.storage.version

    def entry(self, k: Any) -> Any:
        return self.storage.row.entry(self.storage.row_index(self.index, k))


def are_local(forms: Iterable[Form]) -> bool:
    """Whether the rows of forms, if any, are all in local arrays."""
    leaves = [leaf for form in forms for leaf in form if is_row(leaf)]
    return all(isinstance(leaf, LocalRow) and isinstance(leaf.storage.row, LocalArray) for leaf in leaves)


def row_sum(form: Form, k: Any, dtype: Any) -> Any:
    """Column k of the rows of a form, None when it has no rows."""
    total = None
    for leaf, c in form.items():
        if is_row(leaf):
            term = apply_to_row(c, leaf.entry(k))
            total = term if total is None else total + term
    return total


def settle(form: Form, dtype: Any) -> Form:
    """The form with its coefficients evaluated now."""
    settled: Form = {}
    for leaf, c in form.items():
        if backend.is_expr(c):
            settled[leaf] = backend.fixed(c)
        elif hasattr(c, "factor") and backend.is_expr(c.factor):
            settled[leaf] = type(c)(backend.fixed(c.factor))
        elif not is_zero(c):
            settled[leaf] = c
    return settled


class Storage:
    """Tangents of ``size`` elements of one type."""

    def __init__(self, tracer: Any, key: Any, dtype: Any, size: int = 1, *, is_indexed: bool = False) -> None:
        self.tracer = tracer
        self.key = key
        self.atoms = len(tracer.atom_numbers)  # variables of indices that were there before
        self.dtype = dtype
        self.size = size
        self.is_indexed = is_indexed
        self.version = 0
        self.reads = 0
        self.row_loops = 0  # updates of all of a row
        self.is_zero = True  # nothing has been written yet
        self.has_terms = False  # something has been added to the row
        self.stores = FILLED  # what still holds of the terms that go to the row: it only ever gets less
        self.filled_in: Any = None  # the loop that stores to all of the row
        self.facts: StorageFacts = tracer.facts.storage(key)
        self.row: Any = None
        self.registers: dict[Seed, Any] = {}
        self.slots: list[tuple[Any, Any]] = []
        self.loops = tracer.loop_sites()
        self.block = tracer.block
        tracer.storages.setdefault(key, []).append(self)
        facts = self.facts
        if facts.has_row or (is_indexed and facts.slots):
            self.row = self._new_row()
        if not facts.has_many_columns:
            for seed in sorted(facts.constants, key=lambda s: (s.column.terms, s.column.constant)):
                if not seed.is_constant and not self._is_fixed(seed):
                    continue  # of a trace that had other variables
                zero = backend.zeros_variable(size, dtype) if is_indexed else backend.variable(0, dtype)
                self.registers[seed] = zero
        if is_indexed or self.row is not None or facts.slots:
            tracer.refuse_pieces()
        self.owner = next(iter(facts.owners)) if len(facts.owners) == 1 else None
        self.no_column = 0 if tracer.sink is None else tracer.sink.no_column(self.owner)
        if self.row is None:
            for _ in range(facts.slots):
                self.slots.append((backend.variable(self.no_column, backend.i32), backend.variable(0, dtype)))

    def _new_row(self) -> Any:
        tracer = self.tracer
        shared = tracer.shared_container(self.key)
        is_filled = tracer.facts.stores.get(self.key) == FILLED
        if shared is not None and shared.dtype == self.dtype:
            return SharedRow(tracer, shared, is_filled=is_filled)
        length = self.size * tracer.width
        if length <= MAX_LOCAL_ARRAY:
            return LocalArray(length, self.dtype)
        return Scratch(tracer, length, self.dtype, is_filled=is_filled)

    @property
    def has_tangents(self) -> bool:
        return self.row is not None or bool(self.registers) or bool(self.slots)

    def row_index(self, index: Any, k: Any) -> Any:
        columns = self.tracer.width
        return index * columns + k if not isinstance(index, int) or index else k

    def _register(self, seed: Seed, index: Any) -> Any:
        register = self.registers[seed]
        return backend.element(register, (index,)) if self.is_indexed else register

    def form(self, index: Any = 0) -> Form:
        """The tangent of one element."""
        self.reads += 1
        if self.filled_in in self.tracer.loop_sites():
            self.stores = min(self.stores, STORED)
        element = index
        if not isinstance(index, int):  # named, because the expression may stand for a variable that changes
            element = self.tracer.affine(index)
            index = self.tracer.affine_expression(element)
        form: Form = {seed: self._register(seed, index) for seed in self.registers}
        if self.row is not None:
            form[LocalRow(self, element, index, self.version, self.tracer.loop_sites())] = 1
        for column, coefficient in self.slots:
            kept = backend.variable(column)
            atom = self.tracer.new_slot_atom(self, kept)
            if self.tracer.sink is not None:
                self.tracer.sink.set_owner(atom, self.owner)
            form[Seed(atom)] = coefficient
        return form

    def _changed(self) -> None:
        self.version += 1
        self.is_zero = False
        self.tracer.note_modified(self.key, self.loops)

    def write(self, form: Form, index: Any = 0) -> None:
        """Replace the tangent of one element."""
        self.write_many([form], [index])

    def write_many(self, forms: list[Form], indices: list[Any]) -> None:
        """Replace the tangents of several elements at once, all read before any is written."""
        for form in forms:
            grows = self._is_own(form) and self.tracer.loop_sites() != self.loops
            if self.facts.add(form, grows, self._is_fixed):
                self.tracer.facts.changed = True
            self._note_owners(form)
        forms = [settle(form, self.dtype) for form in forms]
        if any(forms) or not self.is_zero:
            self.stores = ADDED
        if self.row is not None:
            self._write_rows(forms, indices)
        for form, index in zip(forms, indices, strict=True):
            self._write_registers(form, index)
        self._changed()

    def _note_owners(self, form: Form) -> None:
        """Take note of whose columns come into slots."""
        sink = self.tracer.sink
        if sink is None:
            return
        found = {sink.owner(s.column) for s in form if not is_row(s) and not s.is_constant and s not in self.registers}
        if not found <= self.facts.owners:
            self.facts.owners |= found
            self.tracer.facts.changed = True

    def _is_own(self, form: Form) -> bool:
        """Whether a form refers to what this storage held before, together with other index expressions."""
        return self.tracer.reads_slots_of(self, form)

    def _write_registers(self, form: Form, index: Any) -> None:
        for seed in self.registers:
            backend.assign(self._register(seed, index), as_expression(form.get(seed, 0), self.dtype))
        if not self.slots:
            return
        registers = self.registers
        symbolic = [(s, c) for s, c in form.items() if not (is_row(s) or s.is_constant or s in registers)]
        columns = [backend.variable(self.tracer.column_expression(s)) for s, _ in symbolic[: len(self.slots)]]
        for n, (column, coefficient) in enumerate(self.slots):
            if n < len(columns):
                backend.assign(column, columns[n])
                backend.assign(coefficient, as_expression(symbolic[n][1], self.dtype))
            else:
                if self.tracer.sink is not None:
                    backend.assign(column, self.no_column)
                backend.assign(coefficient, as_expression(0, self.dtype))

    def _write_rows(self, forms: list[Form], indices: list[Any]) -> None:
        def body(k: Any) -> None:
            self._write_column(forms, indices, k)

        is_zero = self.is_zero and not any(is_row(leaf) for form in forms for leaf in form)
        if not is_zero and not all(self._keeps_row(f, i) for f, i in zip(forms, indices, strict=True)):
            self.row_loops += 1
            self.tracer.note_rows(forms)
            rows_loop(self.tracer.columns, body, reads_memory=not are_local(forms))
            for k in range(self.tracer.columns, self.tracer.width):
                forms_here = [{leaf: c for leaf, c in f.items() if isinstance(leaf, LocalRow)} for f in forms]
                self._write_column(forms_here, indices, k)
        for form, index in zip(forms, indices, strict=True):
            self._scatter(form, index)

    def _write_column(self, forms: list[Form], indices: list[Any], k: Any) -> None:
        values = [backend.variable(as_expression(_or_zero(row_sum(f, k, self.dtype)), self.dtype)) for f in forms]
        for index, value in zip(indices, values, strict=True):
            backend.assign(self.row.entry(self.row_index(index, k)), value)

    def _keeps_row(self, form: Form, index: Any) -> bool:
        """Whether the rows of the form are just the element itself, once."""
        rows = [(leaf, c) for leaf, c in form.items() if is_row(leaf)]
        if len(rows) != 1 or not is_one(rows[0][1]) or not isinstance(index, int):
            return False
        leaf = rows[0][0]
        return isinstance(leaf, LocalRow) and leaf.storage is self and leaf.element == index

    def _scatter(self, form: Form, index: Any) -> None:
        for seed, c in form.items():
            if not is_row(seed) and seed not in self.registers and self._is_in_row(seed):
                k = self.tracer.column_expression(seed)
                target = self.row.entry(self.row_index(index, k))
                self.tracer.note_operations(1)
                backend.assign(target, target + as_expression(c, self.dtype))

    def add(self, form: Form, index: Any = 0, *, atomic: bool = False) -> None:
        """Add to the tangent of one element."""
        in_loop = self.tracer.loop_sites() != self.loops
        if self.facts.add(form, in_loop, self._is_fixed):
            self.tracer.facts.changed = True
        self._note_owners(form)
        if self.row is None and self.slots:
            # a few index expressions, in straight-line code: old and new terms side by side
            total = dict(self.form(index))
            accumulate(total, form)
            self.write(total, index)
            return
        plus = backend.atomic_add if atomic else (lambda target, value: backend.assign(target, target + value))
        form = settle(form, self.dtype)
        self.tracer.note_rows([form])
        self.tracer.note_seeds([form])
        for seed, c in form.items():
            if seed in self.registers:
                plus(self._register(seed, index), as_expression(c, self.dtype))
        if self.row is not None:
            if any(is_row(leaf) for leaf in form):
                self._add_rows(form, index, plus)
            if form:
                self.stores = min(self.stores, ADDED if self.has_terms else self._how_stored(form))
                self.has_terms = True
            if self.tracer.facts.stores.get(self.key, ADDED) >= STORED:
                plus = backend.assign
            for seed, c in form.items():
                if not is_row(seed) and seed not in self.registers and self._is_in_row(seed):
                    k = self.tracer.column_expression(seed)
                    plus(self.row.entry(self.row_index(index, k)), as_expression(c, self.dtype))
        self._changed()

    def _is_fixed(self, seed: Seed) -> bool:
        """Whether a column does not change as long as the storage is in use."""
        return self.tracer.are_fixed_since(self.atoms, seed)

    def _is_in_row(self, seed: Seed) -> bool:
        """Whether rows hold a column; where not, those of the next trace do."""
        sink = self.tracer.sink
        if sink is None or sink.is_in_rows(seed.column):
            return True
        sink.require_rows(seed.column, self.key)
        return False

    def _how_stored(self, form: Form) -> int:
        """Whether what is added here goes to another entry of the row for each term and each time it runs.

        So it is where all columns are ``factor * v + c`` with the variable v of the only loop since the row was made,
        up to variables of the loops around that, and the constants c less than the factor apart.  They are all entries
        where there are as many c as the factor says, and the loop runs once, whole, over as many v as that takes.
        """
        if self.size != 1 or self.is_indexed or any(is_row(leaf) or leaf in self.registers for leaf in form):
            return ADDED
        tracer = self.tracer
        around, inner = tracer.loops[: len(self.loops)], tracer.loops[len(self.loops) :]
        fixed = {variable for loop in around for variable in loop.variables}
        columns = [seed.column for seed in form]
        factors = dict(columns[0].terms)
        if len(inner) > 1 or any(column.terms != columns[0].terms for column in columns):
            return ADDED
        if not inner:
            return STORED
        (loop,) = inner
        if len(loop.variables) != 1 or not fixed.issuperset(factors.keys() - set(loop.variables)):
            return ADDED
        (variable,), constants = loop.variables, sorted(column.constant for column in columns)
        factor = factors.get(variable, 0)
        if constants[-1] - constants[0] >= abs(factor):
            return ADDED
        runs_whole = tracer.blocks[-1].loop is loop and tracer.blocks[-2] is self.block
        runs_whole = runs_whole and loop.site not in tracer.facts.interrupted and not self.reads
        is_all = factors == {variable: len(form)} and constants == list(range(len(form)))
        if not (runs_whole and is_all and loop.domain == (tracer.width // factor,) and tracer.width % factor == 0):
            return STORED
        self.filled_in = loop.site
        return FILLED

    def _add_rows(self, form: Form, index: Any, plus: Any) -> None:
        def add_column(form: Form, k: Any) -> None:
            total = row_sum(form, k, self.dtype)
            if total is not None:
                plus(self.row.entry(self.row_index(index, k)), as_expression(total, self.dtype))

        self.row_loops += 1
        reads_memory = not (are_local([form]) and isinstance(self.row, LocalArray))
        rows_loop(self.tracer.columns, lambda k: add_column(form, k), reads_memory=reads_memory)
        own = {leaf: c for leaf, c in form.items() if isinstance(leaf, LocalRow)}
        for k in range(self.tracer.columns, self.tracer.width):
            add_column(own, k)


def _or_zero(x: Any) -> Any:
    return 0 if x is None else x
