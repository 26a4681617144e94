"""Kernels of pipelines are compiled once, for what their containers will carry; wrong predictions change no result."""

import functools
import types

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars
from numpy.testing import assert_allclose

from taichi_ext import Jacobian

pytestmark = pytest.mark.usefixtures("ti64")
once = pytest.mark.chosen_only("the kernels of one block of columns", "--chunk-size")


def compiled(run, params, outs, args=()):
    """How many kernels with tangents a first call compiles."""
    plan = Jacobian(run, params, outs, args=args)
    plan()
    return len(plan._prepared.fused)


@ti.data_oriented
class Wave:
    def __init__(self):
        self.k = scalars([0.5, 0.7])
        self.before, self.now, self.after = scalars(np.linspace(0, 1, 6)), scalars(np.linspace(1, 2, 6)), outputs(6)
        self.looked_up = 0

    @property
    def counted(self):
        self.looked_up += 1
        return self.step

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

    def both(self):
        self.step()
        self.roll()


def ways(wave):
    """Pipelines that launch two kernels in turns."""

    def direct():
        for _ in range(3):
            wave.step()
            wave.roll()

    def method():
        for _ in range(3):
            wave.both()

    def listed(steps=(wave.step, wave.roll)):
        for _ in range(3):
            for step in steps:
                step()

    def named():
        count = 0
        do = wave.both
        while count < 3:
            do()
            count += 1

    def inner():
        def substep():
            wave.step()
            wave.roll()

        for _ in range(3):
            substep()

    def comprehended():
        return [(wave.step(), wave.roll()) for _ in range(3)] and None

    def in_blocks():
        try:
            for n in range(3):
                with np.errstate(all="ignore"):
                    wave.step()
                if n >= 0:
                    wave.roll()
        finally:
            wave.now[0] = 0.5

    return {f.__name__: f for f in (direct, method, listed, named, inner, comprehended, in_blocks)}


@once
@pytest.mark.parametrize("name", ["direct", "method", "listed", "named", "inner", "comprehended", "in_blocks"])
def test_each_kernel_is_compiled_once(name):
    wave = Wave()
    run = ways(wave)[name]
    assert compiled(run, wave.k, wave.now) == 2
    wave = Wave()
    check_jacobian(ways(wave)[name], wave.k, wave.now, state=[wave.before, wave.after])


@once
def test_a_parameter_that_is_overwritten_later():
    x, y = scalars([0.3, 0.8]), outputs(2)

    @ti.kernel
    def first():
        for i in x:
            y[i] += x[i] * x[1 - i]

    @ti.kernel
    def second():
        for i in x:
            x[i] = ti.sin(y[i])

    def run():
        for _ in range(2):
            first()
            second()

    assert compiled(run, x, y) == 2
    x.from_numpy(np.array([0.3, 0.8]))
    y.fill(0)
    check_jacobian(run, x, [x, y])


def test_a_launch_that_is_named_but_never_made():
    x, t, y = scalars([0.3, 0.8]), scalars([1.0, 2.0]), outputs(2)

    @ti.kernel
    def add():
        for i in x:
            y[i] += x[i] * t[i]

    @ti.kernel
    def replace():
        for i in x:
            t[i] = x[i]

    def run(n):
        for k in range(3):
            add()
            if k > n:
                replace()

    for n in (5, 1, 0):
        check_jacobian(run, x, y, args=(n,), state=[t])


def test_launches_that_cannot_be_foreseen():
    wave = Wave()

    def run():
        for _ in range(3):
            for name in ("step", "roll"):
                getattr(wave, name)()
            functools.partial(wave.step)()

    check_jacobian(run, wave.k, wave.now, state=[wave.before, wave.after])


def test_python_values_that_change_before_the_launch():
    """What a kernel was recorded with ahead is not what it is compiled with."""
    x, t, y = scalars([0.3, 0.8]), outputs(2), outputs(2)
    powers = [1]

    @ti.kernel
    def first():
        for i in x:
            t[i] += x[i] + y[i]

    @ti.kernel
    def second():
        for i in x:
            for p in ti.static(powers):
                y[i] += t[i] ** p

    def run():
        powers[:] = [1]
        for _ in range(2):
            first()
            powers[:] = [2, 3]
            second()

    check_jacobian(run, x, y, state=[t])


def test_nothing_of_the_user_runs_ahead():
    wave = Wave()
    seen = []

    def note():
        seen.append(len(seen))
        return wave.roll

    def run():
        for _ in range(3):
            wave.counted()
            note()()

    Jacobian(run, wave.k, wave.now)()
    assert wave.looked_up == 3
    assert seen == [0, 1, 2]


def test_a_field_that_is_made_after_the_first_launch():
    x, y = scalars([0.3, 0.8]), outputs(2)
    holder = types.SimpleNamespace(made=None)

    @ti.kernel
    def first():
        for i in x:
            y[i] += x[i]

    @ti.kernel
    def second():
        for i in x:
            holder.made[i] = y[i]
            y[i] += holder.made[i] * x[i]

    def run():
        for k in range(2):
            first()
            if k == 0:
                holder.made = ti.field(ti.f64, shape=2)
            second()

    J = Jacobian(run, x, y)()
    v = np.array([0.3, 0.8])
    assert_allclose(J, np.diag(2 + 6 * v + 3 * v**2), rtol=1e-13)


@once
def test_arrays():
    x = scalars([0.3, 0.8])
    a, b = ti.ndarray(ti.f64, 2), ti.ndarray(ti.f64, 2)
    kind = ti.types.ndarray(ti.f64, ndim=1)

    @ti.kernel
    def first(a: kind, b: kind):
        for i in x:
            b[i] += x[i] * (1 + a[i])

    @ti.kernel
    def second(a: kind, b: kind):
        for i in x:
            a[i] = b[i] * b[i]

    def run(a, b):
        for _ in range(2):
            first(a, b)
            second(a, b)

    assert compiled(run, x, a, args=(a, b)) == 2
    a.fill(0)
    b.fill(0)
    v = np.array([0.3, 0.8])
    assert_allclose(Jacobian(run, x, b, args=(a, b))(), np.diag(2 + 3 * v**2), rtol=1e-12)
