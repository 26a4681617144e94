"""Sparse Hessians: beside dense ones, which are tested with differences, closed forms and JAX."""

import itertools

import numpy as np
import pytest
import scipy.sparse
import taichi as ti
from differences import as_list, outputs, read, scalars, vector_outputs, vectors, write
from energies import energy_of_every_kind_of_parameter
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal
from program_rows import rows_of

from taichi_ext import Hessian, InvalidArgumentError, hessian, hvp, value_gradient_and_hessian

pytestmark = pytest.mark.usefixtures("ti64")

stiffness = 1.5


def integers(values):
    values = np.asarray(values, np.int32)
    shape, n = (values.shape, None) if values.ndim == 1 else (values.shape[:1], values.shape[1])
    field = ti.field(ti.i32, shape) if n is None else ti.Vector.field(n, ti.i32, shape)
    field.from_numpy(values)
    return field


def matrix_of(H):
    """Nested sparse or dense blocks, those of pairs of params, as one dense matrix."""
    if not isinstance(H, (list, tuple)):
        H = [[H]]
    if all(scipy.sparse.issparse(b) for row in H for b in row):
        return np.block([[b.toarray() for b in row] for row in H])
    sizes = [int(np.sqrt(H[n][n].size)) for n in range(len(H))]
    return np.block(
        [[b.reshape(m, n) for b, n in zip(row, sizes, strict=True)] for row, m in zip(H, sizes, strict=True)]
    )


def require_like_dense(kernel, params, energy=None, args=(), *, is_sparse=True):
    """The same energy, gradient and Hessian as without ``format=``, in new and in repeated calls."""

    def clear():
        if energy is not None:
            write(energy, np.zeros_like(read(energy)))

    clear()
    value, gradient, dense = value_gradient_and_hessian(kernel, params, energy, args=args)
    expected, scale = matrix_of(dense), max(1.0, np.abs(matrix_of(dense)).max())
    plan = Hessian(kernel, params, energy, args=args, format="csr")
    for _ in range(2):
        clear()
        again, sparse_gradient, H = plan.value_gradient_and_hessian()
        found = matrix_of(H)
        assert_allclose(again, value, rtol=1e-13)
        for a, b in zip(as_list(sparse_gradient), as_list(gradient), strict=True):
            assert a.shape == b.shape
            assert_allclose(a, b, rtol=1e-12, atol=1e-12 * scale)
        assert_array_equal(found, found.T)
        assert_allclose(found, expected, rtol=1e-12, atol=1e-12 * scale)
    assert is_sparse == ("J is computed dense" not in plan.explain()), plan.explain()
    return plan


def test_springs():
    rng = np.random.default_rng(11)
    x, energy = vectors(rng.normal(size=(40, 3))), scalars(0.0)
    pairs = integers([rng.choice(40, 2, replace=False) for _ in range(100)])

    @ti.kernel
    def springs():
        for s in pairs:
            i, j = pairs[s]
            energy[None] += 0.5 * stiffness * ((x[i] - x[j]).norm() - 0.4) ** 2

    plan = require_like_dense(springs, x, energy)
    assert "36 with respect to" in plan.explain()  # the block of a spring, and no row of all columns
    ((site,),) = (fused.sites for fused in plan._prepared.fused.values())
    pairs_of_points = [(site.rows[e.part].terms, e.column.terms) for e in site.groups[0].entries]
    runs = [len(list(run)) for _, run in itertools.groupby(pairs_of_points)]
    assert runs == [9, 9, 9, 9]  # the numbers of two points lie together, as they do in H


