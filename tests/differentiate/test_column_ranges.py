"""Loops over columns leave out those that are zero in all rows that they read: compared with central differences.

Each test of ``BREAKS`` breaks an assumption from another part of the program.
"""

import numpy as np
import pytest
import taichi as ti
from differences import central_differences, integers, outputs, read, scalars, write
from numpy.testing import assert_allclose
from taichi_program import initialise

from taichi_ext import Jacobian

pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.cpu_only("rows are not next to each other in memory elsewhere"),
]

P, NODES, READS, OUT = 18, 9, 4, 40
USED = "leaves out columns that are zero"
rng = np.random.default_rng(25)


class Chain:
    """Nodes that depend on two parameters each and on a node before; outputs that read several nodes each."""

    def __init__(self, parents=(0, 0, 1, 3, 3, 4, 6, 6, 7)):
        self.p, self.a, self.y = scalars(rng.uniform(0.5, 1.5, P)), outputs(NODES), outputs(OUT)
        self.b = scalars(np.ones(NODES))
        self.parents = integers(parents)
        self.node = integers(rng.integers(0, NODES, OUT * READS))
        self.first = integers(np.minimum(np.arange(OUT + 1) * 3, OUT * READS))
        self.w = scalars(rng.uniform(0.2, 1, OUT * READS))

    def check(self, run, *, is_used=True, state=(), params=None, **options):
        params = params or [self.p]
        expected = central_differences(run, params, [self.y], [self.a, self.b, *state])
        plan = Jacobian(run, params, [self.y], **options)
        for _ in range(2):
            write(self.b, 1.0)
            for block, wanted in zip(plan()[0], expected[0], strict=True):
                found = block.toarray() if "format" in options else block
                assert_allclose(found.reshape(wanted.shape), wanted, rtol=1e-6, atol=1e-7)
        assert (USED in str(plan.explain())) == is_used
        return plan


def sums(c):
    """A kernel whose last loop sums over nodes."""
    p, a, b, y, parents, node, first, w = c.p, c.a, c.b, c.y, c.parents, c.node, c.first, c.w

    @ti.kernel
    def run():
        for g in a:
            a[g] = ti.sin(p[2 * g]) * p[2 * g + 1]
        ti.loop_config(serialize=True)
        for n in range(NODES):
            b[n] = a[n] * (0.5 + b[parents[n]])
        for i in range(OUT):
            s, t, u = 0.0, 0.0, 0.0
            for k in range(first[i], first[i + 1]):
                s += w[k] * b[node[k]] - w[i] * a[node[k + 1]] / 8
                t += ti.max(b[node[k]], b[node[k + 1]])
                u += s * b[node[k + 1]]
            y[i] = ti.exp(-s) * t + s * u

    return run


@pytest.mark.parametrize(
    "options", [{}, {"format": "csr"}, {"tangents": "dense"}, {"chunk_size": 7}, {"format": "csr", "tangents": "dense"}]
)
def test_sums_over_nodes(options):
    c = Chain()
    run = sums(c)
    plan = c.check(run, is_used="chunk_size" not in options, **options)
    if not options:
        write(c.parents, np.zeros(NODES, np.int32))  # the ranges are those of this launch
        write(c.node, read(c.node)[::-1])
        expected = central_differences(run, [c.p], [c.y], [c.a, c.b])
        assert_allclose(plan()[0][0], expected[0][0], rtol=1e-6, atol=1e-7)


def breaks_other_loop(c):
    """A loop between two that read the rows changes them."""
    p, a, b, y, parents, node, w = c.p, c.a, c.b, c.y, c.parents, c.node, c.w

    @ti.kernel
    def run():
        for g in a:
            a[g] = p[2 * g] * p[2 * g + 1]
            b[g] = a[g] + 1
        for i in range(OUT):
            s = 0.0
            for k in range(READS):
                s += w[k] * b[node[k + i]]
            y[i] = s * s
        for g in a:
            b[g] = b[g] * a[parents[g]] + p[17 - g]
        for i in range(OUT):
            s = 0.0
            for k in range(READS):
                s += w[k + i] * b[node[k + i]]
            y[i] += s * s

    return run


def breaks_sums_of_rows(c):
    """Rows that iterations add to, under a condition; a row that is overwritten, by one with other columns."""
    p, a, b, y, parents, node, w = c.p, c.a, c.b, c.y, c.parents, c.node, c.w

    @ti.kernel
    def run():
        for g in a:
            a[g] = p[2 * g] * p[2 * g + 1]
        for g in a:
            if g % 3 != 1:
                b[parents[g]] += a[g] * p[g]
        for i in range(OUT):
            last, s = 0.0, 0.0
            for k in range(READS):
                if w[k + i] < 0.4:
                    continue
                if k % 2 == 0:
                    last = w[k] * b[node[k + i]]
                s += last * last
                if s > 3:
                    last = 0.0
                    break
            y[i] = s * last + last * s * s

    return run


def breaks_terms(c):
    """A column of a parameter is added to the row by itself."""
    p, a, b, y, node, w = c.p, c.a, c.b, c.y, c.node, c.w

    @ti.kernel
    def run():
        for g in a:
            b[g] = p[2 * g] * p[2 * g + 1]
        for i in range(OUT):
            s = 0.0
            for k in range(READS):
                s += w[k] * b[node[k + i]] * p[node[k + i + 1] + k]
            y[i] = s * s
            last = s
            for k in range(READS):
                last = w[k] * last * p[17 - k]
            y[i] += last

    return run


