"""Facts about a program, derived before its tangents are computed."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from taichi_ext.analysis.activity import Activity
from taichi_ext.analysis.affine import Indices
from taichi_ext.analysis.loops import Loop, find_loops
from taichi_ext.analysis.stores import Stores
from taichi_ext.differentiate.facts.decisions import Seeds
from taichi_ext.differentiate.forms.forms import OwnSeed
from taichi_ext.differentiate.forms.sparse_columns import FIRST_SPARSE
from taichi_ext.program import Atomic, Local, Program, Statement, Value, statements
from taichi_ext.simplify.usage import assigned_locals

OwnSeeds = Mapping[Local, Mapping[int, OwnSeed]]


@dataclass(frozen=True)
class Facts:
    """The request of a differentiation, and facts that follow from the text of the program.

    Attributes:
        program: the program to differentiate.
        seeds: the request.
        activity: the values that carry tangents.
        own_seeds: seeds without a column, by local and entry: of positions of pixels and tangents of rules.
        olds: locals for the old values that atomic operations return.
        changed: the locals that are assigned to.
        indices: the normal forms of indices; the names of new locals are added to them.
        loops: the loops.
        stores: the stores to containers.
        columns: the number of columns of a row.
        serial: the parallel loops that run serially.
    """

    program: Program
    seeds: Seeds
    activity: Activity
    own_seeds: OwnSeeds
    olds: Mapping[Statement, Local]
    changed: AbstractSet[Local]
    indices: Indices
    loops: Mapping[Statement, Loop]
    stores: Stores
    columns: int
    serial: frozenset[Statement] = frozenset()

    @classmethod
    def of(cls, program: Program, seeds: Seeds, activity: Activity, own_seeds: OwnSeeds) -> Facts:
        """The facts before any loop is known to need its order."""
        atomics = [s for s in statements(program.body) if isinstance(s, Atomic)]
        olds: dict[Statement, Local] = {}
        for s in atomics:
            olds[s] = s.result or Local("old", s.target.dtype, (), "temporary")
        active = {olds[s] for s in atomics if _carries_tangent(s, activity)}
        activity = replace(activity, locals=activity.locals | active)
        indices, loops = Indices(program.body), find_loops(program.body, seeds.extents)
        stores, changed = Stores(program, indices, loops, seeds.extents), assigned_locals(program.body)
        return cls(program, seeds, activity, own_seeds, olds, changed, indices, loops, stores, seeds.columns)

    def with_serial(self, serial: AbstractSet[Statement]) -> Facts:
        """The same facts, with these loops run serially."""
        loops = find_loops(self.program.body, self.seeds.extents, frozenset(serial))
        stores = Stores(self.program, self.indices, loops, self.seeds.extents)
        return replace(self, serial=frozenset(serial), loops=loops, stores=stores)

    def is_active(self, value: Value) -> bool:
        """Whether a value carries a tangent."""
        return self.activity.has(value)

    def is_column(self, number: int) -> bool:
        """Whether a number is the number of a column."""
        return 0 <= number < self.columns or (self.seeds.sparse is not None and number >= FIRST_SPARSE)


def _carries_tangent(s: Atomic, activity: Activity) -> bool:
    """Whether the old value that an atomic operation returns, or needs, has a tangent."""
    is_active = s.target.memory in (activity.locals | activity.containers)
    return is_active and (s.result is not None or s.function not in ("atomic_add", "atomic_sub"))
