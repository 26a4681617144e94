"""Shapes over each other in one pixel: layers, nearest.

Within a pixel the edge of a shape is a straight line, so each shape is seen in a convex polygon: the pixel, cut by its
own edge, by the edges of the shapes before it, and by the lines along which two surfaces swap their order.  The mean of
the pixel is ``sum of area_i value_i``.  By Reynolds' theorem its derivative is ``sum of area_i value_i_dot``, and for
each side of each polygon ``value_i length_k level_k_dot / g_k``, taken at the middle of that side.

Area and lengths follow from one operation, an interval on a line cut by half-planes: the area of a polygon is half the
sum of ``distance of the side from the centre * length of the side``.
"""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from typing import Any

import taichi as ti

from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.kernel_scope import leave_to_engine

MOST = 6  # shapes of which parts can be seen in one pixel

# The columns of the table of the shapes that a pixel shows, and of that of the lines around a polygon.
INDEX, COVERS, LEVEL, GX, GY, DEPTH, DX, DY, COLUMNS = range(9)
S, NX, NY, G, BULGE, KIND, OTHER, ENTRIES = range(8)
NONE, INSIDE, OUTSIDE, ORDER = range(4)  # what a line bounds: the inside of a shape, its outside, what is before it
SIDES = 4  # of the pixel: the first lines
_TINY = 1e-4  # of a pixel: parts so small are seen where the centre is
_PARALLEL = 1e-6  # a few roundings of float32: edges that coincide differ by them


def layers(shape: Any, count: Any, background: Any, *, at: Any) -> Any:
    """The mean of a pixel in which shapes lie over each other, the later over the earlier.

    Edges are straight within the pixel.  Areas are shared exactly, also where edges cross, touch or coincide.
    Use it instead of ``edge`` in a loop over shapes.

    Args:
        shape: a ti.func ``shape(n, x, y)`` that returns ``(level, value)`` of shape n at the position (x, y) in pixels.
            The level is a real scalar that is positive inside, or the number 1.0 if the shape is everywhere.  The value
            is a scalar, vector or matrix.  It must be finite everywhere, and must not store to anything.
        count: the number of shapes; n runs from 0 to count - 1.
        background: the value where no shape is, of the same shape.
        at: the pixel centre, ``(px, py)``, in pixels.

    Returns:
        The mean value of the pixel.  At most 6 shapes can share one pixel.  Taichi's reverse mode is not supported.

    Raises:
        UnsupportedError: the shape is no ti.func or does not return two values, or a level does not depend on (x, y).

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
        [34.2 90.4]
    """
    leave_to_engine("layers", count)


def nearest(shape: Any, count: Any, background: Any, *, at: Any) -> Any:
    """The mean of a pixel that shows the nearest of several surfaces.

    Like ``layers``, but a depth decides which shape is before which.  The line along which two surfaces swap their
    order is an edge, too.

    Args:
        shape: a ti.func ``shape(n, x, y)`` that returns ``(level, depth, value)`` of surface n at the position (x, y)
            in pixels.  The smallest depth is seen, of equal ones the first.
        count: the number of surfaces.
        background: the value where no surface is.
        at: the pixel centre, ``(px, py)``, in pixels.

    Returns:
        The mean value of the pixel.

    Raises:
        UnsupportedError: see ``layers``.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import jacobian, nearest
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> sites, image = ti.Vector.field(2, ti.f64, shape=2), ti.field(ti.f64, shape=(20, 10))
        >>> sites[0], sites[1] = [5.2, 4.5], [13.6, 4.5]
        >>> @ti.func
        ... def cell(n, x, y):
        ...     return 1.0, ti.sqrt((x - sites[n].x) ** 2 + (y - sites[n].y) ** 2), float(n)
        >>> @ti.kernel
        ... def draw():
        ...     for i, j in image:
        ...         image[i, j] = nearest(cell, 2, 0.0, at=(float(i), float(j)))
        >>> print(jacobian(draw, sites, image).sum((0, 1))[:, 0].round(1))  # the border moves by half a pixel
        [-5. -5.]
    """
    leave_to_engine("nearest", count)


