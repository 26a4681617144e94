"""Functions of singular values and eigenvalues that are equal, or nearly, against their closed forms.

For Y = U f(S) V^T and W = U^T dA V, ``U^T dY V`` has the entries ``f[s_i, s_j] (w_ij + w_ji) / 2``, with the divided
difference f[s, s] = f'(s), plus ``(f(s_i) + f(s_j)) / (s_i + s_j) (w_ij - w_ji) / 2``; for Y = Q f(L) Q^T it has
``f[l_i, l_j] w_ij`` (Y. Daleckii and S. Krein, 1965; N. Higham, "Functions of Matrices", theorem 3.11).
"""

import numpy as np
import pytest
import taichi as ti
from differences import matrices, write
from kernel_texts import kernel_of
from numpy.testing import assert_allclose

from taichi_ext import DerivativeWarning, Hessian, Jacobian, jacobian

NAMES = ("same", "log", "clamp")
FUNCTIONS = {  # with their derivatives
    "same": (lambda s: s, lambda s: 1.0 + 0.0 * s),
    "log": (np.log, lambda s: 1.0 / s),
    "clamp": (lambda s: np.clip(s, 0.8, 1.5), lambda s: 1.0 * ((s > 0.8) & (s < 1.5))),
}
NODES, WEIGHTS = np.polynomial.legendre.leggauss(6)
GAPS = (0.0, 1e-16, 1e-13, 1e-10, 1e-8, 1e-7, 1e-6, 1e-4, 1e-3)
VALUES = [(1, 1, 1), (1, 1, 2), (2, 1, 1), (1.2, 0.9, 1.2), (0.9, 1.3, 1.1), (3, 3e-3, 3e-3)]
VALUES += [(1.1 * (1 + g), 1.1, 0.9) for g in GAPS] + [(1 + g, 1, 1 - g) for g in GAPS]


def divided(name, a, b):
    f, slope = FUNCTIONS[name]
    if abs(a - b) > 1e-2 * max(a, b):
        return (f(a) - f(b)) / (a - b)
    return np.dot(WEIGHTS, slope((a + b) / 2 + NODES * (a - b) / 2)) / 2  # the mean of the slope


def derivative_of_svd(A, name):
    (U, s, Vt), f = np.linalg.svd(A), FUNCTIONS[name][0]
    W = np.einsum("ki,jl->ijkl", U, Vt)  # of all directions at once
    even, odd = (W + W.swapaxes(0, 1)) / 2, (W - W.swapaxes(0, 1)) / 2
    differences = np.array([[divided(name, a, b) for b in s] for a in s])
    sums = (f(s)[:, None] + f(s)) / (s[:, None] + s)
    return np.einsum("ai,ijkl,jb->abkl", U, differences[..., None, None] * even + sums[..., None, None] * odd, Vt)


def derivative_of_eig(A, name):
    values, Q = np.linalg.eigh(A)
    differences = np.array([[divided(name, a, b) for b in values] for a in values])
    W = (np.einsum("ki,lj->ijkl", Q, Q) + np.einsum("li,kj->ijkl", Q, Q)) / 2
    return np.einsum("ai,ijkl,bj->abkl", Q, differences[..., None, None] * W, Q)


@ti.func
def applied(name: ti.template(), s):
    r = 1.0 * s
    if ti.static(name == "log"):
        r = ti.log(s)
    if ti.static(name == "clamp"):
        r = ti.math.clamp(s, 0.8, 1.5)  # a function with locals of its own, which hold the bounds
    return r


def rotations(n):
    rng = np.random.default_rng(n)
    found = [np.linalg.qr(rng.standard_normal((n, n)))[0] for _ in range(2)]
    return [q * np.append(np.ones(n - 1), np.linalg.det(q)) for q in found]


