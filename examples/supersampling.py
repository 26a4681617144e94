"""Shared by the examples of boundary gradients: differences of a supersampled image, and what they are compared with.

A difference over a step is the mean of the derivative between its ends, so J is averaged there before the two are
compared: an edge that crosses from one pixel into the next within the step is then in both.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from taichi_ext import Jacobian


def differences(render: Callable[[], None], params: Any, image: Any, index: Any, step: float) -> np.ndarray:
    """d image / d params[index] by central differences of what ``render`` draws; as exact as that is."""
    centre, ends = params.to_numpy(), []
    for sign in (1, -1):
        params.from_numpy(_moved(centre, index, sign * step))
        render()
        ends.append(image.to_numpy())
    params.from_numpy(centre)
    return (ends[0] - ends[1]) / (2 * step)


def mean_derivative(plan: Jacobian, params: Any, index: Any, step: float, nodes: int = 16) -> np.ndarray:
    """d image / d params[index], averaged over the step by Gauss' rule; many nodes, as pixels have corners."""
    centre = params.to_numpy()
    mean = 0.0
    for x, weight in _gauss(nodes):
        params.from_numpy(_moved(centre, index, x * step))
        column = (..., *index) if isinstance(index, tuple) else (..., index)
        mean = mean + weight * plan()[column]
    params.from_numpy(centre)
    return np.asarray(mean)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """The distance of two images in the L2 norm, relative to the second."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _moved(centre: np.ndarray, index: Any, by: float) -> np.ndarray:
    moved = centre.copy()
    moved[index] += by
    return moved


def _gauss(nodes: int) -> Iterator[tuple[float, float]]:
    """Places from -1 to 1, and weights with the sum 1."""
    places, weights = np.polynomial.legendre.leggauss(nodes)
    return zip(places, weights / 2, strict=True)
