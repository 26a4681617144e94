"""Iterations of a parallel loop in lanes: neighbours go through its body together, so that LLVM puts them into vectors.

A store to an array argument reads the array's address again, and LLVM cannot tell that the stores before it have left
that address alone. So it vectorises no loop that stores to J. Therefore a loop over the last index processes several
neighbours together, and stores their results to local arrays first. Values shared by all of them stay scalars, and
inner loops with the same bounds stay loops. The statements between their heads become a loop over the lanes::

    for j in y:                     for stretch in range(count):
        total = 0.0                     for lane in range(16):
        for n in range(size):               total_of[lane] = 0.0
            total += f(j, x[n])         for n in range(size):
        y[j] = total                        for lane in range(16):
                                                total_of[lane] += f(16 * stretch + lane, x[n])
                                        for lane in range(16):
                                            y[16 * stretch + lane] = total_of[lane]

Separate loops store results to memory. The body of the outer loop is a function (``ir.For.is_function``), to which
arrays are passed by value: their addresses cannot change while it runs, so that LLVM makes vectors of these stores,
too. In the kernel itself they took 0.28 of 0.68 ms for one soft sphere.

The last stretch of a row ends at the end of the row, and computes some iterations a second time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import taichi_ext.program as ir
from taichi_ext.analysis.affine import Affine, IntegerForms, VectorEntry
from taichi_ext.analysis.changes import varying_locals, written_containers
from taichi_ext.analysis.loops import trips
from taichi_ext.program.build import TRUTHS, is_over_columns, literal
from taichi_ext.schedule.elementary import elementary_of
from taichi_ext.schedule.machine import Machine
from taichi_ext.schedule.masks import with_masks
from taichi_ext.simplify.usage import all_values, assigned_locals

LANES_OF_FLOAT32, LANES_OF_FLOAT64 = 16, 8  # in one stretch: two vectors of 32 bytes
LONG = 200  # operations written in a body of float32, from which on one vector is as fast, and LLVM done twice as soon
MOST_NUMBERS = 12288  # in the arrays of a stretch, which are to stay in the cache next to the processor
MOST_OPERATIONS = 500  # written in a body; LLVM's time grows faster than their number
MOST_REPEATED = 0.25  # the share of a row that its last stretch may compute a second time
COMPILED = 3  # additions in a function written out that LLVM takes as long for as for an operation
LEAST_TOTAL = 1 << 20  # operations of all iterations, below which it is not worth to compile more
NEEDS_VECTORS = True  # no operation that is a call for each lane
VECTORS_OF_FLOAT64 = True  # float64 only where LLVM makes vectors of it: see ``_check_float64``
MOST_CALLS = 0.6  # the share of work in float64 that may be calls for each lane
LEAST_WORK = 4  # operations per number that is stored, below which arrays cost more than vectors save
LARGEST_POWER = 16  # that Taichi makes products of
USUAL_LENGTH = 16  # of loops whose bounds are not known

# Operations that are as fast on a vector as on a scalar, with costs in additions. Others are a call per element.
WORK = {
    **dict.fromkeys(("add", "sub", "mul", "neg", "abs", "max", "min", "floor", "ceil"), 1),
    **dict.fromkeys(("truediv", "sqrt", "rsqrt", "mod", "floordiv"), 6),
}
# Calls of the library for each lane, which in float64 are no slower than vectors of two numbers.
CALLS = frozenset(("exp", "log", "sin", "cos", "tan", "asin", "acos", "pow"))
WORK_OF_CALL = 25
_BITS = ("bit_and", "bit_or", "bit_xor", "invert", "shift_left", "shift_right", "bit_cast")
FREE = frozenset((*TRUTHS, *_BITS, "cast", "select", "ifte"))

_WORDS = {
    ir.Declare: "a local matrix, or a vector of truth values,",
    ir.Atomic: "an atomic",
    ir.Return: "a return",
}


class CannotError(Exception):
    """Why a loop cannot run in lanes."""


@dataclass(frozen=True)
class LaneRun:
    """Statements without loops that all lanes go through, one after the other, in one loop."""

    statements: ir.Body


@dataclass(frozen=True)
class SharedBlock:
    """A loop or branch that is the same for all lanes, and the contents of its blocks."""

    statement: ir.Statement
    blocks: tuple[tuple[LaneRun | SharedBlock | ir.Statement, ...], ...]


Part = LaneRun | SharedBlock | ir.Statement


@dataclass(frozen=True)
class Lanes:
    """A loop that can run in lanes."""

    loop: ir.For
    domain: tuple[int, ...]
    count: int
    varying: frozenset[ir.Local]
    parts: tuple[Part, ...]
    places: Mapping[ir.Statement, Affine]  # of stores to shadows
    is_repeatable: bool  # whether iterations may run twice: they read nothing that they store
    is_fast: bool = False  # whether results may differ in their last bits
    is_direct: bool = False  # whether a lane stores to memory where it computes: then lanes may store to one entry

    @property
    def last(self) -> ir.Local:
        """The variable that lanes differ in."""
        return self.loop.variables[-1]

    @property
    def stretches(self) -> int:
        return math.prod(self.domain[:-1]) * -(-self.domain[-1] // self.count)


def find_lanes(
    loop: ir.For, domain: tuple[int, ...], shadows: Mapping[ir.Container, ir.Container | None], machine: Machine
) -> Lanes:
    """How to run a loop in lanes; raises ``CannotError`` where that is not possible, or does not pay."""
    if machine.is_checked:
        raise CannotError("its iterations are watched or checked")
    if _most_work(loop.body, is_fast=machine.is_fast) * math.prod(domain) < LEAST_TOTAL:
        raise CannotError("it is done soon")  # masks add no work, but they take time
    last = loop.variables[-1]
    along = ir.For("range", (last,), (literal(0, ir.I32), literal(domain[-1], ir.I32)), loop.body)
    body, varying = with_masks(
        loop.body, varying_locals(along), written_containers(loop.body), lambda b: work_of(b, is_fast=machine.is_fast)
    )
    own = {local for s in (*ir.statements(loop.body), *ir.statements(body)) for local in ir.declared(s)}
    loop = replace(loop, body=body)
    if not varying | assigned_locals(body) <= own | {last}:
        raise CannotError("iterations share a local")
    survey = Survey(loop, domain, shadows, machine, frozenset(varying))
    parts = survey.block(body, 1)
    totals = survey.totals
    count = LANES_OF_FLOAT64 if totals.widest == ir.F64 else LANES_OF_FLOAT32
    count = max(2, count // 2) if totals.widest != ir.F64 and totals.operations > LONG else count
    repeated = -domain[-1] % count
    if repeated > MOST_REPEATED * domain[-1] or (survey.is_repeatable and domain[-1] < count):
        raise CannotError(f"its rows of {domain[-1]} iterations are too short")
    if totals.widest == ir.F64 and VECTORS_OF_FLOAT64:
        if repeated and not survey.is_repeatable:
            raise CannotError(f"it reads what it stores, in rows of float64 that are no multiple of {count}")
        _check_float64(parts, loop.body, totals)
    if totals.work * math.prod(domain) < LEAST_TOTAL:
        raise CannotError("it is done soon")
    if totals.operations > MOST_OPERATIONS:
        raise CannotError(f"it has {totals.operations} operations, which takes LLVM too long")
    if totals.work < LEAST_WORK * totals.stored:
        raise CannotError("it computes too little for each number that it stores")
    if totals.numbers * count > MOST_NUMBERS:
        raise CannotError("its local arrays are too long")
    return Lanes(loop, domain, count, survey.varying, parts, survey.places, survey.is_repeatable, machine.is_fast)


@dataclass
class _Totals:
    """Sums over a body; ``calls`` is the part of ``work`` that is calls for each lane."""

    work: int = 0
    calls: int = 0
    stored: int = 0
    numbers: int = 0
    operations: int = 0
    has_loads: bool = False  # from places that differ from lane to lane
    widest: ir.Type = ir.I32


def _check_float64(parts: tuple[Part, ...], body: ir.Body, totals: _Totals) -> None:
    """Raise where LLVM makes no vectors of float64, which hold fewer numbers than those of float32."""
    if any(isinstance(s, ir.Assign) and _is_choice(s) for s in ir.statements(body)):
        raise CannotError("a local array of float64 changes in some lanes only")
    inner = (x for s in ir.statements(body) if isinstance(s, (ir.For, ir.While)) for x in s.within)
    if any(map(is_over_columns, inner)):
        raise CannotError("a loop in it goes through rows of float64, which are vectors already")
    if totals.calls > MOST_CALLS * totals.work:
        raise CannotError("most of its work is functions of float64, which are calls for each lane")
    has_loops = any(isinstance(p, SharedBlock) and isinstance(p.statement, (ir.For, ir.While)) for p in parts)
    if totals.has_loads and not has_loops:
        raise CannotError("it reads float64 for each lane where it computes, without a loop in between")


@dataclass
class Survey:
    """The operations in the body of a parallel loop, and whether lanes can go through it together."""

    loop: ir.For
    domain: tuple[int, ...]
    shadows: Mapping[ir.Container, ir.Container | None]
    machine: Machine
    varying: frozenset[ir.Local]

    def __post_init__(self) -> None:
        self.indices, body = IntegerForms((self.loop,)), self.loop.body
        self.written = written_containers(body)
        self.unchanged = {v for s in self.loop.within for v in ir.declared(s)} - self.varying - assigned_locals(body)
        self.own = [c for c in self.written if self._has_own_entries(c)]
        self.totals = _Totals()
        self.places: dict[ir.Statement, Affine] = {}
        self.is_repeatable = True

    def _has_own_entries(self, c: ir.Container) -> bool:
        extent = self.machine.extents.get(c)
        return c not in self.shadows and extent is not None and extent.shape == self.domain and not any(extent.offset)

    def block(self, body: ir.Body, times: int) -> tuple[Part, ...]:
        parts: list[Part] = []
        run: list[ir.Statement] = []
        memory = Memory()

        def close() -> None:
            if run:
                parts.append(LaneRun(tuple(run)))
            for collected in (run, memory.stored, memory.read, memory.places):
                collected.clear()

        for s in body:
            if self._is_around(s):
                close()
                inner = times * _length(s)
                self._note(s, 0)
                parts.append(SharedBlock(s, tuple([self.block(b, inner) for b in ir.bodies(s)])))
            elif isinstance(s, ir.Jump) or self._is_uniform(s):
                if not isinstance(s, ir.Declare):
                    close()  # earlier statements may read variables that it changes
                self._note(s, 0)
                parts.append(s)
            else:
                self._check(s, is_top=True)
                for x in ir.statements((s,)):
                    self._note(x, times)
                own = self._memory(s)
                if not memory.is_apart(own):
                    close()
                run.append(s)
                memory.add(own)
        close()
        return tuple(parts)

    def _memory(self, s: ir.Statement) -> Memory:
        declared = {x.local for x in (s, *s.within) if isinstance(x, ir.Declare)}
        memory = Memory(declared | s.written, set(s.reads))
        for x in (s, *s.within):
            targets = (x.target,) if isinstance(x, ir.Store) else ()
            for v in (*targets, *all_values(x)):
                if isinstance(v, ir.Read) and v.local.shape:
                    place = self.indices.form(v.index[0]) if len(v.index) == 1 else None
                    is_known = place is not None and self.varying.isdisjoint(a for a, _ in place.terms)
                    memory.places.add((v.local, place.terms if is_known and place is not None else v))
        return memory

    def _is_around(self, s: ir.Statement) -> bool:
        if not isinstance(s, (ir.For, ir.While, ir.If)) or not s.contents.is_same(self.varying, self.written):
            return False
        return not isinstance(s, ir.For) or (s.kind == "range" and self.unchanged.issuperset(s.variables))

    def _is_uniform(self, s: ir.Statement) -> bool:
        """Whether a statement declares or changes a local that is the same for all lanes."""
        match s:
            case ir.Declare(local=local):
                return local not in self.varying
            case ir.Assign(target=ir.Read(local=local)) | ir.Update(target=ir.Read(local=local)):
                return self.varying.isdisjoint((local, *s.contents.locals))  # else it is a sum over the lanes
        return False

    def _check(self, s: ir.Statement, *, is_top: bool) -> None:
        match s:
            case ir.Declare() if len(s.local.shape) < 2 and (not s.local.shape or s.local.dtype != ir.U1):
                self.totals.numbers += math.prod(s.local.shape)
            case ir.Assign(target=ir.Read()) | ir.Update(target=ir.Read()):
                pass
            case ir.Assign(target=ir.Load()) | ir.Update(target=ir.Load()) if is_top:
                place = self._place(s.target)  # type: ignore[union-attr, arg-type]
                if place is not None:
                    self.places[s] = place
                self.is_repeatable &= isinstance(s, ir.Assign)
            case ir.If():
                for inner in (*s.then, *s.orelse):
                    self._check(inner, is_top=is_top and isinstance(s.condition, ir.Read))
            case ir.For() | ir.While():
                raise CannotError("there is a loop in it that is not over a range")
            case _:
                raise CannotError(f"there is {_WORDS.get(type(s), 'a call')} in it")

    def _place(self, target: ir.Load) -> Affine | None:
        """The place in a shadow of an access to the loop's writes, in an entry that only this iteration uses."""
        c, variables = target.container, self.loop.variables
        if c not in self.shadows:
            places = tuple(map(self.indices.site, target.indices))
            is_own = c in self.own and places == tuple(Affine(((v, 1),)) for v in variables)
            if not is_own or not all(isinstance(n, int) for n in target.component):
                raise CannotError("it stores entries that are not its own, or reads them where it stores others")
            return None
        (index,) = target.indices
        place = self.indices.form(index)
        owner = self.shadows[c]
        if place is None or not (owner is None or owner in self.own):
            raise CannotError("rows of J are at places that only the kernel knows")
        own = Affine()
        for variable, size in zip(variables, self.domain, strict=True):
            own = own * size + Affine(((variable, 1),))
        factor = dict(place.terms).get(variables[-1], 0)
        rest = place + own * -factor
        if factor <= 0 or any(a in variables or a in self.varying or isinstance(a, VectorEntry) for a, _ in rest.terms):
            raise CannotError("rows of J are at places that only the kernel knows")
        return place

    def _note(self, s: ir.Statement, times: int) -> None:
        """Count the operations done ``times`` times in lanes, and find those that LLVM does not vectorise."""
        if isinstance(s, (ir.Assign, ir.Update)) and isinstance(s.target, ir.Load):
            self.totals.stored += times
        seen: set[ir.Value] = set()
        for value in all_values(s):
            if value in seen:
                continue
            seen.add(value)
            if value.dtype.is_real and value.dtype.bits > 32:
                self.totals.widest = ir.F64
            if isinstance(value, ir.Load):
                self.totals.has_loads |= not self.varying.isdisjoint(value.contents.locals)
            if isinstance(value, ir.Load) and value.container in self.written:
                self._place(value)
                self.is_repeatable = False
            if times and isinstance(value, ir.Op):
                self._note_operation(value, times)

    def _note_operation(self, op: ir.Op, times: int) -> None:
        known = elementary_of(op) if self.machine.is_fast else None
        self.totals.operations += 1 if known is None else known.work // COMPILED
        is_known = known is not None or op.name in WORK or op.name in FREE or _is_product(op) or _is_call(op)
        if NEEDS_VECTORS and (not is_known or op.dtype == ir.F16):
            raise CannotError(f"LLVM does not vectorise {op.name} of {op.dtype}")
        work = times * _work(op, is_fast=self.machine.is_fast)
        self.totals.work += work
        self.totals.calls += work * (known is None and _is_call(op))


