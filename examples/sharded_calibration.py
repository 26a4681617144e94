"""A camera calibrated from 64 images of a board, by two worker processes, of which one is killed on the way.

Each image is a shard: a worker makes its kernel once, and computes residuals and a sparse J at each point.  The
camera (focal lengths, centre, two coefficients of distortion) and the pose of the board in each image are fitted
together, 390 numbers.  The killed worker is replaced, what it had is computed again, and the digits are those of a run
in this process.

    python examples/sharded_calibration.py --output sharded_calibration.png
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import plotting
import taichi as ti
from compare import Comparison

from taichi_ext import LeastSquaresIteration, least_squares

IMAGES, ROWS, COLUMNS, NOISE = 64, 6, 8, 0.1  # noise in pixels
CAMERA = np.array([800.0, 790.0, 330.0, 235.0, -0.2, 0.05])
ARRAY = ti.types.ndarray()
pools: list[ProcessPoolExecutor] = []


@ti.func
def turned(r, x):
    """x, turned by a rotation vector that is not zero."""
    angle = r.norm()
    v = r / angle
    return x * ti.cos(angle) + v.cross(x) * ti.sin(angle) + v * (v.dot(x) * (1 - ti.cos(angle)))


@ti.kernel
def project(camera: ARRAY, poses: ARRAY, image: int, seen: ARRAY, errors: ARRAY):
    for k in range(ROWS * COLUMNS):
        corner = ti.Vector([0.03 * (k % COLUMNS), 0.03 * (k // COLUMNS), 0.0], ti.f64)
        r = ti.Vector([poses[image, 0], poses[image, 1], poses[image, 2]])
        x = turned(r, corner) + ti.Vector([poses[image, 3], poses[image, 4], poses[image, 5]])
        u, v, square = x[0] / x[2], x[1] / x[2], (x[0] ** 2 + x[1] ** 2) / x[2] ** 2
        stretch = 1 + square * (camera[4] + square * camera[5])
        errors[k, 0] = camera[0] * u * stretch + camera[2] - seen[k, 0]
        errors[k, 1] = camera[1] * v * stretch + camera[3] - seen[k, 1]


def true_poses() -> np.ndarray:
    """The rotation vector and the place of the board in each image."""
    poses = np.random.default_rng(0).uniform(-0.5, 0.5, (IMAGES, 6))
    return poses * [1, 1, 1, 0.2, 0.2, 0.2] + [0, 0, 0, 0, 0, 0.5]


def view(image: int) -> tuple[Any, ...]:
    """The factory: what a worker needs of an image.  A real one would read the corners from a file."""
    camera, poses = np.zeros(6), np.zeros((IMAGES, 6))
    seen, errors = NOISE * np.random.default_rng(2 + image).standard_normal((2, ROWS * COLUMNS, 2))
    project(CAMERA, true_poses(), image, -seen, seen)
    return project, {"camera": camera, "poses": poses}, errors, (camera, poses, image, seen, errors)


def start() -> dict[str, np.ndarray]:
    """A first guess: no distortion, focal lengths 10 % off, poses 5 % of a radian and 2 cm off."""
    off = np.random.default_rng(1).standard_normal((IMAGES, 6)) * [0.05, 0.05, 0.05, 0.02, 0.02, 0.02]
    return {"camera": np.array([720.0, 720.0, 320.0, 240.0, 0.0, 0.0]), "poses": true_poses() + off}


def make_pool() -> ProcessPoolExecutor:
    pools.append(ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")))
    return pools[-1]


def kill(line: LeastSquaresIteration) -> None:
    """After the second step, end the worker that answers first."""
    if line.number == 2:
        os.kill(pools[-1].submit(os.getpid).result(), signal.SIGKILL)
        print("a worker was killed")


def main(arguments: Sequence[str] | None = None) -> int:
    options = plotting.parse(plotting.parser(__doc__.splitlines()[0], "sharded_calibration.png"), arguments)
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR)
    compared = Comparison(f"{IMAGES} images of {ROWS} x {COLUMNS} corners, {6 + 6 * IMAGES} parameters")
    shards = [(image,) for image in range(IMAGES)]
    settings = {"start": start(), "format": "csr", "ftol": 1e-4, "init": {"default_fp": ti.f64}}
    result = least_squares(view, shards=shards, executor=make_pool, callback=kill, progress=True, **settings)
    here = least_squares(view, shards=shards, **settings)
    compared.holds("the same digits as in one process", np.array_equal(result.x, here.x), f"{len(pools)} pools")
    camera, errors = result.split(result.x)["camera"], result.standard_errors()["camera"]
    for n, name in enumerate(("fx", "fy", "cx", "cy", "k1", "k2")):
        is_near = abs(camera[n] - CAMERA[n]) < 4 * errors[n]
        compared.holds(f"{name} = {camera[n]:.4f} +- {errors[n]:.4f}, the images were made with {CAMERA[n]}", is_near)
    if (figure := plotting.new_figure(9, 3.8)) is not None:
        left, right = figure.subplots(1, 2)
        points, colors = {"start": start(), "fitted": result.split(result.x)}, (plotting.ORANGE, plotting.BLUE)
        for (name, point), style, color in zip(points.items(), "xo", colors, strict=True):
            seen, off = residuals(point, 0)
            left.plot(*(seen + off).T, style, color=color, mfc="none", label=f"board, {name}")
        left.plot(*seen.T, ".", color=plotting.GREY, label="corners in image 0")
        left.set(xlabel="x (pixels)", ylabel="y (pixels)", aspect="equal", title="image 0")
        right.semilogy([line.cost for line in result.history], "o-", color=plotting.BLUE, markersize=4)
        right.set(xlabel="step; a worker is killed after step 2", ylabel="half the sum of squares", title="the fit")
        left.legend(fontsize=8)
        plotting.save(figure, options.output)
    return compared.exit_code


def residuals(point: dict[str, np.ndarray], image: int) -> tuple[np.ndarray, np.ndarray]:
    """The corners that an image shows, and how far the board at that point is off."""
    _, _, errors, (_, _, _, seen, _) = view(image)
    project(point["camera"], point["poses"], image, seen, errors)
    return seen, errors


if __name__ == "__main__":
    sys.exit(main())
