"""The table of the shapes that a square shows, as code in the kernel of ``layers``."""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false, reportOptionalCall=false, reportOptionalOperand=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from typing import Any

from taichi_ext.backend import ti
from taichi_ext.boundary.arcs import border_place, chord_of, meeting_of, meets
from taichi_ext.boundary.crossings import NX as NORMAL_X
from taichi_ext.boundary.crossings import NY as NORMAL_Y
from taichi_ext.boundary.crossings import corner_of
from taichi_ext.boundary.divided import ROWS, SHARED, cross_sides, is_cone, put_levels, step_to_mate
from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.kernel_scope import leave_to_engine, recorded
from taichi_ext.boundary.polygons import PARALLEL, SIDES

MOST = 6  # shapes of which parts can be seen in one square; the row after them is for a second edge of one of them

# The columns of the table of the shapes that a pixel shows: its edge as a line and a bulge, as in the table of lines.
S, NX, NY, BULGE, INDEX, COVERS, DEPTH, DX, DY, BEND, COLUMNS = range(11)
SIGN = COVERS  # of a second edge: 1 where the larger of two distances from edges counts, -1 where the smaller one does
_BENT = 0.04  # of a square: from where on an edge is not straight
_TURNED = 2.0  # slope of an arc with respect to its chord, in the smallest squares
_AWAY = 4.0  # squares: shapes that are farther outside are not looked at in the corners
_FLAT = 1e-5  # of a square: a bulge that is none, and an angle
_TOUCHING = 4.0 * PARALLEL  # by which depths may swap beyond a square: where they do on its side, two squares see it
_ROUND = 0.02  # sine of the angle by which slopes turn from corner to corner around a round top
_SHORT = 1e-3  # of the square: a chord whose ends are too near to each other to tell its direction


@recorded
def shape_at(shape: object, n: object, x: object, y: object) -> Any:
    """Level, depth, value and alpha of shape n; traced by the engine, which checks them."""
    leave_to_engine("shape_at", n)


@recorded
def level_gradient(shape: object, name: str, value: object, *, at: object) -> Any:
    """The gradient of a level or depth at the position, without a tangent; traced by the engine."""
    leave_to_engine("level_gradient", value)


