"""Places beside an edge of a mesh are looked at together: lists that differ from place to place, branches, vectors."""

import numpy as np
import pytest
import taichi as ti
from differences import integers, scalars, vectors
from numpy.testing import assert_allclose

from taichi_ext import add_edge, jacobian, mesh_edges, vjp

W, H, CELL, COUNT = 20, 16, 2, 24


@pytest.mark.sweep
def test_lists_of_cells_give_what_one_list_gives(ti64):
    """Triangles, the later in front, found in the list of the cell of a place, or in one list of all."""
    rng = np.random.default_rng(1)
    corners = rng.uniform(-1, (W, H), (COUNT, 1, 2)) + rng.uniform(-4, 4, (COUNT, 3, 2))
    table = mesh_edges(np.arange(3 * COUNT).reshape(COUNT, 3), corners.reshape(-1, 2))
    lists, starts = [], [0]
    for cell in np.ndindex(W // CELL, H // CELL):
        low, high = np.array(cell) * CELL - 0.6, (np.array(cell) + 1) * CELL - 0.4
        is_near = (corners.min(1) < high).all(1) & (corners.max(1) > low).all(1)
        lists += np.flatnonzero(is_near).tolist()
        starts.append(len(lists))
    p, colours = vectors(corners.reshape(-1, 2)), scalars(rng.uniform(0.2, 1, COUNT))
    image, edges = vectors(np.zeros((W, H, 3))), ti.Vector.field(4, ti.i32, len(table))
    edges.from_numpy(table.astype(np.int32))
    first, listed = integers(starts), integers(lists)

    @ti.func
    def is_in(f, x, y):
        at = ti.Vector([x, y])
        a, b, c = p[3 * f] - at, p[3 * f + 1] - at, p[3 * f + 2] - at
        parts = ti.Vector([b.cross(c), c.cross(a), a.cross(b)])
        return parts.min() > 0 or parts.max() < 0

    @ti.func
    def colour(found, x):
        value = 0.1 + 0.001 * x
        if found >= 0:
            value = colours[found]
        return ti.Vector([value, 0.5 * value, 1 - value])

    @ti.func
    def cell_of(x, y):
        i = ti.max(0, ti.min(W // CELL - 1, int(ti.floor((x + 0.5) / CELL))))
        return i * (H // CELL) + ti.max(0, ti.min(H // CELL - 1, int(ti.floor((y + 0.5) / CELL))))

    @ti.func
    def of_its_cell(x, y):
        cell, found, passed = cell_of(x, y), -1, 0
        for k in range(first[cell], first[cell + 1]):
            if is_in(listed[k], x, y):
                found = listed[k]
            elif found >= 0:
                passed += 1
        return colour(found, x + 0 * passed)

    @ti.func
    def counted(x, y):
        """The lists are left early, which needs a loop over the places, one by one."""
        k, found = first[cell_of(x, y) + 1] - 1, -1
        while found < 0 and k >= first[cell_of(x, y)]:
            if is_in(listed[k], x, y):
                found = listed[k]
            k -= 1
        return colour(found, x)

    @ti.func
    def whole(x, y):
        found = -1
        for f in range(COUNT):
            if is_in(f, x, y):
                found = f
        return colour(found, x)

    def drawn(seen):
        @ti.kernel
        def draw():
            for i, j in image:
                image[i, j] = seen(float(i), float(j))
            for e in edges:
                add_edge(image, p[edges[e][0]], p[edges[e][1]], seen, faces=(p, edges[e]))

        return draw

    expected, weights = jacobian(drawn(whole), [p, colours], image), rng.normal(size=(W, H, 3))
    assert abs(expected[0]).max() > 0.1
    for kernel in map(drawn, (of_its_cell, counted)):
        back = vjp(kernel, [p, colours], image, weights)
        for J, by_rows, found in zip(expected, back, jacobian(kernel, [p, colours], image), strict=True):
            assert_allclose(found, J, rtol=0, atol=1e-9)
            assert_allclose(by_rows, np.tensordot(weights, J, 3), rtol=0, atol=1e-8)
