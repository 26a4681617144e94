"""Levels of signed distances: the silhouette of a ball, against closed forms."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars
from kernel_texts import func_of
from numpy.testing import assert_allclose
from reverse_mode import check_transpose, gradient_field

from taichi_ext import UnsupportedError, jacobian, ray_level, value_and_jacobian

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
    distance = func_of("return (x - ti.Vector([p[0], p[1], p[2]])).norm() - p[3]", "x", p=p)

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
