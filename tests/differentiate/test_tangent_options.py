"""``tangents=`` and ``chunk_size=``: how tangents are stored, and how many columns at a time, changes no number."""

import inspect
import re
from dataclasses import replace

import numpy as np
import pytest
import taichi as ti
from differences import central_differences, outputs, scalars, vectors
from numpy.testing import assert_allclose

from taichi_ext import InvalidArgumentError, Jacobian, jacobian
from taichi_ext.analysis.affine import Affine
from taichi_ext.differentiate.forms.forms import Seed
from taichi_ext.differentiate.plan.storage_facts import SHORTEST_ROW, STRATEGIES, StorageFacts, StorageLimits
from taichi_ext.program import F64, I32, Local

pytestmark = pytest.mark.usefixtures("ti64")

TANGENTS = ("auto", "sparse", "dense")
N, BLOBS = 7, 4


def make_sum_of_blobs():
    """Index expressions that add up in a loop."""
    x, y = scalars(np.linspace(0.2, 1.3, 3 * BLOBS)), outputs(5)

    @ti.kernel
    def k():
        for i in y:
            total = 0.0
            for n in range(BLOBS):
                d = x[3 * n + 1] - 0.1 * i
                total += x[3 * n] * ti.exp(-d * d * x[3 * n + 2])
            y[i] = total

    return k, x, y


def make_nearest():
    """A choice among index expressions."""
    x, y = scalars(np.sin(np.arange(N) * 2.3) + 2.0), outputs(4)

    @ti.kernel
    def k():
        for i in y:
            best = 1e9
            for n in range(N):
                t = x[n] * (1.0 + 0.1 * i * n)
                if t < best:
                    best = t
            y[i] = best * best

    return k, x, y


def make_transmittance():
    """A nonlinear recurrence."""
    x, y = scalars(np.linspace(0.05, 0.9, N)), outputs(4)

    @ti.kernel
    def k():
        for i in y:
            seen, through = 0.0, 1.0
            for n in range(N):
                a = 1.0 - ti.exp(-x[n] * (i + 1))
                seen += through * a * n
                through *= 1.0 - a
            y[i] = seen + through

    return k, x, y


def make_constants():
    """Constant columns, in branches, vectors and a loop in place."""
    x, y = vectors([[0.4, 1.2], [0.9, 0.3]]), outputs(3)

    @ti.kernel
    def k():
        for i in y:
            v = ti.Vector([x[0].x, x[1].y])
            for j in range(i + 1):
                v = v.yx * x[0] + x[1]
                if v.x > 1.0:
                    v[j % 2] *= x[1].x
            y[i] = v.norm()

    return k, x, y


def make_pipeline():
    """Several launches in place."""
    x, y = scalars([0.3, 0.8, 0.5]), outputs(3)

    @ti.kernel
    def start():
        for i in y:
            y[i] = x[i]

    @ti.kernel
    def step():
        ti.loop_config(serialize=True)
        for i in range(3):
            y[i] += 0.1 * y[(i + 1) % 3] * x[0]

    def run():
        start()
        for _ in range(4):
            step()

    return run, x, y


def make_handed_on():
    """Two numbers that a loop hands on to each other, one with a term more."""
    x, y = scalars(np.linspace(0.3, 1.2, N)), outputs(4)

    @ti.kernel
    def k():
        for i in y:
            a, b = x[0], x[1] * i
            for n in range(N):
                a, b = b * 0.5 + 0.3 * x[(n + i) % N], a
            y[i] = a + 0.1 * b

    return k, x, y


def make_ring():
    """Three numbers that are handed on in a ring, in two loops, under a condition."""
    x, y = scalars(np.linspace(0.3, 1.2, N)), outputs(4)

    @ti.kernel
    def k():
        for i in y:
            a, b, c = x[0], 0.2, x[2]
            for n in range(N):
                for m in range(2):
                    first = a
                    a = b * 0.9
                    if n % 2 == m:
                        b = c + 0.1 * x[(n * m + i) % N]
                    c = first * 0.5
            y[i] = a + 0.1 * b - 0.3 * c

    return k, x, y


PROGRAMS = [
    make_sum_of_blobs,
    make_nearest,
    make_transmittance,
    make_constants,
    make_pipeline,
    make_handed_on,
    make_ring,
]


@pytest.mark.sweep
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda f: f.__name__.removeprefix("make_"))
def test_every_setting_gives_the_same(make):
    k, x, y = make()
    ((expected,),) = central_differences(k, [x], [y])
    for tangents in TANGENTS:
        for chunk_size in (None, 1, 3):
            J = jacobian(k, x, y, tangents=tangents, chunk_size=chunk_size)
            assert_allclose(J, expected, rtol=1e-6, atol=1e-8, err_msg=f"{tangents}, {chunk_size}")


