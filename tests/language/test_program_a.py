"""The sphere Jacobian: a depth renderer with vectors, a ti.func and a branch, by radius and centre of the sphere."""

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import Snapshot, central_differences
from numpy.testing import assert_allclose, assert_array_equal
from taichi.math import vec3
from taichi_program import initialise

from taichi_ext import jacobian, value_and_jacobian

WIDTH, HEIGHT, FOCAL = 640, 480, 400.0
TRUTH = np.array([10.0, 10.0, 10.0, 100.0])
START = TRUTH + 0.1

PIXEL, AT_PIXEL = (360, 280), [-1.000078, 0.107752, 0.107752, 0.988400]
SUMS = [-10500.16, 474.597, 474.597, 5872.767]
STEP = [0.12909, 0.11629, 0.11629, 0.13379]


class Scene:
    """The renderer in one precision; the target image is that of the true sphere."""

    def __init__(self, dtype, size=(WIDTH, HEIGHT), needs_dual=False):
        self.params = ti.field(dtype, shape=4, needs_dual=needs_dual)
        self.image = ti.field(dtype, shape=size)
        self.losses = ti.field(dtype, shape=size, needs_dual=needs_dual)
        rays = ti.Vector.field(3, dtype, shape=size)
        params, image, losses = self.params, self.image, self.losses
        focal = FOCAL * size[0] / WIDTH

        @ti.kernel
        def aim():
            for i, j in rays:
                ray = vec3((i - size[0] / 2) / focal, (j - size[1] / 2) / focal, 1.0)
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

    def inside(self, values, margin=0.0, size=(WIDTH, HEIGHT)):
        """The pixels whose ray passes at r^2 - |d|^2 > margin, computed in float64."""
        x, y = np.mgrid[: size[0], : size[1]].astype(np.float64)
        ray = np.stack([(x - size[0] / 2) / FOCAL, (y - size[1] / 2) / FOCAL, np.ones_like(x)], axis=-1)
        ray /= np.linalg.norm(ray, axis=-1, keepdims=True)
        centre = np.asarray(values[1:], np.float64)
        along = ray @ centre
        d = centre - along[..., None] * ray
        return values[0] ** 2 - (d**2).sum(axis=-1) > margin


def gauss_newton_step(values, result, mask):
    step, *_ = np.linalg.lstsq(
        result[mask].reshape(-1, 4).astype(np.float64), values[mask].astype(np.float64), rcond=None
    )
    return step


@pytest.fixture(scope="class")
def scene(request):
    """The scene in the precision of a test class, in a Taichi program of its own."""
    initialise(**request.cls.options)
    made = Scene(request.cls.dtype, needs_dual=request.cls.dtype == ti.f32)
    yield made
    ti.reset()


@pytest.fixture(scope="class")
def found(scene):
    scene.set(START)
    return value_and_jacobian(scene.trace_loss, scene.params, scene.losses)


class TestInFloat64:
    dtype, options = ti.f64, {"default_fp": ti.f64}

    @pytest.mark.sweep
    def test_shape_and_type(self, found):
        values, result = found
        assert result.shape == (WIDTH, HEIGHT, 4)
        assert result.dtype == real(0.0).dtype
        assert values.shape == (WIDTH, HEIGHT)

    @pytest.mark.sweep
    def test_one_pixel(self, found):
        assert_allclose(found[1][PIXEL], AT_PIXEL, atol=1e-6)

    def test_column_sums(self, found):
        assert_allclose(found[1].sum(axis=(0, 1)), SUMS, rtol=1e-6)

    def test_pixels_that_miss_the_sphere_are_exactly_zero(self, scene, found):
        outside = ~scene.inside(START)
        assert outside.any()
        assert_array_equal(found[1][outside], 0.0)
        assert (found[1][~outside, 0] != 0).all()

    def test_gauss_newton_step(self, scene, found):
        values, result = found
        both = scene.inside(START) & scene.inside(TRUTH)
        assert both.sum() == 5112
        assert_allclose(gauss_newton_step(values, result, both), STEP, atol=1e-5)

    @pytest.mark.sweep
    @pytest.mark.usefixtures("scene")
    def test_central_differences_away_from_the_silhouette(self):
        size = (64, 48)
        scene = Scene(ti.f64, size)
        (truth,) = central_differences(scene.trace_loss, [scene.params], [scene.losses])[0]
        result = jacobian(scene.trace_loss, scene.params, scene.losses)
        hit = result[..., 0] != 0
        assert hit.sum() > 20
        assert_allclose(result, truth, rtol=1e-6, atol=1e-8)

    def test_state_is_that_of_a_plain_run(self, scene):
        containers = [scene.params, scene.losses, scene.image]
        scene.set(START)
        scene.trace_loss()
        plain = Snapshot(containers)
        scene.losses.fill(7.0)
        jacobian(scene.trace_loss, scene.params, scene.losses)
        for field, values in zip(containers, plain.values):
            assert_allclose(field.to_numpy(), values, rtol=1e-14, atol=1e-12)
