"""Hessians whose elements' blocks are made positive semidefinite: beside eigenvalues of each block by NumPy."""

import numpy as np
import pytest
import taichi as ti
from differences import integers, outputs, read, scalars, vectors, write
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import Hessian, InvalidArgumentError, UnsupportedError, hessian, value_gradient_and_hessian
from taichi_ext.api.runs import sparse_form
from taichi_ext.runtime.sparse.matrices import positive_factors

pytestmark = pytest.mark.usefixtures("ti64")

ROUNDING = 4500  # units in the last place, 1e-12 in float64


def projected(block, way):
    values, vectors_ = np.linalg.eigh(block)
    values = np.abs(values) if way == "abs" else np.maximum(values, 0)
    return vectors_ @ np.diag(values) @ vectors_.T


def chain(points, rest):
    """Springs between neighbours, most of them pressed: their blocks have negative eigenvalues."""
    x, energy = vectors(points), scalars(0.0)
    n = len(points)

    @ti.kernel
    def run():
        for i in range(n - 1):
            energy[None] += ((x[i + 1] - x[i]).norm() - rest) ** 2

    expected = np.zeros((n, 3, n, 3))
    blocks = []
    for i in range(n - 1):
        d = points[i + 1] - points[i]
        length = np.linalg.norm(d)
        nn = np.outer(d, d) / length**2
        block = 2 * ((1 - rest / length) * (np.eye(3) - nn) + nn)
        blocks.append(np.block([[block, -block], [-block, block]]))
    return run, x, energy, blocks, expected


def test_terms_that_are_added_by_atomic_functions():
    """As statements ``ti.atomic_add`` and ``ti.atomic_sub`` are ``+=`` and ``-=``, for locals, too."""
    x, energy = scalars([-0.5, 0.8]), scalars(0.0)

    @ti.kernel
    def run():
        for i in range(2):
            term = 0.0
            ti.atomic_add(term, x[i] ** 3)
            ti.atomic_sub(energy[None], -term)

    value, gradient, H = value_gradient_and_hessian(run, x, energy, format="csr", project="clamp")
    assert_allclose(value, 0.387, rtol=1e-12)
    assert_allclose(gradient, [0.75, 1.92], rtol=1e-12)
    assert_allclose(H.toarray(), np.diag([0.0, 4.8]), rtol=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["clamp", "abs"])
def test_springs_that_are_pressed(way):
    rng = np.random.default_rng(3)
    run, x, energy, blocks, expected = chain(rng.normal(size=(7, 3)), 2.0)
    for i, block in enumerate(blocks):
        part = projected(block, way).reshape(2, 3, 2, 3)
        expected[i : i + 2, :, i : i + 2] += part
    value, gradient, H = value_gradient_and_hessian(run, x, energy, format="csr", project=way)
    assert_allclose(H.toarray(), expected.reshape(21, 21), rtol=1e-10, atol=1e-10)
    assert_array_equal(H.toarray(), H.T.toarray())
    assert np.linalg.eigvalsh(H.toarray())[0] >= -ROUNDING * np.finfo(H.dtype).eps * np.abs(H.data).max()
    write(energy, 0.0)
    plain = value_gradient_and_hessian(run, x, energy, format="csr")
    assert_array_equal(gradient, plain[1])
    assert value == plain[0]


@pytest.mark.sweep
def test_on_demand_changes_nothing_that_is_definite(monkeypatch):
    rng = np.random.default_rng(3)
    x, energy = vectors(rng.normal(size=(5, 2))), scalars(0.0)
    weight = scalars(0.0)

    @ti.kernel
    def run():
        for i in range(5):
            energy[None] += 4 * x[i].norm_sqr()
        for i in range(4):
            energy[None] += weight[None] * x[i][0] * x[i + 1][1]

    plan = Hessian(run, x, energy, format="csr", project="on_demand")
    for w in (0.5, 100.0):  # definite as a whole, although the blocks of the second sum are not; and not
        write(weight, w)
        plain = hessian(run, x, energy, format="csr").toarray()
        found = plan().toarray()
        if w < 1:
            assert_array_equal(found, plain)
        else:
            assert np.linalg.eigvalsh(plain)[0] < 0
            clamped = hessian(run, x, energy, format="csr", project="clamp").toarray()
            assert_array_equal(found, clamped)
            assert np.linalg.eigvalsh(found)[0] > 0
    write(weight, 0.0)  # no block is indefinite: H is not factorised
    monkeypatch.setattr(sparse_form, "positive_factors", lambda H: pytest.fail("H is factorised"))
    assert_array_equal(plan().toarray(), hessian(run, x, energy, format="csr").toarray())


