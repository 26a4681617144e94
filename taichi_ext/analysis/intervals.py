"""Intervals of integer expressions that follow from conditions, bounds of loops and types.

Sums are in normal form (``Affine``). The facts at one place are intervals, also of sums whose parts are unknown. A sum
that may overflow its type wraps around: then it is only bounded by its type. How two unknown numbers are related is not
known: ``x[j - i]`` under ``i <= j`` counts as possibly out of range, and gets a check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from taichi_ext.analysis.affine import Affine, Atom, source_of
from taichi_ext.analysis.expressions import Expressions
from taichi_ext.analysis.interval_arithmetic import RANGE, Interval, common, fits, hull, interval_of, range_of
from taichi_ext.program import U1, Const, Local, Op, Read, Value

COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
_SWAPPED = {"gt": "lt", "ge": "le"}
_BOTH = ("logical_and", "bit_and")
_JOINED = (*_BOTH, "logical_or", "bit_or")


class Facts:
    """Facts that hold at one place; facts are not changed, but for ``forget`` and ``set``, by whom they belong to.

    Attributes:
        exact: loop variables that take all of these numbers, each with all of those of the others.
        is_reached: whether the place is reached for each of them.
    """

    def __init__(self, expressions: Expressions) -> None:
        self.expressions = expressions
        self.exact: dict[Atom, Interval] = {}
        self.is_reached = True
        self._intervals: dict[Any, dict[int, Interval]] = {}  # of a sum and constants
        self._known: dict[Atom, Interval] = {}  # of operations, while the facts are unchanged

    def copy(self) -> Facts:
        new = Facts(self.expressions)
        new.exact, new.is_reached = dict(self.exact), self.is_reached
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
        found = _sum(form, self._of_atom)
        found = found if fits(found) else RANGE
        for terms, sign in ((form.terms, 1), ((form * -1).terms, -1)):
            for constant, (low, high) in self._intervals.get(terms, {}).items():
                ends = (low, high) if sign > 0 else (-high, -low)
                shift = form.constant - sign * constant
                moved = ends[0] + shift, ends[1] + shift
                found = common(found, moved) if fits(moved) else found
        return found

    def _of_atom(self, atom: Atom) -> Interval:
        known = self._intervals.get(((atom, 1),), {}).get(0)
        if isinstance(atom, Value):
            base = self._of_value(atom)
        else:
            base = range_of(source_of(atom).dtype)
        return base if known is None else common(base, known)

    def _of_value(self, atom: Value) -> Interval:
        """Facts about an operation; those about its arguments may rest on it again, and end there."""
        found, pending = range_of(atom.dtype), self.expressions.pending
        if atom in self._known:
            return self._known[atom]
        if atom not in pending:
            pending.add(atom)
            found = common(_of_operation(self, atom), found)
            pending.remove(atom)
            if not pending:
                self._known[atom] = found
        return found

    def extremes(self, value: Value | int) -> Interval | None:
        """The least and the greatest number that an index does take; None where that is not known."""
        form = self.expressions.linear(value)
        if form is None or not self.is_reached or any(atom not in self.exact for atom, _ in form.terms):
            return None
        found = _sum(form, self.exact.__getitem__)
        return found if fits(found) else None

    # --- new facts

    def note(self, form: Affine, interval: Interval) -> None:
        """A sum, as computed, lies in an interval."""
        if form.is_constant or not all(map(self._can_be_noted, (atom for atom, _ in form.terms))):
            return
        interval = common(self.of(form), interval)
        moved = interval[0] - form.constant, interval[1] - form.constant
        constant = 0 if fits(moved) else form.constant
        interval = moved if constant == 0 else interval
        known = dict(self._intervals.get(form.terms, {}))
        known[constant] = common(known[constant], interval) if constant in known else interval
        self._intervals[form.terms] = known
        self._known.clear()

    def _can_be_noted(self, atom: Atom) -> bool:
        return not isinstance(atom, Value) or self.expressions.is_lasting(atom)

    def relate(self, low: Affine, high: Affine, distance: int = 0) -> None:
        """``low + distance <= high`` for two sums as computed."""
        a, b = self.of(low), self.of(high)
        self.note(low, (RANGE[0], b[1] - distance))
        self.note(high, (a[0] + distance, RANGE[1]))

    def forget(self, local: Local) -> None:
        """A local changes."""
        self._known.clear()
        self._intervals = {terms: known for terms, known in self._intervals.items() if not _has(terms, local)}
        for atom in [a for a in self.exact if source_of(a) is local]:
            del self.exact[atom]

    def set(self, local: Local, interval: Interval) -> None:
        """A local has another value from now on."""
        self.forget(local)
        self._intervals[((local, 1),)] = {0: interval}
        self._known.clear()

    def joined(self, other: Facts) -> Facts:
        """Facts that hold where two paths meet."""
        new = Facts(self.expressions)
        new.exact = {a: i for a, i in self.exact.items() if other.exact.get(a) == i}
        new.is_reached = self.is_reached and other.is_reached
        for terms, known in self._intervals.items():
            others = other._intervals.get(terms, {})
            both = {c: hull(i, others[c]) for c, i in known.items() if c in others}
            if both:
                new._intervals[terms] = both
        return new

    # --- conditions

    def where(self, condition: Value, holds: bool = True) -> Facts:
        """Facts that follow from a condition, or from its opposite."""
        new = self.copy()
        new.is_reached = new._assume(condition, holds) and new.is_reached
        return new

    def _assume(self, condition: Value, holds: bool) -> bool:
        """Add a condition; returns whether the facts express all of it."""
        match condition:
            case Read(local=local, index=()) if local in self.expressions.conditions:
                return self._assume(self.expressions.conditions[local], holds)
            case Const(value=value):
                return bool(value) == holds
            case Op(name="logical_not", args=(a,)):
                return self._assume(a, not holds)
            case Op(name="cast", args=(a,)) if a.dtype == U1:
                return self._assume(a, holds)
            case Op(name="ne" | "eq" as name, args=(a, Const(value=0))) if _is_truth(a):
                return self._assume(a, (name == "ne") == holds)
            case Op(name=name, args=(a, b)) if name in _JOINED and _is_truth(a) and _is_truth(b):
                if (name in _BOTH) != holds:
                    return False
                parts = [self._assume(a, holds), self._assume(b, holds)]
                return all(parts)
            case Op(name=name, args=(a, b)) if name in COMPARISONS:
                name = name if holds else _NEGATED[name]
                low, high = (b, a) if name in _SWAPPED else (a, b)
                sides = self.expressions.linear(low), self.expressions.linear(high)
                if sides[0] is not None and sides[1] is not None:
                    return self._compare(_SWAPPED.get(name, name), sides[0], sides[1])
        return False

    def _compare(self, name: str, low: Affine, high: Affine) -> bool:
        if name == "ne":
            self._trim(low, self.of(high))
            self._trim(high, self.of(low))
        else:
            self.relate(low, high, 1 if name == "lt" else 0)
            if name == "eq":
                self.relate(high, low)
        return self._narrow_exact(name, high + low * -1 + Affine((), -1 if name == "lt" else 0))

    def _trim(self, form: Affine, other: Interval) -> None:
        """A sum is another number than the only one of an interval."""
        low, high = self.of(form)
        if other[0] == other[1] and other[0] in (low, high):
            self.note(form, (low + (other[0] == low), high - (other[0] == high)))

    def _narrow_exact(self, name: str, form: Affine) -> bool:
        """A sum is at least 0 (0 for ``eq``, another number for ``ne``): which numbers does its only variable take?"""
        if len(form.terms) != 1 or abs(form.terms[0][1]) != 1 or form.terms[0][0] not in self.exact:
            return form.is_constant and name not in ("eq", "ne") and form.constant >= 0
        ((atom, sign),) = form.terms
        low, high = self.exact[atom]
        end = -sign * form.constant
        if name == "eq":
            low, high = max(low, end), min(high, end)
        elif name == "ne":
            if low < end < high:
                return False
            low, high = low + (end == low), high - (end == high)
        else:
            low, high = (max(low, end), high) if sign > 0 else (low, min(high, end))
        self.exact[atom] = low, high
        return low <= high


def _sum(form: Affine, interval: Callable[[Atom], Interval]) -> Interval:
    """Between which numbers a sum lies that does not wrap around, from the intervals of its parts."""
    low = high = form.constant
    for atom, factor in form.terms:
        ends = sorted(factor * end for end in interval(atom))
        low, high = low + ends[0], high + ends[1]
    return low, high


def _is_truth(value: Value) -> bool:
    """Whether a value is true or false, also as 1 or 0."""
    return value.dtype == U1 or (isinstance(value, Op) and value.name == "cast" and value.args[0].dtype == U1)


def _has(terms: Iterable[tuple[Atom, int]], local: Local) -> bool:
    return any(source_of(atom) is local for atom, _ in terms)


# --- operations without normal form


def _of_operation(facts: Facts, value: Value) -> Interval:
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
    found = interval_of(value.name, [facts.interval(a) for a in value.args])
    return found if found is not None and fits(found, value.dtype) else whole
