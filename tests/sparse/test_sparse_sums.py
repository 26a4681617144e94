"""Locals that add up terms of many columns in a sparse Jacobian: against central differences, by entries of their own."""

import numpy as np
import pytest
import taichi as ti
from differences import integers, outputs, read, scalars, write
from kernel_texts import kernel_of
from numpy.testing import assert_allclose
from test_sparse import random, require_equal

from taichi_ext import InvalidArgumentError, Jacobian, jacobian, value_and_jacobian

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.double_only("differences in float64")]
P, M, K = 90, 7, 4  # more parameters than rows of locals hold in any case


@pytest.fixture
def mesh():
    return Mesh()


class Mesh:
    """Parameters by node, and for each residual a list of nodes."""

    def __init__(self):
        rng = np.random.default_rng(3)
        self.w, self.x = scalars(random(P)), scalars(random(M, K))
        self.nodes = integers(rng.integers(0, P, (M, K)))
        self.y = outputs(M)

    def check(self, run, params=None, outs=None, *, has_own_columns=True):
        """J is right twice, no row of all columns is needed, and no more is stored than there may be."""
        params, outs = params or [self.w, self.x], outs or [self.y]
        plan = Jacobian(run, params, outs, format="csr")
        require_equal(plan(), run, params, outs)
        require_equal(plan(), run, params, outs)
        assert not plan._prepared.sparse.dense_reason
        assert ("entries of the local" in plan.explain()) == has_own_columns
        return plan()


def test_sum_over_neighbours_and_what_becomes_of_it(mesh):
    """A loss of the sum, a factor that is known afterwards, and two uses."""
    w, x, nodes, y, z = mesh.w, mesh.x, mesh.nodes, mesh.y, outputs(M)

    @ti.kernel
    def run():
        for i in y:
            s = w[i]
            weight = 0.0
            for k in range(K):
                s += w[nodes[i, k]] ** 2 * x[i, k]
                weight += w[nodes[i, k]]
            y[i] = s * s / weight
            z[i] = ti.sin(s) * x[i, 0]

    found = mesh.check(run, outs=[y, z])
    distinct = [len({i, *row}) for i, row in enumerate(mesh.nodes.to_numpy())]
    assert np.diff(found[0][0].indptr).tolist() == distinct


def test_a_column_at_a_fixed_place_beside_a_row(mesh):
    w, nodes, y, v = mesh.w, mesh.nodes, mesh.y, scalars([0.7, 0.3])

    @ti.kernel
    def run():
        for i in y:
            s = 1.7
            for k in range(i % K):
                s = 0.7 * (s + w[nodes[i, k]] ** 2)
            y[i] = s * w[i] + v[1] * s

    mesh.check(run, [w, v], has_own_columns=False)


@pytest.mark.sweep
def test_sums_outside_of_loops():
    """Each statement at the top of a kernel is a stage of its own, and what reads the local afterwards sees them all."""
    w, x, y = scalars(random(P)), scalars(random(K)), outputs(3)

    @ti.kernel
    def run():
        s = 0.0
        for i in range(K):
            s += w[(i * 7) % P] * x[i]
        s += w[0] ** 2
        s += w[1] ** 3
        y[0] = s * s
        s -= w[2] * x[0]
        if x[0] > -5:
            s += w[3] ** 2
            s += w[4] ** 2
        for i in range(K):
            s += w[(i * 11) % P] * x[i]
        y[1] = ti.sin(s)
        y[2] = s * w[5]

    plan = Jacobian(run, [w, x], [y], format="csr")
    require_equal(plan(), run, [w, x], [y])
    assert "entries of the local s" in plan.explain()


@pytest.mark.sweep
def test_a_sum_that_becomes_a_row_in_a_loop_of_any_length(mesh):
    """It was to count what it writes; in a row there is nothing to count."""
    w, nodes, y = mesh.w, mesh.nodes, mesh.y
    lengths = integers(np.arange(M) % K)

    @ti.kernel
    def run():
        for i in y:
            s = 1.7
            for k in range(lengths[i]):
                s = s + w[nodes[i, k]] ** 2
                s = 0.7 * s
            y[i] = s * w[i]

    @ti.kernel
    def unused():
        for i in y:
            s = 1.7
            for k in range(lengths[i]):
                s = s + w[nodes[i, k]]
                s = 0.7
            y[i] = w[i] * s

    mesh.check(run, [w], has_own_columns=False)
    mesh.check(unused, [w], has_own_columns=False)


