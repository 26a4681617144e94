"""Names for indices that are not sums of loop variables, such as indices read from a field.

A column with such an index then has the same name wherever the index occurs.
"""

from __future__ import annotations

from dataclasses import replace

import taichi_ext.program as ir
from taichi_ext.analysis.activity import Activity
from taichi_ext.analysis.affine import Indices
from taichi_ext.analysis.changes import written
from taichi_ext.analysis.same_values import is_equal
from taichi_ext.analysis.stores import grouped


def with_named_indices(program: ir.Program, activity: Activity) -> ir.Program:
    """The program with a local for each such index of an entry that carries a tangent."""
    return replace(program, body=_Names(program, activity).block(program.body))


class _Names:
    def __init__(self, program: ir.Program, activity: Activity) -> None:
        self.activity = activity
        self.indices = Indices(program.body)
        self.changing = written(program.body)
        self.known: list[tuple[ir.Value, ir.Local]] = []  # indices that have a name here
        self.added: list[ir.Statement] = []

    def block(self, body: ir.Body) -> ir.Body:
        """The block with its names."""
        outer, result = len(self.known), []
        for group in grouped(body):
            before, self.added = len(self.known), []
            new = [self._named(s) for s in group]
            result.extend(self.added)
            self.known[before:] = [k for k in self.known[before:] if self._is_lasting(k[0])]
            result += [ir.with_blocks(s, self.block) for s in new]
        del self.known[outer:]
        return tuple(result)

    def _is_lasting(self, value: ir.Value) -> bool:
        """Whether nothing in the kernel changes the values that an index is computed from."""
        return value.contents.is_same(self.changing, self.changing)

    def _named(self, s: ir.Statement) -> ir.Statement:
        if not isinstance(s, ir.WITH_TANGENTS):
            return s
        done: dict[ir.Value, ir.Value] = {}

        def change(value: ir.Value) -> ir.Value:
            if value not in done:
                new = (
                    ir.with_children(value, change)
                    if isinstance(value, (ir.Op, ir.Load)) and self.activity.has(value)
                    else value
                )
                done[value] = self._entry(new) if isinstance(new, ir.Load) and self.activity.has(new) else new
            return done[value]

        new = ir.with_values(s, change)
        target = new.target if isinstance(new, ir.Store) else None
        if isinstance(target, ir.Load) and target.container in self.activity.containers:
            return replace(new, target=self._entry(target))
        return new

    def _entry(self, load: ir.Load) -> ir.Load:
        indices, component = tuple(map(self._name, load.indices)), tuple(map(self._name, load.component))
        return replace(load, indices=indices, component=component)

    def _name(self, index: int | ir.Value) -> int | ir.Value:
        if isinstance(index, int) or self.indices.form(index) is not None:
            return index
        local = next((name for value, name in self.known if is_equal(value, index)), None)
        if local is None:
            local = ir.Local("index", index.dtype, (), "temporary")
            self.known.append((index, local))
            self.indices.name(local)
            self.added.append(ir.Declare(local, (index,), place=index.place))
        return ir.Read(local)