@ti.func
def collect(shape: ti.template(), count, px, py, middle, size, seen: ti.template(), has_alpha: ti.template()):
    """Put the shapes that the square shows into the table; returns how many there are.

    It is ``MOST + 1`` more if the square should be divided, and twice that if it may hold a tiny shape.  Of transparent
    shapes, those that end in it.
    """
    x = px + middle[0]
    y = py + middle[1]
    found = 0
    is_coarse = False
    is_tiny = False
    seen[MOST, INDEX] = -1.0
    here = ti.Matrix([[0.0] * 3] * (SIDES + 1))
    table = ti.Matrix([[0.0] * (NORMAL_Y + 1)] * ROWS)
    for n in range(count):
        new = shape_at(shape, n, x, y)
        level = stop_gradient(new[0])
        slope = size * level_gradient(shape, "level", new[0], at=(x, y))
        reach = 0.5 * (abs(slope[0]) + abs(slope[1]))
        depth = stop_gradient(new[1])
        away = size * level_gradient(shape, "depth", new[1], at=(x, y))
        is_hidden = level < -_AWAY * reach
        for q in range(found):
            ahead = seen[q, DEPTH] - depth
            across = 0.5 * (abs(seen[q, DX] - away[0]) + abs(seen[q, DY] - away[1]))
            is_hidden |= seen[q, COVERS] > 0 and ahead + seen[q, BEND] + 2.0 * across < 0
        if not is_hidden:
            off, bend = bends_of(shape, n, x, y, size, ti.Vector([level, depth]), slope, away)
            crossed = 0
            is_full = level > 0
            first = ti.Vector([0.0] * 4)
            second = ti.Vector([0.0] * 4)
            sign = 0.0
            if abs(level) <= reach + 2.0 * off + SHARED / size * slope.norm():  # two squares see an edge on a side
                put_levels((shape, n, px, py), middle, size, here)
                crossed, border = cross_sides((shape, n, px, py), middle, size, here, table)
                is_full = border > 0.5 * SIDES
                if (border_place(0, table) - border_place(1, table)).norm() < _FLAT and crossed == 2:
                    crossed = 0  # it only touches a corner
                if crossed > 0:
                    is_straight, first, second, sign = lines_of(crossed, here, table)
                    is_coarse |= not is_straight or (sign != 0 and seen[MOST, INDEX] >= 0)
                is_coarse |= sign == 0 and off > _BENT * slope.norm()
                is_tiny |= (crossed > 0 or not is_full) and has_top(here)
            is_full = is_full and crossed == 0
            if (crossed > 0 or is_full) and not (has_alpha and is_full):
                kept = 0
                for q in range(found):
                    ahead = seen[q, DEPTH] - depth
                    across = 0.5 * (abs(seen[q, DX] - away[0]) + abs(seen[q, DY] - away[1]))
                    bends = seen[q, BEND] + bend
                    is_hidden |= seen[q, COVERS] > 0 and ahead + across + bends < -_TOUCHING * across
                    if not (is_full and ahead - across - bends > _TOUCHING * across):  # else it is behind the new one
                        for c in range(COLUMNS):
                            seen[kept, c] = seen[q, c]
                        kept += 1
                        if bends > 0 and abs(ahead) < across + bends:
                            turn = ti.Vector([seen[q, DX] - away[0], seen[q, DY] - away[1]])
                            is_coarse |= bends > _BENT * turn.norm()
                found = kept
                place = -1 if is_hidden else found
                if place == MOST:
                    is_coarse = True
                    place = farthest_of(depth - 0.5 * (abs(away[0]) + abs(away[1])), is_full, seen)
                if place >= 0:
                    for c in ti.static(range(BULGE + 1)):
                        seen[place, c] = first[c]
                        if sign != 0 and seen[MOST, INDEX] < 0:
                            seen[MOST, c] = second[c]
                    if sign != 0 and seen[MOST, INDEX] < 0:
                        seen[MOST, INDEX] = n
                        seen[MOST, SIGN] = sign
                    seen[place, INDEX] = n
                    seen[place, COVERS] = ti.select(is_full, 1.0, 0.0)
                    seen[place, DEPTH] = depth
                    seen[place, DX] = away[0]
                    seen[place, DY] = away[1]
                    seen[place, BEND] = bend
                    found = ti.max(found, place + 1)
    is_kept = False
    for q in range(found):
        is_kept |= seen[q, INDEX] == seen[MOST, INDEX]
    seen[MOST, INDEX] = ti.select(is_kept, seen[MOST, INDEX], -1.0)
    return found + (MOST + 1) * ti.select(is_tiny, 2, ti.select(is_coarse, 1, 0))


@ti.func
def has_top(here: ti.template()):
    """Whether a level rises from all corners of a square to a top that may be above 0, and is round.

    Levels of straight edges have one slope at two corners or more; their lines are exact in larger squares.
    """
    rises = True
    top = here[SIDES, 0]
    for c in range(SIDES):
        at = corner_of(c)
        slope = ti.Vector([here[c, 1], here[c, 2]])
        following = ti.Vector([here[(c + 1) % SIDES, 1], here[(c + 1) % SIDES, 2]])
        outwards = slope.dot(at)
        rises &= outwards < 0 and slope.cross(following) > _ROUND * slope.norm() * following.norm()
        top = ti.max(top, here[c, 0] - outwards)
    return rises and top > 0


@ti.func
def bends_of(shape: ti.template(), n, x, y, size, middle, slope, away):
    """How far the level and the depth are from linear at the corners of a square; ``middle``: both at its centre."""
    off = 0.0
    bend = 0.0
    for c in range(SIDES):
        at = corner_of(c)
        there = shape_at(shape, n, x + size * at[0], y + size * at[1])
        off = ti.max(off, abs(stop_gradient(there[0]) - middle[0] - slope.dot(at)))
        bend = ti.max(bend, abs(stop_gradient(there[1]) - middle[1] - away.dot(at)))
    return off, bend


