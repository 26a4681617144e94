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
    put_sides,
    sample_beside,
    side_of,
    side_of_square,
    value_at_corner,
)

VALUE, COUNT, SEEN, LEVEL, SLOPE, NEAR = range(6)  # results of a probe
PX, PY, GX, GY, WHICH, WEIGHT, COLUMNS = range(7)  # of the table of places where the sides of a square are crossed
PLACES = 3  # on one side of one of the smallest squares
_GAP = 1e-3  # of the square: how far behind the first place the search for another one starts
_ALL = 2**30
_STEPS = 26  # of a search along a side
_MOST = 24  # conditions in one call: 2 to the power of this
_EQUAL = 1e-4  # relative: values that differ by less do not jump
_ALIKE = 0.3  # by which jumps may differ between the ends of a chord, relative
_TURN = 0.12  # by which the normals at its ends may be turned to it, radians
_LAYER = 1e-4  # of the square: how wide an edge is, such as that of a march which diverges next to a surface
_SMOOTH = 0.2  # of a pixel: squares that are smaller are not divided since values are not linear in them
_APART = 0.1  # of the square: by how much tangents may miss the point in which they meet
_OFF = 0.005  # of the square: by which the edge may be off the parabola between them


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


def probe(shade: object, x: object, y: object, which: object, mode: str) -> Any:
    """A call of the function that also returns facts about its conditions; traced by the engine."""
    leave_to_engine("probe", x)


recorded(pixel, probe)


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
    centre = probe(shade, x, y, _ALL, "near")
    near = stop_gradient(centre[NEAR])
    seen = ti.Vector([0] * SIDES)
    counts = ti.Vector([0] * SIDES)
    values = ti.Matrix([[0.0] * zeros.n] * SIDES)
    is_mixed = False
    is_known = False  # whether the outcome at the centre also occurs at a corner
    for c in range(SIDES):
        side = side_of(c, x, y, size)
        corner = probe(shade, side[0], side[1], _ALL, "seen")
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
    off = stop_gradient(probe(shade, side[0] + half * side[2], side[1] + half * side[3], _ALL, "seen")[VALUE])
    scale = off.norm()
    for n in ti.static(range(2)):
        corner = value_at_corner(zeros, (c + n) % SIDES, values)
        off -= 0.5 * corner
        scale += corner.norm()
    return off.norm() > CURVED * scale


@ti.func
def find_others(shade: ti.template(), side, c, size, crossed: ti.template(), jumps: ti.template()):
    """Put the places before and behind the first one on side c of a square into the tables."""
    first = (crossed[c, PX] - side[0]) * side[2] + (crossed[c, PY] - side[1]) * side[3]
    for k in range(1, PLACES):
        between = ti.Vector([0.0, first]) if k == 1 else ti.Vector([first + _GAP * size, size])
        low = probe(shade, side[0] + between[0] * side[2], side[1] + between[0] * side[3], _ALL, "seen")
        high = probe(shade, side[0] + between[1] * side[2], side[1] + between[1] * side[3], _ALL, "seen")
        if low[SEEN] != high[SEEN]:
            low_value = stop_gradient(low[VALUE])
            high_value = stop_gradient(high[VALUE])
            low_seen = ti.Vector([low[SEEN], low[COUNT]])
            row = c + k * SIDES
            count_jumps(shade, side, row, size, between, low_value, high_value, low_seen, high[SEEN], crossed, jumps)


@ti.func
def count_jumps(
    shade: ti.template(),
    side,
    row,
    size,
    between,
    low_value,
    high_value,
    low_seen,
    high_seen,
    crossed: ti.template(),
    jumps: ti.template(),
):
    """Put the place where the value jumps most, on a part of a side of a square, into a row of the tables.

    Returns 0 if there is none, 1 if there is, and more if other edges cross the side, too: the outcomes next to the
    jump are then not those at both ends of the side.  Of two halves whose ends both see other outcomes, the search goes
    on in that whose values differ more.
    """
    low = between[0]
    high = between[1]
    jump = high_value - low_value
    shown = jump
    ends = ti.Vector([low_seen[0], high_seen])
    for _ in range(_STEPS):
        if jump.norm() > _EQUAL * (low_value.norm() + high_value.norm()):
            q = 0.5 * (low + high)
            here = probe(shade, side[0] + q * side[2], side[1] + q * side[3], _ALL, "seen")
            value = stop_gradient(here[VALUE])
            if here[SEEN] == high_seen or (
                here[SEEN] != low_seen[0] and (value - low_value).norm_sqr() > (high_value - value).norm_sqr()
            ):
                high = q
                high_seen = here[SEEN]
                high_value = value
            else:
                low = q
                low_seen = ti.Vector([here[SEEN], here[COUNT]])
                low_value = value
            jump = high_value - low_value
            if high - low > _LAYER * size:
                shown = jump
    last = low_seen[1]
    is_found = jump.norm() > _EQUAL * (low_value.norm() + high_value.norm())
    if is_found:
        before = 0  # the number of the first condition that differs lies behind it
        for _ in range(_MOST):
            if last - before > 1:
                which = (before + last) // 2
                both = ti.Vector([0, 0])
                for k in range(2):
                    q = ti.select(k == 0, low, high)
                    both[k] = probe(shade, side[0] + q * side[2], side[1] + q * side[3], which, "seen")[SEEN]
                if both[0] == both[1]:
                    before = which
                else:
                    last = which
        px = side[0] + low * side[2]
        py = side[1] + low * side[3]
        slope = stop_gradient(probe(shade, px, py, last, "level")[SLOPE])
        g2 = slope.norm_sqr()
        along = slope[0] * side[2] + slope[1] * side[3]
        is_found = g2 > 0
        if is_found:
            crossed[row, PX] = stop_gradient(px)
            crossed[row, PY] = stop_gradient(py)
            crossed[row, GX] = slope[0]
            crossed[row, GY] = slope[1]
            crossed[row, WHICH] = last
            crossed[row, WEIGHT] = 0.5 * size * abs(along) / g2
            for e in ti.static(range(jumps.m)):
                jumps[row, e] = ti.select(along > 0, shown[e], -shown[e])
    is_alone = low_seen[0] == ends[0] and high_seen == ends[1]
    return ti.select(is_found, ti.select(is_alone, 1, SIDES), 0)


