"""Guards for entries whose indices may be out of range: no tangent is read or stored there.

The kernel itself reads whatever is in memory there; tangents are in separate memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace

from taichi_ext.differentiate.forms.forms import Cursor, Form, is_row, times
from taichi_ext.differentiate.plan.naming import Naming
from taichi_ext.program import I32, U1, U32, Check, Const, Declare, If, Load, Local, Op, Read, Type, Value
from taichi_ext.program.build import cast, literal, operation, select

INSIDE = "inside"  # the name of locals that hold whether the indices of an entry are in range
Condition = Value | bool  # a bool if it is known


def is_inside(naming: Naming, entry: Load | Read) -> Condition:
    """Whether the indices of an entry are in range, in a local that does not change."""
    if not entry.checks:
        return True
    builder = naming.builder
    indices = (*entry.indices, *entry.component) if isinstance(entry, Load) else entry.index
    numbers = [int(i.value) if isinstance(i, Const) else i for i in (indices[check.axis] for check in entry.checks)]
    checked = list(zip(numbers, entry.checks, strict=True))
    if not all(isinstance(n, Value) or _is_within(n, check) for n, check in checked):
        builder.keep(operation("lt", literal(0, I32), 0), INSIDE)  # read only by watched programs
        return False
    checked = [(n, check) for n, check in checked if isinstance(n, Value)]
    if not checked:
        return True
    name = tuple((naming.normal(n), check.first, check.end) for n, check in checked)
    known = builder.evaluated.get(name)
    if known is None:
        parts = (
            _lies_within(naming.value_of(form), check) for (form, *_), (_, check) in zip(name, checked, strict=True)
        )
        known = builder.evaluated[name] = builder.keep(functools.reduce(_and, parts), INSIDE)
    else:
        builder.emit(Declare(Local(INSIDE, U1, (), INSIDE), (known,), place=builder.place))  # read by watched programs
    return known


def _is_within(index: int, check: Check) -> bool:
    return (check.first is None or index >= check.first) and (check.end is None or index < check.end)


def _and(a: Value, b: Value) -> Value:
    return Op("bit_and", (a, b), U1)  # Taichi would branch for ``and``


def _lies_within(index: Value, check: Check) -> Value:
    if check.end is None:
        return operation("ge", index, check.first or 0)
    if check.first is None:
        return operation("lt", index, check.end)
    start = index if not check.first else operation("sub", index, check.first)
    return operation("lt", cast(start, U32), literal(check.end - check.first, U32))  # less than 0: larger than all


def clamped(condition: Condition, index: Value) -> Value:
    """An index that is in range in any case."""
    return index if isinstance(condition, bool) else select(condition, index, literal(0, I32))


def where(condition: Condition, form: Form, dtype: Type) -> Form:
    """A form where a condition holds, and zero elsewhere, even if its rows are infinite there."""
    if isinstance(condition, bool):
        return form if condition else {}
    weight = select(condition, literal(1, dtype), literal(0, dtype))
    return {
        replace(leaf, condition=condition) if is_row(leaf) else leaf: c if is_row(leaf) else times(weight, c)
        for leaf, c in form.items()
    }


@contextlib.contextmanager
def only_inside(naming: Naming, cursor: Cursor, entry: Load | Read) -> Iterator[bool]:
    """Within the context, emitted statements run only if the indices of an entry are in range; False if never."""
    builder = naming.builder
    condition = is_inside(naming, entry)
    if isinstance(condition, bool):
        yield condition
        return
    with cursor.in_block(is_guard=True), builder.collecting() as body:
        yield True
    builder.emit(If(condition, tuple(body), place=builder.place))