def breaks_launches(c):
    """The rows of a second launch begin with those of the first."""
    run, b, a = sums(c), c.b, c.a

    @ti.kernel
    def between():
        for n in b:
            b[n] = b[n] * a[NODES - 1 - n]

    def twice():
        run()
        between()
        run()

    return twice


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (breaks_other_loop, {}),
        (breaks_sums_of_rows, {}),
        (breaks_terms, {}),
        (breaks_launches, {}),
        (breaks_launches, {"format": "csr"}),
    ],
)
def test_used(make, options):
    c = Chain()
    c.check(make(c), **options)


def breaks_own_rows(c):
    """The loop changes the rows that it reads."""
    p, a, b, y, node, w = c.p, c.a, c.b, c.y, c.node, c.w

    @ti.kernel
    def run():
        for g in a:
            b[g] = p[2 * g] * p[2 * g + 1]
        ti.loop_config(serialize=True)
        for i in range(OUT):
            s = 0.0
            for k in range(READS):
                s += w[k] * b[node[k + i]]
            y[i] = s * s
            b[node[i]] = b[node[i + 1]] * 0.5 + p[i % P]

    return run


def breaks_wide_rows(c):
    """Rows with all columns, from a sum over the parameters."""
    p, a, b, y, node, w = c.p, c.a, c.b, c.y, c.node, c.w

    @ti.kernel
    def run():
        for g in a:
            s = 0.0
            for n in range(P):
                s += p[n] * w[n + g]
            b[g] = s * p[g]
        for i in range(OUT):
            s = 0.0
            for k in range(READS):
                s += w[k] * b[node[k + i]]
            y[i] = s * s

    return run


def breaks_kernels(c):
    """The rows come from another kernel."""
    first, y, b, node, w = sums(c), c.y, c.b, c.node, c.w

    @ti.kernel
    def again():
        for i in range(OUT):
            s = 0.0
            for k in range(READS):
                s += w[k + i] * b[node[k]]
            y[i] = s * s

    def run():
        first()
        again()

    return run


@pytest.mark.parametrize("make", [breaks_own_rows, breaks_wide_rows])
def test_not_used(make):
    c = Chain()
    c.check(make(c), is_used=False)


def test_another_kernel():
    c = Chain()
    plan = c.check(breaks_kernels(c))
    assert str(plan.explain()).count(USED) == 1  # of the first kernel only


@ti.kernel
def by_arrays(p: ti.types.ndarray(), b: ti.types.ndarray(), y: ti.types.ndarray()):
    for g in range(NODES):
        b[g] = p[2 * g] * p[2 * g + 1]
    for i in range(OUT):
        s = 0.0
        for k in range(READS):
            s += b[(k * i) % NODES]
        y[i] = s * s


def test_arrays():
    """Rows of arrays may be those of other arrays."""
    p, b, y = rng.uniform(0.5, 1.5, P), np.zeros(NODES), np.zeros(OUT)
    plan = Jacobian(by_arrays, p, y, args=(p, b, y))
    J = plan()
    expected = np.zeros((OUT, P))
    for i in range(OUT):
        for k in range(READS):
            g = (k * i) % NODES
            expected[i, [2 * g, 2 * g + 1]] += p[[2 * g + 1, 2 * g]]
    assert_allclose(J, expected * 2 * np.sqrt(y)[:, None], rtol=1e-12)
    assert USED not in str(plan.explain())


def test_numbers_that_are_not_finite():
    """They are found in rows, although fast_math may take NaN for 0; a column that is left out stays 0."""
    c = Chain()
    factor = np.ones(NODES)
    factor[2], factor[5] = np.nan, np.inf
    p, a, b, y, node, w, factors = c.p, c.a, c.b, c.y, c.node, c.w, scalars(factor)

    @ti.kernel
    def run():
        for g in a:
            b[g] = p[2 * g] * p[2 * g + 1] * factors[g]
        for i in range(OUT):
            s = 0.0
            for k in range(READS):
                s += w[k + i] * b[node[k + i]]
            y[i] = 2 * s

    plan = Jacobian(run, c.p, c.y)
    J, nodes = plan(), read(node)
    assert USED in str(plan.explain())
    for i in range(OUT):
        of = nodes[i : i + READS]
        assert np.isnan(J[i, 4:6]).all() == (2 in of)
        assert np.isinf(J[i, 10:12]).all() == (5 in of)
        assert np.isfinite(J[i, [*range(4), *range(6, 10), *range(12, P)]]).all()


def test_threads():
    """Each thread has its own range of columns so far."""
    initialise(default_fp=ti.f32, cpu_max_num_threads=2)
    x, a, y = scalars(rng.uniform(0.5, 1.5, P), ti.f32), outputs(NODES, dtype=ti.f32), outputs(40, 41, dtype=ti.f32)

    @ti.kernel
    def run():
        for g in a:
            a[g] = x[2 * g] * x[2 * g + 1]
        for i, j in y:
            s = 0.0
            for k in range(1 + j % READS):
                s += a[(i * k + j) % NODES] * k
            y[i, j] = s * s

    plan = Jacobian(run, x, y)
    J = plan()
    assert USED in str(plan.explain())
    values = read(x)
    for i, j in ((0, 0), (7, 3), (39, 40), (12, 35)):
        of = [(i * k + j) % NODES for k in range(1 + j % READS)]
        s = sum(values[2 * g] * values[2 * g + 1] * k for k, g in enumerate(of))
        expected = np.zeros(P)
        for k, g in enumerate(of):
            expected[[2 * g, 2 * g + 1]] += 2 * s * k * values[[2 * g + 1, 2 * g]]
        assert_allclose(J[i, j], expected, rtol=1e-5, atol=1e-6)
