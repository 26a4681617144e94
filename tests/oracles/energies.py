"""Energies that several tests differentiate twice, and reference Hessians."""

import numpy as np
import taichi as ti
from differences import read, scalars, vectors, write
from numpy.testing import assert_allclose, assert_array_equal

from taichi_ext import hessian, hvp, value_and_gradient

stiffness = 1.5


def energy_of_every_kind_of_parameter():
    """A kernel that returns an energy, and its parameters: fields of numbers and of vectors, and an array.

    Its arguments are the array and a number ``w``; a Python number is ``stiffness``.
    """
    x, v = scalars([0.4, 0.7, 1.1]), vectors([[0.3, 0.8], [1.2, 0.6]])
    array = np.array([0.5, 0.9])

    @ti.kernel
    def run(a: ti.types.ndarray(ti.f64, ndim=1), w: ti.f64) -> ti.f64:
        total = 0.0
        for i in range(3):
            total += ti.sin(x[i] * w) * a[0] * stiffness
        for i in range(2):
            total += a[i] ** 3 * v[i][1] ** 2 * ti.exp(stiffness * w) + v[i][0]
        return total

    return run, x, v, array


def differences_of_gradients(kernel, fields, energy, args=(), step=1e-6):
    """H of one energy by the entries of fields, which the kernel may change, as one matrix."""
    start = [read(f) for f in fields]

    def reset():
        for field, values in zip(fields, start, strict=True):
            write(field, values)
        write(energy, np.zeros_like(read(energy)))

    def gradient(field, values):
        reset()
        write(field, values)
        return np.concatenate([np.ravel(g) for g in value_and_gradient(kernel, fields, energy, args=args)[1]])

    columns = []
    for field, values in zip(fields, start, strict=True):
        for entry in range(values.size):
            found = []
            for sign in (1, -1):
                moved = values.copy()
                moved.reshape(-1)[entry] += sign * step
                found.append(gradient(field, moved))
            columns.append((found[0] - found[1]) / (2 * step))
    reset()
    return np.stack(columns, axis=1)


def as_matrix(H):
    """Nested blocks as one matrix."""
    sizes = [int(np.sqrt(H[n][n].size)) for n in range(len(H))]
    return np.block(
        [[b.reshape(m, n) for b, n in zip(row, sizes, strict=True)] for row, m in zip(H, sizes, strict=True)]
    )


def require_right(kernel, fields, energy, args=()):
    """The Hessian in all forms: like differences of gradients, symmetric to the last bit."""
    expected = differences_of_gradients(kernel, fields, energy, args)
    start = [read(f) for f in fields]
    H = as_matrix(hessian(kernel, fields, energy, args=args))
    assert_array_equal(H, H.T)
    scale = max(1, np.abs(expected).max())
    assert_allclose(H, expected, rtol=1e-6, atol=1e-7 * scale)
    for found in (sparse_matrix, products_with_units):
        for field, values in zip(fields, start, strict=True):  # which the kernel may change
            write(field, values)
        write(energy, np.zeros_like(read(energy)))
        assert_allclose(found(kernel, fields, energy, args), H, rtol=1e-11, atol=1e-11 * scale)


def sparse_matrix(kernel, fields, energy, args=()):
    """H from its sparse form, as one matrix, which is symmetric to the last bit."""
    found = hessian(kernel, fields, energy, args=args, format="csr")
    H = np.block([[b.toarray() for b in row] for row in found])
    assert_array_equal(H, H.T)
    return H


def products_with_units(kernel, fields, energy, args=()):
    """H from products with all unit vectors, as one matrix."""
    shapes = [read(f).shape for f in fields]
    sizes = [int(np.prod(shape)) for shape in shapes]
    units = np.split(np.eye(sum(sizes)), np.cumsum(sizes)[:-1], axis=1)
    found = hvp(kernel, fields, [u.reshape(-1, *s) for u, s in zip(units, shapes, strict=True)], energy, args=args)
    return np.concatenate([f.reshape(sum(sizes), -1) for f in found], axis=1)
