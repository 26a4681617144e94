"""Edges within a square as arcs between the places where they cross its sides, and the regions between them.

Two places are the ends of one arc if their normals and jumps fit: a cubic through both, with their tangents.  Where
edges meet, as at a corner, each place has an arm up to the point in which all tangents meet.  Calls on the way confirm
both.  Regions are bounded by parts of the border and by arcs in turn; their areas follow from Green's theorem.
"""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false, reportIndexIssue=false, reportOptionalCall=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from taichi_ext.backend import ti
from taichi_ext.boundary.crossings import (
    ALONG,
    BESIDE,
    BX,
    BY,
    LEVEL,
    MATE,
    NX,
    NY,
    PX,
    PY,
    SLOPE,
    SLOPE_NORM,
    WEIGHT,
    WHICH,
    corner_of,
    jumps_row,
    place_on,
    probe,
)
from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.squares import BESIDE_FLAT, SIDES, TRIES, is_wide, side_of_try

_ALIKE = 0.3  # by which jumps may differ between the ends of an arc, relative
STEEPEST = 8.0  # slope of an arc with respect to its chord
_APART = 0.01  # of the square: by how much tangents may miss the point in which they meet
_FAR_APART = 0.1  # the same in the smallest squares, where it is not confirmed
OFF = 0.001  # of the pixel: by which the edge may be off an arc or an arm
_OFF_CHORD = 0.03  # of the chord: the same for short ones
_WITHIN = 0.5 + 1e-4  # where an arc must be; two edges that cross a side so near to each other count as one
_POINTS, _CROSSED = 12, 2e-4  # of an arc, and by how much they lie on both sides of another one, of the square
GAUSS = 0.5 - 0.5 / 3**0.5
_TINY = 1e-4  # of the square: regions so small are seen where the centre is


@ti.func
def border_place(r, table: ti.template()):
    return ti.Vector([table[r, BX], table[r, BY]])


@ti.func
def chord_of(a, b, table: ti.template()):
    """The vector from the place in row a to that in row b, and the slopes of the edge there, with respect to it."""
    chord = border_place(b, table) - border_place(a, table)
    length = ti.max(chord.norm(), 1e-9)
    slopes = ti.Vector([0.0, 0.0])
    for k in ti.static(range(2)):
        n = ti.Vector([table[(a, b)[k], NX], table[(a, b)[k], NY]])
        across = chord.cross(n) / length
        slopes[k] = -chord.dot(n) / length / ti.select(abs(across) > 1e-6, across, 1e-6)
    return chord, slopes


@ti.func
def match(count, table: ti.template(), jumps: ti.template()):
    """Give each row the other end of its arc; returns whether all have one, and no two arcs cross."""
    for r in range(count):
        table[r, MATE] = -1.0
    for a in range(count):
        best = STEEPEST
        mate = -1
        if table[a, MATE] < 0:
            for b in range(a + 1, count):
                if (table[b, MATE] < 0) & ((b - a) % 2 == 1):
                    chord, slopes = chord_of(a, b, table)
                    turned = ti.max(abs(slopes[0]), abs(slopes[1]))
                    if turned < best:  # noqa: SIM102  # `and` would call it in any case
                        if is_one_edge(a, b, chord, table, jumps):
                            best = turned
                            mate = b
            if mate >= 0:
                table[a, MATE] = mate
                table[mate, MATE] = a
    is_whole = count > 0
    for a in range(count):
        mate = int(table[a, MATE])
        is_whole &= mate >= 0
        for b in range(count):
            if a < b < mate:
                is_whole &= a < table[b, MATE] < mate
    for a in range(count):
        for b in range(count):
            if is_whole & (a != b) & (a < table[a, MATE]) & (b < table[b, MATE]):
                is_whole = not crosses(a, b, table)
    return is_whole


@ti.func
def crosses(a, b, table: ti.template()):
    """Whether the arc from row a, of points of which some are tried, crosses that from row b twice."""
    chord, slopes = chord_of(a, int(table[a, MATE]), table)
    other, turned = chord_of(b, int(table[b, MATE]), table)
    least = 0.0
    most = 0.0
    for k in range(1, _POINTS):
        place = border_place(a, table) + point_of_arc(k / _POINTS, chord, slopes) - border_place(b, table)
        t = place.dot(other) / other.norm_sqr()
        if 0 < t < 1:
            off = other.cross(place - point_of_arc(t, other, turned)) / other.norm()
            least = ti.min(least, off)
            most = ti.max(most, off)
    return (least < -_CROSSED) & (most > _CROSSED)


