"""The area of a pixel that an edge covers, and its tangent.

``edge`` and similar functions only get the level at the pixel's centre.  The engine records the code that computes it,
so that it can be computed at other positions (``record/levels.py``).  Near an edge, it is computed at the centre and
the corners of the pixel.  These span four triangles, and in each the edge is a straight chord.  If the level is far
from linear, the pixel is divided into four squares, and these again.

Of a triangle of area T with the levels u, v and w at its corners, u of another sign than v and w, the chord cuts off
the area ``T u^2 / ((u - v) (u - w))``.  Its derivative with respect to the level, ``2 T u / ((u - v) (u - w))``, is the
length of the chord divided by the gradient of the level.
"""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from taichi_ext.backend import ti
from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.kernel_scope import leave_to_engine, recorded
from taichi_ext.boundary.polygons import WHOLE, middle_of_square, side_of_square

_POINTS = 5  # of a square, at which a level is taken: the centre, and the corners in their order
_BENT = 0.003  # of a pixel: from where on an edge is not straight
_BENT_INSIDE = 0.0215  # the same for squares that pixels are divided into
_AWAY = 4.0  # squares: edges that are farther away are not looked for
_SMOOTH = 8.0  # the same, from where on a root is as at the centre
_ASIDE = (0.5, 0.2)  # where a level is taken that may be flat at the centre; thin lines have other directions
_TIE = 1e-15  # of the level at the centre
_LEAST = 1e-20
_NARROW = 1e-2  # a normal along an axis counts as turned by this much, where a formula divides by its component


@recorded
def level_at(level: object, x: object, y: object) -> object:
    """The level at another position, given relative to the pixel's centre; traced by the engine."""
    leave_to_engine("level_at", level)


@ti.func
def area_of_pixel(level: ti.template(), centre, slope, zero, is_root: ti.template()):
    """The covered area of the pixel; and 0, with its tangent, or with ``is_root`` that of the level's mean root.

    ``centre`` is the level at the pixel's centre, and ``zero`` a 0 of its type.
    """
    value = stop_gradient(centre)
    area = zero
    motion = zero
    side = WHOLE
    place = 0
    away = ti.static(_SMOOTH if is_root else _AWAY)
    if is_far(level, value, slope, away):
        place = WHOLE**2
        if value > 0:
            area = zero + 1.0
            if ti.static(is_root):
                motion = 0.5 / ti.sqrt(value) * (centre - value)
    here = ti.Vector([0.0] * _POINTS)
    while place < WHOLE**2:
        size = side / WHOLE
        middle = middle_of_square(place, size)
        put_levels(level, middle, size, here)
        gx = 0.5 * (here[1] + here[2] - here[3] - here[4])
        gy = 0.5 * (here[1] - here[2] - here[3] + here[4])
        mean = 0.25 * (here[1] + here[2] + here[3] + here[4])
        off = abs(mean - here[0]) + 0.25 * abs(here[1] - here[2] + here[3] - here[4])
        reach = 0.5 * (abs(gx) + abs(gy)) + 2.0 * off
        g = ti.sqrt(gx * gx + gy * gy)
        bent = ti.select(side == WHOLE, _BENT, _BENT_INSIDE) * g
        if side > 1 and off > bent and abs(here[0]) <= reach:
            side = side // 2
        else:
            if ti.static(is_root):
                average = (mean + 2.0 * here[0]) / 3.0  # of a quadratic level
                if average > -reach:
                    weight = mean_of_inverse_root(average, gx, gy, average > _SMOOTH * reach)
                    there = level_at(level, middle[0], middle[1])
                    motion += size * size * weight * (there - stop_gradient(there))
            else:
                covered = zero
                slope_within = ti.select(off > bent, 0.0, g)
                x = 0.5
                y = 0.5
                for k in range(_POINTS - 1):
                    chord = chord_of(here[0], here[1 + k], here[1 + (k + 1) % 4], slope_within)
                    covered += chord[0]
                    if chord[1] > 0:
                        dx = chord[2] * x + chord[3] * y
                        dy = chord[2] * y - chord[3] * x
                        there = level_at(level, middle[0] + size * dx, middle[1] + size * dy)
                        covered += 2.0 / 3.0 * chord[1] * stop_gradient(there)  # the edge bulges out between its ends
                        motion += size * size * chord[1] * (there - stop_gradient(there))
                    x, y = y, -x
                area += size * size * ti.max(0.0, ti.min(1.0, covered))
            place += side * side
            side = side_of_square(place)
    return area, motion


@ti.func
def put_levels(level: ti.template(), middle, size, here: ti.template()):
    """Put the levels at the centre and the corners of a square into the table.

    A corner of level 0 has the other sign than the centre, so two squares see an edge on the side between them.
    """
    x = 0.0
    y = 0.0
    for k in range(_POINTS):
        there = stop_gradient(level_at(level, middle[0] + size * x, middle[1] + size * y))
        nearly = ti.select(k == 0 or here[0] == -_LEAST, -_LEAST, -_TIE * here[0])
        here[k] = ti.select(there == 0, nearly, there)
        x, y = ti.select(k == 0, 0.5, y), ti.select(k == 0, 0.5, -x)


@ti.func
def chord_of(m, p, q, g):
    """The chord in a triangle of the centre of a square of size 1, and of two corners, from the levels there.

    Returns the area inside, the length of the chord divided by the gradient, and the weights of both corners in its
    middle.  The gradient is g, or that in the triangle if g is 0.
    """
    by_first = (m > 0) != (p > 0)
    by_second = (m > 0) != (q > 0)
    by_side = (p > 0) != (q > 0)
    chord = ti.Vector([ti.select(m > 0, 0.25, 0.0), 0.0, 0.0, 0.0])
    if by_first or by_second:
        tip = ti.select(by_side, ti.select(by_first, p, q), m)
        across = abs(
            ti.select(by_first, m - p, 1.0) * ti.select(by_second, m - q, 1.0) * ti.select(by_side, p - q, 1.0)
        )
        part = 0.25 * tip * tip / across
        is_shared = p == -_TIE * m and q == -_TIE * m
        chord[0] = ti.select(tip > 0, part, 0.25 - part)
        own = ti.sqrt((q - p) ** 2 + (p + q - 2.0 * m) ** 2)
        chord[1] = ti.select(is_shared, 0.25, 0.5) * abs(tip) / across * ti.select(g > 0, own / g, 1.0)
        chord[2] = 0.5 * (ti.select(by_first, m / (m - p), 0.0) + ti.select(by_side, q / (q - p), 0.0))
        chord[3] = 0.5 * (ti.select(by_second, m / (m - q), 0.0) + ti.select(by_side, p / (p - q), 0.0))
    return chord


@ti.func
def is_far(level: ti.template(), centre, slope, away):
    """Whether no edge can be in the pixel, by the slope at the centre, and by how it changes in one direction."""
    there = stop_gradient(level_at(level, _ASIDE[0], _ASIDE[1]))
    bend = abs(there - centre - _ASIDE[0] * slope[0] - _ASIDE[1] * slope[1])
    return abs(centre) > away * (0.5 * (abs(slope[0]) + abs(slope[1])) + 2.0 * bend)


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
