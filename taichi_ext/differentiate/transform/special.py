"""Special statements: atomics, returned values, library calls, boundaries, loops that keep their order."""

from __future__ import annotations

import math
from dataclasses import replace

import taichi_ext.program as ir
from taichi_ext.analysis.activity import Activity, returning_bits
from taichi_ext.analysis.loops import Extent
from taichi_ext.differentiate.edges.edges import RuleContext
from taichi_ext.differentiate.facts.facts import PassState
from taichi_ext.differentiate.forms import forms as linear
from taichi_ext.differentiate.sparse.entry_writer import RowWriter
from taichi_ext.differentiate.statements.linearize import ContainerStores, raise_unknown
from taichi_ext.differentiate.storage.storages import Storages
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import I32, Declare, For, Local, Read, cited
from taichi_ext.program.build import add, cast, indices_of, literal

ATOMIC = "order of iterations matters to an atomic"


def atomic(ctx: RuleContext, stores: ContainerStores, storages: Storages, s: ir.Atomic) -> None:
    """An atomic operation that selects, or whose result is used: value and tangent are updated one after the other."""
    walk = ctx.walk
    name = s.function.removeprefix("atomic_")
    target = s.target
    if name in ("add", "sub") and s.result is None:
        update = ir.Update(target, name, s.value, place=s.place)
        if isinstance(target, ir.Load):
            stores.store(walk.facts.stores.of[s], (update,))
        else:
            ctx.locals.assign(update)
        return
    if isinstance(target, ir.Load):
        stores.coverage.read.add(target.container)
        if not walk.facts.stores.is_private(walk.facts.stores.of[s]):
            walk.plan.keep_order(walk.cursor.parallel_loop, ATOMIC)
    elif walk.cursor.parallel_loop is not None and storages.by_local[target.local].declared.block.is_kernel:
        walk.plan.keep_order(walk.cursor.parallel_loop, ATOMIC)
    old = _old(walk, s)
    ctx.locals.declare_kept(ir.Declare(old, (target,), place=s.place), target)
    was: ir.Value = ir.Read(old)
    given = cast(s.value, target.dtype)  # as Taichi does before it combines
    # the right-hand operand wins a tie: here the old value
    value = ir.Op(name, (was, given) if name in ("add", "sub", "mul") else (given, was), target.dtype)
    ctx.linearizer.begin_statement()
    if isinstance(target, ir.Load):
        stores.store(walk.facts.stores.of[s], (ir.Assign(target, value, place=s.place),))
    else:
        ctx.locals.assign(ir.Assign(target, value, place=s.place))


def _old(walk: PassState, s: ir.Atomic) -> ir.Local:
    """The old value at the place of an atomic operation."""
    old = walk.facts.olds[s]
    walk.builder.frozen.add(old)
    return old


def is_serial_product(walk: PassState, s: ir.Atomic) -> bool:
    """Whether this is a product in memory where one thread runs: Taichi 1.7.4 aborts on ``ti.atomic_mul`` there."""
    loop = walk.cursor.parallel_loop
    is_serial = loop is None or loop.statement in walk.plan.serial
    return s.function == "atomic_mul" and isinstance(s.target, ir.Load) and is_serial


def product(walk: PassState, s: ir.Atomic) -> None:
    """A product without tangents, in two steps."""
    old = _old(walk, s)
    walk.builder.emit(ir.Declare(old, (s.target,), place=s.place))
    walk.builder.assign(s.target, ir.Op("mul", (ir.Read(old), cast(s.value, s.target.dtype)), s.target.dtype))


def returned(ctx: RuleContext, writer: RowWriter, s: ir.Return) -> None:
    walk, values = ctx.walk, [e for group in s.values for e in ir.entries(group)]
    if walk.facts.seeds.wants_return:
        forms = (linear.columns_only(ctx.linearizer.form(value), walk.numbering.is_column) for value in values)
        writer.returned((linear.materialize(walk.builder, form) for form in forms), len(values), values[0].dtype)
    walk.builder.emit(ir.with_values(s, ctx.primal))


def call(ctx: RuleContext, s: ir.Call) -> None:
    """A function of Taichi's library: equations give the tangents of its results, see ``with_equations``."""
    if any(map(ctx.walk.facts.is_active, ir.values_of(s))):
        raise_unknown(s.function, s.place)
    ctx.walk.builder.emit(ir.with_values(s, ctx.primal))


def check_bits(body: ir.Body, activity: Activity) -> None:
    """Raise if the bits of a number with a tangent become a number again."""
    back = returning_bits(body, activity)
    if back is not None:
        op, s = back
        raise_unknown("bit_cast", op.place or s.place)


def serialized(loop: For, extent: Extent | None, *, is_host: bool) -> For:
    """The loop as one that runs in one thread; ``extent`` is that of the field that it runs over.

    On a GPU, Taichi ignores serialize=True for loops over fields: there they become loops over a range.
    """
    if loop.kind not in ("field", "grouped"):
        return replace(loop, config={**loop.config, "serialize": True})
    if is_host:  # Taichi does not heed serialize=True in loops over fields
        return replace(loop, config={**loop.config, "parallelize": 1})
    if loop.kind == "grouped" or extent is None or not extent.is_full:
        raise UnsupportedError(
            f"{cited(loop.place)}"
            "The order of the iterations matters to the derivative here, and Taichi runs this loop over a field in "
            "parallel on a GPU. Write it as a loop over a range: for i, j in ti.ndrange(n, m)."
        )
    return _over_range(loop, extent)


def _over_range(loop: For, extent: Extent) -> For:
    """A loop over a dense field as a loop over the number of the entry."""
    number = Local("number", I32, (), "loop")
    indices = zip(loop.variables, indices_of(Read(number), extent.shape), extent.bounds, strict=True)
    before = (Declare(v, (cast(add(i, first), I32),), place=loop.place) for v, i, (first, _) in indices)
    total = literal(math.prod(extent.shape), I32)
    config = {**loop.config, "serialize": True}
    return replace(loop, kind="range", variables=(number,), domain=(total,), body=(*before, *loop.body), config=config)