@pytest.mark.chosen_only("columns are few enough for registers", "--chunk-size")
def test_what_was_chosen_is_told():
    k, x, y = make_nearest()
    chosen = "all 7 columns" if STRATEGIES["auto"] is STRATEGIES["dense"] else "indexed columns"
    for tangents, text in (("auto", chosen), ("sparse", "indexed columns"), ("dense", "all 7 columns")):
        plan = Jacobian(k, x, y, tangents=tangents)
        plan()
        assert text in plan.explain()


@pytest.mark.sweep
@pytest.mark.chosen_only("columns are few enough for registers", "--chunk-size")
@pytest.mark.parametrize("statements", (1, 1 << 20))
def test_long_kernels_have_rows_for_registers(monkeypatch, statements):
    """What Taichi compiles for minutes with a line for each coefficient, it compiles in seconds with loops."""
    monkeypatch.setitem(STRATEGIES, "auto", replace(StorageLimits(), statements=statements))
    x, y = scalars(np.linspace(0.2, 1.1, SHORTEST_ROW)), outputs(3)

    @ti.kernel
    def k():
        for i in y:
            state = ti.Vector([x[n] for n in range(SHORTEST_ROW)])
            for _ in range(3):
                for n in ti.static(range(SHORTEST_ROW)):
                    state[n] += 0.1 * state[(n + 1) % SHORTEST_ROW] * state[(n + 2) % SHORTEST_ROW]
                if state[0] > 0.25 + 0.1 * i:
                    state *= state.norm()
            y[i] = state.sum() + state[1]

    plan = Jacobian(k, x, y)
    ((expected,),) = central_differences(k, [x], [y])
    assert_allclose(plan(), expected, rtol=1e-6)
    assert (f"all {SHORTEST_ROW} columns" in plan.explain()) == (statements == 1)


def test_slots_that_grow_with_each_pass_become_a_row():
    """The bound on growth alone, for columns of which it is not known where they come from."""
    column, limits = Local("column", I32), STRATEGIES["sparse"]
    facts = StorageFacts(Local("nearest", F64))
    for n in range(limits.slots):
        facts.begin_pass()
        form = {Seed(Affine(((column, 1),), k)): 1 for k in range(n + 1)}
        facts.note_form(form, lambda seed: False, limits, loop=None, grows=False)
    assert facts.has_row
    assert facts.slots <= limits.slots


def test_slots_of_one_pass_stay_slots():
    column, limits = Local("column", I32), STRATEGIES["sparse"]
    facts = StorageFacts(Local("nearest", F64))
    for _ in range(20):
        facts.begin_pass()
        for n in range(limits.slots):
            form = {Seed(Affine(((column, 1),), k)): 1 for k in range(n + 1)}
            facts.note_form(form, lambda seed: False, limits, loop=None, grows=False)
    assert not facts.has_row


@pytest.mark.chosen_only("the operations are those on 40 columns", "--chunk-size")
def test_operations_are_counted_by_line():
    x, y, z = scalars(np.linspace(0.1, 0.9, 40)), outputs(4), outputs(4)

    @ti.func
    def scaled(a):
        return a * x[1]

    @ti.kernel
    def k():
        for i in y:
            total = 0.0
            for n in range(40):
                total += x[n] * x[39 - n]
            y[i] = total * total
            z[i] = scaled(total)

    first = inspect.getsourcelines(k.__wrapped__)[1]
    plan = Jacobian(k, x, [y, z])
    plan()
    found = {}
    for line in plan.explain().splitlines():
        match = re.fullmatch(r"  line (\d+): (\d+) operations on tangents", line)
        if match:
            found[int(match[1]) - first] = int(match[2])
    # line 5, each time: two seeds are added to the row; line 6: the weight is total + total, then 40 products;
    # line 7: 40 products, and a sum for the seed of x[1]
    assert found == {5: 2, 6: 40, 7: 41}


def test_state_is_that_of_one_run():
    x = scalars([0.3, 0.8, 0.5])

    @ti.kernel
    def k():
        for i in x:
            x[i] *= 1.0 + x[i]

    J = jacobian(k, x, x, chunk_size=1)
    assert_allclose(J, np.diag([1.6, 2.6, 2.0]))
    assert_allclose(x.to_numpy(), [0.39, 1.44, 0.75])


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tangents": "lanes"}, "tangents is 'lanes'; expected one of 'auto', 'sparse', 'dense'"),
        ({"chunk_size": 0}, "chunk_size is 0"),
    ],
)
def test_bad_input(options, message):
    k, x, y = make_nearest()
    with pytest.raises(InvalidArgumentError, match=message):
        jacobian(k, x, y, **options)
