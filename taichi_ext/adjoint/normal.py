"""The normal form of a block: every load stands alone in a declaration, so that its adjoint has one place.

* Where operands may not be evaluated (``ifte``), a branch takes their place.
* A load whose indices do not change has one name until its memory is written.
* ``while condition`` is ``while True`` with a branch that leaves it, and inner loops have one variable.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from itertools import zip_longest

import taichi_ext.program as ir
from taichi_ext.analysis.same_values import ValueNumbers
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import I32, I64, U1, Const, Container, FoldedConst, Load, Local, Op, Read, Value
from taichi_ext.program.build import Coefficient, add, cast, literal, multiply, operation, subtract
from taichi_ext.program.values import joined_contents
from taichi_ext.simplify.usage import assigned_locals

_MOST_PLAIN = 6  # operations that are evaluated whether they are chosen or not
_COSTLY = frozenset(["truediv", "floordiv", "mod", "log", "sqrt", "pow", "rsqrt", "asin", "acos"])

Hoist = Callable[[Value], Value]


def whole(x: Coefficient) -> Value:
    """A whole number as a value."""
    return x if isinstance(x, Value) else literal(x, I32)


def unwrapped(index: Coefficient) -> Coefficient:
    """An index whose multiples do not wrap: the number of an entry may lie beyond the type of its indices."""
    return cast(index, I32) if isinstance(index, Value) and index.dtype not in (I32, I64) else index


def running_number(indices: Iterable[Coefficient], sizes: Iterable[int], firsts: Iterable[int] = ()) -> Value:
    """The number of an entry in memory; ``firsts`` are the first indices along axes that do not begin at 0."""
    number: Coefficient = 0
    for i, size, first in zip_longest(indices, sizes, firsts, fillvalue=0):
        number = add(multiply(number, size), subtract(unwrapped(i), first))
    return whole(number)


def normal(body: ir.Body) -> ir.Body:
    return _Normal(frozenset(assigned_locals(body))).block(body)


def lower_loop(s: ir.For, hoist: Hoist, keep: Hoist) -> tuple[Local, tuple[Value, Value], ir.Body]:
    """The one variable of an inner loop, its first value and its end, and declarations of the loop's own variables."""
    if len(s.domain) == 3 and s.kind == "range":
        first, end, step = (keep(hoist(x)) for x in s.domain)
        return _with_steps(s, first, end, step, keep)
    bounds = _bounds(s, hoist)
    if s.kind == "range":
        return s.variables[0], (keep(bounds[0][0]), keep(bounds[0][1])), ()
    sides = [(keep(a), keep(b)) for a, b in bounds]
    sizes = [keep(_count(a, b)) for a, b in sides]
    flat = Local("flat", I32, (), "loop")
    rest: Value = Read(flat)
    declares: list[ir.Statement] = []
    indices: list[Value] = []
    for n in reversed(range(len(sides))):
        index = rest if n == 0 else operation("mod", rest, sizes[n])
        indices.insert(0, whole(add(index, sides[n][0])))
        if n:
            part = Local("rest", I32, (), "temporary")
            declares.append(ir.Declare(part, (operation("floordiv", rest, sizes[n]),)))
            rest = Read(part)
    if len(s.variables) == len(sides) and not s.variables[0].shape:
        declares += [ir.Declare(v, (i,)) for v, i in zip(s.variables, indices, strict=True)]
    else:
        declares.append(ir.Declare(s.variables[0], tuple(indices)))
    total: Coefficient = 1
    for n in sizes:
        total = multiply(total, n)
    return flat, (literal(0, I32), keep(whole(total))), tuple(declares)


def _bounds(s: ir.For, hoist: Hoist) -> list[tuple[Value, Value]]:
    """The first value and the end of each variable."""
    if s.kind in ("field", "grouped"):
        over = s.domain[0]
        if not isinstance(over, Container) or over.shape is None:
            raise UnsupportedError(f"{ir.cited(s.place)}The adjoint of an inner loop over a sparse node is not known.")
        firsts = over.offset or (0,) * len(over.shape)
        return [(literal(o, I32), literal(o + n, I32)) for n, o in zip(over.shape, firsts, strict=True)]
    pairs = [(0, *s.domain)[-2:]] if s.kind == "range" else s.domain
    return [
        tuple(hoist(whole(x)) for x in (d if isinstance(d, (tuple, list)) else (0, d)))  # type: ignore[misc]
        for d in pairs
    ]


