"""Structs: types, dataclasses with methods, nested, in fields of both layouts, as arguments."""

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars

from taichi_ext import InvalidArgumentError, jacobian

pytestmark = pytest.mark.usefixtures("ti64")

FIVE = [1.3, 0.4, 0.7, 0.23, 0.9]
Pair = ti.types.struct(a=ti.f64, b=ti.f64)
vec2 = ti.types.vector(2, ti.f64)
Mixed = ti.types.struct(n=ti.i32, v=vec2, m=ti.types.matrix(2, 2, ti.f64), s=ti.f32)
Nested = ti.types.struct(first=Pair, second=Pair, w=vec2)


# --- locals -----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_structs_built_read_and_changed():
    x, y = scalars(FIVE), outputs(8)

    @ti.kernel
    def k():
        s = Pair(a=x[0], b=x[1])
        t = Pair(x[2], 2.0)
        u = Pair(b=x[3])
        y[0] = s.a * s.b + t.a * t.b + u.b + u.a
        s.a = s.b * x[2]
        s.b += s.a
        t.a *= s.b
        y[1] = s.a * s.b * t.a
        s, t = t, s
        y[2] = s.a + 2.0 * t.a
        r = s
        s.a = 0.0
        y[3] = r.a * r.b + s.a
        m = Mixed(n=3, v=vec2(x[0], x[1]), m=ti.Matrix([[x[0], x[1]], [x[2], x[3]]]), s=0.5)
        m.v.x = x[4]
        m.v *= m.n
        m.m[0, 1] += m.v.y
        y[4] = m.v.dot(m.m @ m.v) * m.s
        q = Nested(first=Pair(x[0], x[1]), second=r, w=m.v)
        q.first.b *= q.second.a
        q.second = q.first
        q.first.a = 1.0
        q.w.xy = q.w.yx * q.second.a
        y[5] = q.first.b * q.second.b * q.w.x
        y[6] = q.second.a + q.first.a * q.w.y
        y[7] = ti.Struct(a=x[0], b=x[1] * 2.0).b * x[0]

    check_jacobian(k, x, y)


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
