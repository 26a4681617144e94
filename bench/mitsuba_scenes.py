"""Nine scenes with moving discontinuities, those of Mitsuba 3's own tests of gradients, beside Mitsuba.

The scenes are those of ``DISCONTINUOUS_CONFIGS`` in Mitsuba's ``test_ad_integrators.py``, with spheres in the place of
its meshes of spheres.  The parameter moves or scales an object.  Each image is a kernel that finds what a ray meets;
``pixel`` and ``edge`` add the motion of outlines and shadows.  The error is that of Mitsuba's tests, the mean of
``|a - ref| / max(|ref|, 0.02)`` over the pixels, and so are the thresholds.

The reference integrates each row of pixels: between the ends of the shape, which are known for each scan line, and by
Gauss' rule along and across the lines; shadows of area lights in closed form.  It is differentiated by central
differences, of images without noise.

    python bench/mitsuba_scenes.py            # errors of taichi_ext
    python bench/mitsuba_scenes.py --mitsuba  # beside Mitsuba's projective integrator, with a second of CPU time
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import taichi as ti

from taichi_ext import Jacobian, edge, pixel

Array = np.ndarray
LENS = math.hypot(36, 24) / (2 * 50) / math.sqrt(2)  # half the width of an image at distance 1; Mitsuba's 50 mm
GOLDEN = (math.sqrt(5) - 1) / 2  # steps of the nodes
STEP = 1e-4  # of the central differences
NODES = 128  # of the area lights that cast shadows


@dataclass(frozen=True)
class Scene:
    """A scene: as a kernel, as an integral over scan lines, and for Mitsuba.

    Attributes:
        name: of Mitsuba's test.
        threshold: the largest mean error in that test.
        kernel: makes the kernel that draws an image from the parameter.
        outline: for a parameter the rows where the shape begins, ends or has corners, and a function that gives its
            left and right ends in rows; images extend from -1 to 1.
        inside: the value in the shape at ``(u, v)`` for a parameter.
        outside: the value elsewhere.
        mitsuba: the objects for Mitsuba.
        moved: those that move.
        motion: how, as a transformation of Mitsuba by a parameter.
        eye: where the camera is, as z.
        half_width: of the image at distance 1.
        resolution: of the image, in pixels.
        integrator: options of Mitsuba's integrator.
    """

    name: str
    threshold: float
    kernel: Callable[[Scene, Any, Any], Callable[[], None]]
    outline: Callable[[float], tuple[Sequence[float], Callable[[Array], tuple[Array, Array]]]]
    inside: Callable[[Array, Array, float], Array]
    outside: float
    mitsuba: Callable[[Any], dict[str, Any]]
    moved: tuple[str, ...]
    motion: Callable[[Any, Any], Any] = lambda T, theta: T().translate([theta, 0, 0])
    eye: float = 4.0
    half_width: float = LENS
    resolution: int = 128
    integrator: dict[str, Any] = field(default_factory=lambda: {"sppi": 0})  # no shadows


# --- reference --------------------------------------------------------------------------------------------------------


def reference(scene: Scene) -> Array:
    """The derivative of the image: a row of the result for each row of pixels, the lowest first."""
    high, low = (image_of(scene, theta) for theta in (STEP, -STEP))
    return (high - low) / (2 * STEP)


def image_of(scene: Scene, theta: float, across: int = 160, along: int = 6) -> Array:
    """The image, by Gauss' rule within pixels, between the ends of the shape."""
    n = scene.resolution
    borders, (cuts, ends) = np.linspace(-1, 1, n + 1), scene.outline(theta)
    result = np.full((n, n), scene.outside)
    across_nodes, across_weights = np.polynomial.legendre.leggauss(across)
    along_nodes, along_weights = np.polynomial.legendre.leggauss(along)
    for row in range(n):
        low, high = borders[row : row + 2]
        parts = [low, *sorted(c for c in cuts if low < c < high), high]
        for a, b in pairwise(parts):
            v = (a + b) / 2 + (b - a) / 2 * across_nodes
            first, last = (np.clip(e[:, None], borders[:-1], borders[1:]) for e in ends(v))
            columns = np.flatnonzero((last > first).any(0))
            if len(columns):
                first, length = first[:, columns], np.maximum(last - first, 0)[:, columns]
                u = first[..., None] + length[..., None] * (along_nodes + 1) / 2
                added = scene.inside(u, np.broadcast_to(v[:, None, None], u.shape), theta) - scene.outside
                by_line = (added * along_weights).sum(-1) / 2 * length / (borders[1] - borders[0])
                result[row, columns] += (across_weights[:, None] * by_line).sum(0) / 2 * (b - a) / (high - low)
    return result