def _count(a: Value, b: Value) -> Value:
    if isinstance(a, Const) and isinstance(b, Const):
        return literal(max(0, b.value - a.value), I32)
    return operation("max", whole(subtract(b, a)), literal(0, I32))


def _with_steps(
    s: ir.For, first: Value, end: Value, step: Value, keep: Hoist
) -> tuple[Local, tuple[Value, Value], ir.Body]:
    """A range with steps: a loop over the numbers of its iterations."""
    number = Local("number", I32, (), "loop")
    span = operation("select", operation("gt", step, 0), subtract(end, first), subtract(first, end))
    size = operation("abs", step)
    trips = operation("floordiv", operation("sub", operation("add", span, size), 1), size)
    index = whole(add(multiply(Read(number), step), first))
    return number, (literal(0, I32), keep(operation("max", trips, 0))), (ir.Declare(s.variables[0], (index,)),)


class _Normal:
    """Brings blocks into normal form; ``loaded`` are the loads that have a name where it is."""

    def __init__(self, assigned: frozenset[Local]) -> None:
        self.assigned = assigned
        self.loaded: dict[tuple[Hashable, ...], Read] = {}
        self.numbers = ValueNumbers()

    def block(self, body: ir.Body) -> ir.Body:
        made: list[ir.Statement] = []
        before = dict(self.loaded)
        for s in body:
            if isinstance(s, (ir.For, ir.While)):
                self._forget(s.written)
            self._statement(s, made)
            self._forget(s.written)
        self.loaded = {k: v for k, v in before.items() if k in self.loaded}
        return tuple(made)

    def _forget(self, written: Iterable[object]) -> None:
        memory = frozenset(written)
        if memory and self.loaded:
            self.loaded = {k: v for k, v in self.loaded.items() if k[0] not in memory}

    def _name(self, load: Load | Read) -> tuple[Hashable, ...] | None:
        """The name of a load whose indices do not change; None if they may."""
        parts = joined_contents(ir.children(load))
        is_fixed = parts.is_pure and not parts.containers and parts.locals.isdisjoint(self.assigned)
        return (load.memory, self.numbers.of(load)) if is_fixed else None

    def _hoist(self, value: Value, out: list[ir.Statement], known: dict[Value, Value]) -> Value:
        """The value without loads, which are declared before it."""
        result = known.get(value)
        if result is None:
            if isinstance(value, Op) and value.name in ir.LAZY:
                result = self._lazy(value, out, known)
            elif isinstance(value, FoldedConst) and value.source.contents.containers:  # a number that has an adjoint
                result = self._hoist(value.source, out, known)
            else:
                result = ir.with_children(value, lambda x: self._hoist(x, out, known))
                if isinstance(result, Load) or (isinstance(result, Read) and result.index):
                    result = self._loaded(result, out, value.place)
                elif isinstance(result, Op) and result.name == "random":
                    result = _declared("drawn", result, out, value.place)
            known[value] = result
        return result

    def _loaded(self, load: Load | Read, out: list[ir.Statement], place: ir.Place | None) -> Read:
        name = self._name(load)
        if name is not None and name in self.loaded:
            return self.loaded[name]
        result = _declared(f"at_{load.memory.name}", load, out, place)
        if name is not None:
            self.loaded[name] = result
        return result

    def _lazy(self, value: Op, out: list[ir.Statement], known: dict[Value, Value]) -> Value:
        if value.name != "ifte":
            return _declared("truth", value, out) if value.contents.containers else value
        c, a, b = value.args
        if _is_plain(a) and _is_plain(b):
            return Op("select", tuple([self._hoist(x, out, known) for x in (c, a, b)]), value.dtype)
        condition = self._hoist(c, out, known)
        chosen = Local("chosen", value.dtype, (), "temporary")
        out.append(ir.Declare(chosen, (literal(0, value.dtype),)))
        sides: list[ir.Body] = []
        for side in (a, b):
            inner: list[ir.Statement] = []
            before = dict(self.loaded)
            inner.append(ir.Assign(Read(chosen), self._hoist(side, inner, dict(known))))
            self.loaded = before
            sides.append(tuple(inner))
        out.append(ir.If(condition, *sides))
        return Read(chosen)

    def _statement(self, s: ir.Statement, out: list[ir.Statement]) -> None:
        known: dict[Value, Value] = {}

        def hoist(value: Value) -> Value:
            return self._hoist(value, out, known)

        match s:
            case ir.Effect():
                if s.stopped:
                    raise UnsupportedError(f"{ir.cited(s.place)}The adjoint of {s.function!r} is not known.")
                out.append(ir.with_values(s, hoist))
            case ir.Declare(local=local, values=(Load() as load,)) if not local.shape:
                self._declare(s, ir.with_children(load, hoist), out)
            case ir.Declare() | ir.Call() | ir.Boundary():
                out.append(ir.with_values(s, hoist))
            case ir.Store():
                self._store(s, out, hoist)
            case ir.If():
                condition = hoist(s.condition)
                out.append(replace(s, condition=condition, then=self.block(s.then), orelse=self.block(s.orelse)))
            case ir.While():
                head: list[ir.Statement] = []
                if s.condition is not None:
                    left = Op("logical_not", (self._hoist(s.condition, head, {}),), U1)
                    head.append(ir.If(left, (ir.Jump("break"),)))
                out.append(ir.While(None, (*head, *self.block(s.body)), place=s.place))
            case ir.For():
                body = self.block(s.body)
                variable, domain, declares = lower_loop(s, hoist, lambda x: _kept(x, out))
                body = (*declares, *body)
                out.append(ir.For("range", (variable,), domain, body, is_together=s.is_together, place=s.place))
            case ir.Jump():
                out.append(s)
            case _:
                raise UnsupportedError(f"{ir.cited(s.place)}The adjoint of a {type(s).__name__} is not known.")

    def _declare(self, s: ir.Declare, load: Value, out: list[ir.Statement]) -> None:
        """A local that holds an entry: the name of later loads of it."""
        assert isinstance(load, Load)
        name = self._name(load)
        if name is not None and name in self.loaded:
            out.append(replace(s, values=(self.loaded[name],)))
            return
        out.append(replace(s, values=(load,)))
        if name is not None and s.local not in self.assigned and s.local.dtype == load.dtype:
            self.loaded[name] = Read(s.local)

    def _store(self, s: ir.Store, out: list[ir.Statement], hoist: Hoist) -> None:
        """Sums stay updates; other operations are an assignment of an expression of the old number."""
        value, target = hoist(s.value), ir.with_children(s.target, hoist)
        assert isinstance(target, (Load, Read))
        if isinstance(s, ir.Assign):
            out.append(ir.Assign(target, value, place=s.place))
            return
        is_atomic = isinstance(s, ir.Atomic)
        assert isinstance(s, (ir.Update, ir.Atomic))
        name, result = (s.function.removeprefix("atomic_"), s.result) if isinstance(s, ir.Atomic) else (s.op, None)
        if name in ("add", "sub") and result is None and (isinstance(target, Load) or target.index):
            out.append(ir.Update(target, name, value, place=s.place))
            return
        name = f"bit_{name}" if is_atomic and name in ("and", "or", "xor") else name
        old = result or Local("old", target.dtype, (), "temporary")
        out.append(ir.Declare(old, (target,), place=s.place))
        given = cast(value, target.dtype) if is_atomic else value
        operands = (given, Read(old)) if is_atomic and name in ("min", "max") else (Read(old), given)
        out.append(ir.Assign(target, operation(name, *operands), place=s.place))


def _declared(name: str, value: Value, out: list[ir.Statement], place: ir.Place | None = None) -> Read:
    local = Local(name, value.dtype, (), "temporary")
    out.append(ir.Declare(local, (value,), place=place))
    return Read(local)


def _kept(x: Value, out: list[ir.Statement]) -> Value:
    return x if isinstance(x, Const) else _declared("bound", cast(x, I32), out)


def _is_plain(x: Value) -> bool:
    """Whether a value can be evaluated where it is not chosen, and is cheap."""
    return (
        not x.contents.containers
        and x.contents.size <= _MOST_PLAIN
        and not any((isinstance(n, Op) and n.name in _COSTLY) or (isinstance(n, Read) and n.index) for n in ir.walk(x))
    )
