"""Parallel loops whose iterations store to the same entries: a run of one thread has a result, and it is what is transposed."""

import functools

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars
from numpy.testing import assert_allclose
from taichi_program import initialise

from taichi_ext import vjp


def kernels(x, w, y, s):
    @ti.kernel
    def steps():  # the loop over steps is the parallel one
        for t in range(3):
            for i in range(x.shape[0]):
                x[i] = x[i] * w[t] + ti.cos(x[i]) * w[t + 1]
        for i in x:
            y[i] = x[i] * w[0]

    @ti.kernel
    def one_entry():
        for i in x:
            s[0] = s[0] * w[0] + x[i]
        for i in y:
            y[i] = s[0] * x[i]

    @ti.kernel
    def in_a_branch():
        for i in range(4):
            for j in range(2):
                if j == 1:
                    x[j] = ti.sin(x[j]) + x[i]
        for i in y:
            y[i] = x[i] ** 2

    @ti.kernel
    def by_one_iteration():  # runs in parallel: the condition says which iteration stores
        for i in x:
            if i == 2:
                s[0] = s[0] * w[0] + x[i]
            y[i] = w[1] * x[i]

    return locals()


@pytest.mark.parametrize(
    ("name", "reads"), [("steps", "xw"), ("one_entry", "xws"), ("in_a_branch", "x"), ("by_one_iteration", "xw")]
)
def test_entries_that_every_iteration_stores_to(name, reads):
    initialise(default_fp=ti.f64, cpu_max_num_threads=1)
    f = {
        "x": scalars(np.linspace(0.2, 0.9, 5)),
        "w": scalars([0.8, 1.1, 0.9, 1.2]),
        "y": outputs(5),
        "s": scalars([0.4]),
    }
    k, start, u = kernels(**f)[name], [field.to_numpy() for field in f.values()], np.arange(1.0, 6.0)

    def again(call, *weights):
        for field, values in zip(f.values(), start, strict=True):
            field.from_numpy(values)
        return call(k, [f[n] for n in reads], f["y"], *weights)

    J = again(functools.partial(check_jacobian, state=[f["x"], f["s"], f["y"]]))
    for found, block in zip(again(vjp, u), J, strict=True):
        assert_allclose(found, u @ block, rtol=1e-12, atol=1e-14)