def shape_at(shape: Any, n: Any, x: Any, y: Any) -> Any:
    """Level, depth and value of shape n; traced by the engine, which checks them."""
    leave_to_engine("shape_at", n)


def level_gradient(shape: Any, name: str, value: Any, *, at: Any) -> Any:
    """The gradient of a level or depth at the position, without a tangent; traced by the engine."""
    leave_to_engine("level_gradient", value)


PUBLIC = (layers, nearest)
for _function in (*PUBLIC, shape_at, level_gradient):
    _function.boundary_kind = _function.__name__  # type: ignore[attr-defined]  # for the recorder
    _function._is_wrapped_kernel = True  # type: ignore[attr-defined]  # Taichi: not a foreign function


# --- in the kernel ----------------------------------------------------------------------------------------------------


@ti.func
def mean_of_shapes(shape: ti.template(), count, background, x, y, has_depth: ti.template()):
    """The mean of the pixel at (x, y)."""
    seen = ti.Matrix([[0.0] * COLUMNS] * MOST)
    lines = ti.Matrix([[0.0] * ENTRIES] * (SIDES + 2 * MOST))
    for e in ti.static(range(SIDES)):
        lines[e, S] = 0.5
        lines[e, NX] = (1.0, -1.0, 0.0, 0.0)[e]
        lines[e, NY] = (0.0, 0.0, 1.0, -1.0)[e]
    found = collect(shape, count, x, y, seen)
    total = background * 0.0
    for i in range(found + 1):  # the last is the background
        for piece in range(2 ** count_mixed(i, found, seen)):
            last = lines_around(shape, i, piece, found, x, y, seen, lines)
            if last > 0:
                middle = ti.Vector([0.0, 0.0, 1.0])
                if last > SIDES:
                    middle = middle_within(last, lines)
                area = middle[2]
                if i < found:
                    total += area * shape_at(shape, int(seen[i, INDEX]), x + middle[0], y + middle[1])[2]
                else:
                    total += area * background
                for e in range(SIDES, last):
                    part = part_of_line(e, last, lines)
                    length = (part[1] - part[0]) * part[2] / lines[e, G]
                    if length > 0:
                        along = 0.5 * (part[0] + part[1])
                        mx = x - lines[e, S] * lines[e, NX] - along * lines[e, NY]
                        my = y - lines[e, S] * lines[e, NY] + along * lines[e, NX]
                        other = shape_at(shape, int(lines[e, OTHER]), mx, my)
                        value = stop_gradient(background * 1.0)
                        moved = other[0] - stop_gradient(other[0])
                        if i < found:
                            own = shape_at(shape, int(seen[i, INDEX]), mx, my)
                            value = stop_gradient(own[2])
                            if ti.static(has_depth):  # noqa: SIM102  # decided when the kernel is compiled
                                if lines[e, KIND] == ORDER:
                                    ahead = other[1] - own[1]
                                    moved = ahead - stop_gradient(ahead)
                        total += ti.select(lines[e, KIND] == OUTSIDE, -length, length) * value * moved
    return total


