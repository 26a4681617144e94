"""Builders of values and statements: operations with their types, temporaries, blocks."""

from __future__ import annotations

import contextlib
import math
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TypeGuard, overload

import taichi_ext.program as ir
from taichi_ext.program import FoldedConst, Read, Type, Value, with_children

# Products in a program that is differentiated again, one factor of which may be infinite where the other is 0: they
# are 0 where the first factor is 0, or where either factor is.
GUARDED, GUARDED_BOTH = "guarded", "guarded both"
INVERSE = "inverse"  # 1 / x, and 0 where x is 0
REPLACED = "replaced"  # the first operand, with the tangent of the second in this differentiation alone

LARGEST_EXACT = 2048  # float16 holds all whole numbers up to this one
Number = int | float
Coefficient = ir.Value | Number
Index = ir.Value | int

# Kinds of temporaries by their names: partials, products and sums of tangents, conditions on indices.
_KINDS = {"partial": "partial", "w": "weight", "inside": "inside"}
_FOLDED = frozenset(("add", "sub", "mul"))
TRUTHS = frozenset((*ir.COMPARISONS, "logical_and", "logical_or", "logical_not"))


@cache
def promoted(a: ir.Type, b: ir.Type) -> ir.Type:
    return max(a, b, key=lambda t: (t.is_real, t.bits, not t.is_signed))


def literal(x: Number, dtype: ir.Type) -> ir.Const:
    return ir.Const(float(x) if dtype.is_real else int(x), dtype)


def operation(name: str, *args: ir.Value | Number) -> ir.Value:
    """An operation; a number takes the type of the other operands."""
    folded = _of_integers(name, args) if name in _FOLDED else None
    if folded is not None:
        return folded
    dtype, is_mixed = None, False
    for a in args:
        if not isinstance(a, ir.Value):
            is_mixed = True
            continue
        other = a.dtype
        if other is not dtype and other != ir.U1:
            dtype = other if dtype is None or dtype == other else promoted(dtype, other)
    dtype = dtype or ir.F32
    values = tuple([a if isinstance(a, ir.Value) else literal(a, dtype) for a in args]) if is_mixed else args
    return ir.Op(name, values, ir.U1 if name in TRUTHS else dtype)  # type: ignore[arg-type]


def _of_integers(name: str, args: tuple[ir.Value | Number, ...]) -> ir.Const | None:
    """A sum or product of known integers."""
    a, b = args
    x, y = number_of(a), number_of(b)
    if x is None or y is None or isinstance(x, float) or isinstance(y, float):
        return None
    if not any(isinstance(c, ir.Const) and c.dtype == ir.I32 for c in args):
        return None
    return ir.Const({"add": x + y, "sub": x - y, "mul": x * y}[name], ir.I32)


def cast(x: ir.Value | Number, dtype: ir.Type) -> ir.Value:
    if not isinstance(x, ir.Value):
        return literal(x, dtype)
    if x.dtype == dtype:
        return x
    return literal(x.value, dtype) if _is_exact(x, dtype) else ir.Op("cast", (x,), dtype)


def _is_exact(x: ir.Value, dtype: ir.Type) -> TypeGuard[ir.Const]:
    """Whether a value is a whole number, to be cast to a real type, that every real type holds exactly."""
    if not isinstance(x, ir.Const) or not x.dtype.is_integer or isinstance(x.value, bool):
        return False
    return dtype.is_real and abs(x.value) <= LARGEST_EXACT


def is_over_columns(s: ir.Statement) -> TypeGuard[ir.For]:
    """Whether a statement is a loop over columns, from ``Builder.loop``."""
    return isinstance(s, ir.For) and s.variables[0].kind == "column"


# --- arithmetic that folds 0 and 1 ------------------------------------------------------------------------------------


def number_of(c: object) -> Number | None:
    """The number if a coefficient is constant; None if it is computed."""
    if isinstance(c, ir.Const):
        return c.value
    return c if isinstance(c, (int, float)) else None


