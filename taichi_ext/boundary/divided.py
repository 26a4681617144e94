"""The area of a pixel that an edge covers, and its tangent.

``edge`` and similar functions only get the level at the pixel's centre.  The engine records the code that computes it,
so that it can be computed at other positions (``record/levels.py``).  Near an edge, levels and slopes at the corners of
the pixel tell where its sides are crossed: Newton's steps from both ends find the places, also of an edge that comes in
between two corners and goes out again.  Edges are arcs between these places (``arcs.py``).  A pixel whose edges are no
such arcs, nor meet in one corner, is divided into four squares, and these again.

The area follows from Green's theorem: a quarter of the length of the border that is inside, and for each arc the
triangle that it spans with the centre.  Its derivative is the integral of ``level_dot / |grad level|`` along the arcs.
"""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false, reportIndexIssue=false, reportOptionalCall=false, reportOptionalOperand=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any

from taichi_ext.backend import ti
from taichi_ext.boundary.arcs import GAUSS, OFF, STEEPEST, border_place, chord_of, meeting_of, meets, point_of_arc
from taichi_ext.boundary.crossings import BX, BY, NX, NY, corner_of
from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.kernel_scope import leave_to_engine, recorded
from taichi_ext.boundary.squares import (
    BESIDE_FLAT,
    SIDES,
    TRIES,
    WHOLE,
    least_side,
    middle_of_square,
    side_of_square,
    side_of_try,
)

_AT, _LEVEL, _SLOPE = range(3)  # of a place on a side: how far along it, the level there, its slope along the side
_ROWS = 8  # of the table of places
_MOST, _TURNS = 40, 12  # levels on one side, and between two places of different signs
_COARSE = 0.1  # of the side: how far places may be from each other where the slope at one of them tells of an edge
_APART = 0.25  # of the side: by how much Newton's steps from both ends may differ
_AHEAD = 12  # places on a stack
_CLOSE = 1e-3  # of the side: from where one more of Newton's steps is enough
_BENT = 0.003  # of a pixel: from where on an edge is not straight
_BENT_INSIDE = 0.0215  # the same for squares that pixels are divided into
_KINKED = 0.1  # of a pixel: the same where arcs are right
_AWAY = 4.0  # squares: edges that are farther away are not looked for
_ASIDE = (0.5, 0.2)  # where a level is taken that may be flat at the centre; thin lines have other directions
_TIE = 1e-15  # of the level at the centre
_FLAT = 1e-6  # of the same: a slope that is none
_LEAST = 1e-20
_OTHER = 0.1  # of the square: by how much tangent planes may miss a corner, else there are other edges
_ALONG = 0.9  # of the slope: its component across a side along which an edge runs
_SHARED = 2e-6  # of a pixel, a few roundings of float32: an edge that is so near to a side lies on it
_ON_SIDE = 1e-4  # of the square: how near an arc on a side is to it, with roundings


@recorded
def level_at(level: object, x: object, y: object) -> Any:
    """The level at another position, given relative to the pixel's centre, and its slope; traced by the engine."""
    leave_to_engine("level_at", level)


