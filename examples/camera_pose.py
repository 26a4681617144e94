"""The pose of a camera from a mask and a depth image, by Gauss-Newton from ten starts, with and without edges.

A box is seen by a camera whose rotation and translation are unknown.  The target is a supersampled image.  Residual and
J are blurred alike, by 8 pixels at first and not at all at the end.  Without the boundary terms of the box's edges, J
knows nothing of the mask, and of the depth only its change within the faces.

    python examples/camera_pose.py [--starts 10] [--output camera_pose.png]

The picture needs ``python -m pip install '.[plot]'``; the figures are printed without it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotting
import taichi as ti
from compare import Comparison
from mesh_scene import HEIGHT, POSE, WIDTH, Mesh
from mesh_shapes import box
from meshes import SampledMesh
from silhouette_fits import blur_weights

from taichi_ext import Jacobian

SIZE = (1.4, 0.4, 0.8)
SPREAD = np.array([0.3, 0.3, 0.3, 0.5, 0.4, 0.8])  # of the starts: a quarter of a turn at most, and six pixels or so
BLURS = (8, 4, 2, 1)
STEPS = 6  # for each blur
MASK_WEIGHT = 5.0  # the jump of the depth
FOUND = 0.01  # distance from the true pose, in radians and units of the scene
NAMES = {"interior": "without boundary terms", "edges": "with boundary terms"}


def blurred(image: np.ndarray, width: float) -> np.ndarray:
    """An image of mask and depth, or one per parameter, as one row per number that is kept."""
    columns = image.reshape(WIDTH, HEIGHT, 2, -1) * np.array([MASK_WEIGHT, 1.0])[:, None]
    if width > 1:
        columns = np.tensordot(blur_weights(WIDTH, width), columns, (1, 0))
        columns = np.tensordot(blur_weights(HEIGHT, width), columns, (1, 1)).swapaxes(0, 1)
    return columns.reshape(-1, columns.shape[-1])


class Fit:
    """Gauss-Newton with the derivative of one mesh."""

    def __init__(self, mesh: Mesh, target: np.ndarray) -> None:
        self.mesh, self.target = mesh, target
        self.derivative = Jacobian(mesh.render, mesh.pose, mesh.image)

    def run(self, start: np.ndarray) -> np.ndarray:
        """The distance from the true pose at the start and after each step."""
        guess, errors = start.copy(), [np.linalg.norm(start - POSE[:6])]
        for width in BLURS:
            for _ in range(STEPS):
                self.mesh.pose.from_numpy(np.append(guess, POSE[6]))
                J = self.derivative()[..., :6]
                residual = blurred(self.mesh.image.to_numpy() - self.target, width)[:, 0]
                guess = guess - np.linalg.lstsq(blurred(J, width), residual, rcond=None)[0]
                errors.append(np.linalg.norm(guess - POSE[:6]))
                if not errors[-1] < 10 or not guess[5] > 2.5:  # lost, or the box would be behind the camera
                    return np.array(errors)
        return np.array(errors)


def starts(count: int) -> np.ndarray:
    """Random poses, shape (count, 6)."""
    return POSE[:6] + np.random.default_rng(0).uniform(-SPREAD, SPREAD, (count, 6))


def draw(path: Path, mesh: Mesh, target: np.ndarray, first: np.ndarray, errors: dict[str, list[np.ndarray]]) -> None:
    figure = plotting.new_figure(9, 6.8)
    if figure is None:
        return
    figure.suptitle("The pose of a camera from mask and depth", fontsize=14)
    panels = figure.subplots(2, 2).ravel()
    images = []
    for pose in (first, POSE[:6]):
        mesh.pose.from_numpy(np.append(pose, POSE[6]))
        mesh.render()
        images.append(mesh.image.to_numpy()[..., 1])
    for axes, image, title in zip(panels, (target[..., 1], images[0]), ("target", "first start"), strict=False):
        drawn = plotting.show(axes, image, title, cmap="viridis")
        plotting.color_bar(figure, drawn, axes, "depth (scene units)")
    drawn = plotting.show(panels[2], images[1] - target[..., 1], "fit - target", plotting.signed_scale(1.0))
    plotting.color_bar(figure, drawn, panels[2], "difference (scene units)")
    plotting.convergence(panels[3], "Gauss-Newton", {NAMES[name]: runs for name, runs in errors.items()})
    plotting.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fits from all starts in both ways, and the picture."""
    made = plotting.parser("The pose of a camera from mask and depth.", "camera_pose.png")
    made.add_argument("--starts", type=int, default=10, help="random starts (default: %(default)s)")
    options = plotting.parse(made, arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"A camera's pose from mask and depth in {WIDTH} x {HEIGHT} pixels")
    meshes = {name: SampledMesh(*box(SIZE), is_mask=True, has_edges=name == "edges") for name in NAMES}
    mesh = meshes["edges"]
    mesh.supersample()
    target = mesh.image.to_numpy()
    errors = {}
    for name, title in NAMES.items():
        fit = Fit(meshes[name], target)
        errors[name] = [fit.run(start) for start in starts(options.starts)]
        ends = ", ".join(f"{run[-1]:.0e}" for run in errors[name])
        print(f"       {title}, distance at the end: {ends}")
    found = {name: sum(run[-1] < FOUND for run in runs) for name, runs in errors.items()}
    n = options.starts
    compared.holds(f"with boundary terms {found['edges']} of {n} starts find the pose", found["edges"] >= 0.9 * n)
    compared.holds(f"without them, {found['interior']} do", found["interior"] < 0.5 * n)
    draw(options.output, mesh, target, starts(1)[0], errors)
    return compared.exit_code


if __name__ == "__main__":
    sys.exit(main())
