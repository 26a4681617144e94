"""A dense Jacobian that is called again: its launch is set up once, and takes another J each time."""

import gc
import weakref

import numpy as np
import pytest
import taichi as ti
from differences import integers, outputs, scalars
from kernel_texts import kernel_of
from many_threads import in_threads
from numpy.testing import assert_allclose

from taichi_ext import Jacobian

pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.cpu_only("launches are set up once where arrays lie on the host"),
    pytest.mark.chosen_only("calls that take several runs are not launched at once", "--chunk-size", "--by-column"),
]
COUNT = 40  # columns: rows of locals lie in memory that launches share


@pytest.fixture(params=["rows of locals", "all of J written", "some of J written"])
def case(request):
    """A prepared form, its parameter, and J in closed form."""
    x, y = scalars(np.linspace(0.5, 1.5, COUNT)), outputs(8)

    @ti.kernel
    def sums():
        for i in y:
            total = 1.0
            for k in range(COUNT):
                total = total * ti.cos(x[k] * (i + 1)) + x[k]
            y[i] = total

    squares = kernel_of("for i in y: y[i] = x[i] ** 2", y=y, x=x)

    @ti.kernel
    def some():
        for i in y:
            if i % 2 == 1:
                y[i] = x[i] ** 2

    def expected(values):
        J = np.zeros((8, COUNT))
        for i in range(8):
            if request.param == "rows of locals":
                total = 1.0
                for k in range(COUNT):
                    J[i] *= np.cos(values[k] * (i + 1))
                    J[i, k] = 1 - total * np.sin(values[k] * (i + 1)) * (i + 1)
                    total = total * np.cos(values[k] * (i + 1)) + values[k]
            elif request.param == "all of J written" or i % 2 == 1:
                J[i, i] = 2 * values[i]
        return J

    kernel = {"rows of locals": sums, "all of J written": squares}.get(request.param, some)
    return Jacobian(kernel, x, y), x, expected


def require_right(J, expected):
    assert_allclose(J, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.mostly_sweep("some of J written")
def test_other_values_and_other_arrays(case):
    plan, x, expected = case
    outs = [np.full((8, COUNT), np.nan) for _ in range(2)]
    kept = []
    for n in range(8):
        values = np.linspace(0.5, 1.5 + 0.1 * n, COUNT)
        x.from_numpy(values)
        J = plan() if n % 3 == 0 else plan(out=outs[n % 2])
        require_right(J, expected(values))
        if n % 3 == 0:
            kept.append((J, J.copy()))
    assert plan._prepared.replay is not None
    for J, copy in kept:  # what was returned is not written again
        assert np.array_equal(J, copy)


@pytest.mark.mostly_sweep("all of J written")
def test_memory_of_results_is_not_kept(case):
    plan, x, expected = case
    for _ in range(3):
        J = plan()
        require_right(J, expected(x.to_numpy()))
        memory = weakref.ref(J if J.base is None else J.base)
        del J
        gc.collect()
        assert memory() is None


def test_threads_share_a_launch(case):
    plan, x, expected = case
    wanted, wrong = expected(x.to_numpy()), []
    plan()

    def work(_):
        for _ in range(30):
            J = plan()
            if not np.allclose(J, wanted, rtol=1e-10):
                wrong.append(J)

    in_threads(work, 4)
    assert not wrong


def test_kernels_without_tangents_are_repeated():
    """A kernel that reads a parameter and stores whole numbers is passed no arrays of tangents."""
    x, y, n = scalars([0.1, 0.2, 0.3]), outputs(3), integers([0, 0, 0])
    count = kernel_of("for i in n: n[i] = ti.cast(x[i] * 10.0 + 0.5, ti.i32)", n=n, x=x)
    scale = kernel_of("for i in y: y[i] = x[i] * x[i] * n[i]", y=y, x=x, n=n)

    def run():
        for _ in range(4):
            count()
            scale()

    plan = Jacobian(run, x, y)
    for _ in range(2):
        assert_allclose(plan(), np.diag([0.2, 0.8, 1.8]), rtol=1e-12)


@pytest.mark.filterwarnings("ignore:.*does not depend on")
def test_an_output_that_depends_on_no_parameter():
    """Its kernel takes no J, which is zero in each call."""
    x, y = scalars([1.5, 2.5]), outputs(3)
    k = kernel_of("for i in y: y[i] = ti.floor(x[0])", y=y, x=x)
    plan, out = Jacobian(k, x, y), np.ones((3, 2))
    for _ in range(3):
        assert np.array_equal(plan(), np.zeros((3, 2)))
    assert plan(out=out) is out
    assert np.array_equal(out, np.zeros((3, 2)))
