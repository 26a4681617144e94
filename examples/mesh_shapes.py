"""Shared by meshes.py and camera_pose.py: the corners and triangles of simple shapes."""

from collections.abc import Sequence

import numpy as np


def box(size: Sequence[float] = (1.0, 0.8, 1.2)) -> tuple[np.ndarray, np.ndarray]:
    """Corners, shape (8, 3), and triangles, shape (12, 3), of a box."""
    corners = np.array(np.meshgrid(*([-s, s] for s in size), indexing="ij"), float).reshape(3, -1).T
    sides = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    return corners, np.array([t for a, b, c, d in sides for t in ((a, b, c), (a, c, d))])


def icosphere(divisions: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """A sphere of radius 1.3 from an icosahedron whose triangles are divided in four."""
    g = (1 + 5**0.5) / 2
    signs = [(-1, 1), (1, 1), (-1, -1), (1, -1)]
    points = [(a, b * g, 0) for a, b in signs] + [(0, a, b * g) for a, b in signs] + [(b * g, 0, a) for a, b in signs]
    corners = [np.array(p) / np.linalg.norm(p) for p in points]
    distance = np.linalg.norm(np.array(corners)[:, None] - np.array(corners), axis=-1)
    close = (distance > 0) & (distance < 1.1)
    faces = [
        (a, b, c) for a in range(12) for b in range(a) for c in range(b) if close[a, b] and close[b, c] and close[a, c]
    ]
    for _ in range(divisions):
        middles: dict[frozenset[int], int] = {}

        def middle(a: int, b: int, middles: dict[frozenset[int], int] = middles) -> int:
            if frozenset((a, b)) not in middles:
                middles[frozenset((a, b))] = len(corners)
                corners.append((corners[a] + corners[b]) / np.linalg.norm(corners[a] + corners[b]))
            return middles[frozenset((a, b))]

        split = [(a, b, c, middle(a, b), middle(b, c), middle(c, a)) for a, b, c in faces]
        faces = [t for a, b, c, d, e, f in split for t in ((a, d, f), (d, b, e), (f, e, c), (d, e, f))]
    return 1.3 * np.array(corners), np.array(faces)
