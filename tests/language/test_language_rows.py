"""Programs with more parameters than fit into local arrays: rows in scratch memory, one part for each thread; large local arrays."""

import re

import numpy as np
import pytest
import taichi as ti
from differences import (
    Snapshot,
    check_jacobian,
    matrices,
    matrix_outputs,
    outputs,
    read,
    scalars,
    vector_outputs,
    vectors,
    write,
)
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import Jacobian, backend, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

MANY = 600
COLUMNS = (0, 1, 7, 333, 599)  # those that are differenced


def check_columns(kernel, x, outs, columns=COLUMNS, rtol=1e-6, atol=1e-7):
    """Some columns of the Jacobian against central differences, and the state against one plain run."""
    everything = Snapshot([x, *outs])
    blocks = jacobian(kernel, x, outs)
    after = Snapshot([x, *outs])
    everything.restore()
    kernel()
    plain = Snapshot([x, *outs])
    for values, plain_values in zip(after.values, plain.values, strict=True):
        assert_allclose(values, plain_values, rtol=1e-12, atol=1e-13)
    for column in columns:
        ends = []
        for sign in (1, -1):
            everything.restore()
            moved = everything.values[0].copy()
            moved[column] += sign * 1e-6
            write(x, moved)
            kernel()
            ends.append([read(o) for o in outs])
        for block, high, low in zip(blocks, *ends, strict=True):
            assert_allclose(block[..., column], (high - low) / 2e-6, rtol=rtol, atol=atol, err_msg=f"column {column}")
    everything.restore()


def many(n=MANY):
    return scalars(np.random.default_rng(0).uniform(0.2, 1.0, n))


def test_a_serial_loop():
    x, y, z = many(), outputs(10), outputs(1)

    @ti.kernel
    def k():
        ti.loop_config(serialize=True)
        for i in range(10):
            acc = z[0]
            for j in range(MANY):
                acc += x[j] * x[(i + j) % MANY] * 0.01
            y[i] = acc
            z[0] = acc * 0.5 + x[i]

    check_columns(k, x, [y, z])


def test_a_sum_that_all_iterations_add_to():
    """A row of a local outside of a parallel loop is one for all threads, so its entries are added to atomically."""
    x, weights = many(), scalars(np.arange(1.0, 21.0))

    @ti.kernel
    def k() -> ti.f64:
        total = 0.0
        for i in weights:
            h = 0.0
            for j in range(MANY):
                h += x[j] * weights[i]
            total += h * h
        return total

    plan, values = Jacobian(k, x, mode="forward"), read(x)
    expected = np.full(MANY, 2 * values.sum() * (np.arange(1, 21) ** 2).sum())
    assert_allclose(plan(), expected, rtol=1e-12)
    (line,) = [line for line in plan.source.splitlines() if "partial * " in line]
    assert "] += partial * " in line  # threads on a CPU rarely meet


@pytest.fixture
def as_on_vulkan(monkeypatch):
    """Shadows are arrays of Taichi's, and threads have no number."""
    monkeypatch.setattr(backend, "is_host_arch", lambda: False)
    monkeypatch.setattr(backend, "stores_by_column", lambda: True)
    monkeypatch.setattr(backend, "thread_count", lambda: 0)


def test_a_part_of_scratch_memory_for_each_iteration(as_on_vulkan):
    x, y, z, w = many(), outputs(7), outputs(6, 4), outputs(5)
    moved = ti.field(ti.f64, shape=(4, 3), offset=(-2, 5))
    count = ti.field(ti.i32, shape=())
    count[None] = 5

    @ti.func
    def weighted(i):
        s = x[i]
        for j in range(3):
            s += x[(i * 11 + j * 37) % MANY] * s
        if s > 1.0:
            s *= 0.5
        return s

    @ti.kernel
    def k():
        for i in range(2, 7):
            y[i] = weighted(i) ** 2
        for i, j in ti.ndrange(6, 4):
            z[i, j] = weighted(i * 4 + j) + 1.0
        for i, j in moved:
            moved[i, j] = weighted((i + 2) * 3 + j) * 2.0
        for i in range(count[None]):  # in one thread
            w[i] = weighted(i) * x[1]

    check_columns(k, x, [y, z, moved, w])


