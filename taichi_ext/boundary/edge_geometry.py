"""Straight edges in a pixel, in kernels: the part within it, the area behind, and how far faces reach from an edge."""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false, reportIndexIssue=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from taichi_ext.backend import ti
from taichi_ext.boundary.gradients import stop_gradient

_FAR = 1e9
DENSE = 0.25  # pixels between samples along an edge
_SPARSE = 4.0  # pixels between those of edges within a surface, up to twice this length
_FARTHEST = 1e15  # pixels: ends beyond do not count


@ti.func
def area_to_the_left(a, b):
    """The integral of ``x - left`` of the pixel dy along a side, x within the pixel: the sum over sides is the area."""
    area = 0.0 * a[0]
    rise = b[1] - a[1]
    if rise != 0:
        first = ti.max(0.0, ti.min(1.0, (-0.5 - a[1]) / rise))
        last = ti.max(0.0, ti.min(1.0, (0.5 - a[1]) / rise))
        p = a[0] + 0.5 + first * (b[0] - a[0])
        q = a[0] + 0.5 + last * (b[0] - a[0])
        low = ti.min(p, q)
        high = ti.max(p, q)
        within = ti.max(0.0, ti.min(1.0, high)) - ti.max(0.0, ti.min(1.0, low))
        mean = 0.5 * (ti.max(0.0, ti.min(1.0, high)) + ti.max(0.0, ti.min(1.0, low)))
        if high > low:
            mean = (within * mean + ti.max(0.0, high - ti.max(low, 1.0))) / (high - low)
        area = (last - first) * abs(rise) * mean
    return area


@ti.func
def distance(p, q):
    return (q - p).norm()


@ti.func
def area_behind(p, q):
    """The area of the pixel behind the way from p to q, seen from the centre; negative if that is to its right."""
    level = p.cross(q)
    turn = along_border(q) - along_border(p)
    turn -= 4.0 * ti.round(0.25 * turn)
    if level > 0 and turn < -1:
        turn += 4.0
    if not level > 0 and turn > 1:
        turn -= 4.0
    return ti.select(level == 0 and p.dot(q) >= 0, 0.0, 0.25 * turn - 0.5 * level)


@ti.func
def along_border(p):
    """How far it is along the border of the pixel, to the left, to the place in the direction of a point."""
    across = ti.max(abs(p[0]), abs(p[1]), 1e-30)
    x = p[0] / across
    y = p[1] / across
    on_upright = ti.select(x > 0, 0.5 * y, 2.0 - 0.5 * y)
    return ti.select(abs(p[0]) >= abs(p[1]), on_upright, ti.select(y > 0, 1.0 - 0.5 * x, 3.0 + 0.5 * x))


@ti.func
def pixel_of(position, count):
    """The pixel of a coordinate, or the nearest one that there is."""
    return ti.max(0, ti.min(count - 1, int(ti.floor(position + 0.5))))


@ti.func
def homogeneous(p):
    if ti.static(p.n == 3):
        return p
    else:
        return ti.Vector([p[0], p[1], 1.0])


@ti.func
def centred(p, x, y):
    """A point in homogeneous coordinates, relative to a pixel."""
    return ti.Vector([p[0] - x * p[2], p[1] - y * p[2], p[2]])


