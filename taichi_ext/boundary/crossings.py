"""Places where the edges of ``pixel`` cross the sides of a square, and the lengths of the edges from there on.

A search along a side finds the place where the value jumps, and the first condition that differs between its two sides.
Places are rows of a table, with the gradient of their level and the weight of their jump.
"""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false, reportIndexIssue=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from typing import Any

from taichi_ext.backend import ti
from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.kernel_scope import leave_to_engine, recorded
from taichi_ext.boundary.polygons import BULGE, NX, NY, SIDES, S, put_sides

VALUE, COUNT, SEEN, LEVEL, SLOPE, NEAR = range(6)  # results of a probe
PX, PY, GX, GY, WHICH, WEIGHT, COLUMNS = range(7)  # of the table of places where the sides of a square are crossed
PLACES = 3  # on one side of one of the smallest squares
_GAP = 1e-3  # of the square: how far behind the first place the search for another one starts
ALL = 2**30
_STEPS = 26  # of a search along a side
_MOST = 24  # conditions in one call: 2 to the power of this
_EQUAL = 1e-4  # relative: values that differ by less do not jump
_ALIKE = 0.3  # by which jumps may differ between the ends of a chord, relative
_TURN = 0.12  # by which the normals at its ends may be turned to it, radians
_LAYER = 1e-4  # of the square: how wide an edge is, such as that of a march which diverges next to a surface
_APART = 0.1  # of the square: by how much tangents may miss the point in which they meet
_OFF = 0.005  # of the square: by which the edge may be off the parabola between them


def probe(shade: object, x: object, y: object, which: object, mode: str) -> Any:
    """A call of the function that also returns facts about its conditions; traced by the engine."""
    leave_to_engine("probe", x)


recorded(probe)


@ti.func
def find_others(shade: ti.template(), side, c, size, crossed: ti.template(), jumps: ti.template()):
    """Put the places before and behind the first one on side c of a square into the tables."""
    first = (crossed[c, PX] - side[0]) * side[2] + (crossed[c, PY] - side[1]) * side[3]
    for k in range(1, PLACES):
        between = ti.Vector([0.0, first]) if k == 1 else ti.Vector([first + _GAP * size, size])
        low = probe(shade, side[0] + between[0] * side[2], side[1] + between[0] * side[3], ALL, "seen")
        high = probe(shade, side[0] + between[1] * side[2], side[1] + between[1] * side[3], ALL, "seen")
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
    scale = abs(low_value) + abs(high_value)
    shown = jump
    ends = ti.Vector([low_seen[0], high_seen])
    for _ in range(_STEPS):
        if has_jump(jump, scale):
            q = 0.5 * (low + high)
            here = probe(shade, side[0] + q * side[2], side[1] + q * side[3], ALL, "seen")
            value = stop_gradient(here[VALUE])
            if here[SEEN] == high_seen or (
                here[SEEN] != low_seen[0] and is_farther(value - low_value, high_value - value, scale)
            ):
                high = q
                high_seen = here[SEEN]
                high_value = value
            else:
                low = q
                low_seen = ti.Vector([here[SEEN], here[COUNT]])
                low_value = value
            jump = high_value - low_value
            scale = ti.max(scale, abs(low_value) + abs(high_value))
            if high - low > _LAYER * size:
                shown = jump
    last = low_seen[1]
    is_found = has_jump(jump, scale)
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
                shown_here = ti.select(abs(jump[e]) > _EQUAL * scale[e], shown[e], 0.0)
                jumps[row, e] = ti.select(along > 0, shown_here, -shown_here)
    is_alone = low_seen[0] == ends[0] and high_seen == ends[1]
    return ti.select(is_found, ti.select(is_alone, 1, SIDES), 0)


@ti.func
def has_jump(jump, scale):
    """Whether an entry of a value jumps; each has a scale of its own, since they may have different units."""
    found = False
    for e in ti.static(range(jump.n)):
        found |= abs(jump[e]) > _EQUAL * scale[e]
    return found


@ti.func
def is_farther(first, second, scale):
    """Whether the first of two differences is the larger one, its entries measured by their scales."""
    total = 0.0 * scale[0]
    for e in ti.static(range(scale.n)):
        if scale[e] > 0:
            total += (first[e] / scale[e]) ** 2 - (second[e] / scale[e]) ** 2
    return total > 0


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
            n, offset = tangent_at(s, x, y, crossed)
            normals += n.outer_product(n)
            weighted += n * offset
    across = ti.Vector([normals[1, 1] * weighted[0], normals[0, 0] * weighted[1]])
    found = (across - normals[0, 1] * ti.Vector([weighted[1], weighted[0]])) / normals.determinant()
    apart = 0.0
    for s in range(PLACES * SIDES):
        if crossed[s, WEIGHT] > 0:
            n, offset = tangent_at(s, x, y, crossed)
            apart = ti.max(apart, abs(n.dot(found) - offset))
    return ti.Vector([x + found[0], y + found[1], apart])


@ti.func
def tangent_at(s, x, y, crossed: ti.template()):
    """The tangent of an edge in place s of the table: its normal, and its distance from (x, y)."""
    n = ti.Vector([crossed[s, GX], crossed[s, GY]]).normalized()
    return n, n.dot(ti.Vector([crossed[s, PX] - x, crossed[s, PY] - y]))
