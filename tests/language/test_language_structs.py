"""Structs: types, dataclasses with methods, nested, in fields of both layouts, as arguments."""

import numpy as np
import pytest
import taichi as ti
from differences import outputs

from taichi_ext import InvalidArgumentError, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

vec2 = ti.types.vector(2, ti.f64)
Mixed = ti.types.struct(n=ti.i32, v=vec2, m=ti.types.matrix(2, 2, ti.f64), s=ti.f32)


# --- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_struct_field_with_integers_means_its_real_members():
    Tag = ti.types.struct(id=ti.i32)
    x, y = ti.types.struct(a=ti.f64, n=ti.i32, inner=Mixed, tag=Tag).field(shape=2), outputs(2)
    x.a.from_numpy(np.array([0.3, 0.8]))
    x.n.from_numpy(np.array([2, 5]))
    x.inner.v.from_numpy(np.array([[0.5, 0.2], [1.1, 0.4]]))

    @ti.kernel
    def k():
        for i in range(2):
            s = x[i].inner.m.trace() + x[i].inner.s
            y[i] = x[i].a ** 2 * x[i].n + x[i].inner.v.sum() * x[i].a + s + x[i].tag.id

    J = jacobian(k, x, y)
    assert set(J) == {"a", "inner"} and set(J["inner"]) == {"v", "m", "s"}
    a, v = x.a.to_numpy(), x.inner.v.to_numpy()
    np.testing.assert_allclose(J["a"], np.diag(2 * a * [2, 5] + v.sum(1)), rtol=1e-12)
    np.testing.assert_allclose(J["inner"]["v"], np.einsum("ij,k->ijk", np.diag(a), np.ones(2)), rtol=1e-12)
    with pytest.raises(InvalidArgumentError, match="real numbers"):
        jacobian(k, x.n, y)
    with pytest.raises(InvalidArgumentError, match="real numbers"):
        jacobian(k, x.tag, y)
