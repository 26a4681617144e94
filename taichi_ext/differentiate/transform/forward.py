"""Forward differentiation: from a program to a program that also computes its tangents.

The first pass makes the ``StoragePlan``, the storage of each local's tangent. A walk over the statements records
requirements in the ``Draft``, such as a row for a local. Earlier statements of the walk did not know requirements found
later, so the walk is repeated until one requires nothing new. The draft only grows (a choice that was given up is never
tried again), so this terminates. The statements emitted by these walks are discarded; the result is the frozen draft.
The second pass emits the new statements.
"""

from __future__ import annotations

from dataclasses import replace

from taichi_ext.analysis.activity import find_activity, useful_activity
from taichi_ext.analysis.bounds import Access, with_checks
from taichi_ext.differentiate.edges.edges import check_positions, own_seeds
from taichi_ext.differentiate.facts.branches import with_branches
from taichi_ext.differentiate.facts.decisions import Differentiated, Role, Seeds, size_of
from taichi_ext.differentiate.facts.facts import Facts
from taichi_ext.differentiate.facts.named_indices import with_named_indices
from taichi_ext.differentiate.facts.pixel_indices import with_real_positions
from taichi_ext.differentiate.forms.column_blocks import Blocks
from taichi_ext.differentiate.forms.sparse_columns import DenseRowsError
from taichi_ext.differentiate.plan.report import Report, costs, found_edges, loop_choices
from taichi_ext.differentiate.plan.storage_plan import Draft, DraftState, StoragePlan, UnplannedError
from taichi_ext.differentiate.transform import special
from taichi_ext.differentiate.transform.traversal import Traversal
from taichi_ext.errors import InternalError, UnsupportedError
from taichi_ext.program import Body, Container, Program, cited, statements

MOST_WALKS = 100  # of the first pass


def differentiate(program: Program, seeds: Seeds) -> Differentiated:
    """The program that computes the same as ``program``, and its tangents."""
    facts, accesses = find_facts(program, seeds)
    blocks = Blocks(seeds.columns, seeds.first_column)
    plan, facts = plan_storage(facts, blocks)
    found = emit_tangents(facts, plan, blocks)
    return replace(found, report=replace(found.report, accesses=accesses))


def find_facts(program: Program, seeds: Seeds) -> tuple[Facts, tuple[Access, ...]]:
    """The facts of the prepared program, and its accesses that may be out of range.

    Raises:
        UnsupportedError: a derivative is not known.
    """
    program = with_real_positions(program)
    own = own_seeds(statements(program.body), takes_derivative=seeds.takes_derivative)
    if own:
        check_positions(program.body, takes_derivative=seeds.takes_derivative)
    program = with_branches(program, find_activity(program, seeds.start, seeds.arguments, own))
    activity = find_activity(program, seeds.start, seeds.arguments, own)
    ignored = seeds.ignored
    activity = replace(activity, containers=activity.containers - ignored, locals=activity.locals - ignored)
    special.check_bits(program.body, activity)
    activity = useful_activity(program, activity)
    accesses: tuple[Access, ...] = ()
    if activity.containers or activity.locals:
        program, accesses = with_checks(program, seeds.extents, activity)
    if seeds.sparse is not None:
        program = with_named_indices(program, activity)
    return Facts.of(program, seeds, activity, own), accesses


def emit_tangents(facts: Facts, plan: StoragePlan, blocks: Blocks) -> Differentiated:
    """The program with tangents, stored as the plan says.

    Raises:
        UnsupportedError: a derivative is not known.
        InternalError: the plan lacks something.
    """
    traversal = Traversal.of(facts, plan, blocks)
    try:
        body = traversal.transform.body(facts.program.body, begin=traversal.seed_arguments)
        traversal.storages.check_sums()
    except UnplannedError as error:
        raise InternalError(_report(facts, traversal, error)) from error
    for message in traversal.walk.problems:
        raise UnsupportedError(message)
    return _result(traversal, plan, body)


def _report(facts: Facts, traversal: Traversal, error: UnplannedError) -> str:
    """The message about a plan that lacks something."""
    return (
        f"{cited(traversal.walk.builder.place)}"
        f"This is an internal error of taichi_ext, not a fault of your kernel: while {facts.program.name} was "
        f"differentiated, its tangents needed storage that was not planned ({error}). Please report it with this "
        'message, the kernel and the call; tangents="dense" may avoid it until it is fixed.'
    )


