"""A block as it runs forward in front of its adjoint: without stores that nothing there reads, with a log of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import taichi_ext.program as ir
from taichi_ext.adjoint.sweep import Sweep, array_of, substitution
from taichi_ext.program import Local, Op, Read, Value
from taichi_ext.program.build import operation

_WithResults = TypeVar("_WithResults", bound=ir.Call | ir.Boundary)


def exact(value: Value, dtype: ir.Type) -> Value:
    """The value in the type of what it is stored to."""
    return value if value.dtype == dtype else Op("cast", (value,), dtype)


def with_new_results(s: _WithResults, change: Callable[[Value], Value]) -> _WithResults:
    """The statement with changed values, and results of its own with the same names and types."""
    return ir.with_declared(ir.with_values(s, change), replace)  # type: ignore[return-value]


@dataclass(eq=False)
class Plain:
    """Copies blocks.

    Attributes:
        sweep: of the stage.
        env: the values of locals from around the block.
        log: the local that counts the records of overwritten numbers; None: no number is kept.
        inner: local arrays of the block itself.
    """

    sweep: Sweep
    env: dict[Local, Value]
    log: Local | None
    inner: frozenset[Local] = field(default=frozenset())

    def block(self, body: ir.Body) -> ir.Body:
        copy = Plain(self.sweep, dict(self.env), self.log, self.inner)
        return tuple([x for s in body for x in copy.statement(s)])

    def statement(self, s: ir.Statement) -> ir.Body:
        match s:
            case ir.Store():
                return self._store(s)
            case ir.Effect():
                return ()
            case ir.Boundary() if not self.sweep.is_again:
                return tuple([x for d in s.declarations for x in self.statement(d)])
            case ir.Declare(local=local) if local in self.sweep.stage.recorded:
                s = replace(s, values=(self.sweep.stage.recorded[local],))
            case ir.For():
                s = replace(s, is_together=False)
        kind = "loop" if isinstance(s, ir.For) else "user"
        made = ir.with_declared(ir.with_values(s, substitution(self.env)), lambda local: self._own(local, kind))
        return (ir.with_blocks(made, self.block),)

    def _own(self, local: Local, kind: str) -> Local:
        new = replace(local) if local.shape else replace(local, kind=kind)
        self.env[local] = Read(new)
        self.inner |= {new} if new.shape else set()
        return new

    def _store(self, s: ir.Store) -> ir.Body:
        change = substitution(self.env)
        target: ir.Target = ir.with_children(s.target, change)  # type: ignore[assignment]
        is_logged = False
        if isinstance(target, Read):
            target = replace(target, local=array_of(self.env, target.local))
            is_logged = bool(target.index) and target.local not in self.inner
        elif target.container not in self.sweep.dirty:
            return ()
        else:
            is_logged = True
        value = change(s.value)
        if isinstance(s, ir.Update):
            value = operation(s.op, target, value)
        store = ir.Assign(target, exact(value, target.dtype))
        return (*self.sweep.tape.logged(target, self.log), store) if is_logged and self.log is not None else (store,)
