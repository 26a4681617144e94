"""Statements of their own kind: atomics, returned values, library calls, boundaries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from taichi_ext.analysis.activity import Activity
from taichi_ext.analysis.affine import Affine
from taichi_ext.analysis.bits import escaping_bits
from taichi_ext.differentiate.arguments import ShadowMatrix
from taichi_ext.differentiate.build import add, cast
from taichi_ext.differentiate.decisions import RETURN
from taichi_ext.differentiate.decompositions import partials_of
from taichi_ext.differentiate.entry_sites import Sunk
from taichi_ext.differentiate.forms import (
    Form,
    accumulate,
    coefficient,
    columns_of,
    columns_only,
    has_row,
    row_sum,
    settled,
)
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import (
    Assign,
    Atomic,
    Body,
    Call,
    Declare,
    Effect,
    Load,
    Local,
    Op,
    Read,
    Return,
    Statement,
    Tensor,
    Update,
    Value,
    entries,
    regrouped,
    with_values,
)

if TYPE_CHECKING:
    from taichi_ext.differentiate.forward import Forward

ATOMIC = "order of iterations matters to an atomic"


def atomic(f: Forward, s: Atomic) -> None:
    """An atomic operation whose result is used, or that selects: value and tangent change one after the other."""
    name = s.function.removeprefix("atomic_")
    target = s.target
    if name in ("add", "sub") and s.result is None:
        update = Update(target, name, s.value, place=s.place)
        if isinstance(target, Load):
            f.add_to(f.facts.stores.of[s], (update,), 1 if name == "add" else -1)
        else:
            f.locals.assign(update)
        return
    if isinstance(target, Load):
        f.coverage.read.add(target.container)
        if not f.facts.stores.is_private(f.facts.stores.of[s]):
            f.decisions.keep_order(f.cursor.parallel_loop, ATOMIC)
    elif f.cursor.parallel_loop is not None and f.storages.by_local[target.local].block.is_kernel:
        f.decisions.keep_order(f.cursor.parallel_loop, ATOMIC)
    old = _old(f, s)
    declaration = Declare(old, (target,), place=s.place)
    declare = f.locals.declare_stored if old in f.decisions.own_rows else f.locals.declare_fixed
    declare(declaration, target)
    was: Value = Read(old)
    given = cast(s.value, target.dtype)  # as Taichi does before it combines
    # the right-hand operand wins a tie: here what was there before
    value = Op(name, (was, given) if name in ("add", "sub", "mul") else (given, was), target.dtype)
    f.linearizer.begin_statement()
    if isinstance(target, Load):
        site = f.facts.stores.of[s]
        f.store_to(site, (Assign(target, value, place=s.place),))
    else:
        f.locals.assign(Assign(target, value, place=s.place))


def _old(f: Forward, s: Atomic) -> Local:
    """What an atomic operation finds in its place."""
    old = f.facts.olds[s]
    f.builder.frozen.add(old)
    return old


def is_serial_product(f: Forward, s: Atomic) -> bool:
    """Whether this is a product in memory where one thread runs: Taichi 1.7.4 aborts on ``ti.atomic_mul`` there."""
    loop = f.cursor.parallel_loop
    is_serial = loop is None or loop.statement in f.decisions.serial
    return s.function == "atomic_mul" and isinstance(s.target, Load) and is_serial


def product(f: Forward, s: Atomic) -> None:
    """A product without tangents, in two steps."""
    old = _old(f, s)
    f.builder.emit(Declare(old, (s.target,), place=s.place))
    f.builder.assign(s.target, Op("mul", (Read(old), cast(s.value, s.target.dtype)), s.target.dtype))


def returned(f: Forward, s: Return) -> None:
    if f.seeds.wants_return:
        _store_returned(f, [e for group in s.values for e in entries(group)])
    f.builder.emit(with_values(s, f.primal))


def _store_returned(f: Forward, values: list[Value]) -> None:
    """The tangents of what the kernel returns: one row each."""
    if f.sparse is not None:
        forms = [settled(f.builder, columns_only(f.form(value), f.facts.is_column)) for value in values]
        sunk = Sunk(RETURN, "the return value", len(values), values[0].dtype, is_columns=False)
        f.sparse.store(sunk, None, [Affine((), n) for n in range(len(values))], forms)
        return
    shadow = f.arguments.add(RETURN, "d_result", values[0].dtype)
    matrix = ShadowMatrix(shadow, len(values), f.facts.columns, f.seeds.by_column)
    entry = matrix.entry
    for n, value in enumerate(values):
        form = settled(f.builder, columns_only(f.form(value), f.facts.is_column))
        if has_row(form):
            f.builder.loop(f.facts.columns, lambda k, n=n, form=form: f.builder.assign(entry(n, k), row_sum(form, k)))
        for seed, c in columns_of(form).items():
            target = entry(n, f.naming.column(seed))
            f.builder.assign(target, add(target, coefficient(c, value.dtype)))


def call(f: Forward, s: Call) -> None:
    """A function of Taichi's library: its results have the tangents that its equations give."""
    args = [entries(a) for a in s.args if isinstance(a, (Value, Tensor))]
    kept = [tuple(f.expressions.keep(e) for e in group) for group in args]
    forms = [settled(f.builder, f.form(e)) for group in args for e in group]
    rest = iter(kept)
    given = tuple(regrouped(a, next(rest)) if isinstance(a, (Value, Tensor)) else a for a in s.args)
    f.builder.emit(replace(s, args=given))
    partials = partials_of(f.builder, s, kept)
    if partials is None:
        raise UnsupportedError(f"{_text(s)}The derivative of {s.function!r} is not known.")
    totals: list[Form] = [{} for r in s.results for _ in range(math.prod(r.shape))]
    for n, form in enumerate(forms):
        if not form:
            continue
        for total, partial in zip(totals, partials(n), strict=True):
            if partial is not None:
                accumulate(total, form, f.builder.keep(partial.value, "partial"))
    for result in s.results:
        count = math.prod(result.shape)
        own, totals = totals[:count], totals[count:]
        f.locals.set_entries(result, [settled(f.builder, form) for form in own])


def refuse_effect(f: Forward, s: Effect) -> None:
    """Raise: a call that is passed on as it is gets a value with a tangent."""
    name = s.function if isinstance(s.function, str) else getattr(s.function, "__name__", repr(s.function))
    raise UnsupportedError(
        f"{_text(s)}{name!r} is called on a value with a tangent, and its derivative is not known. Write it as a "
        "@ti.func, or, if no derivative is wanted, pass a value without a tangent."
    )


def refuse_bits(body: Body, activity: Activity) -> None:
    """Raise: the bits of a number with a tangent are used for more than a comparison."""
    found = escaping_bits(body, activity)
    if found is not None:
        op, s = found
        raise UnsupportedError(
            f"{_text(op if op.place else s)}'bit_cast' is called on a value with a tangent, and its derivative is not "
            "known. Write it as a @ti.func, or, if no derivative is wanted, pass a value without a tangent."
        )


def _text(s: Statement | Value) -> str:
    """The place of a statement or value as the first lines of a message."""
    return "" if s.place is None else s.place.message() + "\n"
