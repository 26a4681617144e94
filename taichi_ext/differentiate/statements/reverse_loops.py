"""Serial loops whose tangents are accumulated backwards, or by factors of what they read from before.

A loop that carries a few numbers between iterations, with the tangents of all earlier iterations, costs a product per
column and iteration in forward accumulation of rows. If only one sum of these numbers is stored in the end, the loop is
*reversed*: each iteration writes the partial derivatives of its carried numbers, by the previous ones and by
parameters, to a tape, and a second loop goes over the tape backwards, with one weight for each carried number. Tangents
by seeds without a column, such as the position of a pixel, are accumulated forward in registers, since edges read them.

This requires that the number of iterations is known and that each runs to its end; that the body only affects the
tangents of the carried numbers; and that the columns of each iteration can be named outside of it. The walk checks the
last two: if other code reads or changes such a tangent, the loop is accumulated forward after all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import taichi_ext.program as ir
from taichi_ext.analysis.affine import Affine, source_of
from taichi_ext.analysis.loops import Loop
from taichi_ext.differentiate.facts.facts import Declaration, Facts, PassState
from taichi_ext.differentiate.forms import forms as linear
from taichi_ext.differentiate.memory.registers import OwnRegisters
from taichi_ext.differentiate.memory.rows import RowMemory, local_row, scratch_part, scratch_row
from taichi_ext.differentiate.plan.storage_plan import StorageKey, TapeSum
from taichi_ext.differentiate.statements.shadows import ContainerTangents
from taichi_ext.differentiate.storage.storage import LocalStorage, Storage
from taichi_ext.differentiate.storage.storages import LocalForms, Storages
from taichi_ext.program.build import Coefficient, Index, add, cast, literal, multiply, operation

# A walk over the statements of a block; arguments: the block, its variables, calls before and after its statements
WalkBlock = Callable[[ir.Body, tuple[ir.Local, ...], Callable[[], None], Callable[[], None]], ir.Body]
LEAST_COLUMNS = 8  # with fewer columns, forward accumulation of rows costs no more
MOST_CARRIED = 4  # carried numbers; the number of their partial derivatives is the square


@dataclass(eq=False)
class LoopTape:
    """The tape of a reversed loop."""

    statement: ir.For
    loop: Loop
    carried: tuple[ir.Local, ...]
    around: tuple[Loop, ...]
    sums: frozenset[ir.Local]  # the carried locals that are only added to
    before: dict[ir.Local, linear.Form]
    own: dict[ir.Local, OwnRegisters]  # tangents with respect to seeds without a column, before the loop and after it
    memory: RowMemory
    width: int
    sweeps: int = 0
    # the coefficients it holds, in order
    entries: list[tuple[ir.Local, linear.Seed | linear.Carried]] = field(default_factory=list)

    def entry(self, iteration: ir.Value, number: int) -> ir.Read | ir.Load:
        first = self.loop.bounds[0][0]  # type: ignore[index]
        return self.memory.entry(add(multiply(add(iteration, -first), self.width), number))


class Reversals:
    """The reversed loops of one walk."""

    def __init__(self, walk: PassState, storages: Storages) -> None:
        self.walk = walk
        self.storages = storages
        self.builder = walk.builder
        self.plan = walk.plan
        self.forward: list[ir.For] = []  # loops that may be reversed in another walk

    def go_forward(self, s: ir.Statement, why: str) -> None:
        self.plan.forward.setdefault(s, why)

    def choose(self) -> bool:
        """At the end of a pass that required nothing else, choose a loop to reverse; False if none."""
        for s in self.forward:
            carried = self._carried(s) if s not in self.plan.forward else ()
            if carried:
                self.plan.reversed_loops[s] = carried
                for inner in (local for x in ir.statements(s.body) for local in ir.declared(x)):
                    self.plan.storages.pop(StorageKey(inner), None)  # facts from forward accumulation
                return True  # the others after another walk
        return False

    def _carried(self, s: ir.For) -> tuple[ir.Local, ...]:
        """The numbers that a loop carries, if its text shows that reversing it is possible and pays."""
        is_left = any(isinstance(x, ir.Jump) for x in s.within)
        if is_left or not (self._is_wanted() and self._is_counted(s) and is_closed(s, self.walk.facts)):
            return ()
        inner = {x.local for x in ir.statements(s.body) if isinstance(x, ir.Declare)}
        targets = [x.target.memory for x in ir.statements(s.body) if isinstance(x, (ir.Assign, ir.Update))]
        outer = self.walk.facts.activity.locals - inner
        carried = tuple(dict.fromkeys(v for v in targets if isinstance(v, ir.Local) and v in outer))
        return carried if len(carried) <= MOST_CARRIED and self._have_rows(carried) else ()

    def _is_wanted(self) -> bool:
        """Whether there are enough columns, all of them stored in memory."""
        seeds = self.walk.facts.seeds
        has_given = seeds.values is not None and bool(seeds.arguments)
        return not has_given and seeds.use.sums is None and self.walk.numbering.all_in_rows >= LEAST_COLUMNS

    def _is_counted(self, s: ir.For) -> bool:
        """Whether this is a serial loop over a range that runs to its end, and does not change its variable."""
        loop = self.walk.facts.loops[s]
        is_whole = not loop.is_parallel and loop.bounds is not None and not loop.is_interrupted
        return is_whole and s.kind == "range" and len(loop.atoms) == 1 and s.variables[0] not in self.walk.facts.changed

    def _have_rows(self, carried: tuple[ir.Local, ...]) -> bool:
        """Whether the locals are numbers of one type, and the loop adds to the row of one of them."""
        stored = [x for x in map(self.storages.by_local.get, carried) if isinstance(x, Storage)]
        if len({v.dtype for v in carried}) != 1 or len(stored) < len(carried) or any(v.shape for v in carried):
            return False
        return any(x.rows is not None and x.rows.terms.row_loops for x in stored)

    # --- the loop, which writes the tape

    def loop(self, s: ir.For, block_of: WalkBlock) -> None:
        """Walk over a loop that writes a tape; ``block_of`` walks over its body."""
        walk, loop = self.walk, self.walk.facts.loops[s]
        carried = self.plan.reversed_loops[s]
        storages = [self.storages.by_local[v] for v in carried]
        before = [linear.materialize(self.builder, linear.numbered(x.form())) for x in storages]
        is_elsewhere = any(x.declared.block is not walk.cursor.block for x in storages)
        if is_elsewhere or any(map(linear.has_row, before)):
            self.go_forward(s, "its carried numbers are declared elsewhere, or have all columns before it")
        width = max(1, self.plan.tape_widths.get(s, 0))
        memory = self._memory(s, width, carried[0].dtype)
        own = {v: x.own for v, x in zip(carried, storages, strict=True)}
        forms, sums = dict(zip(carried, before, strict=True)), only_added(s, carried)
        tape = LoopTape(s, loop, carried, walk.cursor.loops, sums, forms, own, memory, width)
        self.builder.frozen.update(s.variables)
        with walk.cursor.in_loop(loop):
            body = block_of(s.body, s.variables, lambda: self._begin(tape), lambda: self._finish(tape))
        self.builder.emit(ir.For(s.kind, s.variables, s.domain, body, s.config, place=s.place))
        for v in carried:
            self.storages.by_local[v] = Reversed(self, v, tape)

    def _memory(self, s: ir.For, width: int, dtype: ir.Type) -> RowMemory:
        walk = self.walk
        iterations = walk.facts.loops[s].iterations
        assert iterations is not None  # a loop that is counted
        size = iterations * width
        longest = walk.facts.seeds.limits.local_array
        if size > longest and walk.facts.seeds.device.is_host:
            part = scratch_part(walk, size, dtype)
            return scratch_row(self.builder, walk.arguments, size, dtype, part, is_filled=True)
        if size > longest:
            self.go_forward(s, "its tape is too long for a local array")
        return local_row(self.builder, "tape", size, dtype, is_filled=True)

    def _begin(self, tape: LoopTape) -> None:
        """At the start of an iteration, give each carried number a seed."""
        for v in tape.carried:
            key = StorageKey(v, tape.statement)
            own = self.plan.facts(key).own
            seeds = () if v in tape.sums else (linear.Carried(v),)
            own.update(dict.fromkeys((*seeds, *tape.own[v].own_seeds)))
            tape.own[v].note(seed for seed in own if isinstance(seed, linear.LocalSeed))
            storage = self.storages.begin_with(v, key, tape.own[v])
            for seed in seeds:
                storage.own.begin(seed)

    def _finish(self, tape: LoopTape) -> None:
        """At the end of an iteration, write its coefficients to the tape."""
        iteration = ir.Read(tape.statement.variables[0])
        for v in tape.carried:
            storage = self.storages.by_local[v]
            assert isinstance(storage, Storage)  # begun above
            form = storage.form()
            is_named = all(self._is_named(x, iteration.local) for x in linear.columns_of(form))
            if storage.rows is not None or storage.slots or not is_named:
                self.go_forward(tape.statement, "an iteration has columns that have no names after it")
                return
            for seed, c in form.items():
                if not isinstance(seed, (linear.Seed, linear.Carried)):
                    continue  # its register is used further
                entry = tape.entry(iteration, len(tape.entries))
                self.builder.assign(entry, linear.coefficient(c, entry.dtype))
                tape.entries.append((v, seed))
        if len(tape.entries) != tape.width:
            self.plan.tape_widths[tape.statement] = len(tape.entries)

    def _is_named(self, seed: linear.Seed, iteration: ir.Local) -> bool:
        """Whether a column can be named outside of the loop, from the iteration's number."""
        outer = self.walk.cursor.block.outer
        assert outer is not None  # it contains the block of the loop
        names = (source_of(atom) for atom, _ in seed.column.terms)
        return all(name is iteration or outer.can_name(name) for name in names)

    # --- the loop over the tape

    def swept(self, form: linear.Form, to: ContainerTangents) -> linear.Form:
        """The form with the tangents of reversed loops accumulated, for a store to the tangents ``to``."""
        tapes = [leaf.rows.tape for leaf in form if linear.is_row(leaf) and isinstance(leaf.rows, Reversed)]
        for tape in dict.fromkeys(tapes):
            if self.plan.is_reversed(tape.statement):
                form = self._swept(form, tape, to)
        return form

    def _swept(self, form: linear.Form, tape: LoopTape, to: ContainerTangents) -> linear.Form:
        ours = [x for x in form if linear.is_row(x) and isinstance(x.rows, Reversed) and x.rows.tape is tape]
        mine = {leaf: form[leaf] for leaf in ours}
        rest: linear.Form = {leaf: c for leaf, c in form.items() if leaf not in mine}
        is_guarded = any(isinstance(c, linear.Guarded) and not c.is_chosen for c in mine.values())
        if tape.loop in self.walk.cursor.loops or is_guarded:
            self.go_forward(tape.statement, "its result is stored within it, or by a condition")
            return rest
        tape.sweeps += 1
        key = TapeSum(tape.statement, tape.sweeps)
        self.plan.tape_sums.setdefault(key, ir.Local("sum", to.container.dtype))
        total = self.storages.begin(self.plan.tape_sums[key])
        weights = {leaf.source: linear.bare(c) for leaf, c in mine.items()}
        kind, declare = tape.carried[0].dtype, self.builder.declare
        adjoints = {v: declare(f"weight_{v.name}", cast(weights.get(v, 0), kind), kind) for v in tape.carried}
        self._over_tape(tape, adjoints, total, to)
        for leaf, c in total.form().items():
            rest[leaf] = linear.plus(rest.get(leaf, 0), c)
        for v, first in tape.before.items():
            linear.accumulate(rest, first, adjoints[v])
        return linear.materialize(self.builder, rest)

    def _over_tape(
        self, tape: LoopTape, adjoints: dict[ir.Local, ir.Read], total: LocalStorage, to: ContainerTangents
    ) -> None:
        walk = self.walk
        variable = tape.statement.variables[0]
        ((first, end),) = tape.loop.bounds  # type: ignore[misc]
        is_short = end - first <= to.size * walk.facts.columns  # and may be one over columns, which are stored to
        back = ir.Local("back", ir.I32, (), "column" if is_short else "loop")
        iteration = ir.Local(variable.name, ir.I32, (), "temporary")
        self.builder.frozen.add(iteration)
        again = Loop(tape.statement, False, (iteration,), tape.loop.bounds)
        with walk.cursor.in_loop(again), walk.cursor.in_block((iteration,)), self.builder.collecting() as body:
            self.builder.emit(ir.Declare(iteration, (operation("sub", literal(end - 1, ir.I32), ir.Read(back)),)))
            self._step(tape, adjoints, total, ir.Read(iteration))
        domain = (literal(end - first, ir.I32),)
        self.builder.emit(ir.For("range", (back,), domain, tuple(body), place=self.builder.place))

    def _step(self, tape: LoopTape, adjoints: dict[ir.Local, ir.Read], total: LocalStorage, iteration: ir.Read) -> None:
        """One iteration backwards."""
        terms: linear.Form = {}
        new: dict[ir.Local, Coefficient] = {v: adjoints[v] if v in tape.sums else 0 for v in tape.carried}
        for number, (v, seed) in enumerate(tape.entries):
            product = multiply(adjoints[v], tape.entry(iteration, number))
            if isinstance(seed, linear.Carried):
                new[seed.local] = add(new[seed.local], product)
            else:
                linear.accumulate(terms, {self._renamed(seed, tape.statement.variables[0], iteration.local): product})
        terms = linear.materialize(self.builder, terms)
        values = {v: x if x is adjoints[v] else self.builder.keep(cast(x, v.dtype)) for v, x in new.items()}
        total.add(terms)
        for v, x in values.items():
            if x is not adjoints[v]:
                self.builder.assign(adjoints[v], x)

    def _renamed(self, seed: linear.Seed, old: ir.Local, new: ir.Local) -> linear.Seed:
        """The seed with another loop variable; if a branch guards its column, that is kept."""
        column = Affine((), seed.column.constant)
        for atom, factor in seed.column.terms:
            column = column + Affine(((new if atom is old else atom, factor),))
        renamed, naming = linear.Seed(column), self.walk.naming
        if seed in naming.conditional:
            naming.conditional.add(renamed)
        return renamed


