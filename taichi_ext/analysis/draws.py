"""Random numbers that Taichi does not draw, since nothing uses them: as many are drawn as in a plain run.

Taichi drops a draw whose number is not read, or only used for a value that is overwritten before it is read. Like this
module, it follows the flow of control: in ``t += ti.random()``, in a loop, the next iteration reads each number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import taichi_ext.program as ir
from taichi_ext.analysis.same_values import is_equal
from taichi_ext.program.values import joined_contents
from taichi_ext.simplify.pipeline import as_scalars, is_op
from taichi_ext.simplify.usage import assigned_locals, changed_locals, kept_locals

Locals = frozenset[ir.Local]


def is_draw(s: ir.Statement) -> bool:
    return isinstance(s, ir.Declare) and bool(s.values) and is_op(s.values[0], "random")


def without_unused_draws(program: ir.Program) -> ir.Program:
    """The recorded program without draws that Taichi drops, and without statements that only use them."""
    if not any(map(is_draw, ir.statements(program.body))):
        return program
    body, before = as_scalars(program.body), ()
    while body != before:
        body, before = _without_dead_stores(body), body
    return replace(program, body=body)


def _without_dead_stores(body: ir.Body) -> ir.Body:
    liveness = _Liveness(frozenset(kept_locals(body)))
    liveness.block(body, frozenset(), _Exits(frozenset(), frozenset()))

    assigned, overwritten = assigned_locals(body), _overwritten_entries(body)

    def change(s: ir.Statement) -> ir.Statement | ir.Body:
        changed = changed_locals(s)
        if changed and changed.isdisjoint(liveness.after[s]):
            return _as_zero(s) if isinstance(s, ir.Declare) and s.local in assigned else ()
        # an empty loop stays, with the draws of its bound
        is_empty = isinstance(s, ir.If) and not s.within
        return () if is_empty or s in overwritten else s

    return ir.mapped(body, change)


def _overwritten_entries(body: ir.Body) -> set[ir.Statement]:
    """The stores to entries that a later statement of the same block overwrites, before anything may read them."""
    result: set[ir.Statement] = set()
    for block in (body, *(inner for s in ir.statements(body) for inner in ir.bodies(s))):
        for n, s in enumerate(block):
            if isinstance(s, ir.Assign) and isinstance(s.target, ir.Load) and _is_overwritten(s.target, block[n + 1 :]):
                result.add(s)
    return result


def _is_overwritten(entry: ir.Load, rest: ir.Body) -> bool:
    indices = joined_contents(ir.children(entry))
    for s in rest:
        if indices.containers or not all(_leaves(inner, entry, indices.locals) for inner in ir.statements((s,))):
            return False
        if isinstance(s, ir.Assign) and is_equal(s.target, entry):
            return True
    return False


def _leaves(s: ir.Statement, entry: ir.Load, indices: Locals) -> bool:
    """Whether a statement neither reads the entry's container nor changes the locals in its indices, and goes on."""
    if not isinstance(s, (ir.Declare, ir.Assign, ir.Update, ir.If)) or entry.container in s.contents.containers:
        return False
    is_read = isinstance(s, ir.Update) and isinstance(s.target, ir.Load) and s.target.container is entry.container
    return not is_read and indices.isdisjoint(changed_locals(s))


def _as_zero(s: ir.Declare) -> ir.Declare:
    """The declaration of a local whose first value is not read."""
    if all(isinstance(v, ir.Const) for v in s.values):
        return s
    zero = ir.Const(0.0 if s.local.dtype.is_real else 0, s.local.dtype)
    return replace(s, values=(zero,) * len(s.values))


@dataclass(frozen=True)
class _Exits:
    """The locals that are read after a loop is left, and after the next iteration begins."""

    after_break: Locals
    after_continue: Locals


class _Liveness:
    """The locals that may be read after each statement; ``always`` may be read anywhere."""

    def __init__(self, always: Locals) -> None:
        self.always = always
        self.after: dict[ir.Statement, Locals] = {}

    def block(self, body: ir.Body, live: Locals, exits: _Exits) -> Locals:
        """The locals that are live at the start of a block, from those that are live at its end."""
        for s in reversed(body):
            self.after[s] = self.after.get(s, self.always) | live
            live = self._before(s, live, exits)
        return live

    def _before(self, s: ir.Statement, live: Locals, exits: _Exits) -> Locals:
        read = s.contents.locals
        if isinstance(s, ir.Jump):
            return exits.after_break if s.kind == "break" else exits.after_continue
        if isinstance(s, ir.If):
            return read | self.block(s.then, live, exits) | self.block(s.orelse, live, exits)
        if isinstance(s, (ir.For, ir.While)):
            is_endless = isinstance(s, ir.While) and s.condition is None
            head, before = (read if is_endless else live | read), None
            while head != before:
                before = head
                head |= self.block(s.body, head, _Exits(live, head))
            return head
        match s:
            case ir.Declare() | ir.Assign(target=ir.Read(index=())):
                return (live - changed_locals(s)) | read
            case ir.Store():
                return live | read | changed_locals(s)
        return live | read
