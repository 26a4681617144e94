"""Discontinuities that carry their derivative: edge, step, coverage, sqrt_edge, segment_edge.

A pixel that integrates f = f_in where phi > 0 and f_out elsewhere has, by Reynolds' theorem, the derivative

    d/dt  integral f dx  =  integral f_dot dx  +  integral over the edge of (f_in - f_out) phi_dot / |grad phi| dl.

Autodiff of the renderer gives the first term, these functions the second one, with the formulas of ``pixel.py``.
grad phi comes from the engine: the variables given as ``at=`` are two more seeds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from taichi_ext import backend
from taichi_ext.backend import ops
from taichi_ext.boundary.kernel_scope import require_kernel
from taichi_ext.boundary.pixel import segment_partials
from taichi_ext.derivative.values import entries_of, make_tensor, primal_of, shape_of
from taichi_ext.errors import InvalidRuleError, UnsupportedError


def edge(level: Any, inside: Any, outside: Any, *, at: Any = None, antialias: bool = False, jump: Any = None) -> Any:
    """``inside`` where level > 0, ``outside`` elsewhere, with the boundary term of the derivative.

    Callable in any kernel.  Nested edges give occlusion.  Both values must be finite everywhere.

    Args:
        level: a real scalar that is positive inside; its zero set is the edge.
        inside: scalar, vector or matrix.
        outside: of the same shape; or one of the two is a scalar.
        at: the position of the pixel centre in pixels: ``(px, py)``, two real variables, or a vector variable.  The
            kernel must compute level from these variables.  Needed for derivatives and for ``antialias=True``.
        antialias: False takes a point sample at the pixel's centre; True gives ``C * inside + (1 - C) * outside``,
            where C is the covered area of the pixel.
        jump: replaces ``inside - outside`` in the boundary term by its limit on the edge.  Use it if inside varies fast
            there.

    Returns:
        A value of the shape of inside.  Its tangent is
        ``C inside_dot + (1 - C) outside_dot + jump kappa level_dot / g`` (C is 1 or 0 without antialiasing).  If the
        gradient of level is zero, the last term is 0.

    Raises:
        UnsupportedError: ``at`` is needed but missing, or is not a pair of real variables; or level is an integer or
            does not depend on ``at``.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import edge, jacobian
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> disc, image = ti.field(ti.f64, shape=3), ti.field(ti.f64, shape=(40, 40))
        >>> disc[0], disc[1], disc[2] = 19.7, 20.1, 12.0  # centre and radius, in pixels
        >>> @ti.kernel
        ... def draw():
        ...     for i, j in image:
        ...         px = float(i)
        ...         py = float(j)
        ...         level = disc[2] - ti.sqrt((px - disc[0]) ** 2 + (py - disc[1]) ** 2)
        ...         image[i, j] = edge(level, 5.0, 2.0, at=(px, py))
        >>> growth = jacobian(draw, disc, image)[..., 2].sum() / 3.0  # d area / d radius
        >>> print(f"{growth:.1f} of {2 * 3.14159265 * 12.0:.1f}")  # the circumference
        75.6 of 75.4
    """
    return _edge("edge", level, inside, outside, at, antialias)


def step(level: Any, *, at: Any = None, antialias: bool = False) -> Any:
    """1 where level > 0, else 0, with the boundary term of the derivative: ``edge(level, 1, 0)``.

    Args:
        level: see ``edge``.
        at: see ``edge``.
        antialias: see ``edge``.

    Returns:
        A real number: 0 or 1, or from 0 to 1 with ``antialias=True``.  Its tangent is ``kappa level_dot / g``: the
        length of the edge in the pixel times its outward speed.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import jacobian, step
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> disc, image = ti.field(ti.f64, shape=3), ti.field(ti.f64, shape=(40, 40))
        >>> disc[0], disc[1], disc[2] = 19.7, 20.1, 12.0  # centre and radius, in pixels
        >>> @ti.kernel
        ... def draw():
        ...     for i, j in image:
        ...         px = float(i)
        ...         py = float(j)
        ...         level = disc[2] - ti.sqrt((px - disc[0]) ** 2 + (py - disc[1]) ** 2)
        ...         image[i, j] = step(level, at=(px, py))
        >>> by_x = jacobian(draw, disc, image)[..., 0]
        >>> print(f"{by_x.sum():.2f} of {abs(by_x).sum():.0f}")  # a disc that moves does not grow
        0.07 of 48
    """
    return _edge("step", level, 1.0, 0.0, at, antialias)


def coverage(level: Any, *, at: Any = None) -> Any:
    """The area of the pixel in which level > 0, with its derivative: a mask without jagged edges.

    Args:
        level: see ``edge``.
        at: see ``edge``; always needed.

    Returns:
        A real number from 0 to 1: ``edge(level, 1, 0, antialias=True)``.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import coverage
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> disc, image = ti.field(ti.f64, shape=3), ti.field(ti.f64, shape=(40, 40))
        >>> disc[0], disc[1], disc[2] = 19.7, 20.1, 12.0  # centre and radius, in pixels
        >>> @ti.kernel
        ... def draw():
        ...     for i, j in image:
        ...         px = float(i)
        ...         py = float(j)
        ...         level = disc[2] - ti.sqrt((px - disc[0]) ** 2 + (py - disc[1]) ** 2)
        ...         image[i, j] = coverage(level, at=(px, py))
        >>> draw()
        >>> print(f"{image.to_numpy().sum():.1f} of {3.14159265 * 12.0**2:.1f}")
        452.6 of 452.4
    """
    return _edge("coverage", level, 1.0, 0.0, at, True)


def sqrt_edge(level: Any, *, at: Any = None) -> Any:
    """``sqrt(max(level, 0))``; its derivative near level = 0 is an average over the pixel.

    The point sample ``level ** -0.5 / 2`` is singular at the edge.  Its average over the pixel, for a level that varies
    linearly, with F(z) = 4/3 max(z, 0)^1.5, is
    ``[F(D + g hi) - F(D + g lo) - F(D - g lo) + F(D - g hi)] / (2 a b g^2)``.

    Args:
        level: a real scalar.
        at: see ``edge``.

    Returns:
        The square root.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import jacobian, sqrt_edge
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> disc, image = ti.field(ti.f64, shape=3), ti.field(ti.f64, shape=(40, 40))
        >>> disc[0], disc[1], disc[2] = 19.7, 20.1, 12.0  # centre and radius, in pixels
        >>> @ti.kernel
        ... def draw():
        ...     for i, j in image:
        ...         px = float(i)
        ...         py = float(j)
        ...         image[i, j] = sqrt_edge(disc[2] ** 2 - (px - disc[0]) ** 2 - (py - disc[1]) ** 2, at=(px, py))
        >>> slope = jacobian(draw, disc, image)[..., 2].sum()  # of the volume of half a ball, 2/3 pi r^3
        >>> print(f"{slope:.0f} of {2 * 3.14159265 * 12.0**2:.0f}")
        905 of 905
    """
    require_kernel("sqrt_edge", level)
    if backend.is_gradient_kernel():
        raise backend.NeedsTracing("sqrt_edge")
    level = real_level("sqrt_edge", level)
    return ops.sqrt(ops.max(level, 0.0))


def segment_edge(start: Any, end: Any, jump: Any, *, at: Any) -> Any:
    """The boundary term of one side of a polygon, clipped exactly to the pixel: 0, with a tangent.

    Add it to the value of the pixel once for every side.  The side moves with its ends, linearly in between.  Only the
    part of the side in the pixel counts, so the derivative is exact at corners, too.

    Args:
        start: first end, a vector of 2, in pixels.
        end: second end.  The inside lies to the left when you go from start to end, with x to the right and y up.
        jump: value inside minus value outside: scalar, vector or matrix.
        at: pixel centre, ``(px, py)``.

    Returns:
        0, of the shape of jump.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import jacobian, segment_edge
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> corners, area = ti.Vector.field(2, ti.f64, shape=3), ti.field(ti.f64, shape=())
        >>> corners[0], corners[1], corners[2] = [2.3, 1.7], [12.1, 3.2], [5.6, 9.9]
        >>> @ti.kernel
        ... def cover():
        ...     for i, j in ti.ndrange(16, 16):
        ...         for n in range(3):
        ...             area[None] += segment_edge(corners[n], corners[(n + 1) % 3], 1.0, at=(float(i), float(j)))
        >>> jacobian(cover, corners, area)[0].round(6)  # (y1 - y2, x2 - x1) / 2
        array([-3.35, -3.25])
    """
    require_kernel("segment_edge", start)
    start, end = ends_of("segment_edge", start, end)
    at = position_of("segment_edge", at)
    if not backend.is_gradient_kernel():
        return jump * 0.0
    parts = segment_partials(start, end, jump, at)
    stop = backend.stop_gradient
    total = jump * 0.0
    for n in range(2):
        total = total + stop(parts[n]) * (start[n] - stop(start[n]))
        total = total + stop(parts[2 + n]) * (end[n] - stop(end[n]))
    return total


PUBLIC = (edge, step, coverage, sqrt_edge, segment_edge)
for _function in PUBLIC:
    _function.boundary_kind = _function.__name__  # type: ignore[attr-defined]  # for the recorder
    _function._is_wrapped_kernel = True  # type: ignore[attr-defined]  # Taichi: not a foreign function


def _edge(what: str, level: Any, inside: Any, outside: Any, at: Any, antialias: Any) -> Any:
    """An edge in a kernel that Taichi compiles by itself; raises where only the engine can build it."""
    require_kernel(what, level)
    if is_antialiased(what, antialias) or backend.is_gradient_kernel():
        raise backend.NeedsTracing(what)
    level = real_level(what, level)
    inside, outside = alike(what, inside, outside)
    return ops.select(level > 0, inside, outside)


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
