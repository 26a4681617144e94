"""Costly values of inner loops that a run forward records for its way back: against J in forward mode, and in memory."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs, scalars
from kernel_texts import func_of, kernel_of, kernels_of
from numpy.testing import assert_allclose
from reverse_calls import Prepared
from taichi_program import share_program

from taichi_ext import hvp, jacobian, vjp
from taichi_ext.adjoint import recorded
from taichi_ext.runtime.reverse.history import LaunchEvent

STEPS = 6


@pytest.fixture(autouse=True)
def short_loops(monkeypatch):
    monkeypatch.setattr(recorded, "LEAST_ENTRIES", 1)
    monkeypatch.setattr(recorded, "LEAST_COST", 5)


@pytest.fixture
def arrays(monkeypatch):
    """The recorded arrays of all launches."""
    found, run = [], LaunchEvent.again

    def again(event, log):
        run(event, log)
        found.extend(array for arrays in event.recordings.values() for array in arrays.values())

    monkeypatch.setattr(LaunchEvent, "again", again)
    return found


KERNELS = """
    march:
        for i in range(5):
            a = 0.0
            for k in range(STEPS):
                a += (1 - a) * (1 - ti.exp(-depth(i, k)))
            y[i] = a
    two_variables:
        for i, j in z:
            s = x[i]
            for k, m in ti.ndrange((1, 4), 2):
                s += ti.sin(s * x[k] + w[m])
            z[i, j] = s
    two_loops:
        for i in range(5):
            s = 0.0
            for k in range(3):
                t = 0.0
                for m in range(2):
                    t += ti.exp(x[m] * w[k] * x[i])
                s += ti.sqrt(t) * x[k]
            y[i] = s
    overwritten:
         # the name that the value is computed from changes before its way back
        for i in range(5):
            v = w[0]
            for k in range(STEPS):
                v = x[i] * ti.exp(-v * depth(i, k))
            y[i] = v
    grouped:
        for i in ti.grouped(y):
            s = 0.0
            for k in range(STEPS):
                s += ti.cos(s + x[i[0]] * w[k % 4] * x[k % 5])
            y[i] = s
    left_out:
        for i in range(5):
            if x[i] < 0.4:
                continue
            a = 0.0
            for k in range(STEPS):
                a += ti.exp(-a * depth(i, k))
            y[i] = a
    as_long_as_given(n: ti.i32):
        for i in range(5):
            a = 0.0
            for k in range(n):
                a += ti.exp(-a * depth(i, k))
            y[i] = a
    in_lanes:
        for i, j in ti.ndrange(2, 16):
            s = 0.0
            for k in range(2):
                s += ti.exp(w[k] * x[k] * u[k, j])
            v[i, j] = s
