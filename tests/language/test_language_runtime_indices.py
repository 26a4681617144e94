"""Entries of vectors and matrices by run-time indices, of locals and of fields."""

import pytest
import taichi as ti
from differences import check_jacobian, matrices, matrix_outputs, vector_outputs, vectors

pytestmark = pytest.mark.usefixtures("ti64")

MATRIX = [[1.3, 0.2, -0.4], [0.1, 0.9, 0.7], [-0.3, 0.6, 1.8]]


# --- fields of vectors and matrices -----------------------------------------------------------------------------------


# Taichi 1.7.4 aborts when a kernel uses a vector of a field both as a whole and by a run-time index.


@pytest.mark.sweep
def test_a_component_stored_after_the_whole():
    x, y = vectors([[0.3, 0.4, 1.2], [0.5, 0.6, 0.9]]), vector_outputs(3, 2)
    m, n = matrices([MATRIX]), matrix_outputs(3, 3, 1)

    @ti.kernel
    def k():
        for i in range(2):
            y[i] = x[i]
            y[i].x = x[0].y * x[i].x
        n[0][1, 2] = x[0].x
        n[0] = m[0]
        n[0][0, 1] = m[0][1, 0] * x[1].z

    check_jacobian(k, [x, m], [y, n])