def _result(traversal: Traversal, plan: StoragePlan, body: Body) -> Differentiated:
    """The result of the pass."""
    walk, writer, coverage = traversal.walk, traversal.writer, traversal.coverage
    program, arguments = walk.facts.program, walk.arguments
    if writer is not None:
        writer.check()
    shadows = {c for _, c in arguments.given}
    return Differentiated(
        replace(program, name=f"{program.name}_jacobian", body=body),
        shadows=tuple(arguments.given),
        covered=frozenset(coverage.covered),
        scratch_sizes=dict(arguments.scratch_sizes),
        active=walk.facts.activity,
        walks=plan.walks + 1,
        relied=frozenset(coverage.assumed_zero),
        report=Report(
            plan.locals,
            loop_choices(program.body, plan.serial, plan.loop_notes()),
            tuple(plan.columns.in_rows.items()),
            costs(body, shadows),
            edges=found_edges(program.body),
        ),
        sparse=None if writer is None else writer.result(),
        first_columns=walk.blocks.first_columns,
        first_column=arguments.first_column,
    )


def plan_storage(facts: Facts, blocks: Blocks) -> tuple[StoragePlan, Facts]:
    """The storage of a program's tangents, and the facts with the loops that have to run serially.

    Raises:
        UnsupportedError: a derivative is not known.
    """
    draft = _first_draft(facts)
    for walks in range(1, MOST_WALKS + 1):
        if draft.serial.keys() != facts.serial:
            facts = facts.with_serial(draft.serial.keys())
        traversal = Traversal.of(facts, draft, blocks, discards=True)
        draft.begin_walk()
        before = draft.state()
        try:
            traversal.transform.body(facts.program.body, begin=traversal.seed_arguments)
            traversal.storages.check_sums()
        except DenseRowsError:
            if draft.state() == before:  # otherwise the next walk may not need these rows
                raise
        if _is_complete(draft, before, traversal):
            return draft.frozen(traversal.storages.choices(), walks), facts
        limits = facts.seeds.limits.within(traversal.walk.builder.emitted, facts.columns)
        if limits != facts.seeds.limits:
            facts = replace(facts, seeds=replace(facts.seeds, limits=limits))
            draft = _first_draft(facts)
    name = facts.program.name
    raise UnsupportedError(f"The analysis of {name} did not end after {MOST_WALKS} rounds. Split it into two kernels.")


def _is_complete(draft: Draft, before: DraftState, traversal: Traversal) -> bool:
    """Whether the draft had all entries that a walk requires; otherwise it is made ready for the next walk."""
    after = draft.state()
    if after.columns != before.columns:
        draft.forget_columns()
    if after != before:
        return False
    if traversal.writer is not None:
        traversal.writer.counts.forget_unused(traversal.writer.sites)
        if draft.state() != before:
            return False
    # optimisations are decided last
    rows = traversal.walk.proposals.decisions(draft.rows, traversal.storages.rows(), traversal.coverage.read)
    has_news = any(draft.rows.get(local) != decision for local, decision in rows.items())
    for local, decision in rows.items():
        draft.rows.require(local, decision)
    return not has_news and not traversal.reversals.choose()


def _first_draft(facts: Facts) -> Draft:
    """The draft before the first walk; for a sparse Jacobian, with the columns known from earlier launches."""
    draft, seeds = Draft.empty(), facts.seeds
    if seeds.sparse is None:
        return draft
    for key in (key for key in seeds.sparse.columns.sizes if key in seeds.sparse.columns.in_rows):
        draft.columns.in_rows.require(key, "an earlier launch")
    for key, size in seeds.sparse.columns.intermediates.items():
        draft.columns.intermediates.require(key, size)
    for container in facts.stores.sites:  # in the order of the program: columns are numbered by it
        if container in facts.activity.containers:
            _compose(container, seeds, draft)
    return draft


def _compose(container: Container, seeds: Seeds, draft: Draft) -> None:
    """Make the entries of a written container with tangents columns, unless rows can hold its tangents."""
    assert seeds.sparse is not None
    key = seeds.sparse.keys[container]
    is_parameter = seeds.roles.get(container, Role()).first_column is not None
    if is_parameter or not (key in seeds.sparse.outputs or draft.columns.in_rows):
        draft.columns.intermediates.require(key, size_of(container, seeds))
