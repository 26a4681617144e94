"""``pixel``: a pixel of any function of a position, with automatic detection of its edges.

The engine records the conditions of the function in each call (``record/conditions.py``).  If a condition may change in
a pixel, it is divided into squares.  If the outcomes at the corners of a square differ, a search along its sides finds
the places where the value jumps.  The first condition that differs between the two sides of such a place has a level
that is 0 there, and both sides execute the same code up to it.  So the boundary term is
``jump dl level_dot / |grad level|``, where the length is the chord between two matching places; in the smallest squares
that of the tangents there, up to the point in which all of them meet, or else the mean length from the sides of the
square as scan lines.
"""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from typing import Any

from taichi_ext.backend import ti
from taichi_ext.boundary.crossings import (
    ALL,
    COLUMNS,
    COUNT,
    LEVEL,
    NEAR,
    PLACES,
    PX,
    PY,
    SEEN,
    VALUE,
    WEIGHT,
    WHICH,
    count_jumps,
    find_others,
    has_chord,
    probe,
    put_tangents,
)
from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.kernel_scope import leave_to_engine, recorded
from taichi_ext.boundary.polygons import (
    BULGE,
    CURVED,
    ENTRIES,
    NX,
    NY,
    SIDES,
    WHOLE,
    S,
    is_curved,
    is_wide,
    middle_of_part,
    middle_of_square,
    middle_within,
    part_of_line,
    sample_beside,
    side_of,
    side_of_square,
    value_at_corner,
)

_SMOOTH = 0.2  # of a pixel: squares that are smaller are not divided since values are not linear in them


def pixel(shade: object, *, at: object, antialias: bool = False) -> Any:
    """The value of a pixel of a function of the position, with the boundary terms of all its edges, which are found.

    Edges are where a condition in ``shade`` changes: ``if``, ``select``, comparisons, conversions to integers,
    rounding, remainders; also in loops, in functions that it calls, and on values that it reads from fields.  A pixel
    near which no condition changes costs six calls of ``shade``, others about a hundred for each place where an edge
    crosses the sides of a square.

    Args:
        shade: a ti.func ``shade(x, y)`` that returns the value of the image at the position (x, y) in pixels: a
            scalar, vector or matrix.  It must only read.  Conditions must be computed from x and y in ``shade``.
        at: the pixel centre, ``(px, py)``, in pixels.
        antialias: False takes the value at the pixel's centre; True the mean of the pixel.

    Returns:
        The value.

    Raises:
        UnsupportedError: the function is not a ti.func, stores, draws random numbers, or calls ``edge`` or a similar
            function.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import jacobian, pixel
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> disc, image = ti.field(ti.f64, shape=3), ti.field(ti.f64, shape=(40, 40))
        >>> disc[0], disc[1], disc[2] = 19.7, 20.1, 12.0  # centre and radius, in pixels
        >>> @ti.func
        ... def shade(x, y):
        ...     colour = 2.0
        ...     if (x - disc[0]) ** 2 + (y - disc[1]) ** 2 < disc[2] ** 2:
        ...         colour = 5.0
        ...     return colour
        >>> @ti.kernel
        ... def draw():
        ...     for i, j in image:
        ...         image[i, j] = pixel(shade, at=(float(i), float(j)))
        >>> growth = jacobian(draw, disc, image)[..., 2].sum() / 3.0  # d area / d radius
        >>> print(f"{growth:.1f} of {2 * 3.14159265 * 12.0:.1f}")  # the circumference
        75.4 of 75.4
    """
    leave_to_engine("pixel", at)


recorded(pixel)


# --- in the kernel ----------------------------------------------------------------------------------------------------


@ti.func
def value_of_pixel(shade: ti.template(), zeros, x, y, antialias: ti.template()):
    """The value, its entries as a vector."""
    total = zeros + 0.0
    if ti.static(not antialias):
        total += probe(shade, x, y, 0, "value")[VALUE]
    place = 0
    side = WHOLE
    while place < WHOLE**2:
        size = side / WHOLE
        middle = middle_of_square(place, size)
        cx = x + middle[0]
        cy = y + middle[1]
        crossed = ti.Matrix([[0.0] * COLUMNS] * (PLACES * SIDES))
        jumps = ti.Matrix([[0.0] * zeros.n] * (PLACES * SIDES))
        lines = ti.Matrix([[0.0] * ENTRIES] * (SIDES + 1))
        kind = find_crossings(shade, zeros, cx, cy, size, antialias, crossed, jumps, lines)
        if kind == 2 and side > 1:
            side = side // 2
        else:
            for s in range(PLACES * SIDES):
                if crossed[s, WEIGHT] > 0:
                    level = probe(shade, crossed[s, PX], crossed[s, PY], int(crossed[s, WHICH]), "level")[LEVEL]
                    moved = crossed[s, WEIGHT] * (level - stop_gradient(level))
                    for e in ti.static(range(zeros.n)):
                        total[e] += moved * jumps[s, e]
            if ti.static(antialias):
                total += mean_of_sides(shade, zeros, cx, cy, size, kind, lines)
            place += side * side
            side = side_of_square(place)
    return total


