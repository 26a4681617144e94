"""Where a rule may give the derivative: marks, stopped and replaced gradients, edges, functions with a rule.

The recorder knows these functions by their attribute ``boundary_kind``. Each gives its plain value, and a statement
that keeps the arguments by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from taichi_ext.errors import InvalidRuleError, UnsupportedError
from taichi_ext.program import Boundary, Local, Read, Tensor, Value, entries, regrouped
from taichi_ext.program.values import Struct
from taichi_ext.record.assignments import declare, frozen
from taichi_ext.record.handles import Cell, Cells, Record, group_of, numbers_of, shape_of, value_of
from taichi_ext.record.literals import as_value, described
from taichi_ext.record.operations import operate, typed_tensor
from taichi_ext.record.recording import Recording

EDGES = ("edge", "step", "coverage")


def boundary_call(r: Recording, function: Any, args: list[Any], keywords: dict[str, Any]) -> Any:
    """A call of one of the package's own functions that carry derivatives."""
    kind = function.boundary_kind
    bound = inspect.signature(function).bind(*args, **keywords)
    bound.apply_defaults()
    given = {k: value_of(v) for k, v in bound.arguments.items()}
    if kind == "mark":
        return _mark(r, given)
    if kind == "stop_gradient":
        return statement(r, kind, None, {}, given["value"])
    if kind == "replace_gradient":
        return _replace(r, given)
    if kind in EDGES:
        return _edge(r, kind, given)
    if kind == "sqrt_edge":
        level = _level(kind, given["level"])
        root = operate(r, "sqrt", operate(r, "max", level, 0.0))
        return statement(r, kind, None, {"level": level, **_position(r, kind, given["at"])}, root)
    return _segment(r, given)


def statement(
    r: Recording,
    kind: str,
    target: Any,
    given: Mapping[str, Any],
    values: Any,
    inner: Mapping[str, tuple[Local, ...]] | None = None,
    **options: Any,
) -> Any:
    """Record a boundary; returns its results, of the structure of ``values``."""
    group = _as_group(values)
    parts = group if isinstance(group, tuple) else (group,)
    numbers = [n for part in parts for n in entries(part)]
    results = tuple(Local(kind if n.dtype.is_real else "kept", n.dtype, (), "temporary") for n in numbers)
    groups = {k: _as_group(v) for k, v in given.items() if _is_group(v)}
    r.add(Boundary(kind, target, groups, group, results, inner or {}, options, place=r.place()))
    rest: list[Value] = [Read(local) for local in results]
    made = []
    for part, value in zip(parts, values if isinstance(values, tuple) else (values,), strict=True):
        count = len(entries(part))
        made.append(_as_handle(regrouped(part, tuple(rest[:count])), value))
        rest = rest[count:]
    return tuple(made) if isinstance(values, tuple) else made[0]


def _as_group(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_as_group, x))
    return group_of(x) if isinstance(x, (Value, Tensor, Record)) else as_value(x)


def _is_group(x: Any) -> bool:
    return isinstance(x, (Value, Tensor, Record, int, float))


def _as_handle(group: Any, like: Any) -> Any:
    if isinstance(group, Struct):
        members = {k: _as_handle(m, like.members[k]) for k, m in group.members.items()}
        return Record(members, like.methods, like.kind)
    return group


# --- marks


def _mark(r: Recording, given: dict[str, Any]) -> Any:
    name = given["name"]
    if not isinstance(name, str):
        raise InvalidRuleError(f"mark: the name is {name!r}; expected a string.")
    along = {k: frozen(r, v, k) for k, v in given["along"].items()}
    return statement(r, "mark", name, along, frozen(r, given["value"], "marked"))


def _replace(r: Recording, given: dict[str, Any]) -> Any:
    value, surrogate = given["value"], given["surrogate"]
    if shape_of(value) != shape_of(surrogate):
        raise InvalidRuleError(
            f"replace_gradient: the value has shape {shape_of(value)}, the surrogate {shape_of(surrogate)}; give both "
            "the same shape."
        )
    return statement(r, "replace_gradient", None, {"surrogate": surrogate}, value)


# --- edges


