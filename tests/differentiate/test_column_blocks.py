"""Blocks of columns: J in blocks is J, and blocks that differ in their first column alone share a kernel."""

import numpy as np
import pytest
import taichi as ti
from captured_warnings import no_warnings
from differences import Snapshot, as_list, integers, outputs, read, scalars, vectors
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal
from taichi_program import initialise

from taichi_ext import DerivativeWarning, Hessian, InvalidArgumentError, Jacobian, hessian, jacobian, jvp, vjp
from taichi_ext.differentiate.forms.entry_sites import LAST, Blocks
from taichi_ext.differentiate.plan.storage_facts import STRATEGIES

pytestmark = pytest.mark.usefixtures("ti64")

N, M = 24, 5


def numbers(*shape):
    return np.random.default_rng(len(shape)).uniform(0.5, 1.5, shape)


def kernel_count(plan):
    return len(plan._prepared.fused)


def matrix(J):
    """J with a row for each output entry, the parameters side by side."""
    parts = J if isinstance(J, (list, tuple)) else [J]
    return np.concatenate([part.reshape(M, -1) for part in parts], axis=1)


# --- which blocks are alike


def test_a_block_that_nothing_asks_about_can_begin_anywhere():
    assert Blocks(3, 12).first_columns == range(LAST + 1)
    assert Blocks(3).first_columns is None


# --- programs: the function, its params, and how many kernels blocks of one column take


def sums():
    """A sum over all parameters: rows."""
    p, y = scalars(numbers(N)), outputs(M)

    @ti.kernel
    def k():
        for i in y:
            s = 0.0
            for j in range(N):
                s += ti.sin(p[j] * (i + 1)) * p[j]
            y[i] = s

    return k, p, y, 1


def expressions():
    """A few index expressions, branches, a local that changes: slots."""
    p, y = scalars(numbers(N)), outputs(M)

    @ti.kernel
    def k():
        for i in y:
            best = p[2 * i] * p[3 * i + 1]
            if p[4 * i] > 1.0:
                best = ti.sqrt(p[4 * i]) - p[i]
            y[i] = best * best + ti.max(p[i], p[i + 1])

    return k, p, y, 1


def read_indices():
    """Two parameters, of which some blocks have a part each, at indices that the kernel reads."""
    p, q, y = scalars(numbers(N - 7)), scalars(numbers(7, 1)), outputs(M)
    which = integers([3, 0, 6, 6, 2])
    text = "for i in y: n = which[i]; y[i] += p[2 * n + 1] * q[n, 0] + ti.exp(q[(n + i) % 7, 0])"
    k = kernel_of(text, y=y, which=which, p=p, q=q)
    return k, [p, q], y, 1


def constant_indices():
    """Entries by constant indices in front of, between and behind others: as many kernels as there are such entries.

    And one for all blocks before, between and after.
    """
    p, y = scalars(numbers(N)), outputs(M)

    @ti.kernel
    def k():
        for i in y:
            s = p[4] * p[17]
            for j in range(5, 15):
                s += p[j] * p[j] * (i + 1)
            y[i] = s

    return k, p, y, 5


def many_constant_indices():
    """More entries by constant indices than registers, also in a local matrix: one kernel asks where they are."""
    p, y = vectors(numbers(9, 4)), outputs(M)

    @ti.kernel
    def k():
        for i in y:
            m = ti.Matrix.zero(ti.f64, 4, 9)
            for a, b in ti.static(ti.ndrange(4, 9)):
                m[a, b] = p[b][a] * (i + 1)
            if p[2][1] > 0.0:
                m[i % 4, i] *= m[3, 8]
            y[i] = (m @ m.transpose()).sum() + p[i][i % 4]

    return k, p, y, 1


