"""Forward differentiation: from a program to the program that computes its tangents too.

The walk goes over the statements once. What it finds out too late (a local that needs storage, a tangent that is used
twice) is added to the ``Decisions``. The walk is repeated until it adds nothing; decisions only grow, so it ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from taichi_ext.analysis.activity import find_activity
from taichi_ext.analysis.affine import Affine
from taichi_ext.analysis.bounds import Access, with_checks
from taichi_ext.differentiate import special
from taichi_ext.differentiate.arguments import Arguments, ShadowMatrix, given_tangents
from taichi_ext.differentiate.branches import with_branches
from taichi_ext.differentiate.build import Builder
from taichi_ext.differentiate.column_blocks import Blocks
from taichi_ext.differentiate.container_stores import ContainerStores
from taichi_ext.differentiate.coverage import Coverage
from taichi_ext.differentiate.cursor import Cursor
from taichi_ext.differentiate.decisions import Decisions, Differentiated, Role, Seeds
from taichi_ext.differentiate.edges import own_seeds, refuse_lost_positions
from taichi_ext.differentiate.energy_gradient import EnergyGradient
from taichi_ext.differentiate.energy_tangents import EnergyTangents
from taichi_ext.differentiate.expressions import Expressions
from taichi_ext.differentiate.facts import Facts
from taichi_ext.differentiate.forms import Form, Seed
from taichi_ext.differentiate.linearize import Linearizer
from taichi_ext.differentiate.local_forms import LocalForms
from taichi_ext.differentiate.local_tangents import LocalTangents
from taichi_ext.differentiate.named_indices import with_named_indices
from taichi_ext.differentiate.naming import Naming
from taichi_ext.differentiate.pixel_indices import with_real_positions
from taichi_ext.differentiate.report import Report, costs, found_edges, local_choices, loop_choices
from taichi_ext.differentiate.reverse_loops import Reversals
from taichi_ext.differentiate.roles import named_columns, role_of, size_of
from taichi_ext.differentiate.row_sources import RowSources
from taichi_ext.differentiate.rule_context import RuleContext
from taichi_ext.differentiate.shadows import Tangents
from taichi_ext.differentiate.sparse_counts import Counts
from taichi_ext.differentiate.sparse_numbering import Numbering
from taichi_ext.differentiate.sparse_sink import Sink
from taichi_ext.differentiate.sparse_tangents import SparseTangents
from taichi_ext.differentiate.storages import Storages
from taichi_ext.differentiate.transform import Transform
from taichi_ext.differentiate.walk import Walk
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import (
    Body,
    Container,
    Program,
    Read,
    entries,
    statements,
)

MOST_WALKS = 100


def differentiate(program: Program, seeds: Seeds) -> Differentiated:
    """The program that computes what ``program`` does, and its tangents."""
    decisions = Decisions(Blocks(seeds.columns, seeds.first_column))
    program = with_real_positions(program)
    own = own_seeds(statements(program.body), takes_derivative=seeds.takes_derivative)
    if own:
        refuse_lost_positions(program.body, takes_derivative=seeds.takes_derivative)
    program = with_branches(program, find_activity(program, seeds.start, seeds.arguments, own))
    activity = find_activity(program, seeds.start, seeds.arguments, own)
    ignored = seeds.ignored
    activity = replace(activity, containers=activity.containers - ignored, locals=activity.locals - ignored)
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
        result = _walk_over(facts.with_serial(decisions.serial.keys()) if decisions.serial else facts, decisions)
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


def _walk_over(facts: Facts, decisions: Decisions) -> Differentiated | None:
    """Walk over the program once; None where the walk has changed the decisions, so that the text may be wrong.

    Raises:
        UnsupportedError: a derivative is not known.
    """
    numbering: Numbering | None = None
    if facts.seeds.sparse is not None:
        numbering = Numbering(facts.seeds.sparse, decisions.sparse, decisions.forget_columns)
        facts = replace(facts, columns=numbering.columns.width)
    in_order = sorted(facts.activity.containers, key=lambda c: c.name)  # so that texts are the same in each run
    roles = {c: role_of(c, facts.seeds, numbering) for c in in_order}
    walk = _new_walk(facts, decisions, roles, numbering)
    matrices = {c: _new_matrix(walk, c, roles[c]) for c in in_order if _has_shadow(c, decisions, numbering)}
    sources, coverage = RowSources(walk.cursor), Coverage()
    sink = None if numbering is None else Sink(walk, numbering, sources, Counts(walk))
    gradient = None if facts.seeds.sums is None else EnergyGradient.of(walk, facts.seeds.sums, matrices)
    storages = Storages(walk, sources, sink, matrices, gradient)
    containers: dict[Container, Tangents] = {}
    for c in in_order:
        parts = (walk, c, roles[c], matrices.get(c), storages, coverage)
        if gradient is not None and c is gradient.sums.container:
            containers[c] = EnergyTangents(*parts, gradient)
        else:
            containers[c] = Tangents(*parts) if sink is None else SparseTangents(*parts, sink)
        sources.add(c, containers[c])
    forms = LocalForms(walk, storages, sources)
    linearizer = Linearizer(walk, forms, containers, coverage)
    context = RuleContext(walk, linearizer, forms, LocalTangents(walk, storages, forms, linearizer))
    reversals = Reversals(walk, storages)
    stores = ContainerStores(walk, linearizer, containers, coverage, reversals)
    before = decisions.state()
    decisions.rows.begin_walk()
    _seed_arguments(walk, forms, numbering)
    body = Transform(context, stores, storages, reversals, sink).body(facts.program.body)
    body = (*walk.builder.body, *body)
    storages.check_sums()
    if decisions.state() != before:
        return None
    if sink is not None:
        sink.counts.forget_unused(sink.sites)
        if decisions.state() != before:
            return None
    # what is better left out, or better done, is decided last
    if decisions.rows.accept(storages.rows(), coverage.read) or reversals.accept():
        return None
    for message in walk.problems:
        raise UnsupportedError(message)
    return _result(walk, body, coverage, storages, sink)


def _new_walk(facts: Facts, decisions: Decisions, roles: Mapping[Container, Role], numbering: Numbering | None) -> Walk:
    """What the parts share, at the start of the program."""
    builder = Builder()
    for argument in facts.program.arguments:
        if argument.value is not None and not isinstance(argument.value, Container):
            reads = (v for v in entries(argument.value) if isinstance(v, Read))
            builder.frozen.update(v.local for v in reads if not v.index)
    expressions = Expressions(builder, is_again=facts.seeds.is_again)
    parameters = {
        name: place for c, role in roles.items() for name, place in named_columns(c, role, facts.seeds).items()
    }
    held = None if numbering is None else numbering.is_in_rows
    naming = Naming(builder, facts.indices, expressions.keep, parameters, facts.columns, held)
    return Walk(facts, decisions, builder, expressions, Cursor(), naming, Arguments(facts.program))


def _has_shadow(container: Container, decisions: Decisions, numbering: Numbering | None) -> bool:
    is_sunk = numbering is not None and numbering.is_sunk(container)
    return container in decisions.shadowed and not is_sunk


def _new_matrix(walk: Walk, container: Container, role: Role) -> ShadowMatrix:
    """The shadow of a container, as an argument."""
    array = walk.arguments.add(container, f"d_{container.name}", container.dtype)
    return ShadowMatrix(array, size_of(container, walk.facts.seeds), walk.facts.columns, role.by_column)


def _seed_arguments(walk: Walk, forms: LocalForms, numbering: Numbering | None) -> None:
    """The tangents of arguments and Python numbers that are parameters."""
    facts, given = walk.facts, given_tangents(walk.facts, walk.arguments)
    is_computed = walk.decisions.blocks.has if numbering is None else facts.is_column
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


def _result(walk: Walk, body: Body, coverage: Coverage, storages: Storages, sink: Sink | None) -> Differentiated:
    """What a walk that has changed no decision gives."""
    program, arguments, decisions = walk.facts.program, walk.arguments, walk.decisions
    if sink is not None:
        sink.check()
    shadows = {c for _, c in arguments.given}
    return Differentiated(
        replace(program, name=f"{program.name}_jacobian", body=body),
        shadows=tuple(arguments.given),
        covered=frozenset(coverage.covered),
        scratch_sizes=dict(arguments.scratch_sizes),
        active=walk.facts.activity,
        walks=decisions.walks,
        relied=frozenset(coverage.assumed_zero),
        report=Report(
            local_choices(storages.by_local, decisions.rows),
            loop_choices(program.body, decisions.serial, decisions.reversals.chosen),
            costs(body, shadows),
            edges=found_edges(program.body),
        ),
        sparse=None if sink is None else sink.result(),
        first_columns=decisions.blocks.first_columns,
        first_column=arguments.first_column,
    )
