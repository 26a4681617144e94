"""Formulas in mathematical notation: terms with operators, evaluated into temporaries on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Union

from taichi_ext.program import Type, Value
from taichi_ext.program.build import Builder, Coefficient, add, literal, multiply, negative, operation, subtract

Operand = Union["Term", Coefficient]


def _operator(name: str) -> Callable[[Term, Operand], Term]:
    """An operator between terms: an operation of Taichi's."""
    return lambda a, b: a.formula.operation(name, a, b)


@dataclass(frozen=True, eq=False)
class Term:
    """A coefficient (a number or a value) with operators."""

    formula: Formula
    value: Coefficient

    def _with(self, value: Coefficient) -> Term:
        return Term(self.formula, value)

    def __add__(self, other: Operand) -> Term:
        return self._with(add(self.value, _value(other)))

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Term:
        return self._with(subtract(self.value, _value(other)))

    def __rsub__(self, other: Operand) -> Term:
        return self._with(subtract(_value(other), self.value))

    def __mul__(self, other: Operand) -> Term:
        return self._with(multiply(self.value, _value(other)))

    __rmul__ = __mul__

    def __rtruediv__(self, other: Operand) -> Term:
        return self.formula.operation("truediv", other, self)

    def __neg__(self) -> Term:
        return self._with(negative(self.value))

    __truediv__ = _operator("truediv")
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("lt", "le", "gt", "ge"))
    __and__, __or__, equals = map(_operator, ("logical_and", "logical_or", "eq"))

    def kept(self, name: str = "t") -> Term:
        """The same term, evaluated now."""
        return self._with(self.formula.builder.keep(self.value, name))


def _value(x: Operand) -> Coefficient:
    return x.value if isinstance(x, Term) else x


@dataclass(frozen=True)
class Formula:
    """Terms of one real type; ``kept`` terms are emitted by the builder."""

    builder: Builder
    dtype: Type

    def term(self, x: Coefficient) -> Term:
        return Term(self, x)

    def operation(self, name: str, *args: Operand) -> Term:
        """An operation of Taichi's; numbers are of the formula's type."""
        values = [a if isinstance(a, Value) else literal(a, self.dtype) for a in map(_value, args)]
        return Term(self, operation(name, *values))

    def select(self, condition: Operand, then: Operand, orelse: Operand) -> Term:
        return self.operation("select", condition, then, orelse)

    def ratio(self, a: Operand, b: Operand) -> Term:
        """A / b, and 0 where b is 0."""
        is_zero = self.term(_value(b)).equals(0)
        return self.select(is_zero, 0, self.term(_value(a)) / self.select(is_zero, 1, b))
