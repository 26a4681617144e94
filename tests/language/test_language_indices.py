"""Indices: integer locals that change, arithmetic, aliases of entries, stores that may meet."""

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars

pytestmark = pytest.mark.usefixtures("ti64")


def test_fields_in_python_containers():
    a, b, y, z = scalars([0.3, 0.8]), scalars([0.5, 0.6]), outputs(2), outputs(2)
    fields = [a, b]
    table = {"p": a, "q": [b, y]}

    @ti.kernel
    def k():
        for i in range(2):
            y[i] = fields[0][i] * fields[1][1 - i]
            for f in ti.static(fields):
                y[i] += f[i] * f[0]
            for n, f in ti.static(enumerate(fields)):
                z[i] += f[i] * n
            z[i] += table["p"][i] * table["q"][0][i]

    check_jacobian(k, fields, [y, z])


def test_a_sum_of_zero_tangents_stays_zero_through_a_square_root():
    n = 30
    x, zero, y = scalars(np.linspace(0.3, 0.8, n)), scalars([0.0]), outputs(3)

    @ti.kernel
    def k():
        for i in range(3):
            acc = 0.0
            for j in range(n):
                acc += x[j] * zero[0]
            r = ti.sqrt(acc) + x[i]
            y[i] = r * x[0] + ti.sqrt(acc) * r + (ti.sqrt(acc) if x[0] < 1.0 else 0.0)

    expected = np.zeros((3, n))
    for i in range(3):
        expected[i, i] += x[0]
        expected[i, 0] += x[i]
    check_jacobian(k, x, y, expected=expected)
