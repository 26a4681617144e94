"""The planning pass: it walks over a program until the storage of all tangents is known.

A walk over the statements records requirements in the ``Draft``, such as a row for a local. Earlier statements of the
walk did not know requirements found later, so the walk is repeated until one requires nothing new. The draft only grows
(a choice that was given up is never tried again), so this terminates. The statements emitted by these walks are
discarded; the result is the frozen draft.
"""

from __future__ import annotations

import math
from dataclasses import replace

from taichi_ext.differentiate.facts.decisions import Role, Seeds
from taichi_ext.differentiate.facts.facts import Facts
from taichi_ext.differentiate.forms.column_blocks import Blocks
from taichi_ext.differentiate.forms.sparse_columns import DenseRowsError
from taichi_ext.differentiate.plan.storage_plan import Draft, StoragePlan
from taichi_ext.differentiate.transform.traversal import Traversal
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import Container

MOST_WALKS = 100


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
        if _is_complete(draft, traversal):
            return draft.frozen(traversal.storages.choices(), walks), facts
        limits = facts.seeds.limits.within(traversal.walk.builder.emitted, facts.columns)
        if limits != facts.seeds.limits:
            facts = replace(facts, seeds=replace(facts.seeds, limits=limits))
            draft = _first_draft(facts)
    name = facts.program.name
    raise UnsupportedError(f"The analysis of {name} did not end after {MOST_WALKS} rounds. Split it into two kernels.")


def _is_complete(draft: Draft, traversal: Traversal) -> bool:
    """Walk over the program; whether the draft had all entries that it requires."""
    draft.begin_walk()
    before = draft.state()
    try:
        traversal.body()
        traversal.storages.check_sums()
    except DenseRowsError:
        if draft.state() == before:  # otherwise the next walk may not need these rows
            raise
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
        extent = seeds.extents[container]
        draft.columns.intermediates.require(key, math.prod(extent.shape) * math.prod(container.element_shape))
