"""Tangents as sparse linear forms ``{leaf: coefficient}``.

A leaf is a ``Seed``, one column of the Jacobian, given by a number or an index expression in normal form; or a *row*,
the stored tangent of an entry, one number per column; or a seed without a column, ``LocalSeed`` or ``Carried``.
Coefficients are numbers or values that do not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeGuard

from taichi_ext.analysis.affine import Affine
from taichi_ext.analysis.loops import Loop
from taichi_ext.program import Container, Load, Local, Read, Type, Value
from taichi_ext.program.build import (
    GUARDED,
    GUARDED_BOTH,
    Builder,
    Coefficient,
    Index,
    add,
    cast,
    is_number,
    is_number_or_zero,
    literal,
    multiply,
    operation,
    select,
    written_out,
)


@dataclass(frozen=True)
class Seed:
    """One column of the Jacobian."""

    column: Affine

    def __hash__(self) -> int:
        return hash(self.column)

    @property
    def is_constant(self) -> bool:
        return not self.column.terms


@dataclass(frozen=True)
class LocalSeed:
    """A seed without a column: an entry of a pixel's position, of a tangent of a rule, or a root.

    It has no number, so no row, slot, shadow or tape can hold it: its coefficients are in registers.
    """

    local: Local  # the local
    entry: int = 0  # the number of its entry
    # the entries of a pixel's position of which it is one; they do not depend on each other
    position: frozenset[tuple[Local, int]] = field(default=frozenset(), compare=False)


@dataclass(frozen=True)
class Input(LocalSeed):
    """The seed of a number from before a loop, while the loop adds up its factors."""


@dataclass(frozen=True)
class Carried:
    """The seed of a number carried by a reversed loop, at the start of an iteration; it has no column either."""

    local: Local


@dataclass(frozen=True)
class Pivot:
    """The tangent of a local that does not change, as a leaf of other forms until they are stored."""

    local: Local


class RowReader(Protocol):
    """A holder of rows of tangents, with a number that each change of them increases."""

    @property
    def version(self) -> int: ...

    def entry(self, index: Index, column: Coefficient, /) -> Value: ...


@dataclass(frozen=True)
class Row:
    """The row of the entry ``key`` of a container's shadow, or of a local's; ``source`` is the owner."""

    source: Local | Container
    key: int | Affine
    rows: RowReader = field(compare=False)
    index: Index = field(compare=False, default=0)
    version: int = 0  # of the rows when this was read
    loops: tuple[Loop, ...] = ()  # around the place where this was read
    condition: Value | None = field(compare=False, default=None)  # the tangent is zero where it does not hold

    def __hash__(self) -> int:
        return hash((self.source, self.key))

    def entry(self, column: Coefficient) -> Value:
        return self.rows.entry(self.index, column)


@dataclass(frozen=True)
class Guarded:
    """A coefficient of a row, where the coefficient or the row may be infinite."""

    factor: Coefficient
    is_chosen: bool = False  # where the coefficient is zero, so is the product: a choice did not pick the row
    may_be_infinite: bool = True  # the coefficient may be; where the row is zero, so is the product
    finish: Callable[[Value], Value] = written_out  # writes the product: ``Rules.finish``


Weight = Coefficient | Guarded
Unnumbered = LocalSeed | Carried
Leaf = Seed | Unnumbered | Row | Pivot
Form = dict[Leaf, Weight]


def is_row(leaf: Leaf) -> TypeGuard[Row]:
    return isinstance(leaf, Row)


def has_row(form: Form) -> bool:
    return any(isinstance(leaf, Row) for leaf in form)


def columns_of(form: Form) -> dict[Seed, Weight]:
    """The columns of a form, with their coefficients: all leaves but its rows and seeds without a column."""
    return {leaf: c for leaf, c in form.items() if isinstance(leaf, Seed)}


def unnumbered(form: Form) -> dict[Unnumbered, Weight]:
    """The seeds of a form without a column, with their coefficients."""
    return {leaf: c for leaf, c in form.items() if isinstance(leaf, (LocalSeed, Carried))}


def numbered(form: Form) -> Form:
    """The part of a form that can be stored in rows: without seeds that have no column."""
    return {leaf: c for leaf, c in form.items() if not isinstance(leaf, (LocalSeed, Carried))}


def times(a: Weight, b: Weight) -> Weight:
    """A product of coefficients."""
    if not isinstance(a, Guarded) and not isinstance(b, Guarded):
        return multiply(a, b)
    return _guarded_as(multiply(bare(a), bare(b)), a, b)


def plus(a: Weight, b: Weight) -> Weight:
    """A sum of coefficients."""
    if not isinstance(a, Guarded) and not isinstance(b, Guarded):
        return add(a, b)
    return _guarded_as(add(bare(a), bare(b)), a, b)


def bare(c: Weight) -> Coefficient:
    return c.factor if isinstance(c, Guarded) else c


def _guarded_as(c: Coefficient, *sources: Weight) -> Weight:
    """A coefficient with the guards of its factors or summands."""
    guards = [s for s in sources if isinstance(s, Guarded)]
    if not guards or is_number(c, 0):
        return c
    return Guarded(c, any(g.is_chosen for g in guards), any(g.may_be_infinite for g in guards), guards[0].finish)


def coefficient(c: Weight, dtype: Type) -> Value:
    c = bare(c)
    return c if isinstance(c, Value) else literal(c, dtype)


def times_entry(c: Weight, entry: Value) -> Coefficient:
    if not isinstance(c, Guarded) or is_number_or_zero(c.factor):
        return multiply(bare(c), entry)
    can_be_left_out, factor = c.is_chosen and isinstance(c.factor, Value), coefficient(c, entry.dtype)
    if can_be_left_out:
        guarded = operation(GUARDED_BOTH, entry, factor) if c.may_be_infinite else operation(GUARDED, factor, entry)
    else:
        guarded = operation(GUARDED, entry, factor)
    return c.finish(guarded)


def accumulate(into: Form, form: Form, weight: Weight = 1) -> None:
    """``into += weight * form``."""
    for leaf, c in form.items():
        product = times(weight, c)
        if not is_number(product, 0):
            into[leaf] = plus(into.get(leaf, 0), product)


def negated(form: Form) -> Form:
    result: Form = {}
    accumulate(result, form, -1)
    return result


def guarded_scale(form: Form, weight: Coefficient, finish: Callable[[Value], Value] = written_out) -> Form:
    """``weight * form``; a zero tangent stays zero even if the weight is infinite."""
    scaled: Form = {}
    for leaf, c in form.items():
        factor = bare(c)
        product = multiply(weight, factor)
        if isinstance(weight, Value) and isinstance(factor, Value) and isinstance(product, Value):
            product = finish(operation(GUARDED, factor, weight))
        is_chosen = isinstance(c, Guarded) and c.is_chosen
        scaled[leaf] = Guarded(product, is_chosen, finish=finish) if is_row(leaf) else product
    return scaled


def where_nonzero(value: Value, form: Form) -> Form:
    """``value * form``, zero where the value is 0, even if the form is infinite there."""
    scaled: Form = {}
    for leaf, c in form.items():
        product = multiply(value, bare(c))
        if isinstance(bare(c), Value) and isinstance(product, Value):
            product = select(operation("eq", value, 0.0), literal(0, product.dtype), product)
        scaled[leaf] = Guarded(product, is_chosen=True) if is_row(leaf) else product
    return scaled


def chosen(
    picks: Iterable[Value | None], forms: list[Form], dtype: Type, finish: Callable[[Value], Value] = written_out
) -> Form:
    """The form of the first argument whose condition holds; the last condition is None (otherwise)."""
    conditions = list(picks)
    result: Form = {}
    for leaf in dict.fromkeys(leaf for form in forms for leaf in form):
        coefficients = [form.get(leaf, 0) for form in forms]
        value = coefficient(coefficients[-1], dtype)
        for condition, c in zip(reversed(conditions[:-1]), reversed(coefficients[:-1]), strict=True):
            assert condition is not None  # only the last one is
            value = select(condition, coefficient(c, dtype), value)
        may_be_infinite = any(isinstance(c, Guarded) and c.may_be_infinite for c in coefficients)
        guarded = Guarded(value, True, may_be_infinite, finish)
        result[leaf] = guarded if is_row(leaf) else value
    return result


def kept(builder: Builder, c: Weight) -> Weight:
    """The current value of a coefficient, in a temporary if it can change."""
    return replace(c, factor=builder.keep(c.factor, "w")) if isinstance(c, Guarded) else builder.keep(c, "w")


def materialize(builder: Builder, form: Form) -> Form:
    """The form with its coefficients evaluated now."""
    result: Form = {}
    for leaf, c in form.items():
        if not is_number(c, 0):
            result[leaf] = kept(builder, c)
    return result


def row_sum(form: Form, column: Coefficient) -> Coefficient | None:
    """One column of the rows of a form, None when it has no rows."""
    sums: dict[Value | None, Coefficient] = {}  # of rows with the same condition
    for leaf, c in form.items():
        if is_row(leaf):
            term = times_entry(c, leaf.entry(column))
            sums[leaf.condition] = add(sums[leaf.condition], term) if leaf.condition in sums else term
    total = sums.pop(None, None)
    for condition, term in sums.items():  # elsewhere a row may be infinite
        term = select(condition, term, 0) if condition is not None else term
        total = term if total is None else add(total, term)
    return total


def row_value(form: Form, column: Coefficient, dtype: Type) -> Value:
    """One column of the rows of a form as a value, 0 when it has no rows."""
    total = row_sum(form, column)
    return literal(0, dtype) if total is None else cast(total, dtype)


def assign_column(builder: Builder, targets: Sequence[Read | Load], forms: list[Form], k: Value) -> None:
    """Assign one column of the rows of forms to targets, all read before any is written."""
    values = [row_value(form, k, target.dtype) for form, target in zip(forms, targets, strict=True)]
    if len(values) > 1:
        values = [builder.keep(v, "w") for v in values]
    for target, value in zip(targets, values, strict=True):
        builder.assign(target, value)


def columns_only(form: Form, is_column: Callable[[int], bool]) -> Form:
    """The part of a form that fits into a shadow: its rows, and seeds whose column is in the block."""
    return {
        leaf: c
        for leaf, c in numbered(form).items()
        if is_row(leaf) or not leaf.column.is_constant or is_column(leaf.column.constant)  # type: ignore[union-attr]
    }


# The current place of a walk over a program, and whether rows that were read before may have changed there.
#
# Only context managers move the cursor: after ``with cursor.in_loop(loop)`` it is back at its place.


class Scope:
    """A block of control flow, in which its declarations are visible."""

    def __init__(self, outer: Scope | None, *, is_guard: bool = False) -> None:
        self.outer = outer
        self.is_guard = is_guard  # whether it guards the index of one statement
        self.depth: int = 0 if outer is None else outer.depth + 1  # of the kernel's own block: 1
        self.declared: set[Local] = set()
        self.stopped: set[Container] = set()  # containers that count as constants in the rest of the block

    @property
    def is_kernel(self) -> bool:
        """Whether this is the block of the kernel itself, whose locals iterations of a parallel loop share."""
        return self.depth <= 1

    def _around(self) -> Iterator[Scope]:
        """This block and those around it."""
        block: Scope | None = self
        while block is not None:
            yield block
            block = block.outer

    def stops(self, container: Container) -> bool:
        """Whether values read from a container count as constants."""
        return any(container in block.stopped for block in self._around())

    def is_within(self, other: Scope) -> bool:
        """Whether this is ``other``, or is nested in it."""
        return other in self._around()

    def can_name(self, atom: Local | Value) -> bool:
        return any(atom in block.declared for block in self._around())


class Cursor:
    """The block and the loops of the statement that is differentiated."""

    def __init__(self) -> None:
        self._block = Scope(None)
        self._loops: tuple[Loop, ...] = ()

    @property
    def block(self) -> Scope:
        return self._block

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops around the statement, the outermost first."""
        return self._loops

    @property
    def parallel_loop(self) -> Loop | None:
        return self._loops[0] if self._loops and self._loops[0].is_parallel else None

    def is_stale(self, form: Form) -> bool:
        """Whether a row in a form may have changed since it was read."""
        return any(map(self._has_changed, filter(is_row, form)))

    def _has_changed(self, row: Row) -> bool:
        entered = [loop for loop in self._loops if loop not in row.loops]
        return row.version != row.rows.version or any(row.source in loop.changes for loop in entered)

    @contextlib.contextmanager
    def in_block(self, declared: tuple[Local, ...] = (), *, is_guard: bool = False) -> Iterator[None]:
        """Enter a block in which these locals are visible."""
        outer, self._block = self._block, Scope(self._block, is_guard=is_guard)
        self._block.declared.update(declared)
        try:
            yield
        finally:
            self._block = outer

    @contextlib.contextmanager
    def in_loop(self, loop: Loop) -> Iterator[None]:
        outer, self._loops = self._loops, (*self._loops, loop)
        try:
            yield
        finally:
            self._loops = outer
