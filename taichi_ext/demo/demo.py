"""The demonstration: a renderer's whole Jacobian from one launch, checked, timed and used to fit a sphere.

The program is the one a user asked about in taichi-dev/taichi issue 6196: the depth of a sphere is traced through every
pixel of a 640 x 480 camera, and its Jacobian with respect to the sphere's radius and centre drives a least-squares fit.
"""

# Of an argument of ti.GUI with a default, as res=512, that number is all that pyright knows.
# pyright: reportArgumentType=false

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
class Timing:
    """Wall-clock seconds of the first call, which compiles, and the median of the later ones."""

    first: float
    warm: float


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


def time_calls(runs: dict[str, Callable[[], Any]]) -> dict[str, Timing]:
    """Time each call once cold and then warm, the calls taking turns so that drift of the machine meets all of them."""

    def seconds(run: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        run()
        ti.sync()
        return time.perf_counter() - begin

    first = {name: seconds(run) for name, run in runs.items()}
    warm: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            warm[name].append(seconds(run))
    return {name: Timing(first[name], statistics.median(warm[name])) for name in runs}


def pixels_inside(params: np.ndarray, margin: float) -> np.ndarray:
    """Where r² - |d|² > margin: the pixels whose rays pass the sphere well inside its silhouette.

    Args:
        params: r, cx, cy, cz, shape (4,).
        margin: how far inside, in squared units of length.

    Returns:
        A boolean array of shape (WIDTH, HEIGHT).
    """
    x, y = np.mgrid[:WIDTH, :HEIGHT].astype(np.float64)
    ray = np.stack([(x - WIDTH / 2) / FOCAL, (y - HEIGHT / 2) / FOCAL, np.ones_like(x)], axis=-1)
    ray /= np.linalg.norm(ray, axis=-1, keepdims=True)
    radius, centre = float(params[0]), np.asarray(params[1:], np.float64)
    return radius**2 - (centre @ centre - (ray @ centre) ** 2) > margin


def fit_sphere(scene: Scene) -> Fit:
    """Recover TRUTH from START by Gauss-Newton steps, each from one launch, on pixels inside both silhouettes."""
    params = START.astype(np.float64)
    target = pixels_inside(TRUTH, margin=1.0)
    history, residuals = [params], []
    for _ in range(FIT_STEPS):
        scene.scene_params.from_numpy(params.astype(np.float32))
        loss, jac = value_and_jacobian(scene.trace_loss, scene.scene_params, scene.d_losses)
        inside = target & pixels_inside(params, margin=1.0)
        residual, rows = loss[inside].astype(np.float64), jac[inside].astype(np.float64)
        params = params - np.linalg.lstsq(rows, residual, rcond=None)[0]
        history.append(params)
        residuals.append(np.sqrt(np.mean(residual**2)))
    scene.scene_params.from_numpy(params.astype(np.float32))
    scene.trace_loss()
    inside = target & pixels_inside(params, margin=1.0)
    residuals.append(np.sqrt(np.mean(scene.d_losses.to_numpy()[inside].astype(np.float64) ** 2)))
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


def print_times(timings: dict[str, Timing]) -> None:
    """Print the first and the warm time of each call, in milliseconds."""
    print(f"\n{'time in milliseconds':<28}{'first call':>12}{'warm median':>13}")
    for name, timing in timings.items():
        print(f"  {name:<26}{timing.first * 1e3:>12.1f}{timing.warm * 1e3:>13.2f}")


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
    ratio = timings[columns_name].warm / timings[fused_name].warm
    print(f"  FwdMode takes {ratio:.2f} times as long as jacobian")
    print_fit(fit)
    has_canvas = hasattr(ti, "GUI")
    if has_canvas:
        draw_summary(
            options.output,
            subtitle=f"jacobian: {timings[fused_name].warm * 1e3:.2f} ms in one launch.   FwdMode, column by column: "
            f"{timings[columns_name].warm * 1e3:.2f} ms.   {device}, float32.",
            depth=scene.image.to_numpy(),
            jac=fused,
            errors=fit.errors,
            residuals=fit.residuals,
        )
    all_hold = check_results(fused, relative, fit)
    print(f"\npicture: {options.output}" if has_canvas else f"\nno picture: {RUNTIME.name} has no canvas to draw on")
    return 0 if all_hold else 1


# The demonstration's picture, drawn with Taichi's own headless canvas, so that nothing else has to be installed.

INK, GREY, FAINT = 0x1F2430, 0x6B7280, 0xDDE1E7
BLUE, ORANGE = 0x2563A8, 0xD9622B
NO_HIT = 0.92

# Evenly spaced anchors, interpolated in sRGB: viridis (Smith and van der Walt) and RdBu (ColorBrewer), reversed.
SEQUENTIAL = (0x440154, 0x472D7B, 0x3B528B, 0x2C728E, 0x21918C, 0x28AE80, 0x5EC962, 0xADDC30, 0xFDE725)
DIVERGING = (
    0x053061,
    0x2166AC,
    0x4393C3,
    0x92C5DE,
    0xD1E5F0,
    0xF7F7F7,
    0xFDDBC7,
    0xF4A582,
    0xD6604D,
    0xB2182B,
    0x67001F,
)

SIZE = (1940, 1086)
PANEL = (480, 360)
COLUMNS, ROWS = (100, 740, 1360), (160, 646)
ZOOM = (slice(300, 420), slice(235, 325))


@dataclass(frozen=True)
class Axis:
    """A range of values along one side of a panel, and the values that get a label."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def fraction(self, value: Any) -> Any:
        """Where a value, or each of an array, lies between the ends, 0 to 1."""
        return (value - self.low) / (self.high - self.low)


class Canvas:
    """Text, lines and images in pixels, the origin at the top left, as a page is read."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size
        self.background = np.ones((*size, 3), np.float32)
        self.gui = ti.GUI("taichi_ext", res=size, show_gui=False)
        self.ruler = ti.GUI("taichi_ext ruler", res=(900, 64), show_gui=False, background_color=0)
        self.strokes: list[tuple[np.ndarray, np.ndarray, float, int]] = []
        self.dots: list[tuple[np.ndarray, float, int]] = []
        self.labels: list[tuple[str, float, float, int, int]] = []

    def paste(self, x: int, y: int, image: np.ndarray) -> None:
        """Put an image of shape (width, height, 3) with its top left corner at (x, y)."""
        width, height = image.shape[:2]
        bottom = self.size[1] - y - height
        self.background[x : x + width, bottom : bottom + height] = image

    def polyline(self, points: np.ndarray, width: float, color: int) -> None:
        """Join points of shape (n, 2) by straight lines."""
        self.strokes.append((self._scaled(points[:-1]), self._scaled(points[1:]), width / 2, color))

    def fill(self, x: float, y: float, width: float, height: float, color: int) -> None:
        """Fill a rectangle of whole pixels; upright and level lines are drawn so, because they come out sharp."""
        self.paste(round(x), round(y), np.full((round(width), round(height), 3), rgb(color), np.float32))

    def frame(self, x: float, y: float, width: float, height: float, color: int, line: int = 1) -> None:
        """Outline a rectangle, on its inside."""
        self.fill(x, y, width, line, color)
        self.fill(x, y + height - line, width, line, color)
        self.fill(x, y, line, height, color)
        self.fill(x + width - line, y, line, height, color)

    def dot(self, points: np.ndarray, radius: float, color: int) -> None:
        """Mark points of shape (n, 2)."""
        self.dots.append((self._scaled(points), radius, color))

    def text(self, x: float, y: float, text: str, size: int = 18, color: int = INK, anchor: float = 0.0) -> None:
        """Write text whose top is at y; ``anchor`` is the fraction of its width that lies left of x."""
        self.labels.append((text, x - anchor * self._text_width(text, size), y, size, color))

    def save(self, path: Path) -> None:
        """Draw all of it and write a PNG."""
        self.gui.set_image(self.background)
        for begin, end, radius, color in self.strokes:
            self.gui.lines(begin, end, radius=radius, color=color)
        for points, radius, color in self.dots:
            self.gui.circles(points, radius=radius, color=color)
        for text, x, y, size, color in self.labels:
            self.gui.text(text, (x / self.size[0], 1 - y / self.size[1]), font_size=size, color=color)
        ti.tools.imwrite(self.gui.get_image()[..., :3], str(path))

    def _scaled(self, points: np.ndarray) -> np.ndarray:
        return np.stack([points[:, 0] / self.size[0], 1 - points[:, 1] / self.size[1]], axis=1)

    def _text_width(self, text: str, size: int) -> int:
        self.ruler.clear()
        self.ruler.text(text, (0, 1), font_size=size, color=0xFFFFFF)
        inked = np.flatnonzero(self.ruler.get_image()[..., 0].any(axis=1))
        return int(inked[-1]) + 1 if inked.size else 0


def rgb(color: int) -> tuple[float, float, float]:
    """Red, green and blue, 0 to 1, of a colour written as 0xRRGGBB."""
    return (color >> 16) / 255, (color >> 8 & 255) / 255, (color & 255) / 255


def colorize(values: np.ndarray, anchors: tuple[int, ...]) -> np.ndarray:
    """Map values from 0 to 1 to colours, shape (..., 3); NaN becomes the colour of a pixel that was not hit."""
    colors = np.array([rgb(anchor) for anchor in anchors])
    position = np.linspace(0, 1, len(anchors))
    clipped = np.clip(np.nan_to_num(values), 0, 1)
    mapped = np.stack([np.interp(clipped, position, colors[:, k]) for k in range(3)], axis=-1)
    return np.where(np.isnan(values)[..., None], NO_HIT, mapped)


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Show each pixel as a block, or leave pixels out, so that the image gets the size."""
    x, y = ((np.arange(n) + 0.5) * m / n for n, m in zip(size, image.shape[:2], strict=True))
    return image[x.astype(int)[:, None], y.astype(int)]


def draw_axes(canvas: Canvas, left: int, top: int, titles: tuple[str, str], x: Axis, y: Axis, is_log: bool) -> None:
    """Draw the title, the label of the x axis, the frame and the labelled ticks of a panel."""
    width, height = PANEL
    title, label = titles
    canvas.text(left + width / 2, top + height + 32, label, color=GREY, anchor=0.5)
    canvas.text(left, top - 36, title, size=22)
    canvas.frame(left, top, width, height, GREY)
    for value in x.ticks:
        at = left + x.fraction(value) * width
        canvas.fill(at, top + height, 1, 6, GREY)
        canvas.text(at, top + height + 8, f"{value:g}", color=GREY, anchor=0.5)
    for value in y.ticks:
        at = top + height - y.fraction(value) * height
        canvas.fill(left - 6, at, 6, 1, GREY)
        canvas.text(left - 10, at - 10, f"1e{value:.0f}" if is_log else f"{value:g}", color=GREY, anchor=1.0)


def draw_image(
    canvas: Canvas,
    place: tuple[int, int],
    title: str,
    values: np.ndarray,
    x: Axis,
    y: Axis,
    scale: Axis,
    anchors: tuple[int, ...],
) -> None:
    """Draw a map of values over pixels, with its colour bar at the right."""
    (left, top), (width, height) = place, PANEL
    canvas.paste(left, top, resize(colorize(scale.fraction(values), anchors), PANEL))
    draw_axes(canvas, left, top, (title, "x (pixels)"), x, y, is_log=False)
    canvas.text(left - 10, top + 0.61 * height - 10, "y (pixels)", color=GREY, anchor=1.0)
    bar = colorize(np.tile(np.linspace(0, 1, height), (16, 1)), anchors)
    canvas.paste(left + width + 14, top, bar)
    canvas.frame(left + width + 14, top, 16, height, GREY)
    for value in scale.ticks:
        at = top + (1 - scale.fraction(value)) * height
        canvas.fill(left + width + 30, min(at, top + height - 1), 6, 1, GREY)
        canvas.text(left + width + 40, at - 10, f"{value:g}", color=GREY)


def draw_convergence(canvas: Canvas, left: int, top: int, errors: np.ndarray, residuals: np.ndarray) -> None:
    """Draw the error and the residual of each step of the fit on a logarithmic axis."""
    width, height = PANEL
    curves = {"largest error of a parameter": (errors, BLUE), "depth residual (RMS)": (residuals, ORANGE)}
    # An exact 0 has no place on a logarithmic axis: the curve ends before it, and an open mark below stands for it.
    logs = {name: np.log10(values[: np.append(values, 0).argmin()]) for name, (values, _) in curves.items()}
    low = np.floor(min(log.min() for log in logs.values()) - 0.1) - any(
        (values == 0).any() for values in (errors, residuals)
    )
    high = np.ceil(max(log.max() for log in logs.values()))
    steps = len(errors) - 1
    x = Axis(-0.25, steps + 0.25, tuple(range(steps + 1)))
    y = Axis(low, high, tuple(np.arange(low, high + 1)))
    for value in y.ticks[1:-1]:
        at = top + height - y.fraction(value) * height
        canvas.fill(left, at, width, 1, FAINT)
    titles = ("Gauss-Newton fit: errors in scene units", "step (an open mark at the bottom: exactly 0)")
    draw_axes(canvas, left, top, titles, x, y, is_log=True)
    for row, (name, (values, color)) in enumerate(curves.items()):
        zeros = [(left + width * x.fraction(step), top + height - 9.0) for step in np.flatnonzero(values == 0)]
        if zeros:
            canvas.dot(np.array(zeros), 7, color)
            canvas.dot(np.array(zeros), 4, 0xFFFFFF)
        at_x = left + width * np.array([x.fraction(step) for step in range(len(logs[name]))])
        at_y = top + height * (1 - np.array([y.fraction(value) for value in logs[name]]))
        canvas.polyline(np.stack([at_x, at_y], axis=1), 2.5, color)
        canvas.dot(np.stack([at_x, at_y], axis=1), 5, color)
        line = top + 26 + 28 * row
        canvas.polyline(np.array([(left + 196, line), (left + 226, line)], float), 2.5, color)
        canvas.dot(np.array([(left + 211, line)], float), 5, color)
        canvas.text(left + 236, line - 11, name)


def draw_summary(
    path: Path, subtitle: str, depth: np.ndarray, jac: np.ndarray, errors: np.ndarray, residuals: np.ndarray
) -> None:
    """Write the picture: the depth image, the columns of its Jacobian around the sphere, and the course of the fit.

    Args:
        path: the PNG to write.
        subtitle: the line below the title.
        depth: the depth of each pixel, 0 where the sphere is not hit, shape (width, height).
        jac: its Jacobian with respect to r, cx, cy and cz, shape (width, height, 4).
        errors: the largest error of a parameter at each step of the fit.
        residuals: the depth residual at each step of the fit.
    """
    canvas = Canvas(SIZE)
    canvas.text(COLUMNS[0], 26, "The Jacobian of a sphere renderer, all columns in one launch", size=34)
    canvas.text(COLUMNS[0], 74, subtitle, size=20, color=GREY)
    note = "Columns of J in the orange frame. Colours end at -4 and 4; grey pixels miss the sphere."
    canvas.text(COLUMNS[2] + PANEL[0], 74, note, size=20, color=GREY, anchor=1.0)

    hit = depth > 0
    nearest, farthest = float(np.floor(depth[hit].min())), float(np.ceil(depth[hit].max()))
    depth_scale = Axis(nearest, farthest, tuple(range(int(nearest), int(farthest) + 1, 5)))
    all_x = Axis(0, depth.shape[0], (0, 160, 320, 480, 640))
    all_y = Axis(0, depth.shape[1], (0, 120, 240, 360, 480))
    place = (COLUMNS[0], ROWS[0])
    shown = np.where(hit, depth, np.nan)
    draw_image(canvas, place, "target depth image (scene units)", shown, all_x, all_y, depth_scale, SEQUENTIAL)
    zoom_left, zoom_right = (all_x.fraction(at) * PANEL[0] for at in (ZOOM[0].start, ZOOM[0].stop))
    zoom_top, zoom_bottom = ((1 - all_y.fraction(at)) * PANEL[1] for at in (ZOOM[1].stop, ZOOM[1].start))
    canvas.frame(
        place[0] + zoom_left, place[1] + zoom_top, zoom_right - zoom_left, zoom_bottom - zoom_top, ORANGE, line=2
    )
    draw_convergence(canvas, COLUMNS[0], ROWS[1], errors, residuals)

    zoom_x = Axis(ZOOM[0].start, ZOOM[0].stop, (300, 330, 360, 390, 420))
    zoom_y = Axis(ZOOM[1].start, ZOOM[1].stop, (240, 260, 280, 300, 320))
    column_scale = Axis(-4, 4, (-4, -2, 0, 2, 4))
    for k, name in enumerate(("r", "cx", "cy", "cz")):
        column = jac[..., k]
        shown = np.where((jac != 0).any(axis=-1), column, np.nan)[ZOOM]
        place = (COLUMNS[1 + k % 2], ROWS[k // 2])
        draw_image(canvas, place, f"d depth / d {name}", shown, zoom_x, zoom_y, column_scale, DIVERGING)
    canvas.save(path)
