"""A sparse Jacobian or Hessian that is called again: what the shorter way of repeated calls assumes, broken from elsewhere."""

import gc
import weakref

import numpy as np
import pytest
import taichi as ti
from differences import central_differences, outputs, read, scalars, write
from kernel_texts import func_of, kernel_of
from many_threads import in_threads
from numpy.testing import assert_allclose
from taichi_program import initialise

import taichi_ext as te
from taichi_ext import Hessian, Jacobian, backend, boundary_gradient, hessian, hvp, registry, value_and_gradient
from taichi_ext.api.runs.sparse_form import FEW_COLUMNS

MANY = FEW_COLUMNS + 1  # entries of a parameter that has columns of its own
pytestmark = [
    pytest.mark.usefixtures("ti64"),
    pytest.mark.double_only("differences in float64"),
    pytest.mark.chosen_only("calls that take several runs are not launched at once", "--chunk-size"),
]


class Chain:
    """Residuals by way of sums in a field between: by x through run-time integers, by a pose of three numbers."""

    def __init__(self):
        random = np.random.default_rng(1)
        self.x, self.pose = scalars(random.uniform(0.5, 1.5, MANY)), scalars(random.uniform(0.5, 1.5, 3))
        self.places, self.bone = ti.field(ti.i32, 8), ti.field(ti.i32, 8)
        self.places.from_numpy(random.integers(0, MANY, 8).astype(np.int32))
        self.bone.from_numpy(random.integers(0, 3, 8).astype(np.int32))
        self.angle, self.out = outputs(3), outputs(8)
        x, pose, places, bone, angle, out = self.x, self.pose, self.places, self.bone, self.angle, self.out

        @ti.kernel
        def run():
            for i in angle:
                angle[i] = 0.0
            ti.loop_config(serialize=True)
            for i in range(3):
                angle[i] += pose[i] * pose[i]
                if i > 0:
                    angle[i] += angle[i - 1]
            for k in range(8):
                out[k] = x[places[k]] * ti.sin(angle[bone[k]])

        self.run = run
        self.plan = Jacobian(run, [x, pose], out, format="csr")

    @property
    def is_replayed(self):
        return self.plan._prepared.replay is not None

    def require_right(self, blocks):
        expected = central_differences(self.run, [self.x, self.pose], [self.out])[0]
        for block, dense in zip(blocks, expected, strict=True):
            assert_allclose(block.toarray(), dense, rtol=1e-7, atol=1e-9)


@pytest.fixture
def chain():
    made = Chain()
    made.plan()
    assert made.is_replayed != backend.stores_by_column()  # no call is, on a GPU
    return made


def test_other_values_and_other_integers(chain):
    first = chain.plan()
    kept = [block.copy() for block in first]
    write(chain.pose, np.array([0.0, 0.3, 0.0]))
    chain.require_right(chain.plan())
    write(chain.places, np.arange(8, dtype=np.int32)[::-1])
    chain.bone.fill(2)
    blocks = chain.plan()
    chain.require_right(blocks)
    assert chain.is_replayed != backend.stores_by_column()
    for block, before in zip(first, kept, strict=True):  # results of before are whose they were given to
        assert (block != before).nnz == 0
    blocks[0].indices[:] = 0
    blocks[1].data[:] = 7
    chain.require_right(chain.plan())


def test_tangents_have_the_columns_of_rows_alone(chain):
    """Those of the pose; the columns of x are not in rows."""
    assert {given.shape for given in chain.plan._prepared.replay.tangents.values()} == {(9,)}


def test_entries_by_columns_of_their_own_stay_where_they_are_zero(chain):
    entries = [block.nnz for block in chain.plan()]
    chain.pose.fill(0.0)  # the derivatives by x are all zero, and so are those by the pose, which come from rows
    blocks = chain.plan()
    assert [block.nnz for block in blocks] == [8, 0]
    assert entries[0] == 8
    chain.require_right(blocks)


def test_tangents_begin_at_zero_in_each_call():
    x, pose, used, between = scalars(np.ones(MANY)), scalars([1.0, 2.0, 3.0]), ti.field(ti.i32, 3), outputs(3)
    out = outputs(3)
    used.fill(1)

    @ti.kernel
    def run():
        ti.loop_config(serialize=True)
        for i in range(3):
            if used[i] == 1:
                between[i] = pose[i] * pose[i]
        for i in range(3):
            out[i] = x[i] * between[i]

    plan = Jacobian(run, [x, pose], out, format="csr")
    for _ in range(3):
        assert_allclose(plan()[1].toarray(), np.diag([2.0, 4.0, 6.0]))
    assert (plan._prepared.replay is not None) != backend.stores_by_column()
    used[1] = 0  # what is there from the call before is a constant
    assert_allclose(plan()[1].toarray(), np.diag([2.0, 0.0, 6.0]))


