"""Exact areas and lengths in unit pixels, by clipping: a reference for edges.

Pixel (i, j) is the square of side 1 around the point (i, j).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import numpy as np

from taichi_ext.record import levels

Points = np.ndarray  # (n, 2)
Weight = Callable[[float, float], float]


@contextlib.contextmanager
def undivided_pixels() -> Iterator[None]:
    """Edges in kernels that are compiled now are straight in each pixel, so that central differences are exact."""
    with mock.patch.object(levels, "_slice", lambda body, local, s: levels._Slice(set(), local)):
        yield


def pixels(width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of the pixel centres, each of shape (width, height)."""
    return np.meshgrid(np.arange(width, dtype=float), np.arange(height, dtype=float), indexing="ij")


def clip(points: Points, normal: np.ndarray, offset: float) -> Points:
    """The part of a polygon where ``normal . x >= offset`` (Sutherland and Hodgman)."""
    kept: list[np.ndarray] = []
    distance = points @ normal - offset
    for n in range(len(points)):
        a, b, da, db = points[n - 1], points[n], distance[n - 1], distance[n]
        if (da >= 0) != (db >= 0):
            kept.append(a + (b - a) * da / (da - db))
        if db >= 0:
            kept.append(b)
    return np.array(kept).reshape(-1, 2)


def area(points: Points) -> float:
    """Signed area, positive where the corners go round to the left."""
    if len(points) < 3:
        return 0.0
    x, y = points.T
    return 0.5 * float(np.sum(np.roll(x, 1) * y - x * np.roll(y, 1)))


def square(i: float, j: float) -> Points:
    return np.array([[i - 0.5, j - 0.5], [i + 0.5, j - 0.5], [i + 0.5, j + 0.5], [i - 0.5, j + 0.5]])


def area_in_pixels(polygon: Points, width: int, height: int) -> np.ndarray:
    """The area of a polygon in every pixel."""
    result = np.zeros((width, height))
    for i in range(width):
        strip = clip(clip(polygon, np.array([1.0, 0.0]), i - 0.5), np.array([-1.0, 0.0]), -i - 0.5)
        for j in range(height):
            result[i, j] = area(clip(clip(strip, np.array([0.0, 1.0]), j - 0.5), np.array([0.0, -1.0]), -j - 0.5))
    return result


def half_plane_in_pixels(normal: np.ndarray, offset: float, width: int, height: int) -> np.ndarray:
    """The area where ``normal . x > offset`` in every pixel."""
    result = np.zeros((width, height))
    for i, j in np.ndindex(width, height):
        result[i, j] = area(clip(square(i, j), normal, offset))
    return result


def line_in_box(
    normal: np.ndarray, offset: float, low: np.ndarray, high: np.ndarray, weight: Weight = lambda x, y: 1.0
) -> float:
    """The integral of a linear weight along ``normal . x = offset`` in a box; ``normal`` has length 1."""
    point, along = normal * offset, np.array([-normal[1], normal[0]])
    first, last = -np.inf, np.inf
    for k in range(2):
        if abs(along[k]) < 1e-15:
            if not low[k] < point[k] < high[k]:
                return 0.0
            continue
        ends = sorted([(low[k] - point[k]) / along[k], (high[k] - point[k]) / along[k]])
        first, last = max(first, ends[0]), min(last, ends[1])
    return max(0.0, last - first) * weight(*(point + 0.5 * (first + last) * along))


def line_in_pixels(
    normal: np.ndarray, offset: float, width: int, height: int, weight: Weight = lambda x, y: 1.0
) -> np.ndarray:
    """The integral of a linear weight along a line in every pixel, or its length."""
    result = np.zeros((width, height))
    for i, j in np.ndindex(width, height):
        at = np.array([i, j], float)
        result[i, j] = line_in_box(normal, offset, at - 0.5, at + 0.5, weight)
    return result


def circle_in_pixels(
    centre: Sequence[float],
    radius: float,
    weight: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    width: int,
    height: int,
    steps: int = 400_000,
) -> np.ndarray:
    """``integral of weight(angle, x, y) dl`` over the part of a circle that is in every pixel, by the midpoint rule."""
    angle = (np.arange(steps) + 0.5) * 2 * np.pi / steps
    x, y = centre[0] + radius * np.cos(angle), centre[1] + radius * np.sin(angle)
    i, j = np.floor(x + 0.5).astype(int), np.floor(y + 0.5).astype(int)
    inside = (i >= 0) & (i < width) & (j >= 0) & (j < height)
    result = np.zeros((width, height))
    length = 2 * np.pi * radius / steps
    np.add.at(result, (i[inside], j[inside]), (weight(angle, x, y) * length)[inside])
    return result
