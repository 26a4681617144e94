"""Sparse Jacobians: against dense ones, central differences, and patterns that are known."""

import gc
import sys
import weakref

import example_programs
import numpy as np
import pytest
import scipy.sparse
import taichi as ti
from differences import central_differences, integers, outputs, read, scalars, vector_outputs, vectors, write
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import InvalidArgumentError, Jacobian, jacobian, value_and_jacobian
from taichi_ext.api.inputs.sparse_results import in_format
from taichi_ext.runtime.sparse.pattern import block_of

pytestmark = [pytest.mark.usefixtures("ti64"), pytest.mark.double_only("differences in float64")]


def random(*shape):
    return np.random.default_rng(5).uniform(0.5, 1.5, shape)


def require_equal(found, run, params, outs, state=()):
    """Sparse blocks equal central differences, and are in canonical CSR form."""
    expected = central_differences(run, params, outs, state)
    for row, wanted in zip(found, expected, strict=True):
        for block, dense in zip(row, wanted, strict=True):
            assert block.format == "csr"
            assert block.has_canonical_format
            parts = (block.data, block.indices, block.indptr)
            assert scipy.sparse.csr_array(parts, shape=block.shape).has_canonical_format
            assert_allclose(block.toarray(), dense.reshape(block.shape), rtol=1e-6, atol=1e-7)


class Network:
    """Residuals by way of run-time integers, springs between random nodes."""

    def __init__(self):
        self.x, self.scale = vectors(random(6, 2)), scalars(random(4))
        self.ends = integers([[0, 3], [5, 1], [2, 2], [3, 0]])
        self.length, self.force = outputs(4), vector_outputs(2, 6)
        x, scale, ends, length, force = self.x, self.scale, self.ends, self.length, self.force

        @ti.kernel
        def run():
            for e in range(4):
                a, b = ends[e, 0], ends[e, 1]
                d = x[a] - x[b]
                length[e] = d.dot(d) * scale[e]
                pull = scale[e] * d * d.norm_sqr()
                force[a] += pull
                force[b] -= pull

        self.run, self.params, self.outs = run, [x, scale], [length, force]

    def pattern(self):
        """The pattern of the forces by the positions."""
        found = np.zeros((6, 2, 6, 2), bool)
        for a, b in self.ends.to_numpy():
            for one in (a, b):
                for other in (a, b):
                    found[one, :, other] = True
        return found.reshape(12, 12)


@pytest.fixture(scope="module")
def network():
    return Network()


def test_two_entries_whose_order_is_not_that_of_the_rows():
    x, y = scalars([0.5, 2.0]), outputs(2)
    k = kernel_of("for i in x: y[1 - i] = x[i] ** 2", x=x, y=y)
    assert_allclose(jacobian(k, x, y, format="csr").toarray(), [[0, 4], [1, 0]])


def test_other_integers_give_another_pattern(network):
    plan = Jacobian(network.run, network.params, network.outs, format="csr")
    before = plan()[1][0].nnz
    held = read(network.ends)
    write(network.ends, np.array([[0, 1], [1, 0], [0, 1], [1, 1]], np.int32))
    found = plan()
    require_equal(found, network.run, network.params, network.outs)
    assert found[1][0].nnz == network.pattern().sum() != before
    write(network.ends, held)
    assert plan()[1][0].nnz == before


@pytest.mark.sweep
def test_results_are_freed_with_their_last_name(network):
    """Nothing of a call lives on in a cycle: memory is used again by the next call."""
    plan = Jacobian(network.run, network.params, network.outs, format="csr")
    plan()
    gc.collect()
    gc.disable()
    try:
        watched = weakref.ref(plan()[0][0])
        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")  # says torch
def test_torch_formats():
    torch = pytest.importorskip("torch")
    k = kernel_of("for i in b: b[i] = a[i] * a[i + 1]", "a: A1, b: A1")
    a, b = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for format in ("torch_csr", "torch_coo"):
        values, found = value_and_jacobian(k, "a", "b", args=(a, b), format=format)
        assert found.layout == {"torch_csr": torch.sparse_csr, "torch_coo": torch.sparse_coo}[format]
        assert_array_equal(found.to_dense().numpy(), [[2.0, 1.0, 0.0], [0.0, 3.0, 2.0]])
        assert_array_equal((found @ a).numpy(), 2 * values.numpy())
        assert found.values().numel() == 4