def is_number(c: object, value: Number) -> bool:
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
    if not isinstance(a, ir.Value) and not isinstance(b, ir.Value):
        return a * b
    if x == -1:
        return negative(b)
    if y == -1:
        return negative(a)
    if isinstance(a, ir.Op) and a.name == "neg":
        return negative(multiply(a.args[0], b))
    if isinstance(b, ir.Op) and b.name == "neg":
        return negative(multiply(a, b.args[0]))
    for one, other in ((a, b), (b, a)):
        shifted = _shifted(one) if isinstance(number_of(other), int) else None
        if shifted is not None:  # LLVM 15 may extend (x - 1) * n without its sign, although x is 1 at least
            return add(multiply(shifted[0], other), multiply(shifted[1], other))
        if is_number_or_zero(one):
            product = cast(multiply(one.args[1], other), other.dtype if isinstance(other, ir.Value) else one.dtype)
            return select(one.args[0], product, 0)  # 0, even where the other is infinite
    return operation("mul", a, b)


def _shifted(x: Coefficient) -> tuple[ir.Value, Number] | None:
    """A whole number that is a value and a constant."""
    if not isinstance(x, ir.Op) or x.name not in ("add", "sub") or x.dtype.is_real:
        return None
    number = number_of(x.args[1])
    return None if number is None else (x.args[0], number if x.name == "add" else -number)


def is_number_or_zero(x: Coefficient) -> TypeGuard[ir.Op]:
    """Whether a coefficient is a number where a condition holds and 0 elsewhere, as that of a column of a block."""
    n = number_of(x.args[1]) if isinstance(x, ir.Op) and x.name == "select" and is_number(x.args[2], 0) else None
    return n is not None and math.isfinite(n)


def _condition(x: Coefficient) -> ir.Value | None:
    """The condition without which a coefficient is 0, if it is such a choice or the negative of one."""
    if isinstance(x, ir.Op) and x.name == "neg":
        x = x.args[0]
    return x.args[0] if isinstance(x, ir.Op) and x.name == "select" and is_number(x.args[2], 0) else None


def _picked(x: Coefficient) -> Coefficient:
    """The coefficient where its condition holds."""
    assert isinstance(x, ir.Op)
    return negative(_picked(x.args[0])) if x.name == "neg" else x.args[1]


def is_same(a: ir.Value, b: ir.Value | None) -> bool:
    """Whether two values are one, or the same scalar local."""
    if a is b:
        return True
    return isinstance(a, ir.Read) and isinstance(b, ir.Read) and a.local is b.local and not a.index and not b.index


def add(a: Coefficient, b: Coefficient) -> Coefficient:
    if is_number(a, 0):
        return b
    if is_number(b, 0):
        return a
    if not isinstance(a, ir.Value) and not isinstance(b, ir.Value):
        return a + b
    condition = _condition(a)
    if condition is not None and is_same(condition, _condition(b)):
        total = add(_picked(a), _picked(b))
        return 0 if is_number(total, 0) else select(condition, total, 0)
    if isinstance(b, ir.Op) and b.name == "neg":
        return operation("sub", a, b.args[0])
    if isinstance(a, ir.Op) and a.name == "neg":
        return operation("sub", b, a.args[0])
    return operation("add", a, b)


def subtract(a: Coefficient, b: Coefficient) -> Coefficient:
    return add(a, negative(b))


def negative(a: Coefficient) -> Coefficient:
    if not isinstance(a, ir.Value):
        return -a
    if isinstance(a, ir.Const):
        return ir.Const(-a.value, a.dtype)
    if is_number_or_zero(a):
        return select(a.args[0], negative(a.args[1]), a.args[2])
    return a.args[0] if isinstance(a, ir.Op) and a.name == "neg" else operation("neg", a)


def select(condition: ir.Value, a: Coefficient, b: Coefficient) -> ir.Value:
    return operation("select", condition, a, b)