def between(low: float, high: float, ends: Callable[[Array], tuple[Any, Any]]) -> Any:
    """The outline of a shape between two rows."""

    def of_row(v: Array) -> tuple[Array, Array]:
        left, right = (e + 0 * v for e in ends(v))
        return left, np.where((v > low) & (v < high), right, left)

    return (low, high), of_row


def conic(a: float, b: float, c: float, by_row: float) -> Any:
    """The outline of ``a u^2 + 2 b u + c + by_row v^2 < 0``."""
    end = math.sqrt((b * b / a - c) / by_row)

    def of_row(v: Array) -> tuple[Array, Array]:
        size = np.sqrt(np.maximum(b * b - a * (c + by_row * v * v), 0)) / a
        return -b / a - size, -b / a + size

    return (-end, end), of_row


def polygon_irradiance(corners: Sequence[tuple[Any, Any, Any]], normal: tuple[float, float, float]) -> Array:
    """The irradiance of a polygon of radiance 1 at the origin, above its horizon (Lambert, Photometria, 1760)."""
    points = [np.stack(np.broadcast_arrays(*corner), -1) for corner in corners]
    total: Any = 0.0
    for p, q in zip(points, points[1:] + points[:1], strict=True):
        across = np.cross(p, q)
        size = np.linalg.norm(across, axis=-1)
        angle = np.arctan2(size, (p * q).sum(-1))
        total = total + angle * (across @ np.array(normal)) / np.where(size > 0, size, 1)
    return np.abs(total) / 2


def lens(first: Array, second: Array, distance: Array) -> Array:
    """The area that two discs have in common, by their radii and the distance of their centres."""
    d = np.clip(distance, np.abs(first - second) + 1e-15, first + second - 1e-15)
    a = np.arccos(np.clip((d * d + first**2 - second**2) / (2 * d * first), -1, 1))
    b = np.arccos(np.clip((d * d + second**2 - first**2) / (2 * d * second), -1, 1))
    return first**2 * (a - np.sin(2 * a) / 2) + second**2 * (b - np.sin(2 * b) / 2)


# --- rectangles, discs and spheres in front of a background ---


def rectangle(name: str, threshold: float, centre: float, inside: float, outside: float, objects: Any) -> Scene:
    def kernel(scene: Scene, theta: Any, image: Any) -> Callable[[], None]:
        size = scene.eye * scene.half_width * 2 / scene.resolution

        @ti.func
        def shade(x, y):
            u, v = (x + 0.5 - scene.resolution / 2) * size, (y + 0.5 - scene.resolution / 2) * size
            value = outside
            if abs(u - centre - theta[None]) < 1 and abs(v) < 1:
                value = inside
            return value

        return drawn(shade, image)

    size = 4 * LENS
    return Scene(
        name,
        threshold,
        kernel,
        lambda t: between(-1 / size, 1 / size, lambda v: ((centre + t - 1) / size, (centre + t + 1) / size)),
        lambda u, v, t: 0 * u + inside,
        outside,
        objects,
        ("shape",),
    )


def drawn(shade: Any, image: Any) -> Callable[[], None]:
    """A kernel that draws a function of the position; its edges are found."""

    @ti.kernel
    def draw():
        for i, j in image:
            image[i, j] = pixel(shade, at=(float(i), float(j)), antialias=True)

    return draw


