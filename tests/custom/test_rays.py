"""Levels of signed distances: the silhouette and the shadow of a ball, against closed forms."""

import numpy as np
import pytest
import taichi as ti
from differences import central_differences, outputs, scalars
from numpy.testing import assert_allclose
from reverse_mode import check_transpose, gradient_field
from supersampled import errors_by_column, sampler

from taichi_ext import UnsupportedError, edge, jacobian, ray_level, value_and_jacobian

pytestmark = pytest.mark.usefixtures("ti64")

BALL = [0.2, -0.3, 5.0, 1.1]  # centre and radius
FARTHEST = 5.0  # of the places that matter, from the origin
GOLDEN = 1e-5  # the golden section ends there


def tolerance(J):
    """What the place of a minimum allows.

    Places x are rounded to e = eps |x|.  A distance of about sqrt(m^2 + t^2) to a point varies by less than e for
    |t| < sqrt(2 m e), so the minimum is found to this t, and a unit vector to the point, the derivative, to t / m.
    Here m is at least 1.
    """
    return max(GOLDEN, np.sqrt(2 * np.finfo(J.dtype).eps * FARTHEST))


def marched(p, level):
    """Levels of rays from the camera that hit, touch and miss."""

    @ti.func
    def distance(x):
        return (x - ti.Vector([p[0], p[1], p[2]])).norm() - p[3]

    @ti.kernel
    def k():
        for n in level:
            ray = ti.Vector([-0.35 + 0.05 * n, 0.02 * n, 1.0]).normalized()
            level[n] = ray_level(distance, ti.Vector([0.0, 0.0, 0.0]), ray, 0.0, 10.0)

    return k


def test_the_smallest_distance_and_its_derivative():
    p, level = scalars(BALL), outputs(16)
    value, J = value_and_jacobian(marched(p, level), p, level)
    n = np.arange(16)
    ray = np.stack([-0.35 + 0.05 * n, 0.02 * n, np.ones(16)], -1)
    ray /= np.linalg.norm(ray, axis=1, keepdims=True)

    def exact(ball):
        beside = ball[:3] - (ray @ ball[:3])[:, None] * ray
        return ball[3] - np.linalg.norm(beside, axis=1)

    assert (exact(np.array(BALL)) > 0).any()
    assert (exact(np.array(BALL)) < 0).any()
    assert_allclose(value, exact(np.array(BALL)), atol=1e-9)
    for k in range(4):
        h = 1e-5 * np.eye(4)[k]
        differences = (exact(BALL + h) - exact(BALL - h)) / 2e-5
        assert_allclose(J[:, k], differences, rtol=1e-5, atol=tolerance(J))


@pytest.mark.sweep
def test_a_blended_distance_agrees_with_differences_of_itself():
    p, level = scalars([0.3, 0.9, 0.25]), outputs(12)

    @ti.func
    def distance(x):
        one = (x - ti.Vector([-0.5, 0.0, 4.0])).norm() - p[0]
        two = (x - ti.Vector([0.6, 0.1, 4.4])).norm() - p[1]
        near = ti.max(p[2] - abs(one - two), 0.0) / p[2]
        return ti.min(one, two) - near * near * p[2] / 4

    @ti.kernel
    def k():
        for n in level:
            ray = ti.Vector([-0.3 + 0.06 * n, -0.21, 1.0]).normalized()
            level[n] = ray_level(distance, ti.Vector([0.0, 0.0, 0.0]), ray, 0.5, 8.0)

    J = jacobian(k, p, level)
    [[differences]] = central_differences(k, [p], [level])
    assert_allclose(J, differences, rtol=1e-5, atol=tolerance(J))
    assert np.abs(J).max(0).min() > 1e-3


@pytest.mark.sweep
def test_soft_shadows_by_averaging_lights():
    """The shadow of a ball on a floor, under 16 points of a light."""
    p, image, lights = scalars([0.2, -0.6, 0.45, 1.0]), outputs(20, 16), 16

    @ti.func
    def level(m, x, y):
        eye = ti.Vector([0.0, -1.0, 0.0])
        ray = ti.Vector([(x - 9.6) / 14, (y - 4.3) / 14 + 0.35, 1.0]).normalized()
        place = eye + 2.0 / ray.y * ray
        to_light = (ti.Vector([p[3] + 0.08 * (m - 7.5), -4.0, 2.0]) - place).normalized()
        to_ball = ti.Vector([p[0], p[1], 4.0]) - place
        return p[2] - (to_ball - to_ball.dot(to_light) * to_light).norm()

    @ti.func
    def colour(x, y):
        total = 0.0
        for m in range(lights):
            total += ti.select(level(m, x, y) > 0, 0.2, 0.9) / lights
        return total

    @ti.kernel
    def k():
        for i, j in image:
            px, py = float(i), float(j)
            for m in range(lights):
                image[i, j] += edge(level(m, px, py), 0.2, 0.9, at=(px, py), antialias=True) / lights

    @ti.kernel
    def clear():
        for i, j in image:
            image[i, j] = 0.0

    def draw():
        clear()
        k()

    errors = errors_by_column(draw, p, image, sampler(colour, image, 4096), [0.05, 0.05, 0.05, 0.1], 12)
    assert errors.max() < 0.005, errors


@pytest.mark.sweep
def test_bad_input():
    p, level = gradient_field(BALL), gradient_field(np.zeros(4))

    @ti.kernel
    def k():
        for n in level:
            level[n] = ray_level(abs, ti.Vector([0.0, 0.0]), ti.Vector([1.0, p[0]]), 0.0, 1.0)

    with pytest.raises(UnsupportedError, match="ray_level: distance is .*; expected a ti.func that takes a position"):
        jacobian(k, p, level)
    check_transpose(marched(p, level), p, level)
    with pytest.raises(UnsupportedError, match="ray_level is called from Python"):
        ray_level(abs, [0.0], [1.0], 0.0, 1.0)
