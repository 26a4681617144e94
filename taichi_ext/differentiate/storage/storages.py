"""The storages of the locals of one walk: the kind of each, and the memory of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from taichi_ext.analysis.affine import atom_value, value_of
from taichi_ext.analysis.energy_sums import EnergySums
from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.facts.facts import Declaration, PassState, ShadowMatrix, clamped, is_inside, where
from taichi_ext.differentiate.forms import forms as linear
from taichi_ext.differentiate.memory.registers import OwnRegisters
from taichi_ext.differentiate.memory.rows import LocalRows, RowMemory, local_row, placed_row, scratch_part, scratch_row
from taichi_ext.differentiate.plan.report import LOCAL_ARRAY, SCRATCH, LocalChoice, line_of
from taichi_ext.differentiate.plan.row_terms import FILLED, RowDecision
from taichi_ext.differentiate.plan.storage_plan import StorageKey
from taichi_ext.differentiate.sparse.entry_writer import RowWriter
from taichi_ext.differentiate.sparse.sparse_sums import LocalSum
from taichi_ext.differentiate.storage.storage import LocalStorage, Storage
from taichi_ext.program import I32, Container, Local, Read, Type, Update, Value, declared, statements
from taichi_ext.program.build import Builder, Index, cast, is_number, literal
from taichi_ext.program.keys import RETURN, Whole

MOST_IN_ROWS = 16  # columns up to which a local whose form has several rows gets one, and shared ones a local array


@dataclass(frozen=True)
class Storages:
    """The storages by local."""

    walk: PassState
    writer: RowWriter  # the writer of what is stored besides rows
    matrices: Mapping[Container, ShadowMatrix]  # the tangents of containers, which may contain rows
    # make what some locals have in place of a storage
    kinds: Mapping[Local, Callable[[Declaration, OwnRegisters], LocalStorage]]
    by_local: dict[Local, LocalStorage] = field(default_factory=dict)

    def begin(self, local: Local) -> LocalStorage:
        """Create the storage of a local that is declared here."""
        walk, plan = self.walk, self.walk.plan
        key = plan.key(local)
        if local not in self.kinds:
            return self.begin_with(local, key)
        declared = walk.declaration(local)
        storage = self.kinds[local](declared, OwnRegisters(walk, declared, plan.facts(key)))
        return self.by_local.setdefault(local, storage)

    def begin_with(self, local: Local, key: StorageKey, before: OwnRegisters | None = None) -> Storage:
        """Create the storage planned under a key; ``before``: existing registers of its own seeds."""
        walk, facts = self.walk, self.walk.plan.facts(key)
        declared = walk.declaration(local)
        has_rows = facts.why_row or (local.shape and facts.slots)
        rows = LocalRows(walk, declared, self._memory(local)) if has_rows else None
        own = OwnRegisters(walk, declared, facts, before)
        self.by_local[local] = storage = Storage(walk, declared, facts, rows, own, self.writer)
        return storage

    def forget(self, seeds: Iterable[linear.LocalSeed]) -> None:
        """Drop tangents with respect to seeds whose values are declared again."""
        for storage in self.by_local.values():
            storage.own.forget(seeds)

    def check_sums(self) -> None:
        """At the end of a walk, check the locals with separate columns."""
        for storage in self.by_local.values():
            if isinstance(storage, LocalSum):
                storage.check()

    def row_decisions(self, read: Collection[Container]) -> dict[Local, RowDecision]:
        """How the next pass writes the rows of locals; ``read``: the containers whose tangents have been read."""
        known, stored = self.walk.plan.rows, [s for s in self.by_local.values() if isinstance(s, Storage)]
        rows = {s.declared.local: (s.rows.terms, s.rows.version) for s in stored if s.rows is not None}
        return {local: terms.decision(known.get(local), version, read) for local, (terms, version) in rows.items()}

    def choices(self) -> tuple[LocalChoice, ...]:
        """The storage of the tangents of locals, with reasons, for reports."""
        places = {local: s.place for s in statements(self.walk.facts.program.body) for local in declared(s)}
        places |= {local: storage.declared.place for local, storage in self.by_local.items()}
        possible = []
        for local, place in places.items():
            choice = LocalChoice(local.name, line_of(place), notes=self._notes(local))
            storage = self.by_local.get(local)
            if storage is not None:
                choice = replace(choice, registers=len(storage.own), why="it changes")
            if isinstance(storage, Storage):
                choice = self._choice(choice, storage)
            if choice.registers or choice.slots or choice.row is not None or choice.notes:
                possible.append(choice)
        return tuple(possible)

    def _choice(self, choice: LocalChoice, storage: Storage) -> LocalChoice:
        plan, local = self.walk.plan, storage.declared.local
        registers, why = choice.registers + len(storage.registers), plan.indexed.get(local) or choice.why
        choice = replace(choice, registers=registers, slots=len(storage.slots), why=why)
        if storage.rows is None:
            return choice
        decision = plan.row(local)
        row = decision.container or (LOCAL_ARRAY if storage.rows.memory.is_local else SCRATCH)
        why = plan.own_rows.get(local) or storage.facts.why_row
        return replace(choice, row=row, terms=decision.terms, why=why)

    def _notes(self, local: Local) -> tuple[str, ...]:
        """Other decisions about a local, with their reasons."""
        plan, notes = self.walk.plan, []
        if local in plan.accumulated and local.kind != "temporary":  # those of users' functions
            notes.append(f"its tangent is computed where it is declared, since {plan.accumulated[local]}")
        if local in plan.columns.sums:
            notes.append("columns of its own in place of all columns")
        elif local in plan.columns.no_sums:
            reason = plan.columns.no_sums[local].splitlines()[-1].rstrip(".")
            notes.append(f"no columns of its own, since {reason}")
        return tuple(notes)

    def with_rows(self, local: Local | Container) -> Storage | None:
        """The storage of a local that has rows; None for all others."""
        storage = self.by_local.get(local) if isinstance(local, Local) else None
        return storage if isinstance(storage, Storage) and storage.rows is not None else None

    def _memory(self, local: Local) -> RowMemory:
        walk, decision = self.walk, self.walk.plan.row(local)
        builder, facts = walk.builder, walk.facts
        is_filled = decision.terms == FILLED
        if decision.container is not None:
            matrix, extent = self.matrices[decision.container], facts.seeds.extents[decision.container]
            number = walk.naming.entry_number(extent, map(atom_value, walk.cursor.loops[0].atoms))
            value = value_of(number)
            return placed_row(builder, value, matrix, is_filled=is_filled)
        size = math.prod(local.shape) * facts.columns
        is_shared = walk.cursor.block.is_kernel and size > MOST_IN_ROWS  # shared by loops, so in memory in any case
        if size <= facts.seeds.limits.local_array and not is_shared:
            return local_row(builder, f"d_{local.name}", size, local.dtype)
        part = scratch_part(walk, size, local.dtype)
        return scratch_row(builder, walk.arguments, size, local.dtype, part, is_filled=is_filled)


# The gradient of an energy, to be differentiated again: each addition to the energy adds its terms to the gradient.
#
# The terms of one addition, ``gradient[column] += coefficient`` for each column of a form, are a *group* of updates.
# When the gradient is differentiated again, they are one site, whose entries are the block of one element.


@dataclass(frozen=True)
class GradientTerms:
    """The gradient computed by one walk."""

    walk: PassState
    sums: EnergySums
    matrix: ShadowMatrix  # the gradient, as the tangents of the energy
    # columns of fields that the energy is computed from, read in the loop that stores them
    same_loop: set[linear.Seed] = field(default_factory=set)

    @staticmethod
    def of(walk: PassState, sums: EnergySums, matrices: Mapping[Container, ShadowMatrix]) -> GradientTerms | None:
        """The gradient in the tangents of the energy; None if it has none."""
        if sums.container is not None:
            return GradientTerms(walk, sums, matrices[sums.container]) if sums.container in matrices else None
        return GradientTerms.in_array(walk, sums, RETURN, "d_result") if walk.facts.seeds.wants_return else None

    @staticmethod
    def in_array(walk: PassState, sums: EnergySums, purpose: Whole, name: str) -> GradientTerms:
        """A gradient in an array of its own: stores to the energy leave it."""
        array = walk.arguments.add(purpose, name, sums.dtype)
        return GradientTerms(walk, sums, ShadowMatrix.of(walk.facts, array, 1))

    def add(self, form: linear.Form) -> None:
        """``gradient += form``, atomically."""
        walk, entry, dtype = self.walk, self.matrix.entry, self.matrix.array.dtype
        builder = walk.builder
        form = linear.materialize(builder, linear.columns_only(form, walk.numbering.is_column))
        if linear.has_row(form):
            builder.loop(walk.facts.columns, lambda k: builder.update(entry(0, k), linear.row_value(form, k, dtype)))
        terms = [(entry(0, walk.naming.column(seed)), c) for seed, c in linear.columns_of(form).items()]
        values = [builder.keep(cast(linear.coefficient(c, dtype), dtype), "w") for _, c in terms]
        group = object()
        for (target, _), value in zip(terms, values, strict=True):
            builder.emit(Update(target, "add", value, group, place=builder.place))

    def clear(self) -> None:
        """``gradient = 0``."""
        builder, entry = self.walk.builder, self.matrix.entry
        zero = literal(0, self.matrix.array.dtype)
        builder.loop(self.walk.facts.columns, lambda k: builder.assign(entry(0, k), zero))


class GradientWriter(RowWriter):
    """The writer of an energy's gradient: a returned value is the energy."""

    def __init__(self, walk: PassState, gradient: GradientTerms) -> None:
        super().__init__(walk)
        self._gradient = gradient

    def returned(self, forms: Iterable[linear.Form], count: int, dtype: Type) -> None:
        (form,) = forms
        self._gradient.add(form)


