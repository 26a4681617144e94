"""A box that turns and a sphere of triangles, before a background: every edge of a mesh carries its boundary term.

``mesh_scene.py`` projects the corners and draws the image; ``add_edge`` adds the boundary term of each edge to
the pixels that it crosses.  Hidden edges do not count, and the borders of faces count as much as their brightness
differs.  The derivatives are compared with finite differences of a supersampled image.

    python examples/meshes.py [--mesh both] [--samples 40] [--output meshes.png]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotting
import taichi as ti
from compare import Comparison
from mesh_scene import HEIGHT, SAMPLES, WIDTH, Mesh
from mesh_shapes import box, icosphere
from supersampling import differences, mean_derivative, relative

from taichi_ext import Jacobian

PARAMETERS = ("turn x", "turn y", "turn z", "x", "y", "z", "focal")
STEPS = np.array([0.03, 0.03, 0.03, 0.04, 0.04, 0.1, 1.0])  # of the differences: half a pixel or so
SHOWN = {"box": ("turn x", "turn y", "x", "z", "focal"), "icosphere": ("turn y", "x", "z")}


@ti.data_oriented
class SampledMesh(Mesh):
    """A mesh whose image can be supersampled, where an edge may cross the pixel."""

    samples = 32

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
        for i, j in self.image:
            count = SAMPLES
            for e in range(self.edges.shape[0]):
                if self.touches(self.points[self.edges[e][0]], self.points[self.edges[e][1]], i, j):
                    count = n
            self.image[i, j] = self.mean_seen(i, j, count)

    def supersample(self) -> None:
        self.project()
        self.sample(self.samples)


def compare(compared: Comparison, name: str, mesh: SampledMesh, parameters: Sequence[str]) -> dict[str, np.ndarray]:
    """Every pixel and the sum of the image, with respect to some parameters, compared with finite differences."""
    derivative, columns, off, off_sum = Jacobian(mesh.render, mesh.pose, mesh.image), {}, [], []
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


def draw_picture(path: Path, meshes: dict[str, SampledMesh], columns: dict[str, dict[str, np.ndarray]]) -> None:
    if (figure := plotting.new_figure(13, 5.5)) is None:
        return
    for row, (name, mesh) in zip(figure.subplots(2, 5), meshes.items(), strict=False):
        mesh.supersample()
        plotting.show(row[0], mesh.image.to_numpy()[..., 0], name, cmap="gray")
        for axes, parameter, unit in ((row[1:3], "turn y", "per radian"), (row[3:], "x", "per unit")):
            mean, exact = columns[name][parameter]
            scale = plotting.signed_scale(np.abs(exact).max())
            plotting.show(axes[0], mean, f"∂image / ∂({parameter})", scale)
            plotting.color_bar(figure, plotting.show(axes[1], exact, "differences", scale), axes[1], unit)
    plotting.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    made = plotting.parser("Triangle meshes under a camera.", "meshes.png")
    made.add_argument("--samples", type=int, default=40, help="per pixel and axis (default: %(default)s)")
    made.add_argument("--mesh", choices=("both", *SHOWN), default="both", help="which to compare")
    options = plotting.parse(made, arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"Meshes in {WIDTH} x {HEIGHT} pixels, by rotation, translation and focal length")
    shapes = {"box": box, "icosphere": icosphere}
    meshes = {name: SampledMesh(*shapes[name]()) for name in SHOWN if options.mesh in ("both", name)}
    columns = {}
    for name, mesh in meshes.items():
        mesh.samples = options.samples
        columns[name] = compare(compared, name, mesh, SHOWN[name])
    draw_picture(options.output, meshes, columns)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
