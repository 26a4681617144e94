"""Forward differentiation: from a program to a program that also computes its tangents.

A pass over the statements emits them with tangents, and adds requirements to the ``StoragePlan``, such as a row for a
local. Its earlier statements did not know requirements found later, so the pass is repeated until one requires nothing
new: its statements are the result. Requirements only grow (a choice that was given up is never tried again), so this
terminates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import taichi_ext.program as ir
from taichi_ext.analysis.affine import Affine
from taichi_ext.analysis.bounds import UncertainAccess
from taichi_ext.analysis.energy_sums import EnergySums
from taichi_ext.analysis.loops import Extent
from taichi_ext.analysis.stores import StoreSite, grouped
from taichi_ext.differentiate.edges.edges import RuleContext, boundary
from taichi_ext.differentiate.facts.decisions import (
    Differentiated,
    DifferentiationRequest,
    Role,
    named_columns,
    role_of,
    size_of,
)
from taichi_ext.differentiate.facts.facts import (
    Arguments,
    Facts,
    PassState,
    ShadowMatrix,
    given_tangents,
    only_inside,
)
from taichi_ext.differentiate.forms.entry_sites import Blocks, DenseRowsError
from taichi_ext.differentiate.forms.forms import Cursor, Form, Seed, columns_only, materialize
from taichi_ext.differentiate.plan.naming import Naming
from taichi_ext.differentiate.plan.report import Report, costs, found_edges, loop_choices
from taichi_ext.differentiate.plan.sparse_numbering import Numbering, RowNumbering, SparseSeeds
from taichi_ext.differentiate.plan.storage_plan import PlanState, StoragePlan
from taichi_ext.differentiate.sparse.entry_writer import EntryWriter, RowWriter
from taichi_ext.differentiate.sparse.sparse_counts import Counts
from taichi_ext.differentiate.sparse.sparse_sums import LocalSum
from taichi_ext.differentiate.statements.linearize import Linearizer, raise_unknown
from taichi_ext.differentiate.statements.local_tangents import LocalTangents
from taichi_ext.differentiate.statements.reverse_loops import LoopInputs, Reversals
from taichi_ext.differentiate.statements.shadows import (
    ContainerTangents,
    EnergyTangents,
    IntermediateTangents,
    ShadowFacts,
    SparseTangents,
)
from taichi_ext.differentiate.storage.storage import LocalStorage
from taichi_ext.differentiate.storage.storages import EnergyPart, GradientTerms, GradientWriter, LocalForms, Storages
from taichi_ext.differentiate.transform.preparation import find_facts
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import I32, Body, Declare, For, Local, Program, Read, cited, statements
from taichi_ext.program.build import Builder, Expressions, add, cast, indices_of, literal
from taichi_ext.program.keys import TERMS

MOST_PASSES = 100


def differentiate(program: Program, seeds: DifferentiationRequest) -> Differentiated:
    """The program that computes the same as ``program``, and its tangents."""
    facts, accesses = find_facts(program, seeds)
    by_number = 0 if seeds.first_column is None else _entries_by_number(facts.program, seeds)  # counts for blocks alone
    blocks = Blocks(seeds.columns, seeds.first_column, by_number)
    plan = _first_plan(facts)
    for passes in range(1, MOST_PASSES + 1):
        if plan.serial.keys() != facts.serial:
            facts = facts.with_serial(plan.serial.keys())
        transform = Transform.of(facts, plan, blocks)
        plan.begin_pass()
        before, body = plan.state(), ()
        try:
            body = transform.body(facts.program.body, begin=transform.seed_arguments)
            transform.storages.check_sums()
        except DenseRowsError:
            if plan.state() == before:  # otherwise the next pass may not need these rows
                raise
        if _is_complete(plan, before, transform):
            return _result(transform, body, accesses, passes)
        limits = facts.seeds.limits.within(transform.context.walk.builder.emitted, facts.columns)
        if limits != facts.seeds.limits:
            facts = replace(facts, seeds=replace(facts.seeds, limits=limits))
            plan = _first_plan(facts)
    name = facts.program.name
    raise UnsupportedError(f"The analysis of {name} did not end after {MOST_PASSES} rounds. Split it into two kernels.")


def _entries_by_number(program: Program, seeds: DifferentiationRequest) -> int:
    """How many entries of parameters a program reads by constant indices."""
    params = {c for c, role in seeds.roles.items() if role.first_column is not None or role.components}
    values = (v for s in statements(program.body) for value in ir.values_of(s) for v in ir.walk(value))
    loads = (v for v in values if isinstance(v, ir.Load) and v.container in params)
    numbers = {(v.container, *(getattr(i, "value", i) for i in (*v.indices, *v.component))) for v in loads}
    return sum(not any(isinstance(i, ir.Value) for i in number) for number in numbers)


def _result(transform: Transform, body: Body, accesses: tuple[UncertainAccess, ...], passes: int) -> Differentiated:
    """The result of the last pass; raises UnsupportedError where a derivative is not known."""
    walk, writer, coverage = transform.context.walk, transform.writer, transform.coverage
    plan = walk.plan
    for message in walk.problems:
        raise UnsupportedError(message)
    program, arguments = walk.facts.program, walk.arguments
    shadows = {c for _, c in arguments.given}
    return Differentiated(
        replace(program, name=f"{program.name}_jacobian", body=body),
        shadows=tuple(arguments.given),
        covered=frozenset(coverage.covered),
        scratch_sizes=dict(arguments.scratch_sizes),
        active=walk.facts.activity,
        passes=passes,
        relied=frozenset(coverage.assumed_zero),
        report=Report(
            transform.storages.choices(),
            loop_choices(program.body, plan.serial, plan.loop_notes()),
            tuple(plan.columns.in_rows.items()),
            costs(body, shadows),
            accesses,
            edges=found_edges(program.body),
        ),
        sparse=writer.result(),
        first_columns=walk.blocks.first_columns,
        first_column=arguments.first_column,
    )


def _is_complete(plan: StoragePlan, before: PlanState, transform: Transform) -> bool:
    """Whether the plan had all that a pass requires; otherwise it is made ready for the next one."""
    after = plan.state()
    if after.columns != before.columns:
        plan.forget_columns()
    if after != before:
        return False
    transform.writer.forget_unused()
    if plan.state() != before:
        return False
    # optimisations are decided last
    rows = transform.storages.row_decisions(transform.coverage.read)
    has_news = any(plan.rows.get(local) != decision for local, decision in rows.items())
    plan.rows.update(rows)
    return not has_news and not transform.reversals.choose()


def _first_plan(facts: Facts) -> StoragePlan:
    """The plan before the first pass; for a sparse Jacobian, with the columns known from earlier launches."""
    plan, seeds = StoragePlan(), facts.seeds
    match seeds.sparse:
        case SparseSeeds(columns=columns, outputs=outputs, keys=keys):
            known, in_rows = plan.columns.intermediates, plan.columns.in_rows
            in_rows.update((key, "an earlier launch") for key in columns.sizes if key in columns.in_rows)
            known.update(columns.intermediates)
            for c in facts.stores.sites:  # in the order of the program: columns are numbered by it
                is_parameter = seeds.roles.get(c, Role()).first_column is not None
                is_between = keys.get(c) not in outputs and not in_rows
                if c in facts.activity.containers and (is_parameter or is_between):
                    known[keys.get(c)] = size_of(c, seeds)
    return plan


# One pass over the statements of a program: its parts, each with the lower ones that it uses, and the emitted body.
#
# All parts share the ``PassState``. Above it are the storages and the tangents of containers, then the tangents of
# locals, then the forms of expressions, which read both, then the statements that write locals and containers, and at
# the top ``Transform``.

ATOMIC = "order of iterations matters to an atomic"
# Names of calls that are kept unchanged, on values with tangents or without
KEPT = frozenset(("print", "assert", "append", ".append"))


@dataclass(frozen=True)
class Transform:
    """The statements of one walk."""

    context: RuleContext  # the walk, forms of values, tangents of locals
    containers: Mapping[ir.Container, ContainerTangents]
    coverage: ShadowFacts  # the findings about their shadows
    storages: Storages
    reversals: Reversals  # the loops whose tangents are accumulated backwards
    inputs: LoopInputs  # the inputs of the others
    writer: RowWriter  # the writer of what is stored besides rows

    @classmethod
    def of(cls, facts: Facts, plan: StoragePlan, blocks: Blocks) -> Transform:
        """The parts, at the start of the program."""
        numbering = facts.seeds.sparse.numbering(facts.columns, plan.columns)
        facts = replace(facts, columns=numbering.width)
        in_order = sorted(facts.activity.containers, key=lambda c: c.name)  # so that texts are the same in each run
        roles = {c: role_of(c, facts.seeds, numbering) for c in in_order}
        builder = Builder()
        given = [a.value for a in facts.program.arguments if a.value is not None]
        reads = (v for x in given if not isinstance(x, ir.Container) for v in ir.entries(x) if isinstance(v, ir.Read))
        builder.frozen.update(v.local for v in reads if not v.index)
        expressions, arguments = Expressions(builder, is_again=facts.seeds.use.is_again), Arguments(facts.program)
        parameters = dict(named for c, role in roles.items() for named in named_columns(c, role, facts.seeds).items())
        naming = Naming(facts.indices, parameters, numbering)
        walk = PassState(facts, plan, blocks, builder, expressions, Cursor(), naming, numbering, arguments)
        stored = [c for c in in_order if _has_shadow(c, facts, numbering)]
        arrays = {c: walk.arguments.add(c, f"d_{c.name}", c.dtype) for c in stored}
        matrices = {c: ShadowMatrix.of(facts, array, size_of(c, facts.seeds)) for c, array in arrays.items()}
        coverage = ShadowFacts()
        end = end_of(walk, matrices)
        storages = Storages(walk, end.writer, matrices, end.locals)
        made = {c: end.others.get(c, end.usual) for c in in_order}
        containers = {c: make(walk, c, roles[c], matrices.get(c), storages, coverage) for c, make in made.items()}
        forms = LocalForms(walk, storages)
        linearizer = Linearizer(walk, forms, containers, coverage)
        context = RuleContext(walk, linearizer, forms, LocalTangents(walk, storages, forms, linearizer))
        reversals = Reversals(walk, storages)
        return cls(context, containers, coverage, storages, reversals, LoopInputs(walk, storages, forms), end.writer)

    def seed_arguments(self) -> None:
        """Set the tangents of arguments and Python numbers that are parameters."""
        walk, forms = self.context.walk, self.context.forms
        facts, numbering = walk.facts, walk.numbering
        given = given_tangents(facts, walk.arguments)
        for local, column in facts.seeds.arguments.items():
            first = numbering.first(local)
            first = column if first is None else first
            columns = range(first, first + math.prod(local.shape))
            if given is not None:
                seeds: list[Form] = list(map(given.row, columns))
            else:
                seeds = [{Seed(Affine((), n)): 1} if numbering.is_computed(n, walk.blocks) else {} for n in columns]
            forms.keep(local, seeds)
        for local in facts.own_seeds:
            if local.kind == "parameter" and not local.shape and local not in facts.seeds.arguments:
                forms.keep(local, [{}])

    def body(
        self,
        body: ir.Body,
        variables: tuple[ir.Local, ...] = (),
        begin: Callable[[], object] = tuple,
        finish: Callable[[], object] = tuple,
    ) -> ir.Body:
        """A block with tangents and these variables; ``begin`` and ``finish`` emit statements at its start and end."""
        context, walk = self.context, self.context.walk
        facts = walk.facts
        with walk.cursor.in_block(variables), walk.builder.collecting() as collected:
            begin()
            for s, group in self._statements(body):
                match s:
                    case ir.Declare():
                        context.locals.declare(s)
                    case ir.Assign(target=ir.Read()) | ir.Update(target=ir.Read()):
                        context.locals.assign(s)
                    case ir.Assign() | ir.Update() if s.target.memory in facts.activity.containers:
                        self._store(facts.stores.of[s], group)
                    case ir.Atomic() if facts.is_active(s.target):
                        self._atomic(s)
                    case ir.Atomic() if self._is_serial_product(s):
                        self._product(s)
                    case ir.If():
                        walk.builder.emit(replace(s, then=self.body(s.then), orelse=self.body(s.orelse)))
                    case ir.For() if walk.plan.is_reversed(s):
                        self.reversals.loop(s, self.body)
                    case ir.For() | ir.While():
                        self._loop(s)
                    case ir.Return():
                        self._return(s)
                    case ir.Boundary():
                        boundary(context, s)
                    case ir.Call():
                        self._call(s)
                    case ir.Effect():
                        self._effect(s)
                    case _:
                        for one in group:
                            walk.builder.emit(one)
            finish()
        return tuple(collected)

    def _statements(self, body: ir.Body) -> Iterator[tuple[ir.Statement, tuple[ir.Statement, ...]]]:
        """Move to each statement in turn; with the others that store to the same entry."""
        for group in grouped(body):
            self.writer.begin_statement()
            self.context.walk.builder.place = group[0].place
            self.context.linearizer.begin_statement()
            yield group[0], group

    def _store(self, site: StoreSite, group: tuple[ir.Statement, ...]) -> None:
        """Assignments to components of one entry, or updates of it, evaluated before anything is stored."""
        walk, tangents, s = self.context.walk, self.containers[site.container], group[0]
        builder, linearizer = walk.builder, self.context.linearizer
        if isinstance(s, ir.Update) and s.op not in ("add", "sub"):
            self._updated(site, group)
            return
        targets = [one.target for one in group]  # type: ignore[attr-defined]
        raw = [s.value for s in group]  # type: ignore[attr-defined]
        forms = linearizer.stored(raw)
        forms = [materialize(builder, columns_only(f, walk.numbering.is_column)) for f in forms]
        forms = [self.reversals.swept(f, tangents) for f in forms]
        values = [walk.expressions.primal(v) for v in raw]
        values = [builder.keep(v) for v in values] if len(values) > 1 else values
        for one, target, value in zip(group, targets, values, strict=True):
            is_sum = isinstance(one, ir.Update)
            made = ir.Update(target, one.op, value) if is_sum else ir.Assign(target, value)
            builder.emit(replace(made, place=one.place))
        with only_inside(walk, targets[0]) as is_possible:
            if is_possible and isinstance(s, ir.Update):
                tangents.add(site, targets, forms, 1 if s.op == "add" else -1)
            elif is_possible:
                tangents.store(site, targets, forms)

    def _updated(self, site: StoreSite, group: tuple[ir.Statement, ...]) -> None:
        """``entry *= value`` and the like, as assignments that read the entry."""
        self.coverage.read.add(site.container)
        for u in group:
            assert isinstance(u, ir.Update)
            assert isinstance(u.target, ir.Load)
            value = ir.Op(u.op, (u.target, u.value), u.target.dtype, place=u.value.place)
            component = self.containers[site.container].component(u.target)
            self._store(replace(site, component=component), (ir.Assign(u.target, value, place=u.place),))

    def _atomic(self, s: ir.Atomic) -> None:
        """An atomic operation that selects, or whose result is used: value and tangent change one after the other."""
        context, walk = self.context, self.context.walk
        name = s.function.removeprefix("atomic_")
        target = s.target
        if name in ("add", "sub") and s.result is None:
            update = ir.Update(target, name, s.value, place=s.place)
            if isinstance(target, ir.Load):
                self._store(walk.facts.stores.of[s], (update,))
            else:
                context.locals.assign(update)
            return
        if isinstance(target, ir.Load):
            self.coverage.read.add(target.container)
            if not walk.facts.stores.is_private(walk.facts.stores.of[s]):
                walk.plan.keep_order(walk.cursor.parallel_loop, ATOMIC)
        elif walk.cursor.parallel_loop is not None and self.storages.by_local[target.local].declared.block.is_kernel:
            walk.plan.keep_order(walk.cursor.parallel_loop, ATOMIC)
        old = self._old(s)
        context.locals.declare_kept(ir.Declare(old, (target,), place=s.place), target)
        was: ir.Value = ir.Read(old)
        given = cast(s.value, target.dtype)  # as Taichi does before it combines
        # the right-hand operand wins a tie: here the old value
        value = ir.Op(name, (was, given) if name in ("add", "sub", "mul") else (given, was), target.dtype)
        context.linearizer.begin_statement()
        if isinstance(target, ir.Load):
            self._store(walk.facts.stores.of[s], (ir.Assign(target, value, place=s.place),))
        else:
            context.locals.assign(ir.Assign(target, value, place=s.place))

    def _old(self, s: ir.Atomic) -> ir.Local:
        """The old value at the place of an atomic operation."""
        old = self.context.walk.facts.olds[s]
        self.context.walk.builder.frozen.add(old)
        return old

    def _is_serial_product(self, s: ir.Atomic) -> bool:
        """Whether this is a product in memory where one thread runs: Taichi 1.7.4 aborts on ``ti.atomic_mul`` there."""
        loop = self.context.walk.cursor.parallel_loop
        is_serial = loop is None or loop.statement in self.context.walk.plan.serial
        return s.function == "atomic_mul" and isinstance(s.target, ir.Load) and is_serial

    def _product(self, s: ir.Atomic) -> None:
        """A product without tangents, in two steps."""
        old, builder = self._old(s), self.context.walk.builder
        builder.emit(ir.Declare(old, (s.target,), place=s.place))
        builder.assign(s.target, ir.Op("mul", (ir.Read(old), cast(s.value, s.target.dtype)), s.target.dtype))

    def _return(self, s: ir.Return) -> None:
        context, walk, values = self.context, self.context.walk, [e for group in s.values for e in ir.entries(group)]
        if walk.facts.seeds.wants_return:
            forms = (columns_only(context.linearizer.form(value), walk.numbering.is_column) for value in values)
            self.writer.returned((materialize(walk.builder, form) for form in forms), len(values), values[0].dtype)
        walk.builder.emit(ir.with_values(s, context.primal))

    def _call(self, s: ir.Call) -> None:
        """A function of Taichi's library: equations give the tangents of its results, see ``with_equations``."""
        walk = self.context.walk
        if any(map(walk.facts.is_active, ir.values_of(s))):
            raise_unknown(s.function, s.place)
        walk.builder.emit(ir.with_values(s, self.context.primal))

    def _effect(self, s: ir.Effect) -> None:
        """Emit a call unchanged."""
        walk, seeds = self.context.walk, self.context.walk.facts.seeds
        name = s.function if isinstance(s.function, str) else getattr(s.function, "__name__", "")
        if name == "stop_grad":
            walk.cursor.block.stopped.update(s.args)
            if seeds.use.is_again:
                walk.builder.emit(s)
            return
        if name not in KEPT and any(map(walk.facts.is_active, ir.values_of(s))):
            raise_unknown(name or repr(s.function), s.place)
        walk.builder.emit(s)

    def _loop(self, s: ir.For | ir.While) -> None:
        """Emit a loop that is accumulated forward."""
        walk, facts = self.context.walk, self.context.walk.facts
        self.writer.before(s)
        inside = self.inputs.begin(s)
        if inside is None and isinstance(s, ir.For):
            self.reversals.forward.append(s)
        variables = tuple(v for v in s.variables if v not in facts.changed) if isinstance(s, ir.For) else ()
        walk.builder.frozen.update(variables)
        with walk.cursor.in_loop(facts.loops[s]):
            body = self.body(s.body, variables)
        if not walk.cursor.loops:
            self.coverage.end_loop()
        new = replace(s, body=body)
        if isinstance(new, ir.For) and s in walk.plan.serial:
            over = new.domain[0] if new.domain else None
            extent = facts.seeds.extents.get(over) if isinstance(over, ir.Container) else None
            new = serialized(new, extent, is_host=facts.seeds.device.is_host)
        walk.builder.emit(new)
        self.inputs.end(inside)
        self.writer.after(s)