@dataclass(eq=False)
class EnergyPart:
    """A local that is a part of the energy, in place of a storage: additions to it are added to the gradient."""

    gradient: GradientTerms
    declared: Declaration
    own: OwnRegisters

    def form(self, index: Index = 0) -> linear.Form:
        """The tangent that is not in the gradient yet: none."""
        return {}

    def write(self, forms: list[linear.Form], indices: list[Index]) -> None:
        """Write the initial value of the local."""
        self.add(forms[0])

    def add(self, form: linear.Form, index: Index = 0) -> None:
        total: linear.Form = {}
        linear.accumulate(total, form, self.gradient.sums.weights[self.declared.local])
        self.gradient.add(total)


# The tangents of locals: deferred ones, forms, storages; and how they are read.


@dataclass(eq=False)
class Deferred:
    """A local that is used once: its tangent is accumulated at the use, from the partials kept here."""

    local: Local
    root: Value  # its definition
    loops: tuple[Loop, ...]  # around its definition
    sweep: int = 0


class LocalForms:
    """The tangents of the locals of one walk."""

    def __init__(self, walk: PassState, storages: Storages) -> None:
        self._walk = walk
        self._storages = storages
        self.definitions: dict[Local, Value] = {}  # the first values of locals that do not change
        self.deferred: dict[Local, Deferred] = {}  # locals whose tangent is deferred to their use
        # the tangents of the entries of other locals that do not change
        self.forms: dict[Local, list[linear.Form]] = {}
        self.inputs: set[Local] = set()  # numbers from before a loop, while that adds up their factors
        self.pivots: dict[linear.Pivot, linear.Form] = {}  # the forms of locals that are leaves of other forms
        self._loops: dict[linear.Pivot, tuple[Loop, ...]] = {}  # around the declaration of each
        self._same: dict[linear.Leaf, list[Local]] = {}  # the locals with the tangent of each pivot
        self._stored: set[linear.Pivot] = set()

    def form(self, value: Read) -> linear.Form:
        local = value.local
        if local in self.inputs:
            return {linear.Input(local): 1}
        if local in self._storages.by_local and value.checks:
            return self._guarded(value)
        if local in self._storages.by_local:
            return self._storages.by_local[local].form(self.flat_index(value))
        index = self.flat_index(value) if local in self.forms else 0
        if isinstance(index, int):
            return self._fresh(self.forms[local][index] if local in self.forms else {}, local)
        self._walk.plan.indexed.setdefault(local, "its entries are read by an index that is known at run time")
        return {}

    def _guarded(self, value: Read) -> linear.Form:
        """The tangent of an entry whose index may be out of range."""
        condition = is_inside(self._walk, value)
        if condition is False:
            return {}
        index = self._walk.builder.keep(clamped(condition, cast(self.flat_index(value), I32)), "index")
        return where(condition, self._storages.by_local[value.local].form(index), value.dtype)

    def _fresh(self, form: linear.Form, local: Local) -> linear.Form:
        """The form of a local, or of one of its entries; if rows in it may have changed, the local needs its own."""
        if self._walk.cursor.is_stale(form):
            self._walk.plan.own_rows.setdefault(local, "a local that it is made of changes while it is used")
        return form

    def flat_index(self, value: Read) -> Index:
        flat = self._walk.naming.flat(value.index, value.local.shape)
        return flat.constant if flat.is_constant else value_of(flat)

    def note_sweep(self, deferred: Deferred, sweep: int) -> None:
        """Note that an accumulation uses a local with a deferred tangent."""
        is_repeated = deferred.loops != self._walk.cursor.loops
        is_second = is_repeated or (deferred.sweep and deferred.sweep != sweep)
        if is_second:
            why = "it is used in an inner loop" if is_repeated else "it is used more than once"
            self._walk.plan.accumulated.setdefault(deferred.local, why)
        deferred.sweep = sweep

    def with_own(self, local: Local, forms: list[linear.Form], first: Index = 0) -> list[linear.Form]:
        """The forms of the entries of a local, from one on, with its own seeds.

        What an entry of a position is computed from does not count: other entries of that position, or itself before.
        """
        own = self._walk.facts.own_seeds.get(local)
        if own is None or not isinstance(first, int):
            return forms
        return [_own_form(own[n], self.settled(form)) if n in own else form for n, form in enumerate(forms, first)]

    def keep(self, local: Local, forms: list[linear.Form]) -> None:
        """Keep the tangents of the entries of a local that is declared here."""
        forms = self.with_own(local, forms)
        plan = self._walk.plan
        if local in self._walk.facts.changed or local in plan.indexed or local in plan.own_rows:
            forms = [linear.materialize(self._walk.builder, self.settled(form)) for form in forms]
            self._storages.begin(local).write(forms, list(range(len(forms))))
        elif self._is_pivot(local) and is_worth_pivot(forms[0]):
            pivot = linear.Pivot(local)
            self.forms[local], self.pivots[pivot], self._loops[pivot] = [{pivot: 1}], forms[0], self._walk.cursor.loops
            self._same[pivot] = [local]
        else:
            self.forms[local] = forms
            if self._is_pivot(local) and len(forms[0]) == 1:
                self._same.get(next(iter(forms[0])), []).append(local)

    def _is_pivot(self, local: Local) -> bool:
        is_hessian = bool(self._walk.facts.seeds.sparse.starts)
        return is_hessian and not local.shape and local not in self._walk.plan.settled

    def settled(self, form: linear.Form) -> linear.Form:
        """A form over columns, of a value whose tangent is needed at once: no pivots from the next pass on."""
        pivots = pivots_of([form], self.pivots)
        return self._without(pivots, [form], "its tangent is needed before it is stored", pivots)[0]

    def stored(self, forms: list[linear.Form]) -> list[linear.Form]:
        """The forms over columns of what is stored together."""
        pivots, loops = pivots_of(forms, self.pivots), self._walk.cursor.loops
        again = [pivot for pivot in pivots if pivot in self._stored or self._loops[pivot] != loops]
        self._stored.update(pivots)
        return self._without(pivots, forms, "it is stored more than once", again)

    def _without(
        self,
        found: dict[linear.Pivot, linear.Form],
        forms: list[linear.Form],
        why: str,
        settled: Collection[linear.Pivot],
    ) -> list[linear.Form]:
        """The forms over columns; if another pass has fewer pivots, with any coefficients."""
        self._walk.plan.settled.update((local, why) for pivot in settled for local in self._same[pivot])
        if not settled:
            return without_pivots(self._walk.builder, found, forms) if found else forms
        leaves = {leaf: c for form in found.values() for leaf, c in form.items()}
        return [{x: c for x, c in (leaves | form).items() if not isinstance(x, linear.Pivot)} for form in forms]