@ti.func
def lines_of(count, here: ti.template(), table: ti.template()):
    """The edge between the places where a shape crosses the sides of a square, as one line or two.

    Returns whether arcs between them are nearly straight, both lines, and the sign of the second one, 0 if there is
    none.  An arc between two places of one side has two chords.  Places without an arc have their tangents, as beside a
    corner of a polygon.
    """
    rows = ti.min(count, ROWS)
    start = ti.select(here[0, 0] > 0, 0, 1)
    step, turned = step_to_mate(count, start, table)
    is_straight = turned < 4.0 * _BENT and (count == 2 or count == 4)
    meeting, apart = meeting_of(2, table)
    is_arc = count == 2 and turned < _TURNED and not (meets(meeting, apart) and is_cone(meeting, here))
    is_arc = is_straight or is_arc
    first = ti.Vector([0.0] * 4)
    second = ti.Vector([0.0] * 4)
    at = ti.Vector([0.0, 0.0])
    for k in range(2):
        a = (start + k * ti.select(count == 4, 2, 1)) % rows
        b = (a + ti.select(k == 0, step, rows - step)) % rows if count == 2 else (a + step) % rows
        at = border_place(a, table)
        n = ti.Vector([table[a, NORMAL_X], table[a, NORMAL_Y]])
        line = ti.Vector([-n.dot(at), n[0], n[1], 0.0])
        chord, slopes = chord_of(a, b, table)
        if (is_arc or count > 2 or n.norm_sqr() == 0) and chord.norm() > _SHORT:
            bulge = ti.select(chord.cross(n) > 0, 1.0, -1.0) * (slopes[1] - slopes[0]) / 8.0 * chord.norm()
            bulge = ti.select(is_arc, bulge, 0.0)
            line = line_through(at, at + chord, n, bulge)
            is_cap = count == 2 and abs(bulge) > _FLAT and line[NX] * line[NY] == 0  # along a side
            if is_cap:
                middle = at + 0.5 * chord - bulge * ti.Vector([line[NX], line[NY]])
                line = line_through(at, middle, n, 0.25 * bulge)
        first, second = second, line
    sign = ti.select(first[S] + first[NX] * at[0] + first[NY] * at[1] > 0, -1.0, 1.0)
    is_one = abs(first[NX] * second[NY] - first[NY] * second[NX]) < _FLAT and count < 4
    return is_straight, first, second, ti.select(is_one or (count != 2 and count != 4), 0.0, sign)


@ti.func
def line_through(p, q, inwards, bulge):
    """The line through two points, with its normal on the side of a vector."""
    n = ti.Vector([p[1] - q[1], q[0] - p[0]]).normalized()
    n *= ti.select(n.dot(inwards) > 0, 1.0, -1.0)
    return ti.Vector([-n.dot(p), n[0], n[1], bulge])


@ti.func
def farthest_of(depth, is_full, seen: ti.template()):
    """The place in the full table of the farthest shape, which a new shape replaces; -1 for the new one itself.

    The distance of a shape is that of its nearest point in the square.  One of the shapes that fill the square stays,
    since otherwise the background would be visible.
    """
    full = ti.select(is_full, 1.0, 0.0)
    for q in range(MOST):
        full += seen[q, COVERS]
    place = -1
    farthest = ti.select(is_full and full < 2, -ti.math.inf, depth)
    for q in range(MOST):
        least = seen[q, DEPTH] - 0.5 * (abs(seen[q, DX]) + abs(seen[q, DY]))
        if least > farthest and (seen[q, COVERS] == 0 or full >= 2):
            farthest = least
            place = q
    return place


@ti.func
def order_of(i, j, seen: ti.template()):
    """1 where surface i is before surface j in all of the pixel, -1 where it is behind, 0 where they may swap."""
    ahead = seen[j, DEPTH] - seen[i, DEPTH]
    reach = (0.5 + _TOUCHING) * (abs(seen[j, DX] - seen[i, DX]) + abs(seen[j, DY] - seen[i, DY]))
    reach += seen[i, BEND] + seen[j, BEND]
    is_first = ahead > 0 or (ahead == 0 and seen[j, INDEX] > seen[i, INDEX])
    return 0 if abs(ahead) < reach else (1 if is_first else -1)