def plain(x: ir.Value) -> ir.Value:
    """The value, without the tangent of another one."""
    return x.args[0] if isinstance(x, ir.Op) and x.name == REPLACED else x


def written_out(x: ir.Value) -> ir.Value:
    """An operation that only occurs before a second differentiation, written with other operations."""
    if not isinstance(x, ir.Op) or x.name not in (GUARDED, GUARDED_BOTH, INVERSE):
        return x
    a = x.args[0]
    result: Coefficient = operation("truediv", 1.0, a) if x.name == INVERSE else multiply(x.args[1], a)
    for factor in x.args if x.name == GUARDED_BOTH else (a,):
        result = select(operation("eq", factor, 0.0), literal(0, x.dtype), result)
    return cast(result, x.dtype)


# --- statements -------------------------------------------------------------------------------------------------------


def not_written_out(loop: ir.For, array: ir.Container, step: int = 1) -> ir.Body:
    """The loop from 0 as a ``while`` loop that LLVM does not unroll, since its condition reads a size again.

    It stores to ``array``, which is at least as long as the loop. With a step it ends before fewer iterations are left.
    """
    (variable,), (count,), place = loop.variables, loop.domain, loop.place
    assert isinstance(count, ir.Value)
    condition = operation("lt", add(ir.Read(variable), step - 1), operation("min", count, ir.Size(array, 0)))
    body = (*loop.body, ir.Update(ir.Read(variable), "add", literal(step, ir.I32)))
    return (ir.Declare(variable, (literal(0, ir.I32),), place=place), ir.While(condition, body, place=place))


def indices_of(number: ir.Value, shape: tuple[int, ...]) -> list[ir.Value]:
    """The indices of an entry from its running number."""
    result = []
    for n, size in enumerate(shape):
        below = math.prod(shape[n + 1 :])
        value = number if below == 1 else operation("floordiv", number, below)
        result.append(operation("mod", value, size) if n else value)
    return result


def begin_of_piece(number: ir.Value, pieces: int, size: int) -> ir.Value:
    """Where a piece of as many indices begins, and where the piece before it ends; no product leaves 32 bits."""
    if not size:  # a product would be a number of no type, whose quotient is real
        return literal(0, ir.I32)
    if pieces * size < 2**31:
        return operation("floordiv", multiply(number, size), pieces)  # type: ignore[arg-type]
    length, longer = divmod(size, pieces)
    return add(multiply(number, length), operation("min", number, longer))  # type: ignore[return-value]


def element(array: ir.Container, index: Coefficient) -> ir.Load:
    return ir.Load(array, (index if isinstance(index, ir.Value) else literal(index, ir.I32),))


