"""The table of the edges of a triangle mesh: mesh_edges."""

from __future__ import annotations

import numpy as np

from taichi_ext.errors import InvalidArgumentError

_WELD = 1e-6  # of the extent of the mesh: corners that are as near as this lie at one place
_DIRECTION = np.array([0.6180, 0.5411, 0.5704])  # corners are sorted along it; few of a mesh lie in one plane across it
_MOST_PAIRS = 4_000_000  # of corners and edges that are compared at once


def mesh_edges(triangles: object, corners: object) -> np.ndarray:
    """The edges of a triangle mesh, each with the corners of its faces that lie opposite.

    In an image an edge is part of the silhouette if it has one face, or if all opposite corners lie on the same side
    of the edge.

    Args:
        triangles: the numbers of each face's corners, integers of shape (faces, 3).
        corners: their positions, real numbers of shape (corners, 3) or (corners, 2).  Corners that are nearer to each
            other than 1e-6 of the mesh's extent are one, the first of them, as in meshes with a corner for each face,
            normal or texture coordinate.  Faces without area (lower than that) and faces that occur twice are left
            out.  An edge on which other corners lie (T-junctions) is split there.

    Returns:
        int32 array of shape (edges, 2 + n): both ends and the opposite corner in each face, -1 where there are fewer
        than n faces.  n is the largest number of faces at an edge, at least 2.

    Raises:
        InvalidArgumentError: a shape or type is wrong, or a corner is negative, missing or not finite.

    Example:
        >>> from taichi_ext import mesh_edges
        >>> mesh_edges([[0, 1, 2], [2, 1, 3]], [[0, 0], [1, 0], [0, 1], [1, 1]])
        array([[ 0,  1,  2, -1],
               [ 0,  2,  1, -1],
               [ 1,  2,  0,  3],
               [ 1,  3,  2, -1],
               [ 2,  3,  1, -1]], dtype=int32)
        >>> len(mesh_edges([[0, 1, 2], [3, 4, 5]], [[0, 0], [1, 0], [0, 1], [0, 1], [1, 0], [1, 1]]))  # in one place
        5
    """
    faces = np.asarray(triangles)
    if faces.ndim != 2 or faces.shape[1] != 3 or not np.issubdtype(faces.dtype, np.integer):
        raise InvalidArgumentError(
            f"mesh_edges: triangles is an array of shape {faces.shape} and type {faces.dtype}; expected integers of "
            "shape (faces, 3), the numbers of each face's corners."
        )
    faces = faces.astype(np.int64)
    if faces.size and faces.min() < 0:
        raise InvalidArgumentError(f"mesh_edges: face {int(np.argmin(faces.min(1)))} has a negative corner number.")
    return _table(*_welded_sides(faces, _checked(corners, faces)))


def _checked(corners: object, faces: np.ndarray) -> np.ndarray:
    """The corners in space, as float64."""
    points = np.asarray(corners)
    if points.ndim != 2 or points.shape[1] not in (2, 3) or points.dtype.kind not in "fiu":
        raise InvalidArgumentError(
            f"mesh_edges: corners is an array of shape {points.shape} and type {points.dtype}; expected real numbers "
            "of shape (corners, 3) or (corners, 2)."
        )
    if faces.size and faces.max() >= len(points):
        number = int(np.argmax(faces.max(1)))
        raise InvalidArgumentError(
            f"mesh_edges: face {number} has the corners {faces[number].tolist()}, but there are {len(points)} corners."
        )
    is_finite = np.isfinite(points).all(1)
    if not is_finite.all():
        number = int(np.argmin(is_finite))
        raise InvalidArgumentError(
            f"mesh_edges: corner {number} is {points[number].tolist()}; every corner must be finite."
        )
    return np.pad(points.astype(np.float64), ((0, 0), (0, 3 - points.shape[1])))


