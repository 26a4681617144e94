"""Edges of triangle meshes in an image: visible_edge, add_visible_edge.

The line through the projections of a and b, in homogeneous coordinates (x w, y w, w), is where the level
``(a x b) . (x, y, 1)`` is 0; it is positive to the left of the way from a to b.  So the boundary term of a part of the
edge that is straight in the pixel, with the length dl and the middle m, is ``jump dl (a x b)_dot . m / |(a x b)_xy|``.
Coordinates relative to the pixel's centre keep it exact in float32.
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

_PARTS = 4  # of an edge of length 1 within a pixel, each of which is seen or hidden
_MARGIN = 1e-3  # pixels: rounding of the places where an edge enters a column of pixels
_FAR = 1e9
_FARTHEST = 1e15  # pixels: ends beyond do not count
_NONE, _LOCAL, _IMAGE = range(3)  # where the area behind an edge is added


def visible_edge(
    start: object, end: object, seen: object, *, at: object, beside: object = None, antialias: bool = False
) -> Any:
    """The boundary term of a straight edge in the image, where it is visible: 0, with a tangent.

    Like ``segment_edge``, but the jump is the difference of the image's values on both sides: 0 if the edge is hidden.
    Add it to the pixel once for every edge that may be visible.  For the edges of a mesh, ``add_visible_edge`` is
    faster, and knows the faces that meet at an edge.

    Args:
        start: first end in the image, a vector of 2 in pixels, or of 3, homogeneous: ``(x w, y w, w)`` for the position
            (x, y).  Only the part with w > 0, before the camera, counts.
        end: second end.  If the edge moves, its ends carry the tangents.
        seen: a ti.func ``seen(x, y)`` that returns the value of the image at the position (x, y) in pixels: a scalar,
            vector or matrix, without antialiasing.
        at: the pixel centre, ``(px, py)``.
        beside: the distance from the edge at which its sides are evaluated, in pixels; by default 1e-6, or 1e-3 if
            ``seen`` computes in float32.  If the image shows a curve and the edges are its chords, the distance must be
            larger than that of a chord from the curve.
        antialias: True gives the contribution of the edge, to be added to the value at the pixel's centre: the jump,
            times the area of the pixel that is behind the edge, seen from the centre.  The sum over all visible edges
            gives the mean of the pixel.

    Returns:
        0, or the contribution of the edge, of the shape of ``seen``'s value; 0 if an end is not finite.

    Raises:
        UnsupportedError: ``seen`` is not a ti.func, or an end is not a vector of 2 or 3.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import jacobian, visible_edge
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> border, image = ti.field(ti.f64, shape=()), ti.field(ti.f64, shape=(10, 8))
        >>> border[None] = 4.3
        >>> @ti.func
        ... def seen(x, y):  # two half-planes, behind a strip
        ...     return ti.select(abs(y - 3.5) < 1, 0.0, ti.select(x < border[None], 1.0, 3.0))
        >>> @ti.kernel
        ... def draw():
        ...     for i, j in image:
        ...         low, high = ti.Vector([border[None], -1.0]), ti.Vector([border[None], 9.0])
        ...         image[i, j] = seen(i, j) + visible_edge(low, high, seen, at=(float(i), float(j)))
        >>> jacobian(draw, border, image)[4].round(3)
        array([-2., -2., -2.,  0.,  0., -2., -2., -2.])
    """
    leave_to_engine("visible_edge", start)


def add_visible_edge(
    image: object, points: object, edge: object, seen: object, *, beside: object = None, antialias: bool = False
) -> None:
    """Add the boundary term of an edge of a mesh to all pixels that it crosses.

    Call it once for each row of ``mesh_edges``, after the image is drawn.  It costs as much as the pixels that the
    edge crosses.  The jump is measured within the faces that meet at the edge, so faces that are thinner than
    ``beside`` count, too.  A face that is seen exactly from its side has no area; its edges share the jump.

    Args:
        image: a field or array of two dimensions, with entries like the values of ``seen``; entry (i, j) is the pixel
            with the centre (i, j).  Without ``antialias`` the values do not change.
        points: a field or array of the corners in the image, vectors of 2 in pixels or of 3, homogeneous:
            ``(x w, y w, w)`` for the position (x, y), with w > 0 in front of the camera.
        edge: a row of ``mesh_edges``: a vector of integers, both ends and the opposite corners.  Only the ends, if
            the faces do not matter.
        seen: a ti.func ``seen(x, y)``, see ``visible_edge``.
        beside: see ``visible_edge``.
        antialias: True makes the values of the image means over their pixels, see ``visible_edge``.

    Returns:
        Nothing.

    Raises:
        UnsupportedError: ``seen`` is not a ti.func, or ``edge`` or a corner has another shape.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import add_visible_edge, jacobian, mesh_edges
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> points, image = ti.Vector.field(2, ti.f64, shape=3), ti.field(ti.f64, shape=(16, 16))
        >>> points[0], points[1], points[2] = [2.3, 1.7], [12.1, 3.2], [5.6, 9.9]
        >>> edges = ti.Vector.field(4, ti.i32, shape=3)
        >>> edges.from_numpy(mesh_edges([[0, 1, 2]]))
        >>> @ti.func
        ... def side(n, p):
        ...     return (points[(n + 1) % 3] - points[n]).cross(p - points[n])
        >>> @ti.func
        ... def seen(x, y):
        ...     p = ti.Vector([x, y])
        ...     return ti.select(ti.min(side(0, p), side(1, p), side(2, p)) > 0, 1.0, 0.0)
        >>> @ti.kernel
        ... def draw():
        ...     for i, j in image:
        ...         image[i, j] = seen(float(i), float(j))
        ...     for e in edges:
        ...         add_visible_edge(image, points, edges[e], seen)
        >>> jacobian(draw, points, image).sum((0, 1))[0].round(6)  # of the area: (y1 - y2, x2 - x1) / 2
        array([-3.35, -3.25])
    """
    leave_to_engine("add_visible_edge", edge)


def boundary_term(name: str, moved: object) -> object:
    """0, with the tangent of a value, which is not differentiated again; traced by the engine."""
    leave_to_engine("boundary_term", moved)


recorded(visible_edge, add_visible_edge, boundary_term)


# --- in the kernel ----------------------------------------------------------------------------------------------------


@ti.func
def term_of_side(start, end, jump, x, y, antialias: ti.template()):
    """The boundary term of a side of a polygon in the pixel at (x, y), and its contribution to the value."""
    moved = 0.0 * jump
    added = 0.0 * jump
    a = centred(homogeneous(start), x, y)
    b = centred(homogeneous(end), x, y)
    first, last, share = part_within(stop_gradient(a), stop_gradient(b), 0.5, 0.5)
    length = (last - first).norm()
    if share > 0 and length > 0:
        line = stop_gradient(a.cross(b))
        weight = share * length / ti.sqrt(line[0] * line[0] + line[1] * line[1])
        m = 0.5 * weight * (first + last)
        moved += stop_gradient(jump) * moved_line(a, b, m[0], m[1], weight)
    if ti.static(antialias):
        added += stop_gradient(area_to_the_left(a, b)) * jump
    return boundary_term("segment_edge", moved) + added


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
def term_of_edge(seen: ti.template(), start, end, zeros, beside, x, y, antialias: ti.template()):
    """The same of an edge whose jump is seen."""
    moved = zeros
    added = zeros
    a = centred(start, x, y)
    b = centred(end, x, y)
    a0 = stop_gradient(a)
    b0 = stop_gradient(b)
    first, last, share = part_within(a0, b0, 0.5, 0.5)
    if share > 0:
        p = on_image(first)
        q = on_image(last)
        kind = ti.static(_LOCAL if antialias else _NONE)
        mx, my, m1 = moments(seen, None, None, 0, a0, b0, p, q, share, zeros, beside, 0.0, x, y, kind, added)
        moved += moved_line(a, b, mx, my, m1)
    return boundary_term("visible_edge", moved) + added


@ti.func
def add_term_of_edge(
    image: ti.template(),
    points: ti.template(),
    edge: ti.template(),
    seen: ti.template(),
    zeros,
    beside,
    thin,
    antialias: ti.template(),
):
    """The boundary terms of an edge in all pixels that it crosses."""
    width, height = image.shape[0], image.shape[1]
    start = homogeneous(points[edge[0]])
    end = homogeneous(points[edge[1]])
    x = 0.5 * (width - 1)
    y = 0.5 * (height - 1)
    part = part_within(
        stop_gradient(centred(start, x, y)), stop_gradient(centred(end, x, y)), 0.5 * width, 0.5 * height
    )
    if part[2] > 0:
        p = on_image(part[0])
        q = on_image(part[1])
        low = y + ti.min(p[1], q[1])
        high = y + ti.max(p[1], q[1])
        first_column = pixel_of(x + ti.min(p[0], q[0]) - _MARGIN, width)
        last_column = pixel_of(x + ti.max(p[0], q[0]) + _MARGIN, width)
        for i in range(first_column, last_column + 1):
            first = low
            last = high
            if abs(q[0] - p[0]) > _MARGIN:
                slope = (q[1] - p[1]) / (q[0] - p[0])
                here = p[1] + y + (i - p[0] - x) * slope
                first = ti.max(first, here - 0.5 * abs(slope))
                last = ti.min(last, here + 0.5 * abs(slope))
            for j in range(pixel_of(first - _MARGIN, height), pixel_of(last + _MARGIN, height) + 1):
                a = centred(start, i, j)
                b = centred(end, i, j)
                a0 = stop_gradient(a)
                b0 = stop_gradient(b)
                first_point, last_point, share = part_within(a0, b0, 0.5, 0.5)
                if share > 0:
                    p1 = on_image(first_point)
                    q1 = on_image(last_point)
                    kind = ti.static(_IMAGE if antialias else _NONE)
                    mx, my, m1 = moments(
                        seen, points, edge, edge.n - 2, a0, b0, p1, q1, share, zeros, beside, thin, i, j, kind, image
                    )
                    image[i, j] += boundary_term("add_visible_edge", moved_line(a, b, mx, my, m1))


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
def moments(
    seen: ti.template(),
    points: ti.template(),
    edge: ti.template(),
    faces: ti.template(),
    a,
    b,
    p,
    q,
    share,
    zeros,
    beside,
    thin,
    x,
    y,
    kind: ti.template(),
    added: ti.template(),
):
    """The integrals of the jump times x, y and 1 along an edge a b from p to q, over the slope of its level.

    The contribution of the edge to the mean of the pixel is added to ``added``.  An image gets it place by place, since
    the tangents of a local sum are as long as the list of all corners.
    """
    mx = zeros
    my = zeros
    m1 = zeros
    line = a.cross(b)
    slope = ti.sqrt(line[0] * line[0] + line[1] * line[1])
    n = ti.Vector([line[0], line[1]]) / slope
    length = (q - p).norm()
    count = ti.max(1, ti.min(2 * _PARTS, int(ti.ceil(_PARTS * length))))
    for k in range(count):
        m = p + (k + 0.5) / count * (q - p)
        left = beside
        right = beside
        part = share
        for o in ti.static(range(2, 2 + faces)):
            if edge[o] >= 0:
                c = stop_gradient(centred(homogeneous(points[edge[o]]), x, y))
                away = reach_of_face(a, b, c, m, n)
                if abs(away) < thin:
                    part -= 0.5 * share
                elif away > 0:
                    left = ti.min(left, 0.5 * away)
                else:
                    right = ti.min(right, -0.5 * away)
        half = 0.5 / count * (q - p)
        covered = 0.0 * share
        if ti.static(kind != _NONE):
            covered = part / share * area_behind(m - half, m + half)
        there = m + left * n
        back = m - right * n
        step = seen(x + there[0], y + there[1]) - seen(x + back[0], y + back[1])
        if ti.static(kind == _LOCAL):
            added -= covered * step
        if ti.static(kind == _IMAGE):
            added[x, y] -= covered * step
        jump = part * length / (count * slope) * stop_gradient(step)
        mx += jump * m[0]
        my += jump * m[1]
        m1 += jump
    return mx, my, m1


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
def moved_line(a, b, mx, my, m1):
    """The term of the edge's motion: 0, with a tangent."""
    line = a.cross(b)
    value = mx * line[0] + my * line[1] + m1 * line[2]
    return value - stop_gradient(value)


visible_edge.boundary_body = term_of_edge  # type: ignore[attr-defined]  # the recorder walks this instead
add_visible_edge.boundary_body = add_term_of_edge  # type: ignore[attr-defined]
