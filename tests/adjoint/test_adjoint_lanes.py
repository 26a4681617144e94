"""Adjoints whose neighbouring iterations run together, and loops in which they cannot."""

import re

import numpy as np
import pytest
import taichi as ti
from differences import read, scalars, vectors, write
from forced_lanes import force_lanes
from kernel_texts import kernel_of
from numpy.testing import assert_allclose
from taichi_program import share_program

from taichi_ext import Jacobian, hvp, jacobian, value_and_gradient, vjp
from taichi_ext.adjoint import contention, lanes, stage_adjoint
from taichi_ext.schedule import loops
from taichi_ext.schedule.lanes import CannotError

N = 10  # no multiple of the lanes: the last stretch is shorter
INNER = 3


@pytest.fixture(autouse=True)
def tried(monkeypatch):
    """Whether loops ran in lanes, or why they did not, with two threads."""
    share_program(default_fp=ti.f64, cpu_max_num_threads=2)
    found = []

    def noted(*args):
        try:
            made = lanes.adjoint_in_lanes(*args)
        except CannotError as reason:
            found.append(str(reason))
            raise
        found.append("in lanes")
        return made

    monkeypatch.setattr(stage_adjoint, "adjoint_in_lanes", noted)
    monkeypatch.setattr(lanes, "FEWEST", 4)
    return found


def field(*shape):
    return scalars(np.random.default_rng(sum(shape)).uniform(0.3, 1.4, shape))


def check(run, params, output):
    """Two cotangents times J, against J by the forward engine."""
    rows = np.random.default_rng(5).standard_normal((2, *output.shape))
    found = [vjp(run, params, output, row) for row in rows]
    blocks = jacobian(run, params, output, mode="forward")
    for row, parts in zip(rows, found, strict=True):
        for part, block in zip(parts, blocks, strict=True):
            expected = np.tensordot(row, block, row.ndim)
            assert np.abs(expected).max() > 0
            assert_allclose(part, expected, rtol=1e-9, atol=1e-12)


def test_columns_of_a_matrix_are_in_lanes(tried):
    a, b, y = field(5, INNER), field(INNER, N), field(5, N)

    @ti.kernel
    def run():
        for i, j in y:
            s = 0.0
            for d in range(INNER):
                s += a[i, d] * b[d, j]
            if s > 1:
                y[i, j] = ti.tanh(s)
            else:
                y[i, j] = s * s

    check(run, [a, b], y)
    assert set(tried) == {"in lanes"}
    by_rows = jacobian(run, [a, b], y, mode="reverse")  # several cotangents in one way back
    assert_allclose(by_rows[1], jacobian(run, [a, b], y, mode="forward")[1], rtol=1e-12)


def test_sums_over_lanes_are_added_once(tried):
    """To entries that all lanes share; a weight that is the same for all of them counts for each."""
    a, b, c, e, y = field(N), field(INNER), field(1), field(INNER), scalars(np.zeros(()))

    @ti.kernel
    def run():
        for j in range(N):
            for d in range(INNER):
                if a[j] > 0.8:
                    y[None] += ti.sin(a[j] * b[d])
                y[None] += e[d] + c[0] * a[j] * b[d]

    check(run, [a, b, c, e], y)
    assert set(tried) == {"in lanes"}
    text = Jacobian(run, [a, b, c, e], y, mode="reverse")
    text()
    assert re.search(r"for lane in (.|\n)* total \+= ", text.source)


def test_the_run_forward_is_in_lanes_too(monkeypatch):
    """Products of matrices read rows of b in lanes, as in forward mode; a loop that reads what it stores keeps its order."""
    decisions = force_lanes(monkeypatch)
    a, b, y = field(16, INNER), field(INNER, 2 * N), field(16, 2 * N)

    @ti.kernel
    def product():
        for i, j in y:
            s = 0.0
            for d in range(INNER):
                s += a[i, d] * b[d, j]
            y[i, j] += ti.sin(s)

    @ti.kernel
    def shift():
        ti.loop_config(serialize=True)
        for j in range(2 * N - 1):
            for i in range(16):
                y[i, j + 1] += 0.5 * y[i, j]

    run = lambda: (product(), shift())
    before = read(y)
    run()
    after = read(y)
    write(y, before)
    expected = jacobian(run, [a, b], y, mode="forward")
    write(y, before)
    del decisions[:]
    found = jacobian(run, [a, b], y, mode="reverse")
    assert sum(made is not None for made in decisions) == 1
    assert_allclose(read(y), after, rtol=1e-14)
    for mine, other in zip(found, expected, strict=True):
        assert_allclose(mine, other, rtol=1e-12, atol=1e-14)


