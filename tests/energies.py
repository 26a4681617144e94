"""Energies that several tests differentiate twice."""

import numpy as np
import taichi as ti
from differences import scalars, vectors

stiffness = 1.5


def energy_of_every_kind_of_parameter():
    """A kernel that returns an energy, and its parameters: fields of numbers and of vectors, and an array.

    Its arguments are the array and a number ``w``; a Python number is ``stiffness``.
    """
    x, v = scalars([0.4, 0.7, 1.1]), vectors([[0.3, 0.8], [1.2, 0.6]])
    array = np.array([0.5, 0.9])

    @ti.kernel
    def run(a: ti.types.ndarray(ti.f64, ndim=1), w: ti.f64) -> ti.f64:
        total = 0.0
        for i in range(3):
            total += ti.sin(x[i] * w) * a[0] * stiffness
        for i in range(2):
            total += a[i] ** 3 * v[i][1] ** 2 * ti.exp(stiffness * w) + v[i][0]
        return total

    return run, x, v, array
