"""What becomes of parallel loops on the CPU: pieces that LLVM vectorises, short ones spread over all threads.

A store to an array argument reads the array's address again, and LLVM cannot tell that the stores before it have left
that address alone. So it vectorises no loop that stores to J. A loop over a field whose body is arithmetic therefore
runs in pieces: one piece stores its rows of J to a local array, and copies that to J when it is done. What the body
reads at a fixed place is read before the piece, for the same reason.
"""

from __future__ import annotations

import builtins
import math
from dataclasses import dataclass, field
from typing import Any

from taichi_ext import backend
from taichi_ext.backend import matrix_ops, ops

LENGTHS = (32, 16)  # iterations of a piece: whole vectors, and few enough that its array is cleared quickly
MOST_COLLECTED = 256  # numbers
LEAST_ITERATIONS = 512  # that Taichi gives to a thread
ARRAYS = -1  # in place of the number of a tree
LEAST_WORK = 3  # operations per number that is collected, below which a copy costs more than vectors save

# What a vector does as fast as a scalar, by its cost in additions. What is not here is a call, for each element.
WORK = {
    **dict.fromkeys(("add", "sub", "mul", "neg", "abs", "max", "min", "floor", "ceil"), 1),
    **dict.fromkeys(("truediv", "raw_div", "sqrt", "rsqrt", "mod", "floordiv"), 6),
}

# Calls that are looked into, or are such operations throughout; and all of matrix_ops.
_PYTHON = (builtins.range, builtins.zip, builtins.enumerate, builtins.len, builtins.int, builtins.float, builtins.bool)
_CHOICES = (builtins.max, builtins.min, builtins.abs, ops.max, ops.min, ops.cast, ops.select, ops.ifte)
_MATH = ("clamp", "cross", "distance", "dot", "fract", "length", "mix", "mod", "normalize", "reflect", "sign")
_FUNCTIONS = (*_PYTHON, *_CHOICES, *(getattr(backend.ti.math, name) for name in (*_MATH, "smoothstep", "step")))


def is_arithmetic(function: Any) -> bool:
    """Whether a call is one that LLVM can vectorise: arithmetic, without effects."""
    is_listed = any(function is known for known in _FUNCTIONS)
    return is_listed or backend.module_of(function) in (matrix_ops.__name__, "_operator")


@dataclass(frozen=True)
class FixedLoad:
    """An entry of a field that is read at the same place in all iterations."""

    key: Any  # of the container
    target: Any = field(compare=False)  # the field; an array is another object in each trace
    indices: tuple[int, ...] = ()
    component: int | None = None


@dataclass(frozen=True)
class Collected:
    """What one iteration stores to an entry of a field and to J.

    ``is_paired`` tells whether its numbers of J can be stored in pairs, as far as this loop goes.
    """

    key: Any  # of the container
    target: Any  # the field
    components: int  # of the entry
    numbers: int  # of J
    is_paired: bool


@dataclass
class Survey:
    """What a trace finds out about the body of one parallel loop."""

    domain: tuple[int, ...]
    is_arithmetic: bool = True
    work: int = 0
    loads: dict[FixedLoad, None] = field(default_factory=dict)
    trees: set[int] = field(default_factory=set)  # of the fields that are read or stored to
    collected: dict[Any, Collected] = field(default_factory=dict)  # by container
    stores_others: bool = False  # to fields that have no tangent
    has_loops: bool = False
    has_effects: bool = False  # that another order of the iterations may change
    read: set[Any] = field(default_factory=set)
    written: set[Any] = field(default_factory=set)

    def note(self, name: str, count: int = 1) -> None:
        """Take down so many operations of the rule table."""
        self.is_arithmetic &= name in WORK
        self.work += WORK.get(name, 0) * count

    def refuse(self) -> None:
        """The loop cannot be vectorised."""
        self.is_arithmetic = False

    def is_spread(self) -> bool:
        """Whether a loop of too few iterations for all threads is to be spread over them."""
        count, least = math.prod(self.domain), LEAST_ITERATIONS * backend.thread_count()
        is_free = not self.has_effects and not self.read & self.written
        return is_free and self.has_loops and 1 < count < least and count * least < 2**31

    def collect(self, container: Any, target: Any, numbers: int) -> None:
        """Take down that an iteration stores all tangents of an entry, so many numbers, one after the other."""
        if container.key in self.collected:
            self.refuse()
        is_paired = container.dtype == backend.ti.f32 and numbers * self.domain[-1] % 2 == 0
        self.collected[container.key] = Collected(container.key, target, container.components, numbers, is_paired)

    def note_access(self, target: Any) -> None:
        """Take down that a field or array is read or stored to."""
        self.trees.add(_tree(target))

    def pieces(self) -> Pieces | None:
        """How to run the loop in pieces, None where that is not possible or does not pay."""
        loads = tuple(load for load in self.loads if load.key not in self.written)
        # the address of a tree is found before the piece if something is read from it there; others, and those of
        # arrays, are found again after each store to memory
        keeps_values = not self.trees <= {_tree(load.target) for load in loads} - {ARRAYS}
        numbers = sum(c.numbers for c in self.collected.values())
        size = numbers + keeps_values * sum(c.components for c in self.collected.values())
        is_possible = self.is_arithmetic and numbers and not self.read & self.collected.keys()
        is_possible = is_possible and not backend.stores_by_column()
        if not is_possible or (keeps_values and self.stores_others) or self.work < LEAST_WORK * numbers:
            return None
        least = LEAST_ITERATIONS * backend.thread_count()
        for length in LENGTHS:
            if size * length <= MOST_COLLECTED and count_pieces(self.domain, length) >= least:
                return Pieces(length, loads, dict(self.collected), keeps_values)
        return None


