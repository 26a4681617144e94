"""The package's own functions in a recorded kernel, known by their attribute ``boundary_kind``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import taichi_ext.record.edges as edges
import taichi_ext.record.shapes as shapes
from taichi_ext import backend
from taichi_ext.errors import bound_arguments
from taichi_ext.record.boundaries import replaced, stopped
from taichi_ext.record.construct import inline_call, walk_typed
from taichi_ext.record.handles import Callback, value_of
from taichi_ext.record.recording import Recording
from taichi_ext.record.rules import marked


def primitive_call(r: Recording, function: Any, args: Sequence[object], keywords: Mapping[str, object]) -> object:
    """A call of a function with custom derivatives."""
    kind = function.boundary_kind
    bound = bound_arguments(function, args, keywords)
    bound.apply_defaults()
    given: dict[str, Any] = {
        k: tuple(map(value_of, v)) if k == "args" else value_of(v) for k, v in bound.arguments.items()
    }

    def call(func: Any, *args: object) -> Any:
        if isinstance(func, Callback):
            func, args = func.function, (*args, *func.args)
        method = backend.bound(func)
        if method is not None:
            func, args = method[0], (method[1], *args)
        known = backend.taichi_func(func)
        assert known is not None
        return inline_call(r, known, list(args), {})

    return _HANDLERS.get(kind, edges.edge)(r, call, function, given)


def _mark(r: Recording, _: edges.Call, function: object, given: dict[str, Any]) -> object:
    return marked(r, given["name"], given["value"], given["along"], lambda f, passed: walk_typed(r, f, passed))


_HANDLERS = {
    "mark": _mark,
    "stop_gradient": lambda r, call, function, given: stopped(r, given["value"]),
    "replace_gradient": lambda r, call, function, given: replaced(r, given["value"], given["surrogate"]),
    "sqrt_edge": edges.sqrt_edge,
    "boundary_term": edges.boundary_term,
    "level_at": edges.level_at,
    "layers": shapes.mean_of_shapes,
    "nearest": shapes.mean_of_shapes,
    **{f.__name__: f for f in (shapes.pixel, shapes.probe, shapes.segment_edge, shapes.ray_level)},
    **{f.__name__: f for f in (shapes.visible_edge, shapes.add_visible_edge, shapes.seen_together)},
    **{f.__name__: f for f in (shapes.shape_at, shapes.level_gradient)},
}
