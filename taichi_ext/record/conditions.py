"""The conditions of a recorded function of a position, at which it can jump, as levels.

A recorded body is rewritten so that it counts its conditions as they are evaluated, and keeps a hash of their outcomes,
and either the level of one of them or the distance of the nearest edge.  A level is 0 where its condition changes.  A
body can jump at comparisons of real numbers, conversions to integers, roundings, remainders, the cut of ``atan2``, and
where a divisor is 0; everything else is continuous, or depends on integers that come from these.  Real numbers that are
tested for equality are equal in a whole region only by ``max``, ``min`` or ``abs``, so these count as conditions, too,
where there is such a test.  So do the turning points of sines from which a condition is computed, and the factors of a
product that is compared with 0, and what it is a power, or ``max`` with 0, of: a search that follows slopes then finds
the edges of one sine, and of products of them.  Slopes of other levels, such as sums of sines, may lead past a pair.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import taichi_ext.program as ir
from taichi_ext.errors import UnsupportedError
from taichi_ext.record.literals import as_value

_ORDERED = ("lt", "le", "gt", "ge")
_BITS = 30  # of the hash
HASH_START = 0x12345678  # not 0: a condition that does not hold would not change it, and if, elif would look like elif


@dataclass(frozen=True)
class Probe:
    """The locals of one call that record its conditions, which are numbered from 1.

    The hash takes the conditions up to number ``which``, whose level is ``level``. With a ``reach``, ``found`` has the
    bits of the numbers of conditions that may change in the square of twice this side around the position ``at``, by
    their levels and slopes there, where ``at`` is at ``along`` in it. Else ``along`` is a direction, ``near`` the
    distance of the next edge ahead, whose number is ``found`` and whose slope ``slope``, and ``behind`` that of the
    next one the other way. ``bits`` has the outcomes of conditions, odd or even, at their numbers. A local that is not
    needed is None. ``has_kinks``: whether places count where ``max``, ``min`` and ``abs`` change. ``inner``: the sines,
    cosines and tangents that conditions are computed from, and the products, powers and so on that are compared with
    0. ``signless``: the locals that are only given constants, none of them negative, such as ``eps`` of a norm.
    ``kind``: the function that asks. ``is_wide``: whether a level that is 0 all around its place counts as near.
    ``of_shapes``: the statements of the shapes of ``layers``, of whose conditions only those in ``inner`` count;
    ``is_of_shape``: whether they are walked. ``after``: the last number that the hash leaves out. ``is_flipped``: the
    outcome of comparison ``which`` is the other one, and ``found`` is 1; there are none of other conditions.
    """

    count: ir.Local
    seen: ir.Local
    which: ir.Value
    level: ir.Local | None
    near: ir.Local | None
    at: ir.Tensor
    reach: ir.Value | None = None
    along: ir.Tensor | None = None
    found: ir.Local | None = None
    behind: ir.Local | None = None
    slope: tuple[ir.Local, ...] = ()
    bits: ir.Local | None = None
    has_kinks: bool = False
    inner: frozenset[ir.Value] = frozenset()
    signless: frozenset[object] = frozenset()
    kind: str = "pixel"
    is_wide: bool = False
    of_shapes: Collection[ir.Statement] = ()
    is_of_shape: bool = False
    after: ir.Value | None = None
    is_flipped: bool = False

    def in_body(self, body: ir.Body) -> ir.Body:
        """A body with its conditions noted.

        Raises:
            UnsupportedError: the body has a construct that a function of a position must not have.
        """
        moving = _depending(body, self.at)
        has_kinks = any(_is_equality(v) for s in ir.statements(body) for v in ir.values_of(s))
        given: dict[object, list[ir.Value]] = defaultdict(list)
        for memory, values in (flow for s in ir.statements(body) for flow in ir.flows(s, {"stop_gradient": ""})):
            given[memory] += values
        signless = frozenset(m for m, values in given.items() if values and all(map(_is_no_less_than_0, values)))
        probe = replace(self, has_kinks=has_kinks, signless=signless)
        probe = replace(probe, inner=probe._inner_conditions(body, given))
        noted, _ = probe._numbered(probe._noted_body(body, moving))
        return ir.mapped(noted, _ended) if self.is_flipped else noted

    def _numbered(self, body: ir.Body) -> tuple[ir.Body, int]:
        """The block, whose conditions have the same numbers on all ways through it, and how many numbers it takes.

        Conditions that are skipped count, too: those of the other branch, and those of iterations that do not come.
        """
        new: list[ir.Statement] = []
        total = 0
        for s in body:
            if isinstance(s, ir.Update) and isinstance(s.target, ir.Read) and s.target.local is self.count:
                new.append(s)
                total += 1
                continue
            blocks = [self._numbered(block) for block in ir.bodies(s)]
            sizes = [size for _, size in blocks]
            if not any(sizes):
                new.append(s)
                continue
            s = ir.with_bodies(s, tuple(block for block, _ in blocks))
            own, size = self._numbered_branches(s, sizes) if isinstance(s, ir.If) else self._numbered_loop(s, sizes[0])
            new += own
            total += size
        return tuple(new), min(total, _MOST_NUMBERS)

    def _numbered_branches(self, s: ir.If, sizes: list[int]) -> tuple[ir.Body, int]:
        count, start, size = ir.Read(self.count), ir.Read(ir.Local("start", ir.I32, (), "temporary")), sum(sizes)
        orelse = (ir.Assign(count, _whole("add", start, sizes[0]), place=s.place), *s.orelse)
        after = _whole("max", count, _whole("add", start, size))  # more numbers than expected may be taken in loops
        return (
            ir.Declare(start.local, (count,), place=s.place),
            replace(s, orelse=orelse if sizes[1] else s.orelse),
            ir.Assign(count, after, place=s.place),
        ), size

    def _numbered_loop(self, s: ir.Statement, size: int) -> tuple[ir.Body, int]:
        assert isinstance(s, (ir.For, ir.While))
        count = ir.Read(self.count)
        first, end = (ir.Read(ir.Local(name, ir.I32, (), "temporary")) for name in ("first", "end"))
        turns = _turns(s)
        taken = _whole("mul", _whole("min", turns, _MOST_NUMBERS // size), size)
        begins = (
            ir.Assign(count, _whole("max", count, first), place=s.place),
            ir.Assign(first, _whole("add", count, size), place=s.place),
        )
        return (
            ir.Declare(first.local, (count,), place=s.place),
            ir.Declare(end.local, (_whole("add", count, taken),), place=s.place),
            ir.with_bodies(s, ((*begins, *s.body),)),
            ir.Assign(count, _whole("max", _whole("max", count, first), end), place=s.place),
        ), size * (int(turns.value) if isinstance(turns, ir.Const) else _RESERVED)

    def _noted_body(self, body: ir.Body, moving: set[ir.Local]) -> ir.Body:
        def noted(s: ir.Statement) -> ir.Body:
            own = replace(self, is_of_shape=True) if s in self.of_shapes else self
            return own._with_notes(ir.with_blocks(s, lambda block: own._noted_body(block, moving)), moving)

        return tuple(new for s in body for new in noted(s))

    def _with_notes(self, s: ir.Statement, moving: set[ir.Local]) -> ir.Body:
        if not self.is_of_shape:
            _require_supported(s)
        outcomes: dict[ir.Value, ir.Value] = {}

        def notes(value: ir.Value) -> ir.Body:
            return self._notes(value, s.place, outcomes, moving)

        if isinstance(s, ir.While) and s.condition is not None:  # it is evaluated in each iteration
            before = notes(s.condition)
            ends = ir.If(_settled(s.condition, outcomes), (), (ir.Jump("break", place=s.place),), place=s.place)
            return (replace(s, condition=None, body=(*before, ends, *s.body)),)
        before = tuple(n for v in _computed(s) for n in notes(v))
        return (*before, ir.with_values(s, lambda v: _settled(v, outcomes)) if before else s)

    def _notes(
        self, value: ir.Value, place: ir.Place | None, outcomes: dict[ir.Value, ir.Value], moving: set[ir.Local]
    ) -> ir.Body:
        """The notes of the conditions in a value; conditions of a choice are noted only if they are evaluated.

        Outcomes of conditions are kept in locals, which are read in the place of the conditions.
        """
        if value in outcomes or not isinstance(value, (ir.Op, ir.Read, ir.Load)):
            return ()
        outcomes[value] = value
        rest = ir.children(value)
        if not isinstance(value, ir.Op) or value.name not in ir.LAZY:
            own: ir.Body = ()
            if isinstance(value, ir.Op) and _reads(value, moving):
                own = self._note(value, place, outcomes, moving)
            elif isinstance(value, ir.Op) and self.kind == "layers" and not self.is_of_shape:
                self._require_position(value, place)
            return (*(n for v in rest for n in self._notes(v, place, outcomes, moving)), *own)
        first, *others = rest
        before = self._notes(first, place, outcomes, moving)
        known = [dict(outcomes) for _ in others]
        sides = [self._notes(v, place, own, moving) for v, own in zip(others, known, strict=True)]
        if not any(sides):
            return before
        if value.name == "ifte":
            return (*before, ir.If(_settled(first, outcomes), *sides, place=place))
        outcome = ir.Read(ir.Local("holds", value.dtype, (), "temporary"))
        side = (*sides[0], ir.Assign(outcome, _settled(others[0], known[0]), place=place))
        outcomes[value] = outcome
        start = ir.Declare(outcome.local, (_settled(first, outcomes),), place=place)
        sides = [side, ()] if value.name == "logical_and" else [(), side]
        return (*before, start, ir.If(outcome, *sides, place=place))

    def _note(
        self, op: ir.Op, place: ir.Place | None, outcomes: dict[ir.Value, ir.Value], moving: set[ir.Local]
    ) -> ir.Body:
        """The note of one operation."""
        if self.is_of_shape and op not in self.inner:
            return ()
        place, args = op.place or place, op.args
        is_real = any(a.dtype.is_real for a in args)
        if op.name in _ORDERED and is_real:
            outcome = outcomes[op] = ir.Read(ir.Local("holds", op.dtype, (), "temporary"))
            start = ir.Declare(outcome.local, (op,), place=place)
            return (start, *self._noted(outcome, _real("sub", *args), place), *self._flipped(outcome, place))
        if op.name in _KINKS and is_real and self.has_kinks:
            first, second = args if len(args) == 2 else (args[0], ir.Const(0.0, args[0].dtype))
            return self._noted(ir.Op("gt", (first, second), ir.U1), _real("sub", first, second), place)
        if op in self.inner and op.name not in _WAVES:
            factors = [a for a in _factors(op) if _reads(a, moving)]
            if op.name == "mul" and len(factors) < 2:  # its sign changes where that of one factor does
                return ()
            return tuple(s for a in factors for s in self._noted(_is_positive(a), a, place))
        if op in self.inner:
            op = _real("floor", _real("add", _real("mul", args[0], 1 / math.pi), _WAVES[op.name]))
            args = op.args
        elif not is_real or op.name not in _JUMPS:
            return ()
        if op.name == "truediv":
            level = self._signed(args[1])
            return () if level is None else self._noted(_is_positive(level), level, place)
        if op.name == "cast" and (op.dtype.is_real or op.dtype == ir.U1):
            return ()
        if op.name == "atan2":
            y, x = args
            is_cut = ir.Op("lt", (x, ir.Const(0.0, x.dtype)), ir.U1)
            return (ir.If(is_cut, self._noted(_is_positive(y), y, place), place=place),)
        if op.name in ("mod", "floordiv"):
            steps = _real("floor", _real("truediv", *args))
            nearest = _real("round", _real("truediv", *args))
            return self._noted(steps, _real("sub", args[0], _real("mul", args[1], nearest)), place, args[1])
        half = ir.Const(0.5, args[0].dtype)
        border = _real("add", _real("floor", args[0]), half) if op.name == "round" else _real("round", args[0])
        return self._noted(op, _real("sub", args[0], border), place, ir.Const(1.0, args[0].dtype))

    def _require_position(self, op: ir.Op, place: ir.Place | None) -> None:
        """Raise for the level of a shape of ``layers`` that is the same everywhere."""
        level = op.args[0]
        is_number = isinstance(level, ir.Read) and level.local in self.signless
        if op.name == "gt" and _is_zero(op.args[1]) and not is_number:
            raise UnsupportedError(
                f"{ir.cited(place)}layers: level does not depend on x and y; compute it from them in the shape."
            )

    def _inner_conditions(self, body: ir.Body, given: Mapping[object, list[ir.Value]]) -> frozenset[ir.Value]:
        """The sines, cosines and tangents, which jump, that conditions are computed from; the products of ``inner``."""

        def reached(levels: list[ir.Value], operands: Callable[[ir.Value], tuple[ir.Value, ...]]) -> Iterator[ir.Op]:
            found = ir.through(levels, lambda v: given.get(v.local, ()) if isinstance(v, ir.Read) else operands(v))
            return (v for v in found if isinstance(v, ir.Op))

        values = (v for s in ir.statements(body) for v in _computed(s))
        ops = [v for value in values for v in ir.walk(value) if isinstance(v, ir.Op)]
        waves = reached([v for op in ops for v in self._levels_of(op)], _operands)
        ordered = [op.args for op in ops if op.name in _ORDERED]
        signs = reached([a for p, q in ordered for a, b in ((p, q), (q, p)) if _is_zero(b)], _factors)
        products = (v for v in signs if v.name in _PRODUCTS and v.args[0] != v.args[1])
        return frozenset((*(v for v in waves if v.name in _WAVES), *products))

    def _levels_of(self, op: ir.Op) -> tuple[ir.Value, ...]:
        """What the places are computed from at which an operation jumps."""
        if op.name == "truediv":
            divisor = self._signed(op.args[1])
            return () if divisor is None else (divisor,)
        if op.name == "cast" and (op.dtype.is_real or op.dtype == ir.U1):
            return ()
        if op.name == "tan":
            return (op,)
        return op.args if op.name in (*_ORDERED, *_JUMPS, *(_KINKS if self.has_kinks else ())) else ()

    def _signed(self, divisor: ir.Value) -> ir.Value | None:
        """The value whose sign changes where a divisor is 0 along a line; None if there is no such line."""
        if isinstance(divisor, ir.Const):
            return None
        if not isinstance(divisor, ir.Op):
            return divisor
        if divisor.name == "abs":
            return divisor.args[0]
        if divisor.name == "cast":
            return self._signed(divisor.args[0])
        if divisor.name == "add" and isinstance(divisor.args[0], ir.Op) and divisor.args[0].name in _ONE_SIGN:
            other = divisor.args[1]
            if _is_no_less_than_0(other) or (isinstance(other, ir.Read) and other.local in self.signless):
                return self._signed(divisor.args[0])
        square = divisor.args[0] if divisor.name == "sqrt" else None
        if isinstance(square, ir.Op) and square.name == "mul" and square.args[0] == square.args[1]:
            return square.args[0]
        return None if divisor.name in _ONE_SIGN else divisor

    def _noted(
        self, outcome: ir.Value, level: ir.Value, place: ir.Place | None, period: ir.Value | None = None
    ) -> ir.Body:
        """Statements that record the outcome of a condition; with a period its level is that of the nearest change."""
        count, seen = ir.Read(self.count), ir.Read(self.seen)
        mixed = tuple(ir.Assign(seen, new, place=place) for new in _mixed(seen, _as(outcome, ir.I32)))
        if self.after is not None:
            mixed = (ir.If(ir.Op("gt", (count, self.after), ir.U1), mixed, place=place),)
        body: list[ir.Statement] = [
            ir.Update(count, "add", ir.Const(1, ir.I32), place=place),
            ir.If(ir.Op("le", (count, self.which), ir.U1), mixed, place=place),
        ]
        if self.bits is not None:
            odd = ir.Op("bit_and", (_as(outcome, ir.I32), ir.Const(1, ir.I32)), ir.I32)
            body.append(ir.Update(ir.Read(self.bits), "bit_or", self._at_number(odd), place=place))
        if self.level is not None:
            kept = ir.Assign(ir.Read(self.level), _as(level, self.level.dtype), place=place)
            body.append(ir.If(ir.Op("eq", (count, self.which), ir.U1), (kept,), place=place))
        if self.reach is not None or self.near is not None:
            body += self._measured(level, place, period)
        return tuple(body)

    def _flipped(self, outcome: ir.Read, place: ir.Place | None) -> ir.Body:
        if not self.is_flipped or self.found is None:
            return ()
        other = ir.Op("logical_not", (outcome,), outcome.dtype)
        new = ((outcome, other), (ir.Read(self.found), ir.Const(1, ir.I32)))
        is_it = ir.Op("eq", (ir.Read(self.count), self.which), ir.U1)
        return (ir.If(is_it, tuple(ir.Assign(to, v, place=place) for to, v in new), place=place),)

    def _at_number(self, bit: ir.Value) -> ir.Value:
        """A bit at the place of the number of the condition."""
        number = ir.Op("bit_and", (ir.Read(self.count), ir.Const(31, ir.I32)), ir.I32)
        return ir.Op("shift_left", (bit, number), ir.I32)

    def _measured(self, level: ir.Value, place: ir.Place | None, period: ir.Value | None) -> ir.Body:
        kept = ir.Local("level", level.dtype, (), "temporary")
        slopes = tuple(ir.Local("slope", level.dtype, (), "temporary") for _ in range(2))
        zeros = ir.Tensor((ir.Const(0.0, level.dtype),) * 2, (2,))
        options = {"what": self.kind, "may_be_flat": True, "is_found": True}
        boundary = ir.Boundary(
            "gradient", None, {"value": ir.Read(kept), "at": self.at}, zeros, slopes, {}, options, place=place
        )
        start = (ir.Declare(kept, (level,), place=place), boundary)
        assert self.found is not None
        if self.reach is not None:
            total = _real("add", *(_real("abs", ir.Read(s)) for s in slopes))
            assert self.along is not None
            away = (_real("mul", ir.Read(s), d) for s, d in zip(slopes, ir.entries(self.along), strict=True))
            centre = _real("sub", ir.Read(kept), _real("add", *away))
            reach = _real("mul", _as(self.reach, total.dtype), total)
            is_near = ir.Op("le" if self.is_wide else "lt", (_real("abs", centre), reach), ir.U1)
            noted = ir.Update(ir.Read(self.found), "bit_or", self._at_number(ir.Const(1, ir.I32)), place=place)
            return (*start, ir.If(is_near, (noted,), place=place))
        near = self.near
        assert near is not None
        assert self.along is not None
        assert self.behind is not None
        fall = ir.Local("fall", level.dtype, (), "temporary")
        parts = (_real("mul", ir.Read(s), d) for s, d in zip(slopes, ir.entries(self.along), strict=True))
        levels: list[ir.Value] = [ir.Read(kept)]
        if period is not None:  # of the changes on both sides one is ahead
            step = _real("abs", _as(period, level.dtype))
            ahead = ir.Op("select", (_is_positive(levels[0]), step, _real("neg", step)), step.dtype)
            levels.append(_real("sub", levels[0], ahead))
        body: list[ir.Statement] = [*start, ir.Declare(fall, (_real("neg", _real("add", *parts)),), place=place)]
        for own in levels:
            distance = _as(_real("truediv", own, ir.Read(fall)), near.dtype)
            is_next = ir.Op("bit_and", (_is_positive(distance), _is_less(distance, ir.Read(near))), ir.U1)
            held = [(near, distance), (self.found, ir.Read(self.count))]
            held += [(o, _as(ir.Read(s), o.dtype)) for o, s in zip(self.slope, slopes, strict=True)]
            kept_if = tuple(ir.Assign(ir.Read(local), v, place=place) for local, v in held)
            back = ir.Assign(ir.Read(self.behind), _real("max", ir.Read(self.behind), distance), place=place)
            is_last = _is_less(distance, ir.Const(0.0, distance.dtype))
            body += [ir.If(is_next, kept_if, place=place), ir.If(is_last, (back,), place=place)]
        return tuple(body)


_RESERVED = 32  # iterations of a loop whose number of them is not known outside
_MOST_NUMBERS = 2**12  # of a block that are kept free: float32 counts to 2**24
_TURNS = 10_000  # of a loop with a condition, where another condition is not true
_JUMPS = ("cast", "floor", "ceil", "round", "mod", "floordiv", "atan2", "truediv")
_KINKS = ("max", "min", "abs")
_WAVES = {"sin": 0.5, "cos": 0.0, "tan": 0.5}  # where they turn or jump, in half turns
_PRODUCTS = ("mul", "pow", "max", "min")  # their slope may be 0 where their sign changes, or lead past pairs of edges
_ONE_SIGN = ("sqrt", "exp")  # without a zero, or with zeros that are single points, such as those of a norm


def _is_equality(value: ir.Value) -> bool:
    """Whether real numbers are tested for equality in a value."""
    ops = (v for v in ir.walk(value) if isinstance(v, ir.Op) and v.name in ("eq", "ne"))
    return any(a.dtype.is_real for op in ops for a in op.args)


def _is_less(a: ir.Value, b: ir.Value) -> ir.Value:
    return ir.Op("lt", (a, b), ir.U1)


def _is_positive(value: ir.Value) -> ir.Value:
    return ir.Op("gt", (value, ir.Const(0.0, value.dtype)), ir.U1)


def _is_zero(value: ir.Value) -> bool:
    return isinstance(value, ir.Const) and value.value == 0


def _is_no_less_than_0(value: ir.Value) -> bool:
    return isinstance(value, ir.Const) and value.value >= 0


def _computed(s: ir.Statement) -> list[ir.Value]:
    """The values of a statement, with its conversion to an integer, and its maximum or minimum."""
    values = ir.values_of(s)
    if isinstance(s, ir.Assign) and s.value.dtype.is_real and not s.target.dtype.is_real:
        values.append(ir.Op("cast", (s.value,), s.target.dtype))
    if isinstance(s, ir.Atomic) and s.function in ("atomic_max", "atomic_min"):
        values.append(ir.Op(s.function.removeprefix("atomic_"), (s.target, s.value), s.target.dtype))
    return values


def _depending(body: ir.Body, at: ir.Tensor) -> set[ir.Local]:
    """The real locals whose values depend on the position, without those that only jump.

    Those only jump where an earlier, noted condition changes.  Values without their gradient count as constant.
    """
    given = (flow for s in ir.statements(body) for flow in ir.flows(s, {"stop_gradient": ""}))
    edges = [
        (v.local, to)
        for to, values in given
        for v in ir.through(values, _operands)
        if isinstance(v, ir.Read) and isinstance(to, ir.Local) and to.dtype.is_real
    ]
    return set(ir.reached((e.local for e in at.entries if isinstance(e, ir.Read)), edges))


def _operands(value: ir.Value) -> tuple[ir.Value, ...]:
    """The operands that a value is computed from by real numbers."""
    if not isinstance(value, ir.Op):
        return ()
    return value.args[1:] if value.name in ("select", "ifte") else value.args


def _factors(value: ir.Value) -> tuple[ir.Value, ...]:
    """The numbers whose signs give that of a value."""
    if not isinstance(value, ir.Op):
        return ()
    if value.name in ("max", "min"):
        return tuple(a for a, b in (value.args, value.args[::-1]) if _is_zero(b))
    if value.name == "pow":
        return value.args[:1]
    return value.args if value.name in ("mul", "truediv", "neg", "cast", "abs", "sqrt") else ()


def _reads(value: ir.Value, locals_: set[ir.Local]) -> bool:
    """Whether a value is computed from one of the locals by real numbers."""
    return any(isinstance(v, ir.Read) and v.local in locals_ for v in ir.through((value,), _operands))


def _require_supported(s: ir.Statement) -> None:
    """Raise if a statement has a custom derivative, or a construct in which no edge can be found."""
    what = "the function of a position"
    if isinstance(s, ir.Boundary) and s.kind not in ("stop_gradient", "replace_gradient"):
        name = s.options.get("what", s.kind)
        raise UnsupportedError(
            f"{ir.cited(s.place)}pixel: {name} in {what} has a derivative of its own. pixel finds edges by itself: "
            "write a condition, or call the function outside of pixel."
        )
    for op in (v for given in ir.values_of(s) for v in ir.walk(given) if isinstance(v, ir.Op)):
        if op.name in ("random", "bit_cast"):
            raise UnsupportedError(
                f"{ir.cited(op.place or s.place)}pixel: {op.name} in {what} has no level, so the places where it jumps "
                "are not known. Compute it in a kernel before, and read it from a field."
            )


def _turns(loop: ir.For | ir.While) -> ir.Value:
    """How many iterations a loop has at most, as far as that is known before it."""
    domain = loop.domain if isinstance(loop, ir.For) else ()
    if isinstance(loop, ir.While) or loop.kind != "range" or len(domain) > 2:
        return ir.Const(_RESERVED, ir.I32)
    start, end = (*(ir.Const(0, ir.I32),) * (2 - len(domain)), *(_as(as_value(v), ir.I32) for v in domain))
    if isinstance(start, ir.Const) and isinstance(end, ir.Const):
        return ir.Const(max(int(end.value) - int(start.value), 0), ir.I32)
    return _whole("max", _whole("sub", end, start), 0)


def _ended(s: ir.Statement) -> ir.Body:
    """A statement that reads within its memory and ends, also where a condition that guards it is not true."""
    s = ir.with_places(s, _in_range)
    if not isinstance(s, ir.While):
        return (s,)
    turns = ir.Read(ir.Local("turns", ir.I32, (), "temporary"))
    is_endless = ir.Op("gt", (turns, ir.Const(_TURNS, ir.I32)), ir.U1)
    ends = ir.If(is_endless, (ir.Jump("break", place=s.place),), place=s.place)
    counted = (ir.Update(turns, "add", ir.Const(1, ir.I32), place=s.place), ends)
    start = ir.Declare(turns.local, (ir.Const(0, ir.I32),), place=s.place)
    return (start, replace(s, body=(*counted, *s.body)))


def _in_range(node: ir.Value) -> ir.Value:
    """A read entry, of the nearest one that exists; a quotient of integers, with 1 in the place of a divisor 0."""

    def within(index: Any, size: int | ir.Size, start: int = 0) -> Any:
        if not isinstance(index, ir.Value):
            return index
        most = _whole("sub", size, 1) if isinstance(size, ir.Size) else start + size - 1
        return _whole("max", _whole("min", _as(index, ir.I32), most), start)

    if isinstance(node, ir.Read) and node.index:
        return replace(node, index=tuple(map(within, node.index, node.local.shape)))
    if isinstance(node, ir.Load):
        shape = node.container.shape or tuple(ir.Size(node.container, k) for k in range(len(node.indices)))
        offset = node.container.offset or (0,) * len(shape)
        component = tuple(map(within, node.component, node.container.element_shape))
        return replace(node, indices=tuple(map(within, node.indices, shape, offset)), component=component)
    if isinstance(node, ir.Op) and node.name in ("floordiv", "mod") and not node.args[1].dtype.is_real:
        divisor = node.args[1]
        is_zero = ir.Op("eq", (divisor, ir.Const(0, divisor.dtype)), ir.U1)
        divisor = ir.Op("select", (is_zero, ir.Const(1, divisor.dtype), divisor), divisor.dtype)
        return replace(node, args=(node.args[0], divisor))
    return node


def _settled(value: ir.Value, outcomes: dict[ir.Value, ir.Value]) -> ir.Value:
    """The value with the locals of outcomes in the place of conditions."""
    own = outcomes.get(value, value)
    return own if own is not value else ir.with_children(value, lambda part: _settled(part, outcomes))


def _real(name: str, *args: ir.Value | float) -> ir.Op:
    """An operation on real numbers; whole numbers among them are converted."""
    kind = max((a.dtype for a in args if isinstance(a, ir.Value) and a.dtype.is_real), key=lambda t: t.bits)
    return ir.Op(name, tuple(_as(a, kind) if isinstance(a, ir.Value) else ir.Const(a, kind) for a in args), kind)


def _whole(name: str, a: ir.Value, b: ir.Value | int) -> ir.Op:
    return ir.Op(name, (a, b if isinstance(b, ir.Value) else ir.Const(b, ir.I32)), ir.I32)


def _as(value: ir.Value, kind: ir.Type) -> ir.Value:
    return value if value.dtype == kind else ir.Op("cast", (value,), kind)


def _mixed(seen: ir.Value, outcome: ir.Value) -> list[ir.Value]:
    """The steps that put one more outcome into the hash: Marsaglia's xorshift, on fewer bits, so nothing overflows."""

    def left(by: int) -> ir.Value:
        return _whole("bit_xor", seen, _whole("shift_left", _whole("bit_and", seen, 2 ** (_BITS - by) - 1), by))

    taken = _whole("bit_xor", seen, _whole("bit_and", outcome, 2**_BITS - 1))
    return [taken, left(13), _whole("bit_xor", seen, _whole("shift_right", seen, 17)), left(5)]
