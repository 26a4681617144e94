"""The forward part of an adjoint: a block in locals that never change, with records of its statements.

A compound statement runs plainly, and has one mutable local for each number that it changes. It is taken apart where
its turn comes on the way back; there its body is a block of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import taichi_ext.program as ir
from taichi_ext.adjoint.block import Block, Later
from taichi_ext.adjoint.sweep import Sweep, array_of, substitution
from taichi_ext.analysis.loops import leaves
from taichi_ext.differentiate.rules.decompositions import equations
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import I32, Const, Container, Load, Local, Op, Read, Value
from taichi_ext.program.build import literal, operation, plain
from taichi_ext.simplify.usage import assigned_locals

_WithResults = TypeVar("_WithResults", bound=ir.Call | ir.Boundary)


@dataclass(frozen=True, eq=False)
class Definition:
    """A local that holds a value."""

    local: Local
    value: Value


@dataclass(frozen=True, eq=False)
class ArrayDefinition:
    """A local array that holds values."""

    local: Local
    values: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class StoreRecord:
    """A store to memory: ``old`` is the number from before, where it is put back."""

    statement: ir.Store
    target: ir.Target
    value: Value
    old: Value | None
    is_active: bool


@dataclass(frozen=True, eq=False)
class WeightedRecord:
    """A local whose derivative is that of a sum of arguments with weights."""

    local: Local
    arguments: tuple[Value, ...]
    weights: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class Compound:
    """A branch or loop.

    Attributes:
        env: the values of locals before it.
        carried: for each local that it changes, the value before, and the mutable local.
        log: the local that counts records of overwritten numbers in it.
    """

    env: dict[Local, Value]
    carried: dict[Local, tuple[Value, Local]]
    log: Local | None


@dataclass(frozen=True, eq=False)
class BranchRecord(Compound):
    """An ``if``, with its condition in a local."""

    statement: ir.If
    condition: Value


@dataclass(frozen=True, eq=False)
class LoopRecord(Compound):
    """A loop.

    Attributes:
        statement: the loop of the stage.
        domain: the first number and the end of a loop over a range.
        variable: the variable of the loop as it runs forward.
        counter: the local that counts iterations whose number is not known before.
        tapes: local arrays that hold numbers of each iteration; found on the way back, as the next.
        pushes: what each iteration keeps at its start.
    """

    statement: ir.For | ir.While
    domain: tuple[Value, ...]
    variable: Local | None
    counter: Local | None
    tapes: list[ir.Statement] = field(default_factory=list)
    pushes: list[ir.Statement] = field(default_factory=list)


def run_forward(block: Block, body: ir.Body) -> None:
    """Put the forward part of some statements into a block.

    A branch at the end is left out, since the way back begins with it, from the numbers before it.
    """
    for n, s in enumerate(body):
        match s:
            case ir.Declare(local=local) if local.shape:
                _declare_array(block, s)
            case ir.Declare(local=local):
                fresh(block, local, block.sub(s.values[0]), place=block.sweep.stage.recorded.get(local))
            case ir.Store(target=Read(local=local, index=())):
                value = block.sub(s.value)
                if isinstance(s, ir.Update):
                    value = Op(s.op, (block.env[local], value), local.dtype)
                fresh(block, local, value)
            case ir.Store():
                _store(block, s)
            case ir.If():
                _branch(block, s, is_last=n == len(body) - 1)
            case ir.For() | ir.While():
                _loop(block, s)
            case ir.Call():
                _call(block, s)
            case ir.Boundary():
                _boundary(block, s)
            case ir.Effect():
                pass
            case _:
                raise UnsupportedError(f"{ir.cited(s.place)}The adjoint of a {type(s).__name__} is not known.")


def fresh(block: Block, local: Local, value: Value, *, is_own: bool = True, place: Load | None = None) -> Local:
    """A new local for a version of a local.

    ``is_own``: whether its derivative is that of the value; ``place``: where the value can be loaded.
    """
    new = Local(local.name, local.dtype, (), "temporary" if local.kind != "parameter" else "user")
    block.emit(ir.Declare(new, (exact(plain(value) if place is None else block.sub(place), local.dtype),)))
    block.env[local] = Read(new)
    if is_own:
        block.definitions[new] = plain(value)
        if local.dtype.is_real and block.sweep.has(value):
            block.sweep.active.add(new)
            block.records.append(Definition(new, value))
    return new


def _declare_array(block: Block, s: ir.Declare) -> None:
    new = Local(s.local.name, s.local.dtype, s.local.shape, s.local.kind)
    values = tuple(map(block.sub, s.values))
    block.env[s.local] = Read(new)
    block.emit(ir.Declare(new, tuple(map(plain, values))))
    if s.local in block.sweep.activity.locals and s.local.dtype.is_real:
        block.adjoint_array(new)
        block.records.append(ArrayDefinition(new, values))


def _store(block: Block, s: ir.Store) -> None:
    target, value = block.target(s.target), block.sub(s.value)
    is_array = isinstance(target, Read)
    old: Value | None = None
    if isinstance(target, Read) or target.container in block.sweep.dirty:
        old = block.declare("old", target.dtype, target, "kept")
        new = operation(s.op, old, value) if isinstance(s, ir.Update) else value
        block.emit(ir.Assign(target, exact(new, target.dtype)))
    is_active = (target.local in block.sweep.local_arrays) if is_array else target.container in block.sweep.arrays
    if is_active or old is not None:
        block.records.append(StoreRecord(s, target, value, old, is_active and target.dtype.is_real))


def _log(sweep: Sweep, s: ir.Statement, block: Block) -> Local | None:
    """The count of overwritten numbers, if memory from before a statement gets other numbers in it."""
    inner = {local for x in s.within for local in ir.declared(x)}
    arrays = {m for m in s.written if isinstance(m, Local) and m.shape} - inner
    if not arrays and not any(isinstance(m, Container) and m in sweep.dirty for m in s.written):
        return None
    return block.declare("log", I32, 0, "user").local


def _carried(block: Block, s: ir.Statement) -> dict[Local, tuple[Value, Local]]:
    """Locals that change in a compound statement: their values before, and mutable locals."""
    result = {}
    changed = assigned_locals((s,))
    for v, before in block.env.items():
        if v in changed and not v.shape:
            mutable = Local(v.name, v.dtype, (), "user")
            block.emit(ir.Declare(mutable, (before,)))
            if v.dtype.is_real and v in block.sweep.activity.locals:
                block.sweep.active.add(mutable)
            result[v] = before, mutable
    return result


def _begin(block: Block, s: ir.Statement, *, is_run: bool = True) -> Compound:
    log, env = _log(block.sweep, s, block) if is_run else None, dict(block.env)
    result = Compound(env, _carried(block, s), log)
    block.env.update({v: Read(mutable) for v, (_, mutable) in result.carried.items()})
    return result


def _branch(block: Block, s: ir.If, *, is_last: bool) -> None:
    condition = block.sub(s.condition)
    if not isinstance(condition, Const):
        condition = block.declare("taken", condition.dtype, condition, "kept")
    c = _begin(block, s, is_run=not is_last)
    if not is_last:
        copy = Plain(block.sweep, dict(block.env), c.log)
        block.emit(ir.If(condition, *map(copy.block, ir.bodies(s))))
    block.records.append(BranchRecord(c.env, c.carried, c.log, s, condition))


def _loop(block: Block, s: ir.For | ir.While) -> None:
    domain = tuple(map(block.sub, s.domain)) if isinstance(s, ir.For) else ()
    c = _begin(block, s)
    counter = None
    if isinstance(s, ir.While) or leaves(s.body, ("break",)):
        counter = block.declare("count", I32, 0, "user").local
    variable, inner = None, dict(block.env)
    if isinstance(s, ir.For):
        variable = Local(s.variables[0].name, I32, (), "loop")
        inner[s.variables[0]] = Read(variable)
    body = Plain(block.sweep, inner, c.log).block(s.body)
    record = LoopRecord(c.env, c.carried, c.log, s, domain, variable, counter)

    def make() -> ir.Body:
        count = () if counter is None else (ir.Assign(Read(counter), operation("add", Read(counter), 1)),)
        whole = (*record.pushes, *count, *body)
        loop = ir.While(None, whole) if variable is None else ir.For("range", (variable,), domain, whole)
        return (*record.tapes, loop)

    block.emit(Later(make))
    block.records.append(record)


def _call(block: Block, s: ir.Call) -> None:
    """A function of the library, with the equations that give the derivatives of its results."""
    made = with_new_results(s, block.sub)
    if any(map(block.sweep.has, ir.values_of(made))):
        body = equations(s)
        if s in body:
            raise UnsupportedError(f"{ir.cited(s.place)}The derivative of {s.function} is not known.")
        run_forward(block, body)
        return
    block.emit(ir.with_values(made, plain))
    block.env.update(zip(s.results, map(Read, made.results), strict=True))


def _boundary(block: Block, s: ir.Boundary) -> None:
    """Values whose derivative is not that of their expression."""
    numbers = [block.sub(v) for v in s.numbers]
    if block.sweep.is_again:
        made = with_new_results(s, block.sub)
        block.emit(made)
        numbers = list(map(Read, made.results))
    for n, (result, value) in enumerate(zip(s.results, numbers, strict=True)):
        arguments: list[Value] = []
        weights: list[Value] = []
        if s.kind == "weighted":
            arguments, weights = s.sources("arguments"), s.sources("weights")
        elif s.kind == "replace_gradient":
            arguments, weights = [s.sources("surrogate")[n]], [literal(1, result.dtype)]
            if "weights" in s.given:
                weights = [s.sources("weights")[n]]
        elif s.kind != "stop_gradient":
            raise UnsupportedError(f"{ir.cited(s.place)}The adjoint of {s.kind!r} is not known.")
        sources = [block.sub(v) for v in arguments]
        new = fresh(block, result, value, is_own=False)
        if result.dtype.is_real and any(map(block.sweep.has, sources)):
            block.sweep.active.add(new)
            block.records.append(WeightedRecord(new, tuple(sources), tuple(map(block.sub, weights))))


# Blocks as they run forward in front of their adjoints: without stores that nothing there reads, with a log of others.


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


# One iteration of a loop without ``break`` and ``continue``: what follows a jump stands in branches.


def without_jumps(body: ir.Body) -> ir.Body:
    """The body of a loop as it runs once; a flag tells the blocks around whether it was left."""
    if not leaves(body):
        return body
    goes_on = Local("go", I32, (), "user")
    return (ir.Declare(goes_on, (literal(1, I32),)), *_without(body, goes_on))


def _without(body: ir.Body, goes_on: Local) -> ir.Body:
    made: list[ir.Statement] = []
    stop = ir.Assign(Read(goes_on), literal(0, I32))
    for n, s in enumerate(body):
        rest = body[n + 1 :]
        if isinstance(s, ir.Jump):
            return (*made, stop)
        if not isinstance(s, ir.If) or not leaves((s,)):
            made.append(s)
        elif s.then and isinstance(s.then[-1], ir.Jump) and not leaves(s.then[:-1]) and not leaves(s.orelse):
            # what follows runs in the other case alone
            return (*made, replace(s, then=(*s.then[:-1], stop), orelse=(*s.orelse, *_without(rest, goes_on))))
        else:
            made.append(replace(s, then=_without(s.then, goes_on), orelse=_without(s.orelse, goes_on)))
            after = _without(rest, goes_on)
            return (*made, ir.If(operation("eq", Read(goes_on), 1), after)) if after else tuple(made)
    return tuple(made)
