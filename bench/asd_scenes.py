"""The six scenes of ASD, a published method for discontinuous shaders, against supersampled images.

The scenes are the checks of gradients (``grad_*.py``) in the programs of Y. Belhe and others, *Automatic Sampling for
Discontinuities in Differentiable Shaders*, ACM Transactions on Graphics 44 (6), 2025: functions of a position in the
unit square, with their parameters.  Here ``pixel`` draws an image of each.  The sites of the Voronoi diagram and their
values, one for each, come from another generator of random numbers.

    python bench/asd_scenes.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import taichi as ti

from taichi_ext import Jacobian, pixel

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "oracles"))
from supersampled import errors_by_column, sampler  # a reference of the tests

SIZE = 32  # pixels


@dataclass(frozen=True)
class Scene:
    """A function of a position in the unit square.

    Attributes:
        name: of the shader.
        params: its parameters.
        shade: makes the function from a field of the parameters.
    """

    name: str
    params: np.ndarray
    shade: Callable[[Any], Any]


@ti.func
def side(p, a, b, x, y):
    return (p[b, 0] - p[a, 0]) * (y - p[a, 1]) - (p[b, 1] - p[a, 1]) * (x - p[a, 0])


@ti.func
def cube_root(a):
    return ti.select(a < 0, -1.0, 1.0) * abs(a) ** (1 / 3)


@ti.func
def squared_distance(d, b, c, t):
    near = ti.max(0.0, ti.min(1.0, t))
    return (d + (c + b * near) * near).norm_sqr()


@ti.func
def bezier_distance(pos, start, control, end):
    """The distance from a quadratic curve, by the roots of a cubic equation (I. Quilez)."""
    a, b, d = control - start, start - 2.0 * control + end, start - pos
    c = 2.0 * a
    kk = 1 / b.dot(b)
    kx, ky, kz = kk * a.dot(b), kk * (2 * a.dot(a) + d.dot(b)) / 3, kk * d.dot(a)
    p, q = ky - kx * kx, kx * (2 * kx * kx - 3 * ky) + kz
    h = q * q + 4 * p * p * p
    found = 0.0
    if h >= 0:
        root = ti.sqrt(h)
        found = squared_distance(d, b, c, cube_root(0.5 * (root - q)) + cube_root(0.5 * (-root - q)) - kx)
    else:
        z = ti.sqrt(-p)
        v = ti.acos(q / (2 * p * z)) / 3
        m, n = ti.cos(v), ti.sin(v) * ti.sqrt(3.0)
        found = ti.min(squared_distance(d, b, c, 2 * m * z - kx), squared_distance(d, b, c, (-n - m) * z - kx))
    return ti.sqrt(found)


def half_plane(p: Any) -> Any:
    @ti.func
    def shade(x, y):
        return ti.select(x + y - p[0, 0] < 0, 1.0, 0.0)

    return shade


def triangle(p: Any) -> Any:
    @ti.func
    def shade(x, y):
        a, b, c = side(p, 0, 1, x, y), side(p, 1, 2, x, y), side(p, 2, 0, x, y)
        value = 0.0
        if (a >= 0 and b >= 0 and c >= 0) or (a < 0 and b <= 0 and c <= 0):
            value = 1.0
        return value

    return shade


def circles(p: Any) -> Any:
    @ti.func
    def shade(x, y):
        value = 0.0
        for n in range(p.shape[0]):
            if (x - p[n, 0]) ** 2 + (y - p[n, 1]) ** 2 - p[n, 2] ** 2 > 0:
                value += p[n, 3]
        return value

    return shade


def bezier(p: Any) -> Any:
    @ti.func
    def shade(x, y):
        points = [ti.Vector([p[0, 2 * n], p[0, 2 * n + 1]]) for n in ti.static(range(3))]
        distance = bezier_distance(ti.Vector([x, y]), points[0], points[1], points[2])
        return ti.select(distance - p[0, 6] <= 0, 1.0, 0.0)

    return shade


def voronoi(p: Any) -> Any:
    @ti.func
    def shade(x, y):
        least = 10.0
        value = 0.0
        for n in range(p.shape[0]):
            distance = ti.sqrt((x - p[n, 0]) ** 2 + (y - p[n, 1]) ** 2)
            if least - distance > 0:
                least = distance
                value = p[n, 2]
        return value

    return shade


def sites() -> np.ndarray:
    """3 x 3 sites, moved a little from the middles of squares, and their colours."""
    drawn = np.random.default_rng(42).random((9, 3))
    middles = (np.indices((3, 3)).reshape(2, -1).T + 0.5) / 3
    return np.column_stack([middles + (drawn[:, :2] - 0.5) * 0.08 / 3, drawn[:, 2]])


SCENES = (
    Scene("half_plane", np.array([[0.5]]), half_plane),
    Scene("triangle", np.array([[0.2, 0.2], [0.8, 0.3], [0.3, 0.8]]), triangle),
    Scene("circle_single", np.array([[0.5, 0.5, 0.4, 1.0]]), circles),
    Scene("circles", np.array([[0.3, 0.3, 0.15, 0.8], [0.6, 0.5, 0.2, 0.5], [0.4, 0.7, 0.1, 0.9]]), circles),
    Scene("bezier_curve", np.array([[0.2, 0.2, 0.5, 0.8, 0.8, 0.2, 0.02]]), bezier),
    Scene("voronoi_simple", sites(), voronoi),
)


def errors(scene: Scene) -> tuple[np.ndarray, float, float]:
    """The errors of J by column, the largest error of a value, and the CPU time of J in seconds."""
    p, image = ti.field(ti.f64, shape=scene.params.shape), ti.field(ti.f64, shape=(SIZE, SIZE))
    p.from_numpy(scene.params)
    shade = scene.shade(p)

    @ti.func
    def shown(x, y):
        return shade((x + 0.5) / SIZE, (y + 0.5) / SIZE)

    @ti.kernel
    def draw():
        for i, j in image:
            image[i, j] = pixel(shown, at=(float(i), float(j)), antialias=True)

    render = sampler(shown, image, 20_000)
    by_column = errors_by_column(draw, p, image, render, np.full(p.shape, 0.5 / SIZE))
    render()
    expected = image.to_numpy()
    plan = Jacobian(draw, p, image)
    plan()
    start = time.process_time()
    plan()
    seconds = time.process_time() - start
    return by_column, float(np.abs(image.to_numpy() - expected).max()), seconds


def main() -> None:
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR, cpu_max_num_threads=1)
    print("| scene | parameters | median | worst | value | CPU ms |\n|---|--:|--:|--:|--:|--:|")
    for scene in SCENES:
        found, value, seconds = errors(scene)
        row = f"{100 * np.median(found):.1f} % | {100 * found.max():.1f} % | {value:.4f} | {1000 * seconds:.0f}"
        print(f"| `{scene.name}` | {scene.params.size} | {row} |", flush=True)


if __name__ == "__main__":
    main()
