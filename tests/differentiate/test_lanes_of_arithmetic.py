"""Parallel loops without loops in them that run in lanes: the values that a store needs lie in local arrays before."""

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars, vector_outputs
from forced_lanes import force_lanes
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal
from taichi_program import initialise

from taichi_ext import Jacobian
from taichi_ext.schedule import lanes as schedule_lanes
from taichi_ext.schedule import machine

pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.cpu_only("loops run in lanes where rows come one after the other in memory"),
]

of_all_columns = pytest.mark.chosen_only("what is collected depends on the number of columns", "--chunk-size")

X = [0.3, 0.8, 0.5]


@pytest.fixture(autouse=True)
def lanes(monkeypatch):
    """All threads take part."""
    monkeypatch.setattr(machine, "LEAST_ITERATIONS", 0)
    return force_lanes(monkeypatch)


@pytest.mark.sweep
def test_what_is_outside_a_field_is_not_read_before(lanes):
    """A read that never happens may name any place."""
    x, y = scalars(X), outputs(2, 20)
    is_there = False

    @ti.kernel
    def k():
        for i, j in y:
            t = x[0] * j
            if ti.static(is_there) or i > 5:
                t += x[1 << 30]
            y[i, j] = t

    check_jacobian(k, x, y)


@pytest.mark.mostly_sweep("LEAST_TOTAL-300")
@of_all_columns
@pytest.mark.parametrize(("limit", "value"), [("LEAST_WORK", 4), ("LEAST_TOTAL", 300)])
def test_loops_that_do_little_stay(limit, value, lanes, monkeypatch):
    monkeypatch.setattr(schedule_lanes, limit, value)
    x, y = scalars(X), outputs(2, 20)
    little = kernel_of("for i, j in y: y[i, j] = x[0] * j + x[1]", y=y, x=x)
    more = kernel_of("for i, j in y: y[i, j] = ti.sqrt(x[0] * x[0] * j / x[1] + 1.0)", y=y, x=x)
    check_jacobian(little, x, y)
    check_jacobian(more, x, y)
    assert [found is None for found in lanes] == [True, False]


@pytest.mark.sweep
def test_deactivated_places_are_read_each_time(lanes):
    x, y = scalars(X), outputs(40)
    w = ti.field(ti.f64)
    ti.root.dense(ti.i, 1).dynamic(ti.j, 8).place(w)
    fill = kernel_of("for i in range(1): w[0].deactivate(); w[0].append(1.5)", w=w)
    k = kernel_of("for i in y: w[0].deactivate(); y[i] = x[0] * w[0, 0] + x[1]", y=y, w=w, x=x)
    fill()
    k()
    plain = y.to_numpy()
    fill()
    assert_allclose(Jacobian(k, x, y)(), [[0.0, 1.0, 0.0]] * 40)
    assert_array_equal(y.to_numpy(), plain)
    assert not any(lanes)


@pytest.mark.sweep
@of_all_columns
def test_integers_of_64_bits(lanes):
    initialise(default_fp=ti.f64, default_ip=ti.i64)
    x, w, y, z = scalars(np.linspace(0.1, 0.9, 30)), scalars(X), outputs(50), vector_outputs(2, 3, 20)

    @ti.kernel
    def in_lanes():
        for i in y:
            y[i] = w[0] * i + w[1]
        for i, j in z:
            z[i, j] = ti.Vector([w[0] * w[1] * i, w[2] * j])

    @ti.kernel
    def by_rows():
        for i in y:
            s, t = 0.0, 1.0
            for n in range(30):
                s += x[n] * n * i
                t *= 1.0 - 0.1 * x[n]
            y[i] = s * t

    check_jacobian(in_lanes, w, [y, z])
    check_jacobian(by_rows, x, y)
    assert lanes and all(lanes)
