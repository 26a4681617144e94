"""Scopes and unrolling: sibling blocks, static loops, lists, copies of locals."""

import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.2, 0.9]


@pytest.mark.sweep
def test_static_loops_over_values():
    x, y = scalars(FIVE), outputs(3)
    numbers = [2.0, 3.0]

    @ti.kernel
    def k():
        s = 0.0
        for c in ti.static(numbers):
            for i, d in ti.static(enumerate([0.5, 1.5, 2.5])):
                s += c * x[i] * d * s + x[i]
        y[0] = s
        for i, j in ti.static(ti.ndrange(2, (1, 3))):
            y[1] += x[i] * x[j]
        for I in ti.static(ti.grouped(ti.ndrange(2, 2))):
            y[2] += x[I[0]] * x[I[1] + 1] ** 2
        for a, b in ti.static(zip([0, 1], [2, 3])):
            y[2] *= x[a] + x[b]
        for i in ti.static(range(5)):
            if ti.static(i == 3):
                break
            if ti.static(i == 1):
                continue
            y[1] *= x[i]

    check_jacobian(k, x, y)
