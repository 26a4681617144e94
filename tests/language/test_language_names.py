"""Names: whatever users call their variables, no generated name is theirs."""

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars
from kernel_texts import kernel_of
from numpy.testing import assert_allclose

from taichi_ext import jacobian

pytestmark = pytest.mark.usefixtures("ti64")

X = [1.3, 0.4, 0.7]


def test_an_array_argument_that_is_a_parameter():
    y = outputs(3)
    k = kernel_of("for i in y: y[i] = _shadow0[i] * _ad * _shadow0[0]", "_shadow0: A, _ad: ti.f64", y=y)
    a = np.array(X)
    expected = 0.5 * (1.3 * np.eye(3) + np.outer(a, [1.0, 0.0, 0.0]))
    assert_allclose(jacobian(k, a, y, args=(a, 0.5)), expected)
    assert_allclose(jacobian(k, "_ad", y, args=(a, 0.5)), a * 1.3)


_ad = 3.0
_shadow0 = 0.25


@ti.func
def scaled(a):
    _value1 = _ad * a
    return _value1 * _shadow0 * a


def test_globals_and_inlined_functions():
    x, y = scalars(X), outputs(3)
    k = kernel_of(
        "for i in x: y[i] = scaled(x[i]) * _shadow0 - _ad * x[0]", x=x, y=y, _shadow0=_shadow0, _ad=_ad, scaled=scaled
    )

    check_jacobian(k, x, y)
