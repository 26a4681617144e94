"""``pixel``: a pixel of any function of a position, with automatic detection of its edges.

The engine records the conditions of the function in each call (``record/conditions.py``).  If a condition may change in
a pixel, a search along the sides of the square finds the places where the value jumps.  The first condition that
differs between the two sides of such a place has a level that is 0 there, and both sides execute the same code up to
it; where several differ, the one whose other outcome makes the jump is taken.  So the boundary term is
``jump dl level_dot / |grad level|``, along arcs between the places (``arcs.py``).  A square whose edges are no such
arcs is divided; the smallest ones take the mean length from their sides as scan lines.
"""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false, reportIndexIssue=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from typing import Any

from taichi_ext.backend import ALERT_PLACES, ti
from taichi_ext.boundary.arcs import GAUSS, match, meeting_of, meets, part_from, put_arcs, put_without_arcs, region_from
from taichi_ext.boundary.crossings import (
    ALL,
    ALONG,
    COLUMNS,
    COUNT,
    FLAGGED,
    FOUND,
    LEVEL,
    MOST,
    OVER,
    PX,
    PY,
    SEEN,
    SLOPE_NORM,
    VALUE,
    WEIGHT,
    WHICH,
    bit_of,
    corner_of,
    jumps_row,
    probe,
    search_side,
)
from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.kernel_scope import leave_to_engine, recorded
from taichi_ext.boundary.squares import (
    COARSE,
    CURVED,
    SIDES,
    WHOLE,
    is_wide,
    least_side,
    middle_of_square,
    off_border,
    sample_beside,
    side_of_square,
    value_at_corner,
    variation_of,
)

UNIFORM, ARCS, STAR, BENT, DIVIDED, STEEP = range(6)  # what a square is; the last two are divided
# Of the sum of values over corners and centre: how far that of a corner may be from the centre's before a value between
# them is looked at, and how far values may be from linear before a square is divided; small ones, which count less, by
# more.
_APART, _MUCH_CURVED, _SMALL = 0.025, 0.003, 0.25
_ON_WAY = 0.6  # from the centre to the corner: where ramps through the centre are farthest from linear
_LEAST = 0.1  # of a pixel: squares are divided down to it where outcomes change, though no value jumps
_FLAT = 1e-4  # as CURVED, with a hidden edge, such as that at which the number of steps of a march changes
_SMOOTH = 0.2  # of a pixel: squares that are smaller are not divided since values beside an edge are not linear
_HEIGHT = 0.12  # of that of a linear level, at a place in a square with an edge
_ROUNDINGS = 8  # a level is no larger where it is 0
_LARGE = 0.7  # of a pixel: squares in which an edge may be visible that is hidden on all sides
_BESIDE = 2  # places in a square that seems to have no edge, where fine patterns do not look as at its centre
# Unresolved: length of edges, in pixels and of all; the same of shapes within a pixel; squares with bent values.
_MUCH, _SHARE, _SHARE_WITHIN, _MOST_BENT = 2.0, 0.2, 0.25, 8