@pytest.mark.sweep
def test_energies_that_are_stored_from_themselves():
    """``energy = 1 / energy``: the gradient so far is a part of the tangent that is stored."""
    x, scale, energy = scalars([0.9, 1.3, 0.6, 1.1]), scalars(1.2), scalars(0.0)

    @ti.kernel
    def inverse():
        for i in x:
            energy[None] += x[i] ** 2
        energy[None] = 1 / energy[None]

    @ti.kernel
    def in_turns():
        energy[None] = scale[None] * x[0]
        for _ in range(1):
            for i in range(4):
                energy[None] = energy[None] * x[i] + x[i] ** 2
        if energy[None] > 0.5:
            energy[None] *= scale[None]
        for i in x:
            energy[None] += x[i] ** 3

    require_like_dense(inverse, x, energy)
    require_like_dense(in_turns, [x, scale], energy, is_sparse=False)
    write(energy, 0.0)
    H = hessian(inverse, x, energy)
    write(energy, 0.0)
    assert_allclose(hvp(inverse, x, np.eye(4), energy), H, rtol=1e-12)
    total = (read(x) ** 2).sum()
    assert_allclose(H, 8 * np.outer(read(x), read(x)) / total**3 - 2 * np.eye(4) / total**2, rtol=1e-12)


def test_contacts_whose_pairs_change():
    rng = np.random.default_rng(11)
    x, energy = scalars(np.linspace(0, 1, 9)), scalars(0.0)

    @ti.kernel
    def contacts():
        for i in range(9):
            for j in range(i):
                d = x[i] - x[j]
                if abs(d) < 0.3:
                    energy[None] += -((abs(d) - 0.3) ** 2) * ti.log(abs(d) / 0.3)

    counts = set()
    plan = Hessian(contacts, x, energy, format="csr")
    for scale in (1.0, 0.5, 1.7, 5.0):
        write(x, scale * np.sort(rng.uniform(size=9)))
        write(energy, 0.0)
        H = plan()
        counts.add(H.nnz)
        write(energy, 0.0)
        assert_allclose(H.toarray(), hessian(contacts, x, energy), rtol=1e-11, atol=1e-11 * np.abs(H).max())
        assert_array_equal(H.toarray(), H.T.toarray())
    assert len(counts) > 2


@pytest.mark.sweep
def test_every_kind_of_parameter():
    """Fields, a component, an array, an argument, a Python number; a returned energy."""
    run, x, v, array = energy_of_every_kind_of_parameter()
    params = [x, v.get_scalar_field(1), array, "w", "stiffness"]
    require_like_dense(run, params, args=(array, 0.7))


def test_energies_in_arrays_and_by_name():
    x, energy = np.array([0.4, 0.7, 1.1]), np.zeros(1)
    run = kernel_of("for i in range(3): e[0] += ti.sin(x[i]) * x[(i + 1) % 3]", "x: A1, e: A1")
    dense = hessian(run, x, energy, args=(x, energy))
    assert_allclose(hessian(run, "x", "e", args=(x, energy), format="csr").toarray(), dense, rtol=1e-14)


