"""Squares that pixels are divided into, and polygons in one of size 1 around 0, as code in the kernel.

Squares come in the order of letters Z in each other; a place counts the smallest ones before.  Polygons are given by
the lines of their sides.

Area and lengths follow from one operation, an interval on a line cut by half-planes: the area of a polygon is half the
sum of ``distance of the side from the centre * length of the side``.
"""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from taichi_ext.backend import ti

S, NX, NY, BULGE, KIND, OTHER, ENTRIES = range(7)  # the columns of the table of lines
WIDE = 0.12  # of the square: how far the middle of an area must be from its edge, for two samples
FINEST = 7  # how often a pixel can be halved
WHOLE = 2**FINEST  # the side of a pixel, in smallest squares
COARSE = WHOLE // 32  # that of the smallest ones in pixels with many
SIDES = 4  # of the square: the first lines
INNER = -1  # their kind within the pixel
NONE, INSIDE, OUTSIDE, ORDER = range(4)  # the region that another line bounds: inside, outside or in front of a shape
BESIDE_FLAT = 1e-3  # of a pixel: how far from an edge its slope is taken if it is 0 on it: max(x, 0) where x is 0
_FEW = 128  # squares of a pixel
TRIES = 3  # places at which a slope is taken, see ``side_of_try``
CURVED = 2e-3  # by how much the value in the middle may differ from the mean of the corners, of the sum of all
_TINY = 1e-4  # of the square: parts so small are seen where the centre is
PARALLEL = 1e-6  # a few roundings of float32: edges that coincide differ by them


@ti.func
def off_border(x, y, fine):
    """By how much the squares of a pixel are moved, so that an edge on the border of two pixels is within one of both.

    Roundings would put it into none of them, or into both.
    """
    return 8.0 * fine * (8.0 + abs(x) + abs(y))


@ti.func
def least_side(done):
    """The side of the smallest squares: 1/128 pixel for the first ones, since tiny shapes need them, else 1/32."""
    return ti.select(done < _FEW, 1, COARSE)


@ti.func
def side_of_square(place):
    """The side, in smallest squares, of the largest square that starts at a place."""
    side = WHOLE
    while place % (side * side) > 0:
        side = side // 2
    return side


@ti.func
def middle_of_square(place, size):
    """Where the middle of a square of a size is, relative to the pixel's centre."""
    middle = ti.Vector([0.5, 0.5]) * (size - 1.0)
    half = 0.5
    for k in range(FINEST):
        quarter = place >> 2 * (FINEST - 1 - k)
        middle += half * ti.Vector([quarter & 1, quarter >> 1 & 1])
        half *= 0.5
    return middle


@ti.func
def put_sides(middle, size, lines: ti.template()):
    """Put the sides of the square into the table of lines; ``INNER`` are those within the pixel."""
    for e in ti.static(range(SIDES)):
        lines[e, NX] = (1.0, -1.0, 0.0, 0.0)[e]
        lines[e, NY] = (0.0, 0.0, 1.0, -1.0)[e]
        lines[e, S] = 0.5
        from_border = 0.5 + middle[0] * lines[e, NX] + middle[1] * lines[e, NY] - 0.5 * size
        lines[e, KIND] = ti.select(from_border > 0, INNER, 0)


@ti.func
def middle_within(last, lines: ti.template()):
    """The middle, relative to the pixel's centre, and the area within the lines before ``last``.

    Each side and the centre span a triangle.  The area between a curved edge and its chord is 2/3 width * length.
    """
    total = ti.Vector([0.0, 0.0, 0.0])
    for e in range(last):
        part = part_of_line(e, last, lines)
        length = (part[1] - part[0]) * part[2]
        along = 0.5 * (part[0] + part[1])
        px = -lines[e, S] * lines[e, NX] - along * lines[e, NY]
        py = -lines[e, S] * lines[e, NY] + along * lines[e, NX]
        inner = 0.5 * lines[e, S] * length
        outer = 2.0 / 3.0 * lines[e, BULGE] * length
        weight = 2.0 / 3.0 * inner + outer
        total += ti.Vector([weight * px, weight * py, inner + outer])
    if total[2] > _TINY:
        for k in ti.static(range(2)):
            total[k] = ti.max(-0.5, ti.min(0.5, total[k] / total[2]))
    return total


@ti.func
def middle_of_part(part, e, lines: ti.template()):
    """The middle of a part of the curved edge that line e stands for, relative to the centre of the square."""
    along = 0.5 * (part[0] + part[1])
    out = lines[e, S] + lines[e, BULGE]
    return ti.Vector([-out * lines[e, NX] - along * lines[e, NY], -out * lines[e, NY] + along * lines[e, NX]])


@ti.func
def is_wide(edge, middle):
    """Whether the middle of an area is so far from the middle of its edge that it has two samples."""
    return (middle[0] - edge[0]) ** 2 + (middle[1] - edge[1]) ** 2 > WIDE**2


@ti.func
def sample_beside(m, edge, middle):
    """The place of sample m of two between the middles of an edge and of the area beside it, and its share of the area.

    Gauss' rule for the square root of the distance from the edge, which is exact for linear values, and for roots of
    the distance, as the shading of a ball has at its rim.
    """
    u = ti.static(0.5 - 0.5 / 3**0.5) + ti.static(1 / 3**0.5) * m
    place = edge + 2.0 * u * u * (middle - edge)
    return ti.Vector([place[0], place[1], u])


@ti.func
def part_of_line(e, last, lines: ti.template()):
    """From where to where line e is within the others, counted from its point nearest to the centre, and its weight.

    Lines that coincide share their length.  The edge of a shape has all of that on an inner side, as one square alone
    sees it.
    """
    px = -lines[e, S] * lines[e, NX]
    py = -lines[e, S] * lines[e, NY]
    low = -2.0
    high = 2.0
    weight = 1.0
    for k in range(last):
        if k != e:
            inside = lines[k, S] + lines[k, NX] * px + lines[k, NY] * py
            along = lines[k, NY] * lines[e, NX] - lines[k, NX] * lines[e, NY]
            if abs(along) < PARALLEL:
                if lines[e, KIND] != ORDER and lines[k, KIND] != ORDER:
                    inside += ti.select(lines[k, KIND] == INNER, 4.0, 0.0) * PARALLEL
                    inside -= ti.select(lines[e, KIND] == INNER, 4.0, 0.0) * PARALLEL
                if inside < -PARALLEL:
                    high = low
                elif inside < PARALLEL:
                    weight *= 0.5
            elif along > 0:
                low = ti.max(low, -inside / along)
            else:
                high = ti.min(high, -inside / along)
    return ti.Vector([low, ti.max(low, high), weight])


@ti.func
def value_at_corner(zeros, c, values: ti.template()):
    """The value at corner c of a square, from the table of them."""
    value = zeros + 0.0
    for e in ti.static(range(zeros.n)):
        value[e] = values[c, e]
    return value


@ti.func
def variation_of(before, zeros, centre, values: ti.template()):
    """How far a value at the centre is from the mean of corners; the corner farthest from it; sum, or ``before``."""
    off = centre + 0.0
    scale = centre.norm()
    apart = 0.0 * scale
    farthest = 0
    for c in range(SIDES):
        corner = value_at_corner(zeros, c, values)
        off -= 0.25 * corner
        scale += corner.norm()
        if (corner - centre).norm() > apart:
            apart = (corner - centre).norm()
            farthest = c
    return off.norm(), apart, farthest, ti.max(before, scale)


@ti.func
def side_of_try(k):
    """On which side of an edge its slope is taken: on it, and if it is flat there on either side."""
    return k - 3.0 * (k // 2)