@pytest.mark.sweep
def test_out_that_cannot_be_filled():
    x, z, y = scalars(random(4)), scalars(random(4)), outputs(4)
    run = kernel_of("for i in y: y[i] = x[i] * z[i]", y=y, x=x, z=z)
    first, second = jacobian(run, [x, z], y, format="csr")
    assert_array_equal(first.diagonal(), read(z))
    y.fill(7.0)
    with pytest.raises(InvalidArgumentError, match=r"out\[1\] and out\[0\] share memory; give each its own array"):
        jacobian(run, [x, z], y, format="csr", out=[first, first])
    second.data.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match=r"out\[1\] is read-only; give an array that can be written"):
        jacobian(run, [x, z], y, format="csr", out=[first, second])
    assert_array_equal(read(y), np.full(4, 7.0))  # nothing has run


@pytest.mark.sweep
def test_float16_becomes_float32():
    """SciPy has no float16."""
    x, y = (ti.field(ti.f16, shape=3) for _ in range(2))
    write(x, np.array([1.5, 2.5, 3.5], np.float16))
    square = kernel_of("for i in x: y[i] = x[i] * x[i]", x=x, y=y)
    for kind in ("csr", "csc", "coo", "bsr"):
        found = jacobian(square, x, y, format=kind)
        assert found.format == kind
        assert found.dtype == np.float32
        assert_array_equal(found.toarray(), np.diag([3.0, 5.0, 7.0]))
    filled = jacobian(square, x, y, format="csr", out=jacobian(square, x, y, format="csr"))
    assert_array_equal(filled.data, [3.0, 5.0, 7.0])


@pytest.mark.sweep
@pytest.mark.parametrize("count", [0, 1])
def test_loops_without_iterations(count):
    """No iteration keeps the places of the entries that it reads and stores, or whether it stores them."""
    x, y, place = scalars([0.3, 0.5, 0.7]), outputs(3), integers([2, 0, 1])

    @ti.kernel
    def k():
        for i in range(3):
            y[i] = x[i]
        for i in range(count):
            for j in range(count):
                if x[j] > 0:
                    y[place[i]] += x[place[j]] ** 2

    expected = np.eye(3)
    expected[2, 2] += count * 1.4
    assert_allclose(jacobian(k, x, y, format="csr").toarray(), expected)


def test_steps_in_place_and_intermediates():
    x, v, y = scalars(random(5)), scalars(random(5)), outputs(5)
    aux = outputs(5)

    @ti.kernel
    def step():
        for i in x:
            aux[i] = x[i] * x[(i + 1) % 5]
        for i in x:
            v[i] += 0.1 * aux[i]
            x[i] += 0.1 * v[i]

    measure = kernel_of("for i in x: y[i] = x[i] * aux[(i + 2) % 5] + v[i]", x=x, y=y, aux=aux, v=v)
    run = lambda: (step(), step(), measure())
    plan = Jacobian(run, [x, v], [y, x], format="csr")
    held = read(x), read(v)
    found = plan()
    write(x, held[0])
    write(v, held[1])
    assert not plan._prepared.sparse.dense_reason
    require_equal(found, run, [x, v], [y, x], [aux])


@pytest.mark.sweep
def test_stores_of_constants_clear_rows():
    x, y = scalars(random(3)), outputs(3)
    square = kernel_of("for i in x: y[i] = x[i] ** 2; x[i] *= 2", x=x, y=y)
    clear = kernel_of("for i in range(2): y[i] = 1", y=y)

    def run():
        square()
        clear()
        x[1] = 3.0

    found = jacobian(run, x, [y, x], format="csr")
    assert_array_equal([block.nnz for block in found], [1, 2])
    assert_array_equal(found[1].toarray(), np.diag([2, 0, 2]))


