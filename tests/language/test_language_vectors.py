"""Vectors and matrices in kernels: constructors, entries, swizzles, slices, operators, methods."""

from pathlib import Path

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, matrices, matrix_outputs, outputs
from taichi.lang import matrix_ops

pytestmark = pytest.mark.usefixtures("ti64")


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 3])
def test_methods_of_matrices(size):
    values = np.add.outer(np.arange(size), 2.0 * np.arange(size)) * 0.1 + np.diag(1.0 + np.arange(size)) + 0.05
    values[0, -1] -= 0.4
    x, y, z = matrices([values]), matrix_outputs(size, size, 3), outputs(10)

    @ti.kernel
    def k():
        a = x[0]
        z[0] = a.determinant()
        z[1] = a.trace()
        z[2] = a.norm() + a.norm_sqr()
        z[3] = a.norm_inv() + a.norm(1e-2)
        z[4] = a.sum()
        z[5] = a.max()
        z[6] = a.min()
        z[7] = a.any() * a[0, 0] + a.all() * a[0, 0]
        z[8] = a.n * a.m * a[0, 0]
        z[9] = x[0].determinant() * x[0].trace()
        y[0] = a.inverse()
        y[1] = a.transpose()
        y[2] = a.cast(ti.f64) @ a

    check_jacobian(k, x, [y, z])


@pytest.mark.taichi_only("the names of Taichi")
def test_every_public_method_of_vectors_and_matrices_is_tested():
    here = Path(__file__)
    source = here.read_text(encoding="utf-8") + here.with_name("test_programs.py").read_text(encoding="utf-8")
    helpers = {"E", "Matrix", "Vector", "func", "pyfunc", "static", "template", "preconditions", "ops_mod", "matmul"}
    helpers |= {"arg_at", "arg_foreach_check", "assert_list", "assert_tensor", "assert_vector", "check_matmul"}
    helpers |= {"check_transpose", "dim_lt", "is_int_const", "same_shapes", "square_matrix"}
    for name in set(dir(matrix_ops)) - helpers:
        if not name.startswith("_"):
            assert f".{name}(" in source, name