def _own_form(seed: linear.LocalSeed, form: linear.Form) -> linear.Form:
    """The form of what has a seed of its own."""
    beside = {x for x in form if type(x) is linear.LocalSeed and (x.local, x.entry) in seed.position}
    return {**{x: c for x, c in form.items() if x not in beside}, seed: 1}


# Tangents of locals that stand for themselves in forms, until what is stored is known.
#
# With forms over columns, each operation of an energy costs a product for each column of its element, although its
# numbers may depend on few others: the 12 columns of a tetrahedron pass through the 9 entries of F. So a local of a
# Hessian's program is a leaf of the forms that use it, a *pivot*. The forms that are stored together are a graph then,
# from rows over pivots to columns, and pivots are eliminated one by one: each user of a pivot gets its form, times a
# coefficient. That is the chain rule in any order of operations, forward and reverse among them. The next pivot is the
# one with the fewest products, less those that it would take if it were the last (U. Naumann, "Optimal accumulation of
# Jacobian matrices by elimination methods on the dual computational graph", 2004, section 4).

Pivots = Mapping[linear.Pivot, linear.Form]  # in the order of their declarations
Node = linear.Pivot | int  # a pivot, or the number of a row


def is_worth_pivot(form: linear.Form) -> bool:
    """Whether a tangent is more than that of another value, and can be linear.kept as it is: rows may change."""
    is_another = len(form) == 1 and all(is_number(c, 1) for c in form.values())
    return bool(form) and not is_another and all(isinstance(leaf, (linear.Seed, linear.Pivot)) for leaf in form)


