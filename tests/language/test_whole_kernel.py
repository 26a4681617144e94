"""What is optimised in one loop holds for all that the kernel does: other loops, other names, reads before a store."""

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import check_jacobian, outputs, scalars
from kernel_texts import func_of, kernel_of, kernels_of, names_of
from numpy.testing import assert_allclose

from taichi_ext import backend, jacobian
from taichi_ext.schedule import lanes as schedule_lanes
from taichi_ext.schedule import machine

pytestmark = pytest.mark.usefixtures("ti64")

N = 96
P = np.array([1.25, 2.0], np.float32)


@pytest.fixture
def lanes(monkeypatch):
    """Short loops run in lanes too."""
    if backend.stores_by_column():
        pytest.skip("loops run in lanes where the rows of J come one after the other in memory, not on a GPU")
    monkeypatch.setattr(machine, "LEAST_ITERATIONS", 0)
    monkeypatch.setattr(schedule_lanes, "LEAST_WORK", 0)
    monkeypatch.setattr(schedule_lanes, "LEAST_TOTAL", 0)


def fields32(count, *shape):
    """Fields of float32."""
    return [outputs(*shape, dtype=ti.f32) for _ in range(count)]


LANES = """
    alone: fill()
    inline: for i in y: y[i] = p[0] * p[0] * i + p[1] * p[0]
    read_after:
        for i in y:
            y[i] = p[0] * p[0] * i + p[1] * p[0]
        for i in z:
            z[i] = 2.0 * y[N - 1 - i]
    read_before:
        for i in z:
            z[i] = 2.0 * y[i]
        for i in y:
            y[i] = p[0] * p[0] * i + p[1] * p[0]
    added_after:
        for i in y:
            y[i] = p[0] * p[0] * i + p[1] * p[0]
        for i in z:
            y[i] += p[1] * i
    cleared_after:
        for i in y:
            y[i] = p[0] * p[0] * i + p[1] * p[0]
        for i in range(N // 2):
            y[i] = 0.0
    extremum_after:
        for i in y:
            y[i] = p[0] * p[0] * i + p[1] * p[0]
        for i in z:
            ti.atomic_max(y[0], y[i])
            z[i] = 0.0
"""


