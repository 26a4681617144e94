"""Edges of triangle meshes: mesh_edges, visible_edge."""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from typing import Any

import numpy as np
import taichi as ti

from taichi_ext.boundary.edges import segment_edge
from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.kernel_scope import leave_to_engine
from taichi_ext.errors import InvalidArgumentError

_PARTS = 4  # of a segment within a pixel, each of which is seen or hidden
_BESIDE = 1e-3  # pixels from the segment at which both sides are looked at
_TINY = 1e-20


def mesh_edges(triangles: Any) -> np.ndarray:
    """The edges of a triangle mesh, each with the corners of its faces that lie opposite.

    In an image an edge is part of the silhouette if it has one face, or if both opposite corners lie on the same side
    of the edge.

    Args:
        triangles: the numbers of each face's corners, integers of shape (faces, 3).

    Returns:
        int32 array of shape (edges, 4): both ends and the opposite corner in each face.  The last is -1 for an edge
        with one face.

    Raises:
        InvalidArgumentError: the shape or type is wrong, a corner is negative, a triangle has a corner twice, or an
            edge has more than two faces.

    Example:
        >>> from taichi_ext import mesh_edges
        >>> mesh_edges([[0, 1, 2], [2, 1, 3]])
        array([[ 0,  1,  2, -1],
               [ 0,  2,  1, -1],
               [ 1,  2,  0,  3],
               [ 1,  3,  2, -1],
               [ 2,  3,  1, -1]], dtype=int32)
    """
    faces = np.asarray(triangles)
    if faces.ndim != 2 or faces.shape[1] != 3 or not np.issubdtype(faces.dtype, np.integer):
        raise InvalidArgumentError(
            f"mesh_edges: triangles is an array of shape {faces.shape} and type {faces.dtype}; expected integers of "
            "shape (faces, 3), the numbers of each face's corners."
        )
    if faces.size and faces.min() < 0:
        raise InvalidArgumentError(f"mesh_edges: face {int(np.argmin(faces.min(1)))} has a negative corner number.")
    opposite: dict[tuple[int, int], list[int]] = {}
    for number, face in enumerate(faces.tolist()):
        if len(set(face)) < 3:
            raise InvalidArgumentError(
                f"mesh_edges: face {number} has the corners {face}, one of them twice; leave out such triangles."
            )
        for k in range(3):
            a, b = sorted((face[k], face[(k + 1) % 3]))
            opposite.setdefault((a, b), []).append(face[(k + 2) % 3])
    for ends, corners in opposite.items():
        if len(corners) > 2:
            raise InvalidArgumentError(
                f"mesh_edges: the edge of corners {ends[0]} and {ends[1]} has {len(corners)} faces; an edge can have "
                "one or two. Give the faces beyond the second corners of their own."
            )
    rows = [[*ends, *corners, *[-1] * (2 - len(corners))] for ends, corners in sorted(opposite.items())]
    return np.array(rows, np.int32).reshape(-1, 4)


def visible_edge(start: Any, end: Any, seen: Any, *, at: Any) -> Any:
    """The boundary term of a straight edge in the image, where it is visible: 0, with a tangent.

    Like ``segment_edge``, but the jump is the difference of what is seen on both sides: 0 where the edge is hidden.
    Add it to the pixel once for every edge that may be visible.

    Args:
        start: first end in the image, a vector of 2, in pixels.
        end: second end.  If the edge moves, its ends carry the tangents.
        seen: a ti.func ``seen(x, y)`` that returns what the image shows at the position (x, y) in pixels: a scalar,
            vector or matrix, without antialiasing.
        at: the pixel centre, ``(px, py)``.

    Returns:
        0, of the shape of what is seen.  Taichi's reverse mode is not supported.

    Raises:
        UnsupportedError: ``seen`` is no ti.func, or an end is no vector of 2.

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


visible_edge.boundary_kind = "visible_edge"  # type: ignore[attr-defined]  # for the recorder
visible_edge._is_wrapped_kernel = True  # type: ignore[attr-defined]  # Taichi: not a foreign function


@ti.func
def visible_parts(seen: ti.template(), start, end, x, y):
    """The boundary terms of the parts of a segment in the pixel at (x, y), with what is seen next to the middle."""
    total = stop_gradient(seen(x, y)) * 0.0
    a = stop_gradient(start)
    side = stop_gradient(end) - a
    first = 0.0
    last = 1.0
    centre = ti.Vector([x, y])
    for k in ti.static(range(2)):
        low = stop_gradient(centre[k]) - a[k] - 0.5
        if abs(side[k]) < _TINY:
            if low > 0 or low < -1:
                last = -1.0
        else:
            ends = ti.Vector([low, low + 1.0]) / side[k]
            first = ti.max(first, ends.min())
            last = ti.min(last, ends.max())
    if last > first:
        left = _BESIDE * ti.Vector([-side[1], side[0]]) / side.norm()
        for m in ti.static(range(_PARTS)):
            t0 = first + (last - first) * m / _PARTS
            t1 = first + (last - first) * (m + 1) / _PARTS
            middle = a + 0.5 * (t0 + t1) * side
            inside = stop_gradient(seen(middle[0] + left[0], middle[1] + left[1]))
            outside = stop_gradient(seen(middle[0] - left[0], middle[1] - left[1]))
            way = end - start
            total += segment_edge(start + t0 * way, start + t1 * way, inside - outside, at=(x, y))
    return total


visible_edge.boundary_body = visible_parts  # type: ignore[attr-defined]  # what the recorder walks in its place
