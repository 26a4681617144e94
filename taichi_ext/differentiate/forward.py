"""Forward differentiation: from a program to the program that computes its tangents too.

The walk goes over the statements once. What it finds out too late (a local that needs storage, a tangent that is used
twice) is added to the ``Decisions``. The walk is repeated until it adds nothing; decisions only grow, so it ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from taichi_ext.analysis.activity import find_activity
from taichi_ext.analysis.affine import Affine
from taichi_ext.analysis.bounds import Access, with_checks
from taichi_ext.analysis.stores import Site, grouped
from taichi_ext.differentiate import special
from taichi_ext.differentiate.arguments import Arguments, ShadowMatrix, given_tangents
from taichi_ext.differentiate.boundaries import boundary
from taichi_ext.differentiate.branches import with_branches
from taichi_ext.differentiate.build import Builder
from taichi_ext.differentiate.column_blocks import Blocks
from taichi_ext.differentiate.coverage import Coverage
from taichi_ext.differentiate.cursor import Block, Cursor
from taichi_ext.differentiate.decisions import Decisions, Differentiated, Role, Seeds
from taichi_ext.differentiate.edges import own_seeds, refuse_stored_positions
from taichi_ext.differentiate.expressions import Expressions
from taichi_ext.differentiate.facts import Facts
from taichi_ext.differentiate.forms import Form, OwnSeed, Seed, columns_only, settled
from taichi_ext.differentiate.linearize import Linearizer
from taichi_ext.differentiate.local_tangents import LocalTangents
from taichi_ext.differentiate.named_indices import with_named_indices
from taichi_ext.differentiate.naming import Naming
from taichi_ext.differentiate.report import Report, costs, local_choices, loop_choices
from taichi_ext.differentiate.reverse_loops import Reversals
from taichi_ext.differentiate.roles import named_columns, role_of, size_of
from taichi_ext.differentiate.row_sources import RowSources
from taichi_ext.differentiate.serial_loops import serialized
from taichi_ext.differentiate.shadows import Tangents, Written
from taichi_ext.differentiate.sparse_counts import Counts
from taichi_ext.differentiate.sparse_numbering import Numbering
from taichi_ext.differentiate.sparse_sink import Sink
from taichi_ext.differentiate.sparse_tangents import SparseTangents
from taichi_ext.differentiate.storages import Storages
from taichi_ext.differentiate.walk import Walk
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import (
    Assign,
    Atomic,
    Boundary,
    Call,
    Container,
    Declare,
    Effect,
    For,
    If,
    Load,
    Local,
    Op,
    Program,
    Read,
    Return,
    Statement,
    Update,
    Value,
    While,
    entries,
    statements,
    values_of,
)

MOST_WALKS = 100
# Calls that stay, on values with tangents or without; by name
KEPT = frozenset(("print", "assert", "append", ".append"))


def differentiate(program: Program, seeds: Seeds) -> Differentiated:
    """The program that computes what ``program`` does, and its tangents."""
    decisions = Decisions(Blocks(seeds.columns, seeds.first_column))
    own = own_seeds(statements(program.body), takes_derivative=seeds.takes_derivative)
    if own:
        refuse_stored_positions(program.body, takes_derivative=seeds.takes_derivative)
    program = with_branches(program, find_activity(program, seeds.start, seeds.arguments, own))
    activity = find_activity(program, seeds.start, seeds.arguments, own)
    activity = replace(activity, containers=activity.containers - seeds.ignored)
    special.refuse_bits(program.body, activity)
    accesses: tuple[Access, ...] = ()
    if activity.containers or activity.locals:
        program, accesses = with_checks(program, seeds.extents, activity)
    if seeds.sparse is not None:
        decisions.sparse = seeds.sparse.decisions()
        program = with_named_indices(program, activity)
    facts = Facts.of(program, seeds, activity, own)
    written = facts.stores.sites.keys()
    for container in activity.containers:
        role = seeds.roles.get(container, Role())
        if role.first_column is None or container in written:
            decisions.shadowed.add(container)
        if seeds.sparse is not None and container in written:
            _compose(container, seeds, decisions)
    while decisions.walks < MOST_WALKS:
        decisions.walks += 1
        walk = Forward(facts.with_serial(decisions.serial.keys()) if decisions.serial else facts, decisions)
        result = walk.run()
        if result is not None:
            return replace(result, report=replace(result.report, accesses=accesses))
    raise UnsupportedError(f"The analysis of {program.name} did not settle in {MOST_WALKS} walks. Split it in two.")


def _compose(container: Container, seeds: Seeds, decisions: Decisions) -> None:
    """A container that is written and carries tangents: its entries are columns, unless rows can hold what it has."""
    assert seeds.sparse is not None
    key = seeds.sparse.keys[container]
    is_parameter = seeds.roles.get(container, Role()).first_column is not None
    if is_parameter or not (key in seeds.sparse.outputs or decisions.sparse.in_rows):
        extent = seeds.extents[container]
        decisions.sparse.composed[key] = math.prod(extent.shape) * math.prod(container.element_shape)


def _nothing() -> None:
    pass


class Forward:
    """One walk over the statements of a program."""

    def __init__(self, facts: Facts, decisions: Decisions) -> None:
        self.decisions = decisions
        self.builder = Builder()
        self.cursor = Cursor()
        self.arguments = Arguments(facts.program)
        numbering: Numbering | None = None
        if facts.seeds.sparse is not None:
            numbering = Numbering(facts.seeds.sparse, decisions.sparse, decisions.forget_columns)
            facts = replace(facts, columns=numbering.columns.width)
        self.facts = facts
        self.expressions = Expressions(self.builder, is_again=facts.seeds.is_again)
        in_order = sorted(facts.activity.containers, key=lambda c: c.name)  # so that texts are the same in each run
        roles = {c: role_of(c, facts.seeds, numbering) for c in in_order}
        parameters = {name: place for c in in_order for name, place in named_columns(c, roles[c], facts.seeds).items()}
        held = None if numbering is None else numbering.is_in_rows
        self.naming = Naming(self.builder, facts.indices, self.expressions.keep, parameters, facts.columns, held)
        self.walk = Walk(facts, decisions, self.builder, self.cursor, self.naming, self.arguments)
        self.sources = RowSources(self.cursor)
        self.sparse: Sink | None = None
        if numbering is not None:
            self.sparse = Sink(self.walk, numbering, self.sources, Counts(self.walk, self.expressions))
        matrices = {c: self._matrix(c, roles[c]) for c in in_order if self._has_shadow(c)}
        self.storages = Storages(self.walk, self.sources, self.sparse, matrices)
        self.coverage = Coverage()
        self.roots: dict[OwnSeed, tuple[Value, Block]] = {}  # of sqrt_edge: the level, and the block that knows it
        self.problems: list[str] = []
        self.linearizer = Linearizer(self)
        self.given: ShadowMatrix | None = None
        self.locals = LocalTangents(self)
        self.reversals = Reversals(self)
        self.tangents = {c: self._new_tangents(c, roles[c], matrices.get(c)) for c in in_order}
        for container, tangents in self.tangents.items():
            self.sources.add(container, tangents)

    def _has_shadow(self, container: Container) -> bool:
        is_sunk = self.sparse is not None and self.sparse.numbering.is_sunk(container)
        return container in self.decisions.shadowed and not is_sunk

    def _matrix(self, container: Container, role: Role) -> ShadowMatrix:
        array = self.arguments.add(container, f"d_{container.name}", container.dtype)
        return ShadowMatrix(array, size_of(container, self.seeds), self.facts.columns, role.by_column)

    def _new_tangents(self, container: Container, role: Role, matrix: ShadowMatrix | None) -> Tangents:
        parts = (self.walk, container, role, matrix, self.storages, self.coverage)
        return Tangents(*parts) if self.sparse is None else SparseTangents(*parts, self.sparse)

    def run(self) -> Differentiated | None:
        """Walk over the program; None where the walk has changed the decisions, so that the text may be wrong.

        Raises:
            UnsupportedError: a derivative is not known.
        """
        before = self.decisions.state()
        self.decisions.rows.begin_walk()
        for argument in self.program.arguments:
            if argument.value is not None and not isinstance(argument.value, Container):
                reads = (v for v in entries(argument.value) if isinstance(v, Read))
                self.builder.frozen.update(v.local for v in reads if not v.index)
        self._seed_arguments()
        body = (*self.builder.body, *self._body(self.program.body))
        self.storages.check_sums()
        return None if self._has_changed(before) else self._result(body)

    def _has_changed(self, before: tuple[Any, ...]) -> bool:
        """Whether the decisions are others now; what is better left out, or better done, is decided last."""
        if self.decisions.state() != before:
            return True
        if self.sparse is not None:
            self.sparse.counts.forget_unused(self.sparse.sites)
            if self.decisions.state() != before:
                return True
        return self.decisions.rows.accept(self.storages.rows(), self.coverage.read) or self.reversals.accept()

    def _result(self, body: tuple[Statement, ...]) -> Differentiated:
        for message in self.problems:
            raise UnsupportedError(message)
        if self.sparse is not None:
            self.sparse.check()
        shadows = {c for _, c in self.arguments.given}
        return Differentiated(
            replace(self.program, name=f"{self.program.name}_jacobian", body=body),
            shadows=tuple(self.arguments.given),
            covered=frozenset(self.coverage.covered),
            scratch_sizes=dict(self.arguments.scratch_sizes),
            active=self.facts.activity,
            walks=self.decisions.walks,
            relied=frozenset(self.coverage.assumed_zero),
            report=Report(
                local_choices(self.storages.by_local, self.decisions.rows),
                loop_choices(self.program.body, self.decisions.serial, self.decisions.reversals.chosen),
                costs(body, shadows),
            ),
            sparse=None if self.sparse is None else self.sparse.result(),
            first_columns=self.decisions.blocks.first_columns,
            first_column=self.arguments.first_column,
        )

    def _seed_arguments(self) -> None:
        """Arguments and Python numbers that are parameters."""
        self.given = given_tangents(self.facts, self.arguments)
        for local, column in self.seeds.arguments.items():
            first = None if self.sparse is None else self.sparse.numbering.first(local)
            self._seed_argument(local, column if first is None else first)
        for local in self.facts.own_seeds:
            if local.kind == "parameter" and not local.shape:
                self.locals.forms[local] = self.locals.with_own(local, [self.locals.forms.get(local, {})])[0]

    def _seed_argument(self, local: Local, column: int) -> None:
        columns = range(column, column + math.prod(local.shape))
        if self.given is not None:
            seeds: list[Form] = list(map(self.given.row, columns))
        else:
            is_computed = self.decisions.blocks.has if self.sparse is None else self.facts.is_column
            seeds = [{Seed(Affine((), n)): 1} if is_computed(n) else {} for n in columns]
        if local.shape:
            self.locals.set_entries(local, seeds)
        else:
            self.locals.forms[local] = seeds[0]

    # --- what the parts ask for

    @property
    def program(self) -> Program:
        return self.facts.program

    @property
    def seeds(self) -> Seeds:
        return self.facts.seeds

    def refuse_once_settled(self, message: str) -> None:
        """Raise at the end of the walk, unless it has found news that may change this."""
        self.problems.append(message)

    def primal(self, value: Value) -> Value:
        return self.expressions.primal(value)

    def form(self, value: Value) -> Form:
        return self.linearizer.form(value)

    def form_of(self, value: Read | Load) -> Form:
        """The tangent of what is read."""
        if isinstance(value, Read):
            return self.locals.form(value)
        if self.cursor.block.stops(value.container):
            return {}
        self.coverage.read.add(value.container)
        return self.tangents[value.container].form(value)

    # --- blocks

    def _body(self, body: tuple[Statement, ...], variables: tuple[Local, ...] = ()) -> tuple[Statement, ...]:
        return self.block_of(body, variables, _nothing, _nothing)

    def block_of(
        self,
        body: tuple[Statement, ...],
        variables: tuple[Local, ...],
        begin: Callable[[], None],
        finish: Callable[[], None],
    ) -> tuple[Statement, ...]:
        """A block with tangents; ``begin`` and ``finish`` emit what comes before and after its statements."""
        with self.cursor.in_block(variables), self.builder.collecting() as collected:
            begin()
            for group in grouped(body):
                if self.sparse is not None and self.cursor.block.is_kernel:
                    self.sparse.stage += 1
                self.builder.place = group[0].place
                self.linearizer.begin_statement()
                self.statement(group)
            finish()
        return tuple(collected)

    def statement(self, group: tuple[Statement, ...]) -> None:
        s = group[0]
        match s:
            case Declare():
                self.locals.declare(s)
            case Assign(target=Read()) | Update(target=Read()):
                self.locals.assign(s)
            case Assign(target=Load(container=c)) | Update(target=Load(container=c)) if c in self.tangents:
                self._store(group)
            case Atomic(target=target) if self._is_place_active(target):
                special.atomic(self, s)
            case Atomic() if special.is_serial_product(self, s):
                special.product(self, s)
            case If(condition=condition, then=then, orelse=orelse):
                then, orelse = self._body(then), self._body(orelse)
                self.builder.emit(replace(s, condition=condition, then=then, orelse=orelse))
            case For() | While():
                self._loop(s)
            case Return():
                special.returned(self, s)
            case Boundary():
                boundary(self, s)
            case Call() if any(map(self.facts.is_active, values_of(s))):
                special.call(self, s)
            case Effect():
                self._effect(s)
            case _:
                for one in group:
                    self.builder.emit(one)

    def _effect(self, s: Effect) -> None:
        """A call that stays as it is."""
        name = s.function if isinstance(s.function, str) else getattr(s.function, "__name__", "")
        if name == "stop_grad" and not self.seeds.is_reverse:
            self.cursor.block.stopped.update(s.args)
            if self.seeds.is_again:
                self.builder.emit(s)
            return
        if name not in KEPT and any(map(self.facts.is_active, values_of(s))):
            special.refuse_effect(self, s)
        self.builder.emit(s)

    def _loop(self, s: For | While) -> None:
        if isinstance(s, For) and self.reversals.is_reversed(s):
            self.reversals.loop(s)
            return
        if self.sparse is not None:
            self.sparse.counts.before(s)
        loop = self.facts.loops[s]
        variables = s.variables if isinstance(s, For) else ()
        for v in variables:
            if v not in self.facts.changed:
                self.builder.frozen.add(v)
        with self.cursor.in_loop(loop):
            body = self._body(s.body, tuple(v for v in variables if v not in self.facts.changed))
        if not self.cursor.loops:
            self.coverage.end_loop()
        new = replace(s, body=body)
        if isinstance(new, For) and s in self.decisions.serial:
            over = new.domain[0] if new.domain else None
            extent = self.seeds.extents.get(over) if isinstance(over, Container) else None
            new = serialized(new, extent, is_host=self.seeds.is_host)
        self.builder.emit(new)
        if self.sparse is not None:
            self.sparse.counts.after(s)

    # --- containers

    def _is_place_active(self, target: Read | Load) -> bool:
        if isinstance(target, Read):
            return target.local in self.facts.activity.locals
        return target.container in self.tangents

    def _store(self, group: tuple[Statement, ...]) -> None:
        s = group[0]
        assert isinstance(s, (Assign, Update))
        assert isinstance(s.target, Load)
        site = self.facts.stores.of[s]
        if isinstance(s, Assign):
            self.store_to(site, group)
        elif s.op in ("add", "sub"):
            self.add_to(site, group, 1 if s.op == "add" else -1)
        else:
            tangents = self.tangents[site.container]
            self.coverage.read.add(site.container)
            for u in group:
                assert isinstance(u, Update)
                assert isinstance(u.target, Load)
                value = Op(u.op, (u.target, u.value), u.target.dtype, place=u.value.place)
                made = Assign(u.target, value, place=u.place)
                self.store_to(replace(site, component=tangents.component(u.target)), (made,))

    def store_to(self, site: Site, group: tuple[Statement, ...]) -> None:
        """``entry = value`` of a container, of several components at once."""
        tangents = self.tangents[site.container]
        tangents.store(site, group, self._written(group, tangents))

    def add_to(self, site: Site, group: tuple[Statement, ...], sign: int) -> None:
        """``entry += value`` or ``entry -= value``."""
        tangents = self.tangents[site.container]
        tangents.add(site, group, self._written(group, tangents), sign)

    def _written(self, group: tuple[Statement, ...], tangents: Tangents) -> Written:
        """Indices, forms and values, evaluated before anything is stored."""
        targets: list[Load] = []
        naming, is_column = self.naming, self.facts.is_column
        for s in group:
            load = s.target  # type: ignore[attr-defined]
            indices = targets[0].indices if targets else tuple(naming.settled_index(i) for i in load.indices)
            component = tuple(i if isinstance(i, int) else naming.settled_index(i) for i in load.component)
            targets.append(Load(load.container, indices, component, checks=load.checks, place=load.place))
        raw = [s.value for s in group]  # type: ignore[attr-defined]
        forms = [self.form(v) for v in raw]
        forms = [settled(self.builder, columns_only(f, is_column)) for f in forms]
        forms = [self.reversals.swept(f, tangents) for f in forms]
        values = [self.primal(v) for v in raw]
        return Written(targets, forms, [self.builder.keep(v) for v in values] if len(values) > 1 else values)
