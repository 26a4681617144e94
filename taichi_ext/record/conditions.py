"""The conditions of a recorded function of a position: what it can jump at, as levels.

A recorded body is rewritten so that it counts its conditions as it runs through them, keeps a hash of how they turned
out, and either the level of one of them, or how near the nearest edge is.  A level is 0 where its condition changes.
What a body can jump at are comparisons of real numbers, conversions to integers, roundings, remainders and the cut of
``atan2``; everything else is continuous, or depends on integers that come from these.
"""

from __future__ import annotations

from dataclasses import dataclass

from taichi_ext.errors import UnsupportedError
from taichi_ext.program import (
    I32,
    U1,
    Assign,
    Atomic,
    Body,
    Boundary,
    Const,
    Declare,
    Effect,
    If,
    Jump,
    Load,
    Local,
    Op,
    Place,
    Read,
    Statement,
    Tensor,
    Update,
    Value,
    While,
    bodies,
    children,
    declared,
    mapped,
    statements,
    values_of,
    walk,
)

_ORDERED = ("lt", "le", "gt", "ge")
_BITS = 30  # of the hash


@dataclass(frozen=True)
class Probe:
    """The locals of one call that take what its conditions say; ``which`` are counted in the hash, from 1 on.

    The hash takes the conditions up to ``which``, and ``level`` is that of number ``which``.  ``near`` is the least
    distance of an edge, by its level and its slope at the position ``at``, in steps of (1/2, 1/2) pixels and the like.
    Each is None where it is not asked for.
    """

    count: Local
    seen: Local
    which: Value
    level: Local | None
    near: Local | None
    at: Tensor

    def in_body(self, body: Body) -> Body:
        """A body with its conditions noted.

        Raises:
            UnsupportedError: the body does what a function of a position cannot do.
        """
        moving = _depending(body, self.at, is_real=True)
        varying = _depending(body, self.at, is_real=False)
        return mapped(body, lambda s: self._with_notes(s, moving, varying))

    def _with_notes(self, s: Statement, moving: set[Local], varying: set[Local]) -> Body:
        _require_supported(s, varying)
        noted: set[Value] = set()

        def notes(value: Value) -> Body:
            return self._notes(value, s.place, noted, moving)

        values = values_of(s)
        if isinstance(s, Assign) and s.value.dtype.is_real and not s.target.dtype.is_real:
            values.append(Op("cast", (s.value,), s.target.dtype))
        return (*(n for v in values for n in notes(v)), s)

    def _notes(self, value: Value, place: Place | None, noted: set[Value], moving: set[Local]) -> Body:
        """The notes of the conditions in a value; those that may not be evaluated only where they are."""
        if value in noted or not isinstance(value, (Op, Read, Load)):
            return ()
        noted.add(value)
        rest = children(value)
        if isinstance(value, Op) and value.name in ("logical_and", "logical_or", "ifte"):
            first, *others = rest
            sides = [self._notes(v, place, noted, moving) for v in others]
            if value.name == "logical_or":
                sides.insert(0, ())
            guarded = (If(first, sides[0], sides[1] if len(sides) > 1 else (), place=place),) if any(sides) else ()
            return (*self._notes(first, place, noted, moving), *guarded)
        own = self._note(value, place) if isinstance(value, Op) and _reads(value, moving, is_real=True) else ()
        return (*(n for v in rest for n in self._notes(v, place, noted, moving)), *own)

    def _note(self, op: Op, place: Place | None) -> Body:
        """The note of one operation."""
        place, args = op.place or place, op.args
        is_real = any(a.dtype.is_real for a in args)
        if op.name in _ORDERED and is_real:
            return self._noted(op, _real("sub", *args), place)
        if not is_real or op.name not in _JUMPS:
            return ()
        if op.name == "cast" and (op.dtype.is_real or op.dtype == U1):
            return ()
        if op.name == "atan2":
            y, x = args
            is_cut = Op("lt", (x, Const(0.0, x.dtype)), U1)
            above = Op("gt", (y, Const(0.0, y.dtype)), U1)
            return (If(is_cut, self._noted(above, y, place), place=place),)
        if op.name in ("mod", "floordiv"):
            steps = _real("floor", _real("truediv", *args))
            nearest = _real("round", _real("truediv", *args))
            return self._noted(steps, _real("sub", args[0], _real("mul", args[1], nearest)), place)
        half = Const(0.5, args[0].dtype)
        border = _real("add", _real("floor", args[0]), half) if op.name == "round" else _real("round", args[0])
        return self._noted(op, _real("sub", args[0], border), place)

    def _noted(self, outcome: Value, level: Value, place: Place | None) -> Body:
        """Statements that record the outcome of a condition."""
        count, seen = Read(self.count), Read(self.seen)
        mixed = [Assign(seen, new, place=place) for new in _mixed(seen, _integer(outcome))]
        body: list[Statement] = [
            Update(count, "add", Const(1, I32), place=place),
            If(Op("le", (count, self.which), U1), tuple(mixed), place=place),
        ]
        if self.level is not None:
            kept = Assign(Read(self.level), _as(level, self.level), place=place)
            body.append(If(Op("eq", (count, self.which), U1), (kept,), place=place))
        if self.near is not None:
            body += self._measured(level, self.near, place)
        return tuple(body)

    def _measured(self, level: Value, near: Local, place: Place | None) -> Body:
        kept = Local("level", level.dtype, (), "temporary")
        slopes = tuple(Local("slope", level.dtype, (), "temporary") for _ in range(2))
        zeros = Tensor((Const(0.0, level.dtype),) * 2, (2,))
        options = {"what": "pixel", "may_be_flat": True, "is_found": True}
        dx, dy = (_real("abs", Read(s)) for s in slopes)
        total = _real("add", dx, dy)
        ratio = _as(_real("truediv", _real("abs", Read(kept)), total), near)
        least = Assign(Read(near), _real("min", Read(near), ratio), place=place)
        return (
            Declare(kept, (level,), place=place),
            Boundary("gradient", None, {"value": Read(kept), "at": self.at}, zeros, slopes, {}, options, place=place),
            If(Op("gt", (total, Const(0.0, total.dtype)), U1), (least,), place=place),
        )


