"""Bundle adjustment: three cameras and 120 points from their images.

Each residual depends on one camera and one point, found by run-time integers; J is sparse, 9 entries a row.
Gauss-Newton steps, damped as Levenberg and Marquardt do, solve their normal equations with a sparse factorisation. The
first camera and one coordinate of the second are held, since nothing else says where the scene is and how large.

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
ITERATIONS = 12


@ti.func
def turned(r, x):
    """x, turned by a rotation vector."""
    square = r.dot(r)
    y = x + r.cross(x)
    if square > 0:
        angle = ti.sqrt(square)
        v = r / angle
        y = x * ti.cos(angle) + v.cross(x) * ti.sin(angle) + v * (v.dot(x) * (1 - ti.cos(angle)))
    return y


@ti.data_oriented
class Scene:
    """Cameras (rotation vector, then centre), points, and where each camera has seen the points that it sees."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.true_points = rng.uniform(-1, 1, (POINTS, 3))
        turns = np.array([[0, 0, 0], [0, 0.3, 0.05], [0.1, -0.35, 0]])
        centres = np.array([[0, 0, -5], [-1.6, 0.1, -4.7], [1.8, 0.4, -4.6]])
        self.true_cameras = np.concatenate([turns, centres], axis=1)
        pairs = [(c, p) for p in range(POINTS) for c in range(CAMERAS) if (p + c) % 5]  # each misses one in five
        self.pairs = np.array(pairs, np.int32)
        self.cameras, self.points = ti.field(ti.f64, (CAMERAS, 6)), ti.Vector.field(3, ti.f64, POINTS)
        self.who = ti.Vector.field(2, ti.i32, len(pairs))
        self.seen, self.errors = (ti.Vector.field(2, ti.f64, len(pairs)) for _ in range(2))
        self.who.from_numpy(self.pairs)
        self.cameras.from_numpy(self.true_cameras)
        self.points.from_numpy(self.true_points)
        self.residuals()  # of images at 0: what the cameras see
        self.seen.copy_from(self.errors)
        start = self.true_cameras + 0.05 * rng.standard_normal((CAMERAS, 6)) * ~self.held().reshape(CAMERAS, 6)
        self.cameras.from_numpy(start)
        self.points.from_numpy(self.true_points + 0.05 * rng.standard_normal((POINTS, 3)))

    @staticmethod
    def held() -> np.ndarray:
        """The entries of the cameras that are known."""
        held = np.zeros((CAMERAS, 6), bool)
        held[0] = held[1, 3] = True
        return held.ravel()

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
    free = np.flatnonzero(~np.concatenate([scene.held(), np.zeros(3 * POINTS, bool)]))
    errors, damping = [], 1e-3
    for _ in range(ITERATIONS):
        J = sparse.hstack(plan(), format="csr")[:, free]
        r = scene.errors.to_numpy().ravel()
        errors.append(float(np.sqrt((r * r).mean())))
        normal = (J.T @ J).tocsc()
        normal += sparse.diags_array(damping * normal.diagonal(), format="csc")
        change = np.zeros(6 * CAMERAS + 3 * POINTS)
        change[free] = splu(normal).solve(-J.T @ r)
        scene.cameras.from_numpy(scene.cameras.to_numpy() + change[: 6 * CAMERAS].reshape(-1, 6))
        scene.points.from_numpy(scene.points.to_numpy() + change[6 * CAMERAS :].reshape(-1, 3))
        damping /= 10
    return errors


def draw(path: Any, scene: Scene, start: tuple[np.ndarray, np.ndarray], errors: list[float]) -> None:
    """From above: the cameras with their directions of view and the points, at the start and at the end."""
    if (figure := new_figure(7.5, 3.8)) is None:
        return
    above, convergence = figure.subplots(1, 2)
    for (cameras, points), color, name in (
        (start, ORANGE, "start"),
        ((scene.cameras.to_numpy(), scene.points.to_numpy()), BLUE, "found"),
    ):
        above.plot(points[:, 0], points[:, 2], ".", markersize=3, color=color, label=name)
        above.plot(cameras[:, 3], cameras[:, 5], "s", markersize=6, color=color)
        above.quiver(cameras[:, 3], cameras[:, 5], -np.sin(cameras[:, 1]), np.cos(cameras[:, 1]), color=color, scale=8)
    above.plot(
        scene.true_points[:, 0], scene.true_points[:, 2], "o", mfc="none", color=GREY, label="true", markersize=5
    )
    above.set(title="points, and cameras (squares)", xlabel="x", ylabel="z", xlim=(-2.5, 2.5), aspect="equal")
    above.legend(loc="center left")
    convergence.semilogy(errors, "o-", color=BLUE)
    convergence.set(title="error of the images", xlabel="iteration", ylabel="RMS error (pixels)")
    convergence.get_xaxis().get_major_locator().set_params(integer=True)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(parser(__doc__.splitlines()[0], "bundle_adjustment.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    scene = Scene()
    plan = Jacobian(scene.residuals, [scene.cameras, scene.points], scene.errors, format="csr")
    compared = Comparison(f"{CAMERAS} cameras, {POINTS} points, {len(scene.pairs)} observations")
    report = check_jacobian(scene.residuals, [scene.cameras, scene.points], scene.errors, most_entries=18, format="csr")
    compared.holds("J agrees with central differences", bool(report), report.verdict)
    J = sparse.hstack(plan())
    compared.holds("no row has more than 9 entries", J.nnz <= 9 * J.shape[0], f"{J.nnz} entries in {J.shape[0]} rows")
    start = scene.cameras.to_numpy(), scene.points.to_numpy()
    errors = adjust(scene, plan)
    for n, error in enumerate(errors):
        print(f"       {n:2d}: {error:.3e} pixels")
    points, cameras = scene.points.to_numpy(), scene.cameras.to_numpy()
    compared.numbers("points (those that the images were made of)", points, scene.true_points, rtol=0, atol=1e-8)
    compared.numbers("cameras (likewise)", cameras, scene.true_cameras, rtol=0, atol=1e-8)
    draw(options.output, scene, start, errors)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