def _sides(faces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of the sides of all faces, and the corners opposite."""
    ends = np.stack([faces, np.roll(faces, -1, axis=1)], axis=-1)
    return np.sort(ends.reshape(-1, 2), axis=1), np.roll(faces, 1, axis=1).reshape(-1)


def _table(ends: np.ndarray, opposite: np.ndarray) -> np.ndarray:
    """One row for each pair of ends."""
    edges, numbers, counts = np.unique(ends, axis=0, return_inverse=True, return_counts=True)
    table = np.full((len(edges), 2 + counts.max(initial=2)), -1, np.int32)
    table[:, :2] = edges
    order = np.argsort(numbers.reshape(-1), kind="stable")
    first = np.repeat(np.cumsum(counts) - counts, counts)
    table[numbers.reshape(-1)[order], 2 + np.arange(len(order)) - first] = opposite[order]
    return table


# --- welding ----------------------------------------------------------------------------------------------------------


def _welded_sides(faces: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sides of the faces that have an area, of corners at different places, split where other corners lie."""
    used = np.unique(faces)
    if not used.size:
        return _sides(faces)
    tolerance = _WELD * np.ptp(points[used], axis=0).max()
    faces = _first_at_place(points, used, tolerance)[faces]
    a, b, c = (points[faces[:, k]] for k in range(3))
    longest = np.max([np.linalg.norm(q - p, axis=1) for p, q in ((a, b), (b, c), (c, a))], axis=0)
    faces = faces[np.linalg.norm(np.cross(b - a, c - a), axis=1) > tolerance * longest]
    faces = faces[np.sort(np.unique(np.sort(faces, axis=1), axis=0, return_index=True)[1])]
    ends, opposite = _sides(faces)
    if not ends.size:
        return ends, opposite
    edges, numbers = np.unique(ends, axis=0, return_inverse=True)
    edge, corner, place = _corners_on_edges(edges, points, np.unique(faces), tolerance)
    order = np.lexsort((place, edge))
    starts = np.searchsorted(edge[order], np.arange(len(edges) + 1))
    counts = (np.diff(starts) + 1)[numbers.reshape(-1)]
    side = np.repeat(np.arange(len(ends)), counts)
    part = np.arange(len(side)) - np.repeat(np.cumsum(counts) - counts, counts)
    on_edge = np.append(corner[order], 0)  # the last is not used
    start = starts[numbers.reshape(-1)[side]]
    low = np.where(part == 0, ends[side, 0], on_edge[np.minimum(start + part - 1, len(on_edge) - 1)])
    high = np.where(part == counts[side] - 1, ends[side, 1], on_edge[np.minimum(start + part, len(on_edge) - 1)])
    return np.sort(np.stack([low, high], axis=-1), axis=1), opposite[side]


def _first_at_place(points: np.ndarray, used: np.ndarray, tolerance: float) -> np.ndarray:
    """For each corner, the first of those that lie at its place."""
    order = used[np.argsort(points[used] @ _DIRECTION, kind="stable")]
    along = points[order] @ _DIRECTION
    pairs = []
    for apart in range(1, len(order)):
        close = np.flatnonzero(along[apart:] - along[:-apart] <= tolerance)
        if not close.size:
            break
        a, b = order[close], order[close + apart]
        is_near = np.linalg.norm(points[a] - points[b], axis=1) <= tolerance
        pairs.append(np.stack([a[is_near], b[is_near]]))
    first = np.arange(len(points))
    near = np.concatenate(pairs, axis=1) if pairs else np.zeros((2, 0), np.int64)
    while (first[near[0]] != first[near[1]]).any():
        least = np.minimum(first[near[0]], first[near[1]])
        for ends in near:
            np.minimum.at(first, ends, least)
        first = first[first]
    return first


def _corners_on_edges(
    edges: np.ndarray, points: np.ndarray, used: np.ndarray, tolerance: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The corners that lie on edges, between their ends: numbers of edge and corner, and distance from the start."""
    order = used[np.argsort(points[used] @ _DIRECTION, kind="stable")]
    along = points[order] @ _DIRECTION
    ends = np.sort(points[edges] @ _DIRECTION, axis=1)
    first = np.searchsorted(along, ends[:, 0] - tolerance)
    count = np.searchsorted(along, ends[:, 1] + tolerance, side="right") - first
    found = []
    chunks = np.flatnonzero(np.diff(np.cumsum(count) // _MOST_PAIRS, prepend=-1))
    for low, high in zip(chunks, [*chunks[1:], len(edges)], strict=True):
        edge = np.repeat(np.arange(low, high), count[low:high])
        within = np.arange(len(edge)) - np.repeat(np.cumsum(count[low:high]) - count[low:high], count[low:high])
        corner = order[first[edge] + within]
        start, side = points[edges[edge, 0]], points[edges[edge, 1]] - points[edges[edge, 0]]
        length = np.linalg.norm(side, axis=1)
        away = points[corner] - start
        place = np.einsum("ij,ij->i", away, side) / length
        is_between = (place > tolerance) & (place < length - tolerance)
        is_on = is_between & (np.linalg.norm(away - (place / length)[:, None] * side, axis=1) <= tolerance)
        found.append((edge[is_on], corner[is_on], place[is_on]))
    edge, corner, place = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return edge, corner, place
