"""A block as it runs forward in front of its adjoint: without stores that nothing there reads, with a log of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import taichi_ext.program as ir
from taichi_ext.adjoint.sweep import Sweep, substitution
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import I32, Local, Op, Read, Value
from taichi_ext.program.build import operation

_WithResults = TypeVar("_WithResults", bound=ir.Call | ir.Boundary)


def exact(value: Value, dtype: ir.Type) -> Value:
    """The value in the type of what it is stored to."""
    return value if value.dtype == dtype else Op("cast", (value,), dtype)


def with_new_results(s: _WithResults, change: Callable[[Value], Value]) -> _WithResults:
    """The statement with changed values, and results of its own with the same names and types."""
    results = tuple([Local(r.name, r.dtype, r.shape, r.kind) for r in s.results])
    return replace(ir.with_values(s, change), results=results)  # type: ignore[return-value, call-arg]


@dataclass(eq=False)
class Plain:
    """Copies blocks.

    Attributes:
        sweep: of the stage.
        env: the values of locals from around the block.
        arrays: its local arrays.
        log: the local that counts the records of overwritten numbers; None: no number is kept.
        inner: local arrays of the block itself.
    """

    sweep: Sweep
    env: dict[Local, Value]
    arrays: dict[Local, Local]
    log: Local | None
    inner: frozenset[Local] = field(default=frozenset())

    def block(self, body: ir.Body) -> ir.Body:
        copy = Plain(self.sweep, dict(self.env), dict(self.arrays), self.log, self.inner)
        return tuple([x for s in body for x in copy.statement(s)])

    def statement(self, s: ir.Statement) -> ir.Body:
        change = substitution(self.env, self.arrays)
        match s:
            case ir.Declare(local=local):
                place = self.sweep.stage.recorded.get(local)
                values = tuple(map(change, s.values if place is None else (place,)))
                return (ir.Declare(self._own(local), values),)
            case ir.Store():
                return self._store(s)
            case ir.If():
                return (ir.If(change(s.condition), *map(self.block, ir.bodies(s))),)
            case ir.For(variables=(old,)):
                variable = Local(old.name, I32, (), "loop")
                domain = tuple(map(change, s.domain))
                self.env[old] = Read(variable)
                return (ir.For("range", (variable,), domain, self.block(s.body)),)
            case ir.While():
                return (ir.While(None, self.block(s.body)),)
            case ir.Boundary() if not self.sweep.is_again:
                return tuple([x for d in s.declarations for x in self.statement(d)])
            case ir.Call() | ir.Boundary():
                made = with_new_results(s, change)
                for old, new in zip(s.results, made.results, strict=True):
                    self._name(old, new)
                return (made,)
            case ir.Jump():
                return (s,)
            case ir.Effect():
                return ()
        raise UnsupportedError(f"{ir.cited(s.place)}The adjoint of a {type(s).__name__} is not known.")

    def _own(self, local: Local) -> Local:
        new = Local(local.name, local.dtype, local.shape, local.kind if local.shape else "user")
        self._name(local, new)
        return new

    def _name(self, old: Local, new: Local) -> None:
        if new.shape:
            self.arrays[old] = new
            self.inner |= {new}
        else:
            self.env[old] = Read(new)

    def _store(self, s: ir.Store) -> ir.Body:
        change = substitution(self.env, self.arrays)
        target: ir.Target
        is_logged = False
        if isinstance(s.target, Read) and not s.target.index:
            local = self.env[s.target.local]
            assert isinstance(local, Read)
            target = local
        elif isinstance(s.target, Read):
            array = self.arrays.get(s.target.local, s.target.local)
            target = replace(ir.with_children(s.target, change), local=array)  # type: ignore[assignment]
            is_logged = array not in self.inner
        elif s.target.container not in self.sweep.dirty:
            return ()
        else:
            target = ir.with_children(s.target, change)  # type: ignore[assignment]
            is_logged = True
        value = change(s.value)
        if isinstance(s, ir.Update):
            value = operation(s.op, target, value)
        store = ir.Assign(target, exact(value, target.dtype))
        return (*self.sweep.tape.logged(target, self.log), store) if is_logged and self.log is not None else (store,)