@dataclass(frozen=True)
class Pieces:
    """The pieces of a loop: their length, what is read before them, and what they collect."""

    length: int
    loads: tuple[FixedLoad, ...]
    collected: dict[Any, Collected]
    keeps_values: bool  # what is stored to fields is collected too


def count_pieces(domain: tuple[int, ...], length: int) -> int:
    """How many pieces a loop over a domain has; none goes across the end of a row."""
    return math.prod(domain[:-1]) * -(-domain[-1] // length)


class Piece:
    """The piece that is being traced: from ``start``, the number of its first iteration in its row."""

    def __init__(
        self, tracer: Any, pieces: Pieces, domain: tuple[int, ...], outer: tuple[Any, ...], start: Any
    ) -> None:
        self.pieces = pieces
        self.outer = outer
        self.start = start
        first = start  # number of its first iteration among all
        for n, index in enumerate(outer):
            first = first + index * math.prod(domain[n + 1 :])
        self.first = backend.variable(first)
        whole = start + pieces.length
        self.end = whole if domain[-1] % pieces.length == 0 else backend.ops.min(whole, domain[-1])
        self.loads = {load: backend.variable(_read(tracer.plan.placed(load), load)) for load in pieces.loads}
        self.targets: dict[Any, Any] = {}
        self.containers: dict[Any, Any] = {}
        self.tangents: dict[Any, Any] = {}
        self.values: dict[Any, Any] = {}
        self.stored: set[Any] = set()
        for key, collected in pieces.collected.items():
            self.targets[key] = tracer.plan.placed(collected)
            container = self.containers[key] = tracer.container(self.targets[key])
            self.tangents[key] = backend.zeros_variable(collected.numbers * pieces.length, container.dtype)
            if pieces.keeps_values:
                self.values[key] = backend.zeros_variable(collected.components * pieces.length, container.dtype)

    def keep_value(self, key: Any, number: Any, entries: list[Any]) -> None:
        """Keep what an iteration, by its number in its row, stores to the field."""
        first = backend.variable((number - self.start) * len(entries))
        for n, entry in enumerate(entries):
            backend.assign(backend.element(self.values[key], (first + n,)), entry)

    def keep_tangents(self, key: Any, number: Any, tangents: dict[int, Any]) -> None:
        """Keep what an iteration stores to J, by its number among those."""
        self.stored.add(key)
        first = backend.variable((number - self.start) * self.pieces.collected[key].numbers)
        for n, tangent in tangents.items():
            backend.assign(backend.element(self.tangents[key], (first + n,)), tangent)

    def copy(self) -> None:
        """Store what has been kept."""
        length = backend.variable(self.end - self.start)
        for key, values in self.values.items():
            collected = self.pieces.collected[key]
            with backend.for_range(length) as k:
                first = k * collected.components
                entries = [backend.element(values, (first + n,)) for n in range(collected.components)]
                place = backend.element(self.targets[key], (*self.outer, self.start + k))
                shape = backend.shape_of(place)
                backend.assign(place, backend.tensor(entries, shape) if shape else entries[0])
        for key, tangents in self.tangents.items():
            collected = self.pieces.collected[key]
            first, count = (n * collected.numbers for n in (self.first, length))
            container = self.containers[key]
            if container.is_paired:  # LLVM makes a pair one load and one store
                first, count = first // 2, count // 2
            first = backend.variable(first)
            with backend.for_range(count) as k:
                value = backend.element(tangents, (k,))
                if container.is_paired:
                    value = backend.pair(*(backend.element(tangents, (k * 2 + n,)) for n in (0, 1)))
                backend.assign(backend.element(container.shadow, (first + k,)), value)

    @property
    def is_complete(self) -> bool:
        return self.stored == self.tangents.keys()


def _tree(target: Any) -> int:
    return backend.tree_number(target) if isinstance(target, backend.Field) else ARRAYS


def _read(target: Any, load: FixedLoad) -> Any:
    whole = backend.element(target, load.indices)
    if load.component is None or not backend.is_tensor(whole):
        return whole
    return backend.element(whole, (load.component,))