def kernels(n, dtype):
    """A, and kernels of f(A) with the outputs of each f."""
    A = ti.Matrix.field(n, n, dtype, ())
    svd, eig = ([ti.Matrix.field(n, n, dtype, ()) for _ in NAMES] for _ in range(2))

    @ti.kernel
    def of_svd():
        for _ in range(1):
            U, S, V = ti.svd(A[None])
            for k in ti.static(range(len(NAMES))):
                F = ti.Matrix.zero(dtype, n, n)
                for d in ti.static(range(n)):
                    F[d, d] = applied(NAMES[k], S[d, d])
                svd[k][None] = U @ F @ V.transpose()

    @ti.kernel
    def of_eig():
        for _ in range(1):
            L, Q = ti.sym_eig((A[None] + A[None].transpose()) * 0.5)
            for k in ti.static(range(len(NAMES))):
                total = ti.Matrix.zero(dtype, n, n)
                for d in range(n):  # an index that is only known at run time
                    q = ti.Vector.zero(dtype, n)
                    for i in ti.static(range(n)):
                        q[i] = Q[i, d]
                    total += applied(NAMES[k], L[d]) * q.outer_product(q)
                eig[k][None] = total

    return A, of_svd, svd, of_eig, eig


@pytest.mark.sweep
@pytest.mark.usefixtures("ti64")
@pytest.mark.parametrize("n", [2, 3])
def test_functions_near_ties(n):
    A, of_svd, svd, of_eig, eig = kernels(n, ti.f64)
    left, right = rotations(n)
    J_svd, J_eig = Jacobian(of_svd, A, svd), Jacobian(of_eig, A, eig)
    for values in VALUES:
        D = np.diag(values[:n]).astype(float)
        for M in (D, left @ D @ right.T):
            write(A, M)
            for name, J in zip(NAMES, J_svd(), strict=True):
                T = derivative_of_svd(M, name)
                # Taichi's svd of 2 x 2 matrices takes numbers below 1e-5 for 0
                assert_allclose(
                    J, T, atol=(2e-6 if n == 2 else 3e-7) * max(1.0, abs(T).max()), err_msg=f"{name} {values}"
                )
        for M in (D, left @ D @ left.T):
            M = (M + M.T) / 2
            write(A, M)
            for name, J in zip(NAMES, J_eig(), strict=True):
                T = derivative_of_eig(M, name)
                moved = (
                    2.0**-25 * max(values[:n]) / min(values[:n])
                )  # eigenvalues are moved by a part of the largest one
                assert_allclose(J, T, atol=max(3e-7, moved) * max(1.0, abs(T).max()), err_msg=f"{name} {values}")


@pytest.mark.usefixtures("ti64")
def test_functions_of_each_value_with_numbers_of_their_own():
    """Numbers that each turn of an unrolled loop reads again are the same for all values, unless the entries differ."""
    A, bounds = matrices([np.eye(2)]), ti.field(ti.f64, 2)
    same, apart = (ti.Matrix.field(2, 2, ti.f64, ()) for _ in range(2))
    write(bounds, np.array([1.6, 2.4]))

    @ti.kernel
    def k():
        for _ in range(1):
            U, S, V = ti.svd(A[0])
            F, G = ti.Matrix.zero(ti.f64, 2, 2), ti.Matrix.zero(ti.f64, 2, 2)
            place = 0
            for d in ti.static(range(2)):
                low, place = 0.5 * bounds[0], place + 1
                F[place - 1, d] = ti.math.clamp(S[d, d], low, 1.5)
                G[d, d] = S[d, d] * bounds[d]
            same[None] = U @ F @ V.transpose()
            apart[None] = U @ G @ V.transpose()

    with pytest.warns(DerivativeWarning, match="single vectors") as caught:
        J_same, J_apart = jacobian(k, A, [same, apart])
    assert ["apart[None]" in str(warning.message) for warning in caught] == [True]
    assert_allclose(J_same.reshape(4, 4), np.eye(4), atol=1e-7)
    assert np.isnan(J_apart).all()


@pytest.mark.mostly_sweep("2")
@pytest.mark.usefixtures("ti64")
@pytest.mark.parametrize("n", [2, 3])
def test_matrices_of_lower_rank(n):
    """U S V^T is A, and the sum of the squares of the singular values is that of the entries of A."""
    A, same, total = matrices([np.zeros((n, n))]), ti.Matrix.field(n, n, ti.f64, ()), ti.field(ti.f64, ())
    text = "U, S, V = ti.svd(A[0]); same[None] = U @ S @ V.transpose(); total[None] = S.norm_sqr()"
    k = kernel_of(text, A=A, same=same, total=total)
    for values in ((0.0, 0.0, 0.0), (2.0, 0.0, 0.0), (2.0, 0.7, 0.0), (1e-9, 0.0, 0.0)):
        left, right = rotations(n)
        M = left @ np.diag(values[:n]) @ right.T
        write(A, M[None])
        J = jacobian(k, A, [same, total])
        assert_allclose(J[0].reshape(n * n, n * n), np.eye(n * n), atol=1e-7)
        assert_allclose(J[1].reshape(n, n), 2 * M, atol=1e-7)