def sphere(name: str, centre: float, is_scaled: bool, resolution: int) -> Scene:
    def kernel(scene: Scene, theta: Any, image: Any) -> Callable[[], None]:
        size = scene.half_width * 2 / scene.resolution

        @ti.func
        def shade(x, y):
            d = ti.Vector([(x + 0.5 - scene.resolution / 2) * size, (y + 0.5 - scene.resolution / 2) * size, -1.0])
            to_centre = ti.Vector([centre, 0.0, -scene.eye])
            radius = 1.0
            if ti.static(is_scaled):
                radius += theta[None]
            else:
                to_centre.x += theta[None]
            along = d.dot(to_centre)
            value = 0.0
            if along**2 > d.norm_sqr() * (to_centre.norm_sqr() - radius**2):
                value = 1.0
            return value

        return drawn(shade, image)

    def outline(t: float) -> Any:
        c, radius, h = (centre, 1 + t, LENS) if is_scaled else (centre + t, 1.0, LENS)
        far = c * c + 16 - radius**2
        return conic(h * h * (far - c * c), -4 * h * c, far - 16, h * h * far)

    return Scene(
        name,
        0.08,
        kernel,
        outline,
        lambda u, v, t: 0 * u + 1.0,
        0.0,
        lambda T: {"shape": {"type": "sphere", "center": [centre, 0, 0], **emitter(1.0)}},
        ("shape",),
        (lambda T, theta: T().scale(1 + theta)) if is_scaled else (lambda T, theta: T().translate([theta, 0, 0])),
        resolution=resolution,
    )


def emitter(radiance: float) -> dict[str, Any]:
    return {"emitter": {"type": "area", "radiance": {"type": "rgb", "value": radiance}}}


def disc() -> Scene:
    h, s, c, radius = math.tan(math.radians(60)), math.sin(math.radians(60)), 0.5, 1.5

    def kernel(scene: Scene, theta: Any, image: Any) -> Callable[[], None]:
        size = h * 2 / scene.resolution

        @ti.func
        def shade(x, y):
            d = ti.Vector([(x + 0.5 - scene.resolution / 2) * size, (y + 0.5 - scene.resolution / 2) * size, -1.0])
            normal, centre = ti.Vector([s, 0.0, c]), ti.Vector([0.2 + theta[None], 0.0, -2.0])
            facing = normal.dot(d)
            value = 0.2
            if facing < 0 and (centre - normal.dot(centre) / facing * d).norm_sqr() < radius**2:
                value = 2.0
            return value

        return drawn(shade, image)

    def outline(t: float) -> Any:  # n.d^2 |centre - place|^2 < n.d^2 radius^2
        m, a = 0.2 + t, s * h
        at = s * m - 2 * c
        slope = at * h - m * a
        return conic(
            slope**2 + 4 * a * a - (radius * a) ** 2,
            slope * m * c - 2 * a * (2 * c + at) + radius**2 * a * c,
            (m * c) ** 2 + (2 * c + at) ** 2 - (radius * c) ** 2,
            (at * h) ** 2,
        )

    return Scene(
        "TranslateDiskEmitterOnGray",
        0.03,
        kernel,
        outline,
        lambda u, v, t: 0 * u + 2.0,
        0.2,
        lambda T: {
            "shape": {
                "type": "disk",
                "to_world": T().translate([0.2, 0, -1]) @ T().rotate([0, 1, 0], 60).scale(1.5),
                **emitter(2.0),
            },
            "light": {"type": "constant", "radiance": {"type": "rgb", "value": 0.2}},
        },
        ("shape",),
        eye=1.0,
        half_width=h,
        resolution=64,
        integrator={"sppc": 0, "sppi": 0},
    )


# --- shadows and shading ----------------------------------------------------------------------------------------------

LIGHT, LIGHT_RADIUS, LIGHT_RADIANCE = np.array([4.0, 0.0, 4.0]), 0.05, 1000.0
OCCLUDER, OCCLUDER_RADIUS = np.array([2.0, 0.0, 2.0]), 0.25