@pytest.mark.sweep
@pytest.mark.cpu_only("threads have no numbers on Vulkan")
@pytest.mark.parametrize("block", [32, 512])
def test_rows_of_all_threads_of_a_gpu(as_on_vulkan, monkeypatch, block):
    """Loops that say how large a block is have as many parts of scratch memory as threads; too many run in order."""
    x, y, count = many(), outputs(9), ti.field(ti.i32, shape=())
    count[None] = 9

    @ti.kernel
    def k():
        ti.loop_config(block_dim=block)
        for i in range(count[None]):
            acc = x[i]
            for j in range(MANY):
                acc += x[j] * x[(i + j) % MANY]
            y[i] = acc * acc * 1e-3

    monkeypatch.setattr(backend, "block_size", lambda: 128)
    monkeypatch.setattr(backend, "thread_count", lambda: 256)
    check_columns(k, x, [y])
    plan = Jacobian(k, x, y)
    plan()
    assert f"{2 * block * MANY * 8} bytes" in plan.explain()
    monkeypatch.setattr(backend, "thread_count", lambda: 1 << 22)
    check_columns(k, x, [y])
    plan = Jacobian(k, x, y)
    plan()
    is_serial = block * (1 << 15) * MANY >= 1 << 31
    assert is_serial == ("too many numbers" in plan.explain())


LONG = 40
LONG_VALUES = np.random.default_rng(3).uniform(0.3, 1.2, LONG)


def text_of(kernel, x, y):
    """The emitted kernel without comments."""
    plan = Jacobian(kernel, x, y)
    plan()
    return re.sub(r"  # .*", "", plan.source)


def sums(n):
    """Accumulators in a loop over n parameters, within a parallel loop."""
    x, y = scalars(np.linspace(0.3, 1.2, n)), outputs(5)

    @ti.kernel
    def k():
        for i in y:
            a, b = 0.0, 1.0
            for j in range(n):
                a += x[j] * x[(j + i) % n]
                b += ti.sin(x[j] * i) * a
            y[i] = a * b

    return k, x, y


@pytest.mark.chosen_only("rows are chosen", "--tangents", "--chunk-size")
def test_no_first_value_runs():
    """The only vector of many numbers stands where it never runs: it says what type the memory has."""
    lines = text_of(*sums(LONG)).splitlines()
    vectors = [n for n, line in enumerate(lines) if "ti.Vector([0.0] * " in line]
    assert vectors
    for n in vectors:
        condition, name, _ = lines[n].replace(":", "=").split("=")
        assert condition.strip() == "if False"
        assert lines[n - 1].strip() == f"({name.strip()} := None)"


def test_sums_of_repeated_launches():
    """Scratch memory of the kernel itself is cleared in each launch, not once."""
    x, y = scalars(LONG_VALUES), outputs(1)

    @ti.kernel
    def k():
        s = 0.0
        for j in x:
            s += x[j] ** 2
        y[0] = s * x[0]

    plan = Jacobian(k, x, y)
    first = np.array(plan())
    assert_array_equal(plan(), first)
    expected = 2 * LONG_VALUES * LONG_VALUES[0]
    expected[0] += (LONG_VALUES**2).sum()
    assert_allclose(first[0], expected, rtol=1e-12)


@pytest.mark.cpu_only("a GPU has no serial loops of the kernel itself")
@pytest.mark.chosen_only("loops over columns are chosen", "--tangents", "--by-column", "--chunk-size")
def test_columns_of_the_kernel_itself_are_no_parallel_loops():
    x, y = scalars(LONG_VALUES), outputs(2)

    @ti.kernel
    def k():
        s = x[0]
        for j in range(LONG):
            s += x[j] * x[(j + 1) % LONG]
        y[0] = s * x[2]
        y[1] = s + x[3]

    own = [line for line in text_of(k, x, y).splitlines() if re.match(r" {8}(for|while) ", line)]
    assert sum(line.startswith("        for ") for line in own) <= 2  # the user's, and its entries
    assert any(line.startswith("        while ") for line in own)


# Taichi's small decompositions and solvers, in two and three dimensions.


