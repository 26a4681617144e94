"""Taichi's small decompositions and solvers, in two and three dimensions."""

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, matrices, matrix_outputs, outputs, vector_outputs, vectors
from kernel_texts import kernel_of

from taichi_ext import jacobian

pytestmark = pytest.mark.usefixtures("ti64")

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
