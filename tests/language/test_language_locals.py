"""State carried by locals through loops, and guarded columns."""

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import check_jacobian, outputs, scalars
from kernel_texts import kernel_of
from numpy.testing import assert_allclose

from taichi_ext import Jacobian, jacobian

pytestmark = pytest.mark.usefixtures("ti64")


@pytest.mark.sweep
def test_terms_that_come_after_a_loop_are_none_in_it():
    """Else two locals that are given to each other take a slot more in each walk, without an end."""
    x, y = scalars(np.linspace(0.3, 1.2, 40)), outputs(4)

    @ti.kernel
    def k():
        for i in range(4):
            best = 1e9
            second = 1e9
            for j in range(40):
                d = (x[j] - 0.253 * i - 0.26) ** 2
                if d < best:
                    second = best
                    best = d
                elif d < second:
                    second = d
            best += x[0] * second
            y[i] = best * 2.0 + second

    dense = check_jacobian(k, x, y)
    plan = Jacobian(k, x, y, format="csr")
    assert_allclose(plan().toarray(), dense, rtol=1e-9)
    assert "local best" in plan.explain()
    assert "1 fixed columns and 2 indexed columns" in plan.explain()


@pytest.mark.chosen_only("rows are multiplied as they are: zero times infinity is NaN", "--tangents")
def test_a_constant_local_next_to_an_infinite_factor():
    x, y, z, w = scalars([0.7, 1.2, 0.4]), outputs(3), outputs(3), scalars([np.inf, np.inf, -1.0])

    @ti.kernel
    def k():
        for i in range(3):
            factor = 1.0
            y[i] = factor * w[i]
            if w[i] > 0.0:
                factor = x[i]
            z[i] = factor * x[2]

    J = jacobian(k, x, [y, z])
    np.testing.assert_array_equal(J[0], np.zeros((3, 3)))
    np.testing.assert_array_equal(J[1], [[0.4, 0.0, 0.7], [0.0, 0.4, 1.2], [0.0, 0.0, 1.0]])


def test_guarded_columns_stay_within_j():
    """Where the guard does not hold, nothing is added: not to -0.0 either, which would become 0.0."""
    x, y = scalars([0.3, 0.8, 1.4]), outputs(6)

    @ti.kernel
    def branch():
        for i in range(6):
            t = 0.5
            if i < 3:
                t = x[i]
            y[i] = t * t

    chosen = kernel_of("for i in range(6): y[i] = ti.select(i < 3, x[i], 0.5) ** 2", y=y, x=x)
    for kernel in (branch, chosen):
        memory = real(np.full(54, -0.0))
        J = jacobian(kernel, x, y, out=memory[18:36].reshape(6, 3))
        assert_allclose(J, np.diag([0.6, 1.6, 2.8, 0, 0, 0])[:, :3])
        assert np.signbit(memory[36:]).all()
        assert np.signbit(memory[:18]).all()
