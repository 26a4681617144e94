"""Statements of a program with their tangents: dispatch by the kind of statement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import taichi_ext.program as ir
from taichi_ext.analysis.stores import grouped
from taichi_ext.differentiate.edges.boundaries import boundary
from taichi_ext.differentiate.edges.rules import RuleContext
from taichi_ext.differentiate.sparse.entry_writer import EntryWriter
from taichi_ext.differentiate.statements.container_stores import ContainerStores
from taichi_ext.differentiate.statements.loop_inputs import LoopInputs
from taichi_ext.differentiate.statements.reverse_loops import Reversals
from taichi_ext.differentiate.storage.storages import Storages
from taichi_ext.differentiate.transform import special
from taichi_ext.differentiate.transform.special import serialized

# Names of calls that are kept unchanged, on values with tangents or without
KEPT = frozenset(("print", "assert", "append", ".append"))


@dataclass(frozen=True)
class Transform:
    """The statements of one walk.

    Attributes:
        context: the walk, forms of values, tangents of locals.
        stores: the stores to containers.
        storages: the storages of locals.
        reversals: the loops whose tangents are accumulated backwards.
        inputs: the inputs of the others.
        writer: the writer of a sparse Jacobian's entries.
    """

    context: RuleContext
    stores: ContainerStores
    storages: Storages
    reversals: Reversals
    inputs: LoopInputs
    writer: EntryWriter | None

    def body(
        self,
        body: ir.Body,
        variables: tuple[ir.Local, ...] = (),
        begin: Callable[[], object] = tuple,
        finish: Callable[[], object] = tuple,
    ) -> ir.Body:
        """A block with tangents and these variables; ``begin`` and ``finish`` emit statements at its start and end."""
        context, walk = self.context, self.context.walk
        facts = walk.facts
        with walk.cursor.in_block(variables), walk.builder.collecting() as collected:
            begin()
            for s, group in self._statements(body):
                match s:
                    case ir.Declare():
                        context.locals.declare(s)
                    case ir.Assign(target=ir.Read()) | ir.Update(target=ir.Read()):
                        context.locals.assign(s)
                    case ir.Assign() | ir.Update() if s.target.memory in facts.activity.containers:
                        self.stores.store(facts.stores.of[s], group)
                    case ir.Atomic() if facts.is_active(s.target):
                        special.atomic(context, self.stores, self.storages, s)
                    case ir.Atomic() if special.is_serial_product(walk, s):
                        special.product(walk, s)
                    case ir.If():
                        walk.builder.emit(replace(s, then=self.body(s.then), orelse=self.body(s.orelse)))
                    case ir.For() if walk.plan.is_reversed(s):
                        self.reversals.loop(s, self.body)
                    case ir.For() | ir.While():
                        self._loop(s)
                    case ir.Return():
                        special.returned(context, self.writer, self.storages.gradient, s)
                    case ir.Boundary():
                        boundary(context, s)
                    case ir.Call() if any(map(facts.is_active, ir.values_of(s))):
                        special.call(context, s)
                    case ir.Effect():
                        self._effect(s)
                    case _:
                        for one in group:
                            walk.builder.emit(one)
            finish()
        return tuple(collected)

    def _statements(self, body: ir.Body) -> Iterator[tuple[ir.Statement, tuple[ir.Statement, ...]]]:
        """Move to each statement in turn; with the others that store to the same entry."""
        for group in grouped(body):
            if self.writer is not None and self.context.walk.cursor.block.is_kernel:
                self.writer.stage += 1
            self.context.walk.builder.place = group[0].place
            self.context.linearizer.begin_statement()
            yield group[0], group

    def _effect(self, s: ir.Effect) -> None:
        """Emit a call unchanged."""
        walk, seeds = self.context.walk, self.context.walk.facts.seeds
        name = s.function if isinstance(s.function, str) else getattr(s.function, "__name__", "")
        if name == "stop_grad" and not seeds.use.is_reverse:
            walk.cursor.block.stopped.update(s.args)
            if seeds.use.is_again:
                walk.builder.emit(s)
            return
        if name not in KEPT and any(map(walk.facts.is_active, ir.values_of(s))):
            special.raise_effect(s)
        walk.builder.emit(s)

    def _loop(self, s: ir.For | ir.While) -> None:
        """Emit a loop that is accumulated forward."""
        walk, facts = self.context.walk, self.context.walk.facts
        if self.writer is not None:
            self.writer.counts.before(s)
        inside = self.inputs.begin(s)
        if inside is None and isinstance(s, ir.For):
            self.reversals.forward.append(s)
        variables = tuple(v for v in s.variables if v not in facts.changed) if isinstance(s, ir.For) else ()
        walk.builder.frozen.update(variables)
        with walk.cursor.in_loop(facts.loops[s]):
            body = self.body(s.body, variables)
        if not walk.cursor.loops:
            self.stores.coverage.end_loop()
        new = replace(s, body=body)
        if isinstance(new, ir.For) and s in walk.plan.serial:
            over = new.domain[0] if new.domain else None
            extent = facts.seeds.extents.get(over) if isinstance(over, ir.Container) else None
            new = serialized(new, extent, is_host=facts.seeds.device.is_host)
        walk.builder.emit(new)
        self.inputs.end(inside)
        if self.writer is not None:
            self.writer.counts.after(s)
