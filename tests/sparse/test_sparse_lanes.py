"""Entries of a sparse Jacobian in lanes, and what that takes: their places follow from the number of the iteration."""

import numpy as np
import pytest
import taichi as ti
from differences import central_differences, integers, outputs, scalars
from forced_lanes import force_lanes
from kernel_texts import kernel_of
from numpy.testing import assert_allclose

from taichi_ext import jacobian

pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.cpu_only("loops run in lanes where rows come one after the other in memory"),
]


@pytest.fixture
def lanes(monkeypatch):
    """Four iterations at a time."""
    return force_lanes(monkeypatch, LANES_OF_FLOAT64=4)


def random(*shape):
    return np.random.default_rng(3).uniform(0.4, 1.4, shape)


def require_equal(kernel, params, outs):
    found, expected = jacobian(kernel, params, outs, format="csr"), central_differences(kernel, params, outs)
    for row, wanted in zip(found, expected, strict=True):
        for block, dense in zip(row, wanted, strict=True):
            assert_allclose(block.toarray(), dense.reshape(block.shape), rtol=1e-6, atol=1e-7)


def test_entries_of_inner_loops(lanes):
    """An iteration has a slot for each iteration of an inner loop, of which the last one counts."""
    x, w, y = scalars(random(11)), scalars(random(3)), outputs(11)

    @ti.kernel
    def k():
        for i in y:
            for n in range(3):
                y[i] = x[10 - i] * x[i] * w[n]

    require_equal(k, [x, w], [y])
    assert lanes[-1] is not None, lanes.reasons


def test_slots_that_are_counted_are_not_in_lanes(lanes):
    """The place of an entry is only known when the iterations before have been counted."""
    x, first, y = scalars(random(9)), integers(np.arange(10) * 3 // 2), outputs(9)

    @ti.kernel
    def k():
        for i in y:
            n = first[i]
            while n < first[i + 1]:
                y[i] += x[(n + i) % 9] * x[i]
                n += 1

    require_equal(k, [x], [y])
    assert lanes[-1] is None


def test_entries_of_another_iteration_are_not_in_lanes(lanes):
    """Neighbours would add to the same entry at the same time."""
    x, y = scalars(random(9)), outputs(9)
    k = kernel_of("for i in x: y[(i * 3) % 9 // 2] += x[i] * x[i]", x=x, y=y)
    require_equal(k, [x], [y])
    assert lanes[-1] is None
