"""A program in Taichi's own defaults: float32 literals and locals beside float64 fields."""

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars

pytestmark = pytest.mark.usefixtures("ti32")


@pytest.mark.double_only("two types of real numbers")
def test_double_fields_among_single_locals():
    """A float64 field gets float64 tangents, also where the literals of the program are float32."""
    x, y, z = scalars([1.3, 0.4, 0.7, 0.23, 0.9]), outputs(5), outputs(5)

    @ti.kernel
    def k():
        for i in range(5):
            y[i] = x[i] * x[0] * 3.0 + ti.sin(x[i])
            s = x[i] * 2.0
            for j in range(3):
                s = s * x[j] + x[i]
            z[i] = s

    J = check_jacobian(k, x, [y, z])
    assert J[0].dtype == J[1].dtype == np.float64