_JUMPS = ("cast", "floor", "ceil", "round", "mod", "floordiv", "atan2")


def _depending(body: Body, at: Tensor, *, is_real: bool) -> set[Local]:
    """The locals whose values depend on the position; with ``is_real``, those that do not only jump where it moves.

    What only jumps does so where a condition changes that is noted before.  Values without their gradient do not move.
    """
    found = {e.local for e in at.entries if isinstance(e, Read)}
    everything = statements(body)
    before = -1
    while len(found) > before:
        before = len(found)
        for s in everything:
            targets = [t for t in declared(s) if not is_real or t.dtype.is_real]
            if isinstance(s, (Assign, Update)) and isinstance(s.target, Read):
                targets = [s.target.local] if not is_real or s.target.dtype.is_real else []
            is_cut = isinstance(s, Boundary) and s.kind == "stop_gradient"
            if not is_cut and any(_reads(v, found, is_real=is_real) for v in values_of(s)):
                found.update(targets)
    return found


def _reads(value: Value, locals_: set[Local], *, is_real: bool) -> bool:
    """Whether a value is computed from one of the locals, with ``is_real`` by real numbers alone."""
    if isinstance(value, Read) and value.local in locals_:
        return True
    parts = value.args if isinstance(value, Op) and is_real else children(value)
    if isinstance(value, Load) and is_real:
        return False  # it depends on its indices alone
    is_choice = is_real and isinstance(value, Op) and value.name in ("select", "ifte")
    return any(_reads(v, locals_, is_real=is_real) for v in (parts[1:] if is_choice else parts))


def _require_supported(s: Statement, varying: set[Local]) -> None:
    """Raise where a statement has an effect, a derivative of its own, or what no edge can be found in."""
    what = "the function of a position"
    stores = isinstance(s, (Assign, Update, Atomic)) and isinstance(s.target, Load)
    if stores or isinstance(s, Effect):
        raise UnsupportedError(
            f"{_start(s.place)}pixel: {what} must only read and compute; it is called at several positions for each "
            "pixel. Store and print in the kernel."
        )
    if isinstance(s, Boundary) and s.kind not in ("stop_gradient", "replace_gradient"):
        name = s.options.get("what", s.kind)
        raise UnsupportedError(
            f"{_start(s.place)}pixel: {name} in {what} has a derivative of its own. pixel finds edges by itself: "
            "write a condition, or call the function outside of pixel."
        )
    for op in (v for given in values_of(s) for v in walk(given) if isinstance(v, Op)):
        if op.name in ("random", "bit_cast"):
            raise UnsupportedError(
                f"{_start(op.place or s.place)}pixel: {op.name} in {what} has no level, so what it jumps at is not "
                "known. Compute it in a kernel before, and read it from a field."
            )
    condition = s.condition if isinstance(s, While) or (isinstance(s, If) and _leaves_loop(s)) else None
    if condition is not None and _reads(condition, varying, is_real=False):
        raise UnsupportedError(
            f"{_start(s.place)}pixel: the number of iterations depends on the position, so the value jumps a little "
            "everywhere. Run a fixed number of iterations, in which an if keeps what is found; for a signed distance, "
            "take the level from ray_level, and write if level > 0."
        )


def _leaves_loop(s: Statement) -> bool:
    """Whether a branch ends the loop around it."""
    return any(
        (isinstance(inner, Jump) and inner.kind == "break") or (isinstance(inner, If) and _leaves_loop(inner))
        for body in bodies(s)
        for inner in body
    )


def _start(place: Place | None) -> str:
    return "" if place is None else place.message() + "\n"


def _real(name: str, *args: Value) -> Value:
    """An operation on real numbers; whole numbers among them are converted."""
    kind = max((a.dtype for a in args if a.dtype.is_real), key=lambda t: t.bits)
    return Op(name, tuple(a if a.dtype == kind else Op("cast", (a,), kind) for a in args), kind)


def _as(value: Value, local: Local) -> Value:
    return value if value.dtype == local.dtype else Op("cast", (value,), local.dtype)


def _integer(value: Value) -> Value:
    return value if value.dtype == I32 else Op("cast", (value,), I32)


def _mixed(seen: Value, outcome: Value) -> list[Value]:
    """The steps that put one more outcome into the hash: Marsaglia's xorshift, on fewer bits, so nothing overflows."""

    def bits(name: str, a: Value, b: Value | int) -> Value:
        return Op(name, (a, b if isinstance(b, Value) else Const(b, I32)), I32)

    def left(by: int) -> Value:
        return bits("bit_xor", seen, bits("shift_left", bits("bit_and", seen, 2 ** (_BITS - by) - 1), by))

    taken = bits("bit_xor", seen, bits("bit_and", outcome, 2**_BITS - 1))
    return [taken, left(13), bits("bit_xor", seen, bits("shift_right", seen, 17)), left(5)]
