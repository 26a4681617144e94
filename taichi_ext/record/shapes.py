"""``layers``, ``add_edge`` and ``ray_level`` in a recorded kernel: code that is walked in place."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import taichi_ext.program as ir
from taichi_ext import backend
from taichi_ext.errors import DerivativeWarning, InvalidRuleError, UnsupportedError
from taichi_ext.record.assignments import assign_to, declare, frozen
from taichi_ext.record.conditions import HASH_START, Probe
from taichi_ext.record.edges import (
    Call,
    gradient,
    is_antialiased,
    position,
    real_level,
    require_function,
    require_reading,
    shown_value,
)
from taichi_ext.record.handles import Callback, Record, shape_of, value_of
from taichi_ext.record.literals import as_value, convert, default_types
from taichi_ext.record.operations import operate, typed_tensor
from taichi_ext.record.recording import OpenBlock, Recording
from taichi_ext.record.rules import stopped

_FINE = {32: 1e-7, 64: 1e-15}  # by the bits of positions: roundings
# By whether the image is computed in float64: pixels from an edge at which its sides are looked at, and how thin a face
# is that has no area.
_BESIDE = {True: 1e-6, False: 1e-3}
_THIN = {True: 1e-9, False: 2e-4}
_UNRESOLVED = (
    "J and the value are several per cent off in {pixels}: edges follow each other too closely, or the value "
    "varies too fast, for squares of 1/32 pixel. Draw a larger image, or let fine patterns fade into their mean."
)


@dataclass
class Shapes:
    """The arguments of ``layers``, as its kernel code passes it on."""

    kind: str
    function: Callback
    value_shape: tuple[int, ...]
    has_depth: bool
    has_alpha: bool


def mean_of_shapes(r: Recording, call: Call, function: Any, given: dict[str, Any]) -> object:
    kind, shape, background = function.boundary_kind, given["shape"], given["background"]
    require_function(kind, "shape", shape, ("n", "x", "y"), len(given["args"]))
    x, y = position(kind, given["at"])
    called = callback(r, shape, given["args"])
    r.blocks.append(OpenBlock())  # recorded once more for the number of its results; not kept
    mean = value_of(call(called, ir.Const(0, ir.I32), x, y))
    require_reading(kind, "shape", tuple(r.blocks.pop().statements))
    order = given["order"]
    if order not in ("index", "depth"):
        raise InvalidRuleError(f'{kind}: order is {shown_value(order)}; expected "index" or "depth".')
    has_depth = order == "depth"
    has_alpha = not has_depth and isinstance(mean, (tuple, list)) and len(mean) == 3
    shapes = Shapes(kind, called, shape_of(background), has_depth, has_alpha)
    passed = (shapes, given["count"], background, has_depth, has_alpha)
    return _mean(r, call, function.boundary_body, Callback(function.boundary_shade, passed, kind), background, x, y)


def _mean(r: Recording, call: Call, body: Any, shade: Callback, like: object, *given: Any) -> object:
    """The value of a pixel, of the shape of another value, and an alert where it is not resolved."""
    numbers = ir.entries(as_value(like) if not isinstance(like, ir.Tensor) else like)
    real = default_types()[0]
    zeros = typed_tensor([ir.Const(0.0, real)] * len(numbers), (len(numbers),))
    x, y, *options = given
    value, is_unresolved, place = map(value_of, call(body, shade, zeros, x, y, _FINE[real.bits], *options))
    if r.rules.takes_derivative and not r.stopped:  # a rule stores nothing
        r.alert_later(_UNRESOLVED, is_unresolved, place)
    return ir.Tensor(value.entries, like.shape) if isinstance(like, ir.Tensor) else value.entries[0]


def callback(r: Recording, function: object, args: tuple[object, ...]) -> Callback:
    """A function with the current values of its further arguments, to which it cannot store."""

    def kept(a: object) -> object:
        return value_of(declare(r, "passed", a, "argument")) if isinstance(a, (ir.Value, ir.Tensor, Record)) else a

    return Callback(function, tuple(map(kept, args)))


@dataclass
class Seen:
    """The result of the function of an image at one place."""

    zeros: Any  # of the shape of its values
    is_fine: bool  # computed in float64


def seen_values(r: Recording, call: Call, kind: str, seen: object, name: str) -> Seen:
    """The result of a function of a position; it is recorded separately, and not kept."""
    real = default_types()[0]
    r.blocks.append(OpenBlock())
    value = value_of(call(seen, *(ir.Const(0.0, real) for _ in range(2))))
    body = tuple(r.blocks.pop().statements)
    require_reading(kind, name, body)
    if not isinstance(value, (ir.Value, ir.Tensor, int, float)):
        raise UnsupportedError(f"{kind}: {name} returns {shown_value(value)}; expected a number, vector or matrix.")
    values = [v for s in ir.statements(body) for given in ir.values_of(s) for v in ir.walk(given)]
    is_fine = real == ir.F64 and all(v.dtype == ir.F64 for v in values if v.dtype.is_real)
    zero = ir.Const(0.0, real)
    is_tensor = isinstance(value, ir.Tensor)
    return Seen(typed_tensor([zero] * len(value.entries), value.shape) if is_tensor else zero, is_fine)


def _beside(kind: str, given: object, seen: Seen) -> ir.Value:
    """The distance from an edge at which its sides are evaluated."""
    if given is None:
        return as_value(_BESIDE[seen.is_fine])
    if not isinstance(given, ir.Value) and not (isinstance(given, (int, float, np.number)) and given > 0):
        raise UnsupportedError(f"{kind}: beside is {shown_value(given)}; expected a positive number, in pixels.")
    return as_value(given)


@dataclass
class DrawnEdge:
    """An edge of ``add_edge``, as its kernel code passes it on."""

    image: object
    start: object
    end: object
    seen: object  # the jump, or the function that shows it
    is_given: bool
    points: object
    row: object
    zeros: object
    is_number: bool
    beside: object
    thin: object
    antialias: bool


def segment_edge(r: Recording, call: Call, function: Any, given: Mapping[str, object]) -> Any:
    kind, jump = function.boundary_kind, given["jump"]
    for name in ("start", "end"):
        if shape_of(given[name]) != (2,):
            raise UnsupportedError(
                f"{kind}: {name} must be a vector of 2, x and y in pixels; {shown_value(given[name])} is given. "
                "Write ti.Vector([x, y])."
            )
    x, y = position(kind, given["at"])
    antialias = is_antialiased(kind, given)
    if not (r.rules.takes_derivative or antialias):
        return operate(r, "mul", jump, 0.0)
    return call(function.boundary_body, given["start"], given["end"], operate(r, "mul", jump, 1.0), x, y, antialias)


def _homogeneous(kind: str, name: str, end: object) -> ir.Tensor:
    if not isinstance(end, ir.Tensor) or end.shape not in ((2,), (3,)):
        raise UnsupportedError(
            f"{kind}: {name} must be a vector of 2, x and y in pixels, or of 3, (x w, y w, w); {shown_value(end)} is "
            "given. Write ti.Vector([x, y])."
        )
    return typed_tensor([*end.entries, as_value(1.0)][:3], (3,))


def add_edge(r: Recording, call: Call, function: Any, given: dict[str, Any]) -> None:
    kind, jump, image = function.boundary_kind, given["jump_or_seen"], given["image"]
    ends = [_homogeneous(kind, name, given[name]) for name in ("start", "end")]
    points, row = _faces(r, kind, given["faces"])
    is_given = isinstance(jump, (ir.Value, ir.Tensor, int, float, np.generic))
    if is_given:
        zeros = operate(r, "mul", jump, as_value(0.0))
        seen = Seen(zeros, is_fine=all(e.dtype == ir.F64 for e in ir.entries(zeros)))
        jump = operate(r, "add", jump, zeros)
    else:
        jump_itself = ", or the jump itself: a number, vector or matrix"
        require_function(kind, "jump_or_seen", jump, ("x", "y"), instead=jump_itself)
        seen = seen_values(r, call, kind, jump, "jump_or_seen")
    shape = _entry_shape(r, kind, "image", image, 2)
    if shape_of(seen.zeros) not in ((), shape):
        raise UnsupportedError(
            f"{kind}: the jump has shape {shape_of(seen.zeros)}, the entries of image have {shape}; give it the same "
            "shape, or a number."
        )
    beside, antialias = _beside(kind, given["beside"], seen), is_antialiased(kind, given)
    if r.rules.takes_derivative or antialias:
        start, end, beside = (frozen(r, x, "end") for x in (*ends, beside))
        jump = frozen(r, jump, "jump") if is_given else jump
        thin, is_number = as_value(_THIN[seen.is_fine]), not isinstance(seen.zeros, ir.Tensor)
        edge = DrawnEdge(image, start, end, jump, is_given, points, row, seen.zeros, is_number, beside, thin, antialias)
        call(function.boundary_body, edge)


def warn_of_lost_edges(body: ir.Body) -> None:
    """Warn where the values of an image replace the terms that ``add_edge`` added to it before."""
    terms: set[ir.Local] = set()
    added: set[ir.Container] = set()
    for s in ir.statements(body):
        nodes = [v for value in ir.values_of(s) for v in ir.walk(value)]
        added -= {v.container for v in nodes if isinstance(v, ir.Load)}  # it is read: they may be in what is stored
        if isinstance(s, ir.Boundary) and s.options.get("what") == "add_edge":
            terms.update(s.results)
        elif isinstance(s, ir.Store) and isinstance(s.target, ir.Load):
            image = s.target.container
            if any(isinstance(v, ir.Read) and v.local in terms for v in nodes):
                added.add(image)
            elif isinstance(s, ir.Assign) and image in added:
                added.remove(image)
                warnings.warn(
                    f"{ir.cited(s.place)}The kernel stores to {image.name} after add_edge has added the terms of edges "
                    "to it. They are lost where it stores, so the derivative is wrong. Call add_edge after the image "
                    "is drawn.",
                    DerivativeWarning,
                    stacklevel=2,
                )


def _entry_shape(r: Recording, kind: str, name: str, given: object, axes: int) -> tuple[int, ...]:
    """The shape of the entries of a field or array; raises unless it has so many axes, and real numbers."""
    container = None
    if isinstance(given, (backend.ScalarField, backend.MatrixField, backend.AnyArray)):
        container = r.container(given)
        if container.ndim == axes and container.dtype.is_real and not any(container.offset):
            return container.element_shape
    what = shown_value(given)
    if container is not None:
        offset = container.offset or 0
        what = f"{container.name}, of type {container.dtype.name}, with {container.ndim} axes and offset {offset}"
    raise UnsupportedError(
        f"{kind}: {name} is {what}; expected real numbers in a field or an array argument of the kernel, whose axes, "
        f"{axes} in number, start at 0."
    )


def _faces(r: Recording, kind: str, given: object) -> tuple[object, ir.Tensor]:
    """The corners of a mesh and a row of its table; a row without faces where there are none."""
    if given is None:
        return None, ir.Tensor((as_value(0), as_value(0)), (2,))
    points, row = given if isinstance(given, (tuple, list)) and len(given) == 2 else (None, None)
    if (
        not isinstance(row, ir.Tensor)
        or len(row.shape) != 1
        or row.shape[0] < 2
        or any(e.dtype.is_real for e in row.entries)
    ):
        raise UnsupportedError(
            f"{kind}: faces is {shown_value(given)}{'' if row is None else f', with the row {shown_value(row)}'}; "
            "expected the corners in the image and a row of mesh_edges, a vector of integers. Write "
            "faces=(points, edges[e]), where edges is a ti.Vector.field(n, ti.i32, shape=...) that holds the table."
        )
    shape = _entry_shape(r, kind, "points in faces", points, 1)
    if shape not in ((2,), (3,)):
        raise UnsupportedError(
            f"{kind}: points in faces has entries of shape {shape}; expected vectors of 2, x and y in pixels, or of 3, "
            "(x w, y w, w)."
        )
    return points, row


def seen_together(r: Recording, call: Call, function: object, given: dict[str, Any]) -> tuple[object, ...]:
    """The values of an image at several places, without tangents: a loop over the places."""
    zeros, places = given["zeros"], [given[name].entries for name in "abcd"]
    x, y = (declare(r, "place", typed_tensor(list(c), (len(places),)), "temporary") for c in zip(*places, strict=True))
    count = len(ir.entries(zeros))
    size = count * len(places)
    values = declare(r, "seen", typed_tensor([ir.entries(zeros)[0]] * size, (size,)), "temporary")
    sample = ir.Read(ir.Local("sample", ir.I32, (), "loop"))
    r.open_block(ir.For("range", (sample.local,), (as_value(len(places)),), (), is_together=True, place=r.place()))
    at = [declare(r, "at", c.at((sample,)), "kept") for c in (x, y)]
    seen = value_of(stopped(r, value_of(call(given["seen"], *at))))
    for n, value in enumerate(ir.entries(seen)):
        assign_to(r, values.at((operate(r, "add", sample, n * len(places)),)), value)
    r.end_loop()
    numbers = [[values.at((n * len(places) + k,)) for n in range(count)] for k in range(len(places))]
    return tuple(ir.Tensor(tuple(v), zeros.shape) if isinstance(zeros, ir.Tensor) else v[0] for v in numbers)


def ray_level(r: Recording, call: Call, function: Any, given: dict[str, Any]) -> Any:
    require_function("ray_level", "distance", given["distance"], ("a position",), len(given["args"]))
    distance = callback(r, given["distance"], given["args"])
    return call(function.boundary_body, distance, *(given[name] for name in ("origin", "direction", "near", "far")))


def shape_at(r: Recording, call: Call, function: object, given: dict[str, Any]) -> tuple[Any, ...]:
    """Level, depth, value and alpha of one of the shapes of ``layers``."""
    shapes, n = given["shape"], given["n"]
    first = len(r.blocks[-1].statements)
    shape = value_of(call(shapes.function, n, given["x"], given["y"]))
    names = ["level", *["depth"] * shapes.has_depth, "value", *["alpha"] * shapes.has_alpha]
    if not isinstance(shape, (tuple, list)) or len(shape) != len(names):
        raise UnsupportedError(f"{shapes.kind}: shape must return {', '.join(names)}; it returns {shown_value(shape)}.")
    level, value = shape[0], shape[names.index("value")]
    if isinstance(level, (int, float)):
        level = float(level)
    else:
        real_level(shapes.kind, level)
    if shape_of(value) != shapes.value_shape:
        raise UnsupportedError(
            f"{shapes.kind}: shape returns a value of shape {shape_of(value)}, and background has shape "
            f"{shapes.value_shape}; give both the same shape."
        )
    alpha = shape[-1] if shapes.has_alpha else 1.0
    if not isinstance(alpha, (ir.Value, int, float)):
        raise UnsupportedError(f"{shapes.kind}: alpha is {shown_value(alpha)}; expected a number from 0 to 1.")
    depth = shape[1] if shapes.has_depth else operate(r, "neg", convert(as_value(n), default_types()[0]))
    level = ir.Const(level, default_types()[0]) if isinstance(level, float) else frozen(r, level, "level")
    numbers = (level, *(frozen(r, v, "of_shape") for v in (depth, value, alpha)))
    r.of_shapes.update(r.blocks[-1].statements[first:])
    return numbers


def pixel(r: Recording, call: Call, function: Any, given: dict[str, Any]) -> Any:
    require_function("pixel", "shade", given["shade"], ("x", "y"), len(given["args"]))
    shade, antialias = callback(r, given["shade"], given["args"]), is_antialiased("pixel", given)
    seen = seen_values(r, call, "pixel", shade, "shade")
    x, y = position("pixel", given["at"])
    if not r.rules.takes_derivative and not antialias:
        return call(shade, x, y)
    return _mean(r, call, function.boundary_body, shade, seen.zeros, x, y, antialias)


def probe(r: Recording, call: Call, function: object, given: Mapping[str, Any]) -> tuple[object, ...]:
    """A call of the function of ``pixel``, with its conditions noted for the mode, such as "value" or "seen"."""
    mode, real = given["mode"], default_types()[0]
    at = ir.Tensor(tuple(frozen(r, given[name], "at") for name in ("x", "y")), (2,))
    r.blocks.append(OpenBlock())
    value = value_of(call(given["shade"], *at.entries))
    group = tuple(frozen(r, e, "value") for e in (ir.entries(value) if isinstance(value, ir.Tensor) else [value]))
    body = tuple(r.blocks.pop().statements)
    count, seen, level, near, behind, found, bits, *slopes = (
        frozen(r, ir.Const(start, dtype), name)
        for name, start, dtype in (
            ("count", 0, ir.I32),
            ("seen", HASH_START, ir.I32),
            ("level", 0.0, real),
            ("near", 1e30, real),
            ("behind", -1e30, real),
            ("found", 0, ir.I32),
            ("bits", 0, ir.I32),
            ("slope_x", 0.0, real),
            ("slope_y", 0.0, real),
        )
    )
    slope: Any = typed_tensor(list(slopes), (2,))
    if mode != "value":
        is_ahead = mode == "ahead"
        along = ir.Tensor(tuple(frozen(r, given[name], "along") for name in ("dx", "dy")), (2,))
        probe = Probe(
            count.local,
            seen.local,
            frozen(r, given["which"], "which"),
            level.local if mode in ("level", "flipped") else None,
            near.local if is_ahead else None,
            at,
            frozen(r, given["reach"], "reach") if mode in ("near", "far") else None,
            along,
            found.local,
            behind.local,
            tuple(s.local for s in slopes),
            bits.local if is_ahead else None,
            kind=given["shade"].kind,
            is_wide=mode == "far",
            of_shapes=r.of_shapes,
            after=None if isinstance(given["after"], int) else frozen(r, given["after"], "after"),
            is_flipped=mode == "flipped",
        )
        body = probe.in_body(body)
    for s in body:
        r.add(s)
    if mode in ("level", "flipped"):
        slope = gradient(r, "pixel", level, (at.entries[0], at.entries[1]), may_be_flat=True)
    return typed_tensor(list(group), (len(group),)), count, seen, level, slope, near, found, behind, bits
