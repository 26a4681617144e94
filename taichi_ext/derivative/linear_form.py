"""Tangents as sparse linear forms ``{leaf: coefficient}``.

A leaf is something that has a tangent of its own:

* a ``Seed``, one column of the Jacobian: a constant column number, or an index expression in the normal form
  ``sum(c_i * v_i) + constant`` over integer variables that do not change, so that equal indices meet; or
* a *row* (``storage.LocalRow``, ``containers.ShadowRow``): the tangent of a stored value, one number per column.

A coefficient is a Python number or a Taichi expression over variables that do not change.  Numbers 0 and 1 are folded,
so that a form costs nothing for what does not vary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from taichi_ext.analysis import affine
from taichi_ext.backend import constant, dtype_of, is_expr, is_real, ops


@dataclass(frozen=True)
class Affine(affine.Affine):
    """An integer ``sum(factor * variable) + constant``; variables are named by the atoms of a trace."""

    terms: tuple[tuple[int, int], ...] = ()

    def __add__(self, other: affine.Affine) -> Affine:
        factors = dict(self.terms)
        for atom, factor in other.terms:
            factors[atom] = factors.get(atom, 0) + factor
        terms = tuple(sorted((a, f) for a, f in factors.items() if f))
        return Affine(terms, self.constant + other.constant)

    def __mul__(self, factor: int) -> Affine:
        if factor == 0:
            return Affine()
        return Affine(tuple((a, f * factor) for a, f in self.terms), self.constant * factor)


@dataclass(frozen=True)
class Seed:
    """One column of the Jacobian."""

    column: Affine

    @property
    def is_constant(self) -> bool:
        return self.column.is_constant


@dataclass(frozen=True)
class Guarded:
    """A coefficient of a row that may be infinite: where the row is zero, so is the product."""

    factor: Any


Form = dict[Any, Any]


def is_zero(c: Any) -> bool:
    return isinstance(c, (int, float)) and c == 0


def is_one(c: Any) -> bool:
    return isinstance(c, (int, float)) and c == 1


def multiply(a: Any, b: Any) -> Any:
    if isinstance(a, Guarded) or isinstance(b, Guarded):
        factor_a = a.factor if isinstance(a, Guarded) else a
        factor_b = b.factor if isinstance(b, Guarded) else b
        return Guarded(multiply(factor_a, factor_b))
    if is_zero(a) or is_zero(b):
        return 0
    if is_one(a):
        return b
    if is_one(b):
        return a
    if not is_expr(a) and not is_expr(b):
        return a * b
    if not is_expr(a) and a == -1:
        return -b
    if not is_expr(b) and b == -1:
        return -a
    return ops.mul(a, b)


def add(a: Any, b: Any) -> Any:
    if isinstance(a, Guarded) or isinstance(b, Guarded):
        factor_a = a.factor if isinstance(a, Guarded) else a
        factor_b = b.factor if isinstance(b, Guarded) else b
        return Guarded(add(factor_a, factor_b))
    if is_zero(a):
        return b
    if is_zero(b):
        return a
    if not is_expr(a) and not is_expr(b):
        return a + b
    return ops.add(a, b)


def as_expression(c: Any, dtype: Any) -> Any:
    """A coefficient as an expression of a real type."""
    if isinstance(c, Guarded):
        c = c.factor
    if not is_expr(c):
        return constant(c, dtype)
    return c if is_real(dtype_of(c)) else ops.cast(c, dtype)


def apply_to_row(c: Any, entry: Any) -> Any:
    """Coefficient times one entry of a row."""
    if isinstance(c, Guarded):
        return ops.select(entry == 0, constant(0, dtype_of(entry)), multiply(c.factor, entry))
    return multiply(c, entry)


def is_row(leaf: Any) -> bool:
    return not isinstance(leaf, Seed)


def accumulate(into: Form, form: Form, weight: Any = 1) -> int:
    """``into += weight * form``; returns the number of operations that the kernel has to do for it."""
    operations = 0
    for leaf, c in form.items():
        product = multiply(weight, c)
        if not is_zero(product):
            before = into.get(leaf, 0)
            into[leaf] = add(before, product)
            operations += is_operation(product, weight, c) + is_operation(into[leaf], before, product)
    return operations


def is_operation(result: Any, *operands: Any) -> bool:
    """Whether a product or sum of these operands is one that the kernel has to compute."""
    return not isinstance(result, (int, float)) and all(result is not operand for operand in operands)


def guarded_scale(form: Form, weight: Any) -> Form:
    """``weight * form`` where a tangent that is zero stays zero although the weight is infinite."""
    scaled: Form = {}
    for leaf, c in form.items():
        factor = c.factor if isinstance(c, Guarded) else c
        product = multiply(weight, factor)
        if is_expr(weight) and is_expr(factor):
            product = ops.select(factor == 0, constant(0, dtype_of(product)), product)
        scaled[leaf] = Guarded(product) if is_row(leaf) else product
    return scaled


def choose(picks: Iterable[Any], forms: list[Form], dtype: Any) -> Form:
    """The form of the first argument whose condition holds; the last condition is None (otherwise)."""
    conditions = list(picks)
    leaves = list(dict.fromkeys(leaf for form in forms for leaf in form))
    chosen: Form = {}
    for leaf in leaves:
        coefficients = [form.get(leaf, 0) for form in forms]
        guarded = any(isinstance(c, Guarded) for c in coefficients)
        result = as_expression(coefficients[-1], dtype)
        for condition, c in zip(reversed(conditions[:-1]), reversed(coefficients[:-1]), strict=True):
            result = ops.select(condition, as_expression(c, dtype), result)
        chosen[leaf] = Guarded(result) if guarded else result
    return chosen


def scaled(form: Form, sign: int) -> Form:
    """The form, with its signs changed where the sign is -1."""
    if sign > 0:
        return form
    return {leaf: Guarded(-c.factor) if isinstance(c, Guarded) else -c for leaf, c in form.items()}
