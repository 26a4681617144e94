"""``layers``, ``nearest``, ``visible_edge`` and ``ray_level`` in a recorded kernel: code that is walked in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from taichi_ext.errors import UnsupportedError
from taichi_ext.program import Value
from taichi_ext.record.edges import gradient, position, real_level, require_ends, require_function, shown_value
from taichi_ext.record.handles import shape_of, value_of
from taichi_ext.record.literals import as_value, convert
from taichi_ext.record.operations import operate
from taichi_ext.record.recording import Recording
from taichi_ext.record.taichi_types import default_types

Call = Callable[..., Any]  # of a ti.func, by its arguments


@dataclass
class Shapes:
    """What ``layers`` and ``nearest`` are given, as their kernel code passes it on."""

    kind: str
    function: Any
    value_shape: tuple[int, ...]
    has_depth: bool
    is_everywhere: bool = False  # the level is a number


def mean_of_shapes(r: Recording, call: Call, function: Any, given: dict[str, Any]) -> Any:
    """``layers`` and ``nearest``."""
    kind, shape, background = function.boundary_kind, given["shape"], given["background"]
    require_function(r, kind, "shape", shape, "n, x and y")
    x, y = position(kind, given["at"])
    shapes = Shapes(kind, shape, shape_of(background), kind == "nearest")
    return call(function.boundary_body, shapes, given["count"], background, x, y, shapes.has_depth)


def visible_edge(r: Recording, call: Call, function: Any, given: dict[str, Any]) -> Any:
    require_function(r, "visible_edge", "seen", given["seen"], "x and y")
    require_ends("visible_edge", given)
    x, y = position("visible_edge", given["at"])
    return call(function.boundary_body, given["seen"], given["start"], given["end"], x, y)


def ray_level(r: Recording, call: Call, function: Any, given: dict[str, Any]) -> Any:
    require_function(r, "ray_level", "distance", given["distance"], "a position")
    return call(function.boundary_body, *(given[name] for name in ("distance", "origin", "direction", "near", "far")))


def shape_at(r: Recording, call: Call, function: Any, given: dict[str, Any]) -> Any:
    """Level, depth and value of one of the shapes of ``layers`` or ``nearest``."""
    shapes, n = given["shape"], given["n"]
    found = value_of(call(shapes.function, n, given["x"], given["y"]))
    names = ("level", "depth", "value") if shapes.has_depth else ("level", "value")
    if not isinstance(found, (tuple, list)) or len(found) != len(names):
        raise UnsupportedError(f"{shapes.kind}: shape must return {', '.join(names)}; it returns {shown_value(found)}.")
    level, value = found[0], found[-1]
    if isinstance(level, (int, float)):
        shapes.is_everywhere, level = True, float(level)
    else:
        real_level(shapes.kind, level)
    if shape_of(value) != shapes.value_shape:
        raise UnsupportedError(
            f"{shapes.kind}: shape returns a value of shape {shape_of(value)}, and background has shape "
            f"{shapes.value_shape}; give both the same shape."
        )
    depth = found[1] if shapes.has_depth else operate(r, "neg", convert(as_value(n), default_types()[0]))
    return level, depth, value


def level_gradient(r: Recording, call: Call, function: Any, given: dict[str, Any]) -> Any:
    """The gradient of a level or a depth by the position."""
    shapes, value = given["shape"], given["value"]
    may_be_flat = given["name"] != "level" or shapes.is_everywhere
    if not isinstance(value, Value):
        value = as_value(value)
    return gradient(r, shapes.kind, value, given["at"], may_be_flat=may_be_flat)


HANDLERS = {
    "layers": mean_of_shapes,
    "nearest": mean_of_shapes,
    "visible_edge": visible_edge,
    "ray_level": ray_level,
    "shape_at": shape_at,
    "level_gradient": level_gradient,
}
