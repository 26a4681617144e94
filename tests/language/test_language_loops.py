"""Ranges, ndranges, while loops, break and continue."""

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import outputs, scalars
from kernel_texts import kernels_of, names_of

from taichi_ext import Jacobian, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.2, 0.9]


def test_ranges_with_steps_are_taichis_own_errors():
    x, y = scalars(FIVE), outputs(1)

    @ti.kernel
    def k():
        for i in range(0, 5, 2):
            y[0] += x[i]

    with pytest.raises(ti.TaichiCompilationError, match="Range should have 1 or 2 arguments"):
        k()

    with pytest.raises(ti.TaichiCompilationError, match="Range should have 1 or 2 arguments"):
        jacobian(k, x, y)


WRITERS = """
    breaks_before:
        ti.loop_config(serialize=True)
        for i in range(5):
            if x[i] > 1.0:
                break
            y[i] = x[i] * x[0]
    breaks_after:
        ti.loop_config(serialize=True)
        for i in range(5):
            y[i] = x[i] * x[0]
            if x[i] > 1.0:
                break
    continues:
        for i in range(5):
            if x[i] > 1.0:
                continue
            y[i] = x[i] * x[0]
    starts_late:
        for i in range(2, 5):
            y[i] = x[i] * x[0]
    permutes:
        for i in range(5):
            m = i
            if i > 2:
                m = 4 - i
            y[m] = x[m] * x[0]
"""
WRITTEN = {"breaks_before": [0, 1], "breaks_after": [0, 1, 2], "continues": [0, 1, 3, 4], "starts_late": [2, 3, 4]}
WRITTEN["permutes"] = [0, 1, 2]


@pytest.mark.mostly_sweep("breaks_before", "breaks_after", "continues")
@pytest.mark.parametrize("name", names_of(WRITERS))
def test_entries_that_are_not_written_have_derivative_zero(name):
    x, y = scalars([0.3, 0.4, 1.2, 0.5, 0.6]), outputs(5)
    kernel = kernels_of(WRITERS, x=x, y=y)[name]
    J = real(np.full((5, 5), 7.0))
    Jacobian(kernel, x, y)(out=J)
    expected = np.zeros((5, 5))
    for i in WRITTEN[name]:
        expected[i, i] += x[0]
        expected[i, 0] += x[i]
    np.testing.assert_allclose(J, expected, rtol=1e-12)
