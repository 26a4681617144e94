"""A camera calibrated from 64 images of a board, by two worker processes, of which one is killed on the way.

Each image is a shard: a worker makes its kernel once, and computes residuals and a sparse J at each point.  The
camera (focal lengths, centre, two coefficients of distortion) and the pose of the board in each image are fitted
together, 390 numbers.  The killed worker is replaced, what it had is computed again, and the digits are those of a run
in this process.  With Dask installed, the workers are those of a cluster on this machine.

    python examples/sharded_calibration.py --output sharded_calibration.png

    python examples/sharded_calibration.py
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import numpy as np
import plotting
import taichi as ti
from compare import Comparison

from taichi_ext import LeastSquaresIteration, least_squares

IMAGES, ROWS, COLUMNS = 64, 6, 8
NOISE = 0.1  # pixels
CAMERA = np.array([800.0, 790.0, 330.0, 235.0, -0.2, 0.05])


@ti.func
def turned(r, x):
    """x, turned by a rotation vector that is not zero."""
    angle = r.norm()
    v = r / angle
    return x * ti.cos(angle) + v.cross(x) * ti.sin(angle) + v * (v.dot(x) * (1 - ti.cos(angle)))


@ti.kernel
def project(
    camera: ti.types.ndarray(),
    poses: ti.types.ndarray(),
    image: int,
    seen: ti.types.ndarray(),
    errors: ti.types.ndarray(),
):
    for k in range(ROWS * COLUMNS):
        corner = ti.Vector([0.03 * (k % COLUMNS), 0.03 * (k // COLUMNS), 0.0], ti.f64)
        r = ti.Vector([poses[image, 0], poses[image, 1], poses[image, 2]])
        x = turned(r, corner) + ti.Vector([poses[image, 3], poses[image, 4], poses[image, 5]])
        u, v = x[0] / x[2], x[1] / x[2]
        square = u * u + v * v
        stretch = 1 + square * (camera[4] + square * camera[5])
        errors[k, 0] = camera[0] * u * stretch + camera[2] - seen[k, 0]
        errors[k, 1] = camera[1] * v * stretch + camera[3] - seen[k, 1]


def true_poses() -> np.ndarray:
    """The rotation vector and the place of the board in each image."""
    rng = np.random.default_rng(0)
    poses = rng.uniform(-0.5, 0.5, (IMAGES, 6))
    poses[:, 3:] = 0.2 * poses[:, 3:] + np.array([0, 0, 0.5])
    return poses


def view(image: int) -> tuple[Any, ...]:
    """The factory: what a worker needs of an image.  A real one would read the corners from a file."""
    camera, poses = np.zeros(6), np.zeros((IMAGES, 6))
    seen, errors = NOISE * np.random.default_rng(2 + image).standard_normal((2, ROWS * COLUMNS, 2))
    project(CAMERA, true_poses(), image, -seen, seen)
    return project, {"camera": camera, "poses": poses}, errors, (camera, poses, image, seen, errors)


def start() -> dict[str, np.ndarray]:
    """A first guess: no distortion, focal lengths 10 % off, poses 5 % of a radian and 2 cm off."""
    rng = np.random.default_rng(1)
    return {
        "camera": np.array([720.0, 720.0, 320.0, 240.0, 0.0, 0.0]),
        "poses": true_poses() + np.array([0.05] * 3 + [0.02] * 3) * rng.standard_normal((IMAGES, 6)),
    }


class Workers:
    """Makes executors, and kills one of their workers."""

    def __init__(self, cluster: Any = None) -> None:
        self.cluster, self.executor, self.killed = cluster, None, 0

    def __call__(self) -> Executor:
        if self.cluster is not None:
            self.executor = self.cluster.get_client().get_executor(pure=False)
        else:
            self.executor = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
        return self.executor

    def kill(self, line: LeastSquaresIteration) -> None:
        """After the second step, end the worker that answers first."""
        if line.number == 2:
            self.killed = self.executor.submit(os.getpid).result()
            os.kill(self.killed, signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "sharded_calibration.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"{IMAGES} images of {ROWS} x {COLUMNS} corners, {6 + 6 * IMAGES} parameters")
    shards = [(image,) for image in range(IMAGES)]
    settings = {"start": start(), "format": "csr", "ftol": 1e-4, "init": {"default_fp": ti.f64}}
    with cluster() as found:
        workers = Workers(found)
        result = least_squares(view, shards=shards, executor=workers, callback=workers.kill, progress=True, **settings)
    here = least_squares(view, shards=shards, **settings)
    print(
        f"{result.message}\nworker {workers.killed} of {'a Dask cluster' if workers.cluster else 'a pool'} was killed"
    )
    compared.holds("the same digits as in one process", np.array_equal(result.x, here.x))
    camera, errors = result.split(result.x)["camera"], result.standard_errors()["camera"]
    for n, name in enumerate(("fx", "fy", "cx", "cy", "k1", "k2")):
        is_near = abs(camera[n] - CAMERA[n]) < 4 * errors[n]
        compared.holds(f"{name} = {camera[n]:.4f} +- {errors[n]:.4f}, the images were made with {CAMERA[n]}", is_near)
    if (figure := plotting.new_figure(9, 3.8)) is not None:
        left, right = figure.subplots(1, 2)
        for name, point, color in (
            ("start", start(), plotting.ORANGE),
            ("fitted", result.split(result.x), plotting.BLUE),
        ):
            seen, off = residuals(point, 0)
            left.plot(*(seen + off).T, "x" if name == "start" else "o", color=color, mfc="none", label=f"board, {name}")
        left.plot(*seen.T, ".", color=plotting.GREY, label="corners in image 0")
        left.set(xlabel="x (pixels)", ylabel="y (pixels)", aspect="equal", title="image 0")
        right.semilogy([line.cost for line in result.history], "o-", color=plotting.BLUE, markersize=4)
        right.set(
            xlabel="step; a worker is killed after step 2", ylabel="cost (half the sum of squares)", title="the fit"
        )
        right.grid(color="#dde1e7")
        left.legend(fontsize=8)
        plotting.save(figure, options.output)
    return compared.exit_code


def residuals(point: dict[str, np.ndarray], image: int) -> tuple[np.ndarray, np.ndarray]:
    """The corners that an image shows, and how far the board at that point is off."""
    _, _, errors, (_, _, _, seen, _) = view(image)
    project(point["camera"], point["poses"], image, seen, errors)
    return seen, errors


def cluster() -> Any:
    """Two processes of Dask on this machine; None, in a ``with`` statement, where Dask is not installed."""
    try:
        from distributed import LocalCluster
    except ImportError:
        return contextlib.nullcontext()
    return LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)


if __name__ == "__main__":
    sys.exit(main())