@ti.func
def has_chord(
    shade: ti.template(), a, b, x, y, size, crossed: ti.template(), jumps: ti.template(), lines: ti.template()
):
    """Make the chord between the places on sides a and b a line, if they are of one edge; returns whether they are.

    The edge between them is a parabola with their normals.  They are moved along it to the two points of Gauss' rule,
    since its speed may vary.
    """
    first = ti.Vector([crossed[a, PX] - x, crossed[a, PY] - y]) / size
    chord = ti.Vector([crossed[b, PX] - x, crossed[b, PY] - y]) / size - first
    length = ti.max(chord.norm(), 1e-9)
    along = chord / length
    turns = ti.Vector([0.0, 0.0])
    signs = ti.Vector([0.0, 0.0])
    slopes = ti.Vector([0.0, 0.0])
    for k in range(2):
        c = ti.select(k == 0, a, b)
        slope = ti.Vector([crossed[c, GX], crossed[c, GY]])
        slopes[k] = slope.norm()
        signs[k] = ti.select(along.cross(slope) > 0, 1.0, -1.0)
        turns[k] = signs[k] * along.dot(slope) / slopes[k]
    difference = 0.0
    total = 0.0
    for e in ti.static(range(jumps.m)):
        difference += (signs[0] * jumps[a, e] - signs[1] * jumps[b, e]) ** 2
        total += jumps[a, e] ** 2 + jumps[b, e] ** 2
    is_one = difference <= _ALIKE**2 * total and (ti.max(abs(turns[0]), abs(turns[1])) < _TURN or length < 1e-3)
    bulge = length / 8.0 * (turns[0] - turns[1])
    places = ti.Vector([0.0] * 4)
    for k in range(2):
        c = ti.select(k == 0, a, b)
        if is_one:
            part = ti.static(0.5 - 0.5 / 3**0.5) + ti.static(1 / 3**0.5) * k
            places[2 * k] = x + size * (first[0] + part * chord[0] + 2.0 / 3.0 * bulge * along[1])
            places[2 * k + 1] = y + size * (first[1] + part * chord[1] - 2.0 / 3.0 * bulge * along[0])
            there = probe(shade, places[2 * k], places[2 * k + 1], int(crossed[c, WHICH]), "level")
            slopes[k] = stop_gradient(there[SLOPE]).norm()
            is_one = abs(stop_gradient(there[LEVEL])) < _OFF * size * slopes[k]
    if is_one:
        put_sides(lines)
        lines[SIDES, NX] = -along[1]
        lines[SIDES, NY] = along[0]
        lines[SIDES, S] = first.cross(along)
        lines[SIDES, BULGE] = bulge
        for k in range(2):
            c = ti.select(k == 0, a, b)
            crossed[c, PX] = places[2 * k]
            crossed[c, PY] = places[2 * k + 1]
            crossed[c, WEIGHT] = 0.5 * size * length / slopes[k]
    return is_one


@ti.func
def put_tangents(x, y, size, crossed: ti.template()):
    """Let the edges in one of the smallest squares follow their tangents up to the point in which all of them meet.

    So a corner counts right, a place where edges cross or where one ends at another, and an edge that bends.  Edges
    whose tangents do not meet in one point of the square keep their weights.
    """
    meeting = point_nearest_to_lines(x, y, crossed)
    if ti.max(abs(meeting[0] - x), abs(meeting[1] - y)) <= 0.5 * size and meeting[2] < _APART * size:
        for s in range(PLACES * SIDES):
            if crossed[s, WEIGHT] > 0:
                to = ti.Vector([meeting[0] - crossed[s, PX], meeting[1] - crossed[s, PY]])
                crossed[s, WEIGHT] = to.norm() / ti.Vector([crossed[s, GX], crossed[s, GY]]).norm()


@ti.func
def point_nearest_to_lines(x, y, crossed: ti.template()):
    """The point with the least squares of distances to the tangents, and its largest distance to one of them.

    Not finite, or far from the square at (x, y), if they are parallel.
    """
    normals = ti.Matrix([[0.0, 0.0], [0.0, 0.0]])
    weighted = ti.Vector([0.0, 0.0])
    for s in range(PLACES * SIDES):
        if crossed[s, WEIGHT] > 0:
            n = ti.Vector([crossed[s, GX], crossed[s, GY]]).normalized()
            normals += n.outer_product(n)
            weighted += n * n.dot(ti.Vector([crossed[s, PX] - x, crossed[s, PY] - y]))
    found = normals.inverse() @ weighted
    apart = 0.0
    for s in range(PLACES * SIDES):
        if crossed[s, WEIGHT] > 0:
            n = ti.Vector([crossed[s, GX], crossed[s, GY]]).normalized()
            apart = ti.max(apart, abs(n.dot(found - ti.Vector([crossed[s, PX] - x, crossed[s, PY] - y]))))
    return ti.Vector([x + found[0], y + found[1], apart])


pixel.boundary_body = value_of_pixel  # type: ignore[attr-defined]  # the recorder walks this instead
