"""Indices that may leave: outside there is no derivative, nothing is stored, and the analysis knows what lies within.

Fields stand between others in one tree, so that what plain kernels read outside is memory that is there.
"""

import itertools

import numpy as np
import pytest
import taichi as ti
from differences import integers, outputs, read, scalars, write
from kernel_texts import kernel_of, kernels_of
from numpy.testing import assert_allclose

from taichi_ext import DerivativeWarning, Jacobian, check_jacobian, jacobian, jvp, vjp

pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.filterwarnings("ignore::taichi_ext.DerivativeWarning"),
    pytest.mark.cpu_only("a GPU may end where a plain kernel reads outside"),
]
PAD = 64
GUARD = "no tangents there"  # what explain says of a guarded index


def between(values, *, offset=None, fill=np.nan):
    """A field of float64 that holds the values, between two others of the same tree that hold NaN."""
    values = np.asarray(values, np.float64)
    axes = (ti.i, ti.ij, ti.ijk)[values.ndim - 1]
    first, field, last = (ti.field(ti.f64) for _ in range(3))
    builder = ti.FieldsBuilder()
    builder.dense(ti.i, PAD).place(first)
    builder.dense(axes, values.shape).place(field, offset=offset)
    builder.dense(ti.i, PAD).place(last)
    builder.finalize()
    first.fill(fill)
    last.fill(fill)
    field.from_numpy(values)
    return field


def dense(J):
    return J.toarray() if hasattr(J, "toarray") else np.asarray(J)


OPTIONS = ({}, {"format": "csr"}, {"chunk_size": 1}, {"chunk_size": 3}, {"tangents": "dense"}, {"tangents": "sparse"})


def of_stencil(x, offsets, *, is_guarded):
    """The Jacobian of sum((k + 1) * x[i + offset]**2) where what is outside is a constant."""
    J = np.zeros((*x.shape, *x.shape))
    for at in np.ndindex(x.shape):
        there = [tuple(np.add(at, o)) for o in offsets]
        are_inside = [all(0 <= i < n for i, n in zip(t, x.shape, strict=True)) for t in there]
        for k, (t, is_inside) in enumerate(zip(there, are_inside, strict=True)):
            if is_inside and (all(are_inside) or not is_guarded):
                J[(*at, *t)] += 2 * (k + 1) * x[t]
    return J


def stencil(x, y, offsets, lows, highs, first=0):
    """A kernel that reads the neighbours of all entries, or, with lows, of those whose neighbours are inside."""
    is_free = not lows

    @ti.kernel
    def k():
        for I in ti.grouped(x):
            if ti.static(is_free):
                for n in ti.static(range(len(offsets))):
                    y[I] += (n + 1) * x[I + ti.Vector(offsets[n])] ** 2
            else:
                if all(I >= ti.Vector(lows) + first) and all(I < ti.Vector(highs) + first):
                    for n in ti.static(range(len(offsets))):
                        y[I] += (n + 1) * x[I + ti.Vector(offsets[n])] ** 2

    return k


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_random_stencils(rank, is_guarded, seed):
    """Entries outside are constants, in every format and block of columns; guarded ones need no checks."""
    rng = np.random.default_rng([seed, rank, is_guarded])
    shape = tuple(int(n) for n in rng.integers(2, (8, 5, 4)[rank - 1], rank))
    values = rng.uniform(0.5, 2, shape)
    offsets = [list(map(int, rng.integers(-2, 3, rank))) for _ in range(rng.integers(1, 4))]
    first = int(rng.integers(-3, 4)) if seed % 2 else 0
    place = (first,) * rank if first else None
    lows = [int(max(0, *(-o[n] for o in offsets))) for n in range(rank)] if is_guarded else None
    highs = [int(min(shape[n], *(shape[n] - o[n] for o in offsets))) for n in range(rank)] if is_guarded else None
    x, y = between(values, offset=place), between(np.zeros(shape), offset=place)
    k = stencil(x, y, offsets, lows, highs, first)
    wanted = of_stencil(values, offsets, is_guarded=is_guarded)
    for options in (OPTIONS[seed % len(OPTIONS)], OPTIONS[(seed + 3) % len(OPTIONS)]):
        y.fill(0)
        plan = Jacobian(k, x, y, **options)
        J = dense(plan())
        assert_allclose(J.reshape(wanted.shape), wanted, rtol=1e-12)
        assert not (is_guarded and GUARD in plan.explain())