@pytest.mark.sweep
@pytest.mark.usefixtures("ti64")
@pytest.mark.parametrize("n", [2, 3])
def test_second_derivatives_near_ties(n, monkeypatch):
    """Of the sum of log(s)^2, and of the sum of the squares of eigenvalues minus their logarithms."""
    monkeypatch.setitem(FUNCTIONS, "hencky", (lambda s: 2 * np.log(s) / s, lambda s: 2 * (1 - np.log(s)) / s**2))
    monkeypatch.setitem(FUNCTIONS, "neo", (lambda s: 2 * s - 1 / s, lambda s: 2 + 1 / s**2))
    A, e_svd, e_eig = matrices([np.eye(n)]), ti.field(ti.f64, ()), ti.field(ti.f64, ())

    @ti.kernel
    def of_svd():
        _U, S, _V = ti.svd(A[0])
        total = 0.0
        for d in ti.static(range(n)):
            total += ti.log(S[d, d]) ** 2
        e_svd[None] = total

    @ti.kernel
    def of_eig():
        L, _Q = ti.sym_eig((A[0] + A[0].transpose()) * 0.5)
        total = 0.0
        for d in ti.static(range(n)):
            total += L[d] ** 2 - ti.log(L[d])
        e_eig[None] = total

    H_svd, H_eig = Hessian(of_svd, A, e_svd), Hessian(of_eig, A, e_eig)
    left, right = rotations(n)
    for values in ((1, 1, 1), (1.2, 1.2, 0.9), (1, 1 + 1e-9, 0.9), (1, 1 + 1e-5, 0.9), (0.9, 1, 1.3)):
        M = left @ np.diag(values[:n]) @ right.T
        write(A, M[None])
        assert_allclose(H_svd().reshape((n,) * 4), derivative_of_svd(M, "hencky"), atol=1e-4, err_msg=str(values))
        M = left @ np.diag(values[:n]) @ left.T
        M = (M + M.T) / 2
        write(A, M[None])
        assert_allclose(H_eig().reshape((n,) * 4), derivative_of_eig(M, "neo"), atol=1e-4, err_msg=str(values))


@pytest.mark.sweep
@pytest.mark.usefixtures("ti64")
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_rows_of_eigenvectors_by_the_adjoint(n):
    """Of the arguments of a decomposition at a point, the matrix alone moves; also between loops, at a tie."""
    A, x = ti.Matrix.field(n, n, ti.f64, ()), ti.field(ti.f64, shape=1)
    squares, logarithm = ti.field(ti.f64, shape=n), ti.Matrix.field(n, n, ti.f64, ())
    M = rotations(n)[0] @ np.diag([1.2, 1.2, 0.7][-n:]) @ rotations(n)[0].T
    write(A, (M + M.T) / 2)
    write(x, np.array([0.7]))

    @ti.kernel
    def functions():
        values, vectors = ti.sym_eig((A[None] + A[None].transpose()) * 0.5)
        total = ti.Matrix.zero(ti.f64, n, n)
        for d in ti.static(range(n)):
            q = ti.Vector([vectors[i, d] for i in ti.static(range(n))])
            total += ti.log(values[d]) * q.outer_product(q)
        logarithm[None] = total
        for i in squares:
            squares[i] = total[0, i] ** 2 * x[0]

    outputs = [squares, logarithm]
    by_rows, by_columns = (jacobian(functions, [A, x], outputs, mode=mode) for mode in ("reverse", "forward"))
    for rows, columns in zip(by_rows, by_columns, strict=True):
        for one, other in zip(rows, columns, strict=True):
            assert_allclose(one, other, atol=1e-8)
    assert_allclose(by_rows[1][0], derivative_of_eig(M, "log"), atol=1e-6)