@ti.func
def collect(shape: ti.template(), count, x, y, seen: ti.template()):
    """Put the shapes that the pixel shows into the table; returns how many there are."""
    found = 0
    for n in range(count):
        new = shape_at(shape, n, x, y)
        level = stop_gradient(new[0])
        slope = level_gradient(shape, "level", new[0], at=(x, y))
        reach = 0.5 * (abs(slope[0]) + abs(slope[1]))
        if level > -reach:
            depth = stop_gradient(new[1])
            away = level_gradient(shape, "depth", new[1], at=(x, y))
            is_full = level >= reach
            is_hidden = False
            kept = 0
            for q in range(found):
                ahead = seen[q, DEPTH] - depth
                reach = 0.5 * (abs(seen[q, DX] - away[0]) + abs(seen[q, DY] - away[1]))
                is_hidden |= seen[q, COVERS] > 0 and ahead + reach <= 0
                if not (is_full and ahead - reach > 0):  # else it is behind the new one
                    for c in range(COLUMNS):
                        seen[kept, c] = seen[q, c]
                    kept += 1
            found = kept
            place = found
            if found == MOST:  # leave out the farthest of those that cover a part
                place = -1
                farthest = ti.select(is_full, -ti.math.inf, depth)
                for q in range(found):
                    if seen[q, COVERS] == 0 and seen[q, DEPTH] > farthest:
                        farthest = seen[q, DEPTH]
                        place = q
            if place >= 0 and not is_hidden:
                seen[place, INDEX] = n
                seen[place, COVERS] = ti.select(is_full, 1.0, 0.0)
                seen[place, LEVEL] = level
                seen[place, GX] = slope[0]
                seen[place, GY] = slope[1]
                seen[place, DEPTH] = depth
                seen[place, DX] = away[0]
                seen[place, DY] = away[1]
                found = ti.max(found, place + 1)
    return found


@ti.func
def order_of(i, j, seen: ti.template()):
    """1 where surface i is before surface j in all of the pixel, -1 where it is behind, 0 where they swap."""
    ahead = seen[j, DEPTH] - seen[i, DEPTH]
    reach = 0.5 * (abs(seen[j, DX] - seen[i, DX]) + abs(seen[j, DY] - seen[i, DY]))
    is_first = ahead > 0 or (ahead == 0 and seen[j, INDEX] > seen[i, INDEX])
    return 0 if abs(ahead) < reach else (1 if is_first else -1)


@ti.func
def count_mixed(i, found, seen: ti.template()):
    """The number of shapes that end in the pixel, and of which a part is before shape i, a part behind."""
    count = 0
    if i < found:
        for j in range(found):
            count += j != i and seen[j, COVERS] == 0 and order_of(i, j, seen) == 0
    return count


@ti.func
def lines_around(shape: ti.template(), i, piece, found, x, y, seen: ti.template(), lines: ti.template()):
    """Put the lines around what is seen of shape i into the table, behind the sides of the pixel.

    Where a shape j is mixed, it is seen outside of j, and inside of j where it is before it: two polygons.  Each bit of
    ``piece`` says which.  Returns where the lines end, 0 if nothing is seen.  ``i == found`` is the background.
    """
    last = SIDES
    is_seen = True
    mixed = 0
    for c in range(2 * found):
        j = c // 2
        ends = seen[j, COVERS] == 0
        order = -1
        if i < found and i != j:
            order = order_of(i, j, seen)
        is_within = order == 0 and (not ends or (piece >> mixed) & 1 == 1)
        kind = NONE
        level = 0.0
        slope = ti.Vector([0.0, 0.0])
        if c % 2 == 0 and (i == j or order < 1):
            kind = INSIDE if i == j or is_within else OUTSIDE
            sign = 1.0 if kind == INSIDE else -1.0
            level = sign * seen[j, LEVEL]
            slope = sign * ti.Vector([seen[j, GX], seen[j, GY]])
            is_seen &= ends or kind == INSIDE
            if not ends:
                kind = NONE
        elif c % 2 == 1 and order == 0:
            if is_within:
                kind = ORDER
                level = seen[j, DEPTH] - seen[i, DEPTH]
                slope = ti.Vector([seen[j, DX] - seen[i, DX], seen[j, DY] - seen[i, DY]])
            mixed += ends
        if kind != NONE:
            lines[last, KIND] = kind
            lines[last, OTHER] = seen[j, INDEX]
            put_line(shape, i, last, level, slope, x, y, seen, lines)
            last += 1
    return last if is_seen else 0


