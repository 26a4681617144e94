"""Levels that depend on their pixel in a way that their gradient does not know.

The gradient of a level is its derivative with respect to the locals of ``at=``. It lacks a part if the level depends on
the index of the pixel's loop itself, beside ``px = float(i)``, or on a value that was computed from the position and
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


class _Node(NamedTuple):
    """A value, the number of its statement, and the first load that it was reached through."""

    value: ir.Value
    number: int
    load: ir.Load | None = None


class Origins:
    """What the values of a kernel may be computed from."""

    def __init__(self, body: ir.Body) -> None:
        self._around: list[tuple[ir.Statement, ...]] = []
        self._numbers: dict[ir.Statement, int] = {}
        self._given: dict[ir.Memory, list[tuple[ir.Read | ir.Load | int | None, _Node]]] = defaultdict(list)
        self._indices: set[ir.Local] = set()
        for n, (s, around) in enumerate(ir.enclosed(body)):
            self._numbers[s] = n
            self._around.append(around)
            match s:
                case ir.For(variables=variables):
                    self._indices.update(variables)
                case ir.Declare(local=local, values=values):
                    self._given[local] += ((m, _Node(value, n)) for m, value in enumerate(values))
                case ir.Store(target=target, value=value):
                    self._given[target.memory].append((target, _Node(value, n)))
                    if isinstance(s, ir.Atomic) and s.result is not None:
                        self._given[s.result].append((0, _Node(target, n)))
                case _:
                    written = s.writes if isinstance(s, ir.Effect) else ()
                    for memory, values in (*ir.flows(s, _CARRIERS), *((c, ir.values_of(s)) for c in written)):
                        self._given[memory] += ((None, _Node(value, n)) for value in values)

    def hidden(
        self, s: ir.Statement, values: Iterable[ir.Value], position: Position, *, with_origins: bool = False
    ) -> Iterator[tuple[ir.Read, ir.Load | None]]:
        """The reads by which values of a statement depend on a position, other than by reading its locals.

        They are reads of the indices that move it by one for each iteration, or by an amount that is not known, those
        of its entries by a computed index, and stored ones of the position, ``with_origins`` also of what that is
        computed from.  Each comes with the load of what was stored, if it was.
        """
        indices = {index for entry in position for index in self._indices_of(entry)}
        stored = position
        if with_origins:
            reads = self._reads([node for entry in position for node in self._defining(entry)])
            found = [_entry(node.value) for node in reads if node.value.dtype.is_real]
            stored |= {(local, m) for local, n in found for m in (range(math.prod(local.shape)) if n is None else (n,))}
        unnamed = {(local, None) for local, _ in position}
        for node in self._reads([_Node(value, self._numbers[s]) for value in values], position, stored):
            if isinstance(node.value, ir.Read) and _entry(node.value) in unnamed | (stored if node.load else indices):
                yield node.value, node.load

    def _reads(
        self, start: list[_Node], position: Position = frozenset(), stored: Position = frozenset()
    ) -> Iterator[_Node]:
        """The reads that a change of values may come from; through memory, if there is something stored to look for."""
        pending, seen = [*start], set[tuple[ir.Value, int, bool]]()
        while pending:
            node = pending.pop()
            value, number, load = node
            if (value, number, load is None) in seen:
                continue
            seen.add((value, number, load is None))
            if isinstance(value, ir.Read):
                if load is not None or _entry(value) not in position:
                    yield node
                    pending += (of._replace(load=load) for of in self._defining(_entry(value)))
            elif isinstance(value, ir.Load):
                pending += (of._replace(load=load or value) for of in self._stored(value, number, stored) if stored)
            else:
                pending += (_Node(operand, number, load) for operand in _operands(value))

    def _defining(self, entry: Entry) -> Iterator[_Node]:
        """What an entry of a local is given anywhere."""
        for target, node in self._given[entry[0]]:
            n = target.number if isinstance(target, ir.Read) else target
            if n is None or entry[1] is None or n == entry[1]:
                yield node

    def _stored(self, load: ir.Load, number: int, position: Position) -> Iterator[_Node]:
        """What a load in the statement with a number may see of the kernel's stores, within one position."""
        for target, node in self._given[load.container]:
            common = [s for s in self._around[number] if s in self._around[node.number] and isinstance(s, _LOOPS)]
            is_seen = node.number < number or not all(
                self._varying(s) & {local for local, _ in position} for s in common
            )
            if is_seen and not (isinstance(target, ir.Load) and _differ(target, load)):
                yield node

    @functools.cache  # noqa: B019  # an object lives as long as one check
    def _varying(self, loop: ir.For | ir.While) -> set[ir.Local]:
        """The locals of a loop that have other values in other iterations."""
        inner = {local for s in loop.within for local in ir.declared(s)} | {*ir.declared(loop)}
        return varying_locals(loop) & inner

    def _indices_of(self, entry: Entry) -> set[Entry]:
        """The whole numbers, as indices, whose steps move an entry of a position by one, or by an amount not known."""
        found = {_entry(read.value) for read in self._reads([*self._defining(entry)])}
        return {e for e in found if e[0].dtype.is_integer and self._slope(entry, e) in (1, -1, None)}

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
            reads = self._reads([_Node(value, 0)]) if slope is None else ()
            if slope is None and (isinstance(value, ir.Read) or any(index == _entry(read.value) for read in reads)):
                return None
            total += factor * (slope or 0)
        return total


def _operands(value: ir.Value) -> tuple[ir.Value, ...]:
    """The operands whose small changes change a value."""
    if isinstance(value, ir.FoldedConst):
        return (value.source,)
    if (
        not isinstance(value, ir.Op)
        or value.name in CONSTANT
        or not (value.dtype.is_real or (value.dtype.is_integer and value.name in _WHOLE))
    ):
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


def _entry(value: ir.Value) -> Entry:
    assert isinstance(value, ir.Read)
    return value.local, value.number