@ti.func
def point_of_arc(t, chord, slopes):
    """The point at part t of the chord of an arc, from its start."""
    rise = slopes[0] * t * (1.0 - t) ** 2 - slopes[1] * t * t * (1.0 - t)
    return t * chord + rise * ti.Vector([-chord[1], chord[0]])


@ti.func
def is_one_edge(a, b, chord, table: ti.template(), jumps: ti.template()):
    """Whether the jumps at two places are those of one edge, seen from the same side."""
    first = jumps_row(a, jumps) * ti.select(chord.cross(ti.Vector([table[a, NX], table[a, NY]])) > 0, 1.0, -1.0)
    second = jumps_row(b, jumps) * ti.select(chord.cross(ti.Vector([table[b, NX], table[b, NY]])) > 0, 1.0, -1.0)
    is_alike = True
    for e in ti.static(range(jumps.m)):
        is_alike &= abs(first[e] - second[e]) <= _ALIKE * ti.max(abs(first[e]), abs(second[e]))
    return is_alike


@ti.func
def put_arcs(shade: ti.template(), count, is_star, meeting, x, y, size, rounding, table: ti.template()):
    """Put the boundary terms of arcs, or of arms to a meeting, into the table; returns whether edges are there.

    The terms of an arc are at the two points of Gauss' rule for its chord, since its speed may vary; the length of a
    piece follows from the normal that is found there.  The edge is off its arc by ``t^2 (1 - t)^2`` times a number.
    """
    is_there = True
    is_flat = False
    for n in range(TRIES * count):
        r = n // TRIES
        k = n % TRIES
        if is_there and (k == 0 or is_flat):
            at = border_place(r, table)
            way = meeting - at
            out = ti.Vector([-way[1], way[0]])
            if is_star:
                at += 0.5 * way
            else:
                chord, slopes = chord_of(r, int(table[r, MATE]), table)
                way = ti.Vector([-chord[1], chord[0]])
                out = way
                at += point_of_arc(ti.static(GAUSS), chord, slopes)
            aside = ti.select(k == 0, rounding, side_of_try(k) * BESIDE_FLAT / size) * out / ti.max(out.norm(), 1e-9)
            near = at + aside
            there = probe(shade, x + size * near[0], y + size * near[1], int(table[r, WHICH]), "level")
            slope = stop_gradient(there[SLOPE])
            g = slope.norm()
            level = stop_gradient(there[LEVEL]) - size * aside.dot(slope)
            is_flat = k + 1 < TRIES and level == 0 and g == 0
            off = level / (size * g)
            if not is_flat:
                allowed = ti.min(OFF, _OFF_CHORD * size * way.norm())
                is_there = (abs(off) * size < allowed) & (ti.max(abs(at[0]), abs(at[1])) < _WITHIN)
            if is_there and not is_flat:
                beyond = stop_gradient(there[LEVEL]) / (size * g)  # where it is sloped, so a place beside the edge
                at = near - (beyond - ti.select(beyond > 0, rounding, -rounding)) * slope / g
                table[r, PX] = x + size * at[0]
                table[r, PY] = y + size * at[1]
                table[r, WEIGHT] = size * way.norm() / g
                if not is_star:
                    across = way.norm_sqr() / way.dot(slope)
                    table[r, WEIGHT] = 0.5 * size * abs(across)
                    table[r, BESIDE] = -0.6 * level / size * across
                if out.dot(slope) * (out[0] * table[r, NX] + out[1] * table[r, NY]) < 0:
                    table[r, WEIGHT] *= -1.0  # the level of a jump may have the other sign there than at the border
    return is_there


@ti.func
def put_without_arcs(count, x, y, size, meeting, apart, table: ti.template()):
    """Put terms into the table that need no arcs.

    They are those of the edges up to the point in which tangents meet, or else of the mean length of edges from the
    sides of the square as scan lines.
    """
    is_star = (ti.max(abs(meeting[0]), abs(meeting[1])) < _WITHIN) & (apart < _FAR_APART)
    for r in range(count):
        at = border_place(r, table)
        c = int(table[r, ALONG])
        way = corner_of(c + 1) - corner_of(c)
        length = 0.5 * abs(way.dot(ti.Vector([table[r, NX], table[r, NY]])))
        if is_star:
            length = (meeting - at).norm()
        table[r, PX] = x + size * at[0]
        table[r, PY] = y + size * at[1]
        table[r, WEIGHT] = size * length / table[r, SLOPE_NORM]


