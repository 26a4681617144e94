"""Rows of J by adjoints of compiled kernels, against columns in forward mode: constructs that need something special."""

import re
import textwrap

import numpy as np
import pytest
import taichi as ti
from differences import outputs, read, scalars, vectors, write
from kernel_texts import func_of, kernel_of, kernels_of, names_of
from numpy.testing import assert_allclose

from taichi_ext import Jacobian, jacobian, linear_operator, vjp
from taichi_ext.errors import DerivativeWarning, InvalidArgumentError, UnsupportedError
from taichi_ext.runtime.memory import shadows
from taichi_ext.runtime.reverse.kernels import StagedKernel

pytestmark = pytest.mark.usefixtures("ti64")
N = 8


def fields(n=N):
    return scalars(np.linspace(0.3, 1.4, n)), outputs(n)


def check(run, x, y, rtol=1e-9):
    by_rows, by_columns = (jacobian(run, x, y, mode=mode) for mode in ("reverse", "forward"))
    assert np.abs(by_columns).max() > 0
    assert_allclose(by_rows, by_columns, rtol=rtol, atol=1e-12)


def test_draws_of_an_iteration_are_recorded():
    x, y = fields(1000)

    @ti.kernel
    def run():
        for i in x:
            s = 0.0
            for _ in range(3):
                r = ti.random(ti.f64)
                if r < 0.7:
                    s += x[i] * ti.random(ti.f64)
                if r < 0.1:
                    break
            y[i] = (s + ti.randn(ti.f64) * x[i]) * (1 + ti.random(ti.i32) % 5)

    found = vjp(run, x, y, np.ones(1000))
    assert_allclose(found, read(y) / read(x), rtol=1e-12)

    @ti.kernel
    def from_below_zero():
        for i in range(-500, 500):
            y[i + 500] = x[i + 500] * ti.random(ti.f64)
        for i in range(-500, 500):
            y[i + 500] += x[i + 500] * ti.random(ti.f64)

    found = vjp(from_below_zero, x, y, np.ones(1000))
    assert_allclose(found, read(y) / read(x), rtol=1e-12)


def test_draws_of_a_loop_without_a_known_end_need_one():
    """The message says what to write, and that is right."""
    x, y = fields()

    @ti.kernel
    def unknown():
        for i in x:
            s = 0.0
            while s < 2:
                s += x[i] * ti.random(ti.f64)
            y[i] = s

    @ti.kernel
    def known():
        for i in x:
            s = 0.0
            for _ in range(1000):
                if s >= 2:
                    break
                s += x[i] * ti.random(ti.f64)
            y[i] = s

    message = r"s \+= x\[i\] \* ti.random.*(?s:\n.*)Take a for loop over as many iterations .*, with a break"
    with pytest.raises(UnsupportedError, match=message):
        jacobian(unknown, x, y, mode="reverse")
    for run in (unknown, known):  # without mode="reverse", the first of them in forward mode
        assert_allclose(vjp(run, x, y, np.ones(N)), read(y) / read(x), rtol=1e-12)


