"""What tracing a kernel has found out about it; traced again until nothing changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from taichi_ext.derivative.linear_form import Affine, Form, Seed
from taichi_ext.derivative.storage import StorageFacts
from taichi_ext.differentiate.storage import Limits
from taichi_ext.launches import KernelFacts
from taichi_ext.record.parallel_loops import Pieces
from taichi_ext.record.variables import Variable


@dataclass(frozen=True)
class WriteSite:
    """One store or accumulation into a container: its indices in normal form and the loops around it."""

    indices: tuple[Affine, ...]
    loops: tuple[tuple[Any, bool, tuple[str, ...]], ...]  # (site, is_parallel, index variables)

    def covers(self, variables: Iterable[str]) -> bool:
        """Whether each variable stands alone in one index, so that different iterations touch different entries."""
        bare = {i.terms[0][0] for i in self.indices if len(i.terms) == 1 and abs(i.terms[0][1]) == 1}
        return set(variables) <= bare

    def is_disjoint_from(self, other: WriteSite) -> bool:
        """Whether the two never name the same entry; component -1 is the whole of it."""
        pairs = list(zip(self.indices, other.indices, strict=False))
        if Affine((), -1) in (self.indices[-1], other.indices[-1]):
            pairs.pop()
        return any(a.terms == b.terms and a.constant != b.constant and a.is_constant for a, b in pairs)


@dataclass
class Facts:
    """Grows from one trace to the next."""

    limits: Limits = field(default_factory=Limits)
    changed: bool = False
    storages: dict[Any, StorageFacts] = field(default_factory=dict)
    active: set[Any] = field(default_factory=set)  # declarations that come to carry a tangent
    accumulated: set[Any] = field(default_factory=set)  # locals used more than once, or in an inner block
    activated: set[Any] = field(default_factory=set)  # locals that get their first tangent within an expression
    indexed: set[Any] = field(default_factory=set)  # tensor locals that are indexed at run time
    shadowed: set[Any] = field(default_factory=set)  # containers that need a shadow in this kernel
    read: set[Any] = field(default_factory=set)  # containers that are read
    written: set[Any] = field(default_factory=set)
    covered: set[Any] = field(default_factory=set)  # containers of which all tangents are written, whatever they were
    serialized: set[Any] = field(default_factory=set)  # parallel loops whose iterations must keep their order
    modified: dict[Any, set[Any]] = field(default_factory=dict)  # loop -> rows that it changes
    assigned_integers: set[Any] = field(default_factory=set)  # index variables that change
    spatial: list[Any] = field(
        default_factory=list
    )  # declarations of the positions of pixels, in order of their columns
    interrupted: set[Any] = field(default_factory=set)  # loops with a continue or break: not all of them may be reached
    namesakes: dict[Any, list[Variable]] = field(default_factory=dict)  # of parameters, imported from where they stand
    has_random: bool = False
    changes_in_place: bool = False  # a local is assigned while values that were read from it are still in use
    tangent_locals: set[Any] = field(default_factory=set)  # locals of a user's rule that hold a tangent of it
    aliases: dict[Any, Any] = field(default_factory=dict)  # locals whose row is a row of this container's shadow
    stores: dict[Any, int] = field(default_factory=dict)  # locals with a row, and what is known of its terms
    spread: set[Any] = field(default_factory=set)  # short parallel loops that run on all threads
    pieces: dict[Any, Pieces | None] = field(default_factory=dict)  # parallel loops that run in pieces, or cannot
    single: set[Any] = field(default_factory=set)  # containers of which single tangents are read or written
    other_fields: dict[int, Any] = field(default_factory=dict)  # integer fields that are touched
    used_rules: set[Any] = field(default_factory=set)
    rules: dict[Any, Any] = field(default_factory=dict)  # functions and marks, and the users' rules found for them
    writes: dict[Any, list[WriteSite]] = field(default_factory=dict)  # of the last complete trace
    appended: set[Any] = field(default_factory=set)  # places where a tangent is appended to a field not yet known
    clearing: set[WriteSite] = field(default_factory=set)  # those that only clear the tangents of what is deactivated
    operations: Counter[Any] = field(default_factory=Counter)  # of the last trace: on tangents, by place in the source
    in_rows: set[Any] = field(default_factory=set)  # parameters of a sparse Jacobian whose columns rows hold
    composed: dict[Any, int] = field(default_factory=dict)  # containers whose entries are columns, and their sizes
    versions: dict[Any, int] = field(default_factory=dict)  # how many versions of them are read
    streams: tuple[Any, ...] = ()  # the arrays that a sparse Jacobian is written to

    def paired(self) -> frozenset[Any]:
        """Containers of which two tangents are stored at a time: nothing else in the kernel may access them."""
        found = (p.collected.items() for p in self.pieces.values() if p is not None)
        paired = frozenset(key for items in found for key, collected in items if collected.is_paired)
        return paired - self.single

    def storage(self, key: Any) -> StorageFacts:
        return self.storages.setdefault(key, StorageFacts(self.limits))

    def frozen(self) -> KernelFacts:
        """What a session has to know."""
        sets = (frozenset(keys) for keys in (self.read, self.written, self.covered))
        others = tuple(self.other_fields.values())
        return KernelFacts(*sets, others, self.has_random, tuple(self.rules.items()), namesakes=dict(self.namesakes))

    def note(self, group: set[Any], item: Any) -> None:
        if item not in group:
            group.add(item)
            self.changed = True

    def require_active(self, key: Any) -> None:
        self.note(self.active, key)

    def require_index(self, key: Any) -> None:
        self.note(self.indexed, key)

    def require_storage(self, key: Any, forms: Iterable[Form], is_fixed: Callable[[Seed], bool]) -> None:
        facts = self.storage(key)
        for form in forms:
            self.changed |= facts.add(form, False, is_fixed)

    def require_row(self, key: Any) -> None:
        facts = self.storage(key)
        if not (facts.needed and facts.has_row):
            facts.needed = facts.has_row = True
            self.changed = True

    def note_modified(self, loop: Any, place: Any) -> None:
        self.note(self.modified.setdefault(loop, set()), place)