@pytest.mark.sweep
def test_several_parameters_in_one_block():
    """The block of an element holds entries of all params."""
    rng = np.random.default_rng(3)
    x, y, energy = scalars(rng.normal(size=4)), vectors(rng.normal(size=(4, 2))), scalars(0.0)

    @ti.kernel
    def run(k: ti.f64):
        for i in range(4):
            energy[None] += ti.sin(x[i] * y[i][0]) * k - x[i] ** 2 + y[i].norm_sqr() * x[(i + 1) % 4]

    def matrix(project):
        H = hessian(run, [x, y, "k"], energy, args=(0.7,), format="csr", project=project)
        return np.block([[b.toarray() for b in row] for row in H])

    plain, found = matrix(None), matrix("clamp")
    assert_array_equal(found, found.T)
    assert np.linalg.eigvalsh(plain)[0] < -1
    assert np.linalg.eigvalsh(found)[0] >= -ROUNDING * np.finfo(found.dtype).eps * np.abs(found).max()
    expected = np.zeros((13, 13))  # element by element
    for i in range(4):
        numbers = [i, 4 + 2 * i, 5 + 2 * i, (i + 1) % 4, 12]
        a, b, k = read(x)[i], read(y)[i, 0], 0.7
        s, c = np.sin(a * b), np.cos(a * b)
        block, (p, q0, q1) = np.zeros((5, 5)), (0, 1, 2)
        block[p, p], block[q0, q0], block[p, q0] = -s * b * b * k - 2, -s * a * a * k, (c - s * a * b) * k
        block[p, 4], block[q0, 4] = c * b, c * a
        next_x = read(x)[(i + 1) % 4]
        block[q0, q0] += 2 * next_x
        block[q1, q1] = 2 * next_x
        block[q0, 3], block[q1, 3] = 2 * b, 2 * read(y)[i, 1]
        block = np.triu(block) + np.triu(block, 1).T
        expected[np.ix_(numbers, numbers)] += projected(block, "clamp")
    assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_contacts_that_are_not_there():
    """Slots that no iteration fills hold whatever was in memory."""
    x, energy = scalars([0.0, 0.1, 0.15, 0.9, 1.0]), scalars(0.0)

    @ti.kernel
    def run():
        for i, j in ti.ndrange(5, 5):
            if i < j:
                d = x[j] - x[i]
                if d < 0.2:
                    energy[None] += -((0.2 - d) ** 3) * d

    plan = Hessian(run, x, energy, format="csr", project="clamp")
    for start in ([0.0, 0.1, 0.15, 0.9, 1.0], [0.0, 0.5, 0.7, 0.9, 0.99]):
        write(x, start)
        H = plan().toarray()
        assert np.isfinite(H).all()
        assert np.linalg.eigvalsh(H)[0] >= -1e-12


def test_bad_input():
    x, u, energy = scalars([0.4, 0.7]), outputs(2), scalars(0.0)

    @ti.kernel
    def run():
        for i in range(2):
            u[i] = x[i] ** 2
        for i in range(2):
            energy[None] += u[i] * u[0]

    with pytest.raises(InvalidArgumentError, match="project='clamp' changes the blocks of elements"):
        hessian(run, x, energy, project="clamp")
    with pytest.raises(InvalidArgumentError, match="project is 'eigen'; expected one of 'clamp', 'abs'"):
        hessian(run, x, energy, format="csr", project="eigen")
    with pytest.raises(UnsupportedError, match="project='clamp' needs an energy that is a sum of terms"):
        hessian(run, x, energy, format="csr", project="clamp")
    assert read(energy) == 0
    assert_array_equal(read(u), [0, 0])


def test_factors_tell_definite_matrices():
    rng = np.random.default_rng(3)
    import scipy.sparse

    for eigenvalues in ([1.0, 2.0, 3.0], [1.0, -1e-3, 2.0], [-1.0, -2.0, -3.0], [1.0, 0.0, 2.0], [1.0, 1.0, -5.0]):
        vectors_ = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        matrix = scipy.sparse.csr_array(vectors_ @ np.diag(eigenvalues) @ vectors_.T)
        factors = positive_factors(matrix)
        if min(eigenvalues) > 0:
            assert_allclose(factors.solve(np.ones(3)), np.linalg.solve(matrix.toarray(), np.ones(3)), rtol=1e-12)
        elif min(eigenvalues) < 0:
            assert factors is None
    assert positive_factors(scipy.sparse.csr_array([[0.0, 1.0], [1.0, 0.0]])) is None


def test_computed_indices():
    rng = np.random.default_rng(3)
    x, energy = vectors(rng.normal(size=(4, 2))), scalars(0.0)

    @ti.kernel
    def computed():
        for i in range(4):
            energy[None] += x[i].dot(x[(i + 1) % 4])

    @ti.kernel
    def named():
        for i in range(4):
            j = (i + 1) % 4
            energy[None] += x[i].dot(x[j])

    ring = np.eye(4) + 0.5 * (np.roll(np.eye(4), 1, 0) + np.roll(np.eye(4), -1, 0))  # [[0, 1], [1, 0]] becomes halves
    for kernel in (computed, named):
        H = hessian(kernel, x, energy, format="csr", project="clamp").toarray()
        assert_allclose(H, np.kron(ring, np.eye(2)), rtol=1e-14, atol=1e-14)


def test_vertices_that_an_element_names_twice():
    """The block of x[j]^3 - 2 x[i] x[j] is that of i and j, by whatever names; with three, it was another one."""
    values, ends = np.array([0.3, 0.9, 1.4]), np.array([[0, 1], [1, 2], [2, 2]])
    x, energy, edges = scalars(values), scalars(0.0), integers(np.c_[ends, ends[:, 1]])

    @ti.kernel
    def named_twice():
        for e in range(3):
            j, k = edges[e, 1], edges[e, 2]
            energy[None] += x[j] * x[j] * x[k] - 2 * x[edges[e, 0]] * x[k]

    for way in ("clamp", "abs"):
        expected = np.zeros((3, 3))
        for i, j in ends:
            block = np.zeros((3, 3))
            block[j, j] = 6 * values[j]
            block[i, j] -= 2
            block[j, i] -= 2
            expected += projected(block, way)
        H = hessian(named_twice, x, energy, format="csr", project=way).toarray()
        assert_allclose(H, expected, rtol=1e-13, atol=1e-13)