def test_rows_of_the_run_forward_are_in_lanes():
    """Where a condition on indices holds, with functions as arithmetic."""
    share_program(default_fp=ti.f32, cpu_max_num_threads=2)
    u, v, on = ti.field(ti.f32, (2, 9, 23)), ti.field(ti.f32, (9, 23)), ti.field(ti.i32, 23)
    start = np.random.default_rng(0).uniform(0.3, 1.4, (2, 9, 23)).astype(np.float32)
    on.from_numpy(np.arange(23) % 5)

    @ti.kernel
    def step(a: ti.i32, b: ti.i32):
        for i, j in ti.ndrange(9, (1, 23)):
            if 0 < i < 8 and j + 1 < 23 and on[j] > 0:
                new = ti.sin(u[a, i, j - 1]) + u[a, i + 1, j]
                if u[a, i, j] > 0.8:
                    new *= u[a, i - 1, j]
                u[b, i, j] = new
                v[i, j] = ti.exp(-new)

    run, found = lambda: (step(0, 1), step(1, 0)), []
    for mode in ("forward", "reverse"):
        u.from_numpy(start)
        plan = Jacobian(run, u, v, mode=mode)
        found.append([plan(), u.to_numpy(), v.to_numpy()])
    for mine, other in zip(*found, strict=True):
        assert_allclose(mine, other, rtol=2e-5, atol=1e-6)
    text = plan.source[: plan.source.index("def step_0(")]
    assert re.search(r"for lane in (.|\n)* sin_f32\(", text), text


@pytest.mark.parametrize(
    "case", ["later entries", "both sides", "places in memory", "stack", "read back", "other range", "column"]
)
def test_loops_that_do_not_fit_run_by_themselves(tried, monkeypatch, case):
    """Where iterations store only matters to ``Order``, which has kept those that meet out of parallel loops."""
    monkeypatch.setattr(loops, "LEAST_ITERATIONS", 0)  # the threads may share any loop
    length = 1040 if case == "stack" else INNER
    a, b, y, z = field(N), field(length, N), field(3 * N), field(INNER, N)
    place = ti.field(ti.i32, N)
    place.from_numpy(np.random.default_rng(0).permutation(N).astype(np.int32))

    @ti.kernel
    def run():
        for j in range(N):
            s = 1.0
            for d in range(j if ti.static(case == "other range") else length):
                if ti.static(case == "read back"):
                    z[d, j] = s * a[j]
                    s += b[d, j] * z[d, j]
                elif ti.static(case == "stack"):
                    s = ti.sin(s * a[j]) + b[d, j]
                elif ti.static(case == "column"):
                    s += a[d] * b[d, place[j]]
                else:
                    s += a[j] * b[d, j]
            if ti.static(case == "places in memory"):
                y[place[j]] = s * s
            elif ti.static(case == "both sides"):
                if j // (N // 2) == 0:  # of ranges, iterations might meet
                    y[2 * j + 1] = s * s
                elif j > N // 2:
                    y[2 * j - 1] = s * s
            else:
                y[j] = s * s
            if ti.static(case == "later entries"):
                y[2 * j + N] = s

    check(run, [a, b], y)
    reasons = {
        "stack": "it keeps numbers",
        "read back": "it keeps numbers",
        "other range": "loop in it",
        "column": "side by side",
    }
    assert tried
    assert all(reasons.get(case, "in lanes") in reason for reason in tried), tried


@pytest.mark.mostly_sweep("in one thread-grid")
@pytest.mark.parametrize("case", ["grid", "vector", "far away"])
@pytest.mark.parametrize("way", ["in colours", "in one thread"])
def test_rows_of_stencils_are_in_lanes(tried, monkeypatch, way, case):
    """Each sum is a loop of its own, under a mask; planes that arguments name may be out of range."""
    monkeypatch.setattr(lanes, "ROWS_OF_FLOAT64", True)
    if way == "in colours":
        monkeypatch.setattr(contention, "LITTLE_WORK", 0)
    u, rate, y = field(3, 6, N), field(N), field()
    place = ti.field(ti.i32, N)
    place.from_numpy(np.arange(N, dtype=np.int32)[::-1].copy())
    flow = vectors(np.random.default_rng(1).uniform(0.3, 1.4, (6, N, 2)))

    @ti.kernel
    def step(a: ti.i32, b: ti.i32, c: ti.i32):
        for i, j in ti.ndrange(6, N):
            if 0 < i < 5 and 0 < j < N - 1:
                s = u[b, i - 1, j] * rate[j] + ti.sin(u[b, i, j + 1]) - u[b, i, j - 1] * u[b, i + 1, j]
                if s > 0.6:
                    s = ti.tanh(s)
                if ti.static(case == "vector"):
                    s += flow[i, j + 1].x * flow[i, j].y
                if ti.static(case == "far away"):
                    s += rate[place[j]]
                u[c, i, j] = s - u[a, i, j]
            else:
                u[c, i, j] = 0.5 * rate[j]

    total = kernel_of("for i, j in ti.ndrange(6, N): y[None] += u[1, i, j] ** 2 + u[2, i, j] ** 3", N=N, y=y, u=u)
    start = read(u)

    def run():
        u.from_numpy(start)
        for t in range(2):
            step(t, t + 1, (t + 2) % 3)

    def energy():
        y[None] = 0
        run()
        total()

    params = [rate, flow] if case == "vector" else [rate]
    check(run, params, u)
    assert any("in lanes" in reason for reason in tried) == (case == "grid"), tried
    check_products(energy, params, y)