# Locals that are no sums of the energy, which what is added to them must not reach; energies that are stored over; fields between
# whose entries are stored twice, or after they are read, so that H is computed dense.
ENERGIES = rows_of("""
squared: x, energy = scalars(np.random.default_rng(11).uniform(0.3, 1, 6)), scalars(0.0) | x, energy
    for i in range(6):
        s = 0.0
        for k in range(2):
            s += x[i] * x[(i + k) % 6]
        energy[None] += s * s
read_twice: x, energy = scalars(np.random.default_rng(11).uniform(0.3, 1, 6)), scalars(0.0) | x, energy
    for i in range(6):
        s = x[i] ** 3
        for k in range(2):
            s += x[i] * x[(i + k) % 6]
        energy[None] += s + ti.sin(s)
left_early: x, energy = scalars(np.random.default_rng(11).uniform(0.3, 1, 6)), scalars(0.0) | x, energy
    for i in range(6):
        s = 0.0
        for k in range(3):
            s += x[i] * x[(i + k) % 6]
        if x[i] > 0.5:
            continue
        energy[None] += s
added_later: x, energy = scalars(np.random.default_rng(11).uniform(0.3, 1, 6)), scalars(0.0) | x, energy
    for i in range(6):
        s = x[i] ** 3
        s += x[i] ** 2
        energy[None] += s
        s += ti.sin(x[i])
in_a_branch: x, energy = scalars(np.random.default_rng(11).uniform(0.3, 1, 6)), scalars(0.0) | x, energy
    for i in range(6):
        s = 0.0
        for k in range(3):
            s += x[i] * x[(i + k) % 6]
        if x[i] > 0.5:
            energy[None] += s
replaced: x, energy = scalars(np.random.default_rng(11).uniform(0.3, 1, 6)), scalars(0.0) | x, energy
    for i in range(1):
        s = 0.0
        for k in range(6):
            s += x[k] ** 3
            if k == 2:
                s = x[0] * x[1]
        energy[None] += s
cleared: x, energy = scalars(np.random.default_rng(11).uniform(0.3, 1, 4)), scalars(0.0) | x, energy
    energy[None] = 7.0
    for i in range(4):
        energy[None] += x[i] ** 3 * x[0]
stored_over: x, energy = scalars(np.random.default_rng(11).uniform(0.3, 1, 4)), scalars(0.0) | x, energy
    energy[None] = x[0] ** 3
    energy[None] = x[1] ** 2 * x[2]
twice: x, u, energy = scalars(np.random.default_rng(11).uniform(0.3, 1, 5)), outputs(5), scalars(0.0) | x, energy, is_sparse=False
    for i in u:
        u[i] = x[i] ** 2
    for i in u:
        u[i] = u[i] * x[i]
    for i in u:
        energy[None] += u[i] ** 2
in_a_loop: x, u, energy = scalars(np.random.default_rng(11).uniform(0.3, 1, 5)), outputs(5), scalars(0.0) | x, energy, is_sparse=False
    for i in range(4):
        for k in range(3):
            u[i] = x[i] ** (k + 2)
            energy[None] += u[i] ** 2 * x[i + 1]
added_after: x, u, energy = scalars(np.random.default_rng(11).uniform(0.3, 1, 5)), outputs(5), scalars(0.0) | x, energy, is_sparse=False
    for i in u:
        u[i] = x[i] ** 2
    for i in range(4):
        energy[None] += u[i] * x[i + 1]
    for i in range(4):
        u[i] += x[i + 1] ** 3
    for i in u:
        energy[None] += u[i] ** 3
of_neighbours_inside: x, energy = scalars(np.random.default_rng(11).uniform(0.3, 1, 5)), scalars(0.0) | x, energy
    for i in range(5):
        before = ti.select(i > 0, x[i - 1], 0.5)
        energy[None] += (x[i] - before) ** 2 * x[i]
""")


@pytest.mark.mostly_sweep("of_neighbours_inside")
@pytest.mark.parametrize("name", ENERGIES)
def test_energies(name):
    kernel, (params, energy), more = ENERGIES[name].made()
    plan = require_like_dense(kernel, params, energy, **more)
    assert ("whose entries are stored twice, or after they are read" in plan.explain()) == bool(more)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:[\\s\\S]*is outside of:taichi_ext.DerivativeWarning")
def test_entries_outside_of_a_field_are_no_others_entries():
    rng = np.random.default_rng(11)
    x, energy, numbers = vectors(rng.uniform(0.3, 1, (5, 2))), scalars(0.0), integers([-1, 2, 4, 5])
    text = "for i in numbers: j = numbers[i]; energy[None] += (x[i][0] - x[j][1]) ** 2 + x[i].dot(x[j])"
    of_one = kernel_of(text, numbers=numbers, energy=energy, x=x)
    require_like_dense(of_one, x, energy)
    block = np.array([[2.0, 0, 1, -2], [0, 0, 0, 1], [1, 0, 0, 0], [-2, 1, 0, 2]])
    values, turns = np.linalg.eigh(block)
    expected = np.diag([2.0, 0, 0, 0, 0, 0, 2, 0, 0, 0])  # of pairs with an entry outside
    for i, j in ((1, 2), (2, 4)):
        own = np.ix_([2 * i, 2 * i + 1, 2 * j, 2 * j + 1], [2 * i, 2 * i + 1, 2 * j, 2 * j + 1])
        expected[own] += turns * np.maximum(values, 0) @ turns.T
    found = Hessian(of_one, x, energy, format="csr", project="clamp")()
    assert_allclose(found.toarray(), expected, atol=1e-12)