@ti.func
def part_within(a, b, half_width, half_height):
    """The ends of the part of an edge in a rectangle around 0, and its share: 1, 0 for none, 1/2 along the border.

    It is clipped in homogeneous coordinates, where points behind the camera are outside.
    """
    side = b - a
    half = ti.Vector([half_width, half_height])
    first = 0.0 * (half_width + a[2])
    last = first + 1.0
    share = last
    for c in ti.static(range(4)):
        k = ti.static(c % 2)
        sign = ti.static(1 - c // 2 * 2)
        inside = half[k] * a[2] + sign * a[k]
        change = half[k] * side[2] + sign * side[k]
        if change > 0:
            first = ti.max(first, -inside / change)
        elif change < 0:
            last = ti.min(last, -inside / change)
        elif inside == 0:
            share *= 0.5
        elif not inside > 0:
            share = 0.0
    start = a + first * side
    end = a + last * side
    size = abs(a[0]) + abs(a[1]) + abs(a[2]) + abs(b[0]) + abs(b[1]) + abs(b[2])
    if not (last > first and start[2] > 0 and end[2] > 0 and size < _FARTHEST):  # nor is a number that is not finite
        share = 0.0
    return start, end, share


@ti.func
def on_image(p):
    return ti.Vector([p[0] / p[2], p[1] / p[2]])


@ti.func
def slope_of(a, b):
    line = a.cross(b)
    return ti.sqrt(line[0] * line[0] + line[1] * line[1])


@ti.func
def normal_of(a, b):
    line = a.cross(b)
    return ti.Vector([line[0], line[1]]) / slope_of(a, b)


@ti.func
def reach_of_face(a, b, c, m, n):
    """How far the face a b c reaches from the point m of its side a b along n; negative in the other direction.

    It is 0 if the face is seen from its side.  The face is where all three barycentric coordinates are positive.
    """
    det = a.cross(b).dot(c)
    reach = 0.0 * det
    if abs(det) > 0:
        way = ti.select(det > 0, 1.0, -1.0)
        middle = ti.Vector([m[0], m[1], 1.0])
        step = way * ti.Vector([n[0], n[1], 0.0])
        reach = _FAR * way
        for side in ti.static(range(2)):
            line = b.cross(c) if ti.static(side == 0) else c.cross(a)
            here = line.dot(middle)
            change = line.dot(step)
            if here * change < 0:
                reach = way * ti.min(abs(reach), abs(here / change))
            elif here == 0:
                reach = 0.0
    return reach


@ti.func
def spacing(edge: ti.template(), a, b, length, x, y):
    """The distance of samples along an edge.

    An edge that has as many faces on its left as on its right lies within a surface.  Its jump is that of their
    shading, and both faces are mostly hidden together, so few samples show where a short one is hidden.  The rims of
    surfaces, where the jump is that from one surface to another, have all.
    """
    balance = 0
    faces = ti.static(edge.row.n - 2)
    step = DENSE + 0.0 * length
    for o in ti.static(range(2, 2 + faces)):
        if edge.row[o] >= 0:
            det = a.cross(b).dot(stop_gradient(centred(homogeneous(edge.points[edge.row[o]]), x, y)))
            balance += ti.select(det > 0, 1, ti.select(det < 0, -1, 2 * faces))
        else:
            balance += ti.static(2 * faces if o < 4 else 0)
    if ti.static(faces > 0) and balance == 0:
        excess = 0.5 * length / _SPARSE
        step = ti.max(step, _SPARSE / (excess * excess * excess * excess))
    return step


@ti.func
def sides_at(edge: ti.template(), place):
    """The places on both sides of a place on an edge that are sampled, and the share of the jump that it has."""
    x = ti.floor(place[0] + 0.5)
    y = ti.floor(place[1] + 0.5)
    a = stop_gradient(centred(edge.start, x, y))
    b = stop_gradient(centred(edge.end, x, y))
    n = normal_of(a, b)
    m = place - ti.Vector([x, y])
    left = edge.beside + 0.0 * n[0]
    right = edge.beside + 0.0 * n[0]
    part = 1.0 + 0.0 * n[0]
    for o in ti.static(range(2, edge.row.n)):
        if edge.row[o] >= 0:
            c = stop_gradient(centred(homogeneous(edge.points[edge.row[o]]), x, y))
            away = reach_of_face(a, b, c, m, n)
            if not abs(c[0]) + abs(c[1]) + abs(c[2]) < _FARTHEST:
                pass  # no face is seen whose corner is not finite
            elif abs(away) < edge.thin:
                part -= 0.5
            elif away > 0:
                left = ti.min(left, 0.5 * away)
            else:
                right = ti.min(right, -0.5 * away)
    return place + left * n, place - right * n, part


@ti.func
def is_seen(jump, change, is_number: ti.template()):
    """Whether a piece has a jump; one that is no number counts."""
    size = abs(jump) + abs(change)
    if ti.static(is_number):
        return size != 0
    else:
        return size.sum() != 0


@ti.func
def largest(values, is_number: ti.template()):
    if ti.static(is_number):
        return values
    else:
        return values.max()


@ti.func
def moved_line(a, b, mx, my, m1):
    """The term of the edge's motion: 0, with a tangent."""
    line = a.cross(b)
    value = mx * line[0] + my * line[1] + m1 * line[2]
    return value - stop_gradient(value)
