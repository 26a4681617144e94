"""The programs of examples/placed_fields.py: fields placed by hand, assigned early, overwritten."""

import warnings

import example_programs
import numpy as np
import pytest
import taichi as ti
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import DerivativeWarning, jacobian, value_and_jacobian

example = example_programs.load("placed_fields")


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [ti.f32, ti.f64])
def test_loss_and_gradient(ti32, dtype):
    program = example.Particles(dtype)
    values, J = value_and_jacobian(program.run, program.v, [program.loss, program.x_avg])
    v = np.array(example.VELOCITY)
    loss = np.linalg.norm(v - 0.5)
    assert_allclose(values[0], loss, rtol=1e-6)
    assert_allclose(J[0], (v - 0.5) / loss, rtol=1e-6)
    assert_array_equal(J[1], np.eye(3))
    assert_array_equal(program.x.to_numpy(), [v, v])  # moved once


@pytest.mark.sweep
def test_second_call_goes_on_from_the_state_of_the_first(ti64):
    """x and x_avg accumulate: after the second run x = 2 v, x_avg = 3 v, and only the last move depends on this v."""
    program = example.Particles()
    jacobian(program.run, program.v, program.x_avg)
    values, J = value_and_jacobian(program.run, program.v, program.x_avg)
    assert_allclose(values, 3 * np.array(example.VELOCITY), rtol=1e-14)
    assert_array_equal(J, np.eye(3))


@pytest.mark.sweep
def test_overwritten_parameter_warns_and_has_derivative_zero(ti64):
    program = example.OwnVelocities()
    with pytest.warns(DerivativeWarning, match="overwritten before it is read"):
        gradient = jacobian(program.run, program.v, program.loss)
    assert_array_equal(gradient, np.zeros((2, 3)))


@pytest.mark.sweep
def test_parameter_overwritten_in_part_does_not_warn(ti64):
    program = example.OwnVelocities()

    def run():
        program.v[1] = example.VELOCITY
        program.move()
        program.average()

    program.set_velocities()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        J = jacobian(run, program.v, program.x_avg)
    assert_array_equal(J, np.stack([np.eye(3) / 2, np.zeros((3, 3))], axis=1))
