"""The demonstration: a renderer's whole Jacobian from one launch, checked, timed and used to fit a sphere.

The program is the one a user asked about in taichi-dev/taichi issue 6196: the depth of a sphere is traced through every
pixel of a 640 x 480 camera, and its Jacobian with respect to the sphere's radius and centre drives a least-squares fit.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from taichi_ext import jacobian, value_and_jacobian
from taichi_ext.backend import RUNTIME, ti

vec3 = ti.math.vec3
WIDTH, HEIGHT, FOCAL = 640, 480, 400.0
PARAMETERS = ("r", "cx", "cy", "cz")
TRUTH = np.array([10.0, 10.0, 10.0, 100.0], np.float32)
START = np.array([10.1, 10.1, 10.1, 100.1], np.float32)

PIXEL = (360, 280)
# Computed in float64 from the closed form of the derivative, at START.
REFERENCE_PIXEL = np.array([-1.000078, 0.107752, 0.107752, 0.988400])
REFERENCE_SUMS = np.array([-10500.16, 474.597, 474.597, 5872.767])

ROUNDS = 21
FIT_STEPS = 4
FIT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Scene:
    """The fields and the kernel of one instance of the program."""

    scene_params: Any
    image: Any
    d_losses: Any
    trace_loss: Callable[[], None]


@dataclass(frozen=True)
class Fit:
    """The parameters before each Gauss-Newton step and after the last, and the depth residual (RMS) at each."""

    params: np.ndarray
    residuals: np.ndarray

    @property
    def errors(self) -> np.ndarray:
        """The largest absolute error of a parameter, at each step."""
        return np.abs(self.params - TRUTH).max(axis=1)


def make_scene(needs_dual: bool) -> Scene:
    """Build the program on fields of its own; ``needs_dual`` is for Taichi's FwdMode, jacobian() needs nothing."""
    rays = ti.Vector.field(3, ti.f32, shape=(WIDTH, HEIGHT))
    image = ti.field(ti.f32, shape=(WIDTH, HEIGHT))
    d_losses = ti.field(ti.f32, shape=(WIDTH, HEIGHT), needs_dual=needs_dual)
    scene_params = ti.field(ti.f32, shape=4, needs_dual=needs_dual)

    @ti.kernel
    def init_rays():
        for i, j in rays:
            v = vec3((i - WIDTH / 2) / FOCAL, (j - HEIGHT / 2) / FOCAL, 1.0)
            rays[i, j] = v.normalized()

    @ti.func
    def ray_sphere(ray):
        r = scene_params[0]
        sc = vec3(scene_params[1], scene_params[2], scene_params[3])
        tc = sc.dot(ray) * ray
        d = sc - tc
        depth = 0.0
        if r > d.norm():
            depth = tc.norm() - ti.sqrt(r * r - d.norm_sqr())
        else:
            depth = 0.0
        return depth

    @ti.kernel
    def trace_loss():
        for i, j in d_losses:
            d_losses[i, j] = ray_sphere(rays[i, j]) - image[i, j]

    init_rays()
    scene_params.from_numpy(TRUTH)
    trace_loss()
    image.copy_from(d_losses)
    scene_params.from_numpy(START)
    return Scene(scene_params, image, d_losses, trace_loss)


def jacobian_by_columns(scene: Scene) -> np.ndarray:
    """The same Jacobian by Taichi's own forward mode, which takes one seed, and so one launch, per parameter."""
    result = np.empty((WIDTH, HEIGHT, len(PARAMETERS)), np.float32)
    for k in range(len(PARAMETERS)):
        seed = [float(k == column) for column in range(len(PARAMETERS))]
        with ti.ad.FwdMode(loss=scene.d_losses, param=scene.scene_params, seed=seed):
            scene.trace_loss()
        result[..., k] = scene.d_losses.dual.to_numpy()
    return result


