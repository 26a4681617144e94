"""Levels that depend on their pixel in a way that their gradient does not know.

The gradient of a level is its derivative with respect to the locals of ``at=``. It lacks a part if the level depends on
what these are computed from, beside them: the index of the pixel's loop, an entry of a field, or a local of ``at=``
before it was assigned again. It also does if the level depends on a value that was computed from the position and
stored: fields and arrays keep no tangents by positions.

One search goes from a level to all that it may be computed from: through operations on real numbers, sums and products
of whole ones, locals, whatever the order of statements, and stores that a load may see. Indices of fields, comparisons,
whole quotients, rounding and ``stop_gradient`` end it. A load sees the stores before it, and those in a loop around it
in which the position stays, unless a constant index differs.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import taichi_ext.program as ir
from taichi_ext.analysis.activity import CONSTANT
from taichi_ext.analysis.changes import varying_locals
from taichi_ext.analysis.energy_sums import weighted_terms

Entry = tuple[ir.Local, int | None]  # an entry of a local; None where it is not known which
Position = frozenset[Entry]
_WHOLE = frozenset(
    ("add", "sub", "mul", "neg", "cast", "mod", "raw_mod", "max", "min", "abs", "select", "ifte", "bit_shl", "pow")
)
_CARRIERS = {"stop_gradient": "", "gradient": "", "replace_gradient": "surrogate"}  # as in ``flows``
_CHOICES = ("select", "ifte")  # of which the first argument is a condition
_LOOPS = (ir.For, ir.While)


class _Origin(NamedTuple):
    """A value, the number of its statement, and the first load that it was reached through."""

    value: ir.Value
    number: int
    load: ir.Load | None = None


class Origins:
    """What the values of a kernel may be computed from."""

    def __init__(self, body: ir.Body) -> None:
        self._around: list[tuple[ir.Statement, ...]] = []
        self._numbers: dict[ir.Statement, int] = {}
        self._given: dict[ir.Memory, list[tuple[ir.Read | ir.Load | int | None, _Origin]]] = defaultdict(list)
        self._indices: set[ir.Local] = set()
        for n, (s, around) in enumerate(ir.enclosed(body)):
            self._numbers[s] = n
            self._around.append(around)
            match s:
                case ir.For(variables=variables):
                    self._indices.update(variables)
                case ir.Declare(local=local, values=values):
                    self._given[local] += ((m, _Origin(value, n)) for m, value in enumerate(values))
                case ir.Store(target=target, value=value):
                    self._given[target.memory].append((target, _Origin(value, n)))
                    if isinstance(s, ir.Atomic) and s.result is not None:
                        self._given[s.result].append((0, _Origin(target, n)))
                case _:
                    written = s.writes if isinstance(s, ir.Effect) else ()
                    for memory, values in (*ir.flows(s, _CARRIERS), *((c, ir.values_of(s)) for c in written)):
                        self._given[memory] += ((None, _Origin(value, n)) for value in values)

    def hidden(
        self, s: ir.Statement, values: Iterable[ir.Value], position: Position, *, with_origins: bool = False
    ) -> Iterator[tuple[ir.Read | ir.Load, ir.Load | None]]:
        """The reads by which values of a statement depend on a position, other than by reading its locals.

        They are reads of the indices that move it, or, where none does, loads of the entries that it is read from;
        those of its entries by a computed index, or before they are assigned again; and stored ones of the position.
        Each comes with the load of what was stored, if it was.  ``with_origins``: the position is one in ``layers`` or
        ``pixel``, which are right about what they assign; what it is computed from counts, too.
        """
        indices, loads = self._sources(position)
        stored = position
        if with_origins:
            reads = self._reads([node for entry in position for node in self._defining(entry)])
            for local, n in _entries(reads):
                if local.dtype.is_real:
                    stored |= {(local, m) for m in (range(math.prod(local.shape)) if n is None else (n,))}
        unnamed = {(local, None) for local, _ in position}
        number = self._numbers[s]
        for node in self._reads([_Origin(value, number) for value in values], position, stored):
            value, _, load = node
            if isinstance(value, ir.Load):
                own = [x for x in loads if x.container is value.container and not _differ(x, value)]
                if any(self._may_move(x, value, load) for x in own):
                    yield value, None
                continue
            assert isinstance(value, ir.Read)
            if load is None and _entry(value) in position:
                if not with_origins and self._is_assigned_between(node.number, number, _entry(value)):
                    yield value, None
            elif _entry(value) in unnamed | indices | (stored if load else set()):
                yield value, load

    def _reads(
        self, start: list[_Origin], position: Position = frozenset(), stored: Position = frozenset()
    ) -> Iterator[_Origin]:
        """The reads and loads that a change of values may come from.

        They go through memory, if there is something stored to look for, and end at the position.
        """
        pending, seen = [*start], set[tuple[ir.Value, int, bool]]()
        while pending:
            node = pending.pop()
            value, number, load = node
            if (value, number, load is None) in seen:
                continue
            seen.add((value, number, load is None))
            if isinstance(value, ir.Read):
                yield node
                if load is not None or _entry(value) not in position:
                    pending += (of._replace(load=load) for of in self._defining(_entry(value)))
            elif isinstance(value, ir.Load):
                yield node
                pending += (of._replace(load=load or value) for of in self._stored(value, number, stored) if stored)
            else:
                pending += (_Origin(operand, number, load) for operand in _operands(value))

    def _defining(self, entry: Entry) -> Iterator[_Origin]:
        """What an entry of a local is given anywhere."""
        for target, node in self._given[entry[0]]:
            n = target.number if isinstance(target, ir.Read) else target
            if n is None or entry[1] is None or n == entry[1]:
                yield node

    def _stored(self, load: ir.Load, number: int, position: Position) -> Iterator[_Origin]:
        """What a load in the statement with a number may see of the kernel's stores, within one position."""
        moving = {local for local, _ in position}
        for target, node in self._given[load.container]:
            common = [s for s in self._around[number] if s in self._around[node.number] and isinstance(s, _LOOPS)]
            is_seen = node.number < number or not all(self._varying(s) & moving for s in common)
            if is_seen and not (isinstance(target, ir.Load) and _differ(target, load)):
                yield node

    @functools.cache  # noqa: B019  # an object lives as long as one check
    def _varying(self, loop: ir.For | ir.While) -> set[ir.Local]:
        """The locals of a loop that have other values in other iterations."""
        inner = {local for s in loop.within for local in ir.declared(s)} | {*ir.declared(loop)}
        return varying_locals(loop) & inner

    def _is_assigned_between(self, first: int, last: int, entry: Entry) -> bool:
        """Whether an entry of a local may be assigned between its read in a statement and another statement."""
        assigned = [n for target, (_, n, _) in self._given[entry[0]] if not isinstance(target, int)]
        for n in assigned:
            again = [s for s in self._around[first] if s in self._around[n] and isinstance(s, _LOOPS)]
            if first <= n < last or any(s not in self._around[last] for s in again):
                return True
        return False

    def _may_move(self, own: ir.Load, *loads: ir.Load | None) -> bool:
        """Whether one of the loads may be of other entries where a load is, since indices move both."""
        indices = self._indices_of(own)
        return not indices or any(load is not None and indices & self._indices_of(load) for load in loads)

    @functools.cache  # noqa: B019  # as above
    def _indices_of(self, load: ir.Load) -> set[Entry]:
        """The indices of loops that the entry of a load depends on in any way."""
        pending, result = [i for i in load.indices if isinstance(i, ir.Value)], set[Entry]()
        seen = set[ir.Value]()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            if isinstance(value, ir.Read):
                result |= {_entry(value)} if value.local in self._indices else set()
                pending += (node.value for node in self._defining(_entry(value)))
            else:
                pending += ir.children(value)
        return result

    def _sources(self, position: Position) -> tuple[set[Entry], list[ir.Load]]:
        """What moves a position: indices of loops, or else entries of fields, and the indices of these.

        Indices that move it by one for each iteration, by the most, or by an amount that is not known; the others are
        those of samples in a pixel.
        """
        indices, loads = set[Entry](), list[ir.Load]()
        for entry in position:
            nodes = [*self._reads([*self._defining(entry)])]
            slopes = {e: self._slope(entry, e) for e in _entries(nodes) if e[0].dtype.is_integer}
            most = max((abs(slope) for slope in slopes.values() if slope is not None), default=0)
            moving = {e for e, slope in slopes.items() if slope is None or (slope != 0 and abs(slope) in (1, most))}
            indices |= moving
            for node in nodes if not moving else ():
                if isinstance(node.value, ir.Load):
                    loads.append(node.value)
                    places = [_Origin(i, node.number) for i in node.value.indices if isinstance(i, ir.Value)]
                    indices |= _entries(self._reads(places))
        return indices, loads

    def _slope(self, entry: Entry, index: Entry) -> float | None:
        """The derivative of an entry by an index, where it is a number that is known."""
        if entry == index or entry[0] in self._indices:
            return 1 if entry == index else 0
        definitions = [*self._defining(entry)]
        if len(definitions) != 1:
            return None
        total = 0.0
        for factor, value in weighted_terms(definitions[0].value):
            slope = self._slope(_entry(value), index) if isinstance(value, ir.Read) else None
            if slope is None and (isinstance(value, ir.Read) or index in _entries(self._reads([_Origin(value, 0)]))):
                return None
            total += factor * (slope or 0)
        return total


