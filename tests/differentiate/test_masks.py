"""Loops and branches that neighbouring lanes do not share, with masks."""

import faulthandler

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, integers, outputs, scalars
from forced_lanes import force_lanes
from kernel_texts import kernels_of, names_of

from taichi_ext.schedule import masks

pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.cpu_only("loops run in lanes where rows come one after the other in memory"),
]

X = [0.3, 0.8, 0.5]


@pytest.fixture(autouse=True)
def lanes(monkeypatch):
    """Four iterations at a time; branches are skipped where no lane takes them; a loop that goes on for ever fails."""
    monkeypatch.setattr(masks, "LEAST_GUARDED", 2)
    faulthandler.dump_traceback_later(120, exit=True)
    yield force_lanes(monkeypatch, LANES_OF_FLOAT64=4)
    faulthandler.cancel_dump_traceback_later()


KERNELS = """
    ranges_of_each:
        # neither end is shared
        s = w[i, j]
        for n in range(j % 3, 2 + j % 4):
            if n == j % 5:
                continue
            s += x[0] * s * n + x[n % 3]
            for m in range(n - j % 2, n + 2):
                s -= 0.1 * x[1] * m
        y[i, j] = s
    break_and_continue:
        s, n = x[1], 0
        while True:
            n += 1
            if n % 2 == j % 2:
                continue
            s += x[2] * ti.sqrt(s + n)
            if s > 2.0 + w[i, j] or n > 6:
                break
            s -= x[0] * 0.1
        y[i, j] = s
    loops_in_loops:
        s = 1.0
        for n in range(3):
            for m in range(3):
                if s * x[m] > 0.2 + w[i, j] * n:
                    break
                s += x[n]
            if s > 1.0 + 0.3 * j:
                break
            s += x[2] * s
        y[i, j] = s
    stores_in_branches:
        z[i, j] = 0.25
        if j % 3 > 0:
            y[i, j] = x[0] * x[1] * j
            if j > 5:
                z[i, j] += x[2] * x[2]
        else:
            q[i, j] = 10 * i + j
            y[i, j] = x[2] * w[i, j]
    skipped:
        if j % 5 == 3:
            continue
        s = x[0]
        for n in range(2):
            s += x[n] * s
        y[i, j] = s
    reads_of_stores:
        if j % 5 == 3:
            continue
        z[i, j] = w[i, j] * 2.0
        z[i, j] += z[i, j] * z[i, j]
        if w[i, j] > 0.5:
            z[i, j] = 0.3 * z[i, j]
            s = z[i, j] if j % 2 == 0 else w[i, j]
            z[i, j] -= s * w[i, j]
        y[i, j] = x[0] * z[i, j]
"""


def kernels_with_masks(x, y, z, q, p):
    """Kernels in which neighbours part, by name."""
    w = scalars(np.linspace(0.2, 0.9, 22).reshape(2, 11))
    return kernels_of(KERNELS, "for i, j in y:\n    ...\n", x=x, y=y, z=z, q=q, w=w)


@pytest.mark.mostly_sweep("ranges_of_each", "loops_in_loops", "skipped")
@pytest.mark.parametrize("name", names_of(KERNELS))
def test_bodies(name, lanes):
    x, y, z, p = scalars(X), outputs(2, 11), outputs(2, 11), integers([1, 2, 0, 1])
    q = integers(np.zeros((2, 11)))
    kernels = kernels_with_masks(x, y, z, q, p)
    check_jacobian(kernels[name], x, [y, z] if name == "stores_in_branches" else y, state=[q])
    assert lanes
    assert all(lanes)


def test_many_iterations_of_which_some_end_early(lanes):
    """So many that none is spread over threads: the body in lanes is that of the parallel loop itself."""
    n = 20_000
    x, w, y = scalars(X[:2]), scalars(np.linspace(0, 1, n)), outputs(n)

    @ti.kernel
    def k():
        for i in y:
            if w[i] < 0.5:
                continue
            s = x[0]
            for m in range(20):
                s += 0.1 * (x[1] * w[i] - s * s * x[1]) + 0.01 * m * (x[0] - s) * (s * x[1] + w[i])
            y[i] = s

    assert np.abs(check_jacobian(k, x, y)).max() > 0.3
    assert lanes
    assert all(lanes)
