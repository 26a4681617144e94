"""Edges of images in a recorded kernel: checks of their arguments, and their values without antialiasing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.errors import InvalidRuleError, UnsupportedError, shown
from taichi_ext.program import Body, Const, Effect, Load, Read, Store, Tensor, Value, cited, entries, statements
from taichi_ext.record.assignments import frozen
from taichi_ext.record.handles import Record, shape_of, value_of
from taichi_ext.record.literals import as_value, convert, default_types
from taichi_ext.record.operations import operate, typed_tensor
from taichi_ext.record.recording import Recording
from taichi_ext.record.rules import by_number, statement, stopped

Call = Callable[..., Any]  # of a ti.func, by its arguments


@dataclass(frozen=True)
class Level:
    """A level that is computed at other positions: the local that holds it, its position, and its slope there."""

    kind: str  # the function that takes it
    local: Read
    at: Tensor
    slope: object


def edge(r: Recording, call: Call, function: Any, given: Mapping[str, object]) -> Any:
    """``edge`` and ``coverage``."""
    kind = function.boundary_kind
    level = real_level(kind, given["level"])
    antialias = kind == "coverage" or is_antialiased(kind, given)
    inside, outside = _alike(kind, given.get("inside", 1.0), given.get("outside", 0.0))
    jump = given.get("jump")
    if jump is not None and shape_of(jump) not in ((), shape_of(inside)):
        raise UnsupportedError(
            f"{kind}: jump has shape {shape_of(jump)}, the values {shape_of(inside)}; give it the same shape."
        )
    inside, outside = (_as_real(r, x) for x in (inside, outside))
    value: Any = operate(r, "select", operate(r, "gt", level, 0), inside, outside)
    is_differentiated = r.rules.takes_derivative and not r.stopped  # the result of a rule is not
    if not (is_differentiated or antialias):
        return value
    at, level = _pixel(r, kind, given["at"]), frozen(r, level, "level")
    if at is None or not isinstance(level, Read):
        return statement(r, "gradient", {"value": level, "at": at}, value, what=kind)  # which raises
    slope, zero = _gradient(r, kind, level, at, may_be_flat=False), Const(0.0, level.dtype)
    found = call(function.boundary_body, Level(kind, level, at, slope), level, slope, zero)
    real = max((e.dtype for e in entries(value)), key=lambda t: t.bits)
    area, motion = (convert(as_value(value_of(v)), real) for v in found)
    if antialias:
        outer = operate(r, "mul", operate(r, "sub", 1.0, area), outside)
        value = operate(r, "add", operate(r, "mul", area, inside), outer)
    if not is_differentiated:
        return value
    height = stopped(r, operate(r, "sub", inside, outside) if jump is None else jump)
    term = boundary_term(r, call, function, {"name": kind, "moved": operate(r, "mul", height, motion)})
    return operate(r, "add", value, term)


def level_at(r: Recording, call: Call, function: object, given: dict[str, Any]) -> object:
    """A level at another position, and its slope; ``with_levels`` puts the code that computes it in the place."""
    level = given["level"]
    by = {name: frozen(r, given[name], name) for name in ("x", "y")}
    value = statement(r, "level_at", {"value": level.local, "at": level.at, "slope": level.slope, **by}, level.local)
    return value, _gradient(r, level.kind, value, level.at, may_be_flat=True)


def gradient(r: Recording, kind: str, value: object, at: tuple[object, object], *, may_be_flat: bool) -> Any:
    """The gradient of a value with respect to a position; it has no tangent."""
    return _gradient(r, kind, as_value(value), _pixel(r, kind, at), may_be_flat=may_be_flat)


def _gradient(r: Recording, kind: str, value: Value, at: Tensor | None, *, may_be_flat: bool) -> object:
    zeros = Tensor((Const(0.0, value.dtype),) * 2, (2,))
    return statement(r, "gradient", {"value": value, "at": at}, zeros, what=kind, may_be_flat=may_be_flat)


def boundary_term(r: Recording, call: Call, function: object, given: Mapping[str, object]) -> object:
    """0, with the tangent of a value, which is not differentiated again."""
    zeros = by_number(lambda x: Const(0.0, x.dtype), given["moved"])
    return statement(r, "replace_gradient", {"surrogate": given["moved"]}, zeros, what=given["name"])


# --- arguments --------------------------------------------------------------------------------------------------------


def is_antialiased(kind: str, given: Mapping[str, object]) -> bool:
    """The argument ``antialias``; False by default."""
    antialias = given.get("antialias", False)
    if not isinstance(antialias, (bool, np.bool_)):
        shown = "a value of the kernel" if isinstance(antialias, (Value, Tensor)) else repr(antialias)
        raise InvalidRuleError(
            f"{kind}: antialias is {shown}; expected True or False, a constant when the kernel is compiled."
        )
    return bool(antialias)


def real_level(kind: str, level: object) -> Value:
    """The level; raises if the argument cannot be one."""
    if not isinstance(level, Value) or not level.dtype.is_real:
        raise UnsupportedError(
            f"{kind}: level must be a real scalar computed from the position of the pixel; {shown_value(level)} is "
            "given. Compute it from real variables, for example px = float(i)."
        )
    return level


def position(kind: str, at: object) -> list[Value]:
    """The coordinates of a pixel, as real numbers."""
    return [c if c.dtype.is_real else convert(c, default_types()[0]) for c in _pair(kind, at)]


def _pair(kind: str, at: object) -> list[Value]:
    values = list(at.entries) if isinstance(at, Tensor) else list(at) if isinstance(at, (tuple, list)) else []
    if len(values) != 2 or any(not isinstance(v, (Value, int, float)) for v in values):
        raise UnsupportedError(
            f"{kind}: at must be a pair of real numbers, at=(px, py); {shown_value(at)} is given. "
            "It is the centre of the pixel, for example px = float(i) and py = float(j)."
        )
    return list(map(as_value, values))


def _pixel(r: Recording, kind: str, at: object) -> Tensor | None:
    """The position of the pixel, or of an interval, as reads of the locals that held it first."""
    if at is None:
        return None
    values = [at] if isinstance(at, Value) else _pair(kind, at)
    return Tensor(tuple(r.origin(v) for v in values), (len(values),))


def _alike(kind: str, inside: Any, outside: Any) -> tuple[object, object]:
    """Both values with one shape: a scalar stands for all entries."""
    shapes = shape_of(inside), shape_of(outside)
    if shapes[0] == shapes[1]:
        return inside, outside
    if () not in shapes:
        raise UnsupportedError(
            f"{kind}: inside has shape {shapes[0]}, outside {shapes[1]}; give both the same shape, or a scalar for one."
        )
    shape = shapes[0] or shapes[1]
    count = len((inside if shapes[0] else outside).entries)
    return tuple(x if shape_of(x) else typed_tensor([x] * count, shape) for x in (inside, outside))  # type: ignore[return-value]


def _as_real(r: Recording, x: object) -> object:
    is_real = (x.entries[0] if isinstance(x, Tensor) else as_value(x)).dtype.is_real
    return x if is_real else operate(r, "mul", x, 1.0)


def shown_value(x: object) -> str:
    """An argument as messages show it."""
    if isinstance(x, (tuple, list)):
        return f"a {type(x).__name__} of {len(x)}"
    if shape_of(x):
        return f"a value of shape {shape_of(x)}"
    if isinstance(x, Record):
        return f"a struct with the members {', '.join(x.members)}"
    return f"a value of type {x.dtype.name}" if isinstance(x, Value) else repr(x)


def require_function(
    kind: str, name: str, given: object, passed: tuple[str, ...], more: int = 0, instead: str = ""
) -> None:
    """Raise unless a ti.func of the arguments that are passed is given; ``more`` are those that the user passes on."""
    func = backend.taichi_func(getattr(given, "__func__", given))
    what = " and ".join([", ".join(passed[:-1]), passed[-1]] if passed[1:] else passed)
    if func is None:
        raise UnsupportedError(f"{kind}: {name} is {shown(given)}; expected a ti.func that takes {what}{instead}.")
    is_method, count = backend.bound(given) is not None, len(passed) + more
    try:
        inspect.signature(func.func).bind(*range(is_method + count))
    except TypeError:
        takes = [a.name for a in backend.arguments(func)][is_method:]
        further = ", and further arguments" if more else ""
        raise UnsupportedError(
            f"{kind}: {name} is {func.func.__name__}({', '.join(takes)}), which takes {len(takes)} arguments; {kind} "
            f"passes {count}: {what}{further}."
        ) from None


def require_reading(kind: str, name: str, body: Body) -> None:
    """Raise if the code of a function that is called at several positions stores or prints."""
    for s in statements(body):
        if (isinstance(s, Store) and isinstance(s.target, Load)) or isinstance(s, Effect):
            raise UnsupportedError(
                f"{cited(s.place)}{kind}: {name} must only read and compute; it is called at several positions for "
                "each pixel. Store and print in the kernel."
            )
