"""The sphere Jacobian: a depth renderer with vectors, a ti.func and a branch, by radius and centre of the sphere."""

import numpy as np
import pytest
import taichi as ti
from differences import scalars
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal
from taichi.math import vec3

from taichi_ext import jacobian

WIDTH, HEIGHT, FOCAL = 640, 480, 400.0
START = np.array([10.1, 10.1, 10.1, 100.1])


@pytest.mark.usefixtures("ti64")
def test_sums_of_columns_and_pixels_that_miss_the_sphere():
    params, depths = scalars(START), ti.field(ti.f64, (WIDTH, HEIGHT))
    rays = ti.Vector.field(3, ti.f64, (WIDTH, HEIGHT))
    x, y = np.mgrid[:WIDTH, :HEIGHT].astype(np.float64)
    ray = np.stack([(x - WIDTH / 2) / FOCAL, (y - HEIGHT / 2) / FOCAL, np.ones_like(x)], axis=-1)
    ray /= np.linalg.norm(ray, axis=-1, keepdims=True)
    rays.from_numpy(ray)

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

    trace = kernel_of(
        "for i, j in depths: depths[i, j] = depth_of(rays[i, j])", depths=depths, depth_of=depth_of, rays=rays
    )
    J = jacobian(trace, params, depths)
    assert_allclose(J.sum(axis=(0, 1)), [-10500.16, 474.597, 474.597, 5872.767], rtol=1e-6)
    d = START[1:] - (ray @ START[1:])[..., None] * ray
    inside = (d**2).sum(axis=-1) < START[0] ** 2
    assert_array_equal(J[~inside], 0.0)
    assert (J[inside, 0] != 0).all()