GENERAL = {2: [[1.3, 0.4], [-0.2, 0.9]], 3: [[1.3, 0.4, -0.2], [-0.2, 0.9, 0.5], [0.3, -0.6, 1.8]]}
SYMMETRIC = {2: [[1.3, 0.4], [0.4, 0.2]], 3: [[1.3, 0.4, -0.2], [0.4, 0.2, 0.5], [-0.2, 0.5, 2.1]]}
SIZES = pytest.mark.parametrize("n", [2, 3])
ITERATIVE = {"step": 1e-5, "rtol": 1e-5, "atol": 1e-7}  # Taichi's iterations stop at some 1e-10


@pytest.mark.mostly_sweep("2")
@SIZES
def test_svd(n):
    x, u, s, v = matrices([GENERAL[n]]), *(matrix_outputs(n, n, 1) for _ in range(3))
    k = kernel_of("u[0], s[0], v[0] = ti.svd(x[0])", u=u, s=s, v=v, x=x)
    check_jacobian(k, x, [u, s, v], **ITERATIVE)


def polar_of_identity(n):
    """d R and d P by A at A = 1 for A = R P: the antisymmetric and the symmetric part."""
    shape = (1, n, n, 1, n, n)
    identity = np.einsum("ik,jl->ijkl", np.eye(n), np.eye(n))
    flipped = np.einsum("il,jk->ijkl", np.eye(n), np.eye(n))
    return (identity - flipped).reshape(shape) / 2, (identity + flipped).reshape(shape) / 2


@pytest.mark.mostly_sweep("2", "3")
@SIZES
def test_polar_decompose(n):
    x, r, p = matrices([GENERAL[n]]), matrix_outputs(n, n, 1), matrix_outputs(n, n, 1)
    k = kernel_of("r[0], p[0] = ti.polar_decompose(x[0])", r=r, p=p, x=x)
    check_jacobian(k, x, [r, p], **ITERATIVE)
    x.from_numpy(np.eye(n)[None])
    rotation, stretch = polar_of_identity(n)
    check_jacobian(k, x, [r, p], expected=[[rotation], [stretch]], atol=1e-7)


@pytest.mark.mostly_sweep("3")
@SIZES
def test_sym_eig(n):
    x, values, q = matrices([SYMMETRIC[n]]), vector_outputs(n, 1), matrix_outputs(n, n, 1)
    k = kernel_of("a = (x[0] + x[0].transpose()) * 0.5; values[0], q[0] = ti.sym_eig(a)", x=x, values=values, q=q)
    check_jacobian(k, x, [values, q], **ITERATIVE)


@pytest.mark.sweep
def test_eig():
    """Complex eigenvalues and eigenvectors of a general 2 x 2 matrix."""
    for values in ([[1.3, 0.4], [0.2, 0.5]], [[0.3, 0.9], [-0.7, 0.5]]):
        x, y, w = matrices([values]), matrix_outputs(2, 2, 1), vector_outputs(4, 2)

        @ti.kernel
        def k():
            e, vectors = ti.eig(x[0])
            y[0] = e
            w[0] = vectors[:, 0]
            w[1] = vectors[:, 1]

        check_jacobian(k, x, [y, w])


@pytest.mark.mostly_sweep("2")
@SIZES
def test_solve(n):
    x, b, y = matrices([GENERAL[n]]), vectors([[0.3, 0.8, -0.5][:n]]), vector_outputs(n, 2)

    @ti.kernel
    def k():
        y[0] = ti.solve(x[0], b[0])
        if ti.static(n == 2):
            y[1] = ti.solve(x[0] @ x[0], y[0] * b[0].x) + ti.solve(x[0], ti.Vector.one(ti.f64, n))

    check_jacobian(k, [x, b], y)
    check_jacobian(k, b, y)


def test_other_sizes_are_taichis_own_errors():
    x, y = matrices([np.eye(4)]), outputs(1)
    k = kernel_of("_u, s, _v = ti.svd(x[0]); y[0] = s[0, 0]", x=x, y=y)
    with pytest.raises(ti.TaichiCompilationError, match="2 and 3 rows|2D and 3D"):
        jacobian(k, x, y)