def work_of(body: ir.Body, *, is_fast: bool) -> int:
    """The operations of a block, in additions; those in its loops count once."""
    values = {v for s in ir.statements(body) for v in all_values(s) if isinstance(v, ir.Op)}
    return sum(_work(v, is_fast=is_fast) for v in values)


def _most_work(body: ir.Body, *, is_fast: bool) -> int:
    """The operations of a block, in additions, with those in its loops as often as they run."""
    times = ir.inherited(body, 1, lambda s, n: n * _length(s))
    return sum(n * _work(v, is_fast=is_fast) for s, n in times for v in all_values(s) if isinstance(v, ir.Op))


def _work(op: ir.Op, *, is_fast: bool) -> int:
    known = elementary_of(op) if is_fast else None
    work = WORK.get(op.name, WORK["truediv"] if _is_product(op) else WORK_OF_CALL * _is_call(op))
    return (work if known is None else known.work) * op.dtype.is_real


def _is_call(op: ir.Op) -> bool:
    """Whether lanes go through a call one after the other."""
    return op.dtype == ir.F64 and op.name in CALLS


def _is_product(op: ir.Op) -> bool:
    """Whether Taichi makes products, an inverse or a root of a power."""
    exponent = op.args[1].value if op.name == "pow" and isinstance(op.args[1], ir.Const) else math.inf
    return abs(exponent) <= LARGEST_POWER and (exponent == int(exponent) or exponent == 0.5)


