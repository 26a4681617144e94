"""Loops that add multiples of values from before them to sums: the tangents of those values are added behind the loop."""

import numpy as np
import pytest
import taichi as ti
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
    two_sums:
        h, g = x[0] * x[1], x[2] / (x[3] + i)
        s, t = h, 0.0
        for n in range(N):
            if n % 2 == 0:
                s += h * g * x[n]
            else:
                t -= ti.exp(g * n * 0.1) + s_of(n)
        y[i] = s * t + g
    nested:
        h = x[0] * x[1] + i
        total = 0.0
        for m in range(3):
            g = h * x[2] * m + x[3]
            for n in range(N):
                total += ti.sin(g * x[n]) + h * n
        y[i] = total
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
    of_no_iterations:
        h = x[0] * x[1]
        total = x[2]
        for n in range(i - 3):
            total += h * x[n]
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
    changed_between:
        h = x[0] * x[1]
        total = 0.0
        for n in range(N):
            total += h * x[n]
        h *= x[4]
        for n in range(N):
            total += h * x[n] * n
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
    stored_within:
        h = x[0] * x[1]
        total = 0.1
        for n in range(3):
            total += h * x[n]
            z[i, n] = h
        y[i] = total
    input_changes:
        h = x[0] * x[1]
        total = 0.1
        for n in range(N):
            h *= 0.9
            total += h * x[n]
        y[i] = total
"""


def make_kernels(x, y, z):
    """Kernels with a loop and values from before it, by name."""

    @ti.func
    def s_of(n):
        return 0.5 * n

    return kernels_of(KERNELS, "for i in y:\n    ...\n", x=x, y=y, z=z, s_of=s_of, N=N)


WITH_INPUTS = """
    network a_row two_sums nested not_chosen not_reached left_early of_no_iterations around_a_recurrence changed_between
""".split()
WITHOUT = "singular sum_is_read stored_within input_changes".split()


@pytest.mark.mostly_sweep("not_reached", "around_a_recurrence", "singular", "sum_is_read", "a_row")
@pytest.mark.parametrize("name", [*WITH_INPUTS, *WITHOUT])
def test_kernels(name, pytestconfig):
    x, y, z = scalars(np.linspace(0.2, 0.9, N)), outputs(4), outputs(4, 3)
    kernels = make_kernels(x, y, z)
    assert set(kernels) == {*WITH_INPUTS, *WITHOUT}
    written = [y, z] if name == "stored_within" else y
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
        check_jacobian(kernels[name], x, written, state=[y, z])
    plan = Jacobian(kernels[name], x, written)
    plan()
    if not pytestconfig.getoption("--chunk-size"):
        assert (INPUTS in plan.explain()) == (name in WITH_INPUTS)
