"""Sums that all iterations add to are added up by each thread: compared with NumPy."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars
from numpy.testing import assert_allclose
from taichi_program import initialise

from taichi_ext import Hessian, Jacobian, hessian, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

COUNT, P = 60, 20


def logistic():
    """Its kernel, parameters and energy, and its gradient and Hessian."""
    rng = np.random.default_rng(23)
    data, w, energy = scalars(rng.normal(size=(COUNT, P))), scalars(rng.normal(size=P) / 4), scalars(0.0)

    @ti.kernel
    def run():
        for n in range(COUNT):
            z = 0.0
            for k in range(P):
                z += data[n, k] * w[k]
            energy[None] += ti.log(1 + ti.exp(-z))

    rows = read(data)
    s = 1 / (1 + np.exp(rows @ read(w)))
    return run, w, energy, -s @ rows, (rows * (s * (1 - s))[:, None]).T @ rows


@pytest.mark.sweep
@pytest.mark.cpu_only("sums of each thread's own are added up on the CPU")
def test_gradients_and_hessians():
    run, w, energy, gradient, expected = logistic()
    for kind, found in ((Jacobian(run, w, energy), gradient), (Hessian(run, w, energy), expected)):
        for _ in range(2):  # sums begin at zero each time
            assert_allclose(kind(), found, rtol=1e-12, atol=1e-12)
        if ti.cfg.cpu_max_num_threads == 2:  # with more, an iteration adds too seldom for sums of each thread
            assert "global_thread_idx" in kind.source


def test_several_loops_and_rows_some_of_them_shared():
    """Sums of one loop are there for the next one; what is read, or belongs to an iteration, stays where it is."""
    rng = np.random.default_rng(23)
    x, y, own = scalars(rng.uniform(0.5, 1, 12)), outputs(3), outputs(40)

    @ti.kernel
    def run():
        for i, j in ti.ndrange(8, 5):
            s = 0.0
            for k in range(12):
                s += x[k] ** 2 * (i + k)
            y[1] += s * j
            y[2] -= s
            own[i * 5 + j] = s
        for n in own:
            own[n] += y[1]
            for k in range(12):
                y[0] += x[k] * n

    i, j, k = np.arange(8)[:, None, None], np.arange(5)[None, :, None], np.arange(12)
    of_s = 2 * read(x) * (i + k) * np.ones_like(j)
    J = jacobian(run, x, [y, own])
    first = (of_s * j).sum((0, 1))
    assert_allclose(J[0], [np.full(12, 780.0), first, -of_s.sum((0, 1))], rtol=1e-12)
    assert_allclose(J[1], of_s.reshape(40, 12) + first, rtol=1e-12)


def test_short_loops_stay_atomic():
    rng = np.random.default_rng(23)
    x, energy = scalars(rng.uniform(0.5, 1, 30)), scalars(0.0)

    @ti.kernel
    def run():
        for n in range(2):
            s = 0.0
            for k in range(30):
                s += x[k]
            energy[None] += s**3 * (n + 1)

    plan = Hessian(run, x, energy)
    assert_allclose(plan(), np.full((30, 30), 18 * read(x).sum()), rtol=1e-12)
    assert "global_thread_idx" not in plan.source
    assert_allclose(hessian(run, x, energy, format="csr").toarray(), plan(), rtol=1e-12)


@pytest.mark.cpu_only("sums of each thread's own are added up on the CPU")
def test_conditions_keep_a_loop_within_the_gradient():
    """Where the sums are added up, nothing behind the end of J is read or written."""
    rng = np.random.default_rng(23)
    x, weights, energy = scalars(rng.uniform(0.5, 1, 6)), scalars(rng.uniform(0.5, 1, COUNT)), scalars(0.0)

    @ti.kernel
    def run():
        for n in range(COUNT):
            for k in range(10):
                if k < 6:
                    energy[None] += ti.sin(x[k] * weights[n])

    plan, memory = Jacobian(run, x, energy), np.full(16, 7.0)
    plan(out=memory[:6])
    if ti.cfg.cpu_max_num_threads == 2:
        assert "global_thread_idx" in plan.source
        assert "d_energy.shape[0]" in plan.source
    w = read(weights)[:, None]
    assert_allclose(memory[:6], (w * np.cos(w * read(x))).sum(0), rtol=1e-12)
    assert_allclose(memory[6:], 7.0, rtol=0)


@pytest.mark.sweep
def test_one_thread_alone():
    """It needs no atomic additions, wherever they go to; last here, since it is another program."""
    initialise(default_fp=ti.f64, cpu_max_num_threads=1)
    run, w, energy, gradient, expected = logistic()
    assert_allclose(jacobian(run, w, energy), gradient, rtol=1e-12, atol=1e-12)
    for options in ({}, {"format": "csr"}):
        plan = Hessian(run, w, energy, **options)
        for _ in range(2):
            H = plan()
            assert_allclose(H.toarray() if options else H, expected, rtol=1e-12, atol=1e-12)
        assert "global_thread_idx" not in plan.source and "d_E[k] +=" not in plan.source