def shadow(name: str, threshold: float, what: str) -> Scene:
    """A plane that a small ball lights, with the penumbra of another ball; one of the two moves."""
    is_plane = what == "plane"
    at, radius = ti.Vector(OCCLUDER.tolist()), OCCLUDER_RADIUS

    def kernel(scene: Scene, theta: Any, image: Any) -> Callable[[], None]:
        size, light = scene.eye * scene.half_width * 2 / scene.resolution, ti.Vector(LIGHT.tolist())
        nodes = ti.Vector.field(2, ti.f64, shape=NODES)
        polar = [(LIGHT_RADIUS * math.sqrt((k + 0.5) / NODES), 2 * math.pi * GOLDEN * k) for k in range(NODES)]
        nodes.from_numpy(np.array([[r * math.cos(a), r * math.sin(a)] for r, a in polar]))

        @ti.kernel
        def draw():
            for i, j in image:
                x, y = float(i), float(j)
                u, v = (x + 0.5 - scene.resolution / 2) * size, (y + 0.5 - scene.resolution / 2) * size
                place, to_occluder, left = ti.Vector([u, v, 0.0]), at - ti.Vector([u, v, 0.0]), u
                if ti.static(is_plane):
                    left -= theta[None]
                else:
                    to_occluder.x += theta[None]
                on_plane = ti.min(1 - abs(left), 1 - abs(v))
                to_light = light - place
                distance = to_light.norm()
                w = to_light / distance
                up = (ti.Vector([0.0, 1.0, 0.0]) - w.y * w).normalized()
                side = w.cross(up)
                radiance = 0.5 * LIGHT_RADIANCE * (LIGHT_RADIUS / distance) ** 2 * w.z / NODES
                total = 0.0
                for k in range(NODES):
                    ray = (to_light + nodes[k].x * up + nodes[k].y * side).normalized()
                    level = ti.min((to_occluder - to_occluder.dot(ray) * ray).norm() - radius, on_plane)
                    total += edge(level, radiance, 0.0, at=(x, y), antialias=True)
                image[i, j] = total

        return draw

    def inside(u: Array, v: Array, t: float) -> Array:
        place = np.stack([u * 4 * LENS, v * 4 * LENS, 0 * u], -1)
        to_light, to_occluder = LIGHT - place, OCCLUDER + (0 if is_plane else t) * np.array([1, 0, 0]) - place
        far, near = np.linalg.norm(to_light, axis=-1), np.linalg.norm(to_occluder, axis=-1)
        light, rim = np.arcsin(LIGHT_RADIUS / far), np.arcsin(OCCLUDER_RADIUS / near)
        apart = np.arccos(np.clip((to_light * to_occluder).sum(-1) / far / near, -1, 1))
        hidden = lens(light, np.tan(rim), apart - rim + np.tan(rim)) / (math.pi * light**2)  # rims of equal curvature
        return 0.5 * LIGHT_RADIANCE * (LIGHT_RADIUS / far) ** 2 * to_light[..., 2] / far * (1 - hidden)

    def outline(t: float) -> Any:
        moved, size = (t if is_plane else 0), 4 * LENS
        return between(-1 / size, 1 / size, lambda v: ((moved - 1) / size, (moved + 1) / size))

    return Scene(
        name,
        threshold,
        kernel,
        outline,
        inside,
        0.0,
        lambda T: {
            "plane": {"type": "rectangle", "bsdf": {"type": "diffuse"}},
            "occluder": {"type": "sphere", "center": OCCLUDER.tolist(), "radius": OCCLUDER_RADIUS},
            "light": {
                "type": "sphere",
                "center": LIGHT.tolist(),
                "radius": LIGHT_RADIUS,
                **emitter(LIGHT_RADIANCE),
            },
        },
        (what,),
        integrator={},
    )


