"""``edge`` and its relatives in a kernel that the engine traces."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.backend import ops
from taichi_ext.boundary.edges import coverage, edge, segment_edge, sqrt_edge, step
from taichi_ext.boundary.layers import layers, level_gradient, mean_of_shapes, nearest, shape_at
from taichi_ext.boundary.meshes import visible_edge, visible_parts
from taichi_ext.boundary.rays import level_along, ray_level
from taichi_ext.derivative.linear_form import Form, Seed, as_expression, is_row, multiply
from taichi_ext.derivative.rules import Rule
from taichi_ext.derivative.values import (
    Scalar,
    entries_of,
    is_tensor_like,
    keep,
    linearize,
    make_tensor,
    primal_of,
    shape_of,
)
from taichi_ext.errors import InvalidRuleError, UnsupportedError
from taichi_ext.tracing import subscripts
from taichi_ext.tracing.constructors import cast
from taichi_ext.tracing.pixel import Pixel, segment_partials


def _pixel(tracer: Any, what: str, level: Any, at: Any) -> tuple[Any, Pixel]:
    if at is None:
        raise UnsupportedError(f"{what} needs at=(px, py), the position of the pixel, where a derivative is taken.")
    if not isinstance(at, (tuple, list)) and shape_of(tracer.value_of(at)) == (2,):
        at = [subscripts.load(tracer, at, (n,)) for n in range(2)]
    else:
        position_of(what, tracer.value_of(at))
    level = level if isinstance(level, Scalar) else Scalar(real_level(what, level), form={})
    real_level(what, level.primal)
    seeds = [tracer.spatial_seed(what, variable) for variable in at]
    form = linearize(tracer, level)
    gradient = tuple(_column(tracer, form, seed) for seed in seeds)
    if all(isinstance(c, (int, float)) and c == 0 for c in gradient):
        tracer.require_settled(
            f"{what}: level does not depend on at=(px, py); compute it in the same kernel from the same variables."
        )
    return level, Pixel(keep(level), gradient)  # type: ignore[arg-type]


def _column(tracer: Any, form: Form, seed: Seed) -> Any:
    """The coefficient of one seed, that in rows included."""
    total = form.get(seed, 0)
    for leaf, c in form.items():
        if is_row(leaf) and hasattr(leaf, "storage"):
            factor = c.factor if hasattr(c, "factor") else c
            total = total + multiply(factor, leaf.entry(seed.column.constant))
    return total


def _with_partials(tracer: Any, value: Any, parts: list[tuple[Any, Any]]) -> Any:
    """A scalar with a value and, for each argument, a partial; the way of the mode that is being compiled."""
    if tracer.is_reverse:
        stop = backend.stop_gradient
        total = stop(value)
        for arg, partial in parts:
            primal = primal_of(arg)
            if backend.is_expr(primal):
                total = total + stop(partial) * (primal - stop(primal))
        return total
    active = [(arg, partial) for arg, partial in parts if isinstance(arg, Scalar)]
    if not active:
        return value
    rule = Rule("edge", lambda *args: None, tuple(p for _, p in active))
    node = Scalar(value, rule=rule, args=tuple(a for a, _ in active))
    node.variable = backend.variable(value)
    return node


def _shaped(values: list[Any], like: Any) -> Any:
    return make_tensor(values, shape_of(like)) if is_tensor_like(like) else values[0]


def _entries(x: Any, count: int) -> list[Any]:
    return entries_of(x) if is_tensor_like(x) else [x] * count


def trace_edge(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """``edge``, ``step`` and ``coverage`` in a kernel that the engine traces."""
    given = inspect.signature(function).bind(*args, **keywords).arguments
    inside, outside = (tracer.value_of(given.get(n, d)) for n, d in (("inside", 1.0), ("outside", 0.0)))
    what = function.__name__
    antialias = is_antialiased(what, function is coverage or given.get("antialias", False))
    level, pixel = _pixel(tracer, what, tracer.value_of(given["level"]), given.get("at"))
    inside, outside = alike(what, inside, outside)
    jump = tracer.value_of(given.get("jump"))
    if jump is not None and shape_of(jump) not in ((), shape_of(inside)):
        raise UnsupportedError(
            f"{what}: jump has shape {shape_of(jump)}, the values {shape_of(inside)}; give it the same shape."
        )
    count = len(entries_of(inside)) if is_tensor_like(inside) else 1
    chord = pixel.chord()
    is_inside = backend.variable(pixel.level > 0)
    area = pixel.area() if antialias else None
    nodes = []
    jumps = _entries(jump, count) if jump is not None else [None] * count
    for value_in, value_out, own_jump in zip(_entries(inside, count), _entries(outside, count), jumps, strict=True):
        a, b = keep(value_in), keep(value_out)
        height = backend.variable((a - b) * 1.0 if own_jump is None else keep(own_jump) * 1.0 + a * 0)
        one, none = chord * 0 + 1, chord * 0
        if area is None:
            value = ops.select(is_inside, a, b) * 1.0
            weights = (ops.select(is_inside, one, none), ops.select(is_inside, none, one))
        else:
            value = area * a + (1 - area) * b
            weights = (area, 1 - area)
        at_level = height * chord
        within = [_roots_within(tracer, v, pixel) for v in (value_in, value_out)]
        if any(of_both := [*within[0], *within[1]]):
            # the mean of a root of this level is one over the whole pixel already, and the root is 0 on the edge
            root = backend.variable(ops.sqrt(ops.max(pixel.level, pixel.level * 0)))
            inner, outer = (sum((is_same * factor for is_same, factor in roots), none) for roots in within)
            beyond = backend.variable((1 - weights[0]) * inner + (1 - weights[1]) * outer)
            at_level = at_level + beyond * pixel.half_inverse_root()
            if own_jump is None:
                at_level = at_level - (inner - outer) * root * chord
            if all(isinstance(factor, (int, float)) for _, factor in of_both):
                value = value + beyond * root
        kept = backend.variable(value)
        # a side that does not count may have an infinite tangent: it is frozen into its own form and weighed there
        parts = [(level, at_level), (value_in, weights[0]), (value_out, weights[1])]
        nodes.append(_with_partials(tracer, kept, parts))
    return _shaped(nodes, inside)


def trace_sqrt(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """``sqrt_edge`` in a kernel that the engine traces."""
    given = inspect.signature(sqrt_edge).bind(*args, **keywords).arguments
    level, pixel = _pixel(tracer, "sqrt_edge", tracer.value_of(given["level"]), given.get("at"))
    value = backend.variable(ops.sqrt(ops.max(pixel.level, pixel.level * 0)))
    seed = tracer.extra_seed(("root", tracer.path, tracer.line()))
    tracer.roots[seed] = (pixel.level, tracer.block)
    found = _with_partials(tracer, value, [(level, pixel.half_inverse_root())])
    if tracer.is_reverse:
        return Scalar(found, form={seed: 1})
    return tracer.operate("add", found, Scalar(value * 0, form={seed: 1}))


def _roots_within(tracer: Any, value: Any, pixel: Pixel) -> list[tuple[Any, Any]]:
    """The ``sqrt_edge`` that a value holds: whether each is one of the level of this pixel, and its factor."""
    form = linearize(tracer, value) if tracer.roots else {}
    found = []
    for seed, (level, block) in tracer.roots.items():
        factor = _column(tracer, form, seed)
        if block in tracer.blocks and not (isinstance(factor, (int, float)) and factor == 0):
            is_same = backend.variable(ops.select(level == pixel.level, pixel.a * 0 + 1, pixel.a * 0))
            found.append((is_same, factor))
    return found


def trace_segment(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """``segment_edge`` in a kernel that the engine traces."""
    given = inspect.signature(segment_edge).bind(*args, **keywords).arguments
    ends = ends_of("segment_edge", tracer.value_of(given["start"]), tracer.value_of(given["end"]))
    values = [[keep(e) for e in entries] for entries in ends]
    at = position_of("segment_edge", tracer.primal(given["at"]))
    jump = tracer.primal(given["jump"])
    nodes = []
    for height in entries_of(jump) if is_tensor_like(jump) else [jump]:
        partials = segment_partials(values[0], values[1], height, at)
        zero = backend.variable(partials[0] * 0)
        nodes.append(_with_partials(tracer, zero, list(zip([*ends[0], *ends[1]], partials, strict=True))))
    return _shaped(nodes, jump)


def trace_visible(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """``visible_edge`` in a kernel that the engine traces."""
    given = inspect.signature(visible_edge).bind(*args, **keywords).arguments
    _check_function(tracer, "visible_edge", "seen", given["seen"], "x and y")
    start, end = tracer.value_of(given["start"]), tracer.value_of(given["end"])
    ends_of("visible_edge", start, end)
    at = position_of("visible_edge", tracer.value_of(given["at"]))
    return tracer.call(visible_parts, given["seen"], start, end, *_real_position(tracer, at))


def trace_ray(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """``ray_level`` in a kernel that the engine traces."""
    given = inspect.signature(ray_level).bind(*args, **keywords).arguments
    _check_function(tracer, "ray_level", "distance", given["distance"], "a position")
    return tracer.call(level_along, *(given[name] for name in ("distance", "origin", "direction", "near", "far")))


def _check_function(tracer: Any, what: str, name: str, given: Any, takes: str) -> None:
    """Raise unless a ti.func is given, and in reverse mode."""
    if tracer.is_reverse:
        raise UnsupportedError(f"{what} has no derivative in Taichi's reverse mode; use taichi_ext.jacobian.")
    if backend.taichi_func(getattr(given, "__func__", given)) is None:
        raise UnsupportedError(f"{what}: {name} is {given!r}; expected a ti.func that takes {takes}.")


def _real_position(tracer: Any, at: list[Any]) -> list[Any]:
    """The coordinates of a pixel, as real numbers."""
    return [cast(tracer, c, backend.default_type(float)) if _is_whole(c) else c for c in at]


@dataclass
class Shapes:
    """What ``layers`` and ``nearest`` are given, as their kernel code passes it on."""

    what: str
    function: Any
    value_shape: tuple[int, ...]
    has_depth: bool
    is_everywhere: bool = False  # the level is a number


def trace_layers(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """``layers`` and ``nearest`` in a kernel that the engine traces."""
    given = inspect.signature(function).bind(*args, **keywords).arguments
    what, shape, background = function.__name__, given["shape"], tracer.value_of(given["background"])
    _check_function(tracer, what, "shape", shape, "n, x and y")
    x, y = _real_position(tracer, position_of(what, tracer.value_of(given["at"])))
    shapes = Shapes(what, shape, shape_of(background), function is nearest)
    return tracer.call(mean_of_shapes, shapes, given["count"], background, x, y, shapes.has_depth)


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) or (backend.is_expr(primal_of(x)) and not backend.is_real(backend.dtype_of(primal_of(x))))


def trace_shape(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """Level, depth and value of one of the shapes of ``layers`` or ``nearest``."""
    shapes, n, x, y = args
    found = tracer.value_of(tracer.call(shapes.function, n, x, y))
    names = ("level", "depth", "value") if shapes.has_depth else ("level", "value")
    if not isinstance(found, (tuple, list)) or len(found) != len(names):
        raise UnsupportedError(f"{shapes.what}: shape must return {', '.join(names)}; it returns {described(found)}.")
    level, value = found[0], found[-1]
    if isinstance(level, (int, float)):
        shapes.is_everywhere, level = True, float(level)
    elif not isinstance(level, Scalar):
        real_level(shapes.what, level)
    if shape_of(value) != shapes.value_shape:
        raise UnsupportedError(
            f"{shapes.what}: shape returns a value of shape {shape_of(value)}, and background has shape "
            f"{shapes.value_shape}; give both the same shape."
        )
    return level, found[1] if shapes.has_depth else -backend.cast(primal_of(n), backend.default_type(float)), value


def trace_gradient(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """The gradient of a level or a depth by the position."""
    shapes, name, value = args
    form = linearize(tracer, tracer.value_of(value))
    gradient = [_column(tracer, form, tracer.spatial_seed(shapes.what, variable)) for variable in keywords["at"]]
    is_flat = all(isinstance(c, (int, float)) and c == 0 for c in gradient)
    if is_flat and name == "level" and not shapes.is_everywhere:
        tracer.require_settled(f"{shapes.what}: level does not depend on x and y; compute it from them in the shape.")
    dtype = backend.dtype_of(primal_of(tracer.value_of(value)))
    return backend.tensor([backend.variable(as_expression(c, dtype)) for c in gradient], (2,))


def is_antialiased(what: str, antialias: Any) -> bool:
    """The option ``antialias``; raises unless it is known to be true or false when the kernel is compiled."""
    if not isinstance(antialias, (bool, np.bool_)):
        shown = "a value of the kernel" if backend.is_expr(antialias) else repr(antialias)
        raise InvalidRuleError(
            f"{what}: antialias is {shown}; expected True or False, a constant when the kernel is compiled."
        )
    return bool(antialias)


def real_level(what: str, level: Any) -> Any:
    """The level, if it can be one."""
    if not backend.is_expr(level) or backend.is_tensor(level) or not backend.is_real(backend.dtype_of(level)):
        raise UnsupportedError(
            f"{what}: level must be a real scalar computed from the position of the pixel; {described(level)} is "
            "given. Compute it from real variables, for example px = float(i)."
        )
    return level


def alike(what: str, inside: Any, outside: Any) -> tuple[Any, Any]:
    """Both values with one shape: a scalar stands for all entries."""
    shapes = shape_of(inside), shape_of(outside)
    if shapes[0] == shapes[1]:
        return inside, outside
    if () not in shapes:
        raise UnsupportedError(
            f"{what}: inside has shape {shapes[0]}, outside {shapes[1]}; give both the same shape, or a scalar for one."
        )
    if shapes[1]:
        return make_tensor([inside] * math.prod(shapes[1]), shapes[1]), outside
    return inside, make_tensor([outside] * math.prod(shapes[0]), shapes[0])


def ends_of(what: str, start: Any, end: Any) -> tuple[list[Any], list[Any]]:
    """The coordinates of both ends of a side."""
    for name, value in (("start", start), ("end", end)):
        if shape_of(value) != (2,):
            raise UnsupportedError(
                f"{what}: {name} must be a vector of 2, x and y in pixels; {described(value)} is given. "
                "Write ti.Vector([x, y])."
            )
    return entries_of(start), entries_of(end)


def position_of(what: str, at: Any) -> list[Any]:
    """The two coordinates of a pixel."""
    if shape_of(at) == (2,):
        return entries_of(at)
    if not isinstance(at, (tuple, list)) or len(at) != 2 or any(shape_of(c) for c in at):
        raise UnsupportedError(
            f"{what}: at must be a pair of real numbers, at=(px, py); {described(at)} is given. "
            "It is the centre of the pixel, for example px = float(i) and py = float(j)."
        )
    return list(at)


def described(x: Any) -> str:
    """An argument as messages tell it."""
    if isinstance(x, (tuple, list)):
        return f"a {type(x).__name__} of {len(x)}"
    shape, x = shape_of(x), primal_of(x)
    if shape:
        return f"a value of shape {shape}"
    return f"a value of type {backend.dtype_of(x).to_string()}" if backend.is_expr(x) else repr(x)


SPECIAL = {
    edge: trace_edge,
    step: trace_edge,
    coverage: trace_edge,
    sqrt_edge: trace_sqrt,
    segment_edge: trace_segment,
    visible_edge: trace_visible,
    ray_level: trace_ray,
    layers: trace_layers,
    nearest: trace_layers,
    shape_at: trace_shape,
    level_gradient: trace_gradient,
}
