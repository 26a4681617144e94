"""Straight edges that lie exactly on the border of two pixels, or a rounding beside it, where a level has roundings.

The sum of J over a row of pixels is the jump times the speed of the edge, wherever the edge is.
"""

import numpy as np
import pytest
import taichi as ti
from drawings import layered
from kernel_texts import func_of
from numpy.testing import assert_allclose

from taichi_ext import Jacobian, layers, pixel, vjp

W, H = 12, 5
PLACES = [3.5, 4.5, 6.5, 7.5, 8.5, 5.5, 3.4999998, 6.5000005, 4.0, 4.25, 5.37]
DISTANT = 200


@pytest.fixture(scope="module", params=["float32", "float64"])
def dtype(request):
    request.getfixturevalue({"float32": "ti32", "float64": "ti64"}[request.param])
    return getattr(ti, request.param)


@pytest.fixture
def scene(dtype):
    return ti.field(dtype, shape=()), ti.field(dtype, shape=(W, H))


def perspective(place, first):
    @ti.func
    def level(x, y):
        ray = ti.Vector([(x - first - 5.5) / 12, (y - first - 2.0) / 12, 1.0]).normalized()
        return place[None] - first - 5.5 - 12 * ray.x / ray.z

    return level


def quadratic(place, first):
    level = func_of("return place[None] ** 2 - x * x", "x, y", place=place)
    return level


def by_condition(level, image, first):
    shade = func_of("return ti.select(level(x, y) > 0, 1.0, 0.0)", "x, y", level=level)

    @ti.kernel
    def k():
        for i, j in image:
            image[i, j] = pixel(shade, at=(float(i + first), float(j + first)))

    return k


def by_rounding(level, image, first):
    shade = func_of("return float(int(ti.floor(0.05 * level(x, y))) & 1)", "x, y", level=level)

    @ti.kernel
    def k():
        for i, j in image:
            image[i, j] = -pixel(shade, at=(float(i + first), float(j + first)), antialias=True)

    return k


def by_depth(level, image, first):
    surface = func_of("return 1.0, ti.select(n == 0, -level(x, y), level(x, y)), 1.0 - n", "n, x, y", level=level)

    @ti.kernel
    def k():
        for i, j in image:
            image[i, j] = layers(surface, 2, 0.0, at=(float(i + first), float(j + first)), order="depth")

    return k


@pytest.mark.mostly_sweep("float32-0-perspective-by_condition", "float32-0-quadratic-by_depth")
@pytest.mark.parametrize("draw", [by_condition, by_depth])
@pytest.mark.parametrize("make", [perspective, quadratic])
@pytest.mark.parametrize("first", [0, DISTANT])
def test_no_row_loses_or_doubles_its_edge(scene, draw, make, first):
    place, image = scene
    plan = Jacobian(draw(make(place, first), image, first), place, image)
    for x in PLACES:
        place[None] = first + x
        assert_allclose(plan().sum(0), 1.0, atol=1e-3, err_msg=str(x))


@pytest.mark.sweep
def test_rows_in_reverse_mode(scene):
    place, image = scene
    kernel = by_rounding(perspective(place, 0), image, 0)
    for x in PLACES:
        place[None] = x
        assert_allclose(vjp(kernel, place, image, np.ones((W, H))), H, atol=1e-3, err_msg=str(x))


@pytest.mark.sweep
@pytest.mark.parametrize("axis", [0, 1])
def test_cells_whose_border_is_that_of_pixels(dtype, axis):
    """Also that of squares within pixels, which are divided since the distances are not linear."""
    sites, image = ti.Vector.field(2, dtype, shape=2), ti.field(dtype, shape=(7, 7))
    cell = func_of("return 1.0, (ti.Vector([x, y]) - sites[n]).norm(), 0.2 + 0.7 * n", "n, x, y", sites=sites)
    k = layered(image, cell, 2, 0.0, order="depth")
    plan = Jacobian(k, sites, image)
    for a, b in ((2.0, 5.0), (2.0, 4.0), (1.0, 4.5), (1.3, 3.7), (2.1, 4.0)):
        for n, along in enumerate((a, b)):
            sites[n] = [along, 3.0] if axis == 0 else [3.0, along]
        assert_allclose(plan()[..., 0, axis].sum(), -0.35 * 7, rtol=0.03, err_msg=f"{a} {b}")
