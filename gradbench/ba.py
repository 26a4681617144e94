"""Bundle adjustment: errors of observations and of their weights, and their sparse Jacobian from one launch."""

from typing import Any

import numpy as np
import taichi as ti
from rotations import turned

from taichi_ext import Jacobian

CAMERA = 11  # numbers: rotation vector, centre, focal length, principal point, radial distortion
ROW = CAMERA + 3 + 1  # entries of a row: of a camera, a point, a weight


@ti.data_oriented
class Scene:
    """The numbers of the input, as often as it says; observation k is of camera k mod n and of point k mod m."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.n, self.m, self.p = given["n"], given["m"], given["p"]
        self.cameras, self.weights = ti.field(ti.f64, (self.n, CAMERA)), ti.field(ti.f64, self.p)
        self.points, self.errors = ti.Vector.field(3, ti.f64, self.m), ti.Vector.field(2, ti.f64, self.p)
        self.seen, self.priors = ti.Vector.field(2, ti.f64, self.p), ti.field(ti.f64, self.p)
        self.pairs = ti.Vector.field(2, ti.i32, self.p)
        k = np.arange(self.p, dtype=np.int32)
        self.cameras.from_numpy(np.tile(given["cam"], (self.n, 1)))
        self.points.from_numpy(np.tile(given["x"], (self.m, 1)))
        self.weights.fill(given["w"])
        self.seen.from_numpy(np.tile(given["feat"], (self.p, 1)))
        self.pairs.from_numpy(np.stack([k % self.n, k % self.m], axis=1))

    @ti.kernel
    def run(self):
        for k in self.errors:
            i, w = self.pairs[k][0], self.weights[k]
            r = ti.Vector([self.cameras[i, 0], self.cameras[i, 1], self.cameras[i, 2]])
            centre = ti.Vector([self.cameras[i, 3], self.cameras[i, 4], self.cameras[i, 5]])
            y = turned(r, self.points[self.pairs[k][1]] - centre)
            u = ti.Vector([y[0], y[1]]) / y[2]
            q = u.dot(u)
            u *= 1 + self.cameras[i, 9] * q + self.cameras[i, 10] * q * q
            projected = u * self.cameras[i, 6] + ti.Vector([self.cameras[i, 7], self.cameras[i, 8]])
            self.errors[k] = w * (projected - self.seen[k])
            self.priors[k] = 1 - w * w


def objective(scene: Scene) -> Scene:
    scene.run()
    return scene


def encoded_objective(scene: Scene) -> dict[str, Any]:
    """The errors of the first observation, and how often they are the same."""
    return {
        "reproj_error": {"elements": scene.errors.to_numpy()[0].tolist(), "repeated": scene.p},
        "w_err": {"element": float(scene.priors[0]), "repeated": scene.p},
    }


def prepared(given: dict[str, Any]) -> tuple[Scene, Jacobian]:
    scene = Scene(given)
    params, outputs = [scene.cameras, scene.points, scene.weights], [scene.errors, scene.priors]
    return scene, Jacobian(scene.run, params, outputs, format="csr")


def jacobian(state: tuple[Scene, Jacobian]) -> tuple[Scene, Any]:
    return state[0], state[1]()


def encoded_jacobian(found: tuple[Scene, Any]) -> dict[str, Any]:
    """The first two rows and the last entry, in the form of rows that have all entries of their camera, zeros too."""
    scene, blocks = found
    values, columns = [], []
    for row in range(2):
        for block, first, width in zip(blocks[0], (0, CAMERA * scene.n, 0), (CAMERA, 3, 1), strict=True):
            offset = CAMERA * scene.n + 3 * scene.m if width == 1 else first
            entries = np.zeros(width)
            part = slice(block.indptr[row], block.indptr[row + 1])
            entries[block.indices[part]] = block.data[part]
            values += entries.tolist()
            columns += range(offset, offset + width)
    last, p = blocks[1][2], scene.p
    return {
        "rows": [ROW * k for k in range(2 * ROW)] + [ROW * 2 * p + p],
        "cols": [*columns, int(CAMERA * scene.n + 3 * scene.m + last.indices[-1])],
        "vals": [*values, float(last.data[-1])],
    }


FUNCTIONS = {
    "objective": (Scene, objective, encoded_objective),
    "jacobian": (prepared, jacobian, encoded_jacobian),
}
