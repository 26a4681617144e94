"""Pixels that edges cross more than once: thin lines, tiny shapes, kinks, more shapes than a square can hold."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars, write
from numpy.testing import assert_allclose
from supersampled import errors_by_column, sampler

from taichi_ext import layers, nearest, value_and_jacobian

pytestmark = pytest.mark.usefixtures("ti64")

SAMPLES = 20_000
NODES = 96  # derivatives of a shape within a pixel change at once where it meets the border


def line(p, n, x, y):
    return 0.5 * p[2] - abs((x - p[0]) * ti.cos(p[1]) + (y - 4.3) * ti.sin(p[1])), 0.8


def disc(p, n, x, y):
    return p[2] - ti.sqrt((x - p[0]) ** 2 + (y - p[1]) ** 2), 0.8


def squared(p, n, x, y):
    return p[2] ** 2 - (x - p[0]) ** 2 - (y - p[1]) ** 2, 0.8


def manhattan(p, n, x, y):
    return p[2] - abs(x - p[0]) - abs(y - p[1]), 0.8


def either(p, n, x, y):
    return ti.max(x - p[0] - 0.2 * y, y - p[1] + 0.1 * x), 0.8


def discs(p, n, x, y):
    return p[n, 2] - ti.sqrt((x - p[n, 0]) ** 2 + (y - p[n, 1]) ** 2), 0.2 + 0.08 * n


GRID = np.array([[(n % 5) / 5 - 0.4 + 0.03 * (n % 3), (n // 5) / 2 - 0.27 + 0.05 * (n % 2)] for n in range(10)])
SCENES = {  # shape, parameters, steps
    "a line of 0.3 pixels": (line, [5.2, 0.4, 0.3], [0.25, 0.03, 0.05]),
    "a steep line of 0.3 pixels": (line, [5.2, 1.2, 0.3], [0.25, 0.03, 0.05]),
    "a disc, r = 0.3": (disc, [3.1, 3.35, 0.3], [0.2, 0.2, 0.05]),
    "a disc, r = 0.3, squared distance": (squared, [3.1, 3.35, 0.3], [0.2, 0.2, 0.05]),
    "a disc, r = 1.2": (disc, [3.1, 3.35, 1.2], [0.2, 0.2, 0.05]),
    "Manhattan distance": (manhattan, [5.1, 4.35, 2.3], [0.2, 0.2, 0.2]),
    "union of half-planes": (either, [5.1, 4.35], [0.2, 0.2]),
    "ten discs in a pixel": (discs, np.column_stack([GRID + 3, np.full(10, 0.12)]), [[0, 0, 0.05]] * 10),
}


@pytest.mark.parametrize("name", SCENES)
def test_shapes_that_cross_a_pixel_more_than_once(name):
    function, given, steps = SCENES[name]
    p, image = scalars(np.array(given)), outputs(12, 9)
    count = len(given) if np.ndim(given) > 1 else 1
    level_of = ti.func(function)

    @ti.func
    def shape(n, x, y):
        return level_of(p, n, x, y)

    @ti.kernel
    def k():
        for i, j in image:
            image[i, j] = layers(shape, count, 0.1, at=(float(i), float(j)))

    @ti.func
    def colour(x, y):
        c = 0.1
        for n in range(count):
            level, own = shape(n, x, y)
            if level > 0:
                c = own
        return c

    check(k, p, image, colour, steps)


def check(k, p, image, colour, steps):
    render = sampler(colour, image, SAMPLES)
    errors = errors_by_column(k, p, image, render, steps, NODES)
    assert np.median(errors) < 0.01, errors
    assert errors.max() < 0.03, errors
    render()
    expected = read(image)
    k()
    assert_allclose(read(image), expected, atol=1e-3)


def draws_nearest(surface, count, image):
    @ti.kernel
    def k():
        for i, j in image:
            image[i, j] = nearest(surface, count, 0.1, at=(float(i), float(j)))

    return k


def test_ten_cells_in_a_pixel():
    generator = np.random.default_rng(0)
    given = np.column_stack([GRID + 3 + generator.uniform(-0.05, 0.05, (10, 2)), generator.uniform(0.1, 1, 10)])
    p, image = scalars(given), outputs(7, 7)

    @ti.func
    def cell(n, x, y):
        return 1.0, ti.sqrt((x - p[n, 0]) ** 2 + (y - p[n, 1]) ** 2), p[n, 2]

    @ti.func
    def colour(x, y):
        c = 0.0
        least = 1e9
        for n in range(10):
            _, depth, own = cell(n, x, y)
            if depth < least:
                least = depth
                c = own
        return c

    check(draws_nearest(cell, 10, image), p, image, colour, 0.05)


@pytest.mark.parametrize("order", [1, -1])
def test_of_too_many_shapes_the_nearest_stay(order):
    """Nine discs with one rim, and nine planes that swap their order along one line: no square is small enough."""
    depths, image = scalars(np.arange(9.0)[::order]), outputs(7, 7)

    @ti.func
    def discs_behind(n, x, y):
        return 2.2 - ti.sqrt((x - 3.1) ** 2 + (y - 3.2) ** 2), depths[n], 0.2 + 0.05 * depths[n]

    @ti.func
    def tilted(n, x, y):
        return 1.0, (depths[n] - 4) * (x - 3.2), 0.2 + 0.05 * depths[n]

    value, J = value_and_jacobian(draws_nearest(discs_behind, 9, image), depths, image)
    area = (value - 0.1).sum() / 0.1
    assert area == pytest.approx(np.pi * 2.2**2, rel=1e-3)
    nearest_one = 0 if order == 1 else 8
    assert_allclose(J[..., nearest_one].sum(), 0.05 * area, rtol=1e-3)
    assert_allclose(np.delete(J, nearest_one, -1), 0, atol=1e-4)
    write(depths, np.arange(9.0)[::order])
    draws_nearest(tilted, 9, image)()
    left = np.clip(3.2 - (np.arange(7)[:, None] - 0.5), 0, 1)
    assert_allclose(read(image), left * 0.6 + (1 - left) * 0.2 + np.zeros((7, 7)), atol=1e-3)