def test_energies_of_fields_that_the_same_kernel_computes():
    rng = np.random.default_rng(11)
    x, density, energy = vectors(rng.uniform(0.3, 1, (5, 2))), outputs(5), scalars(0.0)
    moved, unused = vector_outputs(2, 5), outputs(5)

    @ti.kernel
    def chain():
        for i in density:
            density[i] = 0.2
        for i in density:
            for j in range(5):
                if abs(i - j) <= 1:
                    density[i] += ti.exp(-(x[i] - x[j]).norm_sqr())
        for i in moved:
            moved[i] = x[i] * x[i][0] * density[i]
            unused[i] = x[i][1] ** 3
        for i in range(4):
            energy[None] += ti.log(density[i]) * moved[i].dot(moved[i + 1]) * x[i][1]

    text = "for i in range(4): density[i] = x[i].dot(x[i + 1]); energy[None] += ti.sin(density[i]) * x[i][0]"
    in_one_loop = kernel_of(text, density=density, x=x, energy=energy)
    for kernel in (chain, in_one_loop):
        plan = require_like_dense(kernel, x, energy)
        H = plan()
        write(x, read(x) * 1.1)  # with the same pattern
        assert_allclose(plan().toarray(), matrix_of(hessian(kernel, x, energy)), rtol=1e-12, atol=1e-12)
        assert plan().nnz == H.nnz and "two runs, since the energy is computed from" in plan.explain()


def kernels_that_read_what_they_stored(x, z, y, energy):
    """Energies of y, which is computed from z in the loop that stores z: by an entry, a local, at top level, by sums."""
    text = "by_entry: for i in range(3): z[i] = x[0] * x[i + 3]; y[i] = z[i] * x[i]; energy[None] += y[i] ** 2"
    by_entry = kernel_of(text, z=z, x=x, y=y, energy=energy)

    @ti.kernel
    def by_local():
        for i in range(3):
            z[i] = x[0] * x[i + 3]
            v = z[i] * 2
            for j in range(2):
                v = v * x[j] + z[i]
            if x[i] > 0.8:
                v = v * v
            y[i] = v * x[i]
            energy[None] += y[i] ** 2 * x[2]

    @ti.kernel
    def at_top_level():
        z[0] = x[0] * x[1]
        for i in range(3):
            y[i] = z[0] * x[i]
        for i in range(3):
            energy[None] += y[i] ** 2 * x[0]

    @ti.kernel
    def sums():
        for i in range(3):
            z[i] = 0.0
            y[i] = 0.0
        for i in range(3):
            z[i] += x[0] * x[i + 3]
            y[i] += z[i] * x[i]

    of_sums = kernel_of("for i in range(3): energy[None] += y[i] ** 2 * x[i]", energy=energy, y=y, x=x)

    def in_two_kernels():
        sums()
        of_sums()

    return {k.__name__: k for k in (by_entry, by_local, at_top_level, in_two_kernels)}


@pytest.mark.mostly_sweep("by_entry")
@pytest.mark.parametrize("name", ["by_entry", "by_local", "at_top_level", "in_two_kernels"])
def test_energies_of_fields_that_one_loop_computes_from_each_other(name):
    """H was wrong: the adjoint of z lacked its part through y."""
    x, energy = scalars(np.random.default_rng(11).uniform(0.3, 1.7, 6)), scalars(0.0)
    kernel = kernels_that_read_what_they_stored(x, outputs(3), outputs(3), energy)[name]
    plan = require_like_dense(kernel, x, energy, is_sparse=False)
    assert "another field that the same loop stores" in plan.explain()


