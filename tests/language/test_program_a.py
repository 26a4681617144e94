"""The sphere Jacobian: a depth renderer with vectors, a ti.func and a branch, by radius and centre of the sphere."""

import numpy as np
import pytest
import taichi as ti
from differences import Snapshot
from numpy.testing import assert_allclose, assert_array_equal
from taichi.math import vec3
from taichi_program import initialise

from taichi_ext import jacobian, value_and_jacobian

WIDTH, HEIGHT, FOCAL = 640, 480, 400.0
TRUTH = np.array([10.0, 10.0, 10.0, 100.0])
START = TRUTH + 0.1

SUMS = [-10500.16, 474.597, 474.597, 5872.767]
STEP = [0.12909, 0.11629, 0.11629, 0.13379]


class Scene:
    """The renderer; the target image is that of the true sphere."""

    def __init__(self):
        self.params = ti.field(ti.f64, shape=4)
        self.image, self.losses = (ti.field(ti.f64, shape=(WIDTH, HEIGHT)) for _ in range(2))
        rays = ti.Vector.field(3, ti.f64, shape=(WIDTH, HEIGHT))
        params, image, losses = self.params, self.image, self.losses

        @ti.kernel
        def aim():
            for i, j in rays:
                ray = vec3((i - WIDTH / 2) / FOCAL, (j - HEIGHT / 2) / FOCAL, 1.0)
                rays[i, j] = ray.normalized()

        @ti.func
        def depth_of(ray):
            r = params[0]
            centre = vec3(params[1], params[2], params[3])
            tc = centre.dot(ray) * ray
            d = centre - tc
            depth = 0.0
            if r > d.norm():
                depth = tc.norm() - ti.sqrt(r * r - d.norm_sqr())
            else:
                depth = 0.0
            return depth

        @ti.kernel
        def trace_loss():
            for i, j in losses:
                losses[i, j] = depth_of(rays[i, j]) - image[i, j]

        aim()
        self.trace_loss = trace_loss
        self.set(TRUTH)
        image.fill(0)
        trace_loss()
        image.copy_from(losses)
        self.set(START)

    def set(self, values):
        self.params.from_numpy(values.astype(self.params.to_numpy().dtype))

    def inside(self, values):
        """The pixels whose ray meets the sphere."""
        x, y = np.mgrid[:WIDTH, :HEIGHT].astype(np.float64)
        ray = np.stack([(x - WIDTH / 2) / FOCAL, (y - HEIGHT / 2) / FOCAL, np.ones_like(x)], axis=-1)
        ray /= np.linalg.norm(ray, axis=-1, keepdims=True)
        centre = np.asarray(values[1:], np.float64)
        along = ray @ centre
        d = centre - along[..., None] * ray
        return values[0] ** 2 - (d**2).sum(axis=-1) > 0


def gauss_newton_step(values, result, mask):
    step, *_ = np.linalg.lstsq(
        result[mask].reshape(-1, 4).astype(np.float64), values[mask].astype(np.float64), rcond=None
    )
    return step


@pytest.fixture(scope="module")
def scene():
    initialise(default_fp=ti.f64)
    yield Scene()
    ti.reset()


@pytest.fixture(scope="module")
def found(scene):
    scene.set(START)
    return value_and_jacobian(scene.trace_loss, scene.params, scene.losses)


def test_column_sums(found):
    assert_allclose(found[1].sum(axis=(0, 1)), SUMS, rtol=1e-6)


def test_pixels_that_miss_the_sphere_are_exactly_zero(scene, found):
    outside = ~scene.inside(START)
    assert outside.any()
    assert_array_equal(found[1][outside], 0.0)
    assert (found[1][~outside, 0] != 0).all()


def test_gauss_newton_step(scene, found):
    values, result = found
    both = scene.inside(START) & scene.inside(TRUTH)
    assert both.sum() == 5112
    assert_allclose(gauss_newton_step(values, result, both), STEP, atol=1e-5)


def test_state_is_that_of_a_plain_run(scene):
    containers = [scene.params, scene.losses, scene.image]
    scene.set(START)
    scene.trace_loss()
    plain = Snapshot(containers)
    scene.losses.fill(7.0)
    jacobian(scene.trace_loss, scene.params, scene.losses)
    for field, values in zip(containers, plain.values):
        assert_allclose(field.to_numpy(), values, rtol=1e-14, atol=1e-12)