@pytest.mark.parametrize("case", ["gradient", "product"])
def test_rows_of_float64_and_of_products_are_not_in_lanes(tried, monkeypatch, case):
    """They gain little, and take longer to compile."""
    x, y, energy = field(6, N), field(6, N), field()

    @ti.kernel
    def run():
        for i, j in ti.ndrange(6, N):
            if 0 < j < N - 1:
                y[i, j] = ti.sin(x[i, j - 1] * x[i, j + 1])
        for i, j in y:
            energy[None] += y[i, j] ** 2

    if case == "gradient":
        vjp(run, x, y, np.ones((6, N)))
        assert any("float64" in reason for reason in tried), tried
    else:
        monkeypatch.setattr(lanes, "ROWS_OF_FLOAT64", True)
        hvp(run, x, np.ones((6, N)), energy)
        assert "in lanes" not in tried
        vjp(run, x, y, np.ones((6, N)))
        assert "in lanes" in tried


@pytest.mark.parametrize(("length", "count"), [(40, 16), (300, 8), (450, None)])
def test_loops_that_keep_many_numbers_have_fewer_lanes(tried, length, count):
    """Taichi compiles local arrays of many numbers slowly, so that long loops have few lanes, or none."""
    x, rate, y = field(128), field(length), field(128)

    @ti.kernel
    def run():
        for i in y:
            s, v = x[i], 1.0
            for k in range(length):
                v -= 0.01 * ti.sin(s) * rate[k]
                s += 0.01 * v * s
            y[i] = s * v

    plan = Jacobian(run, x, y, mode="reverse")
    assert_allclose(plan(), jacobian(run, x, y, mode="forward"), rtol=1e-10, atol=1e-13)
    found = {int(n) for n in re.findall(r"for lane in range\((\d+)\)", plan.source)}
    assert found == (set() if count is None else {count})
    assert set(tried) == ({"it is long"} if count is None else {"in lanes"})


@pytest.mark.mostly_sweep("True")
@pytest.mark.parametrize("has_state", [False, True])
def test_products_with_hessians_are_in_lanes(tried, has_state):
    """The adjoint in lanes is differentiated: of sums along columns, which the same kernel reads or another one."""
    a, b, z, y = field(5, INNER), field(INNER, N), field(5, N), field()

    @ti.kernel
    def columns():
        for i, j in z:
            s = 0.0
            for d in range(INNER):
                s += a[i, d] * b[d, j]
            if ti.static(has_state):
                z[i, j] += s**3 * (s if s > 1 else 1.0)
            else:
                z[i, j] = ti.tanh(s) if s > 1 else s**3

    total = kernel_of("for i, j in z: y[None] += z[i, j] ** 2", z=z, y=y)

    def run():
        y[None] = 0
        if has_state:
            z.fill(0.5)
            columns()
        columns()
        total()

    check_products(run, [a, b], y)
    assert set(tried) == {"in lanes"}


def check_products(run, params, energy):
    """A product with H, against central differences of gradients."""
    values = [read(p) for p in params]
    along = [np.random.default_rng(7).standard_normal(v.shape) for v in values]

    def gradient(step):
        for p, value, way in zip(params, values, along, strict=True):
            write(p, value + step * way)
        return value_and_gradient(run, params, energy)[1]

    h = 1e-5
    expected = [(a - b) / (2 * h) for a, b in zip(gradient(h), gradient(-h), strict=True)]
    gradient(0.0)
    for part, difference in zip(hvp(run, params, along, energy), expected, strict=True):
        assert np.abs(difference).max() > 0.1
        assert_allclose(part, difference, rtol=1e-6, atol=1e-7)


def test_a_loop_of_one_iteration_that_reads_a_neighbour(recwarn):
    """The second of the two colours has no pieces; bounds of a loop over them were real numbers, of which Taichi warns."""
    x, y = np.array([0.7]), np.array([1.1])

    @ti.kernel
    def step(x: ti.types.ndarray(), y: ti.types.ndarray()):
        for i in range(x.shape[0]):
            s = 0.0
            for _ in range(6):
                s += ti.sin(x[i])
            y[i] = s + (x[i - 1] if i > 0 else 1.0)

    assert_allclose(jacobian(step, x, y, args=(x, y), mode="reverse"), [[6 * np.cos(0.7)]], rtol=1e-14)
    assert not [str(w.message) for w in recwarn if "range_for" in str(w.message)]


def test_threads_in_functions_add_to_sums_of_their_own():
    """The number of a thread is passed to the body of a loop that is a function, where Taichi has none."""
    x, y = field(12), field(512)

    @ti.kernel
    def run():
        for i in y:
            s = 1.0
            for n in range(12):
                s *= 1.0 - 0.1 * x[n]
            y[i] = s + x[i % 12]

    plan = Jacobian(run, x, y, mode="reverse")
    expected = jacobian(run, x, y, mode="forward")
    for _ in range(3):
        assert_allclose(plan(), expected, rtol=1e-12, atol=1e-14)
    functions = re.findall(r"@ti.real_func\n.*?\n\n", plan.source, re.DOTALL)
    assert any("own_adj" in text for text in functions)
    assert not any("global_thread_idx" in text for text in functions)
