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
from taichi_ext.analysis.loops import Loop
from taichi_ext.analysis.stores import grouped
from taichi_ext.differentiate import special
from taichi_ext.differentiate.arguments import Arguments, GivenTangents
from taichi_ext.differentiate.boundaries import boundary
from taichi_ext.differentiate.branches import with_branches
from taichi_ext.differentiate.build import Builder
from taichi_ext.differentiate.column_blocks import Blocks
from taichi_ext.differentiate.cursor import Block, Cursor
from taichi_ext.differentiate.decisions import Decisions, Differentiated, Role, Seeds
from taichi_ext.differentiate.edges import own_seeds, refuse_stored_positions
from taichi_ext.differentiate.facts import Facts
from taichi_ext.differentiate.forms import Form, OwnSeed, Seed
from taichi_ext.differentiate.linearize import Linearizer
from taichi_ext.differentiate.local_tangents import LocalTangents
from taichi_ext.differentiate.named_indices import with_named_indices
from taichi_ext.differentiate.naming import Naming
from taichi_ext.differentiate.report import Report, costs, local_choices, loop_choices
from taichi_ext.differentiate.reverse_loops import Reversals
from taichi_ext.differentiate.serial_loops import serialized
from taichi_ext.differentiate.shadows import Tangents
from taichi_ext.differentiate.sparse_numbering import Numbering
from taichi_ext.differentiate.sparse_sink import Sink
from taichi_ext.differentiate.sparse_tangents import SparseTangents
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
        self.sparse: Sink | None = None
        self.facts = facts
        self.arguments = Arguments(facts.program)
        if facts.seeds.sparse is not None:
            numbering = Numbering(facts.seeds.sparse, decisions.sparse, decisions.forget_columns)
            self.facts = facts = replace(facts, columns=numbering.columns.width)
            self.sparse = Sink(self, numbering)
        self.roots: dict[OwnSeed, tuple[Value, Block]] = {}  # of sqrt_edge: the level, and the block that knows it
        self.problems: list[str] = []
        self.linearizer = Linearizer(self)
        self.given: GivenTangents | None = None
        self.locals = LocalTangents(self)
        self.reversals = Reversals(self)
        self.read: set[Container] = set()  # containers whose tangents have been read
        self.covering: list[Tangents] = []
        self.covered: set[Container] = set()
        self.relied: set[Container] = set()  # containers whose tangents are taken to be zero at the start
        in_order = sorted(facts.activity.containers, key=lambda c: c.name)  # so that texts are the same in each run
        self.tangents = {c: self._new_tangents(c) for c in in_order}
        parameters = {name: place for t in self.tangents.values() for name, place in t.named_columns().items()}
        held = None if self.sparse is None else self.sparse.numbering.is_in_rows
        self.naming = Naming(self.builder, facts.indices, self.linearizer.keep, parameters, facts.columns, held)

    def _new_tangents(self, container: Container) -> Tangents:
        role = self.seeds.roles.get(container, Role())
        shadow = None
        is_sunk = self.sparse is not None and self.sparse.numbering.is_sunk(container)
        if container in self.decisions.shadowed and not is_sunk:
            shadow = self.arguments.add(container, f"d_{container.name}", container.dtype)
        if self.sparse is not None:
            return SparseTangents(self, container, role, shadow, self.sparse)
        return Tangents(self, container, role, shadow)

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
        self.locals.check_sums()
        return None if self._has_changed(before) else self._result(body)

    def _has_changed(self, before: tuple[Any, ...]) -> bool:
        """Whether the decisions are others now; what is better left out, or better done, is decided last."""
        if self.decisions.state() != before:
            return True
        if self.sparse is not None:
            self.sparse.counts.forget_unused(self.sparse.sites)
            if self.decisions.state() != before:
                return True
        rows = {local: (s.terms, s.version) for local, s in self.locals.storages.items() if s.row is not None}
        return self.decisions.rows.accept(rows, self.read) or self.reversals.accept()

    def _result(self, body: tuple[Statement, ...]) -> Differentiated:
        for message in self.problems:
            raise UnsupportedError(message)
        if self.sparse is not None:
            self.sparse.check()
        shadows = {c for _, c in self.arguments.given}
        return Differentiated(
            replace(self.program, name=f"{self.program.name}_jacobian", body=body),
            shadows=tuple(self.arguments.given),
            covered=frozenset(self.covered),
            scratch_sizes=dict(self.arguments.scratch_sizes),
            active=self.facts.activity,
            walks=self.decisions.walks,
            relied=frozenset(self.relied),
            report=Report(
                local_choices(self.locals.storages, self.decisions.rows),
                loop_choices(self.program.body, self.decisions.serial, self.decisions.reversals.chosen),
                costs(body, shadows),
            ),
            sparse=None if self.sparse is None else self.sparse.result(),
            first_columns=self.decisions.blocks.first_columns,
            first_column=self.arguments.first_column,
        )

    def _seed_arguments(self) -> None:
        """Arguments and Python numbers that are parameters."""
        if self.seeds.values is not None and self.seeds.arguments:
            self.given = GivenTangents(self.facts, self.arguments)
        for local, column in self.seeds.arguments.items():
            first = None if self.sparse is None else self.sparse.numbering.first(local)
            self._seed_argument(local, column if first is None else first)
        for local in self.facts.own_seeds:
            if local.kind == "parameter" and not local.shape:
                self.locals.forms[local] = self.locals.with_own(local, [self.locals.forms.get(local, {})])[0]

    def _seed_argument(self, local: Local, column: int) -> None:
        columns = range(column, column + math.prod(local.shape))
        if self.given is not None:
            seeds: list[Form] = list(map(self.given.form, columns))
        else:
            is_computed = self.decisions.blocks.has if self.sparse is None else self.is_column
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

    @property
    def columns(self) -> int:
        return self.facts.columns

    @property
    def block(self) -> Block:
        return self.cursor.block

    @property
    def loops(self) -> tuple[Loop, ...]:
        return self.cursor.loops

    def is_column(self, number: int) -> bool:
        return self.facts.is_column(number)

    def refuse_once_settled(self, message: str) -> None:
        """Raise at the end of the walk, unless it has found news that may change this."""
        self.problems.append(message)

    def is_active(self, value: Value) -> bool:
        return self.facts.is_active(value)

    def loop_sites(self) -> tuple[Loop, ...]:
        return self.cursor.loops

    def parallel_loop(self) -> Loop | None:
        return self.cursor.parallel_loop

    def primal(self, value: Value) -> Value:
        return self.linearizer.primal(value)

    def form(self, value: Value) -> Form:
        return self.linearizer.form(value)

    def form_of(self, value: Read | Load) -> Form:
        """The tangent of what is read."""
        if isinstance(value, Read):
            return self.locals.form(value)
        if self.block.stops(value.container):
            return {}
        self.read.add(value.container)
        return self.tangents[value.container].form(value)

    def note_covered(self, tangents: Tangents) -> None:
        """The loop that is walked over writes all tangents of a container, which nothing has accessed before."""
        self.covering.append(tangents)

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
                if self.sparse is not None and self.block.is_kernel:
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
            case Call() if any(map(self.is_active, values_of(s))):
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
            self.block.stopped.update(s.args)
            if self.seeds.is_again:
                self.builder.emit(s)
            return
        if name not in KEPT and any(map(self.is_active, values_of(s))):
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
        if not self.loops:
            self._accept_covering()
        new = replace(s, body=body)
        if isinstance(new, For) and s in self.decisions.serial:
            over = new.domain[0] if new.domain else None
            extent = self.seeds.extents.get(over) if isinstance(over, Container) else None
            new = serialized(new, extent, is_host=self.seeds.is_host)
        self.builder.emit(new)
        if self.sparse is not None:
            self.sparse.counts.after(s)

    def _accept_covering(self) -> None:
        """At the end of a parallel loop: what it covers need not be cleared before, unless it reads it as well."""
        self.covered |= {t.container for t in self.covering if t.container not in self.read}
        self.covering.clear()

    # --- containers

    def _is_place_active(self, target: Read | Load) -> bool:
        if isinstance(target, Read):
            return target.local in self.facts.activity.locals
        return target.container in self.tangents

    def _store(self, group: tuple[Statement, ...]) -> None:
        s = group[0]
        assert isinstance(s, (Assign, Update))
        assert isinstance(s.target, Load)
        tangents, site = self.tangents[s.target.container], self.facts.stores.of[s]
        if isinstance(s, Assign):
            tangents.store(site, group)
        elif s.op in ("add", "sub"):
            tangents.add(site, group, 1 if s.op == "add" else -1)
        else:
            self.read.add(s.target.container)
            for u in group:
                assert isinstance(u, Update)
                assert isinstance(u.target, Load)
                value = Op(u.op, (u.target, u.value), u.target.dtype, place=u.value.place)
                made = Assign(u.target, value, place=u.place)
                tangents.store(replace(site, component=tangents.component(u.target)), (made,))