@ti.func
def area_of_pixel(level: ti.template(), centre, slope, zero):
    """The covered area of the pixel; and 0, with its tangent.

    ``centre`` is the level at the pixel's centre, and ``zero`` a 0 of its type.
    """
    value = stop_gradient(centre)
    area = zero
    motion = zero
    side = WHOLE
    place = 0
    done = 0
    if is_far(level, value, slope):
        place = WHOLE**2
        if value > 0:
            area = zero + 1.0
    here = ti.Matrix([[0.0] * 3] * (SIDES + 1))
    table = ti.Matrix([[0.0] * (NY + 1)] * _ROWS)
    while place < WHOLE**2:
        size = side / WHOLE
        middle = middle_of_square(place, size)
        put_levels(level, middle, size, here)
        level_here = here[SIDES, 0]
        gx = here[SIDES, 1]
        gy = here[SIDES, 2]
        g = ti.sqrt(gx * gx + gy * gy)
        mean = 0.25 * (here[0, 0] + here[1, 0] + here[2, 0] + here[3, 0])
        off = abs(mean - level_here) + 0.25 * abs(here[0, 0] - here[1, 0] + here[2, 0] - here[3, 0])
        reach = 0.5 * (abs(gx) + abs(gy)) + 2.0 * off
        is_least = side <= least_side(done)
        can_divide = not is_least and abs(level_here) <= reach
        bent = ti.select(side == WHOLE, _BENT, _BENT_INSIDE) * g
        is_divided = can_divide and off > bent
        kink = level_here - mean  # of a cubic level it is 0
        for c in range(SIDES):
            at = corner_of(c)
            kink += 0.125 * (here[c, 1] * at[0] + here[c, 2] * at[1])
        count, inside = cross_sides(level, middle, size, here, table)
        first = ti.select(here[0, 0] > 0, 0, 1)  # the row from which a part of the border outside starts
        step, turned = step_to_mate(count, first, table)
        is_arcs = count > 0 and count <= SIDES and turned < STEEPEST
        if count > 0:
            is_divided = can_divide and abs(kink) > ti.max(bent, ti.select(is_arcs, _KINKED / size * g, 0.0))
        is_divided = is_divided or (not is_least and count > 0 and not is_arcs)
        is_tied = False  # whether an edge lies on a side, so that the other square sees it, too
        for c in range(SIDES):
            tie = -_TIE * level_here
            is_tied = is_tied or (here[c, 0] == tie and here[(c + 1) % SIDES, 0] == tie)
        is_there = False
        meeting, apart = meeting_of(ti.min(count, 2), table)
        may_meet = count == 2 and abs(kink) > bent and meets(meeting, apart) and is_cone(meeting, here)
        is_divided = is_divided or (may_meet and side == WHOLE)  # a small shape beside a corner is seen so
        for attempt in range(2):  # a corner, and arcs
            is_corner = attempt == 0
            if ti.select(is_corner, may_meet and side < WHOLE, not is_divided and not is_there):
                own, change, is_there = area_by_arcs(
                    level, middle, size, zero, count, first, step, is_arcs, is_corner, meeting, is_tied, table
                )
                if is_there or (is_least and not is_corner):
                    area += size * size * ti.max(0.0, ti.min(1.0, own + 0.25 * inside))
                    motion += change
        is_divided = not is_least and not is_there
        if is_divided:
            side = side // 2
        else:
            done += 1
            place += side * side
            side = side_of_square(place)
    return area, motion


@ti.func
def put_levels(level: ti.template(), middle, size, here: ti.template()):
    """Put the level and its slope, in the square, at the corners and the centre into the table.

    A corner on the border of the pixel, at which an edge runs along that border, has the other sign than the centre, so
    both pixels see an edge that is on the border between them.  Where a level only touches 0, there is no edge.
    """
    is_beside = False
    for n in range(2 * (SIDES + 1)):
        k = n // 2
        c = SIDES - k  # the centre first
        if n % 2 == 0 or is_beside:
            at = corner_of(c) * ti.select(c == SIDES, 0.0, 1.0)
            aside = -BESIDE_FLAT / size * ti.select(c == SIDES, ti.Vector([1.0, 0.7]), 2.0 * at)
            if is_beside:
                at += aside
            value, slope = level_at(level, middle[0] + size * at[0], middle[1] + size * at[1])
            there = stop_gradient(value)
            rise = size * slope.dot(aside)
            if is_beside and abs(there - rise) > 0.25 * abs(rise):  # as at the bottom of a parabola
                slope *= 0.0
            is_same = size * slope.norm() <= _FLAT * abs(here[SIDES, 0])  # there is no edge
            is_same = is_same and not (is_beside and there == 0)
            if not is_beside:
                here[c, 0] = there
            is_beside = n % 2 == 0 and there == 0 and slope.norm() == 0
            g = slope.norm()
            is_tied = False
            for m in ti.static(range(2)):
                is_outer = abs(middle[m] + size * at[m]) > 0.49
                is_tied = is_tied or (is_outer and abs(slope[m]) > _ALONG * g)
            if k > 0 and not is_beside and here[SIDES, 0] != -_LEAST:
                if is_same and here[c, 0] == 0:
                    here[c, 0] = _TIE * here[SIDES, 0]
                elif is_tied and abs(here[c, 0]) <= _SHARED * g:
                    here[c, 0] = -_TIE * here[SIDES, 0]
            elif k == 0 and here[c, 0] == 0:
                here[c, 0] = -_LEAST
            here[c, 1] = size * slope[0]
            here[c, 2] = size * slope[1]


