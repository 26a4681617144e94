"""The gradient of an image loss by all corners of a mesh, and J by its pose, over a plain run: 256 x 256 pixels.

    python bench/mesh_gradient.py [sheet torus]

Each cell of 4 x 4 pixels has a list of its faces, made before.  Corners are turned, moved and projected in one kernel,
faces drawn with flat shading and edges added in the next.  CPU time on one thread, medians.
"""

import os
import sys
import time
from functools import partial

os.environ.setdefault("TI_CPU_MAX_NUM_THREADS", "1")

import numpy as np
import taichi as ti
from report import markdown_table
from timing import time_first, time_in_turn

from taichi_ext import Jacobian, add_edge, mesh_edges, stop_gradient, vjp

SIZE, CELL, MOST = 256, 4, 256
SIDE = {"sheet": 101, "torus": 100}  # corners along it
POSE = {"sheet": (0.1, 0.05, 0.1, 0.0, 0.0, 5.0), "torus": (0.5, 0.3, 0.1, 0.0, 0.0, 5.0)}


def surface(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Corners, shape (corners, 3), and triangles of a wavy sheet that fills the image, or of a bumpy torus."""
    side = SIDE[kind]
    number = np.arange(side**2).reshape(side, side)
    u, v = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    if kind == "sheet":
        x, y = (4.6 * (w / (side - 1) - 0.5) for w in (u, v))
        corners = np.stack([x, y, 0.5 + 0.25 * np.sin(3 * x) * np.cos(2 * y)], -1)
        corners += np.random.default_rng(0).uniform(-0.008, 0.008, corners.shape)
        a, b, c, d = number[:-1, :-1], number[1:, :-1], number[:-1, 1:], number[1:, 1:]
    else:
        p, q = (2 * np.pi * w / side for w in (u, v))
        r = 0.62 + 0.05 * np.sin(5 * p) * np.cos(4 * q)
        corners = np.stack([(1.3 + r * np.cos(q)) * np.cos(p), (1.3 + r * np.cos(q)) * np.sin(p), r * np.sin(q)], -1)
        a, b, c = number, np.roll(number, -1, 0), np.roll(number, -1, 1)
        d = np.roll(b, -1, 1)
    return corners.reshape(-1, 3), np.concatenate([np.stack([a, b, c], -1), np.stack([c, b, d], -1)]).reshape(-1, 3)


@ti.data_oriented
class Mesh:
    """A mesh before a camera, and its image."""

    def __init__(self, kind: str, has_edges: bool = True) -> None:
        corners, triangles = surface(kind)
        table = mesh_edges(triangles, corners=corners)
        self.has_edges = has_edges
        self.pose = ti.field(ti.f32, shape=6)
        self.corners, self.placed = (ti.Vector.field(3, ti.f32, shape=len(corners)) for _ in range(2))
        self.points = ti.Vector.field(2, ti.f32, shape=len(corners))
        self.nearness = ti.field(ti.f32, shape=len(corners))
        self.faces = ti.Vector.field(3, ti.i32, shape=len(triangles))
        self.edges = ti.Vector.field(table.shape[1], ti.i32, shape=len(table))
        self.brightness = ti.field(ti.f32, shape=len(triangles))
        self.image = ti.field(ti.f32, shape=(SIZE, SIZE))
        self.lengths = ti.field(ti.i32, shape=(SIZE // CELL, SIZE // CELL))
        self.lists = ti.field(ti.i32, shape=(SIZE // CELL, SIZE // CELL, MOST))
        self.pose.from_numpy(np.array(POSE[kind], np.float32))
        self.corners.from_numpy(corners.astype(np.float32))
        self.faces.from_numpy(triangles.astype(np.int32))
        self.edges.from_numpy(table)
        self.place()
        self.list_faces()

    @ti.kernel
    def place(self):
        for n in self.points:
            turn = ti.Vector([self.pose[0], self.pose[1], self.pose[2]])
            angle = turn.norm()
            axis = turn / angle
            p = self.corners[n]
            q = ti.cos(angle) * p + ti.sin(angle) * axis.cross(p) + (1 - ti.cos(angle)) * axis.dot(p) * axis
            q += ti.Vector([self.pose[3], self.pose[4], self.pose[5]])
            self.placed[n] = q
            self.points[n] = (1.15 * SIZE) * ti.Vector([q.x, q.y]) / q.z + 0.5 * SIZE
            self.nearness[n] = 1 / q.z
        for f in self.faces:
            a, b, c = self.placed[self.faces[f][0]], self.placed[self.faces[f][1]], self.placed[self.faces[f][2]]
            normal = (b - a).cross(c - a).normalized()
            towards = normal.dot(ti.Vector([0.36, 0.48, -0.8]))
            self.brightness[f] = 0.55 + 0.4 * ti.select(normal.dot(a) > 0, -towards, towards)

    @ti.kernel
    def list_faces(self):
        ti.loop_config(serialize=True)
        for f in range(self.faces.shape[0]):
            a, b, c = self.points[self.faces[f][0]], self.points[self.faces[f][1]], self.points[self.faces[f][2]]
            low = ti.cast(ti.floor((ti.min(a, b, c) + 0.49) / CELL), ti.i32)
            high = ti.cast(ti.floor((ti.max(a, b, c) + 0.51) / CELL), ti.i32)
            for i in range(ti.max(low[0], 0), ti.min(high[0], SIZE // CELL - 1) + 1):
                for j in range(ti.max(low[1], 0), ti.min(high[1], SIZE // CELL - 1) + 1):
                    self.lists[i, j, ti.atomic_add(self.lengths[i, j], 1)] = f

    @ti.func
    def nearness_at(self, f, x, y):
        face = self.faces[f]
        p = ti.Vector([x, y])
        a, b, c = self.points[face[0]] - p, self.points[face[1]] - p, self.points[face[2]] - p
        parts = ti.Vector([b.cross(c), c.cross(a), a.cross(b)])
        near = ti.Vector([self.nearness[face[0]], self.nearness[face[1]], self.nearness[face[2]]])
        return ti.select(parts.min() > 0 or parts.max() < 0, parts.dot(near) / parts.sum(), 0.0)

    @ti.func
    def seen(self, x, y):
        nearest = 0.0
        found = -1
        i = ti.max(0, ti.min(SIZE // CELL - 1, ti.cast(ti.floor((x + 0.5) / CELL), ti.i32)))
        j = ti.max(0, ti.min(SIZE // CELL - 1, ti.cast(ti.floor((y + 0.5) / CELL), ti.i32)))
        for k in range(self.lengths[i, j]):
            near = stop_gradient(self.nearness_at(self.lists[i, j, k], x, y))
            if near > nearest:
                nearest = near
                found = self.lists[i, j, k]
        value = 0.1 + 0.0003 * x
        if found >= 0:
            value = self.brightness[found]
        return value

    @ti.kernel
    def draw(self):
        for i, j in self.image:
            self.image[i, j] = self.seen(float(i), float(j))
        for e in range(self.edges.shape[0] if ti.static(self.has_edges) else 0):
            row = self.edges[e]
            add_edge(self.image, self.points[row[0]], self.points[row[1]], self.seen, faces=(self.points, row))

    def render(self) -> None:
        self.place()
        self.draw()


def main(kinds: list[str]) -> None:
    rows = []
    for kind in kinds:
        ti.init(arch=ti.cpu, log_level=ti.ERROR)
        mesh, bare = Mesh(kind), Mesh(kind, has_edges=False)
        weights = np.random.default_rng(0).normal(size=(SIZE, SIZE)).astype(np.float32)
        calls = {
            "plain": mesh.render,
            "vjp": partial(vjp, mesh.render, mesh.corners, mesh.image, weights),
            "vjp without edges": partial(vjp, bare.render, bare.corners, bare.image, weights),
            "J by the pose": Jacobian(mesh.render, mesh.pose, mesh.image),
        }
        first = {name: time_first(call) for name, call in calls.items()}
        timings = time_in_turn(calls, first, 3.0, time.process_time)
        times = {name: 1e3 * timing.median for name, timing in timings.items()}
        rows.append([kind, *(f"{t:.1f} ({t / times['plain']:.1f})" for t in times.values())])
    print(markdown_table(["ms (over a plain run)", *calls], rows))


if __name__ == "__main__":
    main(sys.argv[1:] or list(SIDE))
