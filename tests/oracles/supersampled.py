"""Images of a function that is sampled many times in each pixel: a reference for derivatives of antialiased images.

A difference over a step is the mean of the derivative between its ends, so J is averaged there before the two are
compared: an edge that crosses from one pixel into the next within the step is then in both.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import taichi as ti
from differences import read, write

from taichi_ext import Jacobian

NODES = 24  # of Gauss' rule: a pixel's derivative has corners and jumps


def sampler(colour: Any, image: Any, samples: int = 2048) -> Callable[[], None]:
    """A function that fills ``image`` with the means of ``colour(x, y)`` over its pixels.

    Pixels of one colour take one sample; the others as many as given, in an additive lattice (R2), which is denser than
    a grid in every direction.
    """

    @ti.kernel
    def sample(n: ti.i32):
        for i, j in image:
            first = colour(i - 0.5, j - 0.5)
            is_uniform = True
            for a, b in ti.ndrange(7, 7):
                is_uniform &= abs(colour(i - 0.5 + a / 6, j - 0.5 + b / 6) - first) < 1e-12
            total = first
            if not is_uniform:
                total = 0.0
                for k in range(n):
                    u = 0.5 + k * 0.7548776662466927
                    v = 0.5 + k * 0.5698402909980532
                    total += colour(i - 0.5 + u - ti.floor(u), j - 0.5 + v - ti.floor(v)) / n
            image[i, j] = total

    return lambda: sample(samples)


def errors_by_column(
    kernel: Any, params: Any, image: Any, render: Callable[[], None], steps: Any, nodes: int = NODES
) -> np.ndarray:
    """The error (L2 over the image, relative) of the mean of J over ``params[k] +- steps[k]``, for each column k.

    Columns of which the step is 0 are left out.
    """
    centre = read(params)
    plan = Jacobian(kernel, params, image)
    places, weights = np.polynomial.legendre.leggauss(nodes)
    errors = []

    def moved(index: tuple[int, ...], by: float) -> np.ndarray:
        values = centre.copy()
        values[index] += by
        return values

    for index in np.ndindex(centre.shape):
        step = np.broadcast_to(steps, centre.shape)[index]
        if step == 0:
            continue
        ends = []
        for sign in (1, -1):
            write(params, moved(index, sign * step))
            render()
            ends.append(read(image))
        expected = (ends[0] - ends[1]) / (2 * step)
        mean = np.zeros_like(expected)
        for place, weight in zip(places, weights / 2, strict=True):
            write(params, moved(index, place * step))
            mean += weight * plan()[(..., *index)]
        errors.append(np.linalg.norm(mean - expected) / np.linalg.norm(expected))
    write(params, centre)
    return np.array(errors)