def _has_shadow(container: ir.Container, facts: Facts, numbering: RowNumbering) -> bool:
    """Whether tangents of a container are in memory: a parameter that is only read has columns instead."""
    if container in facts.seeds.use.intermediates or numbering.has_entries(container):
        return False
    role = facts.seeds.roles.get(container, Role())
    return role.first_column is None or container in facts.stores.sites


def serialized(loop: For, extent: Extent | None, *, is_host: bool) -> For:
    """The loop as one that runs in one thread; ``extent`` is that of the field that it runs over.

    On a GPU, Taichi ignores serialize=True for loops over fields: there they become loops over a range.
    """
    if loop.kind not in ("field", "grouped"):
        return replace(loop, config={**loop.config, "serialize": True})
    if is_host:  # Taichi does not heed serialize=True in loops over fields
        return replace(loop, config={**loop.config, "parallelize": 1})
    if loop.kind == "grouped" or extent is None or not extent.is_full:
        raise UnsupportedError(
            f"{cited(loop.place)}"
            "The order of the iterations matters to the derivative here, and Taichi runs this loop over a field in "
            "parallel on a GPU. Write it as a loop over a range: for i, j in ti.ndrange(n, m)."
        )
    return _over_range(loop, extent)


def _over_range(loop: For, extent: Extent) -> For:
    """A loop over a dense field as a loop over the number of the entry."""
    number = Local("number", I32, (), "loop")
    indices = zip(loop.variables, indices_of(Read(number), extent.shape), extent.bounds, strict=True)
    before = (Declare(v, (cast(add(i, first), I32),), place=loop.place) for v, i, (first, _) in indices)
    total = literal(math.prod(extent.shape), I32)
    config = {**loop.config, "serialize": True}
    return replace(loop, kind="range", variables=(number,), domain=(total,), body=(*before, *loop.body), config=config)