def pivots_of(forms: Iterable[linear.Form], pivots: Pivots) -> dict[linear.Pivot, linear.Form]:
    """All pivots that forms are made of, in the order of their declarations."""
    found: set[linear.Pivot] = set()
    stack = [leaf for form in forms for leaf in form if isinstance(leaf, linear.Pivot)]
    while stack:
        pivot = stack.pop()
        if pivot not in found:
            found.add(pivot)
            stack.extend(leaf for leaf in pivots[pivot] if isinstance(leaf, linear.Pivot))
    return {pivot: form for pivot, form in pivots.items() if pivot in found}


def without_pivots(builder: Builder, pivots: Pivots, rows: list[linear.Form]) -> list[linear.Form]:
    """The forms over columns; ``pivots``: all that they are made of."""
    nodes: dict[Node, linear.Form] = {pivot: dict(form) for pivot, form in pivots.items()}
    nodes |= {n: dict(row) for n, row in enumerate(rows)}
    users: dict[linear.Pivot, dict[Node, None]] = {pivot: {} for pivot in pivots}
    for node, form in nodes.items():
        for leaf in form:
            if isinstance(leaf, linear.Pivot):
                users[leaf][node] = None
    most = _products(pivots, users)
    while users:
        pivot = min(users, key=lambda p: len(users[p]) * len(nodes[p]) - most[p])
        form, using = nodes.pop(pivot), users.pop(pivot)
        if len(using) > 1:
            form = {leaf: linear.kept(builder, c) for leaf, c in form.items()}
        for user in using:
            c = nodes[user].pop(pivot)
            linear.accumulate(nodes[user], form, linear.kept(builder, c) if len(form) > 1 else c)
        for leaf in form:
            if isinstance(leaf, linear.Pivot):
                del users[leaf][pivot]
                users[leaf].update(using)
    return [nodes[n] for n in range(len(rows))]


def _products(pivots: Pivots, users: Mapping[linear.Pivot, Iterable[Node]]) -> dict[linear.Pivot, int]:
    """For each pivot, how many columns it depends on, times how many rows depend on it."""
    columns: dict[linear.Pivot, set[linear.Leaf]] = {}
    for pivot, form in pivots.items():
        columns[pivot] = set().union(*(columns[x] if isinstance(x, linear.Pivot) else {x} for x in form))
    rows: dict[linear.Pivot, set[Node]] = {}
    for pivot in reversed(list(pivots)):
        rows[pivot] = set().union(*(rows[x] if isinstance(x, linear.Pivot) else {x} for x in users[pivot]))
    return {pivot: len(columns[pivot]) * len(rows[pivot]) for pivot in pivots}
