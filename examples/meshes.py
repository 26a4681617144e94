"""A box that turns and a sphere of triangles, before a background: every edge of a mesh carries its boundary term.

The corners are projected by a pinhole camera.  ``add_visible_edge`` adds the boundary term of each edge to the pixels
that it crosses.  The jump is the difference of what is seen on its two sides.  So hidden edges do not count, and the
borders of faces count as much as their brightness differs.  The derivatives with respect to the pose and the focal
length are compared with finite differences of a supersampled image.

    python examples/meshes.py [--mesh both] [--samples 40] [--output meshes.png]

The picture needs ``python -m pip install '.[plot]'``; the figures are printed without it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotting
import taichi as ti
from compare import Comparison
from supersampling import differences, mean_derivative, relative

from taichi_ext import Jacobian, add_visible_edge, mesh_edges, stop_gradient

WIDTH, HEIGHT = 64, 48
PARAMETERS = ("turn x", "turn y", "turn z", "x", "y", "z", "focal")
POSE = np.array([0.43, 0.71, -0.26, 0.12, -0.07, 5.0, 62.0])  # rotation vector, translation, focal length
STEPS = np.array([0.03, 0.03, 0.03, 0.04, 0.04, 0.1, 1.0])  # of the differences: half a pixel or so
LIGHT = np.array([0.36, 0.48, -0.8])
SHOWN = {"box": ("turn x", "turn y", "x", "z", "focal"), "icosphere": ("turn y", "x", "z")}
SAMPLES = 4  # per pixel and axis, of the image with edges


def box(size: Sequence[float] = (1.0, 0.8, 1.2)) -> tuple[np.ndarray, np.ndarray]:
    """Corners, shape (8, 3), and triangles, shape (12, 3), of a box."""
    corners = np.array(np.meshgrid(*([-s, s] for s in size), indexing="ij"), float).reshape(3, -1).T
    sides = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    return corners, np.array([t for a, b, c, d in sides for t in ((a, b, c), (a, c, d))])


def icosphere(divisions: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """A sphere of radius 1.3 from an icosahedron whose triangles are divided in four."""
    g = (1 + 5**0.5) / 2
    signs = [(-1, 1), (1, 1), (-1, -1), (1, -1)]
    points = [(a, b * g, 0) for a, b in signs] + [(0, a, b * g) for a, b in signs] + [(b * g, 0, a) for a, b in signs]
    corners = [np.array(p) / np.linalg.norm(p) for p in points]
    distance = np.linalg.norm(np.array(corners)[:, None] - np.array(corners), axis=-1)
    close = (distance > 0) & (distance < 1.1)
    faces = [
        (a, b, c) for a in range(12) for b in range(a) for c in range(b) if close[a, b] and close[b, c] and close[a, c]
    ]
    for _ in range(divisions):
        middles: dict[frozenset[int], int] = {}

        def middle(a: int, b: int, middles: dict[frozenset[int], int] = middles) -> int:
            if frozenset((a, b)) not in middles:
                middles[frozenset((a, b))] = len(corners)
                corners.append((corners[a] + corners[b]) / np.linalg.norm(corners[a] + corners[b]))
            return middles[frozenset((a, b))]

        split = [(a, b, c, middle(a, b), middle(b, c), middle(c, a)) for a, b, c in faces]
        faces = [t for a, b, c, d, e, f in split for t in ((a, d, f), (d, b, e), (f, e, c), (d, e, f))]
    return 1.3 * np.array(corners), np.array(faces)


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
        self.samples = 32
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
            add_visible_edge(self.image, self.points, self.edges[e], self.seen)

    @ti.func
    def touches(self, start, end, i, j):
        """Whether an edge may cross a pixel."""
        side = end - start
        away = abs((i - start.x) * side.y - (j - start.y) * side.x)
        low, high = ti.min(start, end), ti.max(start, end)
        is_beside = low.x < i + 0.5 and high.x > i - 0.5 and low.y < j + 0.5 and high.y > j - 0.5
        return is_beside and away < 0.5 * (abs(side.x) + abs(side.y))

    @ti.kernel
    def sample(self, n: ti.i32):
        """More samples where an edge may cross the pixel."""
        for i, j in self.image:
            count = SAMPLES
            for e in range(self.edges.shape[0]):
                if self.touches(self.points[self.edges[e][0]], self.points[self.edges[e][1]], i, j):
                    count = n
            self.image[i, j] = self.mean_seen(i, j, count)

    def render(self) -> None:
        self.project()
        self.draw()

    def supersample(self) -> None:
        self.project()
        self.sample(self.samples)


def plan(mesh: Mesh) -> Jacobian:
    return Jacobian(mesh.render, mesh.pose, mesh.image)


def compare_columns(compared: Comparison, name: str, mesh: Mesh, parameters: Sequence[str]) -> dict[str, np.ndarray]:
    """Every pixel and the sum of the image, with respect to some parameters, compared with finite differences."""
    derivative, columns, off, off_sum = plan(mesh), {}, [], []
    for k in map(PARAMETERS.index, parameters):
        step = STEPS[k]
        mean = mean_derivative(derivative, mesh.pose, k, step, nodes=24)
        exact = differences(mesh.supersample, mesh.pose, mesh.image, k, step)
        columns[PARAMETERS[k]] = np.stack([mean, exact])[..., 0]
        off.append([relative(mean[..., c], exact[..., c]) for c in range(2)])
        off_sum.append(np.abs((mean - exact).sum((0, 1))) / np.abs(exact).sum((0, 1)))
    print(f"       {name}, by{'':<16}" + "".join(f"{p:>8}" for p in parameters))
    for c, what in enumerate(("brightness", "depth")):
        print(f"       {what + ': pixels (L2, %)':<30}" + "".join(f"{100 * e[c]:>8.2f}" for e in off))
        print(f"       {'  sum of the image (%)':<30}" + "".join(f"{100 * e[c]:>8.3f}" for e in off_sum))
    compared.holds(f"{name}: each pixel agrees to 3 %", np.max(off) < 0.03)
    compared.holds(f"{name}: the sum of the image agrees to 0.5 %", np.max(off_sum) < 0.005)
    return columns


def draw_picture(path: Path, meshes: dict[str, Mesh], columns: dict[str, dict[str, np.ndarray]]) -> None:
    figure = plotting.new_figure(17, 5.8)
    if figure is None:
        return
    figure.suptitle("Meshes under a camera: derivatives of the image with respect to the pose", fontsize=14)
    panels = figure.subplots(2, 5)[: len(meshes)]
    for row, (name, mesh) in zip(panels, meshes.items(), strict=True):
        mesh.supersample()
        plotting.show(row[0], mesh.image.to_numpy()[..., 0], name, cmap="gray")
        shown: list[Any] = []
        for axes, parameter in zip(row[1:4:2], ("turn y", "x"), strict=True):
            mean, exact = columns[name][parameter]
            scale = plotting.signed_scale(np.abs(exact).max())
            plotting.show(axes, mean, f"d / d {parameter}: jacobian", scale)
            shown.append((exact, parameter, scale))
        for axes, (exact, parameter, scale) in zip(row[2:5:2], shown, strict=True):
            drawn = plotting.show(axes, exact, f"d / d {parameter}: differences", scale)
            plotting.color_bar(figure, drawn, axes, "brightness per unit")
    plotting.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Box and sphere, some columns compared with finite differences, and the picture."""
    made = plotting.parser("Triangle meshes under a camera.", "meshes.png")
    made.add_argument(
        "--samples", type=int, default=40, help="per pixel and axis, of differences (default: %(default)s)"
    )
    made.add_argument(
        "--mesh", choices=("both", *SHOWN), default="both", help="which to compare (default: %(default)s)"
    )
    options = plotting.parse(made, arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"Meshes in {WIDTH} x {HEIGHT} pixels, by rotation, translation and focal length")
    shapes = {"box": box, "icosphere": icosphere}
    meshes = {name: Mesh(*shapes[name]()) for name in SHOWN if options.mesh in ("both", name)}
    columns = {}
    for name, mesh in meshes.items():
        mesh.samples = options.samples
        columns[name] = compare_columns(compared, name, mesh, SHOWN[name])
    draw_picture(options.output, meshes, columns)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
