"""Loops over fields: dense, sparse, with offsets, of several layouts."""

import numpy as np
import pytest
import taichi as ti
from differences import check_jacobian, outputs, scalars

from taichi_ext import Jacobian

pytestmark = pytest.mark.usefixtures("ti64")


PLACEMENTS = {
    "dense": "dense 8",
    "pointer": "pointer 4, dense 2",
    "bitmasked": "dense 2, bitmasked 4",
    "ordered": "dense 8",
}
PLACEMENTS |= {"dense pointer": "dense 4, pointer 2", "hash-like": "pointer 2, pointer 2, dense 2"}


@pytest.mark.mostly_sweep("ordered")
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_struct_for_on_placements(kind):
    y, p, node = outputs(8), ti.field(ti.f64), ti.root
    for part in PLACEMENTS[kind].split(", "):
        node = getattr(node, part.split()[0])(ti.i, int(part.split()[1]))
    node.place(p, offset=0 if kind == "ordered" else None)
    for i in (1, 2, 5, 7):
        p[i] = 0.3 + 0.1 * i
    active = [i for i in range(8) if kind in ("dense", "ordered") or p[i] != 0 or is_active_block(kind, i)]

    @ti.kernel
    def k():
        for i in p:
            y[i] = p[i] * p[i] + p[1] * p[5]
        for i in p:
            y[0] += ti.sin(p[i])

    values = p.to_numpy()
    by_p = np.zeros((8, 8))
    for i in active:
        by_p[i, i] += 2 * values[i]
        by_p[i, 1] += values[5]
        by_p[i, 5] += values[1]
        by_p[0, i] += np.cos(values[i])
    check_jacobian(k, p, y, expected=by_p)


def is_active_block(kind, i):
    blocks = {"pointer": 2, "hash-like": 2}
    return any(i // blocks[kind] == j // blocks[kind] for j in (1, 2, 5, 7)) if kind in blocks else False


@pytest.mark.sweep
def test_indices_of_grouped_loops():
    """A component that gravity leaves alone, ``v[I][0] += 0.0``: Taichi drops it, and aborted on what was left."""
    x, v = ti.Vector.field(3, ti.f64, (2, 3)), ti.Vector.field(3, ti.f64, (2, 3))
    stiffness = scalars([2.0])
    x.from_numpy(np.linspace(0.3, 1.1, 18).reshape(2, 3, 3))

    @ti.func
    def pulled(i):
        f = ti.Vector([0.0, 0.0, 0.0])
        for offset in ti.static([ti.Vector([0, 1]), ti.Vector([1, -1])]):
            j = i + offset
            if 0 <= j[0] < 2 and 0 <= j[1] < 3:
                f -= stiffness[0] * (x[i] - x[j]).normalized() * float(i - j).norm()
        return f

    @ti.kernel
    def k():
        for i in ti.grouped(ti.ndrange(2, 3)):
            v[i] += ti.Vector([0.0, -9.8, 0.0]) * 0.01 * stiffness[0]
            v[i] += ti.Vector([0.0, -9.8, 0.0]) * 0.01
            axis = i[0] % 2
            v[i][axis] += 0.1 * i[axis] * x[i].norm_sqr()
        for i in ti.grouped(x):
            v[i] += ti.Vector([0.0, -9.8, 0.0]) * 0.01
        for i in ti.grouped(x):
            v[i] += pulled(i) * 0.01
        for i in ti.grouped(x):
            x[i] += 0.01 * v[i]

    check_jacobian(k, [stiffness, x], v, state=[x])
    plan = Jacobian(k, stiffness, v)
    plan()
    assert plan.source.count("ti.grouped") == 1  # the indices of that loop are themselves indexed
