"""Tangents in memory column by column, as on a GPU, where neighbouring threads write neighbouring rows."""

import subprocess
import sys

import numpy as np
import pytest
import taichi as ti
from devices import real
from differences import outputs, scalars, vector_outputs, vectors
from kernel_texts import kernel_of
from numpy.testing import assert_allclose

from taichi_ext import Jacobian, backend, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

X = [0.3, 0.8, 0.5]


@pytest.fixture(autouse=True)
def by_column(monkeypatch):
    """The layout of a GPU, on the CPU."""
    monkeypatch.setattr(backend, "stores_by_column", lambda: True)


def test_arrays_that_are_given():
    x, y = scalars(X), outputs(4)
    field = outputs(4, 3)
    k = kernel_of("for i in y: y[i] = x[0] * i + x[1] * x[2]", y=y, x=x)
    expected = np.stack([np.arange(4.0), np.full(4, 0.5), np.full(4, 0.8)], axis=1)
    plan = Jacobian(k, x, y)
    for out in (real(np.full((4, 3), np.nan)), real(np.full((3, 4), np.nan)).T):
        for _ in range(2):
            assert plan(out=out) is out
            assert_allclose(out, expected)
            out.fill(np.nan)
    plan(out=field)
    assert_allclose(field.to_numpy(), expected)


@pytest.mark.mostly_sweep("csr")
@pytest.mark.parametrize("format", ["csr", "coo"])
def test_entries_of_a_sparse_jacobian_lie_in_arrays_of_their_own(monkeypatch, format):
    """Several statements write to one output; on a GPU no array is a part of another."""
    monkeypatch.setattr(backend, "is_host_arch", lambda: False)
    places = np.array([[0.1, 0.2], [0.5, 0.9], [0.8, 0.3]])
    v, f = vectors(places), vector_outputs(2, 3)
    ends = np.array([[0, 1], [1, 2], [2, 0]], np.int32)

    @ti.kernel
    def k(ends: ti.types.ndarray(ti.i32, ndim=2)):
        for s in range(3):
            a, b = ends[s, 0], ends[s, 1]
            pull = (v[a] - v[b]) * (v[a] - v[b]).norm()
            f[a] -= pull
            f[b] += pull

    expected = np.zeros((3, 2, 3, 2))
    for a, b in ends:
        d = places[a] - places[b]
        length = np.linalg.norm(d)
        block = length * np.eye(2) + np.outer(d, d) / length
        for row, column, sign in [(a, a, -1), (a, b, 1), (b, a, 1), (b, b, -1)]:
            expected[row, :, column, :] += sign * block
    assert_allclose(jacobian(k, v, f, args=(ends,), format=format).toarray(), expected.reshape(6, 6), rtol=1e-6)


BELOW_ZERO = """
import numpy as np
import taichi as ti
from taichi_ext import backend, jacobian

ti.init(arch=ti.cpu, log_level=ti.ERROR, offline_cache=False, default_fp=ti.f64, opt_level={level})
backend.stores_by_column = lambda: True
x, y, w = ti.field(ti.f64, 4), ti.field(ti.f64, 2), ti.Vector.field(2, ti.f64, 2)
x.from_numpy(np.array([0.5, 0.7, 1.1, 1.3]))

@ti.kernel
def k():
    for i in range(2):
        y[i] = x[i] * x[i + 1]
    for i in range(-1, {end}):
        if i >= 0 and i < 2:
            w[i] += y[i] * ti.Vector([y[i], x[3]])

expected = np.zeros((2, 2, 4))
expected[0] = [[0.49, 0.35, 0, 0], [0.91, 0.65, 0, 0.35]]
expected[1] = [[0, 1.694, 1.078, 0], [0, 1.43, 0.91, 0.77]]
np.testing.assert_allclose(jacobian(k, x, w), expected)
"""


@pytest.mark.mostly_sweep("0-5")
@pytest.mark.parametrize("end", [5, 2000])
@pytest.mark.parametrize("level", [0, 1])
def test_loops_that_begin_below_zero(level, end, tmp_path):
    """A condition keeps indices within arrays; LLVM 15 took those of iterations before that for some 32 GiB further on."""
    program = tmp_path / "program.py"
    program.write_text(BELOW_ZERO.format(level=level, end=end))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