def _edge(r: Recording, kind: str, given: dict[str, Any]) -> Any:
    level = _level(kind, given["level"])
    antialias = kind == "coverage" or given.get("antialias", False)
    if not isinstance(antialias, bool):
        raise InvalidRuleError(
            f"{kind}: antialias is {described(antialias)}; expected True or False, a constant when the kernel is "
            "compiled."
        )
    inside, outside = _alike(kind, given.get("inside", 1.0), given.get("outside", 0.0))
    jump = given.get("jump")
    if jump is not None and shape_of(jump) not in ((), shape_of(inside)):
        raise UnsupportedError(
            f"{kind}: jump has shape {shape_of(jump)}, the values {shape_of(inside)}; give it the same shape."
        )
    is_inside = operate(r, "gt", level, 0)
    value = operate(r, "select", is_inside, inside, outside)
    kept = {"level": level, "inside": inside, "outside": outside, "jump": jump, **_position(r, kind, given["at"])}
    return statement(r, kind, None, kept, value, antialias=antialias)


def _level(kind: str, level: Any) -> Value:
    if not isinstance(level, Value) or not level.dtype.is_real:
        shown = f"a value of type {level.dtype}" if isinstance(level, Value) else f"a {described(level)}"
        raise UnsupportedError(
            f"{kind}: level must be a real scalar computed from the position of the pixel; {shown} is given. "
            "Compute it from real variables, for example px = float(i)."
        )
    return level


def _alike(kind: str, inside: Any, outside: Any) -> tuple[Any, Any]:
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


def _position(r: Recording, kind: str, at: Any) -> dict[str, Any]:
    """The position of the pixel, as reads of the locals that hold it first."""
    if at is None:
        return {}
    values = list(at.entries) if isinstance(at, Tensor) else list(at) if isinstance(at, (tuple, list)) else []
    if len(values) != 2 or any(shape_of(v) for v in values):
        raise UnsupportedError(
            f"{kind}: at must be a pair of real numbers, at=(px, py); a {described(at)} is given. "
            "It is the centre of the pixel, for example px = float(i) and py = float(j)."
        )
    return {"at": Tensor(tuple(_origin(r, as_value(v)) for v in values), (2,))}


def _origin(r: Recording, value: Value) -> Value:
    """The local that a local is a copy of."""
    if isinstance(value, Read) and not value.index and value.local in r.copies:
        return Read(r.copies[value.local])
    return value


def _segment(r: Recording, given: dict[str, Any]) -> Any:
    for name in ("start", "end"):
        if shape_of(given[name]) != (2,):
            raise UnsupportedError(
                f"segment_edge: {name} must be a vector of 2, x and y in pixels; a {described(given[name])} is given. "
                "Write ti.Vector([x, y])."
            )
    kept = {name: given[name] for name in ("start", "end", "jump")} | _position(r, "segment_edge", given["at"])
    return statement(r, "segment_edge", None, kept, operate(r, "mul", given["jump"], 0.0))


# --- functions with a rule


def ruled_call(r: Recording, func: Any, args: list[Any], inline: Callable[[list[Any]], Any]) -> Any:
    """A call of a function that has a rule: its body sees copies of the arguments."""
    given: dict[str, Any] = {}
    inner: dict[str, tuple[Local, ...]] = {}
    passed: list[Any] = []
    for argument, arg in zip(func.arguments, args, strict=True):
        value = value_of(arg)
        if not _is_group(value):
            passed.append(arg)
            continue
        given[argument.name] = frozen(r, value, argument.name)
        copy = declare(r, argument.name, given[argument.name], "argument")
        inner[argument.name] = _locals_of(copy)
        passed.append(copy)
    result = value_of(inline(passed))
    if result is None:
        return None
    result = tuple(result) if isinstance(result, list) else result
    return statement(r, "function", func, given, result, inner)


def _locals_of(place: Any) -> tuple[Local, ...]:
    if isinstance(place, Cells):
        return (place.base,)  # type: ignore[return-value]
    if isinstance(place, Cell):
        return (place.target.local,)  # type: ignore[union-attr]
    if isinstance(place, Record):
        return tuple(local for member in place.members.values() for local in _locals_of(member))
    return tuple(n.local for n in numbers_of(place) if isinstance(n, Read))