def steps():
    """A pipeline with fields in between, one of them a vector field that it changes."""
    p, y = vectors(numbers(N // 3, 3)), outputs(M)
    x, v = vectors(np.zeros((N // 3, 3))), vectors(np.zeros((N // 3, 3)))
    begin = kernel_of("for i in x: x[i] = p[i]; v[i] = ti.Vector([0.0, 0.1, 0.0])", x=x, p=p, v=v)

    @ti.kernel
    def pull():
        for i in range(N // 3 - 1):
            d = x[i + 1] - x[i]
            f = (d.norm() - 1.0) * d
            v[i] += 0.1 * f
            v[i + 1] -= 0.1 * f

    move = kernel_of("for i in x: x[i] += v[i]", x=x, v=v)
    measure = kernel_of("for i in y: y[i] = x[i].norm_sqr() + x[i + 2].x", y=y, x=x)

    def run():
        begin()
        for _ in range(2):
            pull()
            move()
        measure()

    return run, p, y, 4


def changed_parameter():
    """A parameter that the kernel changes: its tangents are memory, which holds the seeds of the block at the start."""
    p, y = scalars(numbers(N)), outputs(M)

    @ti.kernel
    def k():
        for i in range(N - 1):
            p[i] = p[i] * p[i] + 0.5
        for i in y:
            y[i] = p[i] * p[i + 3] + p[N - 1]

    return k, p, y, 1


PROGRAMS = [sums, expressions, read_indices, constant_indices, many_constant_indices]
PROGRAMS += [steps, changed_parameter]
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


@pytest.mark.mostly_sweep("auto-sums", "auto-constant_indices", "sparse-read_indices", "dense-sums")
@each_program
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_that_differ_in_their_first_column_share_a_kernel(program, strategy):
    run, params, y, count = program()
    state = Snapshot([*as_list(params), y])
    whole = matrix(jacobian(run, params, y))
    plan = Jacobian(run, params, y, tangents=strategy, chunk_size=1)
    for _ in range(2):
        state.restore()
        assert_allclose(matrix(plan()), whole, rtol=1e-12, atol=1e-14)
        assert kernel_count(plan) == count


def test_what_the_kernel_takes():
    """Constant entries are no columns of other blocks; the first column has a name that no argument has."""
    p, y = scalars(numbers(N)), outputs(M)
    k = kernel_of("for i in y: y[i] = first_column * p[i + 2] * p[3 * i]", "first_column: ti.i32", y=y, p=p)
    plan = Jacobian(k, p, y, args=(3,), chunk_size=5)
    assert_allclose(plan(), jacobian(k, p, y, args=(3,)))
    assert "k_jacobian(first_column: ti.i32, d_y: " in plan.source
    assert "first_column_1: ti.i32):" in plan.source and "= i + 2 - first_column_1" in plan.source
    assert _columns(plan) == ["5, the first of them any column"]


def _columns(plan):
    lines = plan.explain().split("\n")
    return [line.removeprefix("  columns: ") for line in lines if line.startswith("  columns: ")]


def test_a_kernel_for_blocks_is_not_exported(tmp_path):
    run, p, y, count = sums()
    plan = Jacobian(run, p, y, chunk_size=4)
    plan()
    assert kernel_count(plan) == count
    with pytest.raises(InvalidArgumentError, match="has kernels for .* blocks of columns"):
        plan.export(tmp_path / "module.py")


# --- the last block, which has columns of zeros behind those of J


@pytest.mark.parametrize("size", [4, 7])
def test_the_last_block_shares_the_kernels_of_the_others(size):
    """Also where a parameter lies in it whole, kernels add to memory, and Python passes numbers on."""
    p, weights, total, y = scalars(numbers(7)), scalars(numbers(3, 1)[:, 0]), scalars([0.5]), outputs(M)
    add = kernel_of(
        "for i in p: total[0] += p[i] * weights[i % 3] * total[0] ** 0.25", p=p, total=total, weights=weights
    )

    scale = kernel_of("for i in y: y[i] += factor * p[i] * weights[i % 3]", "factor: ti.f64", y=y, p=p, weights=weights)

    def run():
        for _ in range(2):
            add()
            scale(total[0] * 2.0)

    state = Snapshot([total, y])
    whole = Jacobian(run, [p, weights], [y, total])
    found = whole()
    after = y.to_numpy(), total.to_numpy()
    plan = Jacobian(run, [p, weights], [y, total], chunk_size=size)
    for _ in range(2):
        state.restore()
        for row, blocks in zip(found, plan(), strict=True):
            for block, values in zip(row, blocks, strict=True):
                assert_allclose(values, block, rtol=1e-13)
        assert_array_equal(y.to_numpy(), after[0])
        assert_array_equal(total.to_numpy(), after[1])
    assert kernel_count(plan) == kernel_count(whole)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_products_in_blocks_share_a_kernel(size):
    k, p, y, _ = expressions()
    tangents = numbers(5, N)
    plan = Jacobian(k, p, y)
    assert_allclose(jvp(k, p, tangents, y, chunk_size=size), jvp(k, p, tangents, y), rtol=1e-13)
    weights = numbers(2, M)
    assert_allclose(vjp(k, p, y, weights, chunk_size=size), weights @ plan(), rtol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_losses_of_python_are_said_in_blocks(size):
    """Moves of numbers are added up over the blocks, of which the last one is not full."""
    p, y = scalars(numbers(5)), outputs(M)
    scale = kernel_of("for i in y: y[i] = factor * p[i]", "factor: ti.f64", y=y, p=p)
    kept = lambda: scale(p[0] * p[4] * 2.0)

    def lost():
        scale(p[0] * float(p[4]))

    with no_warnings():
        found = jacobian(kept, p, y, chunk_size=size)
    assert_allclose(found, jacobian(kept, p, y), rtol=1e-13)
    with pytest.warns(DerivativeWarning, match="tangent is lost|part of its tangent"):
        jacobian(lost, p, y, chunk_size=size)


@pytest.mark.sweep
@pytest.mark.parametrize("size", [1, 3])
def test_infinite_derivatives_stay_in_their_columns(size):
    """Columns that a block leaves out have a coefficient of 0, which an infinite number is not multiplied with."""
    v, m, y = scalars([1.0, 2.0, -1.0]), scalars([0.0, 3.0, 0.0]), outputs(3)
    k = kernel_of("for i in y: mass = m[i] + 0.0; y[i] = 2.0 * (v[i] / mass)", y=y, m=m, v=v)
    parts = jacobian(k, [v, m], y, chunk_size=size)
    for part, entries in zip(parts, ([np.inf, 2 / 3, np.inf], [-np.inf, -4 / 9, np.inf]), strict=True):
        assert_allclose(part[np.eye(3, dtype=bool)], entries)
        assert_array_equal(part[~np.eye(3, dtype=bool)], 0.0)


# Sums that all iterations add to are added up by each thread: compared with NumPy.


COUNT, P = 60, 20


def logistic():
    """Its kernel, parameters and energy, and its gradient and Hessian."""
    rng = np.random.default_rng(23)
    data, w, energy = scalars(rng.normal(size=(COUNT, P))), scalars(rng.normal(size=P) / 4), scalars(0.0)

    @ti.kernel
    def run():
        for n in range(COUNT):
            z = 0.0
            for k in range(P):
                z += data[n, k] * w[k]
            energy[None] += ti.log(1 + ti.exp(-z))

    rows = read(data)
    s = 1 / (1 + np.exp(rows @ read(w)))
    return run, w, energy, -s @ rows, (rows * (s * (1 - s))[:, None]).T @ rows


@pytest.mark.sweep
@pytest.mark.cpu_only("sums of each thread's own are added up on the CPU")
def test_gradients_and_hessians():
    run, w, energy, gradient, expected = logistic()
    for kind, found in ((Jacobian(run, w, energy), gradient), (Hessian(run, w, energy), expected)):
        for _ in range(2):  # sums begin at zero each time
            assert_allclose(kind(), found, rtol=1e-12, atol=1e-12)
        if ti.cfg.cpu_max_num_threads == 2:  # with more, an iteration adds too seldom for sums of each thread
            assert "global_thread_idx" in kind.source


def test_several_loops_and_rows_some_of_them_shared():
    """Sums of one loop are there for the next one; what is read, or belongs to an iteration, stays where it is."""
    rng = np.random.default_rng(23)
    x, y, own = scalars(rng.uniform(0.5, 1, 12)), outputs(3), outputs(40)

    @ti.kernel
    def run():
        for i, j in ti.ndrange(8, 5):
            s = 0.0
            for k in range(12):
                s += x[k] ** 2 * (i + k)
            y[1] += s * j
            y[2] -= s
            own[i * 5 + j] = s
        for n in own:
            own[n] += y[1]
            for k in range(12):
                y[0] += x[k] * n

    i, j, k = np.arange(8)[:, None, None], np.arange(5)[None, :, None], np.arange(12)
    of_s = 2 * read(x) * (i + k) * np.ones_like(j)
    J = jacobian(run, x, [y, own])
    first = (of_s * j).sum((0, 1))
    assert_allclose(J[0], [np.full(12, 780.0), first, -of_s.sum((0, 1))], rtol=1e-12)
    assert_allclose(J[1], of_s.reshape(40, 12) + first, rtol=1e-12)


def test_short_loops_stay_atomic():
    rng = np.random.default_rng(23)
    x, energy = scalars(rng.uniform(0.5, 1, 30)), scalars(0.0)

    @ti.kernel
    def run():
        for n in range(2):
            s = 0.0
            for k in range(30):
                s += x[k]
            energy[None] += s**3 * (n + 1)

    plan = Hessian(run, x, energy)
    assert_allclose(plan(), np.full((30, 30), 18 * read(x).sum()), rtol=1e-12)
    assert "global_thread_idx" not in plan.source
    assert_allclose(hessian(run, x, energy, format="csr").toarray(), plan(), rtol=1e-12)


@pytest.mark.cpu_only("sums of each thread's own are added up on the CPU")
def test_conditions_keep_a_loop_within_the_gradient():
    """Where the sums are added up, nothing behind the end of J is read or written."""
    rng = np.random.default_rng(23)
    x, weights, energy = scalars(rng.uniform(0.5, 1, 6)), scalars(rng.uniform(0.5, 1, COUNT)), scalars(0.0)

    @ti.kernel
    def run():
        for n in range(COUNT):
            for k in range(10):
                if k < 6:
                    energy[None] += ti.sin(x[k] * weights[n])

    plan, memory = Jacobian(run, x, energy), np.full(16, 7.0)
    plan(out=memory[:6])
    if ti.cfg.cpu_max_num_threads == 2:
        assert "global_thread_idx" in plan.source
        assert "d_energy.shape[0]" in plan.source
    w = read(weights)[:, None]
    assert_allclose(memory[:6], (w * np.cos(w * read(x))).sum(0), rtol=1e-12)
    assert_allclose(memory[6:], 7.0, rtol=0)


@pytest.mark.sweep
def test_one_thread_alone():
    """It needs no atomic additions, wherever they go to; last here, since it is another program."""
    initialise(default_fp=ti.f64, cpu_max_num_threads=1)
    run, w, energy, gradient, expected = logistic()
    assert_allclose(jacobian(run, w, energy), gradient, rtol=1e-12, atol=1e-12)
    for options in ({}, {"format": "csr"}):
        plan = Hessian(run, w, energy, **options)
        for _ in range(2):
            H = plan()
            assert_allclose(H.toarray() if options else H, expected, rtol=1e-12, atol=1e-12)
        assert "global_thread_idx" not in plan.source and "d_E[k] +=" not in plan.source
