"""Whether a level depends on the index of a pixel's loop as well as on the variables that hold the pixel's position.

The gradient of a level is its derivative with respect to the variables of ``at=``. If ``px = float(i)`` is one of them,
and the level uses ``i`` itself in another place, that place counts as constant, and the gradient lacks a part.

A dependence counts if a small change of the index would propagate: through operations on real numbers, and sums and
products of whole ones. Indices of fields, comparisons, whole quotients, rounding and ``stop_gradient`` end it. Of the
loops around, only those count that move the pixel by one (``px = float(i)``), not those of samples within a pixel
(``px = i + (s + 0.5) / 4``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import taichi_ext.program as ir
from taichi_ext.analysis.activity import CONSTANT
from taichi_ext.analysis.energy_sums import weighted_terms

Entry = tuple[ir.Local, int | None]  # an entry of a local; None where it is not known which
Position = frozenset[tuple[ir.Local, int]]
_WHOLE = frozenset(
    ("add", "sub", "mul", "neg", "cast", "mod", "raw_mod", "max", "min", "abs", "select", "ifte", "bit_shl")
)
_CHOICES = ("select", "ifte")  # of which the first argument is a condition


@dataclass(frozen=True)
class IndexInLevel:
    """A level, the index that it depends on, and where."""

    use: ir.Boundary
    index: ir.Local
    read: ir.Read


def find_index_in_level(slices: Slices, positions: Mapping[ir.Boundary, Position]) -> IndexInLevel | None:
    """The first level that depends on an index of its pixel other than by its position; None where there is none."""
    for use, position in positions.items():
        level = next((use.given[name] for name in ("level", "value") if name in use.given), None)
        indices = {e for own in position for e in slices.indices_of(own)}
        for read in slices.reached(list(ir.entries(level)) if level is not None and indices else [], position):
            if _entry(read) in indices:
                return IndexInLevel(use, read.local, read)
    return None


class Slices:
    """The dependences of values, through locals, whatever the order of the statements."""

    def __init__(self, body: ir.Body) -> None:
        self._of: dict[ir.Local, dict[int | None, list[ir.Value]]] = {}
        self._indices: set[ir.Local] = set()
        for s in ir.statements(body):
            match s:
                case ir.For(variables=variables):
                    self._indices.update(variables)
                case ir.Declare(local=local, values=values):
                    for n, value in enumerate(values):
                        self._define((local, n), value)
                case ir.Store(target=ir.Read() as target, value=value):
                    self._define(_entry(target), value)
                    if isinstance(s, ir.Atomic) and s.result is not None:
                        self._define((s.result, 0), target)
                case ir.Call(results=results):
                    for local in results:
                        self._define((local, None), *ir.values_of(s))
                case ir.Boundary(results=results):
                    for local in results:
                        self._define((local, 0), *_sources(s))
                case _:
                    pass

    def reached(self, values: list[ir.Value], position: Position = frozenset()) -> Iterator[ir.Read]:
        """The indices of loops on which values depend, other than through the position."""
        return (read for read in self._reads(values, position) if read.local in self._indices)

    def origins(self, position: Position) -> Position:
        """The entries of a position, and those that it is computed from by real numbers."""
        values = [value for entry in position for value in self._definitions(entry)]
        reads = [read for read in self._reads(values) if read.dtype.is_real]
        found = ((local, n) for local, n in map(_entry, reads))
        every = ((local, m) for local, n in found for m in (range(math.prod(local.shape)) if n is None else (n,)))
        return position | frozenset(every)

    def _reads(self, values: list[ir.Value], position: Position = frozenset()) -> Iterator[ir.Read]:
        """Where a change of values may come from, other than from the position."""

        def is_open(value: ir.Value) -> TypeGuard[ir.Read]:
            return isinstance(value, ir.Read) and (value.local in self._indices or _entry(value) not in position)

        def operands(value: ir.Value) -> Iterable[ir.Value]:
            return self._definitions(_entry(value)) if is_open(value) else _operands(value)

        return (value for value in ir.through(values, operands) if is_open(value))

    def indices_of(self, entry: Entry) -> set[Entry]:
        """The indices that move an entry of a position by one for each iteration, or by an amount not known."""
        found = {_entry(read) for read in self.reached(self._definitions(entry))}
        return {index for index in found if self._slope(entry, index) in (1, -1, None)}

    def _define(self, entry: Entry, *values: ir.Value) -> None:
        self._of.setdefault(entry[0], {}).setdefault(entry[1], []).extend(values)

    def _definitions(self, entry: Entry) -> list[ir.Value]:
        local, n = entry
        known = self._of.get(local, {}).items()
        return [value for m, values in known if n is None or m is None or n == m for value in values]

    def _slope(self, entry: Entry, index: Entry) -> float | None:
        """The derivative of an entry by an index, where it is a number that is known."""
        if entry[0] in self._indices:
            return 1 if entry == index else 0
        definitions = self._definitions(entry)
        if len(definitions) != 1:
            return None
        total = 0.0
        for factor, value in weighted_terms(definitions[0]):
            slope = self._slope(_entry(value), index) if isinstance(value, ir.Read) else None
            if slope is None and (isinstance(value, ir.Read) or index in map(_entry, self.reached([value]))):
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


def _sources(s: ir.Boundary) -> list[ir.Value]:
    """The sources of the tangents of a boundary's results."""
    if s.kind in ("stop_gradient", "gradient"):
        return []
    if s.kind == "replace_gradient":
        return s.sources("surrogate")
    return [e for name, group in s.given.items() if name != "at" for e in ir.entries(group)]


def _entry(read: ir.Read) -> Entry:
    return read.local, read.number
