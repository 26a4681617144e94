"""Pixels in which an edge bends, or that it crosses more than once: divided into squares in which it is straight.

``edge`` and the like know the level at the pixel's centre alone.  The engine notes the code that computes it, so that
it can be computed at other positions (``record/levels.py``).  Its values at the corners of a square show whether it is
linear there.  Where it is not, and may be 0, the square is divided into four.
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
from taichi_ext.boundary.polygons import FINEST, coarsest_square, middle_of_square

_POINTS = 5  # of a square, at which a level is taken: the centre, and the corners in their order
_BENT = 0.0215  # of a square: from where on an edge is not straight; what a kink cuts off is then below 0.001
_AWAY = 4.0  # squares: edges that are farther away are not looked for
_ASIDE = (0.5, 0.2)  # where a level is taken that may be flat at the centre; thin lines have other directions
_NARROW = 1e-2  # a normal along an axis counts as turned by this much, where a formula divides by its component


def level_at(level: Any, x: Any, y: Any) -> Any:
    """The level at another position, given relative to the pixel's centre; traced by the engine."""
    leave_to_engine("level_at", level)


recorded(level_at)


@ti.func
def divided_pixel(level: ti.template(), centre, slope_there, is_root: ti.template(), has_motion: ti.template()):
    """Whether the pixel has to be divided; what is covered of it; and 0, with the tangent of that.

    With ``is_root`` the last is that of the mean of the level's root.
    """
    area = 0.0 * centre
    motion = 0.0 * centre
    is_divided = False
    depth = 0
    place = ti.select(is_far(level, centre, slope_there), 4**FINEST, 0)
    here = ti.Vector([0.0] * _POINTS)
    while place < 4**FINEST:
        size = 0.5**depth
        middle = middle_of_square(place, depth)
        for k in range(_POINTS):
            corner = corner_of(k)
            here[k] = stop_gradient(level_at(level, middle[0] + size * corner[0], middle[1] + size * corner[1]))
        gx = 0.5 * (here[1] + here[2] - here[3] - here[4])
        gy = 0.5 * (here[1] - here[2] - here[3] + here[4])
        g = ti.sqrt(gx * gx + gy * gy)
        mean = 0.25 * (here[1] + here[2] + here[3] + here[4])
        off = abs(mean - here[0]) + 0.25 * abs(here[1] - here[2] + here[3] - here[4])
        reach = 0.5 * (abs(gx) + abs(gy)) + 2.0 * off
        if depth < FINEST and off > _BENT * g and abs(here[0]) <= reach:
            depth += 1
        elif depth == 0:
            place = 4**FINEST
        else:
            is_divided = True
            chords = ti.Matrix([[0.0] * 4] * 2)
            covered = put_chords(here, chords)
            for c in range(2):
                weight = 0.0 * centre
                dx = 0.5 * (chords[c, 0] + chords[c, 2])
                dy = 0.5 * (chords[c, 1] + chords[c, 3])
                if ti.static(is_root):
                    average = (mean + 2.0 * here[0]) / 3.0  # of a quadratic level
                    if c == 0 and average > -reach:
                        weight = mean_of_inverse_root(average, gx, gy, average > 4.0 * reach)
                    dx = 0.0
                    dy = 0.0
                elif g > 0:
                    weight = ti.sqrt((chords[c, 2] - chords[c, 0]) ** 2 + (chords[c, 3] - chords[c, 1]) ** 2) / g
                if weight > 0:
                    there = level_at(level, middle[0] + size * dx, middle[1] + size * dy)
                    covered += 2.0 / 3.0 * weight * stop_gradient(there)  # the edge bulges out between its ends
                    motion += size * size * weight * (there - stop_gradient(there))
            area += size * size * ti.max(0.0, ti.min(1.0, covered))
            place += 4 ** (FINEST - depth)
            depth = coarsest_square(place)
    return is_divided, area, motion


@ti.func
def is_far(level: ti.template(), centre, slope):
    """Whether no edge can be in the pixel, by the slope at the centre, and by how it changes in one direction."""
    there = stop_gradient(level_at(level, _ASIDE[0], _ASIDE[1]))
    bend = abs(there - centre - _ASIDE[0] * slope[0] - _ASIDE[1] * slope[1])
    return abs(centre) > _AWAY * (0.5 * (abs(slope[0]) + abs(slope[1])) + 2.0 * bend)


@ti.func
def corner_of(k):
    """The centre of a square of size 1, and its corners."""
    dx = ti.select(k == 0, 0.0, ti.select(k <= 2, 0.5, -0.5))
    dy = ti.select(k == 0, 0.0, ti.select(k == 1 or k == 4, 0.5, -0.5))
    return ti.Vector([dx, dy])


@ti.func
def put_chords(here, chords: ti.template()):
    """Put the ends of the edges in a square of size 1 into the table; returns the area of the polygon inside of them.

    They go through the places on its sides where the level is 0, which neighbours see at the same place.
    """
    doubled = 0.0
    count = 0
    is_open = False
    for k in range(8):  # twice around: an edge may end on a side that comes before that on which it starts
        a = here[1 + k % 4]
        b = here[1 + (k + 1) % 4]
        start = corner_of(1 + k % 4)
        end = corner_of(1 + (k + 1) % 4)
        if a > 0 and b > 0:
            if k < 4:
                doubled += end[0] * start[1] - end[1] * start[0]
        elif a > 0 or b > 0:
            x = start[0] + a / (a - b) * (end[0] - start[0])
            y = start[1] + a / (a - b) * (end[1] - start[1])
            if k < 4:
                doubled += ti.select(a > 0, x * start[1] - y * start[0], end[0] * y - end[1] * x)
            if a > 0 and k < 4:
                chords[count, 0] = x
                chords[count, 1] = y
                count += 1
                is_open = True
            elif b > 0 and is_open:
                chords[count - 1, 2] = x
                chords[count - 1, 3] = y
                doubled += x * chords[count - 1, 1] - y * chords[count - 1, 0]
                is_open = False
    return 0.5 * doubled


@ti.func
def mean_of_inverse_root(level, gx, gy, is_smooth):
    """The mean of level ** -0.5 / 2 over a square of size 1 where level > 0, for a linear level: see ``sqrt_edge``."""
    u = ti.max(abs(gx), abs(gy))
    v = ti.max(ti.min(abs(gx), abs(gy)), _NARROW * u)
    total = 0.0 * level
    for k in ti.static(range(4)):
        z = ti.max(0.0, level + 0.5 * (u + v, u - v, v - u, -u - v)[k])
        total += (1.0, -1.0, -1.0, 1.0)[k] * z * ti.sqrt(z)
    mean = 0.5 / ti.sqrt(ti.max(level, 1e-20))
    if u > 0 and not is_smooth:
        mean = 2.0 / 3.0 * total / (u * v)
    return mean
