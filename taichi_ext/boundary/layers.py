"""Shapes over each other in one pixel: layers.

The value at a position is that of the shape on top.  Its edges, where a level is 0 or two depths are equal, are found
as those of ``pixel``, without the other conditions of the user's code.
"""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false, reportIndexIssue=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from typing import Any

from taichi_ext.backend import ti
from taichi_ext.boundary.crossings import ALL, FOUND, VALUE, probe
from taichi_ext.boundary.kernel_scope import leave_to_engine, recorded
from taichi_ext.boundary.pixels import value_of_pixel

_AWAY = 2.0  # pixels: edges that seem to be farther away are not looked for
_FAR = 1e30


@recorded
def shape_at(shape: object, n: object, x: object, y: object) -> Any:
    """Level, depth, value and alpha of shape n; traced by the engine, which checks them."""
    leave_to_engine("shape_at", n)


@recorded
def layers(shape: object, count: object, background: object, *args: object, at: object, order: str = "index") -> Any:
    """The mean of a pixel with overlapping shapes, later ones on top of earlier ones, or the nearest on top.

    Edges are found and areas shared as by ``pixel``, whose function needs no loop over shapes here.  Only levels and
    depths have edges; other conditions in the code of a shape have none.  Where edges of two shapes coincide, that of
    the one on top counts.  Use it instead of ``edge`` in a loop over shapes.

    Args:
        shape: a ti.func ``shape(n, x, y)`` that returns ``(level, value)`` of shape n at the position (x, y) in pixels.
            The level is a real scalar that is positive inside, or the number 1.0 if the shape is everywhere.  The value
            is a scalar, vector or matrix.  It must be finite everywhere, and must not store to anything.  A ti.func
            sees no arguments and variables of the kernel: pass them as ``args``.  For transparent shapes, return
            ``(level, value, alpha)``: alpha is a scalar from 0, which shows what is behind, to 1, which is opaque.
            With ``order="depth"`` it returns ``(level, depth, value)``.
        count: the number of shapes; n runs from 0 to count - 1.
        background: the value where no shape is, of the same shape.
        args: further arguments of the shape: ``shape(n, x, y, *args)``.
        at: the pixel centre, ``(px, py)``, in pixels.
        order: which shape is on top: ``"index"``, the last one, or ``"depth"``, the one with the smallest depth, of
            equal ones the first.  The line along which two depths swap their order is an edge, too.

    Returns:
        The mean value of the pixel.

    Raises:
        InvalidRuleError: order is neither of the two.
        UnsupportedError: the shape is not a ti.func or does not return two or three values, alpha is no number, or a
            level does not depend on (x, y).

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import jacobian, layers
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> discs, image = ti.Vector.field(3, ti.f64, shape=2), ti.field(ti.f64, shape=(40, 40))
        >>> discs[0], discs[1] = [17.3, 20.2, 9.0], [23.1, 19.4, 9.0]  # centre and radius
        >>> @ti.func
        ... def shape(n, x, y):
        ...     return discs[n].z - ti.sqrt((x - discs[n].x) ** 2 + (y - discs[n].y) ** 2), 1.0 + n
        >>> @ti.kernel
        ... def draw():
        ...     for i, j in image:
        ...         image[i, j] = layers(shape, 2, 0.0, at=(float(i), float(j)))
        >>> by_radius = jacobian(draw, discs, image)[..., 2].sum((0, 1))
        >>> print(by_radius.round(1))  # of the first, only the part of its rim that is seen counts
        [34.2 90.8]

        The cells of two sites; a level of 1.0 is everywhere:

        >>> sites, cells = ti.Vector.field(2, ti.f64, shape=2), ti.field(ti.f64, shape=(20, 10))
        >>> sites[0], sites[1] = [5.2, 4.5], [13.6, 4.5]
        >>> @ti.func
        ... def cell(n, x, y):
        ...     return 1.0, ti.sqrt((x - sites[n].x) ** 2 + (y - sites[n].y) ** 2), float(n)
        >>> @ti.kernel
        ... def draw_cells():
        ...     for i, j in cells:
        ...         cells[i, j] = layers(cell, 2, 0.0, at=(float(i), float(j)), order="depth")
        >>> print(jacobian(draw_cells, sites, cells).sum((0, 1))[:, 0].round(1))  # the border moves by half a pixel
        [-5. -5.]
    """
    leave_to_engine("layers", count)


# --- in the kernel ----------------------------------------------------------------------------------------------------


@ti.func
def value_of_shapes(x, y, shape: ti.template(), count, background, has_depth: ti.template(), has_alpha: ti.template()):
    """The value at a position."""
    value = background * 1.0
    if ti.static(has_depth or has_alpha):
        least = _FAR + 0.0 * x
        for n in range(count):
            level, depth, own, alpha = shape_at(shape, n, x, y)
            if level > 0:
                if ti.static(has_alpha):
                    value += alpha * (own - value)
                elif depth < least:
                    least = depth
                    value = own
    else:
        for n in range(count):
            level, depth, own, alpha = shape_at(shape, count - 1 - n, x, y)
            if level > 0:
                value = own
                break
    return value


@ti.func
def mean_of_shapes(shade: ti.template(), zeros, x, y, fine):
    """As ``value_of_pixel``; where all edges seem to be far away, the value at the centre."""
    centre = probe(shade, x, y, ALL, "far", reach=_AWAY)
    value = centre[VALUE]
    is_unresolved = False
    place = 0
    if centre[FOUND] != 0:
        value, is_unresolved, place = value_of_pixel(shade, zeros, x, y, fine, True)
    return value, is_unresolved, place


layers.boundary_body = mean_of_shapes  # type: ignore[attr-defined]  # the recorder walks this instead
layers.boundary_shade = value_of_shapes  # type: ignore[attr-defined]
