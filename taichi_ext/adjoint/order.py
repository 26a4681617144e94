"""Whether what a parallel loop leaves depends on the order of its iterations.

It does where an iteration stores to an entry that another one loads, or stores a different number to. The way back has
to visit such iterations from the last to the first. On one thread, where short loops run, a loop runs in order unless
this is ruled out. With several threads, what a plain run of such a loop gives is a matter of chance, and it only runs
in order where indices show that iterations meet: computed indices, and stores under conditions other than ranges, may
be the user's way to keep them apart. The launch computes what it can of these, and warns where iterations meet, or may
do so.

Two iterations do not meet in an entry (U. Banerjee, *Dependence Analysis*, 1997, chapters 3 and 5)

* if an index that is the same in all of a launch differs. Of two that depend on arguments, the launch compares them;
* if equal indices mean equal variables of the loop: ``i``; ``3 * i + k`` for ``k`` up to 2; ``i // n`` and ``i % n``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import taichi_ext.program as ir
from taichi_ext.analysis.affine import Affine, Atom, atom_value, loop_atoms
from taichi_ext.analysis.loops import Extents, integer_forms, leaves, loop_reach
from taichi_ext.program import Const, Container, If, Load, Local, Op, Read, Value
from taichi_ext.schedule import is_of_one_thread

_RANGES = frozenset(("lt", "le", "gt", "ge"))
_LOGIC = frozenset(("logical_and", "logical_or", "logical_not", "bit_and", "bit_or"))


@dataclass(frozen=True, eq=False)
class Pair:
    """A store to a container and another access: the first indices of each, which a launch may be able to compute.

    ``loops``: the loops around them, the parallel one first; none where no index needs them. ``guards``: the conditions
    under which each stands. ``is_alike``: both have the same indices.
    """

    container: Container
    first: tuple[Value, ...]
    second: tuple[Value, ...]
    place: ir.Place | None
    loops: tuple[ir.For, ...] = ()
    guards: tuple[tuple[Value, ...], tuple[Value, ...]] = ((), ())
    is_alike: bool = False


@dataclass(frozen=True)
class _Access:
    """A load, or a store: ``kind`` is "load", "sum", "constant" or "value".

    ``guards``: the conditions around it that are no ranges.
    """

    kind: str
    forms: tuple[Affine, ...]
    component: tuple[object, ...]
    guards: tuple[Value, ...]


@dataclass(eq=False)
class _Spot:
    """An entry that is accessed, its line, the loops around it, and the conditions around all accesses like it."""

    entry: Load
    place: ir.Place | None
    loops: tuple[ir.For, ...]
    guards: tuple[Value, ...]


class Order:
    """The parallel loops of a program.

    Args:
        program: the program.
        threads: of the machine.
        is_fixed: whether a launch can compute an integer from its arguments.

    Attributes:
        apart: entries that are taken to be different; a launch has to check that.
        unsure: stores and other accesses where iterations that several threads run in any order may read or replace
            what others store. An entry of a list is in it once, unless the launch finds it twice.
    """

    def __init__(self, program: ir.Program, extents: Extents, threads: int, is_fixed: Callable[[Value], bool]) -> None:
        self.apart: list[Pair] = []
        self.unsure: list[Pair] = []
        self._extents, self._threads, self._is_fixed = extents, threads, is_fixed
        self._indices = integer_forms(program.body, extents)
        declares = (s for s in ir.statements(program.body) if isinstance(s, ir.Declare) and not s.local.shape)
        self._values = {s.local: s.values[0] for s in declares}
        self._fixed: dict[Atom, bool] = {}

    def matters(self, loop: ir.For) -> bool:
        """Whether the iterations of a loop have to keep their order."""
        ranges: dict[Atom, float] = {}
        for s in ir.statements((loop,)):
            if isinstance(s, ir.For):
                reach = loop_reach(s, self._extents)
                sizes = [math.inf] * len(loop_atoms(s)) if reach is None else [end - first for first, end in reach]
                ranges.update(zip(loop_atoms(s), sizes, strict=False))
        spots: dict[Container, dict[_Access, _Spot]] = {}
        for access, spot in self._accesses(loop.body, (), (loop,)):
            first = spots.setdefault(spot.entry.container, {}).setdefault(access, spot)
            first.guards = tuple([guard for guard in first.guards if guard in spot.guards])
        variables = {atom for atom in loop_atoms(loop) if ranges[atom] > 1}
        is_alone = self._threads == 1 or is_of_one_thread(loop, self._extents)
        meets = [
            self._meet(c, ((a, x), (b, y)), variables, ranges, is_alone=is_alone)
            for c, accesses in spots.items()
            for n, (a, x) in enumerate(accesses.items())
            if a.kind != "load"
            for m, (b, y) in enumerate(accesses.items())
            if _matters(a, b) and (b.kind == "load" or (c.dtype.is_real and n <= m))
        ]
        return any(meets)  # all were looked at, for the entries that are apart

    def _accesses(
        self, body: ir.Body, guards: tuple[Value, ...], loops: tuple[ir.For, ...]
    ) -> Iterator[tuple[_Access, _Spot]]:
        """Loads and stores of a block within loops, and where they stand."""
        for s in body:
            accesses = [(n, "load") for v in ir.values_of(s) for n in ir.walk(v) if isinstance(n, Load)]
            if isinstance(s, ir.Store) and isinstance(s.target, Load):
                is_sum = isinstance(s, ir.Atomic) or (isinstance(s, ir.Update) and s.op in ("add", "sub"))
                is_constant = isinstance(s.value, Const) and isinstance(s, ir.Assign)
                accesses.append((s.target, "sum" if is_sum else "constant" if is_constant else "value"))
                if isinstance(s, ir.Update) and not is_sum:
                    accesses.append((s.target, "load"))
            for entry, kind in accesses:
                forms = tuple(map(self._indices.site, entry.indices))
                component = tuple([i.value if isinstance(i, Const) else i for i in entry.component])
                others = tuple([guard for guard in guards if not self._is_range(guard)])
                yield _Access(kind, forms, component, others), _Spot(entry, s.place, loops, guards)
            if isinstance(s, If):
                is_not = Op("logical_not", (s.condition,), ir.U1)
                yield from self._accesses(s.then, (*guards, s.condition), loops)
                yield from self._accesses(s.orelse, (*guards, is_not), loops)
                if leaves(s.then):
                    guards = (*guards, is_not)
                elif leaves(s.orelse):
                    guards = (*guards, s.condition)
                continue
            for inner in ir.bodies(s):
                yield from self._accesses(inner, guards, (*loops, s) if isinstance(s, ir.For) else loops)

    def _is_range(self, condition: Value) -> bool:
        if isinstance(condition, Read) and condition.local in self._values:
            return self._is_range(self._values[condition.local])
        if not isinstance(condition, Op):
            return isinstance(condition, Const)
        if condition.name in _LOGIC:
            return all(map(self._is_range, condition.args))
        return condition.name in _RANGES and all(self._indices.form(a) is not None for a in condition.args)

    def _meet(
        self,
        c: Container,
        pair: tuple[tuple[_Access, _Spot], tuple[_Access, _Spot]],
        variables: set[Atom],
        ranges: dict[Atom, float],
        *,
        is_alone: bool,
    ) -> bool:
        """Whether two iterations may touch the same entry."""
        (a, x), (b, y) = pair
        if any(f.is_constant and g.is_constant and f != g for f, g in zip(a.forms, b.forms, strict=True)):
            return False
        equal, is_certain, are_fixed, apart = set[Atom](), not (a.guards or b.guards), True, 0
        for n, (f, g) in enumerate(zip(a.forms, b.forms, strict=True)):
            difference = f + g * -1
            are_fixed = are_fixed and self._varying(f) == self._varying(g) == []
            if not difference.is_constant:
                is_certain, apart = False, n + 1 if are_fixed else apart
                continue
            is_certain = is_certain and {atom for _, atom in self._varying(f)} <= ranges.keys()
            answer = self._equal(f, abs(difference.constant), ranges)
            if answer is None:
                return False
            equal |= answer
        if variables <= equal | self._divided(equal, ranges):
            return False
        if apart:
            self.apart.append(Pair(c, x.entry.indices[:apart], y.entry.indices[:apart], x.place))
            return False
        if is_certain or is_alone:
            return True
        is_alike = a.forms == b.forms
        if not is_alike or not any(map(_may_end, x.loops[0].within)):
            loops = tuple(dict.fromkeys((*x.loops, *y.loops)))
            guards = (x.guards, y.guards) if is_alike else (a.guards, b.guards)
            self.unsure.append(Pair(c, x.entry.indices, y.entry.indices, x.place, loops, guards, is_alike))
        return False

    def _equal(self, form: Affine, distance: int, ranges: dict[Atom, float]) -> set[Atom] | None:
        """The atoms that are equal where two values of a form differ by a distance; None if they never do."""
        terms = sorted(self._varying(form), key=lambda term: term[0], reverse=True)
        rests = [factor * (ranges.get(atom, math.inf) - 1) for factor, atom in terms]
        if distance > sum(rests) or (terms and distance % math.gcd(*(factor for factor, _ in terms))):
            return None
        result = set[Atom]()
        for n, (factor, atom) in enumerate(terms):
            if factor <= distance + sum(rests[n + 1 :]):
                break
            result.add(atom)
        return result

    def _divided(self, equal: set[Atom], ranges: dict[Atom, float]) -> set[Atom]:
        """The atoms that are equal because a quotient and its remainder are."""
        parts: dict[object, set[str]] = {}
        for atom in equal:
            value = self._values.get(atom) if isinstance(atom, Local) else atom
            if isinstance(value, Op) and value.name in ("floordiv", "mod"):
                forms = tuple([self._indices.form(v) for v in value.args])
                if None not in forms:
                    parts.setdefault(forms, set()).add(value.name)
        result = set[Atom]()
        for (whole, _), names in parts.items():  # type: ignore[misc]
            if len(names) == 2:
                result |= self._equal(whole, 0, ranges) or set()
        return result

    def _varying(self, form: Affine) -> list[tuple[int, Atom]]:
        """The factors, without signs, and atoms of a form that are not the same in all of a launch."""
        return [(abs(factor), atom) for atom, factor in form.terms if not self._is_same(atom)]

    def _is_same(self, atom: Atom) -> bool:
        if atom not in self._fixed:
            self._fixed[atom] = self._is_fixed(atom_value(atom))
        return self._fixed[atom]


def _may_end(s: ir.Statement) -> bool:
    """Whether a launch does not know how often a loop runs, because of a statement in it, or what it is."""
    return isinstance(s, ir.While) or (isinstance(s, ir.Jump) and s.kind == "break")


def _matters(a: _Access, b: _Access) -> bool:
    """Whether it matters which of a store and another access to an entry comes first."""
    are_known = all(isinstance(i, int) for i in (*a.component, *b.component))
    is_one_kind = a.kind == b.kind and a.kind in ("sum", "constant")
    return not is_one_kind and (a.component == b.component or not are_known)