@recorded
def pixel(shade: object, *args: object, at: object, antialias: bool = False) -> Any:
    """The value of a pixel of a function of the position, with the boundary terms of all its edges, which are found.

    Edges are where a condition in ``shade`` changes: ``if``, ``select``, comparisons, conversions to integers,
    rounding, remainders; also in loops, in functions that it calls, and on values that it reads from fields.  A pixel
    near which no condition changes costs eight calls of ``shade``, others eight more and about twelve for each place
    where an edge crosses a side.  Pixels whose edges are not smooth arcs are divided into squares, each with its sides;
    a ``DerivativeWarning`` says where the smallest ones do not do.

    Args:
        shade: a ti.func ``shade(x, y)`` that returns the value of the image at the position (x, y) in pixels: a
            scalar, vector or matrix.  It must only read.  Conditions must be computed from x and y in ``shade``.  A
            ti.func sees no arguments and variables of the kernel: pass them as ``args``.
        args: further arguments of the function: ``shade(x, y, *args)``.
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


# --- in the kernel ----------------------------------------------------------------------------------------------------


@ti.func
def value_of_pixel(shade: ti.template(), zeros, x, y, fine, antialias: ti.template()):
    """The value, its entries as a vector, and whether the smallest squares did not do; ``fine`` is a rounding.

    Also returns the place by which pixels are counted.
    """
    total = zeros + 0.0
    if ti.static(not antialias):
        total += probe(shade, x, y, 0, "value")[VALUE]
    sx = x + off_border(x, y, fine)
    sy = y + 1.3 * off_border(x, y, fine)
    edges = 0.0 * sx
    rough = 0.0 * sx
    bent = 0
    is_within = False
    done = 0
    scale = 0.0 * sx
    place = 0
    side = WHOLE
    while place < WHOLE**2:
        size = side / WHOLE
        middle = middle_of_square(place, size)
        cx = sx + middle[0]
        cy = sy + middle[1]
        table = ti.Matrix([[0.0] * COLUMNS] * MOST)
        jumps = ti.Matrix([[0.0] * zeros.n] * MOST)
        least = least_side(done)
        kind, count, meeting, scale = find_edges(
            shade, zeros, cx, cy, size, fine, scale, side <= least, antialias, table, jumps
        )
        if (kind >= DIVIDED) & (side > ti.select(kind == STEEP, COARSE, least)):
            is_within |= (side == WHOLE) & (count == 0)  # no edge crosses the border
            side = side // 2
        else:
            done += 1
            bent += ti.select(kind == STEEP, 1, 0)
            for r in range(count):
                length = abs(table[r, WEIGHT]) * table[r, SLOPE_NORM]
                edges += length
                rough += ti.select(kind == DIVIDED, length, 0.0)
                if table[r, WEIGHT] != 0:
                    level = probe(shade, table[r, PX], table[r, PY], int(table[r, WHICH]), "level")[LEVEL]
                    moved = table[r, WEIGHT] * (level - stop_gradient(level))
                    for e in ti.static(range(zeros.n)):
                        total[e] += moved * jumps[r, e]
            if ti.static(antialias):
                total += mean_of_regions(shade, zeros, cx, cy, size, kind, count, meeting, table)
            place += side * side
            side = side_of_square(place)
    mixed = 43758.5453 * ti.sin(12.9898 * ti.floor(stop_gradient(x) + 0.5) + 78.233 * ti.floor(stop_gradient(y) + 0.5))
    counted = int(ALERT_PLACES * (mixed - ti.floor(mixed))) & (ALERT_PLACES - 1)  # as if drawn by lot, in rows, too
    most = ti.select(is_within, _SHARE_WITHIN * edges, _MUCH + _SHARE * edges)
    return total, (rough > most) | (bent > _MOST_BENT), counted


@ti.func
def mean_of_regions(shade: ti.template(), zeros, x, y, size, kind, count, meeting, table: ti.template()):
    """The integral of the values of a square: of all of it, of its regions or their triangles, or of four quarters.

    Each region beside an arc has two samples, see ``sample_beside``.
    """
    total = zeros + 0.0
    done = 0
    along = table[0, ALONG]
    parts = ti.Vector([1, count, count + SIDES, 4, 4, 4])  # by kind
    for k in range(parts[kind]):
        at = ti.Vector([0.0, 0.0, 1.0])
        two = False
        edge = ti.Vector([0.0, 0.0])
        if kind >= BENT:  # the points of Gauss' rule
            at = ti.Vector([(0.5 - GAUSS) * (1 - 2 * (k % 2)), (0.5 - GAUSS) * (1 - 2 * (k // 2)), 0.25])
        elif kind == ARCS:
            at, edge, done = region_from(k, count, done, table)
            two = is_wide(edge, ti.Vector([at[0], at[1]]))
        elif kind == STAR:
            at, along = part_from(along, count, meeting, table)
        for m in range(2 if two else 1):
            place = ti.Vector([at[0], at[1], 1.0])
            if two:
                place = sample_beside(m, edge, ti.Vector([at[0], at[1]]))
            if at[2] != 0:
                value = probe(shade, x + size * place[0], y + size * place[1], 0, "value")[VALUE]
                total += at[2] * place[2] * size * size * value
    return total


@ti.func
def find_edges(
    shade: ti.template(),
    zeros,
    x,
    y,
    size,
    fine,
    before,
    is_least,
    antialias: ti.template(),
    table: ti.template(),
    jumps: ti.template(),
):
    """Put the edges of a square into the tables; returns what it is, the number of rows, and where edges meet.

    Also returns the scale of values in the pixel, which is ``before`` that of earlier squares.
    """
    kind = UNIFORM
    count = 0
    meeting = ti.Vector([0.0, 0.0])
    scale = before + 0.0
    centre = probe(shade, x, y, ALL, "near", reach=0.5 * size)
    near = centre[FOUND]
    middle = stop_gradient(centre[VALUE])
    seen = ti.Vector([0] * SIDES)
    values = ti.Matrix([[0.0] * zeros.n] * SIDES)
    is_mixed = False
    is_known = False  # whether the outcome at the centre also occurs on the border
    is_hidden = False  # whether one edge alone crosses the square, and no value jumps there
    crossed = 0
    most = centre[COUNT]
    for c in range(SIDES):
        at = corner_of(c)
        corner = probe(shade, x + size * at[0], y + size * at[1], ALL, "seen")
        seen[c] = corner[SEEN]
        most = ti.max(most, corner[COUNT])
        for e in ti.static(range(zeros.n)):
            values[c, e] = stop_gradient(corner[VALUE][e])
        is_mixed |= seen[c] != centre[SEEN]
        is_known |= seen[c] == centre[SEEN]
    is_near = near != 0
    for n in range(_BESIDE if centre[COUNT] > 0 else 0):
        if not is_mixed and not is_near:
            at = size * ti.select(n == 0, ti.Vector([0.29, -0.17]), ti.Vector([-0.13, 0.37]))
            beside = probe(shade, x + at[0], y + at[1], ALL, "near", dx=at[0], dy=at[1], reach=0.5 * size)
            is_near = beside[FOUND] != 0 or beside[SEEN] != centre[SEEN]
    if is_mixed | is_near:
        kind = DIVIDED
        changes = 0
        visible = 0
        inner = ti.Vector([0] * MOST)
        rounding = 4.0 * fine * (1.0 + abs(x) + abs(y)) / size
        for c in range(SIDES):
            if count <= MOST:
                count, more, bits = search_side(shade, c, x, y, size, rounding, count, antialias, table, jumps, inner)
                changes += more
                crossed |= bits
        is_over = (count > MOST) | (changes >= OVER)
        count = ti.min(count, MOST)
        if not is_over and count > 0:
            is_over = oscillates(shade, count, x, y, size, rounding, table)
        for r in range(count):
            is_known |= inner[r] == centre[SEEN]
            visible |= bit_of(int(table[r, WHICH]))
        crossed |= visible
        is_small = is_least or (count > 0 and size * WHOLE < 1.5 * COARSE)
        # An edge may be near that crosses no side, or, in a large square, is hidden where it crosses them.
        counted = ti.select((count > 0) & (size > _LARGE), visible, crossed)
        is_closed = (near | crossed) != counted and not is_small
        if count == 0:
            if is_known and is_mixed:  # outcomes that change nothing
                is_done = size < _LEAST
                is_hidden = (crossed & (crossed - 1) == 0) & (most <= FLAGGED) & (not is_closed) & (not is_done)
                kind = ti.select(is_done | is_hidden, UNIFORM, DIVIDED)
        else:
            may_be_arcs = is_known & (not is_over) & (not is_closed)
            kind, meeting = put_edges(shade, count, may_be_arcs, x, y, size, rounding, table, jumps)
    if ti.static(antialias):
        kind, scale = kind_by_values(shade, zeros, middle, values, x, y, size, before, kind, is_hidden)
        if ((kind == ARCS) | (kind == STAR)) & (size > _SMOOTH):  # noqa: SIM102  # `and` would call it in any case
            if is_rough(shade, zeros, count, seen, x, y, size, values, jumps):
                kind = DIVIDED
    if (kind == UNIFORM) & is_hidden:
        for c in range(SIDES):  # behind the edge there may be others, which do not exist at the centre
            if seen[c] != centre[SEEN]:
                at = corner_of(c)
                found = probe(shade, x + size * at[0], y + size * at[1], ALL, "near", reach=size)[FOUND]
                if (found | crossed) != crossed:
                    kind = DIVIDED
    return kind, count, meeting, scale


@ti.func
def oscillates(shade: ti.template(), count, x, y, size, rounding, table: ti.template()):
    """Whether a level is small in all of a square, for its slope on an edge: it has more edges than its slopes tell."""
    found = False
    for r in range(count):
        which = int(table[r, WHICH])
        least = _HEIGHT * size * table[r, SLOPE_NORM]
        most = 0.0 * size
        for k in range(SIDES + 1):
            if not found and most < least:  # the corner opposite first
                at = corner_of(int(table[r, ALONG]) + 2 + k) * ti.select(k == SIDES, 0.0, 1.0)
                level = probe(shade, x + size * at[0], y + size * at[1], which, "level")[LEVEL]
                most = ti.max(most, abs(stop_gradient(level)))
        found |= _ROUNDINGS * rounding * size * table[r, SLOPE_NORM] < most < least  # 0 where the condition is not met
    return found


@ti.func
def put_edges(
    shade: ti.template(), count, may_be_arcs, x, y, size, rounding, table: ti.template(), jumps: ti.template()
):
    """Put the terms of edges into the table: as arcs, as arms to the point in which they meet, or by the sides alone.

    Returns which of them the square has, and that point.
    """
    kind = DIVIDED
    meeting = ti.Vector([0.0, 0.0])
    apart = 0.0
    for attempt in range(2):
        if (kind == DIVIDED) & may_be_arcs:
            is_found = False
            if attempt == 0:
                is_found = match(count, table, jumps)
            else:
                meeting, apart = meeting_of(count, table)
                is_found = meets(meeting, apart)
            if is_found:  # noqa: SIM102  # `and` would call it in any case
                if put_arcs(shade, count, attempt == 1, meeting, x, y, size, rounding, table):
                    kind = ARCS + attempt
    if kind == DIVIDED:
        meeting, apart = meeting_of(count, table)
        put_without_arcs(count, x, y, size, meeting, apart, table)
    return kind, meeting


@ti.func
def kind_by_values(shade: ti.template(), zeros, middle, values: ti.template(), x, y, size, before, kind, is_hidden):
    """What a square without edges is, by how far its values are from linear; and the scale of values in the pixel."""
    found = kind
    off, apart, farthest, scale = variation_of(before, zeros, middle, values)
    if (kind == UNIFORM) & (apart > _APART * scale):  # a ramp through the centre may be steeper than between corners
        corner = value_at_corner(zeros, farthest, values)
        at = _ON_WAY * size * corner_of(farthest)
        there = stop_gradient(probe(shade, x + at[0], y + at[1], ALL, "seen")[VALUE])
        off = ti.max(off, (there - middle - _ON_WAY * (corner - middle)).norm())
    if (kind == UNIFORM) & (off > CURVED * scale):
        found = BENT
    is_steep = off > _MUCH_CURVED * ti.max(1.0, _SMALL / size) * scale
    if (kind == UNIFORM) & (is_steep | (is_hidden & (off > _FLAT * scale))):
        found = STEEP
    return found, scale


@ti.func
def is_rough(shade: ti.template(), zeros, count, seen, x, y, size, values: ti.template(), jumps: ti.template()):
    """Whether the value of a square with edges ends as a root at one of them, or is bent along a side without any."""
    found = False
    for r in range(count):
        found |= jumps_row(r, jumps).norm() == 0
    for c in range(SIDES):
        if seen[c] == seen[(c + 1) % SIDES]:  # noqa: SIM102
            if is_bent(shade, zeros, c, x, y, size, values):
                found = True
    return found


@ti.func
def is_bent(shade: ti.template(), zeros, c, x, y, size, values: ti.template()):
    """Whether the value in the middle of side c of a square, which no edge crosses, is not the mean of its ends."""
    at = 0.5 * (corner_of(c) + corner_of(c + 1))
    off = stop_gradient(probe(shade, x + size * at[0], y + size * at[1], ALL, "seen")[VALUE])
    scale = off.norm()
    for n in ti.static(range(2)):
        corner = value_at_corner(zeros, (c + n) % SIDES, values)
        off -= 0.5 * corner
        scale += corner.norm()
    return off.norm() > CURVED * scale


pixel.boundary_body = value_of_pixel  # type: ignore[attr-defined]  # the recorder walks this instead
