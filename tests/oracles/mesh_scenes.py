"""Triangle meshes under a camera, drawn with flat colours: a reference for the boundary terms of their edges."""

from typing import Any

import numpy as np
import taichi as ti
from supersampled import errors_by_column, sampler

from taichi_ext import Jacobian, add_edge, mesh_edges, stop_gradient

W, H = 32, 24
FOCAL = 26.0
MOST = 320  # corners, faces and edges
WIDEST = 6  # of a row of edges


class Scene:
    """Corners and faces, turned and moved by six numbers; the camera is at 0 and looks along z.

    Colours are given by face.  The projection is homogeneous, so corners may lie behind the camera.
    """

    def __init__(self, real: Any = ti.f64) -> None:
        self.real = np.float64 if real == ti.f64 else np.float32
        self.corners, self.points = (ti.Vector.field(3, real, shape=MOST) for _ in range(2))
        self.faces = ti.Vector.field(3, ti.i32, shape=MOST)
        self.edges = ti.Vector.field(WIDEST, ti.i32, shape=MOST)
        self.counts = ti.field(ti.i32, shape=2)  # faces, edges
        self.colours = ti.field(real, shape=MOST)
        self.pose = ti.field(real, shape=6)
        self.image = ti.field(real, shape=(W, H))
        self.place, self.draw, self.seen = kernels(self)
        self.derivative = Jacobian(self.render, self.pose, self.image)
        self.samples = 2048
        self.sample = sampler(self.seen, self.image)

    def load(self, corners: Any, faces: Any, colours: Any, pose: Any, edges: Any = None) -> None:
        """Show another mesh."""
        edges = mesh_edges(faces, corners=corners) if edges is None else edges
        edges = np.pad(edges, ((0, 0), (0, WIDEST - edges.shape[1])), constant_values=-1)
        for field, values in ((self.corners, corners), (self.faces, faces), (self.edges, edges)):
            kind = self.real if field is self.corners else np.int32
            padded = np.zeros((MOST, field.n), kind)
            padded[: len(values)] = values
            field.from_numpy(padded)
        self.counts.from_numpy(np.array([len(faces), len(edges)], np.int32))
        self.colours.from_numpy(np.resize(colours, MOST).astype(self.real))
        self.pose.from_numpy(np.asarray(pose, self.real))

    def render(self) -> None:
        self.place()
        self.draw()

    def supersample(self) -> None:
        self.place()
        self.sample()

    def errors(self, steps: Any) -> np.ndarray:
        """How far J is off by each number of the pose of which the step is not 0."""
        return errors_by_column(self.render, self.pose, self.image, self.supersample, steps)


def kernels(scene: Scene) -> tuple[Any, Any, Any]:
    """The projection, the image with its edges, and the image's value at one position."""
    corners, faces, colours, edges, counts = scene.corners, scene.faces, scene.colours, scene.edges, scene.counts
    points, pose, image = scene.points, scene.pose, scene.image

    @ti.kernel
    def place():
        for n in points:
            turn = ti.Vector([pose[0], pose[1], pose[2]])
            angle = ti.sqrt(turn.norm_sqr() + 1e-12)
            axis = turn / angle
            p = corners[n]
            turned = ti.cos(angle) * p + ti.sin(angle) * axis.cross(p) + (1 - ti.cos(angle)) * axis.dot(p) * axis
            moved = turned + ti.Vector([pose[3], pose[4], pose[5]])
            points[n] = ti.Vector([FOCAL * moved.x + 0.5 * W * moved.z, FOCAL * moved.y + 0.5 * H * moved.z, moved.z])

    @ti.func
    def seen(x, y):
        """The colour of the nearest face on the ray; 0.1 where there is none."""
        ray = ti.Vector([x + 0.0, y, 1.0])
        nearest = 0.0 * points[0].x
        value = 0.1 + nearest
        for f in range(counts[0]):
            a, b, c = points[faces[f][0]], points[faces[f][1]], points[faces[f][2]]
            parts = stop_gradient(ti.Vector([ray.dot(b.cross(c)), ray.dot(c.cross(a)), ray.dot(a.cross(b))]))
            det = stop_gradient(a.dot(b.cross(c)))
            if (parts * det).min() > 0:
                near = parts.sum() / det  # 1 / depth
                if near > nearest:
                    nearest = near
                    value = colours[f]
        return value

    @ti.kernel
    def draw():
        for i, j in image:
            image[i, j] = seen(float(i), float(j))
        for e in range(counts[1]):
            add_edge(image, points[edges[e][0]], points[edges[e][1]], seen, faces=(points, edges[e]))

    return place, draw, seen


def cube(sizes: Any = (1.0, 1.0, 1.0)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """24 corners, four for each side; 12 faces and their colours."""
    corners, faces = [], []
    for axis in range(3):
        for side in (-1, 1):
            n = len(corners)
            for u, v in ((-1, -1), (1, -1), (1, 1), (-1, 1)):
                corner = np.zeros(3)
                corner[[axis, (axis + 1) % 3, (axis + 2) % 3]] = side, u, v
                corners.append(corner * sizes)
            faces += [[n, n + 1, n + 2], [n, n + 2, n + 3]]
    return np.array(corners), np.array(faces), np.repeat([0.3, 0.9, 0.5, 0.7, 0.2, 0.6], 2)


def linked_tori(around: int = 8, across: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two tori that pass through each other's hole, one of them turned by a right angle; shaded faces."""
    number = np.arange(around * across).reshape(around, across)
    p, q = np.meshgrid(*(2 * np.pi * np.arange(n) / n for n in (around, across)), indexing="ij")
    away = 1 + 0.4 * np.cos(q)
    one = np.stack([away * np.cos(p), away * np.sin(p), 0.4 * np.sin(q)], -1).reshape(-1, 3)
    a, b, c = number, np.roll(number, -1, 0), np.roll(number, -1, 1)
    faces = np.concatenate([np.stack([a, b, c], -1), np.stack([c, b, np.roll(b, -1, 1)], -1)]).reshape(-1, 3)
    corners = np.vstack([one, one[:, [0, 2, 1]] + [1, 0, 0]])
    faces = np.vstack([faces, faces + len(one)])
    normals = np.cross(*(corners[faces[:, k]] - corners[faces[:, 0]] for k in (1, 2)))
    return corners, faces, 0.55 + 0.4 * normals @ [0.36, 0.48, -0.8] / np.linalg.norm(normals, axis=1)