@pytest.mark.sweep
def test_a_sum_that_is_found_together_with_a_row():
    """A walk in which a local has no columns yet, next to a local with a row, is only there to be repeated."""
    x, y = scalars(random(130)), outputs(3)
    nodes, lengths = integers([14, 5]), integers([2, 1])

    @ti.kernel
    def run():
        for i in y:
            a = 0.7
            if float(i) - 0.5 <= x[lengths[1]]:
                a = x[nodes[0]] + x[1]
            for j in range(lengths[0]):
                v = ti.Vector([0.7, 0.7])
                for k in range(lengths[1]):
                    v += ti.Vector([a + j * k, 0.6])
                v += v.normalized()
                y[i] += v[0]

    plan = Jacobian(run, [x], [y], format="csr")
    require_equal(plan(), run, [x], [y])


@pytest.mark.sweep
def test_recurrences_through_two_locals_have_rows():
    """Each walk over the program would find one more column that comes back to s, without an end."""
    w, y = scalars(random(6)), outputs(6)
    nodes = integers([4, 0, 3])

    @ti.kernel
    def run():
        s = w[nodes[0]]
        for k in range(2):
            s = y[k] = ti.atan2(w[k], s)
        t = w[nodes[1]]
        before = 0.3
        for k in range(3):
            t = before * w[nodes[k]]
            before = t + w[k]
        y[5] = t

    plan = Jacobian(run, [w], [y], format="csr")
    require_equal(plan(), run, [w], [y])


def test_a_later_launch_keeps_the_columns_in_rows_that_an_earlier_one_does():
    x, t = scalars(np.linspace(0.3, 1.0, 12)), outputs(12)

    @ti.kernel
    def recur():
        for i in t:
            s = 0.0
            for j in range(12):
                s = ti.sin(s + x[j] * (i + 1)) * s + x[j]
            t[i] = s

    square = kernel_of("for i in t: t[i] = t[i] * t[i] + x[i]", t=t, x=x)
    run = lambda: (recur(), square())
    plan = Jacobian(run, x, t, format="csr")
    J = plan()
    assert "an earlier launch has all columns of the field x" in plan.explain()
    assert_allclose(J.toarray(), jacobian(run, x, t), rtol=1e-9, atol=1e-9)


@pytest.mark.sweep
def test_too_many_entries_of_a_loop_that_is_known_at_run_time(mesh, monkeypatch):
    """What the first launch wrote is put back."""
    monkeypatch.setattr("taichi_ext.runtime.sparse.streams.OPEN_ENTRIES", M - 1)
    w, nodes, y, count = mesh.w, mesh.nodes, mesh.y, integers([M])

    @ti.kernel
    def run():
        for i in range(count[0]):
            s = 0.0
            for k in range(K):
                s += w[nodes[i, k]] ** 2
            y[i] = s * s

    with pytest.raises(InvalidArgumentError, match=f"The local s has {M} entries"):
        jacobian(run, w, y, format="csr")
    assert not y.to_numpy().any()
    count[0] = M - 1
    for _ in range(2):
        require_equal(jacobian(run, [w], [y], format="csr"), run, [w], [y])


# Sparse Jacobians of loops whose number of iterations is only known at run time: against central differences.


Q, N = 80, 9


class Lists:
    """Parameters by node, and for each residual a list of nodes: ``nodes[starts[i]:starts[i + 1]]``."""

    def __init__(self):
        self.w, self.y = scalars(random(Q)), outputs(N)
        self.starts, self.nodes = integers(np.zeros(N + 1)), integers(np.zeros(N * 6))
        self.count = integers([N])
        self.set(1)

    def set(self, seed):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(0, 6, N)
        self.starts.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))
        self.nodes.from_numpy(rng.integers(0, Q, N * 6).astype(np.int32))
        return lengths


@pytest.fixture
def lists():
    return Lists()


def test_entries_that_no_iteration_writes_are_not_stored(lists):
    w, y, starts, nodes = lists.w, lists.y, lists.starts, lists.nodes

    @ti.kernel
    def run():
        for i in y:
            for k in range(starts[i], starts[i + 1]):
                y[i] += w[nodes[k]]

    plan = Jacobian(run, w, y, format="csr")
    for seed in (4, 5):
        lists.set(seed)
        starts_, nodes_ = read(starts), read(nodes)
        found = plan()
        distinct = [len(set(nodes_[a:b])) for a, b in zip(starts_, starts_[1:], strict=False)]
        assert np.diff(found.indptr).tolist() == distinct