@pytest.mark.mostly_sweep("store-{}")
@pytest.mark.parametrize("options", OPTIONS[:4:2] + OPTIONS[1:2], ids=str)
@pytest.mark.parametrize("kind", ["store", "add", "sub", "mul", "atomic_max", "atomic_add"])
def test_stores_outside(kind, options):
    """No tangent is stored, neither outside nor to another entry of the shape (2, 3)."""
    values = np.arange(1.0, 7.0).reshape(2, 3)
    x, y = between(values), between(np.ones((2, 3)), fill=0.0)

    @ti.kernel
    def k():
        ti.loop_config(serialize=True)
        for i, j in ti.ndrange(2, 3):
            if ti.static(kind == "store"):
                y[i, j + 1] = x[i, j] ** 2
            elif ti.static(kind == "add"):
                y[i, j + 1] += x[i, j] ** 2
            elif ti.static(kind == "sub"):
                y[i, j + 1] -= x[i, j] ** 2
            elif ti.static(kind == "mul"):
                y[i, j + 1] *= x[i, j] ** 2
            elif ti.static(kind == "atomic_max"):
                ti.atomic_max(y[i, j + 1], x[i, j] ** 2)
            else:
                old = ti.atomic_add(y[i, j + 1], x[i, j] ** 2)
                y[i, j + 1] += 0 * old

    wanted = np.zeros((2, 3, 2, 3))
    for i, j in itertools.product(range(2), range(2)):
        wanted[i, j + 1, i, j] = 2 * values[i, j] * (-1 if kind == "sub" else 1)
    if kind == "atomic_max":
        wanted[0, 1, 0, 0] = 0.0  # a tie of 1 and 1: what was there before wins
    memory = np.full(48, 7.0)
    out = memory[6:42].reshape(2, 3, 2, 3)
    if "format" not in options:
        options = {**options, "out": out}
    J = dense(jacobian(k, x, y, **options)).reshape(wanted.shape)
    assert_allclose(J, wanted)
    assert_allclose(memory[:6], 7)
    assert_allclose(memory[42:], 7)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"tangents": "dense"}], ids=str)
def test_arrays(options):
    """Part of a larger array: what is next to it is there, too."""
    memory = np.full(24, np.nan)
    a = memory[8:16]
    a[:] = np.arange(1.0, 9.0)
    b = np.full(24, 0.0)[8:16]
    k = kernel_of("for i in range(a.shape[0]): b[i] = a[i - 1] ** 2 + a[i + 1]", "a: A, b: A")
    wanted = np.zeros((8, 8))
    for i in range(8):
        if i > 0:
            wanted[i, i - 1] = 2 * a[i - 1]
        if i < 7:
            wanted[i, i + 1] = 1
    assert_allclose(jacobian(k, a, b, args=(a, b), **options), wanted)


@pytest.mark.sweep
def test_products():
    """The same with tangents that are given."""
    x, z, y = between([1.0, 2.0, 3.0]), between(np.zeros(3)), between(np.zeros(3))

    @ti.kernel
    def k():
        for i in x:
            z[i] = x[i] ** 2
        for i in x:
            y[i] = z[i - 1] + 2 * x[i + 1]

    plan = Jacobian(k, x, y)
    J = np.array([[0, 2, 0], [2, 0, 2], [0, 4, 0]], float)
    assert_allclose(plan(), J)
    assert_allclose(jvp(k, x, np.array([1.0, 2, 3]), y), J @ [1, 2, 3])
    assert_allclose(vjp(k, x, y, np.array([1.0, 2, 3])), J.T @ [1, 2, 3])


# --- what is known to lie within


INSIDE = """
    in_the_other_branch:
        for i in x:
            if i == 0 or i >= n - 1:
                y[i] = x[i]
            else:
                y[i] = x[i - 1] + x[i + 1]
    after_a_jump:
        for i in range(n):
            if i == n - 1:
                continue
            y[i] = x[i + 1]
    clamped: for i in x: y[i] = x[ti.max(i - 1, 0)] + x[ti.min(i + 1, n - 1)] + x[ti.math.clamp(i - 2, 0, n - 1)]
    wrapped:
        for i in x:
            before = i - 1
            if before < 0:
                before += n
            y[i] = x[before] + x[(i + 3) % n] + x[(i - 1 + n) % n]
    in_inner_loops:
        for i in x:
            for j in range(i):
                y[i] += x[j] * x[i]
            for j in range(ti.max(0, i - 1), ti.min(n, i + 2)):
                y[i] += x[j]
            for d in ti.static(range(-1, 2)):
                if 0 <= i + d < n:
                    y[i] += x[i + d]
    by_conditions_of_what_is_read:
        for i in q:
            if 0 <= q[i] < n:
                y[q[i]] += x[q[i]]
            if not (q[i] < 0 or q[i] >= n):
                y[i] += x[q[i]]
    selected:
        for i in x:
            after, is_inner = i + 1, i < n - 1
            y[i] = x[ti.select(i > 0, i - 1, n - 1)]
            if is_inner:
                y[i] += x[after]
"""


