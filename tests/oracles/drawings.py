"""Kernels that draw an image of one function; the position of a pixel is its index."""

from typing import Any

import taichi as ti

from taichi_ext import layers, pixel


def drawing(shade: Any, image: Any, antialias: bool = True) -> Any:
    """The image of a function of the position."""

    @ti.kernel
    def draw():
        for i, j in image:
            image[i, j] = pixel(shade, at=(float(i), float(j)), antialias=antialias)

    return draw


def layered(image: Any, shape: Any, count: Any, background: Any, order: str = "index") -> Any:
    """The image of shapes in layers."""

    @ti.kernel
    def draw():
        for i, j in image:
            image[i, j] = layers(shape, count, background, at=(float(i), float(j)), order=order)

    return draw
