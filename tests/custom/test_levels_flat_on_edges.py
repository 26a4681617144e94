"""Levels whose slope is 0 exactly where they are 0: of ``max(q, 0)`` and ``if q > 0`` it is, where q is.

The usual signed distance of a box is such a level.  The sums of J over the pixels are the derivatives of its area.
"""

import numpy as np
import pytest
import taichi as ti
from numpy.testing import assert_allclose

from taichi_ext import coverage, edge, jacobian, layers, nearest, pixel

pytestmark = pytest.mark.usefixtures("ti64")

SIDE = 20
PLACES = {  # centre, half of the sides, angle
    "through centres of pixels": (10.0, 10.0, 5.0, 4.0, 0.0),
    "along borders of pixels": (10.0, 10.0, 4.5, 3.5, 0.0),
    "with roundings": (9.3, 10.2, 5.3, 3.4, 0.0),
    "turned": (9.3, 10.2, 5.3, 3.4, 0.6),
}


@pytest.fixture
def scene():
    return ti.field(ti.f64, shape=5), ti.field(ti.f64, shape=(SIDE, SIDE))


def make_level(box, form):
    @ti.func
    def offsets(x, y):
        c, s = ti.cos(box[4]), ti.sin(box[4])
        u, v = x - box[0], y - box[1]
        return abs(c * u + s * v) - box[2], abs(c * v - s * u) - box[3]

    @ti.func
    def by_max(x, y):
        qx, qy = offsets(x, y)
        return -(ti.Vector([ti.max(qx, 0.0), ti.max(qy, 0.0)]).norm() + ti.min(ti.max(qx, qy), 0.0))

    @ti.func
    def by_branches(x, y):
        qx, qy = offsets(x, y)
        outside = 0.0
        if qx > 0:
            outside += qx
        if qy > 0:
            outside += qy
        within = 0.0
        if qx < 0 and qy < 0:
            within = ti.max(qx, qy)
        return -(outside + within)

    return {"max": by_max, "branches": by_branches}[form]


def make_kernel(level, image, name):
    @ti.func
    def layer(n, x, y):
        return level(x, y), 3.0

    @ti.func
    def surface(n, x, y):
        return level(x, y), 1.0, 3.0

    @ti.func
    def shade(x, y):
        return ti.select(level(x, y) > 0, 3.0, 1.0)

    @ti.kernel
    def by_edge():
        for i, j in image:
            x, y = float(i), float(j)
            image[i, j] = edge(level(x, y), 3.0, 1.0, at=(x, y))

    @ti.kernel
    def by_coverage():
        for i, j in image:
            x, y = float(i), float(j)
            image[i, j] = 1.0 + 2.0 * coverage(level(x, y), at=(x, y))

    @ti.kernel
    def by_layers():
        for i, j in image:
            image[i, j] = layers(layer, 1, 1.0, at=(i, j))

    @ti.kernel
    def by_nearest():
        for i, j in image:
            image[i, j] = nearest(surface, 1, 1.0, at=(i, j))

    @ti.kernel
    def by_pixel():
        for i, j in image:
            image[i, j] = pixel(shade, at=(i, j))

    return {"edge": by_edge, "coverage": by_coverage, "layers": by_layers, "nearest": by_nearest, "pixel": by_pixel}[
        name
    ]


@pytest.mark.mostly_sweep("max-turned-coverage", "max-turned-pixel", "max-through centres of pixels-layers")
@pytest.mark.parametrize("name", ["edge", "coverage", "layers", "nearest", "pixel"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", ["max", "branches"])
def test_a_box(scene, form, place, name):
    if name == "pixel" and place == "along borders of pixels":
        pytest.skip("pixel finds no edge along a side of a pixel where the level has no slope")
    box, image = scene
    box.from_numpy(np.array(PLACES[place]))
    J = jacobian(make_kernel(make_level(box, form), image, name), box, image)
    width, height = PLACES[place][2:4]
    area = np.array([0.0, 0.0, 4 * height, 4 * width, 0.0])
    assert_allclose(J.sum((0, 1)), 2.0 * area, atol=0.3)  # a part of 1/32 at each corner, times its distance


def test_coverage_is_the_area(scene):
    box, image = scene
    box.from_numpy(np.array(PLACES["turned"]))
    kernel = make_kernel(make_level(box, "max"), image, "coverage")
    jacobian(kernel, box, image)
    assert_allclose(image.to_numpy().sum() - SIDE**2, 8 * 5.3 * 3.4, atol=2e-3)
