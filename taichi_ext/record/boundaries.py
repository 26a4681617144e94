"""Values whose derivative is not that of their expression, recorded with its replacement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from taichi_ext.errors import InvalidRuleError
from taichi_ext.program import Boundary, Local, Read, Tensor, Value, entries
from taichi_ext.record.handles import Record, group_of, shape_of, with_members
from taichi_ext.record.literals import as_value, described
from taichi_ext.record.recording import Recording


def statement(r: Recording, kind: str, given: Mapping[str, Any], values: Any, **options: object) -> Any:
    """Record a boundary; returns its results, of the structure of ``values``."""
    groups, locals_, results = results_of(kind, values)
    kept = {k: as_groups(v) for k, v in given.items() if v is not None}
    r.add(Boundary(kind, None, kept, groups, locals_, {}, options, place=r.place()))
    return results


def results_of(name: str, values: object) -> tuple[Any, tuple[Local, ...], Any]:
    """The values as groups, a local for each of their numbers, and these locals in the structure of the values."""
    locals_: list[Local] = []

    def result(x: Value) -> Value:
        locals_.append(Local(name if x.dtype.is_real else "kept", x.dtype, (), "temporary"))
        return Read(locals_[-1])

    results = by_number(result, values)
    return as_groups(values), tuple(locals_), results


def as_groups(x: object) -> Any:
    """A value, or several, as groups of a program."""
    if isinstance(x, tuple):
        return tuple(map(as_groups, x))
    return group_of(x) if isinstance(x, (Value, Tensor, Record)) else as_value(x)


def by_number(change: Callable[[Value], Value], value: object) -> object:
    """Apply a function of numbers to the numbers of a value."""
    if isinstance(value, (tuple, list)):
        return tuple(by_number(change, part) for part in value)
    if isinstance(value, Record):
        return with_members(value, lambda _, member: by_number(change, member))
    if isinstance(value, Tensor):
        return Tensor(tuple(map(change, value.entries)), value.shape)
    return change(as_value(value))


def stopped(r: Recording, value: object) -> object:
    return statement(r, "stop_gradient", {}, value)


def replaced(r: Recording, value: object, surrogate: object) -> object:
    """The value, with the tangent of another."""
    shapes = structure_of(value), structure_of(surrogate)
    if shapes[0] != shapes[1]:
        raise InvalidRuleError(
            f"replace_gradient: the value has shape {shapes[0]}, the surrogate {shapes[1]}; give both the same shape."
        )
    _check_real(as_groups(value), as_groups(surrogate))
    return statement(r, "replace_gradient", {"surrogate": surrogate}, value)


def _check_real(value: Any, surrogate: Any) -> None:
    """Raise if the derivative of a real number would be that of an integer, which has none."""
    if isinstance(value, tuple):
        for parts in zip(value, surrogate, strict=True):
            _check_real(*parts)
        return
    for own, other in zip(entries(value), entries(surrogate), strict=True):
        if other.dtype.is_real and not own.dtype.is_real:
            raise InvalidRuleError(
                f"replace_gradient: the value is of type {own.dtype.name}, which has no derivative; convert it to a "
                "real number first, as in replace_gradient(float(n), x)."
            )


def structure_of(x: object) -> object:
    """The shape of a value; of a struct those of its members by name, of several values those of each."""
    if isinstance(x, (tuple, list)):
        return tuple(map(structure_of, x))
    if isinstance(x, Record):
        return {name: structure_of(member) for name, member in x.members.items()}
    if isinstance(x, (Value, Tensor, int, float, np.generic)):
        return shape_of(x)
    return described(x)
