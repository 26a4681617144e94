"""Whether indices of entries with tangents are known to be in range, or known to be out of range.

A walk over the program keeps the facts that follow from conditions and bounds of loops at each place (``IndexFacts``).
Entries whose indices may be out of range get checks: out of range, no tangent is read or stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import taichi_ext.program as ir
from taichi_ext.analysis.activity import Activity
from taichi_ext.analysis.affine import Affine, Atom, loop_atoms
from taichi_ext.analysis.intervals import IndexFacts, Interval, fits, range_of
from taichi_ext.analysis.loops import Extents, integer_forms, leaves, ranges
from taichi_ext.simplify.usage import assigned_locals


@dataclass(frozen=True)
class UncertainAccess:
    """An index of an entry with tangents that may be out of range, or is known to be."""

    place: ir.Place | None  # where it stands
    name: str  # the container or local
    axis: int | None  # the number of the index, None where there is one alone
    first: int  # the least index that there is
    end: int  # the end of the indices
    sides: str  # in words, where it may be
    number: int | None  # an index outside that it does have, None where that is not known

    def warning(self) -> str:
        """Of an index that does leave: a sentence after the place in the source."""
        return (
            f"{ir.cited(self.place)}Index {self.number}{self._of_axis()} is outside of {self.name}, which has "
            f"{self.first} to {self.end - 1}. Taichi reads whatever is there in memory; J has no derivatives of it. "
            "Guard the access with an if statement, or clamp the index."
        )

    def guard(self) -> str:
        """A few words for ``explain``."""
        return f"{self.name} where the index{self._of_axis()} is {self.sides}: no tangents there"

    def _of_axis(self) -> str:
        return "" if self.axis is None else f" on axis {self.axis}"


def with_checks(
    program: ir.Program, extents: Extents, activity: Activity
) -> tuple[ir.Program, tuple[UncertainAccess, ...]]:
    """The program with a check for each index of an entry with tangents that may be out of range, and these."""
    walk = _Checks(program, extents, activity)
    body = walk.block(program.body, IndexFacts(walk.expressions), {})[0]
    return replace(program, body=body), tuple(walk.accesses)


# Loop variables that take all of these numbers, each with all of those of the others; None where a place may be left
# out.
_Taken = dict[Atom, Interval] | None


class _Checks:
    def __init__(self, program: ir.Program, extents: Extents, activity: Activity) -> None:
        self.extents = extents
        self.activity = activity
        self.expressions = integer_forms(program.body, extents)
        self.accesses: dict[UncertainAccess, None] = {}

    # --- statements

    def block(self, body: ir.Body, facts: IndexFacts, taken: _Taken) -> tuple[ir.Body, IndexFacts | None]:
        """The block with its checks, and the facts after it; None if its end is not reached."""
        result: list[ir.Statement] = []
        now: IndexFacts | None = facts
        for s in body:
            new, now = (s, None) if now is None else self._statement(s, now, taken)
            taken = None if isinstance(s, ir.If) and leaves((s,)) else taken
            result.append(new)
        return tuple(result), now

    def _statement(self, s: ir.Statement, facts: IndexFacts, taken: _Taken) -> tuple[ir.Statement, IndexFacts | None]:
        if isinstance(s, ir.Jump):
            return s, None
        if isinstance(s, ir.If):
            return self._if(s, facts)
        if isinstance(s, (ir.For, ir.While)):
            return self._loop(s, facts, taken)
        new = self._checked(s, facts, taken) if isinstance(s, ir.WITH_TANGENTS) else s
        _note(s, facts)
        return new, facts

    def _if(self, s: ir.If, facts: IndexFacts) -> tuple[ir.Statement, IndexFacts | None]:
        then, after_then = self.block(s.then, facts.where(s.condition), None)
        orelse, after_else = self.block(s.orelse, facts.where(s.condition, holds=False), None)
        new = ir.with_bodies(s, (then, orelse))
        if after_then is not None and after_else is not None:
            return new, after_then.joined(after_else)
        return new, after_else if after_then is None else after_then

    def _loop(self, s: ir.For | ir.While, facts: IndexFacts, taken: _Taken) -> tuple[ir.Statement, IndexFacts]:
        bounds = self._bounds(s, facts) if isinstance(s, ir.For) else []
        for local in assigned_locals(s.body):
            facts.forget(local)
        inside = facts.copy()
        if isinstance(s, ir.For):
            for atom, (first, end) in zip(loop_atoms(s), bounds, strict=False):
                inside.note(Affine(((atom, 1),)), (first[0], end[1] - 1))
            taken = None if taken is None else self._taken(s, bounds, taken)
        else:
            inside, taken = inside if s.condition is None else inside.where(s.condition), None
        return ir.with_bodies(s, (self.block(s.body, inside, taken)[0],)), facts

    def _bounds(self, s: ir.For, facts: IndexFacts) -> list[tuple[Interval, Interval]]:
        """Where the first number and the end of each variable of a loop lie."""
        if s.kind in ("field", "grouped"):
            extent = self.extents.get(s.domain[0]) if isinstance(s.domain[0], ir.Container) else None
            pairs = () if extent is None else extent.bounds
        else:
            pairs = ranges(s)
        numbers = [[(b, b) if isinstance(b, int) else facts.interval(b) for b in pair] for pair in pairs]
        return [(first, end) for first, end in numbers]

    def _taken(self, s: ir.For, bounds: list[tuple[Interval, Interval]], around: dict[Atom, Interval]) -> _Taken:
        """The numbers that the variables of a loop take, with those of loops around it."""
        atoms = loop_atoms(s)
        if not bounds or len(bounds) != len(atoms) or leaves(s.body, kinds=("break",)):
            return None  # of a node of the layout, no bounds are known
        if s.kind in ("field", "grouped") and not self.extents[s.domain[0]].is_full:
            return None
        numbers = {a: (first[0], end[0] - 1) for a, (first, end) in zip(atoms, bounds, strict=True)}
        is_known = all(first[0] == first[1] and end[0] == end[1] for first, end in bounds)
        is_lasting = all(self.expressions.is_lasting(a) and low <= high for a, (low, high) in numbers.items())
        return {**around, **numbers} if is_known and is_lasting else None

    # --- entries

    def _checked(self, s: ir.Statement, facts: IndexFacts, taken: _Taken) -> ir.Statement:
        """The statement whose entries have the checks that they need."""
        by_entry: dict[ir.Value, tuple[ir.Check, ...]] = {}
        entries = [entry for value in ir.values_of(s) for entry in self._entries(value, facts)]
        target = s.target if isinstance(s, ir.Store) and self._has_tangent(s.target) else None
        for entry, here in entries if target is None else [*entries, (target, facts)]:
            checks = self._checks(entry, facts)
            if checks:
                by_entry[entry] = checks
                self._note(entry, checks, taken if here is facts else None, s.place)
        if not by_entry:
            return s

        def mark(node: ir.Value) -> ir.Value:
            return replace(node, checks=by_entry[node]) if node in by_entry else node  # type: ignore[call-arg]

        new = ir.with_nodes(s, mark)
        return replace(new, target=mark(new.target)) if target in by_entry else new  # type: ignore[attr-defined, call-arg]

    def _has_tangent(self, entry: ir.Read | ir.Load) -> bool:
        if isinstance(entry, ir.Load):
            return entry.container in self.activity.containers and entry.dtype.is_real
        return bool(entry.index) and entry.local in self.activity.locals

    def _entries(self, value: ir.Value, facts: IndexFacts) -> Iterator[tuple[ir.Read | ir.Load, IndexFacts]]:
        """The entries with tangents in an expression, each with the facts at its place (conditions of choices)."""
        seen: set[tuple[ir.Value, IndexFacts]] = set()
        pending = [(value, facts)]
        while pending:
            node, here = pending.pop()
            if (node, here) in seen:
                continue
            seen.add((node, here))
            if isinstance(node, (ir.Read, ir.Load)):
                if self._has_tangent(node):
                    yield node, here
            elif isinstance(node, ir.Op) and node.dtype.is_real:
                if node.name == "select" and not node.args[0].dtype.is_real:
                    condition, then, orelse = node.args
                    pending += [(then, here.where(condition)), (orelse, here.where(condition, holds=False))]
                else:
                    pending += [(a, here) for a in node.args]

    def _axes(self, entry: ir.Read | ir.Load) -> list[tuple[int | ir.Value, int, int]]:
        """The indices of an entry, each with the least that there is and the end."""
        if isinstance(entry, ir.Read):
            return [(index, 0, n) for index, n in zip(entry.index, entry.local.shape, strict=True)]
        extent, c = self.extents[entry.container], entry.container
        if extent.is_safe:
            return []
        bounds = [*extent.bounds, *((0, n) for n in c.element_shape)]
        return [(i, first, end) for i, (first, end) in zip((*entry.indices, *entry.component), bounds, strict=False)]

    def _checks(self, entry: ir.Read | ir.Load, facts: IndexFacts) -> tuple[ir.Check, ...]:
        checks = []
        for axis, (index, first, end) in enumerate(self._axes(entry)):
            low, high = facts.interval(index)
            if low < first or high >= end:
                checks.append(ir.Check(axis, first if low < first else None, end if high >= end else None))
        return tuple(checks)

    def _note(
        self, entry: ir.Read | ir.Load, checks: tuple[ir.Check, ...], taken: _Taken, place: ir.Place | None
    ) -> None:
        """Take note of the indices that need a check."""
        axes = self._axes(entry)
        for check in checks:
            index, first, end = axes[check.axis]
            form, low, high = self.expressions.linear(index), first, first
            if form is not None and taken is not None and all(atom in taken for atom, _ in form.terms):
                ends = form.between(taken.__getitem__)
                low, high = ends if fits(ends) else (first, first)
            number = low if low < first else high if high >= end else None
            sides = [f"below {first}"] * (check.first is not None) + [f"above {end - 1}"] * (check.end is not None)
            axis, text, where = check.axis if len(axes) > 1 else None, " or ".join(sides), entry.place or place
            self.accesses[UncertainAccess(where, entry.memory.name, axis, first, end, text, number)] = None


# --- integers that change


def _note(s: ir.Statement, facts: IndexFacts) -> None:
    """Facts about integers after a statement."""
    if isinstance(s, ir.Declare):
        local = s.local
        if local.dtype.is_integer and not local.shape and local not in facts.expressions.definitions:
            facts.set(local, _stored(s.values[0], local, facts))
    elif isinstance(s, ir.Store) and isinstance(s.target, ir.Read) and s.target.dtype.is_integer:
        local = s.target.local
        if s.target.index or isinstance(s, ir.Atomic):
            facts.forget(local)
            return
        value = ir.Op(s.op, (s.target, s.value), local.dtype) if isinstance(s, ir.Update) else s.value
        facts.set(local, _stored(value, local, facts))


def _stored(value: ir.Value, local: ir.Local, facts: IndexFacts) -> Interval:
    """Facts about a value once it is converted to the type of a local."""
    whole = range_of(local.dtype)
    if value.dtype.is_real:
        return whole
    low, high = facts.interval(value)
    return (low, high) if whole[0] <= low and high <= whole[1] else whole