@ti.func
def put_line(shape: ti.template(), i, e, level, slope, x, y, seen: ti.template(), lines: ti.template()):
    """Let line e be that through the points where a level is 0 on its way into and out of the pixel.

    The level and its slope at the centre give a line.  The level at both ends of its chord says how far off they are,
    and that at its middle how far the edge bulges out between them.
    """
    g = slope.norm()
    nx = slope[0] / g
    ny = slope[1] / g
    s = level / g
    lines[e, S] = s
    lines[e, NX] = nx
    lines[e, NY] = ny
    lines[e, G] = g
    lines[e, BULGE] = 0.0
    part = part_of_line(e, SIDES, lines)
    if part[1] > part[0] + 1e-3:
        at = ti.Vector([0.0, 0.0, 0.0])
        for k in range(3):
            t = part[0] + 0.5 * k * (part[1] - part[0])
            found = shape_at(shape, int(lines[e, OTHER]), x - s * nx - t * ny, y - s * ny + t * nx)
            at[k] = ti.select(lines[e, KIND] == OUTSIDE, -stop_gradient(found[0]), stop_gradient(found[0]))
            if lines[e, KIND] == ORDER:
                behind = shape_at(shape, int(seen[i, INDEX]), x - s * nx - t * ny, y - s * ny + t * nx)
                at[k] = stop_gradient(found[1]) - stop_gradient(behind[1])
        along = (at[2] - at[0]) / (part[1] - part[0])
        new = ti.sqrt(g * g + along * along)
        lines[e, S] = (level + at[0] - along * part[0]) / new
        lines[e, NX] = (g * nx - along * ny) / new
        lines[e, NY] = (g * ny + along * nx) / new
        lines[e, G] = new
        lines[e, BULGE] = (at[1] - 0.5 * (at[0] + at[2])) / new


@ti.func
def middle_within(last, lines: ti.template()):
    """The middle, relative to the pixel's centre, and the area within the lines before ``last``.

    Each side and the centre span a triangle.  The area between a curved edge and its chord is 2/3 width * length.
    """
    total = ti.Vector([0.0, 0.0, 0.0])
    for e in range(last):
        part = part_of_line(e, last, lines)
        length = (part[1] - part[0]) * part[2]
        along = 0.5 * (part[0] + part[1])
        px = -lines[e, S] * lines[e, NX] - along * lines[e, NY]
        py = -lines[e, S] * lines[e, NY] + along * lines[e, NX]
        inner = 0.5 * lines[e, S] * length
        outer = 2.0 / 3.0 * lines[e, BULGE] * length
        weight = 2.0 / 3.0 * inner + outer
        total += ti.Vector([weight * px, weight * py, inner + outer])
    if total[2] > _TINY:
        for k in ti.static(range(2)):
            total[k] = ti.max(-0.5, ti.min(0.5, total[k] / total[2]))
    return total


@ti.func
def part_of_line(e, last, lines: ti.template()):
    """From where to where line e is within the others, counted from its point nearest to the centre, and its weight.

    Lines that coincide share their length.
    """
    px = -lines[e, S] * lines[e, NX]
    py = -lines[e, S] * lines[e, NY]
    low = -2.0
    high = 2.0
    weight = 1.0
    for k in range(last):
        if k != e:
            inside = lines[k, S] + lines[k, NX] * px + lines[k, NY] * py
            along = lines[k, NY] * lines[e, NX] - lines[k, NX] * lines[e, NY]
            if abs(along) < _PARALLEL:
                if inside < -_PARALLEL:
                    high = low
                elif inside < _PARALLEL:
                    weight *= 0.5
            elif along > 0:
                low = ti.max(low, -inside / along)
            else:
                high = ti.min(high, -inside / along)
    return ti.Vector([low, ti.max(low, high), weight])


for _function in PUBLIC:
    _function.boundary_body = mean_of_shapes  # type: ignore[attr-defined]  # what the recorder walks in their place
