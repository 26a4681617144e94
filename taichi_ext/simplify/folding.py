"""Put copies, constants and temporaries that are used once into the expressions that use them.

A branch whose condition is known is replaced by the side that is taken.

A temporary moves down to its use if nothing in between changes its operands, and never into a loop. A copy of a local
is replaced by the local if that does not change before the last read of the copy.
"""

from __future__ import annotations

from collections import Counter

import taichi_ext.program as ir
from taichi_ext.simplify.constants import tidied
from taichi_ext.simplify.usage import assigned_locals, kept_locals, read_counts

LONGEST = 12  # operations in a value that moves; longer lines are slow in Taichi's front end
FOLDED_KINDS = ("argument", "temporary", "partial", "weight", "tangent", "inside")


def folded(body: ir.Body) -> ir.Body:
    """The block with fewer locals."""
    return _Folding(body).block(body)


class _Folding:
    def __init__(self, body: ir.Body) -> None:
        self.changed = assigned_locals(body)
        self.kept = kept_locals(body)
        self.written: set[ir.Local | ir.Container] = set()
        for s in body:
            self.written |= s.written
        self.counts: Counter[ir.Local] = read_counts(body)
        self.replaced: dict[ir.Local, ir.Value] = {}
        self._last_reads: dict[int, dict[ir.Local | ir.Container, int]] = {}

    def last_reads(self, body: ir.Body) -> dict[ir.Local | ir.Container, int]:
        """Where in a block each local is read for the last time."""
        if id(body) not in self._last_reads:
            self._last_reads[id(body)] = {memory: n for n, s in enumerate(body) for memory in s.reads}
        return self._last_reads[id(body)]

    def block(self, body: ir.Body) -> ir.Body:
        made: list[ir.Statement] = []
        for n, s in enumerate(body):
            s = self.statement(s)
            if isinstance(s, ir.Declare) and self.is_candidate(s) and self.is_unneeded(s.local, s.values[0], body, n):
                self.replaced[s.local] = s.values[0]
                continue
            if isinstance(s, ir.If) and isinstance(s.condition, ir.Const):
                made.extend(self.block(s.then if s.condition.value else s.orelse))
                continue
            made.append(ir.with_blocks(s, self.block))
        return tuple(made)

    def statement(self, s: ir.Statement) -> ir.Statement:
        def change(node: ir.Value) -> ir.Value:
            if isinstance(node, ir.Read) and node.local in self.replaced and not node.index:
                return self.replaced[node.local]
            return tidied(node)

        return ir.with_nodes(s, change)

    def is_candidate(self, s: ir.Declare) -> bool:
        local = s.local
        is_free = local.kind in FOLDED_KINDS and local not in self.changed and local not in self.kept
        return is_free and not local.shape and s.contents.is_pure

    def is_unneeded(self, local: ir.Local, value: ir.Value, body: ir.Body, n: int) -> bool:
        """Whether the value of a local, declared by the statement ``n`` of a block, can stand where it is read."""
        if self.is_trivial(value) or self.is_cheap(local, value) or self.can_move(local, value, body, n):
            return True
        return isinstance(value, ir.Read) and not value.index and self.is_copy(local, value.local, body, n)

    def is_trivial(self, value: ir.Value) -> bool:
        """Whether a value can stand wherever the local is read."""
        return isinstance(value, (ir.Const, ir.Known, ir.Size)) or (
            isinstance(value, ir.Read) and not self.sources(value)
        )

    def is_cheap(self, local: ir.Local, value: ir.Value) -> bool:
        """Whether a value is a number times another local, at most two times: shorter without a name of its own."""
        while isinstance(value, ir.Op) and (
            value.name == "neg" or (value.name == "mul" and isinstance(value.args[0], ir.Const))
        ):
            value = value.args[-1]
        return self.counts[local] <= 2 and isinstance(value, ir.Read) and not value.index and self.is_trivial(value)

    def sources(self, value: ir.Value) -> set[ir.Local | ir.Container]:
        """The changeable operands of a value."""
        return {m for group in value.contents[:2] for m in group if m in self.written}

    def can_move(self, local: ir.Local, value: ir.Value, body: ir.Body, n: int) -> bool:
        """Whether the only use of a local comes later in its block, and the value is still the same there."""
        if self.counts[local] != 1 or value.contents.size > LONGEST:
            return False
        sources = self.sources(value)
        for s in body[n + 1 :]:
            if local in s.contents.locals:
                return not isinstance(s, ir.While)
            if local in s.reads:
                return isinstance(s, ir.If) and not sources and self.is_in_branches(s, local)
            if sources and sources & s.written:
                return False
        return False

    def is_copy(self, local: ir.Local, source: ir.Local, body: ir.Body, n: int) -> bool:
        """Whether a local that is declared as ``source`` is the same wherever it is read."""
        if local.dtype != source.dtype:
            return False
        rest = body[n + 1 : self.last_reads(body).get(local, n) + 1]
        changes = next((m for m, s in enumerate(rest) if source in s.written), len(rest))
        return changes == len(rest) or (changes == len(rest) - 1 and not ir.bodies(rest[-1]))

    def is_in_branches(self, s: ir.If, local: ir.Local) -> bool:
        """Whether a use is in a statement of a branch itself, not in a loop or branch in it."""
        inner = (s for block in ir.bodies(s) for s in block)
        return any(local in s.contents.locals and not isinstance(s, ir.While) for s in inner)