"""


def loops(x, w, y, z):
    """Kernels, each with the sizes of the arrays that it records."""
    u, v = ti.field(ti.f64, (2, 16)), ti.field(ti.f64, (2, 16))
    u.from_numpy(np.linspace(0.2, 0.9, 32).reshape(2, 16))
    depth = func_of("return x[(2 * i + k) % 5] * w[k % 4] + x[i]", "i, k", x=x, w=w)
    return {**kernels_of(KERNELS, **locals(), STEPS=STEPS), "v": v}


RECORDED = {
    "march": ("y", [5 * STEPS]),
    "two_variables": ("z", [2 * 3 * 6]),
    "two_loops": ("y", [5 * 3 * 2, 5 * 3]),
    "overwritten": ("y", [5 * STEPS]),
    "grouped": ("y", [5 * STEPS]),
    "left_out": ("y", []),
    "as_long_as_given": ("y", []),
    "in_lanes": ("v", []),
}


def made(threads=1, dtype=ti.f64):
    share_program(default_fp=dtype, cpu_max_num_threads=threads)
    f = {
        "x": scalars(np.linspace(0.2, 0.9, 5)),
        "w": scalars([0.8, 1.1, 0.9, 1.2]),
        "y": outputs(5),
        "z": outputs(2, 3),
    }
    f["z"].from_numpy(np.linspace(0.3, 1.1, 6).reshape(2, 3))
    return f, loops(**f)


@pytest.mark.mostly_sweep("march-1", "two_loops-1", "overwritten-1", "grouped-2", "left_out-1", "in_lanes-2")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", RECORDED)
def test_gradients(name, threads, arrays):
    f, kernels = made(threads)
    output, sizes = RECORDED[name]
    kernel, args, params = kernels[name], (STEPS,) * (name == "as_long_as_given"), [f["x"], f["w"]]
    y = kernels[output] if output in kernels else f[output]
    wanted = jacobian(kernel, params, y, args=args, mode="forward")
    values = y.to_numpy()
    u = np.random.default_rng(0).standard_normal(y.shape)
    for _ in range(2):
        arrays.clear()
        found = vjp(kernel, params, y, u, args=args)
        for got, want in zip(found, wanted, strict=True):
            assert_allclose(got, np.tensordot(u, want, u.ndim), rtol=1e-12, atol=1e-14)
        assert_allclose(y.to_numpy(), values, rtol=1e-14)
        assert [a.size for a in arrays] == sizes
    if name in ("march", "as_long_as_given"):
        rows = jacobian(kernel, params, y, args=args, mode="reverse")
        for got, want in zip(rows, wanted, strict=True):
            assert_allclose(got, want, rtol=1e-12, atol=1e-14)


def test_second_derivatives_record_nothing(arrays):
    f, kernels = made()
    loss, direction = outputs(), np.linspace(-1, 1, 5)

    def run():
        loss[None] = 0.0
        kernels["march"]()
        total()

    total = kernel_of('for i in range(5): loss[None] += f["y"][i] ** 2', loss=loss, f=f)
    found, gradients = hvp(run, f["x"], direction, loss), []
    assert not arrays
    x = f["x"].to_numpy()
    for step in (1e-6, -1e-6):
        f["x"].from_numpy(x + step * direction)
        gradients.append(vjp(run, f["x"], loss, 1.0))
    assert arrays
    assert_allclose(found, (gradients[0] - gradients[1]) / 2e-6, rtol=1e-6)


def simulation(steps):
    """A state that each launch overwrites, so that each records other values."""
    x, w = scalars(np.linspace(0.2, 0.9, 64)), scalars(np.linspace(0.1, 0.2, 8))

    @ti.kernel
    def step(n: ti.i32):
        for i in x:
            a = 0.0
            for k in range(STEPS):
                a += (1 - a) * (1 - ti.exp(-w[(3 * i + k) % 8] * x[i] * (k + n)))
            x[i] = x[i] + 0.1 * a

    def run():
        for n in range(steps):
            step(n)

    return x, run


def test_memory(arrays):
    """The arrays count into the memory that may be used; where there is too little, values are computed again."""
    share_program(default_fp=ti.f64, cpu_max_num_threads=1)
    x, run = simulation(40)
    start, u = x.to_numpy(), np.random.default_rng(1).standard_normal(64)
    wanted = u @ jacobian(run, x, x, mode="forward")
    size, copies = 64 * STEPS * 8, 64 * 8
    prepared = Prepared(run, [x], [x])
    for share in (None, 1.0, 0.3):
        for _ in range(2):
            x.from_numpy(start)
            arrays.clear()
            memory = None if share is None else share * 40 * (size + copies)
            (found,), products = prepared.products([u[None]], max_memory=memory)
            assert_allclose(found[0], wanted, rtol=1e-12)
        if share is None:
            assert len(arrays) == 40
            assert products.peak >= 40 * size
        else:
            assert 0 < len(arrays) < 40
            assert products.peak <= memory


def test_infinite_partials(arrays):
    """A way back with guards takes nothing that was recorded."""
    share_program(default_fp=ti.f64, cpu_max_num_threads=1)
    x, y = scalars([0.0, 4.0]), outputs(2)

    @ti.kernel
    def roots():
        for i in x:
            s = 0.0
            for k in range(3):
                s += k * ti.sqrt(x[i] * x[i] * x[i]) * ti.sin(x[i] * k * x[1])
            y[i] = s

    found = vjp(roots, x, y, [1.0, 1.0])
    assert arrays
    assert_allclose(found, [1.0, 1.0] @ jacobian(roots, x, y, mode="forward"), rtol=1e-12)
    assert np.isfinite(found).all()
