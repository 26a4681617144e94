"""Builders of values and statements: operations with their types, temporaries, blocks."""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import TypeGuard, overload

from taichi_ext.program import (
    F32,
    I32,
    U1,
    Assign,
    Body,
    Const,
    Container,
    Declare,
    For,
    Load,
    Local,
    Op,
    Place,
    Read,
    Size,
    Statement,
    Type,
    Update,
    Value,
    While,
)
from taichi_ext.program.statements import Target

# Products in a program that is differentiated again, one factor of which may be infinite where the other is 0: they
# are 0 where the first factor is 0, or where either factor is.
GUARDED, GUARDED_BOTH = "guarded", "guarded both"
INVERSE = "inverse"  # 1 / x, and 0 where x is 0

LARGEST_EXACT = 2048  # float16 holds all whole numbers up to this one
Number = int | float
Coefficient = Value | Number
Index = Value | int

# Kinds of temporaries by their names: partials, products and sums of tangents, conditions on indices.
_KINDS = {"partial": "partial", "w": "weight", "inside": "inside"}
_FOLDED = frozenset(("add", "sub", "mul"))
_TRUTHS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"))


@cache
def promoted(a: Type, b: Type) -> Type:
    """The type of an operation on two types."""
    return max(a, b, key=lambda t: (t.is_real, t.bits, not t.is_signed))


def literal(x: Number, dtype: Type) -> Const:
    return Const(float(x) if dtype.is_real else int(x), dtype)


def operation(name: str, *args: Value | Number) -> Value:
    """An operation; a number takes the type of the other operands."""
    folded = _of_integers(name, args) if name in _FOLDED else None
    if folded is not None:
        return folded
    dtype, is_mixed = None, False
    for a in args:
        if not isinstance(a, Value):
            is_mixed = True
            continue
        other = a.dtype
        if other is not dtype and other != U1:
            dtype = other if dtype is None or dtype == other else promoted(dtype, other)
    dtype = dtype or F32
    values = tuple([a if isinstance(a, Value) else literal(a, dtype) for a in args]) if is_mixed else args
    return Op(name, values, U1 if name in _TRUTHS else dtype)  # type: ignore[arg-type]


def _of_integers(name: str, args: tuple[Value | Number, ...]) -> Const | None:
    """A sum or product of known integers."""
    a, b = args
    x, y = number_of(a), number_of(b)
    if x is None or y is None or isinstance(x, float) or isinstance(y, float):
        return None
    if not any(isinstance(c, Const) and c.dtype == I32 for c in args):
        return None
    return Const({"add": x + y, "sub": x - y, "mul": x * y}[name], I32)


def cast(x: Value | Number, dtype: Type) -> Value:
    if not isinstance(x, Value):
        return literal(x, dtype)
    if x.dtype == dtype:
        return x
    return literal(x.value, dtype) if _is_exact(x, dtype) else Op("cast", (x,), dtype)


def _is_exact(x: Value, dtype: Type) -> TypeGuard[Const]:
    """Whether a value is a whole number, to be cast to a real type, that every real type holds exactly."""
    if not isinstance(x, Const) or not x.dtype.is_integer or isinstance(x.value, bool):
        return False
    return dtype.is_real and abs(x.value) <= LARGEST_EXACT


def is_over_columns(s: Statement) -> TypeGuard[For]:
    """Whether a statement is a loop over columns, from ``Builder.loop``."""
    return isinstance(s, For) and s.variables[0].kind == "column"


# --- arithmetic that folds 0 and 1 ------------------------------------------------------------------------------------


def number_of(c: object) -> Number | None:
    """The number if a coefficient is constant; None if it is computed."""
    if isinstance(c, Const):
        return c.value
    return c if isinstance(c, (int, float)) else None


def is_number(c: object, value: Number) -> bool:
    """Whether a coefficient is this number."""
    return number_of(c) == value


def multiply(a: Coefficient, b: Coefficient) -> Coefficient:
    """A product; 0 and 1 are folded, and the sign comes first."""
    x, y = number_of(a), number_of(b)
    if x == 0 or y == 0:
        return 0
    if x == 1:
        return b
    if y == 1:
        return a
    if not isinstance(a, Value) and not isinstance(b, Value):
        return a * b
    if x == -1:
        return negative(b)
    if y == -1:
        return negative(a)
    if isinstance(a, Op) and a.name == "neg":
        return negative(multiply(a.args[0], b))
    if isinstance(b, Op) and b.name == "neg":
        return negative(multiply(a, b.args[0]))
    for one, other in ((a, b), (b, a)):
        if _is_one_or_zero(one) and isinstance(other, Value):
            return select(one.args[0], other, 0)  # 0, even where the other is infinite
    return operation("mul", a, b)


def _is_one_or_zero(x: Coefficient) -> TypeGuard[Op]:
    """Whether a coefficient is 1 where a condition holds and 0 elsewhere, as that of a column of a block."""
    return isinstance(x, Op) and x.name == "select" and is_number(x.args[1], 1) and is_number(x.args[2], 0)


def add(a: Coefficient, b: Coefficient) -> Coefficient:
    if is_number(a, 0):
        return b
    if is_number(b, 0):
        return a
    if not isinstance(a, Value) and not isinstance(b, Value):
        return a + b
    if isinstance(b, Op) and b.name == "neg":
        return operation("sub", a, b.args[0])
    if isinstance(a, Op) and a.name == "neg":
        return operation("sub", b, a.args[0])
    return operation("add", a, b)


def subtract(a: Coefficient, b: Coefficient) -> Coefficient:
    return add(a, negative(b))


