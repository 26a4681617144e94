"""Random numbers: with one thread and one seed, a call of ``jacobian`` draws what a plain run draws, in its order.

The programs run one after the other in one Taichi program, plainly in one and with their Jacobians in others. As each
goes on where the one before ended, a draw too many or too few shows in all that follow, too.
"""

import warnings

import numpy as np
import pytest
import taichi as ti
from kernel_texts import kernel_of, kernels_of, names_of
from numpy.testing import assert_allclose, assert_array_equal
from taichi_program import end_program, initialise

from taichi_ext import jacobian

pytestmark = pytest.mark.cpu_only("the order of draws is that of one thread")
SEED = 5


@ti.func
def difference(a, b):
    return a - 2 * b


@ti.func
def first(a, b):
    return 2 * a


@ti.func
def sometimes(a):
    result = 0.0
    if a > 0.5:
        result = ti.random(ti.f64)
    return result


def draw_in_python(a):
    return ti.random(ti.f64) * a + ti.random(ti.f64)


PROGRAMS = """
    signs:
        for i in y:
            y[i] = -ti.random(ti.f64) + ti.random(ti.f64) + x[i] * (-ti.random(ti.f64)) * (-ti.random(ti.f64))
    ternaries:
        for i in y:
            inner = ti.random(ti.f64) * x[i] if ti.random(ti.f64) > 0.5 else x[i] - ti.random(ti.f64)
            y[i] = inner if x[i] > 0.5 else (x[i] if ti.random(ti.f64) > 0.3 else ti.random(ti.f64))
            z[i] = 1.0 if x[i] > 1.0 else x[i] * ti.random(ti.f64)
    conditions:
        for i in y:
            if x[i] > 1 or (ti.random(ti.f64) > 0.5 and ti.random(ti.f64) < 0.7):
                y[i] = x[i] * ti.random(ti.f64)
            if 0.2 < ti.random(ti.f64) < ti.random(ti.f64) < 2:
                y[i] += x[i]
            z[i] = ti.random(ti.f64) > 0.5 or ti.random(ti.f64) > 0.5
    while_loops:
        for i in y:
            n = 0
            while ti.random(ti.f64) < 0.7:
                n += 1
            p = ti.Vector([0.0, 0.0])
            while True:
                p = ti.Vector([ti.random(ti.f64), ti.random(ti.f64)]) * 2 - 1
                if p.norm() < 1:
                    break
            y[i] = p[0] * x[i] + n
    bounds:
        for i in y:
            for j in range(ti.random(ti.u32) % 4):
                y[i] += ti.random(ti.f64) * x[j]
    arguments:
        for i in y:
            y[i] = difference(ti.random(ti.f64) * x[i], ti.random(ti.f64)) + sometimes(ti.random(ti.f64)) * x[i]
            y[i] += first(ti.random(ti.f64), ti.random(ti.f64)) * x[i]
            z[i] = draw_in_python(x[i]) - draw_in_python(ti.random(ti.f64))
    indices:
        for i in range(4):
            z[int(ti.random(ti.f64) * 4)] += ti.random(ti.f64)
            y[int(ti.random(ti.f64) * 4)] = x[int(ti.random(ti.f64) * 4)] * ti.random(ti.f64)
    atomics:
        for i in y:
            old = ti.atomic_add(y[i], ti.random(ti.f64) * x[i])
            ti.atomic_max(z[0], ti.random(ti.f64))
            z[i] += old + ti.random(ti.f64)
            ti.atomic_sub(y[int(ti.random(ti.f64) * 4)], x[i])
    unused:
        for i in y:
            ti.random(ti.f64)
            never = ti.random(ti.f64)  # noqa: F841
            v = ti.Vector([ti.random(ti.f64), ti.random(ti.f64)])
            overwritten = ti.random(ti.f64)
            if x[i] > 1:
                overwritten = x[i]
            else:
                overwritten = 2.0
            z[i] = ti.random(ti.f64)
            y[i] = overwritten * x[i] * v[0]
            z[i] = ti.random(ti.f64)
    used_in_a_circle:
        # Nothing needs ``t``, but Taichi sees that each iteration reads it.
        for i in y:
            t, last = 0.0, 0.0
            for _ in range(3):
                u = ti.random(ti.f64) * 2
                t += u
                last = ti.random(ti.f64)  # noqa: F841
            y[i] = x[i]
    unused_choices:
        for i in y:
            t = 0.0
            for _ in range(int(ti.random(ti.f64) * 5)):
                t = x[i]
            if ti.random(ti.f64) > 0.5:
                t = x[i]  # noqa: F841
            y[i] = x[i]
    interrupted:
        for i in y:
            p, w, before = 0.0, 1.0, ti.random(ti.f64)
            for _ in range(20):
                p += ti.random(ti.f64) - 0.5
                w *= 1 - x[i] * 0.01 * (ti.random(ti.f64) - before)
                if p > 1.5:
                    break
                if ti.random(ti.f64) > 0.9:
                    continue
                before = ti.random(ti.f64)
            y[i] = w * p
    at_the_top:
        a = ti.random(ti.f64)
        b = ti.random(ti.f64) * x[0]
        for i in y:
            y[i] = (a + ti.random(ti.f64)) * b * x[i]
        for i in range(3):
            z[i] = ti.random(ti.f64) + a
    rows: for i, j in ti.ndrange(4, 64): y[i] += x[i] * ti.random(ti.f64) * (0.5 if j < 32 else ti.random(ti.f64))
"""