def test_overwritten_entries_of_a_field_with_an_offset_are_put_back():
    """Taichi does not check the indices: a wrong one wrote beside the field and ended the process."""
    x, m = ti.field(ti.f64, (2, 3), offset=(3, -4)), ti.Vector.field(2, ti.f64, 4, offset=-1)
    write(x, np.linspace(0.3, 1.4, 6).reshape(2, 3))
    write(m, np.linspace(-0.8, 1.1, 8).reshape(4, 2))

    @ti.kernel
    def run():
        ti.loop_config(serialize=True)
        for i in range(6):
            x[3 + i // 3, i % 3 - 4] *= x[3 + (i + 1) % 6 // 3, (i + 1) % 3 - 4] + m[i % 4 - 1][i % 2]
            m[i % 4 - 1][1] = ti.sin(m[(i + 1) % 4 - 1][0] * x[4, -3])

    before = read(x), read(m)
    for params in (x, m):
        found = []
        for mode in ("reverse", "forward"):
            write(x, before[0])
            write(m, before[1])
            found.append(jacobian(run, params, [x, m], mode=mode))
        for by_rows, by_columns in zip(*found, strict=True):
            assert np.abs(by_columns).max() > 0
            assert_allclose(by_rows, by_columns, rtol=1e-9, atol=1e-12)


def test_vectors_from_taichi_are_recorded():
    x, y = fields()

    @ti.kernel
    def run():
        for i in x:
            s = ti.random(ti.f64) * 0
            for d in range(3):
                a = ti.Vector([x[i], x[i] ** 2, ti.sin(x[i])])
                s += ti.Vector.unit(3, (d + i) % 3).dot(a) * (d + 1)
            y[i] = s

    check(run, x, y)


def test_a_loop_over_a_part_of_a_field_touches_no_other_rows():
    values, u = np.linspace(0.3, 1.4, 36).reshape(9, 4), np.linspace(-1.0, 2.0, 36).reshape(9, 4)
    x, y = ti.field(ti.f64, (9, 4)), outputs(9, 4)
    write(x, values)
    run = kernel_of("for i, j in ti.ndrange((2, 5), (1, 4)): y[i, j] = x[i, j] ** 2", y=y, x=x)
    expected = np.zeros((9, 4))
    expected[2:5, 1:] = (2 * values * u)[2:5, 1:]
    assert_allclose(vjp(run, x, y, u), expected, rtol=1e-14)


@pytest.mark.parametrize("name", ["by_index", "by_local", "by_function"])
def test_neighbours_behind_a_condition(name):
    """LLVM 15 took the entry before the first one, which no iteration touches, for one 32 GiB further on."""
    x, y = fields(16)
    value = func_of("return x[i] if 0 <= i < 16 else 0.0", "i", x=x)

    @ti.kernel
    def by_index():
        for i in x:
            for j in ti.static((-1, 0, 1)):
                if 0 <= i + j < 16:
                    y[i] += x[i + j] * x[i]

    @ti.kernel
    def by_local():
        for i in x:
            for j in ti.static((-1, 0, 1)):
                a = i + j
                if 0 <= a < 16:
                    y[i] += x[a] * x[i]

    by_function = kernel_of("for i in x: y[i] = (value(i - 1) + x[i] + value(i + 1)) * x[i]", x=x, y=y, value=value)
    X = np.pad(read(x), 1)
    expected = np.diag(X[:-2] + 2 * X[1:-1] + X[2:]) + (np.eye(16, k=1) + np.eye(16, k=-1)) * X[1:-1, None]
    assert_allclose(jacobian(locals()[name], x, y, mode="reverse"), expected, rtol=1e-12)


@pytest.mark.mostly_sweep("directly-2", "by a local-4")
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("way", ["directly", "by a local", "in an inner loop"])
def test_periodic_neighbours_behind_a_condition(way, count):
    """LLVM 15 took ``(i + n - 1) % n`` for ``i - 1``, and entries of several rows for some 16 GiB further on."""
    n, m = 6, 22
    x, y, total = scalars(np.random.default_rng(0).uniform(0.3, 1.4, (n, m))), outputs(n, m), outputs(8)

    @ti.kernel
    def run():
        for i, j in y:
            if 0 < i and i < n - 1 and 0 < j and j < m - 1:
                if ti.static(way == "directly"):
                    y[i, j] = x[(i + 1) % n, j] * x[i, j] + ti.sin(x[i, j - 1]) + x[(i + n - 1) % n, j + 1]
                elif ti.static(way == "by a local"):
                    before = (i + n - 1) % n
                    y[i, j] = x[(i + 1) % n, j] * x[i, j] + ti.sin(x[i, j - 1]) + x[before, j + 1]
                else:
                    for k in range(2):
                        y[i, j] += x[(i + 1) % n, j] * x[i, j] + ti.sin(x[i, j - 1]) + x[(i + n - 1) % n, j + 1]
        for i, j in y:
            total[(i * m + j) % 8] += y[i, j] ** 2

    J = jacobian(run, x, total, mode="reverse", chunk_size=count)
    X, W = read(x), np.zeros((n, m))
    inner = np.ix_(range(1, n - 1), range(1, m - 1))
    up, down, left = np.roll(X, -1, 0), np.roll(X, 1, 0), np.roll(X, 1, 1)
    W[inner] = (1 + (way == "in an inner loop")) * (up * X + np.sin(left) + np.roll(down, -1, 1))[inner]
    expected = np.zeros((8, n, m))
    for i, j in np.argwhere(W):
        row, w = expected[(i * m + j) % 8], 2 * W[i, j] * (1 + (way == "in an inner loop"))
        row[i + 1, j] += w * X[i, j]
        row[i, j] += w * X[i + 1, j]
        row[i, j - 1] += w * np.cos(X[i, j - 1])
        row[i - 1, j + 1] += w
    assert_allclose(J, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.mostly_sweep("at_two_entries")
@pytest.mark.parametrize("name", ["at_two_entries", "in_two_dimensions"])
def test_loops_that_begin_below_zero(name):
    """Conditions keep indices within arrays; LLVM 15 took those of iterations before that for some 32 GiB further on."""
    x, y = fields(6)
    y.from_numpy(np.linspace(0.5, 1.5, 6))
    z, w = ti.field(ti.f64, shape=(4, 6)), ti.Vector.field(3, ti.f64, shape=(2, 4))

    @ti.kernel
    def at_two_entries():
        for k in range(-1, 7):
            if not (0 <= k and k <= 2):
                continue
            if k * 2 >= 0:
                if y[k] >= 10:
                    if k - 2 >= 0:
                        for _ in range(3):
                            w[k - 1, k - 2][k - 2] += x[k - 2]
                else:
                    y[k] *= x[k + 1] if 0.3 * k < x[k] else y[k]

    @ti.kernel
    def in_two_dimensions():
        for k, j in ti.ndrange((-2, 4), (-1, 6)):
            if 0 <= k and 0 <= j:
                z[k, j] = x[j] * y[k]
        for k, j in ti.ndrange((-2, 4), (-1, 6)):
            if 0 <= k and 0 <= j - 1:
                y[k] += z[k, j - 1] * x[j]

    kernel = locals()[name]
    X, Y = read(x), read(y)
    expected = jacobian(kernel, [x, y], y, mode="forward")
    x.from_numpy(X)
    y.from_numpy(Y)
    for by_rows, by_columns in zip(jacobian(kernel, [x, y], y, mode="reverse"), expected, strict=True):
        assert np.abs(by_columns).max() > 0.1
        assert_allclose(by_rows, by_columns, rtol=1e-12, atol=1e-14)


@pytest.mark.sweep
def test_locals_between_loops_outlast_a_way_back():
    """More rows than one way back has cotangents."""
    x, _ = fields()
    y, z, factor = ti.field(ti.f64, 20), ti.field(ti.f64, ()), ti.field(ti.f64, ())

    @ti.kernel
    def scale():
        s = factor[None]
        factor[None] = 0.0
        z[None] = x[0] * s
        for i in y:
            y[i] = x[i % N] * s * s + z[None]

    def run():
        factor[None] = 1.5
        scale()

    check(run, x, y)


def test_loops_over_nodes_of_sparse_fields():
    x, y = fields(6)
    cells, node = ti.field(ti.f64), ti.root.pointer(ti.i, 4)
    node.dense(ti.i, 4).place(cells)
    store = kernel_of("for i in x: cells[2 * i] = x[i] * x[0]", x=x, cells=cells)

    @ti.kernel
    def add(weights: ti.types.ndarray()):
        for i in node:
            y[0] += cells[i] * i * weights[0]
        for place in ti.grouped(node):
            y[1] += cells[place] ** 2 * weights[1]

    def run():
        node.deactivate_all()
        y.fill(0.0)
        store()
        add(np.array([1.5, 0.7]))

    check(run, x, y)
    a, b = read(x)[:2]
    assert_allclose(
        vjp(run, x, y, np.eye(6)[0]), [3.0 * b, 3.0 * a, 0, 0, 0, 0], rtol=1e-12
    )  # indices of nodes: 0, 1, 2


def test_a_number_times_its_root():
    x, y = scalars([0.0, 0.25, 4.0]), outputs(3, 4)

    @ti.kernel
    def run():
        for i in x:
            r = x[i] * x[2]
            root = ti.sqrt(r)
            y[i, 0] = r * root
            y[i, 1] = ti.sqrt(x[i]) * x[i]
            y[i, 2] = root * x[i] + 3.0 * r * ti.sqrt(r)
            y[i, 3] = r * root * ti.sqrt(r)

    def expected(i, k):  # of d y[i, k]: by x[i], by x[2]
        a, b = values[i], values[2]
        r = a * b
        by_r = [1.5 * r**0.5, 0.0, 4.5 * r**0.5, 2 * r][k]
        by_a = [0.0, 1.5 * a**0.5, 1.5 * r**0.5, 0.0][k]
        by_b = 0.5 * a**1.5 / b**0.5 if k == 2 else 0.0
        return by_r * b + by_a, by_r * a + by_b

    values = x.to_numpy()
    wanted = np.zeros((3, 4, 3))
    for i in range(3):
        for k in range(4):
            wanted[i, k, i], second = expected(i, k)
            wanted[i, k, 2] += second
    assert_allclose(jacobian(run, x, y, mode="reverse"), wanted, rtol=1e-12, atol=1e-14)


UNUSED = """\
limited: r = q[0] / q[1]; y[0] = ti.max(0.0, ti.min(2 * r, ti.min(0.5 * (r + 1), 2.0))) * q[2]
branch:
    r = q[0] / q[1]
    y[0] = q[2]
    if q[1] > 0:
        y[0] += r
selected: y[0] = ti.select(q[0] > 20, q[0], ti.log(1 + q[2] * ti.exp(q[0])))
direction:
    n = ti.Vector([q[0], q[1]]).normalized()
    y[0] = q[2]
    if n[0] > 0.1:
        y[0] += n[0]
angle: y[0] = ti.select(q[1] == 0, q[2], q[2] * ti.atan2(q[1], q[0]) / q[1])
logarithm: y[0] = ti.max(ti.log(q[1]), -3.0) * q[2]
stored:
    for i in z:
        z[i] = q[0] / q[i]
    for i in y:
        if q[1] > 0:
            y[i] = z[1]
        y[i] += q[2]
"""


@pytest.mark.mostly_sweep(every=2)
@pytest.mark.parametrize("name", names_of(UNUSED))
def test_infinite_values_that_are_not_used(name):
    """A quotient that is asked for only where its divisor is not 0, an exponential that is not taken where it is large."""
    q, y, z = scalars([0.0] * 3), outputs(1), outputs(3)
    run = kernels_of(UNUSED, q=q, y=y, z=z)[name]
    for start in ((0.0, 0.0, 3.0), (1.0, 0.0, 3.0), (1e3, 1.0, 2.0), (0.4, 0.5, 0.6)):
        write(q, start)
        by_rows, by_columns = (jacobian(run, q, y, mode=mode) for mode in ("reverse", "forward"))
        assert np.isfinite(by_columns).all() and np.abs(by_columns).max() > 0
        assert_allclose(by_rows, by_columns, rtol=1e-12, atol=1e-300)
        both = vjp(run, q, y, np.ones((2, 1)))
        assert_allclose(both, np.repeat(by_columns, 2, axis=0), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("name", ["limited", "selected", "norm", "powers", "twice"])
def test_choices_leave_out_infinite_values_without_another_way_back(name, monkeypatch):
    text = """\
    norm:
        r = ti.sqrt(q[0] ** 2 + q[1] ** 2)
        y[0] = ti.select(r > 0, q[0] / r, q[2]) + ti.select(r > 0, r * ti.log(r), 0.0)
    powers:
        a = ti.min(1 / q[1], 2.0) * q[2]
        y[0] = ti.max(a ** 3, q[2] * ti.select(q[1] > 0, (q[0] / q[1]) ** 2 + ti.sqrt(q[0] / q[1]), 1.0))
    twice:
        r = q[0] / q[1]
        s = ti.select(q[1] > 0, r, q[2])
        y[0] = s * ti.sin(s) + ti.select(q[1] > 0, ti.exp(-r), q[2])
    """
    q, y, z = scalars([0.0, 0.0, 3.0]), outputs(1), outputs(3)
    run = kernels_of(UNUSED + textwrap.dedent(text), q=q, y=y, z=z)[name]
    ways, adjoint = [], StagedKernel.adjoint

    def noted(*args, is_guarded=False, **options):
        ways.append(is_guarded)
        return adjoint(*args, is_guarded=is_guarded, **options)

    monkeypatch.setattr(StagedKernel, "adjoint", noted)
    by_rows, by_columns = (jacobian(run, q, y, mode=mode) for mode in ("reverse", "forward"))
    assert np.isfinite(by_columns).all() and ways and not any(ways)
    assert_allclose(by_rows, by_columns, rtol=1e-12)


INFINITE = """\
rooted: y[0] = 1 / ti.sqrt(1 / q[0])
chosen: y[0] = 1 / ti.max(1 / q[0], 1.0)
chosen_root: y[0] = ti.max(1 / ti.sqrt(1 / q[0]), -1.0)
harmonic: y[0] = 1 / (1 / q[0] + 1 / q[1])
product: y[0] = q[0] * (1 / q[1])
bounded: y[0] = ti.tanh(ti.log(q[0]))
"""


@pytest.mark.parametrize("name", names_of(INFINITE))
def test_infinite_values_that_are_used(name):
    """A derivative that is not known is not 0: the first of these has 1 by the limit."""
    q, y = scalars([0.0] * 3), outputs(1)
    run = kernels_of(INFINITE, q=q, y=y)[name]
    assert np.isnan(jacobian(run, q, y, mode="forward")).any()
    with pytest.warns(DerivativeWarning, match="infinite derivatives of both signs"):
        assert np.isnan(jacobian(run, q, y, mode="reverse")).any()


def test_infinite_derivatives_that_cancel():
    """The largest of numbers less each of them: at the largest it stays 0, but the way back sums before it cancels."""
    x, z, y = scalars([1.0, 3.0, 2.0]), outputs(3), outputs(3)
    distances = kernel_of("for i in z: z[i] = ti.max(x[0], x[1], x[2]) - x[i]", z=z, x=x)
    powers = kernel_of("for i in y: y[i] = z[i] ** 0.8", y=y, z=z)
    run = lambda: (distances(), powers())
    slope = 0.8 * 2.0**-0.2
    by_columns = jacobian(run, x, y, mode="forward")
    assert_allclose(by_columns, [[-slope, slope, 0], [0, 0, 0], [0, 0.8, -0.8]])
    by_columns[1, 1] = np.nan
    for compute in (lambda: jacobian(run, x, y, mode="reverse"), lambda: vjp(run, x, y, np.eye(3))):
        with pytest.warns(DerivativeWarning, match="infinite derivatives of both signs"):
            assert_allclose(compute(), by_columns)


def differences(f, x, h=1e-6):
    """The derivative of a Python function of a vector."""
    return [(f(x + e) - f(x - e)) / (2 * h) for e in h * np.eye(len(x))]


@pytest.mark.parametrize("kind", [ti.i64, ti.u64], ids=["i64", "u64"])
@pytest.mark.parametrize("where", ["local", "field"])
def test_whole_numbers_of_64_bits_are_kept(kind, where):
    """A local that changes in a loop, and the entry of a field: each step needs the number that was there."""
    X, N = np.array([0.1, 0.4, 0.7]), [3 * 10**10, 2**63 - 1]
    x, y, n = scalars(X), outputs(2), ti.field(kind, 2)

    @ti.kernel
    def of_local():
        for i in y:
            c, s = n[i], 1.0
            while c > 0:
                s *= 1.0 + x[ti.cast(c % 3, ti.i32)] ** 2 * ti.cast(c % 5, ti.f64) * 0.1
                c //= 7
            y[i] = s

    @ti.kernel
    def of_field():
        for i in y:
            y[i] = 1.0
            while n[i] > 0:
                y[i] *= 1.0 + x[ti.cast(n[i] % 3, ti.i32)] ** 2 * ti.cast(n[i] % 5, ti.f64) * 0.1
                n[i] //= 7

    def by_hand(x, c):
        s = 1.0
        while c > 0:
            s *= 1.0 + x[c % 3] ** 2 * (c % 5) * 0.1
            c //= 7
        return s

    n.from_numpy(np.array(N))
    J = jacobian(of_local if where == "local" else of_field, x, y, mode="reverse")
    assert_allclose(J, [differences(lambda x, c=c: by_hand(x, c), X) for c in N], rtol=1e-8)


@pytest.mark.parametrize("where", ["while", "for", "field"])
def test_float64_numbers_of_float32_programs_are_kept(where):
    """A clock that float32 cannot hold, beside params of float32."""
    X = np.array([0.1, 0.4, 0.7])
    x, y, clock = scalars(X, ti.f32), outputs(2, dtype=ti.f32), ti.field(ti.f64, 2)

    @ti.func
    def step(i, t, s):
        later = t + ti.cast(0.25, ti.f64) + s * ti.cast(1 / 64, ti.f64)
        return ti.Vector([later, s * 0.5 + ti.sin(later - 2.0**24) * x[2] * s + x[1]], ti.f64)

    @ti.kernel
    def by_while():
        for i in y:
            t, s, c = ti.cast(2.0**24, ti.f64), ti.cast(x[i], ti.f64), 0
            while c < 5:
                both = step(i, t, s)
                t, s = both[0], both[1]
                c += 1
            y[i] = ti.cast(s + t - 2.0**24, ti.f32)

    @ti.kernel
    def by_for(count: ti.i32):
        for i in y:
            t, s = ti.cast(2.0**24, ti.f64), ti.cast(x[i], ti.f64)
            for _ in range(count):
                both = step(i, t, s)
                t, s = both[0], both[1]
            y[i] = ti.cast(s + t - 2.0**24, ti.f32)

    @ti.kernel
    def by_field():
        for i in y:
            clock[i] = 2.0**24
            s, c = ti.cast(x[i], ti.f64), 0
            while c < 5:
                both = step(i, clock[i], s)
                clock[i], s = both[0], both[1]
                c += 1
            y[i] = ti.cast(s + clock[i] - 2.0**24, ti.f32)

    def by_hand(x, i):
        t, s = 0.0, x[i]
        for _ in range(5):
            t += 0.25 + s / 64
            s = s * 0.5 + np.sin(t) * x[2] * s + x[1]
        return s + t

    kernel, args = {"while": (by_while, ()), "for": (by_for, (5,)), "field": (by_field, ())}[where]
    J = jacobian(kernel, x, y, args=args, mode="reverse")
    assert_allclose(J, [differences(lambda x, i=i: by_hand(x, i), X) for i in range(2)], rtol=1e-5)


@pytest.mark.parametrize("case", ["adjoint", "draws", "tape"])
def test_arrays_with_more_entries_than_indices_are_rejected(monkeypatch, case):
    """32 bits number the entries of adjoints, of recorded draws and of tapes; here for a smaller limit."""
    x, y = fields(40)
    limit = {"adjoint": 79, "draws": 119, "tape": 5000}[case]
    monkeypatch.setattr(shadows, "INDEX_LIMIT", limit)

    @ti.kernel
    def run():
        for i in x:
            s, n = x[i], 0
            if ti.static(case == "draws"):
                for _ in range(3):
                    s += ti.random(ti.f64) * x[i]
            while n < (6000 if ti.static(case == "tape") else 3):
                s += 1e-4 * ti.sin(s)
                n += 1
            y[i] = s

    rows = np.ones((40, 2)) if case == "adjoint" else np.ones(40)
    before = read(y)
    with pytest.raises(InvalidArgumentError) as raised:
        if case == "adjoint":
            linear_operator(run, x, y).rmatmat(rows)
        else:
            vjp(run, x, y, rows)
    message = str(raised.value)
    named = {"adjoint": "The adjoint of .* has 40 entries x 2 cotangents", "draws": "run .* has 120 entries"}
    assert re.search(named.get(case, "one iteration keeps .* 7[0-9]{3} entries in each thread"), message), message
    if case != "tape":
        assert_allclose(read(y), before)


# Entries that an iteration owns are locals of its adjoint: state in place, and loops in which they cannot be.


LONG = 600  # more than one thread runs


def field(*shape, components=0):
    random = np.random.default_rng(len(shape))
    return (
        vectors(random.uniform(0.3, 1.4, (*shape, components)))
        if components
        else scalars(random.uniform(0.3, 1.4, shape))
    )


def check_in_place(run, param, output):
    """The adjoint against the forward engine, and the state that both leave against a plain run."""
    fields, found, states = {param, output}, {}, []
    before = {f: read(f) for f in fields}

    def again():
        for f in fields:
            write(f, before[f])

    again()
    run()
    plain = read(output)
    row = np.random.default_rng(5).standard_normal(plain.shape)
    for mode in ("reverse", "forward"):
        again()
        if mode == "reverse":
            found[mode] = vjp(run, param, output, row)
        else:
            found[mode] = np.tensordot(row, jacobian(run, param, output, mode=mode), plain.ndim)
        states.append(read(output))
    assert np.abs(found["forward"]).max() > 0
    assert_allclose(found["reverse"], found["forward"], rtol=1e-9, atol=1e-12)
    assert_allclose(states, [plain, plain], rtol=1e-12)


def test_state_in_place_with_branches_and_loops_needs_no_tape():
    v = field(LONG, components=2)

    @ti.kernel
    def run():
        for i in v:
            v[i] *= v[i].y - 0.8
            if v[i].x < 0:
                v[i].x = 0.25 * v[i].x * v[i].y
            for _ in range(3):
                v[i].y += ti.sin(v[i].x * v[i].y)
            if i % 3 == 0 and v[i].y > 0.5:
                v[i].y = 0

    check_in_place(run, v, v)
    loss = outputs()
    total = kernel_of("for i in v: loss[None] += v[i].x * v[i].y", v=v, loss=loss)
    plan = Jacobian(lambda: (run(), total()), v, loss, mode="reverse")
    plan()
    assert "own_v" in plan.source and "tape_reals" not in plan.source


KERNELS = """
    at_other_places:
        for i in range(LONG):
            x[i] *= x[i]
            if x[i] > 0.5:
                x[i + LONG] = x[i] * x[i + LONG]
            x[i] += x[i + LONG]
    beyond_the_container:
        for i in range(3 * LONG):
            if i < 2 * LONG:
                x[i] *= x[i]
                x[i] += 0.5 * x[i] ** 2
    stored_before_an_early_end:
        for i in x:
            x[i] *= x[i]
            if x[i] > 0.6:
                continue
            x[i] += ti.exp(x[i])
    transposed:
        for i, j in square:
            if i < j:
                square[i, j] *= square[j, i]
                square[j, i] += square[i, j]
    constant_components:
        for i in range(LONG):
            rows[i, 0] *= rows[i, 1]
            if rows[i, 0] > 0.7:
                rows[i, 2] -= rows[i, 0] ** 2
            rows[i, 0] += rows[i, 2]
    varying_components:
        for i in range(LONG):
            for k in range(3):
                rows[i, k] *= rows[i, (k + 1) % 3]
            rows[i, 1] += rows[i, 0] * rows[i, 2]
    computed_components:
        for i in range(LONG):
            rows[i, 1] *= rows[i, 2]
            for k in range(3):
                rows[i, 2 * k % 3] *= rows[i, (k + 1) % 3]
            rows[i, 1] += rows[i, 0] * rows[i, 2]
"""


@pytest.mark.mostly_sweep("stored_before_an_early_end", "varying_components", "computed_components")
@pytest.mark.parametrize("name", names_of(KERNELS))
def test_entries_of_one_field(name):
    fields = {"x": field(2 * LONG), "square": field(25, 25), "rows": field(LONG, 3)}
    changed = fields["square" if name == "transposed" else "rows" if name.endswith("components") else "x"]
    check_in_place(kernels_of(KERNELS, **fields, LONG=LONG)[name], changed, changed)


def test_entries_of_several_iterations_are_shared():
    x, s = field(30, 40), field(30)
    run = kernel_of("for i, j in x: s[i] += x[i, j] ** 2; s[i] -= x[i, j] ** 3", x=x, s=s)
    check_in_place(run, x, s)


@pytest.mark.sweep
def test_cells_that_a_store_activates():
    x, y = field(LONG), ti.field(ti.f64)
    ti.root.bitmasked(ti.i, LONG).place(y)
    total = outputs()

    @ti.kernel
    def store():
        for i in x:
            if i % 3 == 1:
                y[i] = x[i] ** 2
                y[i] *= 1 + y[i]

    add = kernel_of("for i in y: total[None] += y[i] + 1", y=y, total=total)

    def run():
        ti.deactivate_all_snodes()
        total[None] = 0
        store()
        add()

    check_in_place(run, x, total)