class TestLanes:
    """What other loops of the kernel make of the J that a loop in lanes stores."""

    @pytest.fixture(autouse=True)
    def run_in_lanes(self, lanes):
        pass

    def kernels(self):
        """Kernels with a loop in lanes over y, and what they make of y: the expected J of y and z by p."""
        p = scalars(P, ti.f32)
        y, z, total = (*fields32(2, N), *fields32(1))
        i = np.arange(N)
        by_p = np.stack([2 * P[0] * i + P[1], P[0] * np.ones(N)], -1)
        none = np.zeros((N, 2))
        fill = func_of("for i in y: y[i] = p[0] * p[0] * i + p[1] * p[0]", y=y, p=p)
        kernels = kernels_of(LANES, p=p, y=y, z=z, total=total, N=N, fill=fill)
        half = by_p.copy()
        half[: N // 2] = 0
        largest = by_p.copy()
        largest[0] = by_p[-1]
        made = {
            "alone": (by_p, none),
            "inline": (by_p, none),
            "read_after": (by_p, 2 * by_p[::-1]),
            "read_before": (by_p, none),
            "added_after": (by_p + np.stack([np.zeros(N), i], -1), none),
            "cleared_after": (half, none),
            "extremum_after": (largest, none),
        }
        cases = {name: (kernel, *made[name]) for name, kernel in kernels.items()}
        return p, y, z, cases

    @pytest.mark.mostly_sweep("cleared_after")
    @pytest.mark.parametrize("name", names_of(LANES)[2:])
    def test_other_loops(self, name):
        p, y, z, cases = self.kernels()
        kernel, by_y, by_z = cases[name]
        for _ in range(2):
            y.fill(0.0)
            z.fill(0.0)
            J = np.full((N, 2), np.nan, np.float32)
            jacobian(kernel, p, y, out=J)
            assert_allclose(J, by_y, rtol=1e-5)
            if by_z.any() or name == "read_before":
                y.fill(0.0)
                J, K = jacobian(kernel, p, [y, z])
                assert_allclose(J, by_y, rtol=1e-5)
                assert_allclose(K, by_z, rtol=1e-5)

    def test_alone(self):
        p, y, _, cases = self.kernels()
        for name in ("inline", "alone"):
            assert_allclose(jacobian(cases[name][0], p, y), cases[name][1], rtol=1e-6)

    @pytest.mark.sweep
    def test_one_array_by_two_names(self):
        p, y = scalars(P, ti.f32), np.zeros(N, np.float32)
        z = np.zeros(N, np.float32)

        @ti.kernel
        def k(a: ti.types.ndarray(), b: ti.types.ndarray(), z: ti.types.ndarray()):
            for i in a:
                a[i] = p[0] * p[0] * i + p[1] * p[0]
            for i in z:
                z[i] = b[i] * p[1]

        i = np.arange(N)
        by_y = np.stack([2 * P[0] * i + P[1], P[0] * np.ones(N)], -1)
        by_z = by_y * P[1]
        by_z[:, 1] += P[0] * P[0] * i + P[1] * P[0]
        J, K = jacobian(k, p, [y, z], args=(y, y, z))
        assert_allclose(J, by_y, rtol=1e-6)
        assert_allclose(K, by_z, rtol=1e-6)


@pytest.mark.sweep
def test_fixed_entries_that_the_loop_stores_to(lanes):
    """What is read once is not what the loop changes, by whatever name."""
    x, y, w = scalars([0.3, 0.8]), np.zeros(32), np.linspace(0.5, 0.9, 32)

    @ti.kernel
    def k(y: ti.types.ndarray(), w: ti.types.ndarray(), v: ti.types.ndarray()):
        ti.loop_config(serialize=True)
        for i in range(32):
            w[i] = 2.0 * i
            y[i] = x[0] * v[3] + x[1] * i

    check_jacobian(k, x, y, args=(y, w, w), state=[w])


COVER = """
    read_by_the_store: for i in y: y[i] = y[i] * p[0] + p[1]
    read_before:
        for i in z:
            z[i] = y[i] * p[0]
        for i in y:
            y[i] = p[0] * p[1] * i
    read_ahead:
        ti.loop_config(serialize=True)
        for i in range(6):
            y[i] = p[0] * p[1] * i
            z[i] = y[(i + 1) % 6] * p[0]
    added_before:
        for i in z:
            y[i] += p[0]
        for i in y:
            y[i] = p[0] * p[1] * i
    read_by_a_local:
        for i in y:
            a = y[i]
            y[i] = p[0] * p[1] * i
            z[i] = a * p[1]
"""


class TestStoresThatCover:
    """A store to every entry spares clearing the array before, unless something reads or adds to it earlier."""

    @pytest.mark.mostly_sweep("read_before", "read_ahead")
    @pytest.mark.parametrize("name", names_of(COVER))
    def test_memory_that_holds_something(self, name):
        p, y, z = scalars([2.0, 3.0]), scalars(np.arange(1.0, 7)), outputs(6)
        kernel = kernels_of(COVER, p=p, y=y, z=z)[name]
        by_y, by_z = check_jacobian(kernel, p, [y, z]) if name[:4] == "read" and "store" not in name else (None, None)
        start = y.to_numpy()
        expected = check_jacobian(kernel, p, y, state=[z])
        if by_y is not None:
            assert_allclose(by_y, expected)
        for _ in range(3):
            y.from_numpy(start)
            J, K = real(np.full((6, 2), np.nan)), real(np.full((6, 2), np.nan))
            jacobian(kernel, p, y, out=J)
            assert_allclose(J, expected)
            y.from_numpy(start)
            assert_allclose(jacobian(kernel, p, y), expected)
            if by_y is not None:
                y.from_numpy(start)
                jacobian(kernel, p, [y, z], out=[J, K])
                assert_allclose(J, expected)
                assert_allclose(K, by_z)


@ti.real_func
def piecewise(a: ti.f64) -> ti.f64:
    if a < 0.5:
        return a * a
    return 3.0 * a


def test_real_functions_that_return_early():
    x, y = scalars([0.3, 0.8]), outputs(2)
    k = kernel_of("for i in x: y[i] = piecewise(x[i])", x=x, y=y, piecewise=piecewise)
    assert_allclose(jacobian(k, x, y), np.diag([0.6, 3.0]), rtol=1e-12)