def negative(a: Coefficient) -> Coefficient:
    if not isinstance(a, Value):
        return -a
    if isinstance(a, Const):
        return Const(-a.value, a.dtype)
    return a.args[0] if isinstance(a, Op) and a.name == "neg" else operation("neg", a)


def select(condition: Value, a: Coefficient, b: Coefficient) -> Value:
    return operation("select", condition, a, b)


def written_out(x: Value) -> Value:
    """An operation that only occurs before a second differentiation, written with other operations."""
    if not isinstance(x, Op) or x.name not in (GUARDED, GUARDED_BOTH, INVERSE):
        return x
    a = x.args[0]
    result: Coefficient = operation("truediv", 1.0, a) if x.name == INVERSE else multiply(x.args[1], a)
    for factor in x.args if x.name == GUARDED_BOTH else (a,):
        result = select(operation("eq", factor, 0.0), literal(0, x.dtype), result)
    return cast(result, x.dtype)


# --- statements -------------------------------------------------------------------------------------------------------


def not_written_out(loop: For, array: Container) -> Body:
    """The loop from 0 as a ``while`` loop that LLVM does not unroll, since its condition reads a size again.

    It stores to ``array``, which is at least as long as the loop.
    """
    (variable,), (count,), place = loop.variables, loop.domain, loop.place
    assert isinstance(count, Value)
    condition = operation("lt", Read(variable), operation("min", count, Size(array, 0)))
    body = (*loop.body, Update(Read(variable), "add", literal(1, I32)))
    return (Declare(variable, (literal(0, I32),), place=place), While(condition, body, place=place))


def element(array: Container, index: Coefficient) -> Load:
    """One number of an array of one dimension."""
    return Load(array, (index if isinstance(index, Value) else literal(index, I32),))


class Builder:
    """A builder of statements, in nested blocks; ``discards``: whether the statements are dropped."""

    def __init__(self, *, discards: bool = False) -> None:
        self.discards = discards
        self.emitted = 0  # number of statements, including dropped ones
        self.body: list[Statement] = []
        self.place: Place | None = None  # in the user's source
        self.frozen: set[Local] = set()  # locals that are never assigned to
        self.evaluated: ChainMap[Hashable, Value] = ChainMap()  # locals of this block or an outer one that hold a value

    def emit(self, statement: Statement) -> None:
        self.emitted += 1
        if not self.discards:
            self.body.append(statement)

    def block(self, fill: Callable[[], None]) -> tuple[Statement, ...]:
        """The statements that ``fill`` emits."""
        with self.collecting() as body:
            fill()
        return tuple(body)

    @contextlib.contextmanager
    def at(self, place: Place | None) -> Iterator[None]:
        """Within the context, emitted statements belong to a place in the source."""
        before, self.place = self.place, place or self.place
        try:
            yield
        finally:
            self.place = before

    @contextlib.contextmanager
    def collecting(self) -> Iterator[list[Statement]]:
        before, self.body = self.body, []
        self.evaluated = self.evaluated.new_child()
        try:
            yield self.body
        finally:
            self.body, self.evaluated = before, self.evaluated.parents

    def declare(self, name: str, x: Value | Number, dtype: Type | None = None) -> Read:
        """A local that may be assigned to."""
        value = cast(x, dtype) if dtype is not None else x
        assert isinstance(value, Value)
        local = Local(name, value.dtype, (), "tangent" if value.dtype.is_real else "user")
        self.emit(Declare(local, (value,), place=self.place))
        return Read(local)

    def array(self, name: str, size: int, dtype: Type, *, is_filled: bool = False) -> Local:
        """A local array of zeros; ``is_filled``: whether other statements fill it."""
        local = Local(name, dtype, (size,), "tangent")
        self.emit(Declare(local, () if is_filled else (literal(0, dtype),) * size, place=self.place))
        return local

    def _is_frozen(self, x: Value) -> bool:
        return isinstance(x, Read) and x.local in self.frozen and not x.index

    @overload
    def keep(self, x: Value, name: str = "t") -> Value: ...

    @overload
    def keep(self, x: Coefficient, name: str = "t") -> Coefficient: ...

    def keep(self, x: Coefficient, name: str = "t") -> Coefficient:
        """The current value: the value itself if it cannot change, else a temporary."""
        if not isinstance(x, Value) or isinstance(x, Const):
            return x
        if self._is_frozen(x) or (_is_one_or_zero(x) and self._is_frozen(x.args[0])):  # visible to products
            return x
        local = Local(name, x.dtype, (), _KINDS.get(name, "temporary"))
        self.frozen.add(local)
        self.emit(Declare(local, (x,), place=self.place))
        return Read(local)

    def assign(self, target: Target, value: Coefficient) -> None:
        self.emit(Assign(target, cast(value, target.dtype), place=self.place))

    def update(self, target: Target, value: Coefficient, op: str = "add") -> None:
        """``target += value``; atomic on containers."""
        self.emit(Update(target, op, cast(value, target.dtype), place=self.place))

    def increase(self, target: Target, value: Coefficient, *, is_shared: bool) -> None:
        """``target += value``; atomic if other threads may add to it at the same time."""
        if is_shared:
            self.update(target, value)
        else:
            self.assign(target, add(target, value))

    def loop(self, count: Value | int, body: Callable[[Value], None], name: str = "k") -> None:
        """``for k in range(count): body(k)``."""
        variable = Local(name, I32, (), "column")
        self.frozen.add(variable)
        count = literal(count, I32) if isinstance(count, int) else count
        self.emit(For("range", (variable,), (count,), self.block(lambda: body(Read(variable))), place=self.place))
