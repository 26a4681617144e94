"""Shapes over each other in one pixel: layers.

Within a pixel the edge of a shape is a straight line, so each shape is seen in a convex polygon: the pixel, cut by its
own edge, by the edges of the shapes before it, and by the lines along which two surfaces swap their order.  The mean of
the pixel is ``sum of area_i value_i``.  By Reynolds' theorem its derivative is ``sum of area_i value_i_dot``, and for
each side of each polygon ``value_i length_k level_k_dot / g_k``, the mean of it at two points of that side.

The places where levels cross the sides of the pixel give these lines (``divided.py``), two for a shape that has two
edges in it.  Where edges between them, or depths, are not nearly straight, or where more shapes meet than the table
holds, the pixel is divided into four squares, and these again.

Transparent shapes hide nothing: their edges cut the pixel into polygons, each with the value of all shapes in order.
"""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from typing import Any

from taichi_ext.backend import ti
from taichi_ext.boundary.arcs import GAUSS
from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.kernel_scope import leave_to_engine, recorded
from taichi_ext.boundary.polygons import (
    BESIDE_FLAT,
    BULGE,
    COARSE,
    ENTRIES,
    INSIDE,
    KIND,
    NONE,
    NX,
    NY,
    ORDER,
    OTHER,
    OUTSIDE,
    SIDES,
    TRIES,
    WHOLE,
    S,
    is_wide,
    middle_of_part,
    middle_of_square,
    middle_within,
    off_border,
    part_of_line,
    put_sides,
    sample_beside,
    side_of_square,
    side_of_try,
)
from taichi_ext.boundary.shape_table import (
    COLUMNS,
    COVERS,
    DEPTH,
    DX,
    DY,
    INDEX,
    MOST,
    SIGN,
    collect,
    level_gradient,
    order_of,
    shape_at,
)

_FLAT = 1e-20
_SHORT = 0.01  # of the square: a chord whose ends are too near to each other to tell its direction
_NEAR = 0.1  # of the square: how far the middle of a chord may be from its edge