class Builder:
    """A builder of statements, in nested blocks."""

    def __init__(self) -> None:
        self.emitted = 0  # number of statements
        self.body: list[ir.Statement] = []
        self.place: ir.Place | None = None  # in the user's source
        self.frozen: set[ir.Local] = set()  # locals that are never assigned to
        self.evaluated: ChainMap[Hashable, ir.Value] = ChainMap()  # locals visible here that hold a value

    def emit(self, statement: ir.Statement) -> None:
        self.emitted += 1
        self.body.append(statement)

    def block(self, fill: Callable[[], None]) -> tuple[ir.Statement, ...]:
        with self.collecting() as body:
            fill()
        return tuple(body)

    @contextlib.contextmanager
    def at(self, place: ir.Place | None) -> Iterator[None]:
        """Within the context, emitted statements belong to a place in the source."""
        before, self.place = self.place, place or self.place
        try:
            yield
        finally:
            self.place = before

    @contextlib.contextmanager
    def collecting(self) -> Iterator[list[ir.Statement]]:
        before, self.body = self.body, []
        self.evaluated = self.evaluated.new_child()
        try:
            yield self.body
        finally:
            self.body, self.evaluated = before, self.evaluated.parents

    def declare(self, name: str, x: ir.Value | Number, dtype: ir.Type | None = None) -> ir.Read:
        """A local that may be assigned to."""
        value = cast(x, dtype) if dtype is not None else x
        assert isinstance(value, ir.Value)
        local = ir.Local(name, value.dtype, (), "tangent" if value.dtype.is_real else "user")
        self.emit(ir.Declare(local, (value,), place=self.place))
        return ir.Read(local)

    def array(self, name: str, size: int, dtype: ir.Type, *, is_filled: bool = False) -> ir.Local:
        """A local array of zeros; ``is_filled``: whether other statements fill it."""
        local = ir.Local(name, dtype, (size,), "tangent")
        self.emit(ir.Declare(local, () if is_filled else (literal(0, dtype),) * size, place=self.place))
        return local

    def _is_frozen(self, x: ir.Value) -> bool:
        return isinstance(x, ir.Read) and x.local in self.frozen and not x.index

    @overload
    def keep(self, x: ir.Value, name: str = "t") -> ir.Value: ...

    @overload
    def keep(self, x: Coefficient, name: str = "t") -> Coefficient: ...

    def keep(self, x: Coefficient, name: str = "t") -> Coefficient:
        """The current value: the value itself if it cannot change, else a temporary."""
        if not isinstance(x, ir.Value) or isinstance(x, ir.Const):
            return x
        if self._is_frozen(x) or (is_number_or_zero(x) and self._is_frozen(x.args[0])):  # visible to products
            return x
        local = ir.Local(name, x.dtype, (), _KINDS.get(name, "temporary"))
        self.frozen.add(local)
        self.emit(ir.Declare(local, (x,), place=self.place))
        return ir.Read(local)

    def assign(self, target: ir.Target, value: Coefficient) -> None:
        self.emit(ir.Assign(target, cast(value, target.dtype), place=self.place))

    def update(self, target: ir.Target, value: Coefficient, op: str = "add") -> None:
        """``target += value``; atomic on containers."""
        self.emit(ir.Update(target, op, cast(value, target.dtype), place=self.place))

    def increase(self, target: ir.Target, value: Coefficient, *, is_shared: bool) -> None:
        """``target += value``; atomic if other threads may add to it at the same time."""
        if is_shared:
            self.update(target, value)
        else:
            self.assign(target, add(target, value))

    def loop(self, count: ir.Value | int, body: Callable[[ir.Value], None], name: str = "k") -> None:
        """``for k in range(count): body(k)``."""
        variable = ir.Local(name, ir.I32, (), "column")
        self.frozen.add(variable)
        count = literal(count, ir.I32) if isinstance(count, int) else count
        self.emit(ir.For("range", (variable,), (count,), self.block(lambda: body(ir.Read(variable))), place=self.place))


@dataclass(frozen=True)
class Expressions:
    """The values of the current statement, and those in temporaries."""

    builder: Builder  # the builder that declares temporaries
    # whether the new program is differentiated again; values are then not replaced by their known numbers
    is_again: bool = field(kw_only=True)
    kept: dict[Value, Value] = field(default_factory=dict)

    def begin_statement(self) -> None:
        """Forget the values of the previous statement."""
        self.kept.clear()

    def primal(self, node: Value) -> Value:
        """The value, built on the temporaries that hold parts of it."""
        if node in self.kept:
            return self.kept[node]
        if isinstance(node, FoldedConst) and not self.is_again:
            return node.constant
        if isinstance(node, ir.Op) and node.name == REPLACED:
            return self.primal(node.args[0])
        return with_children(node, self.primal)

    def keep(self, node: Value, dtype: Type | None = None, name: str = "t") -> Value:
        """The value in a temporary, or a local, that does not change."""
        value = self.kept.get(node)
        if value is None:
            value = self.builder.keep(self.primal(node), name)
            if not isinstance(node, Read) or node.index or node.local not in self.builder.frozen:
                self.kept[node] = value
        return value if dtype is None else cast(value, dtype)