@pytest.mark.sweep
def test_an_intermediate_that_is_cleared_again_in_each_step():
    x, y, aux = scalars(random(3)), outputs(3), outputs(3)
    clear = kernel_of("for i in aux: aux[i] = 0", aux=aux)
    gather = kernel_of("for i in x: aux[2 - i] += x[i] ** 2", x=x, aux=aux)
    step = kernel_of("for i in x: x[i] += 0.1 * aux[i]; y[i] += x[i] * aux[i]", x=x, aux=aux, y=y)

    def run():
        for _ in range(3):
            clear()  # its launch is repeated, but from the second step on there are tangents to clear
            gather()
            step()

    before = read(x)
    found = jacobian(run, [x], [y, x], format="csr")  # the first call, in which columns are still added
    write(x, before)
    y.fill(0)
    require_equal(found, run, [x], [y, x], [aux])


def test_parameter_that_python_stores_to_between_kernels():
    x, y, z = scalars(random(3)), outputs(3), outputs(3)
    start = read(x)
    before = kernel_of("for i in y: y[i] = x[i] ** 2", y=y, x=x)
    after = kernel_of("for i in z: z[i] = x[i] ** 3", z=z, x=x)

    def run():
        before()
        x[1] = 2.0
        after()

    found = jacobian(run, x, [y, z], format="csr")
    assert_allclose(found[0].toarray(), np.diag(2 * start))
    assert_allclose(found[1].toarray(), np.diag(3 * start**2 * [1, 0, 1]))


@pytest.mark.sweep
def test_an_entry_is_read_after_the_row_that_it_was_stored_with_has_changed():
    x, y = scalars(random(3)), outputs(3)

    @ti.kernel
    def run():
        for i in y:
            a = 0.7
            y[i] += a
            for k in range(2):
                a -= a * x[k]
            y[i] += y[i] * a

    y.fill(0)
    found = jacobian(run, [x], [y], format="csr")
    y.fill(0)
    require_equal(found, run, [x], [y], [y])


@pytest.mark.sweep
def test_what_cannot_be_sparse_is_dense_and_says_so():
    x, y = scalars(random(4)), outputs(4)

    @ti.kernel
    def run():
        ti.loop_config(serialize=True)
        for i in range(1, 4):
            y[i] = y[i - 1] * x[i] + x[0]

    plan = Jacobian(run, x, y, format="csr")
    found = plan()
    require_equal([[found]], run, [x], [y])
    assert "read in the loop that writes it" in plan.explain()


@pytest.mark.sweep
def test_too_large():
    """Rows that each need all columns: the memory is named before anything runs."""
    x, y = ti.field(ti.f64, 10**5), ti.field(ti.f64, 10**5)

    @ti.kernel
    def k():
        for i in y:
            total = 0.0
            for j in x:
                total += x[j]
            y[i] = total * x[i]

    with pytest.raises(InvalidArgumentError, match=r"J has to be computed dense: 74\.5 GiB, more than the .* GiB"):
        jacobian(k, x, y, format="csr")


def test_too_many_entries():
    """Rows that are sparse, and too many of them: the memory is named before anything runs."""
    n = 10**5
    x, y = ti.field(ti.f64, n), ti.field(ti.f64, n)

    @ti.kernel
    def k():
        for i in y:
            for j in range(10**4):
                y[i] += x[(i + j) % n]

    with pytest.raises(InvalidArgumentError, match=r"adds up 1000000000 entries, which takes 37\.3 GiB, more than the"):
        jacobian(k, x, y, format="csr")
    assert not read(y).any()


def test_scipy_is_missing(network, monkeypatch):
    for name in ("scipy", "scipy.sparse"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidArgumentError, match=r"format='csr' needs SciPy.*pip install '\.\[scipy\]'"):
        jacobian(network.run, network.x, network.force, format="csr")


def test_bad_input(network):
    x, force = network.x, network.force
    with pytest.raises(InvalidArgumentError, match=r"format is 'lil'; expected None for dense arrays, or one of 'csr'"):
        jacobian(network.run, x, force, format="lil")
    with pytest.raises(InvalidArgumentError, match="expected a scipy.sparse.csr_array of the same pattern"):
        jacobian(network.run, x, force, format="csr", out=np.zeros((12, 12)))
    with pytest.raises(InvalidArgumentError, match="another pattern than the Jacobian: 12 entries, not"):
        jacobian(network.run, x, force, format="csr", out=scipy.sparse.eye_array(12, format="csr"))
    with pytest.raises(InvalidArgumentError, match=r"out has shape \(3, 3\); the Jacobian has \(12, 12\)"):
        jacobian(network.run, x, force, format="csr", out=scipy.sparse.eye_array(3, format="csr"))
    moved = jacobian(network.run, x, force, format="csr")
    moved.indices[-1] = 0
    with pytest.raises(InvalidArgumentError, match="another pattern than the Jacobian: entries at other places"):
        jacobian(network.run, x, force, format="csr", out=moved)
    with pytest.raises(InvalidArgumentError, match="gives torch tensors, and .* is not a torch tensor"):
        jacobian(network.run, x, force, format="torch_csr")


