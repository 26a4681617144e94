"""The simulation of examples/mass_spring.py: steps in place by 6 parameters."""

import example_programs
import numpy as np
import pytest
import taichi as ti
from numpy.testing import assert_allclose

from taichi_ext import jacobian

example = example_programs.load("mass_spring")


@pytest.mark.sweep
def test_state_is_that_of_one_plain_run(ti64):
    net = example.MassSpringNet()
    net.steps = 50
    net.run()
    x, v = net.x.to_numpy(), net.v.to_numpy()
    jacobian(net.run, net.p, net.x)
    assert_allclose(net.x.to_numpy(), x, rtol=1e-13)
    assert_allclose(net.v.to_numpy(), v, rtol=1e-12, atol=1e-14)


@pytest.mark.sweep
def test_by_the_state_that_the_steps_overwrite(ti64):
    """d x(n) / d (x(0), v(0)) of steps without the reset: 384 columns that start as the identity."""
    net = example.MassSpringNet()
    net.reset()
    start = net.x.to_numpy()

    def step() -> None:
        for _ in range(3):
            net.push()
            net.move()

    J = jacobian(step, [net.x, net.v], net.x)
    rng = np.random.default_rng(0)
    d_x, d_v = rng.standard_normal(start.shape), rng.standard_normal(start.shape)
    ends = []
    for h in (1e-6, -1e-6):
        net.x.from_numpy(start + h * d_x)
        net.v.from_numpy(h * d_v)
        step()
        ends.append(net.x.to_numpy())
    along = np.tensordot(J[0], d_x, 3) + np.tensordot(J[1], d_v, 3)
    assert_allclose(along, (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-8)


@pytest.mark.sweep
def test_float32(ti32):
    net, fine = example.MassSpringNet(ti.f32), example.MassSpringNet(ti.f64)
    net.steps = fine.steps = 100
    J, expected = jacobian(net.run, net.p, net.x), jacobian(fine.run, fine.p, fine.x)
    assert J.dtype == np.float32
    assert_allclose(J, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