def _operands(value: ir.Value) -> tuple[ir.Value, ...]:
    """The operands whose small changes change a value."""
    if isinstance(value, ir.FoldedConst):
        return (value.source,)
    if not isinstance(value, ir.Op) or value.name in CONSTANT:
        return ()
    if not (value.dtype.is_real or (value.dtype.is_integer and value.name in _WHOLE)):
        return ()
    if value.name == "cast" and value.dtype.is_integer and value.args[0].dtype.is_real:  # it rounds
        return ()
    return value.args[1:] if value.name in _CHOICES else value.args


def _differ(a: ir.Load, b: ir.Load) -> bool:
    """Whether two entries of a container are not the same, by a constant index."""
    pairs = zip((*a.indices, *a.component), (*b.indices, *b.component), strict=True)
    return any(x is not None and y is not None and x != y for x, y in (map(_constant, pair) for pair in pairs))


def _constant(index: int | ir.Value) -> float | None:
    return index if isinstance(index, int) else index.value if isinstance(index, ir.Const) else None


def _entries(nodes: Iterable[_Origin]) -> set[Entry]:
    """What is read in nodes."""
    return {_entry(node.value) for node in nodes if isinstance(node.value, ir.Read)}


def _entry(value: ir.Value) -> Entry:
    assert isinstance(value, ir.Read)
    return value.local, value.number
