"""Bundle adjustment: three cameras and 120 points from their images.

Each residual depends on one camera and one point, found by run-time integers; J is sparse, 9 entries a row. Damped
Gauss-Newton steps solve the normal equations. The first camera and one coordinate of the second are held, since nothing
else says where the scene is and how large.

    python examples/bundle_adjustment.py --output bundle_adjustment.png
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sparse
import taichi as ti
from compare import Comparison
from plotting import BLUE, GREY, ORANGE, new_figure, parse, parser, save
from scipy.sparse.linalg import splu

from taichi_ext import Jacobian, check_jacobian

CAMERAS, POINTS, FOCAL = 3, 120, 600.0
HELD = np.zeros((CAMERAS, 6), bool)  # entries of the cameras that are known: where the scene is, and how large
HELD[0] = HELD[1, 3] = True


@ti.func
def turned(r, x):
    """x, turned by a rotation vector that is not 0."""
    angle, v = r.norm(), r.normalized()
    return x * ti.cos(angle) + v.cross(x) * ti.sin(angle) + v * (v.dot(x) * (1 - ti.cos(angle)))


@ti.data_oriented
class Scene:
    """Cameras (rotation vector, then centre), points, and where each camera has seen the points that it sees."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.true_points = rng.uniform(-1, 1, (POINTS, 3))
        turns = np.array([[0.02, 0, 0], [0, 0.3, 0.05], [0.1, -0.35, 0]])
        centres = np.array([[0, 0, -5], [-1.6, 0.1, -4.7], [1.8, 0.4, -4.6]])
        self.true_cameras = np.concatenate([turns, centres], axis=1)
        pairs = np.argwhere(np.add.outer(np.arange(CAMERAS), np.arange(POINTS)) % 5)  # each misses one in five
        self.cameras, self.points = ti.field(ti.f64, (CAMERAS, 6)), ti.Vector.field(3, ti.f64, POINTS)
        self.who = ti.Vector.field(2, ti.i32, len(pairs))
        self.seen, self.errors = (ti.Vector.field(2, ti.f64, len(pairs)) for _ in range(2))
        self.who.from_numpy(pairs.astype(np.int32))
        self.cameras.from_numpy(self.true_cameras)
        self.points.from_numpy(self.true_points)
        self.residuals()  # of images at 0: what the cameras see
        self.seen.copy_from(self.errors)
        self.cameras.from_numpy(self.true_cameras + 0.05 * rng.standard_normal((CAMERAS, 6)) * ~HELD)
        self.points.from_numpy(self.true_points + 0.05 * rng.standard_normal((POINTS, 3)))

    @ti.kernel
    def residuals(self):
        for k in self.errors:
            c, p = self.who[k][0], self.who[k][1]
            r = ti.Vector([self.cameras[c, 0], self.cameras[c, 1], self.cameras[c, 2]])
            centre = ti.Vector([self.cameras[c, 3], self.cameras[c, 4], self.cameras[c, 5]])
            y = turned(r, self.points[p] - centre)
            self.errors[k] = FOCAL * ti.Vector([y[0] / y[2], y[1] / y[2]]) - self.seen[k]


def adjust(scene: Scene, plan: Jacobian) -> list[float]:
    """Damped Gauss-Newton steps; the error of each iteration."""
    free = np.flatnonzero(~np.concatenate([HELD.ravel(), np.zeros(3 * POINTS, bool)]))
    errors = []
    for damping in np.logspace(-3, -14, 12):
        J = sparse.hstack(plan(), format="csr")[:, free]
        r = scene.errors.to_numpy().ravel()
        errors.append(float(np.sqrt((r * r).mean())))
        normal = J.T @ J
        normal = (normal + sparse.diags_array(damping * normal.diagonal())).tocsc()
        change = np.zeros(6 * CAMERAS + 3 * POINTS)
        change[free] = splu(normal).solve(-J.T @ r)
        scene.cameras.from_numpy(scene.cameras.to_numpy() + change[: 6 * CAMERAS].reshape(-1, 6))
        scene.points.from_numpy(scene.points.to_numpy() + change[6 * CAMERAS :].reshape(-1, 3))
    return errors


def draw(path: Any, scene: Scene, start: tuple[np.ndarray, np.ndarray], errors: list[float]) -> None:
    """From above: the cameras with their directions of view and the points, at the start and at the end."""
    if (figure := new_figure(7.5, 3.8)) is None:
        return
    above, convergence = figure.subplots(1, 2)
    found = scene.cameras.to_numpy(), scene.points.to_numpy()
    for (cameras, points), color, name in ((start, ORANGE, "start"), (found, BLUE, "found")):
        above.plot(points[:, 0], points[:, 2], ".", markersize=3, color=color, label=name)
        above.plot(cameras[:, 3], cameras[:, 5], "s", markersize=6, color=color)
        above.quiver(cameras[:, 3], cameras[:, 5], -np.sin(cameras[:, 1]), np.cos(cameras[:, 1]), color=color, scale=8)
    above.plot(*scene.true_points[:, [0, 2]].T, "o", mfc="none", color=GREY, label="true", markersize=5)
    above.set(title="points, and cameras (squares)", xlabel="x", ylabel="z", xlim=(-2.5, 2.5), aspect="equal")
    above.legend(loc="center left")
    convergence.semilogy(errors, "o-", color=BLUE)
    convergence.set(title="error of the images", xlabel="iteration", ylabel="RMS error (pixels)")
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(parser(__doc__.splitlines()[0], "bundle_adjustment.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    scene = Scene()
    plan = Jacobian(scene.residuals, [scene.cameras, scene.points], scene.errors, format="csr")
    compared = Comparison(f"{CAMERAS} cameras, {POINTS} points, {scene.who.shape[0]} observations")
    report = check_jacobian(scene.residuals, [scene.cameras, scene.points], scene.errors, most_entries=18, format="csr")
    compared.holds("J agrees with central differences", bool(report), report.verdict)
    start = scene.cameras.to_numpy(), scene.points.to_numpy()
    errors = adjust(scene, plan)
    print(f"       error of the images by iteration, pixels: {', '.join(f'{error:.1e}' for error in errors)}")
    compared.numbers("points (the true ones)", scene.points.to_numpy(), scene.true_points, rtol=0, atol=1e-8)
    compared.numbers("cameras (the true ones)", scene.cameras.to_numpy(), scene.true_cameras, rtol=0, atol=1e-8)
    draw(options.output, scene, start, errors)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