def lit_plane() -> Scene:
    """A tilted plane and the rectangular light under it, which move together."""
    h, half, e = LENS, 0.25, 0.25 / math.sqrt(2)

    def kernel(scene: Scene, theta: Any, image: Any) -> Callable[[], None]:
        size, n = h * 2 / scene.resolution, 0.5**0.5

        @ti.func
        def irradiance(place):
            total = 0.0
            for k in ti.static(range(4)):
                sx, sz = ti.static(((-1, -1), (1, -1), (1, 1), (-1, 1))[k])
                tx, tz = ti.static(((1, -1), (1, 1), (-1, 1), (-1, -1))[k])
                p = ti.Vector([0.75 * sx, -2.0, -1 + 0.75 * sz]) - place
                q = ti.Vector([0.75 * tx, -2.0, -1 + 0.75 * tz]) - place
                across = p.cross(q)
                total += ti.atan2(across.norm(), p.dot(q)) * (across.z - across.y) * n / across.norm()
            return abs(total) / 2

        @ti.func
        def shade(x, y):
            u, v = (x + 0.5 - scene.resolution / 2) * size, (y + 0.5 - scene.resolution / 2) * size
            depth = (1 - theta[None]) / (1 + v)
            place = ti.Vector([u * depth, v * depth, -depth - theta[None]])  # as it was before it moved
            value = 0.0
            if abs(place.x) < half and abs(place.y) < e:
                value = 0.5 / math.pi * irradiance(place)
            return value

        return drawn(shade, image)

    def outline(t: float) -> Any:
        low, high = (s * e / (1 - t - s * e) / h for s in (-1, 1))
        return between(low, high, lambda v: tuple(s * half * (1 + h * v) / ((1 - t) * h) for s in (-1, 1)))

    def inside(u: Array, v: Array, t: float) -> Array:
        depth = (1 - t) / (1 + h * v)
        x, y, z = h * u * depth, h * v * depth, 1 - depth - t
        corners = [(0.75 * a - x, -2 - y, 0.75 * b - z) for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
        return 0.5 / math.pi * polygon_irradiance(corners, (0, -(0.5**0.5), 0.5**0.5))

    return Scene(
        "TranslatePlaneAndAreaEmitter",
        0.01,
        kernel,
        outline,
        inside,
        0.0,
        lambda T: {
            "plane": {
                "type": "rectangle",
                "to_world": T().look_at(origin=[0, 0, -1], target=[0, -1, 0], up=[0, 1, 0]).scale(0.25),
            },
            "light": {
                "type": "rectangle",
                "to_world": T().look_at(origin=[0, -2, -1], target=[0, 0, -1], up=[0, 0, 1]).scale(0.75),
                **emitter(1.0),
            },
        },
        ("plane", "light"),
        lambda T, theta: T().translate([0, 0, theta]),
        eye=0.0,
        integrator={"guiding": "grid"},
    )


def corner() -> Scene:
    """A wall on a floor, with its shadow of a rectangular light on it; both move, the light does not."""
    h = math.tan(math.radians(87 / 2))

    def kernel(scene: Scene, theta: Any, image: Any) -> Callable[[], None]:
        size = h * 2 / scene.resolution

        @ti.kernel
        def draw():
            for i, j in image:
                x, y = float(i), float(j)
                u, v = (x + 0.5 - scene.resolution / 2) * size, (y + 0.5 - scene.resolution / 2) * size
                t = -1 / ti.min(v, -1e-3)
                place = ti.Vector([u * t, -1.0, 1 - t])
                behind = place.z + 1 - theta[None]  # the distance from the wall
                on_floor = ti.min(1 - abs(place.x), behind)
                total = 0.0
                if v < -0.4:
                    for k in range(NODES):
                        across = ti.cast(k, ti.f64) * GOLDEN
                        light = ti.Vector([-2 + 4 * (across - ti.floor(across)), 7.5 + (k + 0.5) / NODES, -4.0])
                        to_light = light - place
                        share = behind / -to_light.z
                        over = share * to_light.y - 2
                        beside = abs(place.x + share * to_light.x) - 1
                        level = ti.min(ti.max(over, beside), on_floor)
                        d2 = to_light.norm_sqr()
                        radiance = 0.4 / math.pi * to_light.y * -to_light.z / d2**2 * (4.0 / NODES)
                        total += edge(level, radiance, 0.0, at=(x, y), antialias=True)
                image[i, j] = total

        return draw

    def inside(u: Array, v: Array, t: float) -> Array:
        far = -1 / (h * v)
        x, z = h * u * far, 1 - far
        scale = (z + 4) / (z + 1 - t)
        high = np.clip(-1 + 2 * scale, 7.5, 8.5)
        left, right = np.clip(x + (-1 - x) * scale, -2, 2), np.clip(x + (1 - x) * scale, -2, 2)

        def of(a: Any, b: Any, low: Any, top: Any) -> Array:
            corners = [
                (a - x, low + 1, -4 - z),
                (b - x, low + 1, -4 - z),
                (b - x, top + 1, -4 - z),
                (a - x, top + 1, -4 - z),
            ]
            return polygon_irradiance(corners, (0, 1, 0))

        return 0.4 / math.pi * (of(-2, 2, 7.5, 8.5) - of(left, right, 7.5, high))

    return Scene(
        "TranslateSelfShadowingRightAngle",
        0.01,
        kernel,
        lambda t: between(-1 / (h * (1 - t)), -1 / (h * (2 - t)), lambda v: (v, -v)),
        inside,
        0.0,
        lambda T: {
            "wall": {
                "type": "rectangle",
                "to_world": T().look_at(origin=[0, 0, -1], target=[0, 0, 0], up=[0, 1, 0]),
                "bsdf": {"type": "diffuse", "reflectance": {"type": "rgb", "value": [0.1, 0.1, 0.4]}},
            },
            "floor": {
                "type": "rectangle",
                "to_world": T().look_at(origin=[0, -1, -1], target=[0, 0, -1], up=[0, 0, 1]),
                "bsdf": {"type": "diffuse", "reflectance": {"type": "rgb", "value": [0.4, 0.1, 0.1]}},
            },
            "light": {
                "type": "rectangle",
                "to_world": T().translate([0, 8, -4]).scale([2, 0.5, 1]),
                **emitter(1.0),
            },
        },
        ("wall", "floor"),
        lambda T, theta: T().translate([0, 0, theta]),
        eye=1.0,
        half_width=h,
        integrator={"guiding": "grid"},
    )


SCENES = (
    rectangle(
        "TranslateDiffuseRectangleConstant",
        0.02,
        0.0,
        0.5,
        1.0,
        lambda T: {"shape": {"type": "rectangle"}, "light": {"type": "constant"}},
    ),
    rectangle(
        "TranslateRectangleEmitterOnBlack",
        0.03,
        1.25,
        1.0,
        0.0,
        lambda T: {"shape": {"type": "rectangle", "to_world": T().translate([1.25, 0, 0]), **emitter(1.0)}},
    ),
    disc(),
    sphere("TranslateSphereEmitterOnBlack", 1.25, False, 128),
    sphere("ScaleSphereEmitterOnBlack", 0.0, True, 64),
    shadow("TranslateOccluderAreaLight", 0.03, "occluder"),
    shadow("TranslateShadowReceiverAreaLight", 0.02, "plane"),
    lit_plane(),
    corner(),
)


# --- both sides -------------------------------------------------------------------------------------------------------


def error(found: Array, expected: Array) -> float:
    """The mean error of Mitsuba's tests."""
    return float((np.abs(found - expected) / np.maximum(np.abs(expected), 0.02)).mean())


def cpu_time() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def ours(scene: Scene, repeats: int) -> tuple[Array, Array, float]:
    """The image, its derivative, and the CPU time of both."""
    theta, image = ti.field(ti.f64, shape=()), ti.field(ti.f64, shape=(scene.resolution,) * 2)
    plan = Jacobian(scene.kernel(scene, theta, image), theta, image)
    found, times = plan(), []
    for _ in range(repeats):
        start = cpu_time()
        plan()
        times.append(cpu_time() - start)
    return image.to_numpy().T, np.asarray(found).reshape(image.shape).T, statistics.median(times)


class Mitsuba:
    """A scene in Mitsuba, with its projective integrator in forward mode."""

    def __init__(self, scene: Scene) -> None:
        import drjit
        import mitsuba

        mitsuba.set_variant("llvm_ad_rgb")
        self._dr, self._mi, self._scene = drjit, mitsuba, scene
        T = mitsuba.ScalarTransform4f
        size = scene.resolution
        camera = {
            "type": "perspective",
            "to_world": T().look_at(origin=[0, 0, scene.eye], target=[0, 0, scene.eye - 1], up=[0, 1, 0]),
            "fov": 2 * math.degrees(math.atan(scene.half_width)),
            "near_clip": 0.01,
            "film": {
                "type": "hdrfilm",
                "rfilter": {"type": "box"},
                "width": size,
                "height": size,
                "sample_border": True,
                "pixel_format": "rgb",
                "component_format": "float32",
            },
        }
        self._loaded = mitsuba.load_dict({"type": "scene", **scene.mitsuba(T), "sensor": camera})
        self._params = mitsuba.traverse(self._loaded)
        self._start = {
            f"{name}.to_world": mitsuba.Transform4f(self._params[f"{name}.to_world"]) for name in scene.moved
        }
        self._integrator = mitsuba.load_dict({"type": "direct_projective", **scene.integrator})

    def image(self, samples: int) -> Array:
        return self._array(self._mi.render(self._loaded, integrator=self._integrator, spp=samples))

    def derivative(self, samples: int, seed: int) -> Array:
        dr, theta = self._dr, self._mi.Float(0.0)
        dr.enable_grad(theta)
        for key, start in self._start.items():
            self._params[key] = self._scene.motion(self._mi.Transform4f, theta) @ start
        self._params.update()
        dr.forward(theta, dr.ADFlag.ClearEdges)
        return self._array(self._integrator.render_forward(self._loaded, params=theta, seed=seed, spp=samples))

    def _array(self, image: Any) -> Array:
        return np.array(image)[::-1, :, 0].astype(np.float64)


def within(peer: Mitsuba, seconds: float) -> tuple[Array, float, int]:
    """Mitsuba's derivative, its CPU time and its samples per pixel: the largest power of two within the time."""
    best = None
    for samples in (4**k for k in range(1, 8)):
        times = []
        for seed in range(3):  # the first compiles
            start = cpu_time()
            found = peer.derivative(samples, seed)
            times.append(cpu_time() - start)
        if best is not None and min(times) > seconds:
            break
        best = found, min(times), samples
    assert best is not None
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mitsuba", action="store_true", help="compare with Mitsuba, which has to be installed")
    parser.add_argument("--only", default="", help="scenes whose name contains this")
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU time that Mitsuba has at least")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    ti.init(arch=ti.cpu, default_fp=ti.f64, log_level=ti.ERROR, cpu_max_num_threads=1)
    peer_columns = " Mitsuba | CPU ms | samples | image |" if options.mitsuba else ""
    print("| scene | threshold | taichi_ext | CPU ms | image |" + peer_columns)
    print("|---|--:|--:|--:|--:|" + "--:|" * peer_columns.count("|"))
    for scene in SCENES:
        if options.only not in scene.name:
            continue
        expected = reference(scene)
        image, found, seconds = ours(scene, options.repeats)
        expected_image = image_of(scene, 0.0)
        row = f"| {scene.name} | {scene.threshold} | {error(found, expected):.5f} | {1000 * seconds:.0f} |"
        row += f" {np.abs(image - expected_image).max():.5f} |"
        if options.mitsuba:
            peer = Mitsuba(scene)
            theirs, time, samples = within(peer, max(seconds, options.seconds))
            row += f" {error(theirs, expected):.4f} | {1000 * time:.0f} | {samples} |"
            row += f" {np.abs(peer.image(1024) - expected_image).mean():.5f} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
