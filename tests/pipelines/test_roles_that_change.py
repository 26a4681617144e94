"""Containers of pipelines that get tangents after a kernel's first launch: the kernel is built again for them."""

import functools
import types

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars
from kernel_texts import kernel_of
from numpy.testing import assert_allclose

from taichi_ext import Jacobian

pytestmark = pytest.mark.usefixtures("ti64")


@ti.data_oriented
class Wave:
    def __init__(self):
        self.k = scalars([0.5, 0.7])
        self.before, self.now, self.after = scalars(np.linspace(0, 1, 6)), scalars(np.linspace(1, 2, 6)), outputs(6)

    @ti.kernel
    def step(self):
        for i in range(1, 5):
            bend = self.now[i - 1] - 2 * self.now[i] + self.now[i + 1]
            self.after[i] = 2 * self.now[i] - self.before[i] + self.k[i % 2] * bend

    @ti.kernel
    def roll(self):
        for i in self.now:
            self.before[i] = self.now[i]
            self.now[i] = self.after[i]


@pytest.mark.chosen_only("the kernels of one block of columns", "--chunk-size")
def test_a_kernel_is_built_again_where_containers_have_got_tangents():
    wave = Wave()

    def run():
        for name in ("step", "roll") * 4:
            getattr(wave, name)()
        functools.partial(wave.step)()

    check_jacobian(run, wave.k, wave.now, state=[wave.before, wave.after])
    plan = Jacobian(run, wave.k, wave.now)
    plan()
    assert len(plan._prepared.fused) == 3  # roll; step with no tangents before it, and with all
    plan()
    assert len(plan._prepared.fused) == 3


def test_a_container_that_gets_tangents_in_some_calls():
    x, t, y = scalars([0.3, 0.8]), scalars([1.0, 2.0]), outputs(2)
    add = kernel_of("for i in x: y[i] += x[i] * t[i]", x=x, y=y, t=t)
    replace = kernel_of("for i in x: t[i] = x[i]", x=x, t=t)

    def run(n):
        for k in range(3):
            add()
            if k > n:
                replace()

    for n in (5, 1, 0):
        check_jacobian(run, x, y, args=(n,), state=[t])


def test_a_field_that_is_made_after_the_first_launch():
    x, y = scalars([0.3, 0.8]), outputs(2)
    holder = types.SimpleNamespace(made=None)
    first = kernel_of("for i in x: y[i] += x[i]", x=x, y=y)
    second = kernel_of("for i in x: holder.made[i] = y[i]; y[i] += holder.made[i] * x[i]", x=x, holder=holder, y=y)

    def run():
        for k in range(2):
            first()
            if k == 0:
                holder.made = ti.field(ti.f64, shape=2)
            second()

    J = Jacobian(run, x, y)()
    v = np.array([0.3, 0.8])
    assert_allclose(J, np.diag(2 + 6 * v + 3 * v**2), rtol=1e-13)
