"""Straight edges in an image, such as those of triangle meshes: add_edge.

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
    on_image,
    part_within,
    pixel_of,
    sides_at,
    slope_of,
    spacing,
)
from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.kernel_scope import leave_to_engine, recorded

_PARTS = 4  # of an edge of length 1 within a pixel, each of which is seen or hidden, for areas
_MARGIN = 1e-3  # pixels: rounding of the places where an edge enters a column of pixels
_FINEST = 0.125  # pixels: how exactly the place at which a jump changes is found
_INSET = 0.05  # pixels between the ends of an edge and its first and last sample
_ALIKE = 0.01  # of a jump: samples that differ by less belong to one piece


@recorded
def add_edge(
    image: object,
    start: object,
    end: object,
    jump_or_seen: object,
    *,
    faces: object = None,
    beside: object = None,
    antialias: bool = False,
) -> None:
    """Add the boundary term of a straight edge to all pixels that it crosses.

    Call it once for each edge, after the image is drawn.  It costs as much as the pixels that the edge crosses, and
    ``seen`` on both sides every 1/4 pixel.  A short edge, of up to 4 pixels, with as many faces on its left as on its
    right is sampled near its ends alone.  With ``faces``, the jump is measured within the faces that meet at the edge,
    so faces that are thinner than ``beside`` count, too.  A face that is seen exactly from its side has no area; its
    edges share the jump.

    Args:
        image: a field or array of two dimensions, with entries like the jump; entry (i, j) is the pixel with the centre
            (i, j).  Without ``antialias`` the values do not change.
        start: first end in the image, a vector of 2 in pixels, or of 3, homogeneous: ``(x w, y w, w)`` for the position
            (x, y).  Only the part with w > 0, before the camera, counts.  If the edge moves, its ends carry the
            tangents.
        end: second end.
        jump_or_seen: the value on the left of the way from start to end, with x to the right and y up, minus that on
            the right: a scalar, vector or matrix.  Or how to see it: a ti.func ``seen(x, y)`` that returns the value of
            the image at the position (x, y) in pixels, without antialiasing; the jump is 0 where the edge is hidden.
        faces: the faces that meet at the edge, ``(points, edges[e])``: the field or array of the corners in the image,
            and a row of ``mesh_edges``, a vector of integers whose first two are the ends.
        beside: the distance from the edge at which ``seen`` is evaluated, in pixels; by default 1e-6, or 1e-3 if it
            computes in float32.  If the image shows a curve and the edges are its chords, the distance must be larger
            than that of a chord from the curve.
        antialias: True makes the values of the image, which are those at the centres of pixels, means over their
            pixels: adds the jump, times the area of the pixel that is behind the edge, seen from the centre.

    Returns:
        Nothing.

    Raises:
        UnsupportedError: ``jump_or_seen`` is neither a value nor a ti.func, ``beside`` is not positive, or the image,
            the jump, ``faces`` or an end has another shape or type.

    Example:
        >>> import taichi as ti
        >>> from taichi_ext import add_edge, jacobian, mesh_edges
        >>> ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
        >>> points, image = ti.Vector.field(2, ti.f64, shape=3), ti.field(ti.f64, shape=(16, 16))
        >>> points[0], points[1], points[2] = [2.3, 1.7], [12.1, 3.2], [5.6, 9.9]
        >>> edges = ti.Vector.field(4, ti.i32, shape=3)
        >>> edges.from_numpy(mesh_edges([[0, 1, 2]], points.to_numpy()))
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
        ...         add_edge(image, points[edges[e][0]], points[edges[e][1]], seen, faces=(points, edges[e]))
        >>> jacobian(draw, points, image).sum((0, 1))[0].round(6)  # of the area: (y1 - y2, x2 - x1) / 2
        array([-3.35, -3.25])
    """
    leave_to_engine("add_edge", start)


@recorded
def boundary_term(name: str, moved: object) -> object:
    """0, with the tangent of a value, which is not differentiated again; traced by the engine."""
    leave_to_engine("boundary_term", moved)


@recorded
def seen_together(seen: object, a: object, b: object, c: object, d: object, zeros: object) -> tuple[Any, ...]:
    """The values of an image at four places, in a loop whose iterations can go through it together."""
    leave_to_engine("add_edge", seen)


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
def add_term_of_edge(edge: ti.template()):
    """The boundary terms of an edge in all pixels that it crosses: one piece, or those whose jumps are seen."""
    width, height = edge.image.shape[0], edge.image.shape[1]
    x = 0.5 * (width - 1)
    y = 0.5 * (height - 1)
    a = stop_gradient(centred(edge.start, x, y))
    b = stop_gradient(centred(edge.end, x, y))
    first, last, share = part_within(a, b, 0.5 * width, 0.5 * height)
    if share > 0:
        p = on_image(first) + ti.Vector([x, y])
        side = on_image(last) + ti.Vector([x, y]) - p
        length = distance(p, p + side)
        along = side / length
        if ti.static(edge.is_given or edge.antialias):
            add_piece(edge, p, along, 0.0 * length, length, edge.zeros, edge.zeros)
        else:
            add_seen_pieces(edge, a, b, p, along, length, x, y)


@ti.func
def add_seen_pieces(edge: ti.template(), a, b, p, along, length, x, y):
    """The boundary terms of the pieces of an edge whose jump is seen.

    The jump is the same all along a piece, but for 1 %.  Samples are ``spacing`` apart; where two differ, the place
    between them at which the jump changes is found by bisection.
    """
    step = spacing(edge, a, b, length, x, y)
    place = ti.select(length > DENSE, ti.min(_INSET, 0.1 * length), 0.5 * length)  # of the next sample
    final = length - place
    known = -1.0 + 0.0 * length  # the last sample in the piece, if there is one
    origin = place  # its first sample
    jump = edge.zeros  # there
    change = edge.zeros  # from there to the last one
    ahead = known  # a sample that was taken with the last one
    jump_ahead = edge.zeros
    rounding_ahead = edge.zeros
    begin = 0.0 * length
    while begin < length:
        stop = length
        following = ti.min(place + step, final)
        found = jump_ahead
        rounding = rounding_ahead
        if place != ahead:
            ahead = following
            found, rounding, jump_ahead, rounding_ahead = jumps_at(edge, p + place * along, p + ahead * along)
        if known < 0:
            jump = found
        is_other = largest(abs(found - jump) - _ALIKE * ti.max(abs(found), abs(jump)) - rounding, edge.is_number) > 0
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
            if is_seen(jump, change, edge.is_number):
                add_piece(edge, p, along, begin, stop, jump - origin * rate, rate)
            begin = stop
            known = place
            origin = place
            jump = found
            change = edge.zeros
        place = following


@ti.func
def add_piece(edge: ti.template(), p, along, begin, stop, jump, rate):
    """The boundary term of the part of an edge between two distances from its point p, in all pixels that it crosses.

    The jump at a distance is ``jump + rate * distance``.  One that is given, or seen for ``antialias``, is taken at the
    middle of each of up to 8 parts in a pixel instead, and so is what these add to the mean of the pixel.
    """
    s = p + begin * along
    e = p + stop * along
    columns = crossed_columns(edge.image, s, e)
    for i in range(columns[0], columns[1] + 1):
        rows = crossed_rows(edge.image, s, e, i)
        for j in range(rows[0], rows[1] + 1):
            a = centred(edge.start, i, j)
            b = centred(edge.end, i, j)
            a0 = stop_gradient(a)
            b0 = stop_gradient(b)
            first, last, share = part_within(a0, b0, 0.5, 0.5)
            if share > 0:
                p1 = on_image(first)
                shift = ti.Vector([i, j]) - p
                origin = (p1 + shift).dot(along)
                low = ti.max(begin, origin)
                high = ti.min(stop, (on_image(last) + shift).dot(along))
                if high > low:
                    parts = 1
                    if ti.static(edge.antialias and not edge.is_given):
                        parts = ti.max(1, ti.min(2 * _PARTS, int(ti.ceil(_PARTS * (high - low)))))
                    half = 0.5 * (high - low) / parts
                    mx = edge.zeros
                    my = edge.zeros
                    m1 = edge.zeros
                    for k in range(parts):
                        t = low + (2 * k + 1) * half
                        m = p1 + (t - origin) * along
                        there = jump + t * rate
                        if ti.static(edge.is_given or edge.antialias):
                            step = jump_at(edge, m + ti.Vector([i, j]))
                            there = stop_gradient(step)
                            if ti.static(edge.antialias):
                                edge.image[i, j] -= area_behind(m - half * along, m + half * along) * step
                        weight = 2.0 * half * share / slope_of(a0, b0) * there
                        mx += weight * m[0]
                        my += weight * m[1]
                        m1 += weight
                    edge.image[i, j] += boundary_term("add_edge", moved_line(a, b, mx, my, m1))


@ti.func
def crossed_columns(image: ti.template(), s, e):
    """The first and the last column of pixels that the way from s to e crosses."""
    width = image.shape[0]
    low = ti.min(s[0], e[0]) - _MARGIN
    return ti.Vector([pixel_of(low, width), pixel_of(ti.max(s[0], e[0]) + _MARGIN, width)])


@ti.func
def crossed_rows(image: ti.template(), s, e, i):
    """The first and the last pixel of column i that the way from s to e crosses."""
    low = ti.min(s[1], e[1])
    high = ti.max(s[1], e[1])
    if abs(e[0] - s[0]) > _MARGIN:
        slope = (e[1] - s[1]) / (e[0] - s[0])
        here = s[1] + (i - s[0]) * slope
        low = ti.max(low, here - 0.5 * abs(slope))
        high = ti.min(high, here + 0.5 * abs(slope))
    return ti.Vector([pixel_of(low - _MARGIN, image.shape[1]), pixel_of(high + _MARGIN, image.shape[1])])


@ti.func
def jumps_at(edge: ti.template(), place, ahead):
    """The jumps at two places, each with how far it may be off by the change of the image between the sides."""
    left, right, part = sides_at(edge, place)
    left_ahead, right_ahead, part_ahead = sides_at(edge, ahead)
    one, other, one_ahead, other_ahead = seen_together(edge.seen, left, right, left_ahead, right_ahead, edge.zeros)
    jump = part * (one - other)
    jump_ahead = part_ahead * (one_ahead - other_ahead)
    rounding = 0.1 * edge.beside * (abs(one) + abs(other))
    return jump, rounding, jump_ahead, 0.1 * edge.beside * (abs(one_ahead) + abs(other_ahead))


@ti.func
def jump_at(edge: ti.template(), place):
    """The jump at a place, with its tangent."""
    jump = edge.zeros
    if ti.static(edge.is_given):
        jump += edge.seen
    else:
        left, right, part = sides_at(edge, place)
        jump += part * (edge.seen(left[0], left[1]) - edge.seen(right[0], right[1]))
    return jump


add_edge.boundary_body = add_term_of_edge  # type: ignore[attr-defined]  # the recorder walks this instead
