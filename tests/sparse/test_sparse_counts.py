"""Sparse Jacobians of loops whose number of iterations is only known at run time: against central differences."""

import numpy as np
import pytest
import taichi as ti
from differences import integers, outputs, read, scalars, write
from numpy.testing import assert_allclose
from test_sparse import random, require_equal

from taichi_ext import InvalidArgumentError, Jacobian, jacobian, value_and_jacobian

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.double_only("differences in float64")]
P, M = 80, 9


class Lists:
    """Parameters by node, and for each residual a list of nodes: ``nodes[starts[i]:starts[i + 1]]``."""

    def __init__(self):
        self.w, self.y = scalars(random(P)), outputs(M)
        self.starts, self.nodes = integers(np.zeros(M + 1)), integers(np.zeros(M * 6))
        self.count = integers([M])
        self.set(1)

    def set(self, seed):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(0, 6, M)
        self.starts.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))
        self.nodes.from_numpy(rng.integers(0, P, M * 6).astype(np.int32))
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
    w, starts, nodes, total, steps = lists.w, lists.starts, lists.nodes, scalars(random(M)), integers([0])
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
    for i in range(M):
        after[i] += read(w)[nodes_[starts_[i] : starts_[i + 1]]].sum()
    np.testing.assert_allclose(value, after)
    assert steps[0] == M
    np.testing.assert_array_equal(found[1].toarray(), np.eye(M))


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
