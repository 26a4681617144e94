"""Loops and branches that neighbouring lanes do not share, with masks."""

import faulthandler

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, integers, outputs, scalars
from forced_lanes import force_lanes

from taichi_ext import Jacobian
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


def kernels_with_masks(x, y, z, q, p):
    """Kernels in which neighbours part, by name."""
    w = scalars(np.linspace(0.2, 0.9, 22).reshape(2, 11))

    @ti.kernel
    def while_of_each():
        for i, j in y:
            s, n = w[i, j], 0
            while s < 1.2 and n < 6:
                s += x[0] * s + 0.1
                n += 1
            y[i, j] = s * x[1] + n

    @ti.kernel
    def break_of_each():
        for i, j in y:
            s = 0.0
            for n in range(8):
                if n >= 3 - j % 3:  # x has no more entries
                    break
                s += x[n] * w[i, j] + s * s * 0.3
            y[i, j] = s

    @ti.kernel
    def break_in_branches():
        for i, j in y:
            s, m = x[2], 0
            for n in range(6):
                m += 1
                if s > 0.4123 + w[i, j]:
                    s *= x[1]
                    if n > j % 5:
                        s += x[0]
                        break
                elif j == 7:
                    break
                s += x[0] * 0.5
            y[i, j] = s * m

    @ti.kernel
    def continue_of_each():
        for i, j in y:
            s = 0.0
            for n in range(3):
                if (n + j) % 3 == 1:
                    continue
                s += x[n] * w[i, j]
                if j % 4 == n:
                    continue
                s = s * x[0] + 0.1
            y[i, j] = s

    @ti.kernel
    def break_and_continue():
        for i, j in y:
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

    @ti.kernel
    def continue_behind_break():
        for i, j in y:
            s = x[2]
            if w[i, j] < 0.7:
                n = -2
                while True:
                    n += 1
                    if n > 3:
                        break
                    if n < j % 2:
                        continue
                    s *= x[1] + w[i, j]
                    for m in range(2):
                        s += x[m] * 0.1
            y[i, j] = s

    @ti.kernel
    def shared_jumps():
        for i, j in y:
            if j % 4 == 1:
                continue
            s, t, u = x[2], 0.0, 0.0
            for n in range(6):
                if n > 4:
                    break
                if n % 2 == 0:
                    continue
                u += 1.0
                for m in range(2):
                    if m + n > 3:
                        continue
                    s += x[m]
                    if s > 1.2123 + w[i, j]:
                        break
                    t += x[0]
            y[i, j] = s * t + u * x[1]

    @ti.kernel
    def bounds_of_each():
        for i, j in y:
            s = 0.0
            for n in range(j % 4):
                t = x[n % 3]
                for m in range(n, j % 4):
                    t = t * x[m % 3] + w[i, j]
                s += t * t
            y[i, j] = s

    @ti.kernel
    def begin_of_each():
        for i, j in y:
            s = 0.0
            for n in range(j % 3, 3):
                s = s * x[0] + x[n] * (n + 1)
            y[i, j] = s

    @ti.kernel
    def loops_in_loops():
        for i, j in y:
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

    @ti.kernel
    def long_branch():
        for i, j in y:
            s = w[i, j] * x[0]
            if s > 0.1512:
                s = ti.sqrt(s * x[1]) / (s + x[2]) + ti.sqrt(s)
            else:
                s = s * s * x[2]
                for n in range(2):
                    s += x[n] * s
            y[i, j] = s

    @ti.kernel
    def stores_in_branches():
        for i, j in y:
            z[i, j] = 0.25
            if j % 3 > 0:
                y[i, j] = x[0] * x[1] * j
                if j > 5:
                    z[i, j] += x[2] * x[2]
            else:
                q[i, j] = 10 * i + j
                y[i, j] = x[2] * w[i, j]

    @ti.kernel
    def stores_in_loops():
        for i, j in y:
            y[i, j] = 0.0
            for n in range(j % 4):
                if n == 2 - i:
                    q[i, j] += n + 1
                    break
                y[i, j] += x[n] * w[i, j]

    @ti.kernel
    def arrays_in_loops():
        for i, j in y:
            h, s = ti.Vector([0.1, 0.2, 0.3]), 0.0
            for n in range(j % 3):
                g = ti.Vector([x[0], 0.0, x[n]])
                for m in range(3):
                    h[m] += g[(m + n) % 3] * w[i, j]
                s += h[n % 3] * h[2]
            y[i, j] = s + h[0]

    @ti.kernel
    def whole_numbers():
        for i, j in y:
            k, s = j % 4, x[0]
            if k > 0:
                s += x[2] * x[2] * (7 // k) * p[3 // k]
            y[i, j] = s * x[1]

    @ti.kernel
    def skipped():
        for i, j in y:
            if j % 5 == 3:
                continue
            s = x[0]
            for n in range(2):
                s += x[n] * s
            y[i, j] = s

    @ti.kernel
    def reads_of_stores():
        for i, j in y:
            if j % 5 == 3:
                continue
            z[i, j] = w[i, j] * 2.0
            z[i, j] += z[i, j] * z[i, j]
            if w[i, j] > 0.5:
                z[i, j] = 0.3 * z[i, j]
                s = z[i, j] if j % 2 == 0 else w[i, j]
                z[i, j] -= s * w[i, j]
            y[i, j] = x[0] * z[i, j]

    return {name: f for name, f in locals().items() if hasattr(f, "_primal")}


NAMES = """
    while_of_each break_of_each break_in_branches continue_of_each break_and_continue continue_behind_break shared_jumps
    bounds_of_each begin_of_each
    loops_in_loops long_branch stores_in_branches stores_in_loops arrays_in_loops whole_numbers skipped
    reads_of_stores
""".split()


@pytest.mark.mostly_sweep("loops_in_loops", "skipped")
@pytest.mark.parametrize("name", NAMES)
def test_bodies(name, lanes):
    x, y, z, p = scalars(X), outputs(2, 11), outputs(2, 11), integers([1, 2, 0, 1])
    q = integers(np.zeros((2, 11)))
    kernels = kernels_with_masks(x, y, z, q, p)
    assert set(kernels) == set(NAMES)
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


@pytest.mark.sweep
def test_text():
    """Lanes that have left a loop take no part; the loop ends where none is left."""
    x, y = scalars(X), outputs(2, 12)

    @ti.kernel
    def k():
        for i, j in y:
            s = 0.0
            for n in range(3):
                if s > 0.1 * j:
                    break
                s += x[n]
            y[i, j] = s

    plan = Jacobian(k, x, y)
    plan()
    lines = [line.strip().split("  #")[0] for line in plan.source.splitlines()]
    first = lines.index("for n in range(3):")
    assert "if active == 0:" in lines[first:]
    assert lines[lines.index("if active == 0:") + 1] == "break"
    assert "active += int(go_1)" in lines[first:]
