"""Operations on sparse matrices with known patterns: against dense NumPy arrays."""

import itertools

import numpy as np
import pytest
import scipy.sparse
import taichi as ti
from differences import integers, outputs, scalars
from kernel_texts import kernel_of
from taichi_program import initialise
from test_sparse import random, require_equal

from taichi_ext import Jacobian
from taichi_ext.runtime.sparse import matrices as sparse_matrices
from taichi_ext.runtime.sparse.matrices import Arithmetic, Matrix, Pattern


def pattern_of(seed, shape, density=0.3):
    found = scipy.sparse.random_array(shape, density=density, rng=np.random.default_rng(seed), format="csr")
    found.sort_indices()
    return Pattern(found.indptr, found.indices, shape)


def numbers(pattern, seed, zeros=0.0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    data = rng.standard_normal(len(pattern.indices)) * (rng.random(len(pattern.indices)) >= zeros)
    return Matrix(pattern, data.astype(dtype))


def require_matrix(found, wanted, structure):
    """The values of a dense matrix, in canonical form, with the entries of the structure and no others."""
    view = found.csr()
    assert scipy.sparse.csr_array((view.data, view.indices, view.indptr), shape=view.shape).has_canonical_format
    np.testing.assert_allclose(view.toarray(), wanted, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(found.pattern.ones().toarray() > 0, structure)


def dense(matrix):
    return matrix.view().toarray()


def structure(*matrices):
    return [m.pattern.ones().toarray() > 0 for m in matrices]


@pytest.mark.parametrize("zeros", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("few", [sparse_matrices.FEW_TERMS, -1])
def test_operations(zeros, few, monkeypatch):
    """Entries that happen to be zero stay in, the first time and with known patterns; other patterns are others."""
    monkeypatch.setattr(sparse_matrices, "FEW_TERMS", few)
    arithmetic = Arithmetic()
    patterns = [(pattern_of(n, (6, 9)), pattern_of(n + 10, (9, 7)), pattern_of(n + 20, (6, 7))) for n in (0, 1)]
    for seed, which in enumerate((0, 0, 1, 0, 1, 1, 0)):
        arithmetic.begin()
        a, b, c = (numbers(p, 3 * seed + n, zeros) for n, p in enumerate(patterns[which]))
        in_a, in_b, in_c = structure(a, b, c)
        product = arithmetic.product(a, b)
        in_product = in_a.astype(int) @ in_b > 0
        require_matrix(product, dense(a) @ dense(b), in_product)
        total = arithmetic.total([product, c, product])
        require_matrix(total, 2 * dense(a) @ dense(b) + dense(c), in_product | in_c)
        rest = arithmetic.without_rows(total, np.array([1, 4]))
        keep = np.ones((6, 1), bool)
        keep[[1, 4]] = False
        require_matrix(rest, np.where(keep, dense(total), 0), (in_product | in_c) & keep)
        assert arithmetic.without_rows(total, np.arange(6)) is None
        assert arithmetic.without_rows(total, np.zeros(0, int)) is total


def test_sums_that_cancel_and_types():
    arithmetic = Arithmetic()
    a = Matrix(Pattern(np.array([0, 2]), np.array([0, 1]), (1, 2)), np.array([1.0, 1.0], np.float32))
    b = Matrix(Pattern(np.array([0, 2, 4]), np.array([0, 2, 0, 2]), (2, 3)), np.array([1, 2, -1, 5], np.float32))
    for _ in range(2):
        product = arithmetic.product(a, b)
        assert product.data.tolist() == [0.0, 7.0]
        assert product.data.dtype == arithmetic.total([product, product]).data.dtype == np.float32


@pytest.mark.parametrize("shape", [(0, 4, 3), (3, 0, 2), (3, 4, 0), (1, 1, 1), (5, 1, 5)])
def test_products_of_few_terms(shape):
    """Also of matrices without rows, columns or entries; against SciPy, entry by entry."""
    n, m, k = shape
    for density in (0.0, 0.3, 1.0):
        a, b = numbers(pattern_of(3, (n, m), density), 1), numbers(pattern_of(4, (m, k), density), 2)
        found = Arithmetic().product(a, b)
        wanted = a.pattern.ones() @ b.pattern.ones()
        wanted.sort_indices()
        np.testing.assert_array_equal(found.pattern.indptr, wanted.indptr)
        np.testing.assert_array_equal(found.pattern.indices, wanted.indices)
        np.testing.assert_allclose(found.view().toarray(), dense(a) @ dense(b), rtol=1e-14)
        assert found.data.dtype == np.float64


def test_patterns_that_are_not_used_go():
    arithmetic, b = Arithmetic(), pattern_of(1, (5, 5))
    for seed in range(6):
        arithmetic.begin()
        arithmetic.product(numbers(pattern_of(seed, (4, 5)), seed), numbers(b, seed))
        assert len(arithmetic._known) <= 2


def test_entries_that_are_not_zero():
    """The pattern is that of the call before where the same entries are zero, and another one where others are."""
    arithmetic, pattern = Arithmetic(), pattern_of(0, (7, 9))
    patterns = []
    for seed, zeros in ((0, 0.5), (0, 0.5), (1, 0.5), (1, 0.0), (1, 1.0), (0, 0.5), (2, 0.2)):
        arithmetic.begin()
        matrix = numbers(pattern, seed, zeros)
        found = arithmetic.without_zeros(pattern, matrix.data)
        wanted = matrix.csr().copy()
        wanted.eliminate_zeros()
        require_matrix(found, dense(matrix), wanted.astype(bool).toarray())
        assert not np.shares_memory(found.data, matrix.data)
        patterns.append(found.pattern)
    assert [a is b for a, b in itertools.pairwise(patterns)] == [True, False, False, False, False, False]
    nan = np.full(len(pattern.indices), np.nan)
    assert arithmetic.without_zeros(pattern, nan).nnz == len(nan)


def test_results_do_not_share_memory_with_users():
    arithmetic = Arithmetic()
    a, b = numbers(pattern_of(0, (4, 5)), 0), numbers(pattern_of(1, (5, 3)), 1)
    wanted = dense(a) @ dense(b)
    for _ in range(3):
        found = arithmetic.product(a, b).csr()
        np.testing.assert_allclose(found.toarray(), wanted)
        found.indices[:], found.indptr[:], found.data[:] = 0, 0, 7


def test_no_more_memory_is_kept_than_allowed(monkeypatch):
    monkeypatch.setattr(sparse_matrices, "MOST_KEPT", 300)
    arithmetic = Arithmetic()
    a, b, c = numbers(pattern_of(0, (9, 9)), 0), numbers(pattern_of(1, (9, 9)), 1), numbers(pattern_of(2, (9, 1)), 1)
    for _ in range(2):
        for right in (b, c):
            np.testing.assert_allclose(dense(arithmetic.product(a, right)), dense(a) @ dense(right), atol=1e-14)
    assert len(arithmetic._known) == 1


@pytest.mark.sweep
@pytest.mark.double_only("differences in float64")
def test_intermediate_fields_whose_integers_change():
    """Stages over fields in between; J is right where some, all or none of the patterns are those of the call before."""
    initialise(default_fp=ti.f64)
    x, h, y, first = scalars(random(40)), outputs(30), outputs(12), integers(np.zeros((30, 3)))
    second = integers([0] * 12)
    inner = kernel_of(
        "for i in h: h[i] = x[first[i, 0]] * ti.max(x[first[i, 1]], 0.5) + x[first[i, 2]]", h=h, x=x, first=first
    )
    outer = kernel_of(
        "for i in y: y[i] = h[second[i]] * h[(second[i] + 1) % 30] - h[second[i]] ** 2", y=y, h=h, second=second
    )
    run = lambda: (inner(), outer(), outer_again())
    outer_again = kernel_of("for i in range(6): y[2 * i] += h[i] * x[i]", y=y, h=h, x=x)
    plan = Jacobian(run, [x], [y, h], format="csr")
    rng = np.random.default_rng(0)
    for change in ((first, second), (), (first,), (second,), (), (second,)):
        for field in change:
            field.from_numpy(rng.integers(0, 40 if field is first else 30, field.shape).astype(np.int32))
        x.from_numpy(rng.random(40))
        require_equal(plan(), run, [x], [y, h])
    assert not plan._prepared.sparse.dense_reason
