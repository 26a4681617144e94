"""NIST's Statistical Reference Datasets for nonlinear regression: all problems from both starts, and their deviations."""

import numpy as np
import pytest
import taichi as ti
from nist_models import PROBLEMS, digits, problem
from numpy.testing import assert_allclose
from taichi_program import initialise

from taichi_ext import least_squares

pytestmark = [
    pytest.mark.cpu_only("certified digits need float64 and arithmetic in the order as written"),
    pytest.mark.filterwarnings("ignore:.* was prepared"),  # the same kernel with one model after the other
]


@pytest.fixture(scope="module", autouse=True)
def program():
    initialise(default_fp=ti.f64, fast_math=False)


@pytest.fixture(scope="module")
def all_digits():
    return {}


HARDEST = ("MGH09", "Bennett5", "BoxBOD", "Thurber", "MGH10")


@pytest.mark.mostly_sweep(*HARDEST)
@pytest.mark.parametrize("name", PROBLEMS)
def test_certified_values(name, all_digits):
    """At least four digits from each start; six of the deviations, where the solution has as many to spare."""
    kernel, numbers = problem(name)
    for n, start in enumerate(numbers["starts"]):
        b, r = start.copy(), np.zeros(len(numbers["y"]))
        args = (b, numbers["x"], numbers["y"], r)
        result = least_squares(kernel, b, r, args=args, ftol=1e-15, xtol=1e-15, gtol=1e-15, max_iterations=1999)
        all_digits[name, n] = digits(b, numbers["certified"])
        assert all_digits[name, n] >= 4, result
        if name != "Lanczos1":  # whose residuals are rounding
            assert_allclose(2 * result.cost, numbers["squares"], rtol=1e-9)
            assert_allclose(
                result.standard_errors(), numbers["deviations"], rtol=1e-6 if all_digits[name, n] > 7 else 1e-4
            )


@pytest.mark.sweep
def test_mean_digits(all_digits):
    """Ceres has 9.4, HBN 6.8, MINPACK 4.4 by the same rule."""
    if len(all_digits) == 2 * len(PROBLEMS) == 54:
        assert np.mean(list(all_digits.values())) >= 9.8