@pytest.mark.sweep
def test_side_effects_happen_once(lists):
    """The first call launches the kernel twice, and puts back what the first launch did."""
    w, starts, nodes, total, steps = lists.w, lists.starts, lists.nodes, scalars(random(N)), integers([0])
    before = read(total)

    @ti.kernel
    def run():
        for i in total:
            steps[0] += 1
            for k in range(starts[i], starts[i + 1]):
                total[i] += w[nodes[k]]

    value, found = value_and_jacobian(run, [w, total], total, format="csr")
    after = before.copy()
    starts_, nodes_ = read(starts), read(nodes)
    for i in range(N):
        after[i] += read(w)[nodes_[starts_[i] : starts_[i + 1]]].sum()
    np.testing.assert_allclose(value, after)
    assert steps[0] == N
    np.testing.assert_array_equal(found[1].toarray(), np.eye(N))


@pytest.mark.sweep
@pytest.mark.chosen_only("it cannot be launched twice", "--chunk-size")
def test_what_cannot_be_launched_again_is_dense(lists):
    w, y, starts, nodes = lists.w, lists.y, lists.starts, lists.nodes

    @ti.kernel
    def run():
        for i in y:
            for k in range(starts[i], starts[i + 1]):
                y[i] += w[nodes[k]] + ti.floor(ti.random())

    plan = Jacobian(run, w, y, format="csr")
    require_equal([[plan()]], run, [w], [y])
    assert "it draws random numbers" in plan.explain()


@pytest.mark.sweep
def test_too_many_entries_are_known_after_the_first_launch(lists, monkeypatch):
    """The memory that they take is named, and what that launch wrote is put back."""
    w, y, count = lists.w, lists.y, lists.count

    @ti.kernel
    def run():
        for i in y:
            for k in range(count[0]):
                y[i] += w[k]

    count[0] = 50
    monkeypatch.setattr("taichi_ext.runtime.memory.shadows.available_memory", lambda: 10_000)
    with pytest.raises(InvalidArgumentError, match="adds up 451 entries, which takes"):
        jacobian(run, w, y, format="csr")
    assert not read(y).any()


def test_ends_of_an_ndrange_that_change_in_the_loop():
    """Taichi reads them again in each iteration, so how many there are is not known before: J comes from dense rows."""
    x, y, s = scalars(np.linspace(0.2, 0.9, 9)), outputs(3), scalars(np.array(0.3))
    n = integers([3, 1, 2])

    @ti.kernel
    def run():
        for a, b in ti.ndrange(n[2], n[int(abs(s[None]) * 2.7) % 3]):
            s[None] += x[a] * x[b]
        for k in range(3):
            y[k] += s[None] * x[k]

    start = lambda: (write(s, 0.3), write(y, 0.0))
    start()
    dense = Jacobian(run, [x], [y])()[0][0]
    plan = Jacobian(run, [x], [y], format="csr")
    for _ in range(2):
        start()
        np.testing.assert_allclose(plan()[0][0].toarray(), dense)


@pytest.mark.sweep
def test_ends_of_an_ndrange_that_are_locals_which_the_loop_changes():
    x, y, n = scalars(random(40)), outputs(40), integers([4])

    @ti.kernel
    def run():
        end = n[0]
        for i, j in ti.ndrange(3, (end - 4, end)):
            y[(i * 5 + ti.abs(j)) % 40] += x[(i * 7 + ti.abs(j)) % 40] ** 2 * x[39]
            end -= 1
            if end < 2:
                end = 5

    plan = Jacobian(run, [x], [y], format="csr")
    for _ in range(2):
        write(y, 0.0)
        require_equal(plan(), run, [x], [y])


def test_a_launch_with_too_little_room_adds_once():
    """It is launched again, from the state that it began with."""
    x, y, n = scalars(np.linspace(0.5, 1.0, 6)), outputs(4), integers([1, 3, 2, 5])

    @ti.kernel
    def k():
        for i in y:
            for j in range(n[i]):
                y[i] += x[j] ** 2

    write(y, 10.0)
    J = jacobian(k, x, y, format="csr").toarray()
    counted = np.arange(6) < read(n)[:, None]
    assert_allclose(J, 2 * read(x) * counted)
    assert_allclose(read(y), 10 + counted @ read(x) ** 2)
