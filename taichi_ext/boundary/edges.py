"""Discontinuities that carry their derivative: edge, coverage, segment_edge.

A pixel that integrates f = f_in where phi > 0 and f_out elsewhere has, by Reynolds' theorem, the derivative

    d/dt  integral f dx  =  integral f_dot dx  +  integral over the edge of (f_in - f_out) phi_dot / |grad phi| dl.

Autodiff of the renderer gives the first term, these functions the second one. The engine computes both: grad phi is
the derivative with respect to the variables given as ``at=``.
"""

from __future__ import annotations

from typing import Any

from taichi_ext.boundary.divided import area_of_pixel  # pyright: ignore[reportUnknownVariableType]
from taichi_ext.boundary.kernel_scope import leave_to_engine, recorded
from taichi_ext.boundary.meshes import term_of_side  # pyright: ignore[reportUnknownVariableType]


@recorded
def edge(
    level: object, inside: object, outside: object, *, at: object = None, antialias: bool = False, jump: object = None
) -> Any:
    """``inside`` where level > 0, ``outside`` elsewhere, with the boundary term of the derivative.

    Callable in any kernel.  Nested edges give occlusion.  Both values must be finite everywhere.

    Args:
        level: a real scalar that is positive inside; its zero set is the edge.
        inside: scalar, vector or matrix.
        outside: of the same shape; or one of the two is a scalar.
        at: the position of the pixel centre in pixels: ``(px, py)``, two real variables or the indices of a loop, or a
            vector of two.  The kernel must compute level from these variables.  Needed for derivatives and for
            ``antialias=True``.  In one dimension ``at=x``, the middle of an interval of length 1.
        antialias: False takes a point sample at the pixel's centre; True gives ``C * inside + (1 - C) * outside``,
            where C is the covered area of the pixel.
        jump: replaces ``inside - outside`` in the boundary term by its limit on the edge.  Use it if inside varies fast
            there.

    Returns:
        A value of the shape of inside.  Its tangent is
        ``C inside_dot + (1 - C) outside_dot + jump kappa level_dot / g`` (C is 1 or 0 without antialiasing).  If the
        gradient of level is zero, the last term is 0.

    Raises:
        UnsupportedError: ``at`` is needed but missing, or is not a pair of variables; or level is an integer, does not
            depend on ``at``, or depends on the index of the pixel's loop other than through ``at``.

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
        75.4 of 75.4
    """
    leave_to_engine("edge", level)


@recorded
def coverage(level: object, *, at: object = None) -> Any:
    """The area of the pixel in which level > 0, with its derivative: a mask without jagged edges.

    Args:
        level, at: see ``edge``; at is always needed.

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
        452.4 of 452.4
    """
    leave_to_engine("coverage", level)


@recorded
def segment_edge(start: object, end: object, jump: object, *, at: object, antialias: bool = False) -> Any:
    """The boundary term of one side of a polygon, clipped exactly to the pixel: 0, with a tangent.

    Add it to the value of the pixel once for every side.  The side moves with its ends, linearly in between.  Only the
    part of the side in the pixel counts, so the derivative is exact at corners, too.

    Args:
        start: first end, a vector of 2, in pixels.
        end: second end.  The inside lies to the left when you go from start to end, with x to the right and y up.
        jump: value inside minus value outside: scalar, vector or matrix.
        at: pixel centre, ``(px, py)``.
        antialias: True gives the contribution of the side to the mean of the pixel: the sum over all sides of a
            polygon is the jump times the covered area.  Add it to the value outside, instead of to a point sample.

    Returns:
        0, or the contribution of the side, of the shape of jump.

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
    leave_to_engine("segment_edge", start)


for _function in (edge, coverage):
    _function.boundary_body = area_of_pixel  # type: ignore[attr-defined]  # the recorder walks this if needed
segment_edge.boundary_body = term_of_side  # type: ignore[attr-defined]