def test_formats_and_out():
    rng = np.random.default_rng(11)
    torch = pytest.importorskip("torch")
    x, energy = vectors(rng.normal(size=(4, 3))), scalars(0.0)
    run = kernel_of("for i in range(3): energy[None] += (x[i] - x[i + 1]).norm()", energy=energy, x=x)
    H = hessian(run, x, energy, format="csr")
    for kind in ("coo", "bsr"):
        found = hessian(run, x, energy, format=kind)
        assert found.format == kind
        assert_array_equal(found.toarray(), H.toarray())
    assert hessian(run, x, energy, format="bsr").blocksize == (3, 3)
    given = H.copy()
    given.data[:] = np.nan
    assert hessian(run, x, energy, format="csr", out=given) is given
    assert_array_equal(given.toarray(), H.toarray())
    with pytest.raises(InvalidArgumentError, match="shape"):
        hessian(run, x, energy, format="csr", out=scipy.sparse.csr_array((3, 3)))
    with pytest.raises(InvalidArgumentError, match="field x .* is not a torch tensor"):
        hessian(run, x, energy, format="torch_csr")
    of_tensors = kernel_of("for i in range(3): e[0] += p[i] ** 2 * p[i + 1]", "p: A1, e: A1")
    p, e = torch.arange(1.0, 5.0, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    dense = hessian(of_tensors, p, e, args=(p, e))
    for kind in ("torch_csr", "torch_coo"):
        found = hessian(of_tensors, p, e, args=(p, e), format=kind)
        assert_array_equal(found.to_dense().numpy(), dense.numpy())


def test_bad_input():
    x, y = scalars([0.4, 0.7]), outputs(2)
    run = kernel_of("for i in range(2): y[i] += x[i] ** 2", y=y, x=x)
    before = read(y)
    with pytest.raises(InvalidArgumentError, match="one number"):
        hessian(run, x, y, format="csr")
    with pytest.raises(InvalidArgumentError, match="format is 'lil'"):
        hessian(run, x, y, format="lil")
    assert_array_equal(read(y), before)


@pytest.mark.sweep
def test_state_is_that_of_one_run():
    """Counters of loops over lists make the kernel run again where there was too little room."""
    rng = np.random.default_rng(11)
    x, energy, count = scalars(rng.uniform(0.3, 1, 8)), scalars(0.25), integers([0])
    length = integers([5])

    @ti.kernel
    def run():
        for i in range(4):
            for k in range(length[0]):
                if k != 2:
                    energy[None] += x[i] * x[(i + k) % 8] ** 2
            count[0] += 1

    plan = Hessian(run, x, energy, format="csr")
    for calls, n in enumerate((5, 7, 1), 1):
        write(energy, 0.25)
        length[0] = n
        value, gradient, H = plan.value_gradient_and_hessian()
        assert count[0] == 4 * calls
        write(energy, 0.25)
        expected = value_gradient_and_hessian(run, x, energy)
        count[0] = 4 * calls
        assert_allclose(value, expected[0], rtol=1e-14)
        assert_allclose(gradient, expected[1], rtol=1e-13, atol=1e-13)
        assert_allclose(H.toarray(), expected[2], rtol=1e-13, atol=1e-13)


def test_returned_energies_are_sums_of_terms():
    """Its local needs no row of all columns."""
    x = scalars(np.linspace(0.3, 1.0, 12))

    @ti.kernel
    def run() -> ti.f64:
        total = 0.0
        for i in range(11):
            total += (x[i + 1] - x[i]) ** 4
        return -(2.0 * total)

    plan = Hessian(run, x, format="csr")
    away = -24.0 * np.diff(read(x)) ** 2
    expected = np.diag(np.append(away, 0) + np.append(0, away)) - np.diag(away, 1) - np.diag(away, -1)
    assert_allclose(plan().toarray(), expected, rtol=1e-12)
    assert "all columns" not in plan.explain()
