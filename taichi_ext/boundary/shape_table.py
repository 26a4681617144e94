"""The table of the shapes that a square shows, as code in the kernel of ``layers`` and ``nearest``."""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from typing import Any

from taichi_ext.backend import ti
from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.kernel_scope import leave_to_engine, recorded
from taichi_ext.boundary.polygons import WHOLE

MOST = 6  # shapes of which parts can be seen in one square; the row after them is for a second edge of one of them

# The columns of the table of the shapes that a pixel shows.
INDEX, COVERS, LEVEL, GX, GY, DEPTH, DX, DY, BEND, COLUMNS = range(10)
SIGN = COVERS  # of a second edge: 1 where the larger level counts, -1 where the smaller one does
_BENT = 0.04  # of a square: from where on an edge is not straight
_AWAY = 4.0  # squares: shapes that are farther outside are not looked at in the corners


@recorded
def shape_at(shape: object, n: object, x: object, y: object) -> Any:
    """Level, depth, value and alpha of shape n; traced by the engine, which checks them."""
    leave_to_engine("shape_at", n)


@recorded
def level_gradient(shape: object, name: str, value: object, *, at: object) -> Any:
    """The gradient of a level or depth at the position, without a tangent; traced by the engine."""
    leave_to_engine("level_gradient", value)


@ti.func
def collect(shape: ti.template(), count, x, y, size, seen: ti.template(), has_alpha: ti.template()):
    """Put the shapes that the square shows into the table; returns how many there are.

    It is ``MOST + 1`` more if the square should be divided.  Of transparent shapes, those that end in it.
    """
    found = 0
    is_coarse = False
    seen[MOST, INDEX] = -1.0
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
            is_hidden |= seen[q, COVERS] > 0 and ahead + seen[q, BEND] + 2.0 * across <= 0
        if not is_hidden:
            least = level
            most = level
            bend = 0.0
            off = 0.0
            corners = ti.Vector([0.0] * 4)
            for c in range(4):
                dx = (c % 2) - 0.5
                dy = (c // 2) - 0.5
                there = shape_at(shape, n, x + size * dx, y + size * dy)
                corner = stop_gradient(there[0])
                corners[c] = corner
                least = ti.min(least, corner)
                most = ti.max(most, corner)
                off = ti.max(off, abs(corner - level - slope[0] * dx - slope[1] * dy))
                bend = ti.max(bend, abs(stop_gradient(there[1]) - depth - away[0] * dx - away[1] * dy))
            if off > _BENT * slope.norm() and least - off < 0 and level + reach + off > 0:
                is_coarse = True
                if size * WHOLE < 1.5 and seen[MOST, INDEX] < 0:
                    put_second(shape, n, x, y, size, level, slope, corners, seen)
            is_full = level >= reach and least > 0
            if (level > -reach or most > 0) and not (has_alpha and is_full):
                kept = 0
                for q in range(found):
                    ahead = seen[q, DEPTH] - depth
                    across = 0.5 * (abs(seen[q, DX] - away[0]) + abs(seen[q, DY] - away[1]))
                    bends = seen[q, BEND] + bend
                    is_hidden |= seen[q, COVERS] > 0 and ahead + across + bends <= 0
                    if not (is_full and ahead - across - bends > 0):  # else it is behind the new one
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
                    seen[place, INDEX] = n
                    seen[place, COVERS] = ti.select(is_full, 1.0, 0.0)
                    seen[place, LEVEL] = level
                    seen[place, GX] = slope[0]
                    seen[place, GY] = slope[1]
                    seen[place, DEPTH] = depth
                    seen[place, DX] = away[0]
                    seen[place, DY] = away[1]
                    seen[place, BEND] = bend
                    found = ti.max(found, place + 1)
    is_kept = False
    for q in range(found):
        is_kept |= seen[q, INDEX] == seen[MOST, INDEX]
    seen[MOST, INDEX] = ti.select(is_kept, seen[MOST, INDEX], -1.0)
    return found + ti.select(is_coarse, MOST + 1, 0)


@ti.func
def put_second(shape: ti.template(), n, x, y, size, level, slope, corners, seen: ti.template()):
    """Put a second plane of the level of shape n, that of the corner farthest from the first one, into the last row.

    The level is the larger one of both, or the smaller one, as at a corner of a polygon or in a thin strip.
    """
    most = 0.0 * level
    at = ti.Vector([0.0, 0.0])
    for c in range(4):
        there = ti.Vector([(c % 2) - 0.5, (c // 2) - 0.5])
        off = corners[c] - level - slope.dot(there)
        if abs(off) > abs(most):
            most = off
            at = there
    sign = ti.select(most > 0, 1.0, -1.0)
    px = x + size * at[0]
    py = y + size * at[1]
    found = shape_at(shape, n, px, py)
    turned = size * level_gradient(shape, "level", found[0], at=(px, py))
    start = stop_gradient(found[0]) - turned.dot(at)
    worst = ti.max(0.0, sign * (start - level))
    for c in range(4):
        there = ti.Vector([(c % 2) - 0.5, (c // 2) - 0.5])
        both = ti.max(sign * (level + slope.dot(there)), sign * (start + turned.dot(there)))
        worst = ti.max(worst, abs(sign * corners[c] - both))
    if worst < abs(most):
        seen[MOST, INDEX] = n
        seen[MOST, SIGN] = sign
        seen[MOST, LEVEL] = start
        seen[MOST, GX] = turned[0]
        seen[MOST, GY] = turned[1]


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
    """1 where surface i is before surface j in all of the pixel, -1 where it is behind, 0 where they swap."""
    ahead = seen[j, DEPTH] - seen[i, DEPTH]
    reach = 0.5 * (abs(seen[j, DX] - seen[i, DX]) + abs(seen[j, DY] - seen[i, DY]))
    is_first = ahead > 0 or (ahead == 0 and seen[j, INDEX] > seen[i, INDEX])
    return 0 if abs(ahead) < reach else (1 if is_first else -1)
