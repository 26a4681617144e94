"""One pass over the statements of a program: its parts, each with the lower ones that it uses, and the emitted body.

All parts share the ``Walk``. Above it are the storages and the tangents of containers, then the tangents of locals,
then the forms of expressions, which read both, then the statements that write locals and containers, and at the top
``Transform``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import taichi_ext.program as ir
from taichi_ext.analysis.affine import Affine
from taichi_ext.analysis.stores import grouped
from taichi_ext.differentiate.edges.boundaries import boundary
from taichi_ext.differentiate.edges.rules import RuleContext
from taichi_ext.differentiate.facts.arguments import Arguments, ShadowMatrix, given_tangents
from taichi_ext.differentiate.facts.decisions import Role, named_columns, role_of, size_of
from taichi_ext.differentiate.facts.facts import Facts
from taichi_ext.differentiate.facts.walk import Walk
from taichi_ext.differentiate.forms.column_blocks import Blocks
from taichi_ext.differentiate.forms.cursor import Cursor, RowSources
from taichi_ext.differentiate.forms.forms import Form, Seed
from taichi_ext.differentiate.plan.naming import Naming
from taichi_ext.differentiate.plan.sparse_numbering import Numbering
from taichi_ext.differentiate.plan.storage_plan import Plan
from taichi_ext.differentiate.sparse.entry_writer import EntryWriter
from taichi_ext.differentiate.sparse.sparse_counts import Counts
from taichi_ext.differentiate.statements.container_stores import ContainerStores
from taichi_ext.differentiate.statements.linearize import Linearizer
from taichi_ext.differentiate.statements.local_tangents import LocalTangents
from taichi_ext.differentiate.statements.loop_inputs import LoopInputs
from taichi_ext.differentiate.statements.reverse_loops import Reversals
from taichi_ext.differentiate.statements.shadows import Coverage, Tangents
from taichi_ext.differentiate.statements.special_tangents import EnergyTangents, IntermediateTangents, SparseTangents
from taichi_ext.differentiate.storage.energy_gradient import EnergyGradient
from taichi_ext.differentiate.storage.local_forms import LocalForms
from taichi_ext.differentiate.storage.storages import Storages
from taichi_ext.differentiate.transform import special
from taichi_ext.differentiate.transform.special import serialized
from taichi_ext.program.build import Builder, Expressions

# Names of calls that are kept unchanged, on values with tangents or without
KEPT = frozenset(("print", "assert", "append", ".append"))


@dataclass(frozen=True)
class Transform:
    """The statements of one walk.

    Attributes:
        context: the walk, forms of values, tangents of locals.
        stores: the stores to containers.
        storages: the storages of locals.
        reversals: the loops whose tangents are accumulated backwards.
        inputs: the inputs of the others.
        writer: the writer of a sparse Jacobian's entries.
    """

    context: RuleContext
    stores: ContainerStores
    storages: Storages
    reversals: Reversals
    inputs: LoopInputs
    writer: EntryWriter | None

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
                        self.stores.store(facts.stores.of[s], group)
                    case ir.Atomic() if facts.is_active(s.target):
                        special.atomic(context, self.stores, self.storages, s)
                    case ir.Atomic() if special.is_serial_product(walk, s):
                        special.product(walk, s)
                    case ir.If():
                        walk.builder.emit(replace(s, then=self.body(s.then), orelse=self.body(s.orelse)))
                    case ir.For() if walk.plan.is_reversed(s):
                        self.reversals.loop(s, self.body)
                    case ir.For() | ir.While():
                        self._loop(s)
                    case ir.Return():
                        special.returned(context, self.writer, self.storages.gradient, s)
                    case ir.Boundary():
                        boundary(context, s)
                    case ir.Call() if any(map(facts.is_active, ir.values_of(s))):
                        special.call(context, s)
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
            if self.writer is not None and self.context.walk.cursor.block.is_kernel:
                self.writer.stage += 1
            self.context.walk.builder.place = group[0].place
            self.context.linearizer.begin_statement()
            yield group[0], group

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
            special.raise_effect(s)
        walk.builder.emit(s)

    def _loop(self, s: ir.For | ir.While) -> None:
        """Emit a loop that is accumulated forward."""
        walk, facts = self.context.walk, self.context.walk.facts
        if self.writer is not None:
            self.writer.counts.before(s)
        inside = self.inputs.begin(s)
        if inside is None and isinstance(s, ir.For):
            self.reversals.forward.append(s)
        variables = tuple(v for v in s.variables if v not in facts.changed) if isinstance(s, ir.For) else ()
        walk.builder.frozen.update(variables)
        with walk.cursor.in_loop(facts.loops[s]):
            body = self.body(s.body, variables)
        if not walk.cursor.loops:
            self.stores.coverage.end_loop()
        new = replace(s, body=body)
        if isinstance(new, ir.For) and s in walk.plan.serial:
            over = new.domain[0] if new.domain else None
            extent = facts.seeds.extents.get(over) if isinstance(over, ir.Container) else None
            new = serialized(new, extent, is_host=facts.seeds.device.is_host)
        walk.builder.emit(new)
        self.inputs.end(inside)
        if self.writer is not None:
            self.writer.counts.after(s)


@dataclass(frozen=True)
class Traversal:
    """The parts of one pass.

    Attributes:
        walk: the state shared by all parts.
        numbering: the columns of a sparse Jacobian.
        writer: the writer of a sparse Jacobian's entries.
        storages: the storages of locals.
        reversals: the loops whose tangents are accumulated backwards.
        coverage: the findings about shadows.
        forms: the tangents of locals.
        transform: the statements.
    """

    walk: Walk
    numbering: Numbering | None
    writer: EntryWriter | None
    storages: Storages
    reversals: Reversals
    coverage: Coverage
    forms: LocalForms
    transform: Transform

    @classmethod
    def of(cls, facts: Facts, plan: Plan, blocks: Blocks, *, discards: bool = False) -> Traversal:
        """The parts, at the start of the program; ``discards``: whether emitted statements are dropped."""
        numbering: Numbering | None = None
        if facts.seeds.sparse is not None:
            numbering = Numbering(facts.seeds.sparse, plan)
            facts = replace(facts, columns=numbering.columns.width)
        in_order = sorted(facts.activity.containers, key=lambda c: c.name)  # so that texts are the same in each run
        roles = {c: role_of(c, facts.seeds, numbering) for c in in_order}
        walk = _new_walk(facts, plan, blocks, roles, numbering, Builder(discards=discards))
        matrices = {c: _new_matrix(walk, c, roles[c]) for c in in_order if _has_shadow(c, facts, numbering)}
        sources, coverage = RowSources(walk.cursor), Coverage()
        writer = None if numbering is None else EntryWriter(walk, numbering, sources, Counts(walk))
        sums = facts.seeds.use.sums
        gradient = None if sums is None else EnergyGradient.of(walk, sums, matrices)
        storages = Storages(walk, sources, writer, matrices, gradient)
        containers: dict[ir.Container, Tangents] = {}
        for c in in_order:
            parts = (walk, c, roles[c], matrices.get(c), storages, coverage)
            if gradient is not None and c is gradient.sums.container:
                containers[c] = EnergyTangents(*parts, gradient=gradient)
            elif gradient is not None and c in facts.seeds.use.intermediates:
                containers[c] = IntermediateTangents(*parts, gradient=gradient)
            else:
                containers[c] = Tangents(*parts) if writer is None else SparseTangents(*parts, writer=writer)
            sources.add(c, containers[c])
        forms = LocalForms(walk, storages, sources)
        linearizer = Linearizer(walk, forms, containers, coverage)
        context = RuleContext(walk, linearizer, forms, LocalTangents(walk, storages, forms, linearizer))
        reversals = Reversals(walk, storages)
        stores = ContainerStores(walk, linearizer, containers, coverage, reversals)
        transform = Transform(context, stores, storages, reversals, LoopInputs(walk, storages, forms), writer)
        return cls(walk, numbering, writer, storages, reversals, coverage, forms, transform)

    def seed_arguments(self) -> None:
        """Set the tangents of arguments and Python numbers that are parameters."""
        facts, forms, numbering = self.walk.facts, self.forms, self.numbering
        given = given_tangents(facts, self.walk.arguments)
        is_computed = self.walk.blocks.has if numbering is None else facts.is_column
        for local, column in facts.seeds.arguments.items():
            first = None if numbering is None else numbering.first(local)
            first = column if first is None else first
            columns = range(first, first + math.prod(local.shape))
            if given is not None:
                seeds: list[Form] = list(map(given.row, columns))
            else:
                seeds = [{Seed(Affine((), n)): 1} if is_computed(n) else {} for n in columns]
            if local.shape:
                forms.set_entries(local, seeds)
            else:
                forms.forms[local] = seeds[0]
        for local in facts.own_seeds:
            if local.kind == "parameter" and not local.shape:
                forms.forms[local] = forms.with_own(local, [forms.forms.get(local, {})])[0]


def _new_walk(
    facts: Facts,
    plan: Plan,
    blocks: Blocks,
    roles: Mapping[ir.Container, Role],
    numbering: Numbering | None,
    builder: Builder,
) -> Walk:
    """The state that the parts share, at the start of the program."""
    for argument in facts.program.arguments:
        if argument.value is not None and not isinstance(argument.value, ir.Container):
            reads = (v for v in ir.entries(argument.value) if isinstance(v, ir.Read))
            builder.frozen.update(v.local for v in reads if not v.index)
    expressions = Expressions(builder, is_again=facts.seeds.use.is_again)
    parameters = {
        name: place for c, role in roles.items() for name, place in named_columns(c, role, facts.seeds).items()
    }
    held = None if numbering is None else numbering.is_in_rows
    naming = Naming(builder, facts.indices, expressions.keep, parameters, facts.columns, held)
    return Walk(facts, plan, blocks, builder, expressions, Cursor(), naming, Arguments(facts.program))


def _has_shadow(container: ir.Container, facts: Facts, numbering: Numbering | None) -> bool:
    """Whether tangents of a container are in memory: a parameter that is only read has columns instead."""
    if container in facts.seeds.use.intermediates or (numbering is not None and numbering.has_entries(container)):
        return False
    role = facts.seeds.roles.get(container, Role())
    return role.first_column is None or container in facts.stores.sites


def _new_matrix(walk: Walk, container: ir.Container, role: Role) -> ShadowMatrix:
    """The shadow of a container, as an argument."""
    array = walk.arguments.add(container, f"d_{container.name}", container.dtype)
    return ShadowMatrix(array, size_of(container, walk.facts.seeds), walk.facts.columns, role.by_column)
