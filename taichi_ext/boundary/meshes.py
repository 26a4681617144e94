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
from taichi_ext.boundary.edge_geometry import (
    DENSE,
    area_behind,
    area_to_the_left,
    centred,
    distance,
    homogeneous,
    is_seen,
    largest,
    moved_line,
    normal_of,
    on_image,
    part_within,
    pixel_of,
    sides_at,
    sides_of,
    slope_of,
    spacing,
)
from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.kernel_scope import leave_to_engine, recorded

_PARTS = 4  # of an edge of length 1 within a pixel, each of which is seen or hidden, for visible_edge and areas
_MARGIN = 1e-3  # pixels: rounding of the places where an edge enters a column of pixels
_FINEST = 0.125  # pixels: how exactly the place at which a jump changes is found
_INSET = 0.05  # pixels between the ends of an edge and its first and last sample
_ALIKE = 0.01  # of a jump: samples that differ by less belong to one piece
_NONE, _LOCAL, _IMAGE = range(3)  # where the area behind an edge is added


@recorded
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


@recorded
def add_visible_edge(
    image: object, points: object, edge: object, seen: object, *, beside: object = None, antialias: bool = False
) -> None:
    """Add the boundary term of an edge of a mesh to all pixels that it crosses.

    Call it once for each row of ``mesh_edges``, after the image is drawn.  It costs as much as the pixels that the
    edge crosses, and ``seen`` on both sides every 1/4 pixel.  A short edge, of up to 4 pixels, with as many faces on
    its left as on its right is sampled near its ends alone.  The jump is measured within the faces that meet at the
    edge, so faces that are thinner than ``beside`` count, too.  A face that is seen exactly from its side has no area;
    its edges share the jump.

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


@recorded
def boundary_term(name: str, moved: object) -> object:
    """0, with the tangent of a value, which is not differentiated again; traced by the engine."""
    leave_to_engine("boundary_term", moved)


@recorded
def seen_together(seen: object, a: object, b: object, c: object, d: object, zeros: object) -> tuple[Any, ...]:
    """The values of an image at four places, in a loop whose iterations can go through it together."""
    leave_to_engine("add_visible_edge", seen)


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
    is_number: ti.template(),
    beside,
    thin,
    antialias: ti.template(),
):
    """The boundary terms of an edge in all pixels that it crosses, piece by piece.

    The jump is the same all along a piece, but for 1 %.  Samples are ``spacing`` apart; where two differ, the place
    between them at which the jump changes is found by bisection.  With ``antialias`` the edge is one piece.
    """
    width, height = image.shape[0], image.shape[1]
    start = homogeneous(points[edge[0]])
    end = homogeneous(points[edge[1]])
    x = 0.5 * (width - 1)
    y = 0.5 * (height - 1)
    a = stop_gradient(centred(start, x, y))
    b = stop_gradient(centred(end, x, y))
    first, last, share = part_within(a, b, 0.5 * width, 0.5 * height)
    if share > 0:
        p = on_image(first) + ti.Vector([x, y])
        side = on_image(last) + ti.Vector([x, y]) - p
        length = distance(p, p + side)
        along = side / length
        step = spacing(points, edge, edge.n - 2, a, b, length, x, y)
        place = ti.select(length > DENSE, ti.min(_INSET, 0.1 * length), 0.5 * length)  # of the next sample
        final = length - place
        known = -1.0 + 0.0 * length  # the last sample in the piece, if there is one
        origin = place  # its first sample
        jump = zeros  # there
        change = zeros  # from there to the last one
        ahead = known  # a sample that was taken with the last one
        jump_ahead = zeros
        rounding_ahead = zeros
        begin = 0.0 * length
        while begin < length:
            stop = length
            following = final
            found = jump_ahead
            rounding = rounding_ahead
            is_other = False
            if ti.static(not antialias):
                following = ti.min(place + step, final)
                if place != ahead:
                    ahead = following
                    found, rounding, jump_ahead, rounding_ahead = jumps_at(
                        seen, points, edge, start, end, p + place * along, p + ahead * along, zeros, beside, thin
                    )
                if known < 0:
                    jump = found
                is_other = largest(abs(found - jump) - _ALIKE * ti.max(abs(found), abs(jump)) - rounding, is_number) > 0
                if is_other:
                    stop = 0.5 * (known + place)
                    if place - known > _FINEST:
                        following = stop
                        stop = begin
                elif place < final:
                    stop = begin
            if not is_other:
                known = place
                change = found - jump
            if stop > begin:
                rate = change / ti.max(known - origin, _FINEST)
                if ti.static(antialias) or is_seen(jump, change, is_number):
                    add_piece(
                        image,
                        points,
                        edge,
                        seen,
                        start,
                        end,
                        p,
                        along,
                        begin,
                        stop,
                        jump - origin * rate,
                        rate,
                        zeros,
                        beside,
                        thin,
                        antialias,
                    )
                begin = stop
                known = place
                origin = place
                jump = found
                change = zeros
            place = following


@ti.func
def add_piece(
    image: ti.template(),
    points: ti.template(),
    edge: ti.template(),
    seen: ti.template(),
    start,
    end,
    p,
    along,
    begin,
    stop,
    jump,
    rate,
    zeros,
    beside,
    thin,
    antialias: ti.template(),
):
    """The boundary term of the part of an edge between two distances from its point p, in all pixels that it crosses.

    The jump at a distance is ``jump + rate * distance``.
    """
    width, height = image.shape[0], image.shape[1]
    s = p + begin * along
    e = p + stop * along
    for i in range(pixel_of(ti.min(s[0], e[0]) - _MARGIN, width), pixel_of(ti.max(s[0], e[0]) + _MARGIN, width) + 1):
        low = ti.min(s[1], e[1])
        high = ti.max(s[1], e[1])
        if abs(e[0] - s[0]) > _MARGIN:
            slope = along[1] / along[0]
            here = s[1] + (i - s[0]) * slope
            low = ti.max(low, here - 0.5 * abs(slope))
            high = ti.min(high, here + 0.5 * abs(slope))
        for j in range(pixel_of(low - _MARGIN, height), pixel_of(high + _MARGIN, height) + 1):
            a = centred(start, i, j)
            b = centred(end, i, j)
            a0 = stop_gradient(a)
            b0 = stop_gradient(b)
            first, last, share = part_within(a0, b0, 0.5, 0.5)
            if share > 0:
                p1 = on_image(first)
                q1 = on_image(last)
                if ti.static(antialias):
                    mx, my, m1 = moments(
                        seen, points, edge, edge.n - 2, a0, b0, p1, q1, share, zeros, beside, thin, i, j, _IMAGE, image
                    )
                    image[i, j] += boundary_term("add_visible_edge", moved_line(a, b, mx, my, m1))
                else:
                    shift = ti.Vector([i, j]) - p
                    origin = (p1 + shift).dot(along)
                    low = ti.max(begin, origin)
                    high = ti.min(stop, (q1 + shift).dot(along))
                    if high > low:
                        m = p1 + (0.5 * (low + high) - origin) * along
                        weight = share * (high - low) / slope_of(a0, b0) * (jump + 0.5 * (low + high) * rate)
                        image[i, j] += boundary_term(
                            "add_visible_edge", moved_line(a, b, weight * m[0], weight * m[1], weight)
                        )


@ti.func
def jumps_at(
    seen: ti.template(), points: ti.template(), edge: ti.template(), start, end, place, ahead, zeros, beside, thin
):
    """The jumps at two places, each with how far it may be off by the change of the image between the sides."""
    left, right, part = sides_at(points, edge, start, end, place, beside, thin)
    left_ahead, right_ahead, part_ahead = sides_at(points, edge, start, end, ahead, beside, thin)
    one, other, one_ahead, other_ahead = seen_together(seen, left, right, left_ahead, right_ahead, zeros)
    jump = part * (one - other)
    jump_ahead = part_ahead * (one_ahead - other_ahead)
    rounding = 0.1 * beside * (abs(one) + abs(other))
    return jump, rounding, jump_ahead, 0.1 * beside * (abs(one_ahead) + abs(other_ahead))


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
    slope = slope_of(a, b)
    n = normal_of(a, b)
    length = distance(p, q)
    count = ti.max(1, ti.min(2 * _PARTS, int(ti.ceil(_PARTS * length))))
    for k in range(count):
        m = p + (k + 0.5) / count * (q - p)
        left, right, part = sides_of(points, edge, faces, a, b, m, n, share, x, y, beside, thin)
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


visible_edge.boundary_body = term_of_edge  # type: ignore[attr-defined]  # the recorder walks this instead
add_visible_edge.boundary_body = add_term_of_edge  # type: ignore[attr-defined]