@ti.func
def mean_of_sides(shade: ti.template(), zeros, x, y, size, kind, lines: ti.template()):
    """The integral of the values of a square: of one side, of both sides of a chord, or of four quarters.

    Each side of a chord has two samples, see ``sample_beside``.
    """
    total = zeros + 0.0
    for k in range(4 if kind == 2 else 1 + kind):
        at = ti.Vector([0.0, 0.0, 1.0])
        edge = ti.Vector([0.0, 0.0])
        if kind == 1:
            for c in ti.static((S, NX, NY, BULGE)):
                lines[SIDES, c] *= -1.0
            at = middle_within(SIDES + 1, lines)
            edge = middle_of_part(part_of_line(SIDES, SIDES, lines), SIDES, lines)
        elif kind == 2:
            at = ti.Vector([0.25 - 0.5 * (k % 2), 0.25 - 0.5 * (k // 2), 0.25])
        middle = ti.Vector([at[0], at[1]])
        two = kind == 1 and is_wide(edge, middle)
        for m in range(2 if two else 1):
            place = ti.Vector([at[0], at[1], 1.0])
            if two:
                place = sample_beside(m, edge, middle)
            value = probe(shade, x + size * place[0], y + size * place[1], 0, "value")[VALUE]
            total += at[2] * place[2] * size * size * value
    return total


@ti.func
def find_crossings(
    shade: ti.template(),
    zeros,
    x,
    y,
    size,
    antialias: ti.template(),
    crossed: ti.template(),
    jumps: ti.template(),
    lines: ti.template(),
):
    """Put the places where the sides of a square are crossed into the tables, and the chord into the lines.

    Returns 0 if no edge crosses the square, 1 if one does, and 2 if it should be divided.
    """
    kind = 0
    centre = probe(shade, x, y, ALL, "near")
    near = stop_gradient(centre[NEAR])
    seen = ti.Vector([0] * SIDES)
    counts = ti.Vector([0] * SIDES)
    values = ti.Matrix([[0.0] * zeros.n] * SIDES)
    is_mixed = False
    is_known = False  # whether the outcome at the centre also occurs at a corner
    for c in range(SIDES):
        side = side_of(c, x, y, size)
        corner = probe(shade, side[0], side[1], ALL, "seen")
        seen[c] = corner[SEEN]
        counts[c] = corner[COUNT]
        for e in ti.static(range(zeros.n)):
            values[c, e] = stop_gradient(corner[VALUE][e])
        is_mixed |= seen[c] != centre[SEEN]
        is_known |= seen[c] == centre[SEEN]
    if is_mixed or near < 0.5 * size:
        kind = 2
    count = 0
    ends = ti.Vector([0, 0])
    for c in range(SIDES):
        next = (c + 1) % SIDES
        if seen[c] != seen[next]:
            low_value = value_at_corner(zeros, c, values)
            high_value = value_at_corner(zeros, next, values)
            low_seen = ti.Vector([seen[c], counts[c]])
            side = side_of(c, x, y, size)
            along = ti.Vector([0.0, size])
            found = count_jumps(
                shade, side, c, size, along, low_value, high_value, low_seen, seen[next], crossed, jumps
            )
            if found > 0:
                ends[count % 2] = c
            count += found
            if found > 1 and size < 2.0 / WHOLE:  # it cannot be divided
                find_others(shade, side, c, size, crossed, jumps)
    if is_known and is_mixed and count == 0 and size < 0.1:
        kind = 0  # outcomes that change nothing
    elif is_known and count == 2:  # noqa: SIM102  # it would be called anyway
        if has_chord(shade, ends[0], ends[1], x, y, size, crossed, jumps, lines):
            kind = 1
    if kind == 2 and count > 1 and size < 2.0 / WHOLE:
        put_tangents(x, y, size, crossed)
    if ti.static(antialias):
        if kind == 0 and size > _SMOOTH and is_curved(zeros, stop_gradient(centre[VALUE]), values):
            kind = 2
        if kind == 1 and size > _SMOOTH:
            for c in range(SIDES):
                if seen[c] == seen[(c + 1) % SIDES] and is_bent(shade, zeros, side_of(c, x, y, size), c, size, values):
                    kind = 2
    return kind


@ti.func
def is_bent(shade: ti.template(), zeros, side, c, size, values: ti.template()):
    """Whether the value in the middle of side c of a square, which no edge crosses, is not the mean of its ends."""
    half = 0.5 * size
    off = stop_gradient(probe(shade, side[0] + half * side[2], side[1] + half * side[3], ALL, "seen")[VALUE])
    scale = off.norm()
    for n in ti.static(range(2)):
        corner = value_at_corner(zeros, (c + n) % SIDES, values)
        off -= 0.5 * corner
        scale += corner.norm()
    return off.norm() > CURVED * scale


pixel.boundary_body = value_of_pixel  # type: ignore[attr-defined]  # the recorder walks this instead