@pytest.mark.sweep
def test_memory_of_results_is_not_kept(chain):
    """The launch that is made again takes other arrays each time, and lets go of them."""
    for _ in range(3):
        blocks = chain.plan()
        chain.require_right(blocks)
        held = [weakref.ref(block.data if block.data.base is None else block.data.base) for block in blocks]
        del blocks
        gc.collect()
        assert [ref() is None for ref in held] == [True, True]


def test_out_and_a_watched_call_do_not_change_it(chain):
    out = chain.plan()
    write(chain.x, np.linspace(1, 2, MANY))
    assert chain.plan(out=out) is out
    chain.require_right(out)
    chain.require_right(chain.plan())


def test_a_rule_that_is_given_later():
    x, y = scalars([1.0, 2.0]), outputs(2)
    doubled = func_of("doubled(v): return 2 * v")
    run = kernel_of("for i in x: y[i] = doubled(x[i])", x=x, y=y, doubled=doubled)
    plan = Jacobian(run, x, y, format="csr")
    for _ in range(2):
        assert_allclose(plan().toarray(), 2 * np.eye(2))

    @boundary_gradient(doubled)
    def rule(v, d_v):
        return 5.0 * d_v

    for _ in range(2):
        assert_allclose(plan().toarray(), 5 * np.eye(2))
    with registry.disabled():
        assert_allclose(plan().toarray(), 2 * np.eye(2))


def test_a_number_that_the_kernel_was_compiled_with_changes():
    x, y = scalars([1.0, 2.0]), outputs(2)

    @ti.data_oriented
    class Scaled:
        def __init__(self):
            self.scale = 3.0

        @ti.kernel
        def run(self):
            for i in x:
                y[i] = self.scale * x[i]

    scaled = Scaled()
    plan = Jacobian(scaled.run, x, y, format="csr")
    for _ in range(2):
        assert_allclose(plan().toarray(), 3 * np.eye(2))
    scaled.scale = 4.0
    with pytest.raises(te.UnsupportedError, match="scale has changed from 3.0 to 4.0"):
        plan()


def test_threads_share_it(chain):
    wrong = []

    def work(_):
        for _ in range(20):
            blocks = chain.plan()
            if not all(np.array_equal(b.toarray(), e) for b, e in zip(blocks, expected, strict=True)):
                wrong.append(blocks)

    expected = [block.toarray() for block in chain.plan()]
    in_threads(work, 4)
    assert not wrong


def test_a_kernel_that_counts_its_entries_is_not_repeated_this_way():
    count, x, y = ti.field(ti.i32, ()), scalars([1.0, 2.0, 3.0]), outputs(3)
    run = kernel_of("for i in range(count[None]): y[i] = x[i] * x[i]", count=count, y=y, x=x)
    plan = Jacobian(run, x, y, format="csr")
    for number in (1, 3, 2):
        count[None] = number
        y.fill(0.0)
        assert_allclose(plan().toarray(), np.diag([2.0, 4.0, 6.0]) * (np.arange(3) < number))
    assert plan._prepared.replay is None


@pytest.mark.sweep
def test_after_another_ti_init():
    made = Chain()
    made.plan()
    initialise(default_fp=ti.f64)
    with pytest.raises(te.InvalidArgumentError, match="prepare it again"):
        made.plan()