# The ends of tangents: rows of a dense Jacobian, entries of a sparse one, terms of the gradient of an energy.


@dataclass(frozen=True)
class End:
    """Where one walk writes tangents: what makes those of containers, and of the locals that have no storage."""

    writer: RowWriter
    usual: Callable[..., ContainerTangents] = ContainerTangents
    others: Mapping[ir.Container | None, Callable[..., ContainerTangents]] = field(default_factory=dict)
    locals: Mapping[ir.Local, Callable[..., LocalStorage]] = field(default_factory=dict)


def end_of(walk: PassState, matrices: Mapping[ir.Container, ShadowMatrix]) -> End:
    """The end that a request asks for."""
    use = walk.facts.seeds.use
    match walk.numbering, use.sums:
        case Numbering() as numbering, _:
            writer = EntryWriter(walk, numbering, Counts(walk))
            sums = {local: partial(LocalSum, walk, writer, n) for local, n in walk.plan.columns.sums.items()}
            return End(writer, partial(SparseTangents, writer=writer), locals=sums)
        case _, EnergySums() as energy:
            terms, others = GradientTerms.of(walk, energy, matrices), dict[ir.Container | None, Any]()
            if use.intermediates:
                adjoints = GradientTerms.in_array(walk, energy, TERMS, "d_terms")
                others |= dict.fromkeys(use.intermediates, partial(IntermediateTangents, gradient=adjoints))
            if isinstance(terms, GradientTerms):
                others[energy.container] = partial(EnergyTangents, gradient=terms)
                parts = dict.fromkeys(energy.weights, partial(EnergyPart, terms))
                return End(GradientWriter(walk, terms), others=others, locals=parts)
            return End(RowWriter(walk), others=others)
    return End(RowWriter(walk))