class Reversed:
    """The tangent of a number carried by a reversed loop, after the loop, in place of its storage."""

    def __init__(self, reversals: Reversals, local: ir.Local, tape: LoopTape) -> None:
        self.reversals, self.tape = reversals, tape
        self.declared = reversals.walk.declaration(local)
        self.own = tape.own[local]
        self.version = 0

    def form(self, index: Index = 0) -> linear.Form:
        return {linear.Row(self.declared.local, 0, self, 0, 0, self.reversals.walk.cursor.loops): 1, **self.own.form()}

    def _go_forward(self) -> None:
        self.reversals.go_forward(self.tape.statement, "other code reads or changes its carried numbers")

    def entry(self, index: Index, column: Coefficient) -> ir.Value:
        """One entry of the row, which other code needs: the loop is then accumulated forward."""
        self._go_forward()
        return literal(0, self.declared.local.dtype)

    def write(self, forms: list[linear.Form], indices: list[Index]) -> None:
        self._go_forward()

    def add(self, form: linear.Form, index: Index = 0) -> None:
        self._go_forward()


def is_closed(s: ir.For | ir.While, facts: Facts) -> bool:
    """Whether a loop only changes locals, and takes no tangents of rules or edges."""
    changes, own = facts.loops[s].changes, {local for x in s.within for local in ir.declared(x)}
    kinds = (ir.Declare, ir.Assign, ir.Update, ir.If, ir.For, ir.While, ir.Jump)
    is_local = all(isinstance(x, kinds) for x in s.within) and not changes & facts.activity.containers
    return is_local and not (own | changes) & facts.own_seeds.keys()


