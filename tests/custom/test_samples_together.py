"""Places beside an edge of a mesh are looked at together: lists that differ from place to place, branches, vectors."""

import numpy as np
import pytest
import taichi as ti
from numpy.testing import assert_allclose
from taichi_program import initialise

from taichi_ext import add_edge, jacobian, mesh_edges, vjp

W, H, CELL, MOST = 20, 16, 2, 40


def sheet(side=6):
    """A wrinkled sheet that folds over itself: nearness, corners in the image, and triangles."""
    number = np.arange(side**2).reshape(side, side)
    u, v = np.meshgrid(np.linspace(0, 1, side), np.linspace(0, 1, side), indexing="ij")
    x, y = 9.5 + 7 * np.sin(5 * u) + v, 2.3 + 11 * v + 1.5 * np.cos(4 * u)
    a, b, c, d = number[:-1, :-1], number[1:, :-1], number[:-1, 1:], number[1:, 1:]
    faces = np.concatenate([np.stack([a, b, c], -1), np.stack([c, b, d], -1)]).reshape(-1, 3)
    near = 0.3 + 0.2 * np.cos(5 * u) + 0.1 * u
    return np.stack([x, y], -1).reshape(-1, 2), near.reshape(-1), faces


@ti.data_oriented
class Sheet:
    """A mesh whose faces are found in lists of cells, or in one list of all."""

    def __init__(self, real, channels):
        corners, near, faces = sheet()
        dtype = np.float64 if real == ti.f64 else np.float32
        self.table = mesh_edges(faces, corners)
        self.channels = channels
        self.points = ti.Vector.field(2, real, shape=len(corners))
        self.near = ti.field(real, shape=len(near))
        self.faces = ti.Vector.field(3, ti.i32, shape=len(faces))
        self.colours = ti.field(real, shape=len(faces))
        self.edges = ti.Vector.field(4, ti.i32, shape=len(self.table))
        self.image = ti.Vector.field(3, real, shape=(W, H)) if channels else ti.field(real, shape=(W, H))
        self.starts = ti.field(ti.i32, shape=W // CELL * H // CELL + 1)
        self.lists = ti.field(ti.i32, shape=W * H * MOST)
        self.points.from_numpy(corners.astype(dtype))
        self.near.from_numpy(near.astype(dtype))
        self.faces.from_numpy(faces.astype(np.int32))
        self.colours.from_numpy(np.random.default_rng(1).uniform(0.2, 1, len(faces)).astype(dtype))
        self.edges.from_numpy(self.table)
        self.fill_lists(corners[faces])

    def fill_lists(self, triangles):
        found, starts = [], [0]
        for i in range(W // CELL):
            for j in range(H // CELL):
                low, high = np.array([i, j]) * CELL - 0.6, np.array([i + 1, j + 1]) * CELL - 0.4
                is_near = (triangles.min(1) < high).all(1) & (triangles.max(1) > low).all(1)
                found += np.flatnonzero(is_near).tolist()
                starts.append(len(found))
        self.starts.from_numpy(np.array(starts, np.int32))
        self.lists.from_numpy(np.array(found + [0] * (W * H * MOST - len(found)), np.int32))

    @ti.func
    def nearness(self, f, x, y):
        face = self.faces[f]
        p = ti.Vector([x, y])
        a, b, c = self.points[face[0]] - p, self.points[face[1]] - p, self.points[face[2]] - p
        parts = ti.Vector([b.cross(c), c.cross(a), a.cross(b)])
        near = ti.Vector([self.near[face[0]], self.near[face[1]], self.near[face[2]]])
        return ti.select(parts.min() > 0 or parts.max() < 0, parts.dot(near) / parts.sum(), 0.0)

    @ti.func
    def colour(self, found, x):
        value = 0.1 + 0.001 * x
        if found >= 0:
            value = self.colours[found]
        if ti.static(self.channels):
            return ti.Vector([value, 0.5 * value, 1 - value])
        else:
            return value

    @ti.func
    def listed(self, x, y):
        i = ti.max(0, ti.min(W // CELL - 1, int(ti.floor((x + 0.5) / CELL))))
        j = ti.max(0, ti.min(H // CELL - 1, int(ti.floor((y + 0.5) / CELL))))
        cell = i * (H // CELL) + j
        nearest, found, passed = 0.0, -1, 0
        for k in range(self.starts[cell], self.starts[cell + 1]):
            f = self.lists[k]
            near = self.nearness(f, x, y)
            if near > nearest:
                nearest = near
                found = f
            elif near > 0:
                passed += 1
        return self.colour(found, x + 0 * passed)

    @ti.func
    def counted(self, x, y):
        """The lists are left early, which needs a loop over the places, one by one."""
        i = ti.max(0, ti.min(W // CELL - 1, int(ti.floor((x + 0.5) / CELL))))
        j = ti.max(0, ti.min(H // CELL - 1, int(ti.floor((y + 0.5) / CELL))))
        k, end = self.starts[i * (H // CELL) + j], self.starts[i * (H // CELL) + j + 1]
        nearest, found = 0.0, -1
        while k < end:
            near = self.nearness(self.lists[k], x, y)
            if near > nearest:
                nearest = near
                found = self.lists[k]
            k += 1
        return self.colour(found, x)

    @ti.func
    def whole(self, x, y):
        nearest, found = 0.0, -1
        for f in range(self.faces.shape[0]):
            near = self.nearness(f, x, y)
            if near > nearest:
                nearest = near
                found = f
        return self.colour(found, x)

    def kernel(self, seen):
        @ti.kernel
        def draw():
            for i, j in self.image:
                self.image[i, j] = seen(float(i), float(j))
            for e in self.edges:
                row = self.edges[e]
                add_edge(self.image, self.points[row[0]], self.points[row[1]], seen, faces=(self.points, row))

        return draw


@pytest.mark.sweep
@pytest.mark.parametrize(("real", "channels"), [(ti.f64, True), (ti.f32, False)])
def test_lists_of_cells_give_what_one_list_gives(ti64, real, channels):
    initialise(default_fp=real)
    mesh = Sheet(real, channels)
    params = [mesh.points, mesh.colours]
    atol = 1e-9 if real == ti.f64 else 1e-3
    expected = jacobian(mesh.kernel(mesh.whole), params, mesh.image)
    assert abs(expected[0]).max() > 0.1
    weights = np.random.default_rng(0).normal(size=expected[1].shape[:-1]).astype(expected[1].dtype)
    for seen in (mesh.listed, mesh.counted):
        kernel = mesh.kernel(seen)
        back = vjp(kernel, params, mesh.image, weights)
        for J, by_rows, found in zip(expected, back, jacobian(kernel, params, mesh.image), strict=True):
            assert_allclose(found, J, rtol=0, atol=atol)
            assert_allclose(by_rows, np.tensordot(weights, J, weights.ndim), rtol=0, atol=10 * atol)
