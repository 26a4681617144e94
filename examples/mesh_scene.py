"""Shared by meshes.py and camera_pose.py: a mesh under a pinhole camera, with the boundary terms of its edges."""

import numpy as np
import taichi as ti

from taichi_ext import add_edge, mesh_edges, stop_gradient

WIDTH, HEIGHT = 64, 48
POSE = np.array([0.43, 0.71, -0.26, 0.12, -0.07, 5.0, 62.0])  # rotation vector, translation, focal length
LIGHT = np.array([0.36, 0.48, -0.8])
SAMPLES = 4  # per pixel and axis, of the image with edges


@ti.data_oriented
class Mesh:
    """A mesh of flat faces under a camera.  The image has brightness (or a mask) and depth."""

    def __init__(
        self, corners: np.ndarray, triangles: np.ndarray, is_mask: bool = False, has_edges: bool = True
    ) -> None:
        edges = mesh_edges(triangles, corners=corners)
        self.is_mask, self.has_edges = is_mask, has_edges
        self.pose = ti.field(ti.f64, shape=len(POSE))
        self.corners = ti.Vector.field(3, ti.f64, shape=len(corners))
        self.faces = ti.Vector.field(3, ti.i32, shape=len(triangles))
        self.edges = ti.Vector.field(4, ti.i32, shape=len(edges))
        self.points = ti.Vector.field(2, ti.f64, shape=len(corners))  # in the image
        self.nearness = ti.field(ti.f64, shape=len(corners))  # 1 / distance, which is linear in the image
        self.brightness = ti.field(ti.f64, shape=len(triangles))
        self.image = ti.Vector.field(2, ti.f64, shape=(WIDTH, HEIGHT))  # brightness, depth
        self.pose.from_numpy(POSE)
        self.corners.from_numpy(corners)
        self.faces.from_numpy(triangles.astype(np.int32))
        self.edges.from_numpy(edges)

    @ti.func
    def placed(self, n):
        """Corner n in front of the camera: turned by the rotation vector, and moved."""
        turn = ti.Vector([self.pose[0], self.pose[1], self.pose[2]])
        angle = turn.norm()
        axis = turn / angle
        p = self.corners[n]
        turned = ti.cos(angle) * p + ti.sin(angle) * axis.cross(p) + (1 - ti.cos(angle)) * axis.dot(p) * axis
        return turned + ti.Vector([self.pose[3], self.pose[4], self.pose[5]])

    @ti.kernel
    def project(self):
        for n in self.points:
            p = self.placed(n)
            middle = ti.Vector([0.5 * WIDTH, 0.5 * HEIGHT])
            self.points[n] = self.pose[6] * ti.Vector([p.x, p.y]) / p.z + middle
            self.nearness[n] = 1 / p.z
        for f in self.faces:
            a, b, c = self.placed(self.faces[f][0]), self.placed(self.faces[f][1]), self.placed(self.faces[f][2])
            normal = (b - a).cross(c - a).normalized()
            towards = normal.dot(ti.Vector([LIGHT[0], LIGHT[1], LIGHT[2]]))
            away = normal.dot(a)
            self.brightness[f] = 1.0 if ti.static(self.is_mask) else 0.55 + 0.4 * ti.select(away > 0, -towards, towards)

    @ti.func
    def nearness_at(self, f, x, y):
        """1 / depth of a face at a position, 0 outside of the face."""
        face = self.faces[f]
        p = ti.Vector([x, y])
        a, b, c = self.points[face[0]] - p, self.points[face[1]] - p, self.points[face[2]] - p
        parts = ti.Vector([b.x * c.y - b.y * c.x, c.x * a.y - c.y * a.x, a.x * b.y - a.y * b.x])
        near = ti.Vector([self.nearness[face[0]], self.nearness[face[1]], self.nearness[face[2]]])
        is_inside = parts.min() > 0 or parts.max() < 0
        return ti.select(is_inside, parts.dot(near) / parts.sum(), 0.0)

    @ti.func
    def face_at(self, x, y):
        """The nearest face at a position, -1 for none."""
        nearest = 0.0
        found = -1
        for f in range(self.faces.shape[0]):
            near = stop_gradient(self.nearness_at(f, x, y))
            if near > nearest:
                nearest = near
                found = f
        return found

    @ti.func
    def seen(self, x, y):
        """What the image shows at one position: only the nearest face is differentiated."""
        found = self.face_at(x, y)
        value = ti.Vector([0.0 if ti.static(self.is_mask) else 0.1 + 0.003 * x, 0.0])
        if found >= 0:
            value = ti.Vector([self.brightness[found], 1 / self.nearness_at(found, x, y)])
        return value

    @ti.func
    def mean_seen(self, i, j, n):
        total = 0.0 * self.image[0, 0]
        for a, b in ti.ndrange(n, n):
            total += self.seen(i - 0.5 + (a + 0.5) / n, j - 0.5 + (b + 0.5) / n) / n**2
        return total

    @ti.kernel
    def draw(self):
        for i, j in self.image:
            self.image[i, j] = self.mean_seen(i, j, SAMPLES)
        for e in range(self.edges.shape[0] if ti.static(self.has_edges) else 0):
            row = self.edges[e]
            add_edge(self.image, self.points[row[0]], self.points[row[1]], self.seen, faces=(self.points, row))

    def render(self) -> None:
        self.project()
        self.draw()