def start(**options):
    end_program()
    ti.init(
        arch=ti.cpu,
        default_fp=ti.f64,
        offline_cache=False,
        log_level=ti.ERROR,
        cpu_max_num_threads=1,
        random_seed=SEED,
        **options,
    )


def results(run, **options):
    """What the programs leave, and one number drawn after each."""
    start(**options)
    found = {}
    for name in names_of(PROGRAMS):
        x, y, z, after = (ti.field(ti.f64, 4) for _ in range(4))
        x.from_numpy(np.array([0.3, 0.7, 1.1, 1.5]))
        draw = kernel_of("after[0] = ti.random(ti.f64)", "after: ti.template()")
        kernels = kernels_of(
            PROGRAMS,
            x=x,
            y=y,
            z=z,
            difference=difference,
            first=first,
            sometimes=sometimes,
            draw_in_python=draw_in_python,
        )
        run(kernels[name], x, [y, z])
        draw(after)
        found[name] = np.concatenate([f.to_numpy() for f in (y, z, after)])
    return found


def dense(k, x, outputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of outputs that depend on nothing, or are not written
        jacobian(k, x, outputs[:1])


def sparse(k, x, outputs):
    jacobian(k, x, outputs[0], format="csr")


def plain(k, x, outputs):
    k()


@pytest.fixture(scope="module", params=[False, True], ids=["strict", "fast_math"])
def runs(request):
    found = {run.__name__: results(run, fast_math=request.param) for run in (plain, dense, sparse)}
    yield found, request.param
    initialise(default_fp=ti.f64)
    end_program()


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["dense", "sparse"])
@pytest.mark.parametrize("name", names_of(PROGRAMS))
def test_draws_are_those_of_a_plain_run(runs, name, way):
    found, is_fast = runs
    if is_fast:
        assert_allclose(found[way][name], found["plain"][name], rtol=1e-12, atol=1e-14)
    else:
        assert_array_equal(found[way][name], found["plain"][name])


@pytest.fixture
def one_thread():
    start(fast_math=False)
    yield
    end_program()
    initialise(default_fp=ti.f64)


def test_j_is_that_of_the_numbers_drawn(one_thread):
    x, y, r = (ti.field(ti.f64, 4) for _ in range(3))
    x.from_numpy(np.array([0.3, 0.7, 1.1, 1.5]))
    text = "for i in y: y[i] = ti.random(ti.f64) if x[i] > 1.0 else x[i] * ti.random(ti.f64); r[i] = ti.random(ti.f64)"
    k = kernel_of(text, y=y, x=x, r=r)
    J = jacobian(k, x, y)
    assert (np.append(y.to_numpy(), r.to_numpy()) > 0).all()
    drawn = np.where(x.to_numpy() > 1.0, 0.0, y.to_numpy() / x.to_numpy())
    assert_allclose(J, np.diag(drawn), rtol=1e-14)