@ti.func
def cross_sides(level: ti.template(), middle, size, here: ti.template(), table: ti.template()):
    """Put the places where the level is 0 on the sides of a square, with its normals, into the table.

    On each side, everything before the place ``low`` has been searched; the places ahead, where the level is known, are
    on a stack.  Returns the number of places, and how much of the border is inside.
    """
    count = 0
    inside = 0.0 * size
    ahead = ti.Matrix([[0.0] * 3] * _AHEAD)
    for c in range(SIDES):
        start = corner_of(c)
        way = corner_of(c + 1) - start
        low = place_of(0.0, c, way, here)
        high = place_of(1.0, (c + 1) % SIDES, way, here)
        depth = 0
        turn = 0
        tries = 0
        inside += ti.select(high[_LEVEL] > 0, 1.0, 0.0)
        for _ in range(_MOST):
            if depth >= 0:
                t = next_place(low, high, turn)
                is_done = t < 0
                if not is_done:
                    aside = ti.select(2.0 * t < low[_AT] + high[_AT], 1.0, -1.0) * BESIDE_FLAT / size
                    t = ti.max(low[_AT], ti.min(high[_AT], t + side_of_try(tries) * aside))
                    at = start + t * way
                    value, slope = level_at(level, middle[0] + size * at[0], middle[1] + size * at[1])
                    there = stop_gradient(value)
                    along = size * slope.dot(way)
                    is_changed = (low[_LEVEL] > 0) != (high[_LEVEL] > 0)
                    rise = ti.select(low[_LEVEL] > 0, -along, along)
                    is_close = rise > 0 and (abs(there) <= _CLOSE * rise or tries > 0)
                    tries = ti.select(there == 0 and slope.norm() == 0, (tries + 1) % TRIES, 0)
                    if tries == 0:
                        turn += ti.select(is_changed, 1, 0)
                        is_done = depth >= _AHEAD
                        steepest = ti.max(abs(along), ti.max(abs(low[_SLOPE]), abs(high[_SLOPE])))
                        is_jump = abs(high[_LEVEL] - low[_LEVEL]) > 4.0 * steepest * (high[_AT] - low[_AT])
                        if is_changed and (is_close or turn > _TURNS or is_done):
                            found = ti.max(low[_AT], ti.min(high[_AT], t - ti.select(rise > 0, there / along, 0.0)))
                            if abs(found - ti.round(found)) < 2.0 * _SHARED / size:
                                found = ti.round(found)
                            at = start + found * way
                            inside += ti.select(low[_LEVEL] > 0, found, -found)
                            if count < _ROWS:
                                g = ti.max(slope.norm(), _LEAST)
                                table[count, BX] = at[0]
                                table[count, BY] = at[1]
                                is_sloped = is_close or is_jump  # else the slope may be that beyond a corner
                                table[count, NX] = ti.select(is_sloped, slope[0] / g, 0.0)
                                table[count, NY] = ti.select(is_sloped, slope[1] / g, 0.0)
                            count += 1
                            turn = 0
                            is_done = True
                        elif not is_done:
                            for k in ti.static(range(3)):
                                ahead[depth, k] = high[k]
                            depth += 1
                            high = ti.Vector([t, there, along])
                if is_done:
                    low = high
                    depth -= 1
                    if depth >= 0:
                        for k in ti.static(range(3)):
                            high[k] = ahead[depth, k]
    return count, inside


@ti.func
def place_of(t, c, way, here: ti.template()):
    """The place on a side at a corner."""
    return ti.Vector([t, here[c, 0], here[c, 1] * way[0] + here[c, 2] * way[1]])


@ti.func
def next_place(low, high, turn):
    """Where between two places on a side the level may be 0, or come near it; -1 if it is not."""
    t = -1.0
    width = high[_AT] - low[_AT]
    from_low = low[_AT] - low[_LEVEL] / low[_SLOPE]
    from_high = high[_AT] - high[_LEVEL] / high[_SLOPE]
    is_low = low[_LEVEL] * low[_SLOPE] < 0 and from_low <= high[_AT]
    is_high = high[_LEVEL] * high[_SLOPE] > 0 and from_high >= low[_AT]
    if (low[_LEVEL] > 0) != (high[_LEVEL] > 0):
        t = low[_AT] + 0.5 * width
        is_one = is_low and is_high and abs(from_low - from_high) < _APART
        if turn < _TURNS // 2 and (is_low or is_high) and (is_one or width < _COARSE):
            is_low = is_low and (not is_high or abs(low[_LEVEL]) < abs(high[_LEVEL]))
            t = ti.select(is_low, from_low, from_high)
    elif is_low and is_high and from_low < from_high and width > _CLOSE:  # where both tangents meet
        rise = high[_LEVEL] - high[_AT] * high[_SLOPE] - low[_LEVEL] + low[_AT] * low[_SLOPE]
        t = rise / (low[_SLOPE] - high[_SLOPE])
    elif is_low != is_high and width > _COARSE:  # another edge may be in between
        t = low[_AT] + 0.5 * width
    return t


@ti.func
def step_to_mate(count, first, table: ti.template()):
    """The number of rows from the start of each part outside to the other end of its arc, and how much arcs turn."""
    step = 1
    turned = 2.0 * STEEPEST + 0.0 * table[0, BX]
    for k in range(2):
        most = 0.0 * turned
        new = ti.select(k == 0, 1, count - 1)
        for r in range(count):
            if (r + first) % 2 == 0 and most < STEEPEST:
                chord, slopes = chord_of(r, (r + new) % count, table)
                most = ti.max(most, ti.max(abs(slopes[0]), abs(slopes[1])))
                for n in range(2):
                    row = (r + n * new) % count
                    if chord.cross(ti.Vector([table[row, NX], table[row, NY]])) <= 0:
                        most = 2.0 * STEEPEST
        if most < turned:
            turned = most
            step = new
    return step, turned


