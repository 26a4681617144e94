"""Values whose derivative is not that of their expression: recorded with what takes its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from taichi_ext.errors import InvalidRuleError
from taichi_ext.program import Boundary, Local, Read, Tensor, Value, entries, regrouped
from taichi_ext.program.values import Struct
from taichi_ext.record.handles import Record, group_of, shape_of
from taichi_ext.record.literals import as_value
from taichi_ext.record.recording import Recording


def statement(r: Recording, kind: str, given: Mapping[str, Any], values: Any, **options: Any) -> Any:
    """Record a boundary; returns its results, of the structure of ``values``."""
    groups, locals_, results = results_of(kind, values)
    kept = {k: as_groups(v) for k, v in given.items() if v is not None}
    r.add(Boundary(kind, None, kept, groups, locals_, {}, options, place=r.place()))
    return results


def results_of(name: str, values: Any) -> tuple[Any, tuple[Local, ...], Any]:
    """The values as groups, a local for each of their numbers, and these locals in the structure of the values."""
    groups = as_groups(values)
    parts = groups if isinstance(groups, tuple) else (groups,)
    numbers = [n for part in parts for n in entries(part)]
    locals_ = tuple(Local(name if n.dtype.is_real else "kept", n.dtype, (), "temporary") for n in numbers)
    rest: list[Value] = [Read(local) for local in locals_]
    made = []
    for part, value in zip(parts, values if isinstance(values, tuple) else (values,), strict=True):
        count = len(entries(part))
        made.append(_as_handle(regrouped(part, tuple(rest[:count])), value))
        rest = rest[count:]
    return groups, locals_, tuple(made) if isinstance(values, tuple) else made[0]


def as_groups(x: Any) -> Any:
    """A value, or several, as groups of a program."""
    if isinstance(x, tuple):
        return tuple(map(as_groups, x))
    return group_of(x) if isinstance(x, (Value, Tensor, Record)) else as_value(x)


def _as_handle(group: Any, like: Any) -> Any:
    if isinstance(group, Struct):
        members = {k: _as_handle(m, like.members[k]) for k, m in group.members.items()}
        return Record(members, like.methods, like.kind)
    return group


def stopped(r: Recording, value: Any) -> Any:
    """The value, without its tangent."""
    return statement(r, "stop_gradient", {}, value)


def replaced(r: Recording, value: Any, surrogate: Any) -> Any:
    """The value, with the tangent of another."""
    if shape_of(value) != shape_of(surrogate):
        raise InvalidRuleError(
            f"replace_gradient: the value has shape {shape_of(value)}, the surrogate {shape_of(surrogate)}; give both "
            "the same shape."
        )
    return statement(r, "replace_gradient", {"surrogate": surrogate}, value)
