"""Dense Hessians: the kernel computes the entries up to the diagonal, which the host mirrors.

A term of the energy that depends on all parameters adds to all entries of H, in two loops over columns. The inner one
ends at the diagonal, rounded up to whole steps of ``columns``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import taichi_ext.program as ir
from taichi_ext.analysis.changes import read_containers
from taichi_ext.differentiate.facts.decisions import Differentiated
from taichi_ext.program.build import is_over_columns, number_of
from taichi_ext.schedule.columns import MOST_WRITTEN_OUT, up_to


def with_lower_triangle(found: Differentiated, gradient: ir.Container, columns: int) -> Differentiated:
    """The program without additions to entries above the diagonal, if nothing reads H in it.

    Args:
        found: the gradient's program with tangents.
        gradient: the gradient, with a row of H for each of its numbers.
        columns: of H, as many as it has rows.
    """
    array = next((c for what, c in found.shadows if what is gradient), None)
    body = found.program.body
    if array is None or array in read_containers(body):
        return found
    return replace(found, program=replace(found.program, body=_Triangle(array, columns).block(body, ())))


@dataclass(frozen=True)
class _Triangle:
    """The lower triangle of a matrix in an array, row after row."""

    array: ir.Container
    columns: int

    def block(self, body: ir.Body, rows: tuple[ir.Local, ...]) -> ir.Body:
        """A block without additions above the diagonal; ``rows`` are the variables of loops over columns around it."""
        made: list[ir.Statement] = []
        for s in body:
            if self._is_above(s):
                continue
            if is_over_columns(s):
                s = self._until_diagonal(s, rows)
            inner = (*rows, *s.variables) if is_over_columns(s) else rows
            made.append(ir.with_blocks(s, lambda block, inner=inner: self.block(block, inner)))
        return tuple(made)

    def _index(self, s: ir.Statement) -> ir.Value | None:
        """The number of the entry that a statement adds to."""
        if not isinstance(s, ir.Update) or not isinstance(s.target, ir.Load) or s.target.container is not self.array:
            return None
        return s.target.indices[0] if s.op in ("add", "sub") else None

    def _is_above(self, s: ir.Statement) -> bool:
        index = number_of(self._index(s))
        return index is not None and index % self.columns > index // self.columns

    def _until_diagonal(self, loop: ir.For, rows: tuple[ir.Local, ...]) -> ir.For:
        """A loop over the columns of a row that a loop around it goes through, up to the diagonal."""
        (k,) = loop.variables
        found = {self._row(self._index(s), k, rows) for s in loop.body if not isinstance(s, ir.Declare)}
        row = found.pop() if len(found) == 1 else None
        if row is None or self.columns <= MOST_WRITTEN_OUT or number_of(loop.domain[0]) != self.columns:
            return loop
        return replace(loop, domain=(up_to(row, self.columns),))

    def _row(self, index: ir.Value | None, k: ir.Local, rows: tuple[ir.Local, ...]) -> ir.Local | None:
        """``row`` of ``row * columns + k``."""
        match index:
            case ir.Op("add", (ir.Op("mul", (ir.Read(local=row), ir.Const(value=n)), _), ir.Read(local=column))):
                return row if n == self.columns and column is k and row in rows else None
            case _:
                return None
