"""Slots: pairs of a column and a coefficient, for seeds that are only known inside of branches and loops.

``if x[n] < t: t = x[n]`` in a loop over n has one: ``column_0 = n`` and ``d_t_0 = 1``.
"""

from __future__ import annotations

from taichi_ext.differentiate.facts.walk import Walk
from taichi_ext.differentiate.forms.build import literal
from taichi_ext.differentiate.forms.forms import Seed, Weight, coefficient
from taichi_ext.program import I32, Local, Read


class Slots:
    """The slots of one local.

    Args:
        walk: the walk.
        local: the local.
        count: the number of slots.
        no_column: the number in a slot without a column.
    """

    def __init__(self, walk: Walk, local: Local, count: int, no_column: int) -> None:
        self._walk = walk
        self._no_column = literal(no_column, I32)
        self._zero = literal(0, local.dtype)
        self._pairs: list[tuple[Read, Read]] = []
        self._used = 0  # number of slots that may be filled so far
        for n in range(count):
            column = walk.builder.declare(f"column_{n}", self._no_column)
            self._pairs.append((column, walk.builder.declare(f"d_{local.name}_{n}", self._zero)))

    def __len__(self) -> int:
        return len(self._pairs)

    def held(self, later: int) -> list[tuple[Read, Read]]:
        """The slots that may be filled, including ``later`` ones that a loop around this place writes."""
        return self._pairs[: max(self._used, later)]

    def write(self, terms: list[tuple[Seed, Weight]]) -> None:
        """Replace the contents of the slots."""
        builder = self._walk.builder
        terms = terms[: len(self._pairs)]
        self._used = max(self._used, len(terms))
        columns = [builder.keep(self._walk.naming.column(seed)) for seed, _ in terms]
        for n, (column, value) in enumerate(self._pairs):
            if n < len(terms):
                builder.assign(column, columns[n])
                builder.assign(value, coefficient(terms[n][1], self._zero.dtype))
                continue
            if self._walk.facts.seeds.sparse is not None:
                builder.assign(column, self._no_column)
            builder.assign(value, self._zero)