def _is_choice(s: ir.Assign) -> bool:
    """Whether some lanes alone change an entry of a local array."""
    target, value = s.target, s.value
    return isinstance(target, ir.Read) and bool(target.index) and isinstance(value, ir.Op) and target in value.args[2:]


def _length(s: ir.Statement) -> int:
    """How often the blocks of a statement run."""
    count = trips(s)
    return USUAL_LENGTH if count is None else max(1, count)


@dataclass(frozen=True)
class Memory:
    """The locals and containers that statements and their blocks store to, and those that they read."""

    stored: set[ir.Local | ir.Container] = field(default_factory=set)
    read: set[ir.Local | ir.Container] = field(default_factory=set)
    places: set[tuple[ir.Local, object]] = field(default_factory=set)  # in local arrays, without their constants

    def add(self, later: Memory) -> None:
        self.stored.update(later.stored)
        self.read.update(later.read)
        self.places.update(later.places)

    def is_apart(self, later: Memory) -> bool:
        """Whether a later statement can be in one loop with these.

        It reads no container that they store to, since they do so behind the loop. It stores to no array that they
        read, or they to one that it reads, but at places that differ by a constant: LLVM may not know that others do.
        """
        both = (later.read & self.stored) | {x for x in later.stored & self.read if isinstance(x, ir.Local)}
        shared = Counter(x for x, _ in self.places | later.places)
        return not any(isinstance(x, ir.Container) or (x.shape and shared[x] != 1) for x in both)