class Pairs:
    """An energy of pairs of points on a line, and its derivatives; a pair may be one point twice."""

    def __init__(self, ends=((0, 1), (1, 2), (3, 3), (0, 4))):
        self.x, self.energy = scalars(np.linspace(0.3, 1.4, 5)), scalars(0.0)
        self.pairs = ti.Vector.field(2, ti.i32, 4)
        self.pairs.from_numpy(np.array(ends, np.int32))
        x, energy, pairs = self.x, self.energy, self.pairs

        @ti.kernel
        def run():
            for k in pairs:
                i, j = pairs[k][0], pairs[k][1]
                energy[None] += (x[i] * x[j]) ** 2 + (x[i] - x[j]) ** 4

        self.run = run
        self.plan = Hessian(run, x, energy, format="csr")

    def by_hand(self, fixed=()):
        """The energy, its gradient and H."""
        i, j = self.pairs.to_numpy().T
        x = self.x.to_numpy()
        a, b = x[i], x[j]
        gradient, H = np.zeros(5), np.zeros((5, 5))
        np.add.at(gradient, i, 2 * a * b**2 + 4 * (a - b) ** 3)
        np.add.at(gradient, j, 2 * a**2 * b - 4 * (a - b) ** 3)
        np.add.at(H, (i, i), 2 * b**2 + 12 * (a - b) ** 2)
        np.add.at(H, (j, j), 2 * a**2 + 12 * (a - b) ** 2)
        for rows, columns in ((i, j), (j, i)):
            np.add.at(H, (rows, columns), 4 * a * b - 12 * (a - b) ** 2)
        for k in fixed:
            gradient[k] = H[k] = H[:, k] = 0
            H[k, k] = 1
        return ((a * b) ** 2 + (a - b) ** 4).sum(), gradient, H

    def require_right(self, found, fixed=()):
        value, gradient, H = found
        for a, b in zip((value, gradient, H.toarray()), self.by_hand(fixed), strict=True):
            assert_allclose(a, b, rtol=1e-13, atol=1e-13)
        assert (H != H.T).nnz == 0

    def call(self, plan=None):
        self.energy.fill(0)
        return (plan or self.plan).value_gradient_and_hessian()


@pytest.fixture
def pairs(monkeypatch):
    """Its second call is made without a session."""
    made = Pairs()
    made.call()
    if not backend.stores_by_column():
        monkeypatch.setattr("taichi_ext.api.runs.evaluation.Session", None)
    return made


def test_hessians_of_other_values_and_other_pairs(pairs):
    before = pairs.by_hand()
    first = pairs.call()
    write(pairs.x, np.linspace(1.1, -0.4, 5))
    pairs.require_right(pairs.call())
    write(pairs.pairs, np.array([[4, 2], [2, 0], [1, 1], [1, 3]], np.int32))  # another pattern, one point twice
    pairs.require_right(pairs.call())
    write(pairs.pairs, np.array([[4, 2], [2, 0], [1, 0], [1, 3]], np.int32))  # none twice
    pairs.require_right(pairs.call())
    for a, b in zip((*first[:2], first[2].toarray()), before, strict=True):  # no call writes to earlier results
        assert_allclose(a, b, rtol=1e-13, atol=1e-13)


def test_hessians_with_fixed_entries_and_other_formats():
    pairs = Pairs()
    plan = Hessian(pairs.run, pairs.x, pairs.energy, format="bsr", fixed=np.arange(5) == 1)
    for values in ([0.3, 0.2, 0.9, 1.0, 0.1], [1.3, 0.2, 0.9, -1.0, 0.1], [0.0, 0.0, 0.0, 0.0, 0.0]):
        write(pairs.x, np.array(values))
        pairs.require_right(pairs.call(plan), fixed=[1])


def test_hessians_with_other_calls_in_between():
    pairs = Pairs()
    run, x, energy, v = pairs.run, pairs.x, pairs.energy, np.linspace(1, 2, 5)
    for values in (np.linspace(0.2, 1, 5), np.linspace(-1, 1, 5), np.linspace(2, 1, 5)):
        write(x, values)
        pairs.require_right(pairs.call())
        value, gradient, H = pairs.by_hand()
        energy.fill(0)
        assert_allclose(hvp(run, x, v, energy), H @ v, rtol=1e-12, atol=1e-12)
        pairs.require_right(pairs.call())
        assert_allclose(value_and_gradient(run, x, energy)[1], gradient, rtol=1e-12, atol=1e-12)
        pairs.require_right(pairs.call())
        assert np.linalg.eigvalsh(hessian(run, x, energy, format="csr", project="clamp").toarray()).min() > -1e-12
        pairs.require_right(pairs.call())
        assert_allclose(hessian(run, x, energy), H, rtol=1e-12, atol=1e-12)
        pairs.require_right(pairs.call())
        assert value == pytest.approx(float(energy[None]))


@pytest.mark.parametrize("kind", ["csr", None])
def test_hessians_of_linear_energies(kind):
    """No kernel has tangents of the gradient."""
    pairs = Pairs()
    x, energy = pairs.x, pairs.energy
    run = kernel_of("for i in x: energy[None] += 3 * x[i]", x=x, energy=energy)
    plan = Hessian(run, x, energy, format=kind)
    for _ in range(3):
        value, gradient, H = pairs.call(plan)
        assert_allclose(value, 3 * read(x).sum(), rtol=1e-13)
        assert_allclose(gradient, 3)
        assert H.shape == (5, 5)
        assert abs(H).sum() == 0
