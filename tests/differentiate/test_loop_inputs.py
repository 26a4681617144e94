"""Loops that add multiples of values from before them to sums: the tangents of those values are added behind the loop."""

import numpy as np
import pytest
from differences import check_jacobian, outputs, scalars
from kernel_texts import kernels_of

from taichi_ext import Jacobian
from taichi_ext.differentiate.plan.report import INPUTS

pytestmark = pytest.mark.usefixtures("ti64")

N = 12


KERNELS = """
    network:
        h = ti.Vector([0.0] * 3)
        for j in ti.static(range(3)):
            h[j] = ti.tanh(x[j] * i + x[3 + j])
        total = x[0]
        for j in range(3):
            s = 0.0
            for k in ti.static(range(3)):
                s += x[6 + k] * h[k] * (j + 1)
            total += x[9 + j] * ti.tanh(s)
        y[i] = total
    a_row:
        h = 0.0
        for n in range(N):
            h += x[n] * x[n] * i
        total = 0.0
        for n in range(N):
            total -= ti.sin(h * n) * x[n]
        y[i] = total * h
    not_chosen:
        root = ti.sqrt(x[0] * x[1] - x[0] * x[1])
        h = x[2] * x[3] + i
        total = 0.0
        for n in range(N):
            total += ti.max(root - 1.0, h * x[n])
        y[i] = total
    not_reached:
        root = ti.sqrt(x[0] * x[1] - x[0] * x[1])
        h = x[2] * x[3] + i
        total = 0.0
        for n in range(N):
            total += h * x[n]
            if n > N:
                total += root
        y[i] = total
    left_early:
        h = x[0] * x[1]
        total, n = 0.0, 0
        while n < N:
            if n == i + 2:
                break
            total += h * x[n]
            n += 1
        y[i] = total
    around_a_recurrence:
        h = x[0] * x[1] + 0.1 * i
        total = 0.0
        for m in range(2):
            s = 0.5
            for n in range(N):
                s = ti.sin(s * x[n] + h)
            total += s * h
        y[i] = total
    singular:
        h = x[0] * x[1] - x[0] * x[1]
        total = 0.0
        for n in range(N):
            total += ti.sqrt(h) + x[n] * i
        y[i] = total
    sum_is_read:
        h = x[0] * x[1]
        total = 0.1
        for n in range(N):
            total += 0.1 * total * h * x[n]
        y[i] = total
    input_changes:
        h = x[0] * x[1]
        total = 0.1
        for n in range(N):
            h *= 0.9
            total += h * x[n]
        y[i] = total
"""


WITH_INPUTS = "network a_row not_chosen not_reached left_early around_a_recurrence".split()
WITHOUT = "singular sum_is_read input_changes".split()


@pytest.mark.mostly_sweep("not_reached", "around_a_recurrence", "singular", "sum_is_read", "a_row")
@pytest.mark.parametrize("name", [*WITH_INPUTS, *WITHOUT])
def test_kernels(name, pytestconfig):
    x, y = scalars(np.linspace(0.2, 0.9, N)), outputs(4)
    kernels = kernels_of(KERNELS, "for i in y:\n    ...\n", x=x, y=y, N=N)
    assert set(kernels) == {*WITH_INPUTS, *WITHOUT}
    if name in ("not_chosen", "not_reached", "singular"):
        J = Jacobian(kernels[name], x, y)()
        factors = np.arange(4)[:, None] + x[2] * x[3]
        expected = np.zeros((4, N)) + (np.arange(4)[:, None] if name == "singular" else factors)
        if name != "singular":
            values = x.to_numpy()
            expected[:, 2] += x[3] * values.sum()
            expected[:, 3] += x[2] * values.sum()
        np.testing.assert_allclose(J, expected, rtol=1e-12)
    else:
        check_jacobian(kernels[name], x, y)
    plan = Jacobian(kernels[name], x, y)
    plan()
    if not pytestconfig.getoption("--chunk-size"):
        assert (INPUTS in plan.explain()) == (name in WITH_INPUTS)