@recorded
def layers(shape: object, count: object, background: object, *args: object, at: object, order: str = "index") -> Any:
    """The mean of a pixel with overlapping shapes, later ones on top of earlier ones, or the nearest on top.

    Areas are shared exactly where edges are straight, also where they cross, touch or coincide.  A pixel in which an
    edge bends, or which more than 6 shapes share, is divided, down to 1/32, and to 1/128 at the top of a round shape.
    Use it instead of ``edge`` in a loop over shapes.

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
def mean_of_shapes(
    shape: ti.template(), count, background, px, py, fine, has_depth: ti.template(), has_alpha: ti.template()
):
    """The mean of the pixel at (px, py), square by square; ``fine`` is a rounding."""
    x = px + off_border(px, py, fine)
    y = py + 1.3 * off_border(px, py, fine)
    total = background * 0.0
    place = 0
    side = WHOLE
    while place < WHOLE**2:
        size = side / WHOLE
        middle = middle_of_square(place, size)
        seen = ti.Matrix([[0.0] * COLUMNS] * (MOST + 1))
        found = collect(shape, count, x, y, middle, size, seen, has_alpha)
        kind = found // (MOST + 1)  # 0, or 1 or 2 if it should be divided
        if kind > 0 and (side > COARSE or (side > 1 and (kind == 2 or side < COARSE))):
            side = side // 2
        else:
            found %= MOST + 1
            for half in range(1 if seen[MOST, INDEX] < 0 else 2):
                if half == 1:
                    swap_edges(found, seen)
                mean = mean_of_square(shape, count, background, x, y, middle, size, has_depth, has_alpha, found, seen)
                total += size * size * mean
            place += side * side
            side = side_of_square(place)
    return total


@ti.func
def mean_of_square(
    shape: ti.template(),
    count,
    background,
    px,
    py,
    square,
    size,
    has_depth: ti.template(),
    has_alpha: ti.template(),
    found,
    seen: ti.template(),
):
    """The integral over the square of a size around ``square`` in the pixel, which is the unit of all lengths.

    It is that of the half in which the first edge counts of a shape that has two.
    """
    lines = ti.Matrix([[0.0] * ENTRIES] * (SIDES + 1 + 2 * MOST))
    put_sides(square, size, lines)
    x = px + square[0]
    y = py + square[1]
    sides = put_cut(found, seen, lines)
    total = background * 0.0
    for i in range(found if has_alpha else 0, found + 1):  # the last is the background, or all transparent shapes
        for piece in range(2 ** (found if has_alpha else count_mixed(i, found, seen))):
            last = lines_around(shape, i, piece, found, x, y, size, sides, seen, lines, has_depth, has_alpha)
            if last > 0:
                middle = ti.Vector([0.0, 0.0, 1.0])
                if last > SIDES:
                    middle = middle_within(last, lines)
                area = middle[2]
                if ti.static(has_alpha):
                    total += area * composite(
                        shape, count, background, x + size * middle[0], y + size * middle[1], piece, found, seen
                    )
                elif i < found:
                    rim = middle_of_rim(int(seen[i, INDEX]), last, middle, lines)
                    two = is_wide(rim, middle)
                    for m in range(2 if two else 1):
                        at = ti.Vector([middle[0], middle[1], 1.0])
                        if two:
                            at = sample_beside(m, rim, ti.Vector([middle[0], middle[1]]))
                        value_there = shape_at(shape, int(seen[i, INDEX]), x + size * at[0], y + size * at[1])[2]
                        total += at[2] * area * value_there
                else:
                    total += area * background
                for e in range(sides, last):
                    part = part_of_line(e, last, lines)
                    length = 0.5 * (part[1] - part[0]) * part[2] / size
                    is_flat = False
                    for n in range(2 * TRIES if length > 0 else 0):  # the points of Gauss' rule
                        m = n // TRIES
                        k = n % TRIES
                        if k == 0 or is_flat:
                            along = part[m] + GAUSS * (part[1 - m] - part[m])
                            aside = side_of_try(k) * BESIDE_FLAT
                            mx = x - size * (lines[e, S] * lines[e, NX] + along * lines[e, NY]) + aside * lines[e, NX]
                            my = y - size * (lines[e, S] * lines[e, NY] - along * lines[e, NX]) + aside * lines[e, NY]
                            other = shape_at(shape, int(lines[e, OTHER]), mx, my)
                            moved = other[0] - stop_gradient(other[0])
                            slope = level_gradient(shape, "level", other[0], at=(mx, my))
                            off = stop_gradient(other[0])
                            is_flat = k + 1 < TRIES and lines[e, KIND] != ORDER and off == 0 and slope.norm() == 0
                            if not is_flat:
                                value = stop_gradient(background * 1.0)
                                if lines[e, KIND] != ORDER and abs(off) < _NEAR * size * slope.norm():
                                    mx -= off / slope.norm_sqr() * slope[0]  # values may vary fast beside the edge
                                    my -= off / slope.norm_sqr() * slope[1]
                                if ti.static(has_alpha):
                                    value = stop_gradient(
                                        composite(shape, count, background, mx, my, piece, found, seen)
                                    )
                                elif i < found:
                                    own = shape_at(shape, int(seen[i, INDEX]), mx, my)
                                    value = stop_gradient(own[2])
                                    if ti.static(has_depth):  # noqa: SIM102  # decided when the kernel is compiled
                                        if lines[e, KIND] == ORDER:
                                            ahead = other[1] - own[1]
                                            moved = ahead - stop_gradient(ahead)
                                            slope = level_gradient(shape, "depth", ahead, at=(mx, my))
                                g = slope.norm()
                                if lines[e, BULGE] != 0:  # an arc is longer than its chord
                                    across = abs(slope[0] * lines[e, NX] + slope[1] * lines[e, NY])
                                    g = ti.max(across, 0.5 * g)
                                if g > 0:
                                    total += ti.select(lines[e, KIND] == OUTSIDE, -length, length) / g * value * moved
    return total


@ti.func
def swap_edges(found, seen: ti.template()):
    """Swap both edges of the shape that has two in the square."""
    for q in range(found):
        if seen[q, INDEX] == seen[MOST, INDEX]:
            for c in ti.static((S, NX, NY, BULGE)):
                first = seen[q, c]
                seen[q, c] = seen[MOST, c]
                seen[MOST, c] = first


@ti.func
def put_cut(found, seen: ti.template(), lines: ti.template()):
    """Put the line up to which the first edge of a shape with two counts behind the sides; returns the end of both."""
    sides = SIDES
    for q in range(found):
        if seen[q, INDEX] == seen[MOST, INDEX]:
            turn = seen[MOST, SIGN] * ti.Vector([seen[q, NX] - seen[MOST, NX], seen[q, NY] - seen[MOST, NY]])
            g = ti.max(turn.norm(), _FLAT)
            lines[SIDES, S] = seen[MOST, SIGN] * (seen[q, S] - seen[MOST, S]) / g
            lines[SIDES, NX] = turn[0] / g
            lines[SIDES, NY] = turn[1] / g
            lines[SIDES, KIND] = NONE
            sides = SIDES + 1
    return sides


@ti.func
def middle_of_rim(n, last, middle, lines: ti.template()):
    """The middle of the own edge of shape n in its polygon; that of the polygon if it has none."""
    place = ti.Vector([middle[0], middle[1]])
    for e in range(SIDES, last):
        if lines[e, KIND] == INSIDE and int(lines[e, OTHER]) == n:
            part = part_of_line(e, last, lines)
            if part[1] > part[0]:
                place = middle_of_part(part, e, lines)
    return place


@ti.func
def composite(shape: ti.template(), count, background, x, y, piece, found, seen: ti.template()):
    """The value of transparent shapes at a position.

    Each bit of ``piece`` says whether the position is inside a shape of the table.
    """
    value = background * 1.0
    for n in range(count):
        new = shape_at(shape, n, x, y)
        is_within = stop_gradient(new[0]) > 0
        for q in range(found):
            if seen[q, INDEX] == n:
                is_within = (piece >> q) & 1 == 1
        if is_within:
            value += new[3] * (new[2] - value)
    return value


@ti.func
def count_mixed(i, found, seen: ti.template()):
    """The number of shapes that end in the pixel, and of which a part is before shape i, a part behind."""
    count = 0
    if i < found:
        for j in range(found):
            count += j != i and seen[j, COVERS] == 0 and order_of(i, j, seen) == 0
    return count


@ti.func
def lines_around(
    shape: ti.template(),
    i,
    piece,
    found,
    x,
    y,
    size,
    sides,
    seen: ti.template(),
    lines: ti.template(),
    has_depth: ti.template(),
    has_alpha: ti.template(),
):
    """Put the lines around the visible part of shape i into the table, after the sides of the pixel.

    If a shape j is mixed, the visible part has two polygons: outside of j, and inside of j where i is in front of it.
    Each bit of ``piece`` selects one.  Returns the end of the lines, 0 if nothing is visible.  ``i == found`` is the
    background.
    """
    last = sides
    is_seen = True
    mixed = 0
    for c in range(2 * found):
        j = c // 2
        ends = seen[j, COVERS] == 0
        order = -1
        if i < found and i != j:
            order = order_of(i, j, seen)
        is_within = order == 0 and (not ends or (piece >> mixed) & 1 == 1)
        if ti.static(has_alpha):
            is_within = (piece >> j) & 1 == 1
        if c % 2 == 0 and (i == j or order < 1):
            kind = INSIDE if i == j or is_within else OUTSIDE
            is_seen &= ends or kind == INSIDE
            if ends:
                lines[last, KIND] = kind
                lines[last, OTHER] = seen[j, INDEX]
                for k in ti.static(range(BULGE + 1)):
                    lines[last, k] = ti.select(kind == INSIDE, seen[j, k], -seen[j, k])
                last += 1
        elif c % 2 == 1 and order == 0:
            if ti.static(has_depth):  # noqa: SIM102  # decided when the kernel is compiled
                if is_within:
                    lines[last, KIND] = ORDER
                    lines[last, OTHER] = seen[j, INDEX]
                    put_order(shape, i, j, last, x, y, size, sides, seen, lines)
                    last += 1
            mixed += ends
    return last if is_seen else 0


@ti.func
def put_order(shape: ti.template(), i, j, e, x, y, size, sides, seen: ti.template(), lines: ti.template()):
    """Set line e through the points where two depths are equal at the border of the pixel.

    Depths and their slopes at the centre give a first line.  Those at both ends of its chord give their distance from
    the edge, and those at its middle the bulge of the edge between them; twice, as it may be on a side of the square.
    """
    slope = ti.Vector([seen[j, DX] - seen[i, DX], seen[j, DY] - seen[i, DY]])
    g = ti.max(slope.norm(), _FLAT)
    lines[e, S] = (seen[j, DEPTH] - seen[i, DEPTH]) / g
    lines[e, NX] = slope[0] / g
    lines[e, NY] = slope[1] / g
    lines[e, BULGE] = 0.0
    for _ in range(2):
        s = lines[e, S] + 0.0
        nx = lines[e, NX] + 0.0
        ny = lines[e, NY] + 0.0
        part = part_of_line(e, sides, lines)
        first = part[0]
        last = part[1]
        if last <= first:  # it may still come in: look near the centre of the line
            first = -0.25
            last = 0.25
        elif last < first + _SHORT:
            middle = 0.5 * (first + last)
            first = middle - 0.5 * _SHORT
            last = middle + 0.5 * _SHORT
        if abs(s) < 1.0:
            at = ti.Vector([0.0, 0.0, 0.0])
            for k in range(3):
                t = first + 0.5 * k * (last - first)
                px = x - size * (s * nx + t * ny)
                py = y - size * (s * ny - t * nx)
                for m in range(2):
                    found = shape_at(shape, int(seen[ti.select(m == 0, j, i), INDEX]), px, py)
                    at[k] += ti.select(m == 0, 1.0, -1.0) * stop_gradient(found[1])
            along = (at[2] - at[0]) / (last - first)
            new = ti.sqrt(g * g + along * along)
            lines[e, S] = (g * s + at[0] - along * first) / new
            lines[e, NX] = (g * nx - along * ny) / new
            lines[e, NY] = (g * ny + along * nx) / new
            lines[e, BULGE] = (at[1] - 0.5 * (at[0] + at[2])) / new
            g = new


layers.boundary_body = mean_of_shapes  # type: ignore[attr-defined]  # the recorder walks this instead
