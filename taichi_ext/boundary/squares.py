"""Squares that pixels are divided into, and where values in them are sampled, as code in the kernel.

Squares come in the order of letters Z in each other; a place counts the smallest ones before.
"""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from taichi_ext.backend import ti

WIDE = 0.12  # of the square: how far the middle of an area must be from its edge, for two samples
FINEST = 7  # how often a pixel can be halved
WHOLE = 2**FINEST  # the side of a pixel, in smallest squares
COARSE = WHOLE // 32  # that of the smallest ones in pixels with many
SIDES = 4  # of a square
BESIDE_FLAT = 1e-3  # of a pixel: how far from an edge its slope is taken if it is 0 on it: max(x, 0) where x is 0
_FEW = 128  # squares of a pixel
TRIES = 3  # places at which a slope is taken, see ``side_of_try``
CURVED = 2e-3  # by how much the value in the middle may differ from the mean of the corners, of the sum of all


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
