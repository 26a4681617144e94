"""``max_memory=``: tangents that do not fit are computed in several runs, the state being put back in between."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import InvalidArgumentError, Jacobian, jacobian, linear_operator

pytestmark = pytest.mark.usefixtures("ti64")


def test_vectors_whose_tangents_do_not_fit_together():
    x, t, y = scalars([0.3, 0.5, 0.7, 0.9, 1.1]), outputs(40), outputs(40)

    @ti.kernel
    def k():
        for i in t:
            t[i] = x[i % 5] ** 2
        for i in t:
            y[i] = t[i] * x[0]

    expected = jacobian(k, x, y)
    assert_allclose(linear_operator(k, x, y, max_memory=3 * 40 * 8 - 1) @ np.eye(5), expected, rtol=1e-14)


@pytest.mark.chosen_only("what it looks at is that of one run", "--chunk-size")
def test_limit_does_not_count_the_jacobian_itself():
    x, y = scalars(np.ones(50)), outputs(40)
    runs = []
    k = kernel_of("for i in y: y[i] = x[i] * x[0]", y=y, x=x)

    def run():
        runs.append(1)
        k()

    result = jacobian(run, x, y, max_memory=1)
    assert result.shape == (40, 50)
    assert len(runs) == 1


def test_random_numbers_cannot_be_drawn_again():
    x, t, y = scalars([0.3, 0.5]), outputs(2), outputs(2)

    @ti.kernel
    def k():
        for i in t:
            t[i] = x[i] * ti.random(ti.f64)
        for i in y:
            y[i] = t[i] ** 2

    with pytest.raises(InvalidArgumentError, match="random"):
        jacobian(k, x, y, max_memory=1)
    assert jacobian(k, x, y).shape == (2, 2)


@pytest.mark.sweep
def test_limit_that_a_later_call_exceeds():
    x, y, t = scalars([1.0, 2.0, 3.0, 4.0]), outputs(4), outputs(4)
    X, runs = read(x), []
    first = kernel_of("for i in y: y[i] += x[i] * y[i]", y=y, x=x)
    more = kernel_of("for i in y: t[i] = x[i] * y[i]", y=y, t=t, x=x)
    last = kernel_of("for i in y: y[i] += t[i]", y=y, t=t)

    def pipeline(n):
        runs.append(n)
        for _ in range(3):  # repeated launches, after the first of which nothing is saved
            first()
        if n:
            more()
            last()

    for make in (Jacobian, lambda *a, **o: lambda args: jacobian(*a, **{**o, "args": args})):
        plan = make(pipeline, x, y, args=(0,), max_memory=100)  # the tangents of t need 128 bytes
        for n in (0, 0, 1, 0, 1):
            y.fill(1.0)
            runs.clear()
            J = plan(args=(n,))
            assert_allclose(J, np.diag(3 * (1 + X) ** 2 if n == 0 else 4 * (1 + X) ** 3), rtol=1e-12)
            assert_allclose(read(y), (1 + X) ** (3 + n))


@pytest.mark.mostly_sweep("False-options0", "False-options1", "True-options0")
@pytest.mark.parametrize("options", [{"chunk_size": 1}, {"max_memory": 1}])
@pytest.mark.parametrize("is_pipeline", [False, True])
def test_nothing_is_changed_where_runs_cannot_be_repeated(options, is_pipeline):
    x, t, y = scalars([0.3, 0.5]), outputs(2), outputs(2)
    before = kernel_of("for i in t: t[i] += x[i]", t=t, x=x)

    @ti.kernel
    def random():
        for i in y:
            t[i] += x[i] * ti.random(ti.f64)
        for i in y:
            y[i] += t[i] ** 2

    pipeline = lambda: (before(), random())
    with pytest.raises(InvalidArgumentError, match="random"):
        jacobian(pipeline if is_pipeline else random, x, y, **options)
    assert_array_equal(read(t), [0, 0])
    assert_array_equal(read(y), [0, 0])
