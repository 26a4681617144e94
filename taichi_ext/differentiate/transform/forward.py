"""Forward differentiation: from a program to a program that also computes its tangents.

The first pass makes the ``StoragePlan``, the storage of each local's tangent. A walk over the statements records
requirements in the ``Draft``, such as a row for a local. Earlier statements of the walk did not know requirements found
later, so the walk is repeated until one requires nothing new. The draft only grows (a choice that was given up is never
tried again), so this terminates. The statements emitted by these walks are discarded; the result is the frozen draft.
The second pass emits the new statements.
"""

from __future__ import annotations

from dataclasses import replace

import taichi_ext.program as ir
from taichi_ext.analysis.activity import Activity, find_activity, useful_activity
from taichi_ext.analysis.affine import Indices
from taichi_ext.analysis.bounds import Access, with_checks
from taichi_ext.analysis.changes import written
from taichi_ext.analysis.same_values import is_equal
from taichi_ext.analysis.stores import grouped
from taichi_ext.differentiate.edges.edges import check_positions, own_seeds
from taichi_ext.differentiate.facts.decisions import Differentiated, Role, Seeds, size_of
from taichi_ext.differentiate.facts.facts import Facts
from taichi_ext.differentiate.facts.pixel_indices import with_real_positions
from taichi_ext.differentiate.forms.column_blocks import Blocks
from taichi_ext.differentiate.forms.sparse_columns import DenseRowsError
from taichi_ext.differentiate.plan.report import Report, costs, found_edges, loop_choices
from taichi_ext.differentiate.plan.storage_plan import Draft, DraftState, StoragePlan, UnplannedError
from taichi_ext.differentiate.transform import special
from taichi_ext.differentiate.transform.traversal import Traversal
from taichi_ext.errors import InternalError, UnsupportedError
from taichi_ext.program import Body, Container, Program, cited, statements
from taichi_ext.program.build import literal


def with_named_indices(program: ir.Program, activity: Activity) -> ir.Program:
    """The program with a local for each such index of an entry that carries a tangent."""
    return replace(program, body=_Names(program, activity).block(program.body))


class _Names:
    def __init__(self, program: ir.Program, activity: Activity) -> None:
        self.activity = activity
        self.indices = Indices(program.body)
        self.changing = written(program.body)
        self.known: list[tuple[ir.Value, ir.Local]] = []  # indices that have a name here
        self.added: list[ir.Statement] = []

    def block(self, body: ir.Body) -> ir.Body:
        """The block with its names."""
        outer, result = len(self.known), []
        for group in grouped(body):
            before, self.added = len(self.known), []
            new = [self._named(s) for s in group]
            result.extend(self.added)
            self.known[before:] = [k for k in self.known[before:] if self._is_lasting(k[0])]
            result += [ir.with_blocks(s, self.block) for s in new]
        del self.known[outer:]
        return tuple(result)

    def _is_lasting(self, value: ir.Value) -> bool:
        """Whether nothing in the kernel changes the values that an index is computed from."""
        return value.contents.is_same(self.changing, self.changing)

    def _named(self, s: ir.Statement) -> ir.Statement:
        if not isinstance(s, ir.WITH_TANGENTS):
            return s
        done: dict[ir.Value, ir.Value] = {}

        def change(value: ir.Value) -> ir.Value:
            if value not in done:
                new = (
                    ir.with_children(value, change)
                    if isinstance(value, (ir.Op, ir.Load)) and self.activity.has(value)
                    else value
                )
                done[value] = self._entry(new) if isinstance(new, ir.Load) and self.activity.has(new) else new
            return done[value]

        new = ir.with_values(s, change)
        target = new.target if isinstance(new, ir.Store) else None
        if isinstance(target, ir.Load) and target.container in self.activity.containers:
            return replace(new, target=self._entry(target))
        return new

    def _entry(self, load: ir.Load) -> ir.Load:
        indices, component = tuple(map(self._name, load.indices)), tuple(map(self._name, load.component))
        return replace(load, indices=indices, component=component)

    def _name(self, index: int | ir.Value) -> int | ir.Value:
        if isinstance(index, int) or self.indices.form(index) is not None:
            return index
        local = next((name for value, name in self.known if is_equal(value, index)), None)
        if local is None:
            local = ir.Local("index", index.dtype, (), "temporary")
            self.known.append((index, local))
            self.indices.name(local)
            self.added.append(ir.Declare(local, (index,), place=index.place))
        return ir.Read(local)


def with_branches(program: ir.Program, activity: Activity) -> ir.Program:
    """The program with an ``if`` statement for each conditional expression that carries a tangent."""
    return replace(program, body=ir.mapped(program.body, lambda s: _split(s, activity)))


def _split(s: ir.Statement, activity: Activity) -> ir.Body:
    if not isinstance(s, ir.WITH_TANGENTS):
        return (s,)
    if not any(_is_branch(node, activity) for value in ir.values_of(s) for node in ir.walk(value)):
        return (s,)
    before: list[ir.Statement] = []
    known: dict[ir.Value, ir.Value] = {}

    def change(value: ir.Value) -> ir.Value:
        if value not in known:
            if _is_branch(value, activity):
                assert isinstance(value, ir.Op)
                known[value] = _joined(value, s, before, activity)
            else:
                known[value] = ir.with_children(value, change)
        return known[value]

    new = ir.with_values(s, change)
    return (*before, new)


def _joined(value: ir.Op, s: ir.Statement, before: list[ir.Statement], activity: Activity) -> ir.Read:
    """A local that takes the value in an ``if`` statement, which is added to ``before``."""
    condition, then, orelse = value.args
    local = ir.Local("value", value.dtype)
    target = ir.Read(local, place=value.place)
    sides = (_split(ir.Assign(target, side, place=s.place), activity) for side in (then, orelse))
    before.append(ir.Declare(local, (literal(0, value.dtype),), place=s.place))
    before.append(ir.If(condition, *sides, place=s.place))
    return target


def _is_branch(value: ir.Value, activity: Activity) -> bool:
    return isinstance(value, ir.Op) and value.name == "ifte" and activity.has(value)


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
