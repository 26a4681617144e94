"""Names for indices that are no sums of loop variables, such as those that are read from a field.

A column by such an index has a name, then, that is the same wherever the index stands.
"""

from __future__ import annotations

from dataclasses import replace

from taichi_ext.analysis.activity import Activity
from taichi_ext.analysis.affine import Indices
from taichi_ext.analysis.changes import written
from taichi_ext.analysis.stores import grouped, is_equal
from taichi_ext.program import (
    Assign,
    Atomic,
    Body,
    Boundary,
    Call,
    Declare,
    Load,
    Local,
    Op,
    Program,
    Read,
    Return,
    Statement,
    Update,
    Value,
    bodies,
    walk,
    with_bodies,
    with_children,
    with_values,
)


def with_named_indices(program: Program, activity: Activity) -> Program:
    """The program with a local for each such index of an entry that carries a tangent."""
    return replace(program, body=_Names(program, activity).block(program.body))


class _Names:
    def __init__(self, program: Program, activity: Activity) -> None:
        self.activity = activity
        self.indices = Indices(program.body)
        self.changing = written(program.body)
        self.known: list[tuple[Value, Local]] = []  # what has a name here
        self.added: list[Statement] = []

    def block(self, body: Body) -> Body:
        """The block with its names."""
        outer, result = len(self.known), []
        for group in grouped(body):
            before, self.added = len(self.known), []
            new = [self._named(s) for s in group]
            result.extend(self.added)
            self.known[before:] = [k for k in self.known[before:] if self._is_lasting(k[0])]
            result.extend(with_bodies(s, tuple(map(self.block, bodies(s)))) if bodies(s) else s for s in new)
        del self.known[outer:]
        return tuple(result)

    def _is_lasting(self, value: Value) -> bool:
        """Whether nothing in the kernel changes what an index is made of."""
        for node in walk(value):
            if isinstance(node, Op) and node.name == "random":
                return False
            if (
                isinstance(node, (Read, Load))
                and (node.local if isinstance(node, Read) else node.container) in self.changing
            ):
                return False
        return True

    def _named(self, s: Statement) -> Statement:
        if not isinstance(s, (Declare, Assign, Update, Atomic, Return, Call, Boundary)):
            return s
        done: dict[Value, Value] = {}

        def change(value: Value) -> Value:
            if value not in done:
                new = (
                    with_children(value, change)
                    if isinstance(value, (Op, Load)) and self.activity.has(value)
                    else value
                )
                done[value] = self._entry(new) if isinstance(new, Load) and self.activity.has(new) else new
            return done[value]

        new = with_values(s, change)
        if isinstance(new, (Assign, Update, Atomic)) and isinstance(new.target, Load):
            return (
                replace(new, target=self._entry(new.target))
                if new.target.container in self.activity.containers
                else new
            )
        return new

    def _entry(self, load: Load) -> Load:
        indices, component = tuple(map(self._name, load.indices)), tuple(map(self._name, load.component))
        return replace(load, indices=indices, component=component)

    def _name(self, index: int | Value) -> int | Value:
        if isinstance(index, int) or self.indices.form(index) is not None:
            return index
        local = next((name for value, name in self.known if is_equal(value, index)), None)
        if local is None:
            local = Local("index", index.dtype, (), "temporary")
            self.known.append((index, local))
            self.indices.name(local)
            self.added.append(Declare(local, (index,), place=index.place))
        return Read(local)