def time_calls(runs: dict[str, Callable[[], Any]]) -> dict[str, tuple[float, float]]:
    """The seconds of the first call, which compiles, and the median of later ones, which take turns on the machine."""

    def seconds(run: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        run()
        ti.sync()
        return time.perf_counter() - begin

    first = {name: seconds(run) for name, run in runs.items()}
    rounds = [{name: seconds(run) for name, run in runs.items()} for _ in range(ROUNDS)]
    return {name: (first[name], statistics.median(times[name] for times in rounds)) for name in runs}


def pixels_inside(params: np.ndarray) -> np.ndarray:
    """Where r² - |d|² > 1, shape (WIDTH, HEIGHT): the pixels whose rays pass the sphere well inside its silhouette."""
    x, y = np.mgrid[:WIDTH, :HEIGHT].astype(np.float64)
    ray = np.stack([(x - WIDTH / 2) / FOCAL, (y - HEIGHT / 2) / FOCAL, np.ones_like(x)], axis=-1)
    ray /= np.linalg.norm(ray, axis=-1, keepdims=True)
    radius, centre = float(params[0]), np.asarray(params[1:], np.float64)
    return radius**2 - (centre @ centre - (ray @ centre) ** 2) > 1.0


def fit_sphere(scene: Scene) -> Fit:
    """Recover TRUTH from START by Gauss-Newton steps, each from one launch, on pixels inside both silhouettes."""
    params, target = START.astype(np.float64), pixels_inside(TRUTH)
    history, residuals = [], []
    for _ in range(FIT_STEPS + 1):
        scene.scene_params.from_numpy(params.astype(np.float32))
        loss, jac = value_and_jacobian(scene.trace_loss, scene.scene_params, scene.d_losses)
        inside = target & pixels_inside(params)
        residual, rows = loss[inside].astype(np.float64), jac[inside].astype(np.float64)
        history.append(params)
        residuals.append(np.sqrt(np.mean(residual**2)))
        params = params - np.linalg.lstsq(rows, residual, rcond=None)[0]
    return Fit(np.array(history), np.array(residuals))


def print_jacobians(fused: np.ndarray, columns: np.ndarray) -> None:
    """Print a pixel of both Jacobians and their column sums next to the values of the closed form."""
    tables = (
        (f"J[{PIXEL[0]}, {PIXEL[1]}]", REFERENCE_PIXEL, fused[PIXEL], columns[PIXEL], "12.6f"),
        ("column sums", REFERENCE_SUMS, column_sums(fused), column_sums(columns), "12.3f"),
    )
    for title, reference, ours, theirs, style in tables:
        print(f"\n{title:<28}" + "".join(f"{'d/d' + name:>12}" for name in PARAMETERS))
        for name, row in (("closed form, float64", reference), ("taichi_ext", ours), ("FwdMode", theirs)):
            print(f"  {name:<26}" + "".join(format(float(value), style) for value in row))


def print_times(timings: dict[str, tuple[float, float]]) -> None:
    """Print the first and the warm time of each call, in milliseconds."""
    print(f"\n{'time in milliseconds':<28}{'first call':>12}{'warm median':>13}")
    for name, (first, warm) in timings.items():
        print(f"  {name:<26}{first * 1e3:>12.1f}{warm * 1e3:>13.2f}")


def print_fit(fit: Fit) -> None:
    """Print the course of the fit, one line per step."""
    print(f"\n{'Gauss-Newton':<16}" + "".join(f"{name:>12}" for name in PARAMETERS) + f"{'error':>11}{'residual':>11}")
    for step, (params, error, residual) in enumerate(zip(fit.params, fit.errors, fit.residuals, strict=True)):
        row = "".join(f"{value:>12.6f}" for value in params)
        print(f"  step {step:<9}{row}{error:>11.1e}{residual:>11.1e}")


def column_sums(jac: np.ndarray) -> np.ndarray:
    """The sum of each column of J over all pixels, added up in float64."""
    return jac.sum(axis=(0, 1), dtype=np.float64)


def largest_difference(fused: np.ndarray, columns: np.ndarray) -> tuple[float, float]:
    """The largest difference of two Jacobians: absolute, and relative to the length of the pixel's row."""
    difference = np.abs(fused.astype(np.float64) - columns).max(axis=-1)
    length = np.linalg.norm(columns.astype(np.float64), axis=-1)
    return float(difference.max()), float(np.max(difference / np.maximum(length, 1.0)))


def check_results(fused: np.ndarray, relative: float, fit: Fit) -> bool:
    """Print each check and whether it passed."""
    checks = {
        # A device may contract r² - |d|² into other roundings, which the square root magnifies at the silhouette.
        "one launch agrees with FwdMode": relative < 1e-3,
        "a pixel's row agrees with the closed form": np.allclose(fused[PIXEL], REFERENCE_PIXEL, rtol=1e-5, atol=2e-6),
        "column sums agree with the closed form": np.allclose(column_sums(fused), REFERENCE_SUMS, rtol=1e-3),
        f"the fit reaches [10, 10, 10, 100] in {FIT_STEPS} steps": fit.errors[-1] < FIT_TOLERANCE,
    }
    print()
    for name, holds in checks.items():
        print(f"  {'ok    ' if holds else 'FAILED'}  {name}")
    return all(checks.values())


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m taichi_ext",
        description="Whole Jacobian of a sphere renderer in one launch: checked against Taichi's FwdMode and a closed "
        "form, timed, used in a Gauss-Newton fit, and drawn.",
    )
    parser.add_argument("--arch", choices=("cpu", "cuda", "vulkan", "metal"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("sphere_jacobian.png"),
        metavar="PATH.png",
        help="where to write the picture (default: %(default)s)",
    )
    parsed = parser.parse_args(arguments)
    if parsed.output.suffix.lower() != ".png":
        parser.error(f"--output must end in .png, not {parsed.output.name!r}")
    if not parsed.output.resolve().parent.is_dir():
        parser.error(f"--output: there is no folder {parsed.output.parent}")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration.

    Args:
        arguments: the command line, ``sys.argv[1:]`` if None.

    Returns:
        The exit status: 0 if every check held, 1 if one did not, 2 if there is no such device.
    """
    options = parse_arguments(arguments)
    # FwdMode needs force_scalarize_matrix for a kernel with vectors. No cache on disk: a first call includes compiling.
    arch = getattr(ti, options.arch)
    ti.init(arch=arch, force_scalarize_matrix=True, offline_cache=False, log_level=ti.WARN)
    if ti.cfg.arch != arch:  # pyright: ignore[reportOptionalMemberAccess]  # is set by ti.init
        print(f"{RUNTIME.name.title()} finds no {options.arch} device here: try --arch cpu", file=sys.stderr)
        return 2
    scene, dual_scene = make_scene(needs_dual=False), make_scene(needs_dual=True)
    device = f"{options.arch}, {os.cpu_count()} cores" if options.arch == "cpu" else options.arch
    print(f"Depth of a sphere in {WIDTH} x {HEIGHT} pixels and its {len(PARAMETERS)} parameters, float32, {device}")

    fused_name, columns_name = "jacobian, one launch", f"FwdMode, {len(PARAMETERS)} launches"
    timings = time_calls(
        {
            "the kernel alone": scene.trace_loss,
            fused_name: lambda: jacobian(scene.trace_loss, scene.scene_params, scene.d_losses),
            columns_name: lambda: jacobian_by_columns(dual_scene),
        }
    )
    fused = jacobian(scene.trace_loss, scene.scene_params, scene.d_losses)
    columns = jacobian_by_columns(dual_scene)
    absolute, relative = largest_difference(fused, columns)
    fit = fit_sphere(scene)

    print_jacobians(fused, columns)
    print(f"\nlargest difference of the two: {absolute:.1e}, relative to the pixel's row {relative:.1e}")
    print_times(timings)
    ratio = timings[columns_name][1] / timings[fused_name][1]
    print(f"  FwdMode takes {ratio:.2f} times as long as jacobian")
    print_fit(fit)
    has_pictures = hasattr(ti.tools, "imwrite")
    if has_pictures:
        draw_summary(options.output, scene.image.to_numpy(), fused)
    all_hold = check_results(fused, relative, fit)
    print(f"\npicture: {options.output} ({LEGEND})" if has_pictures else f"\nno picture: {RUNTIME.name} writes none")
    return 0 if all_hold else 1


# The demonstration's picture, written by Taichi, so that nothing else has to be installed.

NO_HIT = 0.92  # grey
ZOOM = (slice(300, 420), slice(235, 325))  # the pixels around the sphere
LEGEND = "above: depth, depth around the sphere, dJ/dr; below: dJ/dcx, dJ/dcy, dJ/dcz; red is positive, blue negative"


def enlarge(image: np.ndarray) -> np.ndarray:
    """Show each pixel as a block, so that the image has the size of the camera's."""
    x, y = ((np.arange(n) + 0.5) * m / n for n, m in zip((WIDTH, HEIGHT), image.shape[:2], strict=True))
    return image[x.astype(int)[:, None], y.astype(int)]


def draw_summary(path: Path, depth: np.ndarray, jac: np.ndarray) -> None:
    """Write the picture, six images as ``LEGEND`` says.

    Args:
        path: the PNG to write.
        depth: the depth of each pixel, 0 where the sphere is not hit, shape (width, height).
        jac: its Jacobian with respect to r, cx, cy and cz, shape (width, height, 4).
    """
    hit, part = depth > 0, np.clip(jac / 4, -1, 1)[ZOOM]
    near = (depth.max() - depth) / (depth.max() - depth[hit].min())
    of_depth = np.where(hit[..., None], near[..., None] * (0.3, 0.8, 0.5) + (0.25, 0.05, 0.35), NO_HIT)
    colors = np.stack([np.minimum(1 + part, 1), 1 - np.abs(part), np.minimum(1 - part, 1)], axis=-1)
    colors = np.where((jac != 0).any(axis=-1)[ZOOM][..., None, None], colors, NO_HIT)
    columns = [enlarge(colors[:, :, k]) for k in range(4)]
    images = [*columns[1:], of_depth, enlarge(of_depth[ZOOM]), columns[0]]
    rows = [np.concatenate(images[n : n + 3]) for n in (0, 3)]  # the first index to the right, the second one up
    ti.tools.imwrite(np.concatenate(rows, axis=1).astype(np.float32), str(path))
