"""Hessians whose elements' blocks are made positive semidefinite: beside eigenvalues of each block by NumPy."""

import numpy as np
import pytest
import taichi as ti
from differences import integers, outputs, read, scalars, vectors, write
from kernel_texts import kernel_of
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import Hessian, InvalidArgumentError, UnsupportedError, hessian, value_gradient_and_hessian
from taichi_ext.api.runs import sparse_form
from taichi_ext.runtime.sparse.matrices import positive_factors

pytestmark = pytest.mark.usefixtures("ti64")


def projected(block, way):
    values, vectors_ = np.linalg.eigh(block)
    values = np.abs(values) if way == "abs" else np.maximum(values, 0)
    return vectors_ @ np.diag(values) @ vectors_.T


def test_terms_that_are_added_by_atomic_functions():
    """As statements ``ti.atomic_add`` and ``ti.atomic_sub`` are ``+=`` and ``-=``, for locals, too."""
    x, energy = scalars([-0.5, 0.8]), scalars(0.0)
    text = "for i in range(2): term = 0.0; ti.atomic_add(term, x[i] ** 3); ti.atomic_sub(energy[None], -term)"
    run = kernel_of(text, x=x, energy=energy)
    value, gradient, H = value_gradient_and_hessian(run, x, energy, format="csr", project="clamp")
    assert_allclose(value, 0.387, rtol=1e-12)
    assert_allclose(gradient, [0.75, 1.92], rtol=1e-12)
    assert_allclose(H.toarray(), np.diag([0.0, 4.8]), rtol=1e-12)


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
    computed = kernel_of("for i in range(4): energy[None] += x[i].dot(x[(i + 1) % 4])", energy=energy, x=x)
    named = kernel_of("for i in range(4): j = (i + 1) % 4; energy[None] += x[i].dot(x[j])", energy=energy, x=x)
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