def test_blocks_hold_zeros_where_the_pattern_has_no_entry():
    bsr = in_format(scipy.sparse.csr_array([[1.0, 0.0, 0.0, 0.0]]), "bsr", (1, 2), None)
    assert (bsr.blocksize, bsr.nnz) == ((1, 2), 2)
    assert_array_equal(bsr.toarray(), [[1.0, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize(("shape", "count"), [((40, 30), 500), ((300, 200), 50_000), ((5, 2**59), 50)])
def test_entries_in_order(shape, count):
    """Numbers at random places, some of them left out and some the same, as SciPy adds them up."""
    rng = np.random.default_rng(1)
    rows, columns = rng.integers(0, shape[0], count), rng.integers(0, min(shape[1], 100), count)
    columns += shape[1] - min(shape[1], 100)
    kept, numbers = rng.random(count) < 0.8, rng.standard_normal(count)
    block = block_of(rows * shape[1] + columns, kept, shape, False, may_be_in_place=True)
    wanted = scipy.sparse.coo_array((numbers[kept], (rows[kept], columns[kept])), shape=shape).tocsr()
    assert_array_equal(block.indptr, wanted.indptr)
    assert_array_equal(block.indices, wanted.indices)
    assert_allclose(block.data(numbers), wanted.data, rtol=1e-13, atol=1e-13)


@pytest.mark.sweep
def test_guarded_columns_stay_within_the_rows_of_locals():
    """Where a condition does not hold, the column that it guards may lie outside of the row, with a coefficient of 0."""
    n = 12
    x, y = scalars(np.linspace(0.3, 0.9, n)), outputs(4)

    @ti.kernel
    def k():
        for i in y:
            t = 0.0
            for m in range(-3, n + 4):
                a = 0.0
                if 0 <= m - 2 < n:
                    a = x[m - 2]
                b = a
                if 0 <= m + 2 < n:
                    b = x[m + 2] * a
                t += b * b
            y[i] = t * i

    J = jacobian(k, x, y, format="csr")
    assert_allclose(J.toarray(), jacobian(k, x, y), rtol=1e-13)
    assert_allclose(J.toarray(), central_differences(k, [x], [y])[0][0], rtol=1e-6, atol=1e-8)


@pytest.mark.sweep
def test_guarded_columns_stay_within_the_rows_of_entries():
    """Next to a row, the term of a guarded register is added to an entry of its own site, wherever the guard fails."""
    n = 6
    x, w, y = scalars(np.linspace(0.3, 0.9, n)), scalars(np.linspace(0.8, 0.4, n)), ti.field(ti.f64, shape=(4, 2 * n))

    @ti.kernel
    def k():
        for i, j in y:
            t = 0.0
            for m in range(n):
                t += x[m] * w[m]
            a = 0.0
            if 2 <= j < n + 2:
                a = x[j - 2]
            if 4 <= j < n + 4:
                a = a + w[j - 4] * x[0]
            y[i, j] = t * a

    plan = Jacobian(k, [x, w], y, format="csr")
    expected = np.concatenate([b.reshape(read(y).size, n) for b in central_differences(k, [x, w], [y])[0]], axis=1)
    assert_allclose(np.concatenate([b.toarray() for b in plan()], axis=1), expected, rtol=1e-6, atol=1e-8)
    assert "+ max(0, min(j + -2, 5))" in plan.source  # outside of it, a term of 0 would meet another iteration's sum


# An example with sparse Jacobians.


def test_bundle_adjustment(capsys, monkeypatch, tmp_path):
    printed = example_programs.run(
        "bundle_adjustment", capsys, monkeypatch, ["--output", str(tmp_path / "picture.png")]
    )
    assert printed.count("  ok  ") == 3
