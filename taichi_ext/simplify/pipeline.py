"""All simplifications, in their order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

import taichi_ext.program as ir
from taichi_ext.program import F32, F64, I32, U1, Const, Op, Program, Type, Value
from taichi_ext.program.values import joined_contents
from taichi_ext.simplify.usage import (
    all_values,
    assigned_locals,
    changed_locals,
    kept_locals,
    position_locals,
    read_counts,
)


def simplify(program: Program) -> Program:
    """Vectors as scalars, a name for each version of a local, constants folded, temporaries put where they are used."""
    body = program.body
    for step in (as_scalars, with_versions, without_dead_code, folded):
        body = step(body)
    return replace(program, body=body)


# A name for each version of a local: it begins where the local is assigned in the block of its declaration.


def with_versions(body: ir.Body) -> ir.Body:
    """The block in which such assignments are declarations."""
    candidates, elsewhere = _candidates(body)
    candidates -= kept_locals(body)
    return _block(body, candidates, elsewhere, {}) if candidates else body


def _candidates(body: ir.Body) -> tuple[set[ir.Local], set[ir.Local]]:
    """Scalars that are assigned in the block of their declaration, and those that are changed in another way, too."""
    assigned: set[ir.Local] = set()
    elsewhere: set[ir.Local] = set()
    blocks: dict[ir.Local, tuple[ir.Statement, ...]] = {}  # of their declarations
    for s, around in ir.enclosed(body):
        if isinstance(s, ir.Declare) and not s.local.shape:
            blocks[s.local] = around
        elif isinstance(s, ir.Store) and isinstance(s.target, ir.Read):
            local = s.target.local
            is_simple = isinstance(s, ir.Assign) or (isinstance(s, ir.Update) and local.dtype.bits >= 32)
            (assigned if is_simple and blocks.get(local) == around else elsewhere).add(local)
    return assigned, elsewhere


def _block(
    body: ir.Body, candidates: set[ir.Local], elsewhere: set[ir.Local], outer: dict[ir.Local, ir.Local]
) -> ir.Body:
    current, own = dict(outer), {s.local for s in body if isinstance(s, ir.Declare)}

    def now(node: ir.Value) -> ir.Value:
        found = current.get(node.local) if isinstance(node, ir.Read) else None
        return node if found is None else ir.Read(found, place=node.place)

    made: list[ir.Statement] = []
    for s in body:
        if not s.contents.locals.isdisjoint(current):
            s = ir.with_nodes(s, now)
        s = ir.with_blocks(s, lambda block: _block(block, candidates, elsewhere, current))
        local = s.target.local if isinstance(s, ir.Store) and isinstance(s.target, ir.Read) else None
        if local not in candidates:
            made.append(s)
            continue
        assert isinstance(s, ir.Store)
        if local not in own or not (isinstance(s, ir.Assign) or local not in elsewhere):
            made.append(replace(s, target=now(s.target)))
            continue
        value = s.value
        if isinstance(s, ir.Update):
            value = ir.Op(s.op, (now(s.target), value), local.dtype, place=s.place)
        elif value.dtype != local.dtype:
            value = ir.Op("cast", (value,), local.dtype, place=s.place)
        current[local] = ir.Local(local.name, local.dtype, (), local.kind)
        made.append(ir.Declare(current[local], (value,), place=s.place))
    return tuple(made)


# Vectors and matrices of which only constant entries are read and written become scalars.
#
# So do the index vectors of ``ti.grouped``: Taichi 1.7.4 aborts where it drops ``v[I[0], I[1]][0] += 0.0``.

_PLAIN = {"grouped": "field", "grouped ndrange": "ndrange"}  # loops over the same, with a variable for each axis
Entries = dict[ir.Local, tuple[ir.Local, ...]]


def as_scalars(body: ir.Body) -> ir.Body:
    """The block with a scalar local for each entry, named ``v_x``, ``v_y`` or by number."""
    made = _entries(body)
    if not made:
        return body

    def entry(node: ir.Value) -> ir.Value:
        number = node.number if isinstance(node, ir.Read) and node.local in made else None
        if isinstance(node, ir.Read) and number is not None:
            return ir.Read(made[node.local][number], place=node.place)
        return node

    def change(statement: ir.Statement) -> ir.Statement | ir.Body:
        statement = ir.with_places(statement, entry)
        if isinstance(statement, ir.Declare) and statement.local in made:
            pairs = zip(made[statement.local], statement.values, strict=True)
            return tuple(ir.Declare(local, (v,), place=statement.place) for local, v in pairs)
        if isinstance(statement, ir.For) and statement.kind in _PLAIN and statement.variables[0] in made:
            return replace(statement, kind=_PLAIN[statement.kind], variables=made[statement.variables[0]])
        if isinstance(statement, ir.Boundary) and statement.inner:
            inner = {k: tuple(e for l in v for e in made.get(l, (l,))) for k, v in statement.inner.items()}
            return replace(statement, inner=inner)
        return statement

    return ir.mapped(body, change)


def _entries(body: ir.Body) -> Entries:
    everything = ir.statements(body)
    declared = [s.local for s in everything if isinstance(s, ir.Declare) and s.local.shape]
    groups = (s.variables[0] for s in everything if isinstance(s, ir.For) and s.kind in _PLAIN)
    loop_vectors = {v: None for v in groups if math.prod(v.shape)}.keys()
    declared += loop_vectors
    indexed: set[ir.Local] = set()
    for s in everything if declared else ():
        reads = [n for n in all_values(s) if isinstance(n, ir.Read)]
        if isinstance(s, ir.Store) and isinstance(s.target, ir.Read):
            reads.append(s.target)
            indexed |= loop_vectors & {s.target.local}  # a scalar loop variable cannot change
        indexed |= {n.local for n in reads if any(isinstance(i, ir.Value) for i in n.index)}
    kept = [v for v in declared if v not in indexed]
    return {v: tuple(ir.Local(f"{v.name}_{m}", v.dtype, (), v.kind) for m in _marks(v.shape)) for v in kept}


def _marks(shape: tuple[int, ...]) -> list[str]:
    if len(shape) == 1:
        return ["xyzw"[n] if shape[0] <= 4 else str(n) for n in range(shape[0])]
    separator = "" if max(shape) < 10 else "_"
    return [f"{i}{separator}{j}" for i in range(shape[0]) for j in range(shape[1])]


# Drop statements that compute unused values.


def without_dead_code(body: ir.Body) -> ir.Body:
    """The block without locals that are never used, and without branches and loops that are empty."""
    needed = needed_locals(body)

    def change(s: ir.Statement) -> ir.Statement | ir.Body:
        if _defined(s) is not None and not _defined(s) & needed:  # type: ignore[operator]
            return ()
        if isinstance(s, ir.Boundary) and s.inner:
            return _with_used_tangents(s, needed)
        is_empty = not s.within and (isinstance(s, ir.For) or (isinstance(s, ir.If) and s.contents.is_pure))
        return () if is_empty else s

    return ir.mapped(body, change)


def needed_locals(body: ir.Body) -> set[ir.Local]:
    """The locals on which anything depends that a program does."""
    needed = position_locals(body)
    edges: list[tuple[ir.Local, ir.Local]] = []
    for s in ir.statements(body):
        defined = _defined(s)
        if defined is None:
            needed |= s.contents.locals
            continue
        sources = (_with_used_tangents(s, set()) if isinstance(s, ir.Boundary) else s).contents.locals
        sources |= s.target.contents.locals if isinstance(s, ir.Atomic) else set()  # its result is the value before
        edges += ((local, source) for local in defined for source in sources)
        for name, locals_ in (s.inner if isinstance(s, ir.Boundary) else {}).items():
            own = joined_contents(s.sources(name)).locals  # type: ignore[union-attr]
            edges += ((local, source) for local in locals_ for source in own)
    return set(ir.reached(needed, edges))


def _defined(s: ir.Statement) -> frozenset[ir.Local] | None:
    """The locals that are all that a statement is for; None for any other statement."""
    return (changed_locals(s) or None) if s.contents.is_pure else None


def _with_used_tangents(s: ir.Boundary, needed: set[ir.Local]) -> ir.Boundary:
    """The application of a rule without the tangents that the rule does not use."""
    unused = {name for name, locals_ in s.inner.items() if needed.isdisjoint(locals_)}
    given = {name: group for name, group in s.given.items() if name not in unused}
    return replace(s, given=given, inner={name: locals_ for name, locals_ in s.inner.items() if name not in unused})


# Put copies, constants and temporaries that are used once into the expressions that use them.
#
# A branch whose condition is known is replaced by the side that is taken.
#
# A temporary moves down to its use if nothing in between changes its operands, and never into a loop. A copy of a local
# is replaced by the local if that does not change before the last read of the copy.

_NUMPY: dict[Type, Callable[[Any], Any]] = {F32: np.float32, F64: np.float64}
_COMPUTED = ("add", "sub", "mul", "truediv")


def tidied(value: Value) -> Value:
    """The same value, where that is simpler."""
    if not isinstance(value, Op):
        return value
    if value.name in ir.COMPARISONS and all(map(_is_whole, value.args)):
        a, b = (x.value for x in value.args)  # type: ignore[attr-defined]
        return Const(ir.PYTHON[value.name](a, b), U1, place=value.place)
    if value.dtype.is_integer:
        return _without_unit(value)
    bare = _with_signs_outside(value) if value.dtype in _NUMPY else value
    return _computed(bare) if isinstance(bare, Op) and bare.dtype in _NUMPY else bare


def _computed(op: Op) -> Value:
    """The result of an operation on real constants, or the operation without units."""
    numbers = _numbers(op)
    if op.name == "neg" and numbers[0] is not None:
        return Const(-float(numbers[0]), op.dtype, place=op.place)
    if op.name not in _COMPUTED or None in numbers:
        return _without_unit(op)
    if any(a.dtype not in (I32, op.dtype) for a in op.args):
        return op  # rounded to a type of its own before
    with np.errstate(all="ignore"):
        return Const(float(ir.PYTHON[op.name](*map(_NUMPY[op.dtype], numbers))), op.dtype, place=op.place)


def _numbers(op: Op) -> list[float | None]:
    """The constants among the operands."""
    return [a.value if isinstance(a, Const) and not isinstance(a.value, bool) else None for a in op.args]


def _with_signs_outside(op: Op) -> Value:
    """The same value, bit by bit, with fewer changes of sign; those of whole numbers stay, which may wrap."""
    args, dtype, place = op.args, op.dtype, op.place
    if op.name == "neg":
        return _opposite(args[0]) or op
    if op.name in ("add", "sub"):
        b = _opposite(args[1])
        if b is not None:
            return Op("sub" if op.name == "add" else "add", (args[0], b), dtype, place=place)
        a = _negated(args[0])
        return op if a is None or op.name == "sub" else Op("sub", (args[1], a), dtype, place=place)
    if op.name == "mul" and any(_negated(a) is not None for a in args):
        bare = tuple(_negated(a) or a for a in args)
        product = Op("mul", bare, dtype, place=place)
        is_even = all(_negated(a) is not None for a in args)
        return product if is_even else _with_signs_outside(Op("neg", (product,), dtype, place=place))
    return op


def _negated(value: Value) -> Value | None:
    """``x`` of ``-x``, a real number."""
    return value.args[0] if is_op(value, "neg") and value.dtype.is_real else None


def _opposite(value: Value) -> Value | None:
    """The real number that a value is the negative of, where that is simpler: ``2 * x`` of ``-2 * x``."""
    if is_op(value, "neg"):
        return _negated(value)
    if not is_op(value, "mul") or not value.dtype.is_real:
        return None
    factor, x = value.args
    if isinstance(factor, Const):
        is_least = factor.dtype.is_integer and factor.value == -(2 ** (factor.dtype.bits - 1))
        opposite: Value | None = Const(-factor.value, factor.dtype) if factor.value < 0 and not is_least else None
    else:
        opposite = _opposite(factor)
    return None if opposite is None else Op("mul", (opposite, x), value.dtype, place=value.place)


def _is_whole(value: Value) -> bool:
    return isinstance(value, Const) and value.dtype == I32 and not isinstance(value.value, bool)


def is_op(value: Value, name: str) -> TypeGuard[Op]:
    return isinstance(value, Op) and value.name == name


def _without_unit(op: Op) -> Value:
    """The other operand of a product with 1 or of a sum with 0."""
    if op.name not in ("mul", "add", "sub"):
        return op
    unit, numbers = (1 if op.name == "mul" else 0), _numbers(op)
    a, b = op.args
    if numbers[1] == unit and a.dtype == op.dtype:
        return a
    return b if numbers[0] == unit and b.dtype == op.dtype and op.name != "sub" else op


LONGEST = 12  # operations in a value that moves; longer lines are slow in Taichi's front end
FOLDED_KINDS = ("argument", "temporary", "partial", "weight", "tangent", "inside")


def folded(body: ir.Body) -> ir.Body:
    """The block with fewer locals."""
    return _Folding(body).block(body)


class _Folding:
    def __init__(self, body: ir.Body) -> None:
        self.changed = assigned_locals(body)
        self.kept = kept_locals(body)
        self.written: set[ir.Local | ir.Container] = set()
        for s in body:
            self.written |= s.written
        self.counts: Counter[ir.Local] = read_counts(body)
        self.replaced: dict[ir.Local, ir.Value] = {}
        self._last_reads: dict[int, dict[ir.Local | ir.Container, int]] = {}

    def last_reads(self, body: ir.Body) -> dict[ir.Local | ir.Container, int]:
        """Where in a block each local is read for the last time."""
        if id(body) not in self._last_reads:
            self._last_reads[id(body)] = {memory: n for n, s in enumerate(body) for memory in s.reads}
        return self._last_reads[id(body)]

    def block(self, body: ir.Body) -> ir.Body:
        made: list[ir.Statement] = []
        for n, s in enumerate(body):
            s = self.statement(s)
            if isinstance(s, ir.Declare) and self.is_candidate(s) and self.is_unneeded(s.local, s.values[0], body, n):
                self.replaced[s.local] = s.values[0]
                continue
            if isinstance(s, ir.If) and isinstance(s.condition, ir.Const):
                made.extend(self.block(s.then if s.condition.value else s.orelse))
                continue
            made.append(ir.with_blocks(s, self.block))
        return tuple(made)

    def statement(self, s: ir.Statement) -> ir.Statement:
        def change(node: ir.Value) -> ir.Value:
            if isinstance(node, ir.Read) and node.local in self.replaced and not node.index:
                return self.replaced[node.local]
            return tidied(node)

        return ir.with_nodes(s, change)

    def is_candidate(self, s: ir.Declare) -> bool:
        local = s.local
        is_free = local.kind in FOLDED_KINDS and local not in self.changed and local not in self.kept
        return is_free and not local.shape and s.contents.is_pure

    def is_unneeded(self, local: ir.Local, value: ir.Value, body: ir.Body, n: int) -> bool:
        """Whether the value of a local, declared by the statement ``n`` of a block, can stand where it is read."""
        if self.is_trivial(value) or self.is_cheap(local, value) or self.can_move(local, value, body, n):
            return True
        return isinstance(value, ir.Read) and not value.index and self.is_copy(local, value.local, body, n)

    def is_trivial(self, value: ir.Value) -> bool:
        """Whether a value can stand wherever the local is read."""
        is_number = isinstance(value, (ir.Const, ir.FoldedConst, ir.Size))
        return is_number or (isinstance(value, ir.Read) and not self.sources(value))

    def is_cheap(self, local: ir.Local, value: ir.Value) -> bool:
        """Whether a value is a number times another local, at most two times: shorter without a name of its own."""
        while is_op(value, "neg") or (is_op(value, "mul") and isinstance(value.args[0], ir.Const)):
            value = value.args[-1]
        return self.counts[local] <= 2 and isinstance(value, ir.Read) and not value.index and self.is_trivial(value)

    def sources(self, value: ir.Value) -> set[ir.Local | ir.Container]:
        """The changeable operands of a value."""
        return {m for group in value.contents[:2] for m in group if m in self.written}

    def can_move(self, local: ir.Local, value: ir.Value, body: ir.Body, n: int) -> bool:
        """Whether the only use of a local comes later in its block, and the value is still the same there."""
        if self.counts[local] != 1 or value.contents.size > LONGEST:
            return False
        sources = self.sources(value)
        for s in body[n + 1 :]:
            if local in s.contents.locals:
                return not isinstance(s, ir.While)
            if local in s.reads:
                return isinstance(s, ir.If) and not sources and self.is_in_branches(s, local)
            if sources and sources & s.written:
                return False
        return False

    def is_copy(self, local: ir.Local, source: ir.Local, body: ir.Body, n: int) -> bool:
        """Whether a local that is declared as ``source`` is the same wherever it is read."""
        if local.dtype != source.dtype:
            return False
        rest = body[n + 1 : self.last_reads(body).get(local, n) + 1]
        changes = next((m for m, s in enumerate(rest) if source in s.written), len(rest))
        return changes == len(rest) or (changes == len(rest) - 1 and not rest[-1].within)

    def is_in_branches(self, s: ir.If, local: ir.Local) -> bool:
        """Whether a use is in a statement of a branch itself, not in a loop or branch in it."""
        inner = (s for block in ir.bodies(s) for s in block)
        return any(local in s.contents.locals and not isinstance(s, ir.While) for s in inner)
