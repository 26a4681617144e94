"""Shared by the examples of boundary gradients: differences of a supersampled image, and what they are compared with.

A difference over a step is the mean of the derivative between its ends, so J is averaged there before the two are
compared: an edge that crosses from one pixel into the next within the step is then in both.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import taichi as ti

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


def all_differences(render: Callable[[], None], params: Any, image: Any, steps: Sequence[float]) -> np.ndarray:
    """``differences`` with respect to each number of params, in the last axis."""
    return np.stack([differences(render, params, image, k, step) for k, step in enumerate(steps)], axis=-1)


def mean_jacobian(plan: Jacobian, params: Any, steps: Sequence[float], nodes: int = 16) -> np.ndarray:
    """``mean_derivative`` with respect to each number of params, in the last axis."""
    return np.stack([mean_derivative(plan, params, k, step, nodes) for k, step in enumerate(steps)], axis=-1)


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


@ti.data_oriented
class Supersampled:
    """Draws the ``image`` of a class by ``samples`` x ``samples`` of its values ``at(x, y)`` in each pixel."""

    samples = 24

    @ti.kernel
    def sample(self, n: ti.i32):
        for i, j in self.image:
            total = 0.0
            for a, b in ti.ndrange(n, n):
                total += self.at(i - 0.5 + (a + 0.5) / n, j - 0.5 + (b + 0.5) / n)
            self.image[i, j] = total / n**2

    def supersample(self) -> None:
        self.sample(self.samples)


@ti.data_oriented
class SupersampledAtEdges(Supersampled):
    """The same for images of few values: only pixels whose corners and centre differ have many samples."""

    @ti.kernel
    def sample(self, n: ti.i32):
        for i, j in self.image:
            middle = self.at(float(i), float(j))
            count = 1
            for a, b in ti.ndrange(3, 3):
                if self.at(i - 0.5 + 0.5 * a, j - 0.5 + 0.5 * b) != middle:
                    count = n
            total = 0.0
            for a, b in ti.ndrange(count, count):
                total += self.at(i - 0.5 + (a + 0.5) / count, j - 0.5 + (b + 0.5) / count)
            self.image[i, j] = total / count**2