@ti.func
def meeting_of(count, table: ti.template()):
    """The point with the least squares of distances to the tangents, and its largest distance to one of them.

    Not finite, or far from the square, if they are parallel.
    """
    normals = ti.Matrix([[0.0, 0.0], [0.0, 0.0]])
    weighted = ti.Vector([0.0, 0.0])
    for r in range(count):
        n = ti.Vector([table[r, NX], table[r, NY]])
        normals += n.outer_product(n)
        weighted += n * n.dot(border_place(r, table))
    across = ti.Vector([normals[1, 1] * weighted[0], normals[0, 0] * weighted[1]])
    found = (across - normals[0, 1] * ti.Vector([weighted[1], weighted[0]])) / normals.determinant()
    apart = 0.0
    for r in range(count):
        apart = ti.max(apart, abs(ti.Vector([table[r, NX], table[r, NY]]).dot(found - border_place(r, table))))
    return found, apart


@ti.func
def meets(meeting, apart):
    return (ti.max(abs(meeting[0]), abs(meeting[1])) < _WITHIN) & (apart < _APART)


@ti.func
def region_from(k, count, before, table: ti.template()):
    """The region behind the place in row k, on the border to the left.

    Returns its middle and area, the middle of its longest edge, and ``before`` with the bits of the rows that it takes.
    A thin region bends, so its middle is beside that of its edge.
    """
    total = ti.Vector([0.0, 0.0, 0.0])
    rim = ti.Vector([0.0, 0.0])
    inwards = rim
    longest = -1.0
    done = before
    q = k
    for _ in range(count):
        if (done >> q) & 1 == 0:
            done |= 1 << q
            r = (q + 1) % count
            place = border_place(q, table)
            end = table[r, ALONG] + ti.select(r <= q, 4.0, 0.0)
            corner = int(ti.floor(table[q, ALONG])) + 1
            for _c in range(SIDES):
                if corner < end:
                    following = corner_of(corner)
                    total += triangle(place, following)
                    place = following
                    corner += 1
            far = border_place(r, table)
            mate = int(table[r, MATE])
            chord, slopes = chord_of(r, mate, table)
            total += triangle(place, far) + triangle(far, far + chord)
            middle = far + 0.5 * chord
            bulge = (slopes[1] - slopes[0]) / 12.0 * chord.norm_sqr() + table[mate, BESIDE] - table[r, BESIDE]
            total += bulge * ti.Vector([middle[0], middle[1], 1.0])
            if chord.norm() > longest:
                longest = chord.norm()
                inwards = ti.Vector([-chord[1], chord[0]])
                rim = middle + (slopes[0] - slopes[1]) / 8.0 * inwards
            q = mate
    if total[2] > _TINY:
        for m in ti.static(range(2)):
            total[m] = ti.max(-0.5, ti.min(0.5, total[m] / total[2]))
        if not is_wide(rim, total):
            for m in ti.static(range(2)):
                total[m] = rim[m] + 0.5 * total[2] / longest**2 * inwards[m]
    else:  # not at the rim, where a value may end as a root
        total[0] = 0.0
        total[1] = 0.0
    return total, rim, done


@ti.func
def part_from(along, count, meeting, table: ti.template()):
    """The triangle of the point in which edges meet and the border from a place to the next edge or corner.

    A region at a corner of more than 180 degrees has its middle beyond its edges; its triangles have not.  ``along`` is
    as in the table.  Returns middle and area, and where the triangle ends.
    """
    end = ti.min(ti.floor(along) + 1.0, table[0, ALONG] + SIDES)
    for r in range(count):
        if along < table[r, ALONG] < end:
            end = table[r, ALONG]
    a = place_on(int(along), along - ti.floor(along))
    b = place_on(int(end), end - ti.floor(end))
    middle = (a + b + meeting) / 3.0
    return ti.Vector([middle[0], middle[1], 0.5 * (a - meeting).cross(b - meeting)]), end


@ti.func
def triangle(a, b):
    """The first moments and the area of the triangle of two points and 0."""
    area = 0.5 * a.cross(b)
    return ti.Vector([area * (a[0] + b[0]) / 3.0, area * (a[1] + b[1]) / 3.0, area])