@ti.func
def is_cone(tip, here: ti.template()):
    """Whether tangent planes of the level at the corners and the centre of a square are 0 at a point within it.

    So it is where a level is made of two linear ones that are 0 there, and also for the distance from that point.
    """
    is_one = True
    for c in range(SIDES + 1):
        at = corner_of(c) * ti.select(c == SIDES, 0.0, 1.0)
        slope = ti.Vector([here[c, 1], here[c, 2]])
        is_one = is_one and abs(here[c, 0] + slope.dot(tip - at)) <= _OTHER * slope.norm() + _LEAST
    return is_one


@ti.func
def area_by_arcs(
    level: ti.template(),
    middle,
    size,
    zero,
    count,
    first,
    step,
    is_arcs,
    is_corner,
    meeting,
    is_tied,
    table: ti.template(),
):
    """The area between arcs and the centre, 0 with its tangent, and whether edges are there.

    The terms of an arc are at the two points of Gauss' rule for its chord, one on each side of it.  The edge is off its
    arc by ``t^2 (1 - t)^2`` times a number.  At a corner, two straight edges end in ``meeting``.  Without arcs, the
    sides are scan lines, for the mean length of edges.
    """
    area = 0.0 * size
    motion = zero
    is_there = is_arcs or is_corner or count == 0
    is_flat = False
    for n in range(TRIES * (ti.min(count, _ROWS) + ti.select(is_corner, 1, 0))):
        r = n // TRIES
        k = n % TRIES
        if k == 0 or is_flat:
            at = border_place(r, table)
            way = ti.Vector([table[r, NX], table[r, NY]])
            leaves = (r + first) % 2 == 0
            if is_corner:
                if r == count:
                    at = meeting + 0.0
                arm = meeting - at
                way = ti.Vector([-arm[1], arm[0]])
                if k == 0:
                    area += ti.select(leaves, 0.5, -0.5) * at.cross(meeting)
                at += 0.5 * arm
            elif is_arcs:
                mate = (r + ti.select(leaves, step, count - step)) % count
                chord, slopes = chord_of(r, mate, table)
                way = ti.Vector([-chord[1], chord[0]])
                if leaves and k == 0:
                    area += (
                        0.5 * (at[0] * chord[1] - at[1] * chord[0]) + (slopes[1] - slopes[0]) / 12.0 * chord.norm_sqr()
                    )
                at += point_of_arc(ti.static(GAUSS), chord, slopes)
            out = way * ti.select(way.dot(at) > 0, 1.0, -1.0) / ti.max(way.norm(), _LEAST)
            aside = side_of_try(k) * BESIDE_FLAT / size * out
            near = at + aside
            there, slope = level_at(level, middle[0] + size * near[0], middle[1] + size * near[1])
            g = ti.max(slope.norm(), _LEAST)
            is_flat = k + 1 < TRIES and stop_gradient(there) == 0 and slope.norm() == 0
            weight = 0.0 * size
            if (is_arcs or is_corner) and not is_flat:
                across = way.norm_sqr() / ti.max(abs(way.dot(slope)), _LEAST)
                beside = stop_gradient(there) / size - aside.dot(slope)
                weight = ti.select(is_corner, 1.0, 0.5) * size * across
                area += ti.select(is_corner, 0.0, 0.6) * beside * across
                is_there = is_there and abs(beside) * size < OFF * g
            elif not is_flat:  # the side on which the place is
                weight = 0.5 * size * ti.select(abs(at[0]) > abs(at[1]), abs(way[1]), abs(way[0])) / g
            if is_tied and (is_arcs or is_corner) and k < 2 and ti.max(abs(at[0]), abs(at[1])) > 0.5 - _ON_SIDE:
                weight *= 0.5
            if weight > 0:
                motion += weight * (there - stop_gradient(there))
    return area, motion, is_there


@ti.func
def is_far(level: ti.template(), centre, slope):
    """Whether no edge can be in the pixel, by the slope at the centre, and by how it changes in one direction."""
    there = stop_gradient(level_at(level, _ASIDE[0], _ASIDE[1])[0])
    bend = abs(there - centre - _ASIDE[0] * slope[0] - _ASIDE[1] * slope[1])
    return abs(centre) > _AWAY * (0.5 * (abs(slope[0]) + abs(slope[1])) + 2.0 * bend)