def only_added(s: ir.For | ir.While, carried: tuple[ir.Local, ...]) -> frozenset[ir.Local]:
    """The locals that the body only adds to, and does not read."""
    inner = ir.statements(s.body)
    others = {local for x in inner for local in x.contents.locals}
    for x in inner:
        if isinstance(x, ir.Assign) or (isinstance(x, ir.Update) and x.op not in ("add", "sub")):
            others |= {x.target.local} if isinstance(x.target, ir.Read) else set()
    return frozenset(v for v in carried if v not in others)


# Sums that a loop adds to, by way of values from before the loop.
#
# A loop may add multiples of a local h to a sum, where the tangent of h is a row or has several columns. Then it adds
# up the factors of h, one number for each sum, and behind the loop their product with the tangent of h is added to that
# of the sum, which is not touched in each iteration. So a layer of a network costs as much as in reverse mode::
#
#     for j in range(8):                    for j in range(8):
#         z = 0.0                               ...
#         for k in ti.static(range(8)):         d_y_h_0 += v[j] * (1 - t * t) * w[j, 0]
#             z += w[j, k] * h[k]               ...
#         y += v[j] * ti.tanh(z)            d_y[...] += d_y_h_0 * ...  # the tangent of h[0]
#
# This requires that the loop changes no tangents but those of its own locals and of sums that it does not read.

