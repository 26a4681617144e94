"""Loops whose tangents are accumulated backwards, and sums of what such loops take from before them."""

import numpy as np
import pytest
from differences import check_jacobian, outputs, scalars, vector_outputs
from kernel_texts import kernels_of

from taichi_ext import Jacobian
from taichi_ext.differentiate.plan.report import BACKWARDS, INPUTS
from taichi_ext.differentiate.plan.storage_facts import STRATEGIES

pytestmark = pytest.mark.usefixtures("ti64")

N = 12


KERNELS = """
    volume:
        for i in y:
            through, total = 1.0, 0.0
            for n in range(N):
                alpha = 1.0 - ti.exp(-x[n] * (i + 1))
                total += through * alpha * 0.1 * n
                through *= 1.0 - alpha
            y[i] = total * through + x[i]
    branches:
        for i in y:
            s, t = 0.5, 1.0
            for n in range(N):
                if n % 3 == i % 3:
                    s = s * x[n] + t
                else:
                    t = ti.max(t * 0.9, s * x[0])
            y[i] = s - t
    squared:
        for i in y:
            s = 0.5
            for n in range(N):
                s = s * s * x[n] + 0.5
            y[i] = s * s * s
    added:
        for i, j in z:
            s = 0.5
            for n in range(N):
                s = s * x[n] + j
            y[i] += s * 0.01
    components:
        for i in v:
            s, t = 0.5, 0.1
            for n in range(N):
                s, t = s * x[n] + t, ti.sin(s) - t * x[n]
            v[i] = ti.Vector([s, t * i])
    used_twice:
        for i in y:
            s = 0.5
            for n in range(N):
                s = ti.sin(s + x[n])
            y[i] = s
            z[i, 0] = s * s
    guarded_columns:
        for i in y:
            s = 0.5
            for n in range(-5, 2 * N):
                s = s * (x[n] if 0 <= n < N else 0.9) + 0.1 * i
            y[i] = s
    two_loops:
        for i in y:
            s = 0.5
            for n in range(N):
                s = ti.sin(s + x[n])
            for n in range(N):
                s = s * x[n] + 1.0
            y[i] = s
    left_early:
        for i in y:
            s = 0.5
            for n in range(N):
                s = ti.sin(s + x[n])
                if s > 0.9:
                    break
            y[i] = s
    stored_within:
        for i in y:
            s = 0.5
            for n in range(N):
                s = ti.sin(s + x[n])
                z[i, n % 3] = s
            y[i] = s
    singular:
        # A tangent that is zero stays zero, though the partial is infinite.
        for i in y:
            s = 0.0
            for n in range(N):
                s = ti.sqrt(s) + 0.1 * n * x[n] * x[i]
            y[i] = s
    scaled_output:
        for i in y:
            s = 0.5
            for n in range(N):
                s = ti.sin(s + x[n])
            y[i] = 2.0
            y[i] *= s
            ti.atomic_add(y[i], s)
"""


def make_kernels(x, y, z, v):
    """Kernels with a recurrence over x, by name."""
    return kernels_of(KERNELS, x=x, y=y, z=z, v=v, N=N)


REVERSED = "volume branches squared added components used_twice guarded_columns scaled_output".split()
FORWARD = "two_loops left_early stored_within singular".split()
WRITTEN = {"components": "v", "used_twice": "yz", "stored_within": "yz"}


@pytest.mark.mostly_sweep("squared", "added")
@pytest.mark.parametrize("name", [*REVERSED, *FORWARD])
def test_kernels(name, pytestconfig):
    x, y, z, v = scalars(np.linspace(0.2, 0.9, N)), outputs(4), outputs(4, 3), vector_outputs(2, 3)
    kernels = make_kernels(x, y, z, v)
    assert set(kernels) == {*REVERSED, *FORWARD}
    written = [{"y": y, "z": z, "v": v}[c] for c in WRITTEN.get(name, "y")]
    whole = check_jacobian(kernels[name], x, written, state=[y, z, v])
    plan = Jacobian(kernels[name], x, written)
    np.testing.assert_array_equal(plan()[0], whole[0])
    is_chosen = STRATEGIES["auto"] is not STRATEGIES["dense"] and not pytestconfig.getoption("--chunk-size")
    if name in FORWARD or is_chosen:  # of dense rows, and of few columns, none is
        assert (BACKWARDS in plan.explain()) == (name in REVERSED)


SUMS = """
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
def test_sums_of_inputs(name, pytestconfig):
    x, y = scalars(np.linspace(0.2, 0.9, N)), outputs(4)
    kernels = kernels_of(SUMS, "for i in y:\n    ...\n", x=x, y=y, N=N)
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
