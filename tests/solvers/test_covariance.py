"""The covariance of a solution, compared with closed forms, and the error where there is none."""

import copy
import pickle

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars
from kernel_texts import kernel_of
from numpy.testing import assert_allclose

from taichi_ext import InvalidArgumentError, least_squares

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.double_only("compared with float64")]

X = np.linspace(-1.0, 2.0, 30)
NOISE = np.random.default_rng(0).standard_normal(30)
A = np.stack([np.ones(30), X, X**2], axis=1)


class Parabola:
    def __init__(self, is_twice=False):
        self.p, self.q, self.r = scalars([0.0, 0.0]), scalars([0.0]), outputs(30)
        x, y = scalars(X), scalars(A @ [1.0, 2.0, 3.0] + 0.1 * NOISE)
        p, q, r = self.p, self.q, self.r
        factor = 0.0 if is_twice else 1.0

        @ti.kernel
        def residuals():
            for i in r:
                r[i] = p[0] + p[1] * x[i] + q[0] * x[i] ** (2 * factor) - y[i]

        self.kernel = residuals

    def solve(self, **options):
        return least_squares(self.kernel, {"p": self.p, "q": self.q}, self.r, **options)


@pytest.fixture(scope="module")
def parabola(ti64):
    return Parabola()


@pytest.mark.mostly_sweep("csr")
@pytest.mark.parametrize("format", [None, "csr"])
def test_linear_problems(parabola, format):
    """sigma**2 (A^T A)^-1, of all parameters and of some of them."""
    if format:
        pytest.importorskip("scipy.sparse")
    result = parabola.solve(format=format)
    wanted = np.linalg.inv(A.T @ A)
    r = A @ np.linalg.lstsq(A, A @ [1.0, 2.0, 3.0] + 0.1 * NOISE, rcond=None)[0] - A @ [1.0, 2.0, 3.0] - 0.1 * NOISE
    assert_allclose(result.covariance(), wanted * (r @ r) / 27, rtol=1e-10)
    assert_allclose(result.covariance(variance=0.01), wanted * 0.01, rtol=1e-10)
    assert_allclose(
        result.covariance([parabola.q, parabola.p], variance=1.0), wanted[np.ix_([2, 0, 1], [2, 0, 1])], rtol=1e-10
    )
    assert_allclose(result.covariance(parabola.q, variance=1.0), wanted[2:, 2:], rtol=1e-10)
    for kept in (result, copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        errors = kept.standard_errors(variance=4.0)
        assert_allclose(errors["p"], 2 * np.sqrt(wanted.diagonal()[:2]), rtol=1e-10)
        assert errors["q"].shape == (1,)
        assert str(kept) == str(result)


def test_weights(parabola):
    """Weights are inverse variances: (A^T W A)^-1 for variance 1."""
    w = np.linspace(0.5, 2.0, 30)
    result = parabola.solve(weights=w)
    assert_allclose(result.covariance(variance=1.0), np.linalg.inv(A.T @ (w[:, None] * A)), rtol=1e-10)


@pytest.mark.parametrize("format", [None, "csr"])
def test_parameters_that_are_not_determined(format):
    """Two constants: their sum alone is known."""
    if format:
        pytest.importorskip("scipy.sparse")
    result = Parabola(is_twice=True).solve(format=format)
    words = "determine entry .* of .*" if format else r"determine entry \[0\] of .*, entry \[0\] of .*, or not"
    with pytest.raises(InvalidArgumentError, match=words):
        result.covariance()


def test_bad_input(parabola):
    result = parabola.solve()
    with pytest.raises(InvalidArgumentError, match="none of the params"):
        result.covariance(parabola.r)
    with pytest.raises(InvalidArgumentError, match="variance is -1"):
        result.covariance(variance=-1.0)
    with pytest.raises(InvalidArgumentError, match=r"vector has shape \(2,\)"):
        result.split(np.zeros(2))


@pytest.mark.sweep
def test_too_few_residuals(ti64):
    p, r = scalars([1.0, 2.0]), outputs(1)
    one = kernel_of("r[0] = p[0] + p[1] - 1", r=r, p=p)
    result = least_squares(one, p, r)
    with pytest.raises(InvalidArgumentError, match="variance is missing: 1 residuals of 2"):
        result.covariance()
    with pytest.raises(InvalidArgumentError, match="do not determine"):
        result.covariance(variance=1.0)