MOST_FACTORS = 64  # numbers of one loop


class Factors:
    """The tangent of a sum within a loop, in place of its storage: by inputs of the loop, in registers of its own."""

    def __init__(self, storage: LocalStorage, factors: OwnRegisters, inputs: Collection[ir.Local]) -> None:
        self.storage, self.factors, self.inputs = storage, factors, inputs
        self.declared: Declaration = storage.declared
        self.own = storage.own

    def form(self, index: Index = 0) -> linear.Form:
        return {**self.storage.form(index), **self.factors.form()}

    def write(self, forms: list[linear.Form], indices: list[Index]) -> None:
        raise AssertionError("the loop only adds to its sums")

    def add(self, form: linear.Form, index: Index = 0) -> None:
        mine: linear.Form = {x: c for x, c in form.items() if isinstance(x, linear.Input) and x.local in self.inputs}
        self.factors.add_own(mine)
        self.storage.add({x: c for x, c in form.items() if x not in mine}, index)


@dataclass(frozen=True)
class Inside:
    """A loop whose inputs have factors: their tangents, and the sums."""

    inputs: dict[ir.Local, linear.Form]
    sums: dict[ir.Local, Factors]


@dataclass(frozen=True)
class LoopInputs:
    """The inputs of the loops of one walk."""

    walk: PassState
    storages: Storages
    forms: LocalForms

    def begin(self, s: ir.For | ir.While) -> Inside | None:
        """Declare the factors in front of a loop; None for a loop without."""
        sums = self._sums(s)
        inputs = self._inputs(s) if sums else {}
        if not inputs or len(inputs) * len(sums) > MOST_FACTORS:
            return None
        found: dict[ir.Local, Factors] = {}
        for local in sums:
            key = StorageKey(local, s, is_before=True)
            factors = OwnRegisters(self.walk, self.walk.declaration(local), self.walk.plan.facts(key))
            found[local] = self.storages.by_local[local] = Factors(self.storages.by_local[local], factors, inputs)
        self.forms.inputs.update(inputs)
        return Inside(inputs, found)

    def end(self, inside: Inside | None) -> None:
        """Add the tangents of the inputs behind the loop."""
        if inside is None:
            return
        self.forms.inputs.difference_update(inside.inputs)
        for local, factors in inside.sums.items():
            self.storages.by_local[local] = factors.storage
            total: linear.Form = {}
            for seed, factor in factors.factors.form().items():
                assert isinstance(factor, ir.Read)
                linear.accumulate(total, linear.where_nonzero(factor, inside.inputs[seed.local]))
            if total:
                factors.storage.add(linear.materialize(self.walk.builder, total))

    def _sums(self, s: ir.For | ir.While) -> tuple[ir.Local, ...]:
        """The numbers that a loop adds to; none where it changes other tangents, or reads a sum."""
        facts, loop = self.walk.facts, self.walk.facts.loops[s]
        is_wanted = not loop.is_parallel and s not in self.walk.plan.forward and self._is_wanted()
        if not is_wanted or not is_closed(s, facts):
            return ()
        changed = tuple(local for local in self.storages.by_local if local in loop.changes)
        is_added = only_added(s, changed).issuperset(changed) and not any(v.shape for v in changed)
        is_stored = all(isinstance(self.storages.by_local[v], (Storage, Factors)) for v in changed)
        return changed if is_added and is_stored and s.contents.locals.isdisjoint(changed) else ()

    def _is_wanted(self) -> bool:
        """Whether J is dense, and has enough columns."""
        seeds = self.walk.facts.seeds
        return seeds.values is None and not seeds.use.is_again and self.walk.numbering.all_in_rows >= LEAST_COLUMNS

    def _inputs(self, s: ir.For | ir.While) -> dict[ir.Local, linear.Form]:
        """The numbers from before a loop that it reads, with tangents of more than one term."""
        changes = self.walk.facts.loops[s].changes
        read = {local for x in s.within for local in x.contents.locals}
        result: dict[ir.Local, linear.Form] = {}
        for local in (*self.forms.forms, *self.storages.by_local):
            if local in read and local not in changes and not local.shape:
                form = self.forms.form(ir.Read(local))
                is_kept = not any(linear.is_row(leaf) and leaf.source in changes for leaf in form)
                if is_kept and (len(form) > 1 or linear.has_row(form)):
                    result[local] = form
        return result
