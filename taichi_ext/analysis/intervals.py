"""Intervals of integer expressions that follow from conditions, bounds of loops and types.

Sums are in normal form (``Affine``). The facts at one place are intervals, also of sums whose parts are unknown. A sum
that may overflow its type wraps around: then it is only bounded by its type. How two unknown numbers are related is not
known: ``x[j - i]`` under ``i <= j`` counts as possibly out of range, and gets a check.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from taichi_ext.analysis.affine import Affine, Atom, IntegerForms, source_of
from taichi_ext.program import COMPARISONS, I32, U1, Const, Local, Op, Read, Type, Value

_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
_SWAPPED = {"gt": "lt", "ge": "le"}
_BOTH = ("logical_and", "bit_and")
_DIVISIONS = ("mod", "raw_mod", "floordiv", "raw_div")
_JOINED = (*_BOTH, "logical_or", "bit_or")


class IndexFacts:
    """Facts that hold at one place; facts are not changed, but for ``forget`` and ``set``, by whom they belong to."""

    def __init__(self, expressions: IntegerForms) -> None:
        self.expressions = expressions
        self._intervals: dict[Any, dict[int, Interval]] = {}  # of a sum and constants
        self._known: dict[Atom, Interval] = {}  # of operations, while the facts are unchanged

    def copy(self) -> IndexFacts:
        new = IndexFacts(self.expressions)
        new._intervals = dict(self._intervals)
        return new

    # --- queries

    def interval(self, value: Value | int) -> Interval:
        """Between which numbers an integer expression lies."""
        form = self.expressions.linear(value)
        if form is not None:
            return self.of(form)
        assert isinstance(value, Value)
        if isinstance(value, Const):  # of another type than i32, such as that of default_ip
            return int(value.value), int(value.value)
        if isinstance(value, Read) and not value.index:
            return self._of_atom(value.local)
        return common(_of_operation(self, value), range_of(value.dtype))

    def of(self, form: Affine) -> Interval:
        """Between which numbers a sum lies, as computed in i32."""
        result = form.between(self._of_atom)
        result = result if fits(result) else RANGE
        for terms, sign in ((form.terms, 1), ((form * -1).terms, -1)):
            for constant, (low, high) in self._intervals.get(terms, {}).items():
                ends = (low, high) if sign > 0 else (-high, -low)
                shift = form.constant - sign * constant
                moved = ends[0] + shift, ends[1] + shift
                result = common(result, moved) if fits(moved) else result
        return result

    def _of_atom(self, atom: Atom) -> Interval:
        known = self._intervals.get(((atom, 1),), {}).get(0)
        if isinstance(atom, Value):
            base = self._of_value(atom)
        else:
            base = range_of(source_of(atom).dtype)
        return base if known is None else common(base, known)

    def _of_value(self, atom: Value) -> Interval:
        """Facts about an operation; those about its arguments may rest on it again, and end there."""
        result, pending = range_of(atom.dtype), self.expressions.pending
        if atom in self._known:
            return self._known[atom]
        if atom not in pending:
            pending.add(atom)
            result = common(_of_operation(self, atom), result)
            pending.remove(atom)
            if not pending:
                self._known[atom] = result
        return result

    # --- new facts

    def note(self, form: Affine, interval: Interval) -> None:
        """A sum, as computed, lies in an interval."""
        if form.is_constant or any(isinstance(a, Value) and not self.expressions.is_lasting(a) for a, _ in form.terms):
            return
        interval = common(self.of(form), interval)
        moved = interval[0] - form.constant, interval[1] - form.constant
        constant = 0 if fits(moved) else form.constant
        interval = moved if constant == 0 else interval
        known = dict(self._intervals.get(form.terms, {}))
        known[constant] = common(known[constant], interval) if constant in known else interval
        self._intervals[form.terms] = known
        self._known.clear()

    def relate(self, low: Affine, high: Affine, distance: int = 0) -> None:
        """``low + distance <= high`` for two sums as computed."""
        a, b = self.of(low), self.of(high)
        self.note(low, (RANGE[0], b[1] - distance))
        self.note(high, (a[0] + distance, RANGE[1]))

    def forget(self, local: Local) -> None:
        """A local changes."""
        self._known.clear()
        self._intervals = {t: i for t, i in self._intervals.items() if all(source_of(a) is not local for a, _ in t)}

    def set(self, local: Local, interval: Interval) -> None:
        """A local has another value from now on."""
        self.forget(local)
        self._intervals[((local, 1),)] = {0: interval}
        self._known.clear()

    def joined(self, other: IndexFacts) -> IndexFacts:
        """Facts that hold where two paths meet."""
        new = IndexFacts(self.expressions)
        for terms, known in self._intervals.items():
            others = other._intervals.get(terms, {})
            both = {c: hull(i, others[c]) for c, i in known.items() if c in others}
            if both:
                new._intervals[terms] = both
        return new

    # --- conditions

    def where(self, condition: Value, holds: bool = True) -> IndexFacts:
        """Facts that follow from a condition, or from its opposite."""
        new = self.copy()
        new._assume(condition, holds)
        return new

    def _assume(self, condition: Value, holds: bool) -> None:
        """Add what follows from a condition."""
        match condition:
            case Read(local=local, index=()) if local in self.expressions.conditions:
                self._assume(self.expressions.conditions[local], holds)
            case Op(name="logical_not", args=(a,)):
                self._assume(a, not holds)
            case Op(name="cast", args=(a,)) if a.dtype == U1:
                self._assume(a, holds)
            case Op(name="ne" | "eq" as name, args=(a, Const(value=0))) if _is_truth(a):
                self._assume(a, (name == "ne") == holds)
            case Op(name=name, args=args) if name in _JOINED and all(map(_is_truth, args)):
                for a in args if (name in _BOTH) == holds else ():
                    self._assume(a, holds)
            case Op(name=name, args=(a, b)) if name in COMPARISONS:
                name = name if holds else _NEGATED[name]
                low, high = (b, a) if name in _SWAPPED else (a, b)
                sides = self.expressions.linear(low), self.expressions.linear(high)
                if sides[0] is not None and sides[1] is not None:
                    self._compare(_SWAPPED.get(name, name), sides[0], sides[1])

    def _compare(self, name: str, low: Affine, high: Affine) -> None:
        if name == "ne":
            self._trim(low, self.of(high))
            self._trim(high, self.of(low))
        else:
            self.relate(low, high, 1 if name == "lt" else 0)
            if name == "eq":
                self.relate(high, low)

    def _trim(self, form: Affine, other: Interval) -> None:
        """A sum is another number than the only one of an interval."""
        low, high = self.of(form)
        if other[0] == other[1] and other[0] in (low, high):
            self.note(form, (low + (other[0] == low), high - (other[0] == high)))


def _is_truth(value: Value) -> bool:
    """Whether a value is true or false, also as 1 or 0."""
    return value.dtype == U1 or (isinstance(value, Op) and value.name == "cast" and value.args[0].dtype == U1)


# --- operations without normal form


def _of_operation(facts: IndexFacts, value: Value) -> Interval:
    """Between which numbers the result of an operation lies."""
    whole = range_of(value.dtype)
    if not isinstance(value, Op):
        return whole
    if value.name in ("select", "ifte"):
        condition, then, orelse = value.args
        if len(facts.expressions.pending) > 1:  # within another operation: not looked at so closely
            return hull(facts.interval(then), facts.interval(orelse))
        return hull(facts.where(condition).interval(then), facts.where(condition, holds=False).interval(orelse))
    if value.name == "cast" and value.dtype == U1:
        return 0, 1
    if not value.args or any(a.dtype.is_real for a in value.args):  # a random number has no operands
        return whole
    if (value.dtype.bits == 8 and value.name in _DIVISIONS) or (value.name == "raw_mod" and not value.dtype.is_signed):
        return whole  # Taichi computes other numbers: 200 % 6 is 194 of bytes
    interval = interval_of(value.name, [facts.interval(a) for a in value.args])
    return interval if interval is not None and fits(interval, value.dtype) else whole


# Arithmetic on intervals of integers.

Interval = tuple[int, int]  # the least and the greatest number


def range_of(dtype: Type) -> Interval:
    if not dtype.is_signed:
        return 0, 2**dtype.bits - 1
    return -(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1) - 1


RANGE = range_of(I32)


def fits(interval: Interval, dtype: Type = I32) -> bool:
    least, most = range_of(dtype)
    return least <= interval[0] and interval[1] <= most


def common(a: Interval, b: Interval) -> Interval:
    """The numbers that two intervals share."""
    return max(a[0], b[0]), min(a[1], b[1])


def hull(a: Interval, b: Interval) -> Interval:
    """The least interval that has two others in it."""
    return min(a[0], b[0]), max(a[1], b[1])


def interval_of(name: str, args: list[Interval]) -> Interval | None:
    """Between which numbers the result of an operation lies if it does not wrap; None where that is not known."""
    low, high = args[0]
    match name:
        case "cast":
            return low, high
        case "min":
            return min(a[0] for a in args), min(a[1] for a in args)
        case "max":
            return max(a[0] for a in args), max(a[1] for a in args)
        case "abs":
            return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))
        case "mul":
            return _extremes(a * b for a in args[0] for b in args[1])
    first, last = args[-1]
    match name:
        case "mod" if first > 0:
            return (low, high) if 0 <= low and high < first else (0, last - 1)
        case "floordiv" if first > 0:
            return _extremes(a // b for a in args[0] for b in args[1])
        case "bit_and" if low >= 0 or first >= 0:
            return 0, min(end for start, end in args if start >= 0)
        case "shift_right" | "bit_sar" if first >= 0 and last < 64:
            return _extremes(end >> count for end in args[0] for count in args[1])
    return None


def _extremes(numbers: Iterable[int]) -> Interval:
    ends = list(numbers)
    return min(ends), max(ends)
