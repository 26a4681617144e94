"""A square and its derivative."""

import taichi as ti

from taichi_ext import Jacobian


@ti.kernel
def square(x: ti.f64) -> ti.f64:
    return x * x


FUNCTIONS = {
    "square": (float, square, float),
    "double": (lambda x: Jacobian(square, "x", args=(float(x),)), lambda J: J(), float),
}