def inside(x, y, q):
    """Kernels that stay inside, by one way of saying so each."""
    n = x.shape[0]
    return list(kernels_of(INSIDE, x=x, y=y, q=q, n=n).values())


@pytest.mark.mostly_sweep("6")
@pytest.mark.parametrize("number", range(7))
def test_what_lies_within_costs_nothing(number):
    """No guard is needed, and J is that of differences."""
    x, y, q = scalars([0.3, 1.2, 2.1, 0.7, 1.5]), outputs(5), integers([0, 3, -2, 7, 4])
    k = inside(x, y, q)[number]
    plan = Jacobian(k, x, y)
    J = plan()
    assert GUARD not in plan.explain()
    assert "inside" not in plan.source
    assert check_jacobian(k, x, y).outside == ()
    check_differences(k, x, y, J)


def check_differences(k, x, y, J):
    y.fill(0)
    centre, step = read(x), 1e-6
    for n in range(5):
        ends = []
        for sign in (1, -1):
            write(x, centre + sign * step * np.eye(5)[n])
            y.fill(0)
            k()
            ends.append(read(y))
        assert_allclose(J[:, n], (ends[0] - ends[1]) / (2 * step), atol=1e-7)
    write(x, centre)


@pytest.mark.parametrize("name", ["counters", "related"])
def test_what_lies_within_by_other_numbers_has_a_check_that_changes_nothing(name):
    x, y = scalars([0.3, 1.2, 2.1, 0.7, 1.5]), outputs(5)
    n = x.shape[0]

    @ti.kernel
    def counters():
        for i in x:
            k = 0
            while k < n:
                y[i] += x[k]
                k += 1
            m = i
            while m >= 0:
                y[i] += x[m]
                m -= 1

    @ti.kernel
    def related():
        for i in x:
            for j in range(i):
                y[i] += x[j] * x[i - 1 - j]

    k = {"counters": counters, "related": related}[name]
    plan = Jacobian(k, x, y)
    J = plan()
    assert GUARD in plan.explain()
    check_differences(k, x, y, J)


@pytest.mark.sweep
def test_what_only_looks_as_if_it_lay_within():
    """Conditions that are off by one, or of something that has changed since."""
    values = np.arange(1.0, 6.0)
    x, y, q = between(values), between(np.zeros(5)), integers([-3, 0, 2, 4, 5])

    @ti.kernel
    def k():
        for i in q:
            s = 0.0
            if q[i] >= 0 and q[i] <= 5:
                s += x[q[i]]
            k = i
            if k > 0:
                k -= 2
                s += x[k] * 10
            if i > 0 or q[i] < 100:
                s += x[i - 1] * 100
            m = (i - 1) + ti.select(i == 0, 0, 1)
            s += x[m] * 1000
            c = ti.raw_mod(i - 2, 5)
            s += x[c] * 10000
            y[i] = s

    wanted = np.zeros((5, 5))
    for i, n in enumerate([-3, 0, 2, 4, 5]):
        places = [(n, 1), (i - 2 if i > 0 else 9, 10), (i - 1, 100), (i - (i == 0), 1000), (i - 2, 10000)]
        for at, weight in places:
            if 0 <= at < 5:
                wanted[i, at] += weight
    for options in OPTIONS:
        assert_allclose(dense(jacobian(k, x, y, **options)), wanted)


# --- what is told


@pytest.mark.sweep
def test_the_check_names_the_lines():
    """By the indices as they are, also where nothing is known of them before."""
    x, y, q = between(np.arange(1.0, 5.0), fill=0.0), between(np.zeros(4), fill=0.0), integers([0, 5, -1, 2])
    k = kernel_of("for i in q: y[i] = x[i] * 2; y[i] += x[q[i]] ** 2", q=q, y=y, x=x)
    report = check_jacobian(k, x, y)
    assert report
    (text,) = report.outside
    assert "(2 times)" in text
    assert "y[i] += x[q[i]] ** 2" in text
    assert text in str(report)
    q.from_numpy(np.array([0, 1, 3, 2], np.int32))
    assert check_jacobian(k, x, y).outside == ()


def test_an_index_that_does_leave_is_told():
    """Where it stands in no branch, and so does leave; of the other one, explain tells that there is a guard."""
    x, y = between(np.arange(1.0, 5.0), fill=0.0), between(np.zeros(4))
    k = kernel_of("for i in range(4): y[i] = x[i + 1]", x=x, y=y)
    with pytest.warns(DerivativeWarning, match="Index 4 is outside of x, which has 0 to 3"):
        jacobian(k, x, y)
    plan = Jacobian(kernel_of("for i in range(4): y[i] = x[i + 1] if y[i] > 1 else 0.0", x=x, y=y), x, y)
    plan()
    assert GUARD in plan.explain()
