"""The moving average of examples/moving_average.py: recursion through a field, index from a counter."""

import example_programs
import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian
from numpy.testing import assert_allclose

from taichi_ext import jacobian

example = example_programs.load("moving_average")


def test_example_prints_the_expected_numbers(capsys, monkeypatch):
    assert example_programs.run("moving_average", capsys, monkeypatch).count("  ok  ") == 4


@pytest.mark.sweep
@pytest.mark.parametrize("driver", ["run_by_counter", "run_by_order"])
def test_longer_series_have_the_closed_form(ti64, driver):
    data = np.random.RandomState(1).standard_normal((3, 7))
    program = example.MovingAverage(data)
    weights = 0.5 ** np.arange(7, 0, -1)
    weights[0] *= 2  # the first entry starts the average
    last = data @ weights
    assert_allclose(
        jacobian(getattr(program, driver), program.data, program.loss), 2 * last[:, None] * weights, rtol=1e-12
    )
    assert_allclose(program.loss[None], (last**2).sum(), rtol=1e-12)
    if driver == "run_by_counter":
        assert program.counter.to_numpy().tolist() == [7] * 3


@pytest.mark.sweep
def test_tape_by_data(ti64):
    program = example.MovingAverage(np.random.RandomState(2).standard_normal((2, 4)))
    check_jacobian(program.average_by_counter, program.data, program.tape, state=[program.counter])


@pytest.mark.sweep
def test_float32(ti32):
    program = example.MovingAverage(example.DATA, ti.f32)
    gradient = jacobian(program.run_by_counter, program.data, program.loss)
    assert gradient.dtype == np.float32
    assert_allclose(gradient, example.EXPECTED_GRADIENT, rtol=1e-5)
