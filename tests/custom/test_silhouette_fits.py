"""Shapes that are found from their silhouettes: five scenes, ten random starts each, to 1e-3 pixels."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars, write

from taichi_ext import layers, least_squares, ray_level, segment_edge

pytestmark = pytest.mark.usefixtures("ti64")

W, H, FOCAL = 40, 32, 36.0


def disc(p):
    @ti.func
    def shape(n, x, y):
        return p[2] - ti.sqrt((x - p[0]) ** 2 + (y - p[1]) ** 2), 1.0

    return over(shape, 1)


def ellipse(p):
    @ti.func
    def shape(n, x, y):
        u = (x - p[0]) * ti.cos(p[4]) + (y - p[1]) * ti.sin(p[4])
        v = (y - p[1]) * ti.cos(p[4]) - (x - p[0]) * ti.sin(p[4])
        return 1.0 - ti.sqrt((u / p[2]) ** 2 + (v / p[3]) ** 2), 1.0

    return over(shape, 1)


def three_discs(p):
    @ti.func
    def shape(n, x, y):
        return p[3 * n + 2] - ti.sqrt((x - p[3 * n]) ** 2 + (y - p[3 * n + 1]) ** 2), 0.4 + 0.3 * n

    return over(shape, 3)


def two_balls(p):
    """Signed distances; one ball moves with the other."""

    @ti.func
    def distance(q):
        centre = ti.Vector([p[0], p[1], 5.0])
        return ti.min((q - centre).norm() - p[2], (q - centre - ti.Vector([p[3], p[4], 0.0])).norm() - 0.5)

    @ti.func
    def shape(n, x, y):
        ray = ti.Vector([(x - W / 2) / FOCAL, (y - H / 2) / FOCAL, 1.0]).normalized()
        return ray_level(distance, ti.Vector([0.0, 0.0, 0.0]), ray, 0.0, 10.0), 1.0

    return over(shape, 1)


def over(shape, count):
    @ti.func
    def pixel_at(px, py):
        return layers(shape, count, 0.0, at=(px, py))

    return pixel_at


def triangle(p):
    @ti.func
    def pixel_at(px, py):
        total = 0.0
        for n in ti.static(range(3)):
            start, end = ti.Vector([p[2 * n], p[2 * n + 1]]), ti.Vector([p[(2 * n + 2) % 6], p[(2 * n + 3) % 6]])
            total += segment_edge(start, end, 1.0, at=(px, py), antialias=True)
        return total

    return pixel_at


SCENES = {  # function, the true parameters, how far starts are from them, pixels in one unit
    "disc": (disc, [19.3, 15.8, 9.4], [6, 6, 3], 1),
    "ellipse": (ellipse, [19.3, 15.8, 12.4, 7.3, 0.5], [4, 4, 2, 2, 0.4], 1),
    "three discs": (three_discs, [13.2, 12.1, 7.0, 25.3, 14.2, 6.0, 18.0, 20.4, 5.0], [3, 3, 1.5] * 3, 1),
    "triangle": (triangle, [6.3, 5.1, 33.2, 9.7, 15.6, 27.3], 4, 1),
    "two balls": (two_balls, [-0.3, 0.1, 0.9, 0.9, -0.3], [0.4, 0.4, 0.2, 0.3, 0.3], FOCAL / 5),
}


def count_found(function, true, spread, scale):
    """How many of ten starts end within 1e-3 pixels of the true parameters."""
    true = np.array(true)
    p, image, target, residuals = scalars(true), outputs(W, H), outputs(W, H), outputs(W, H)
    pixel_at = function(p)

    @ti.kernel
    def draw():
        for i, j in image:
            px, py = float(i), float(j)
            image[i, j] = pixel_at(px, py)
            residuals[i, j] = image[i, j] - target[i, j]

    draw()
    write(target, read(image))
    generator, found = np.random.default_rng(0), 0
    for _ in range(10):
        write(p, true + generator.uniform(-1, 1, true.shape) * spread)
        least_squares(draw, p, residuals)
        found += np.abs(read(p) - true).max() * scale < 1e-3
    return found


@pytest.mark.sweep
def test_48_of_50_starts_find_their_shape():
    found = {name: count_found(*scene) for name, scene in SCENES.items()}
    assert sum(found.values()) >= 48, found
