"""The programs that are timed: kernels on fields, their hand-derived Jacobians, and the inputs of their models."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import models
import numpy as np
import taichi as ti
from taichi.math import vec3


@dataclass(frozen=True)
class Program:
    """One instance of a program, on fields of its own, float32.

    Attributes:
        params: the parameter field.
        outputs: the output field.
        kernel: computes outputs from params.
        hand_kernel: the Jacobian as a person would derive it; fills an array of J's shape.
        model: the same function of other array libraries, see models.py.
        inputs: what the model takes besides the parameters, float64 arrays.
        point: the parameters at which everything is compared and timed, shape (P,).
    """

    params: Any
    outputs: Any
    kernel: Callable[[], None]
    hand_kernel: Callable[[np.ndarray], None]
    model: Callable[..., Any]
    inputs: tuple[np.ndarray, ...]
    point: np.ndarray

    @property
    def jacobian_shape(self) -> tuple[int, ...]:
        return full_shape(self.outputs) + full_shape(self.params)


def full_shape(field: Any) -> tuple[int, ...]:
    """Shape of a field with that of its elements."""
    return (*field.shape, field.n) if isinstance(field, ti.MatrixField) else tuple(field.shape)


def pixel_rays(width: int, height: int, focal: float) -> np.ndarray:
    """Unit vectors through the pixels in float64, shape (width, height, 3)."""
    x, y = np.mgrid[:width, :height].astype(np.float64)
    rays = np.stack([(x - width / 2) / focal, (y - height / 2) / focal, np.ones_like(x)], axis=-1)
    return rays / np.linalg.norm(rays, axis=-1, keepdims=True)


def make_sphere(needs_dual: bool = False, width: int = 640, height: int = 480) -> Program:
    """The depth of one sphere, 640 x 480 pixels by 4 parameters; the hand-derived kernel writes all 4 columns."""
    focal = width / 1.6
    params = ti.field(ti.f32, shape=4, needs_dual=needs_dual)
    depth = ti.field(ti.f32, shape=(width, height), needs_dual=needs_dual)

    @ti.func
    def pixel_ray(i, j):
        return vec3((i - width / 2) / focal, (j - height / 2) / focal, 1.0).normalized()

    @ti.func
    def ray_sphere(ray):
        r = params[0]
        centre = vec3(params[1], params[2], params[3])
        tc = centre.dot(ray) * ray
        d = centre - tc
        result = 0.0
        if r > d.norm():
            result = tc.norm() - ti.sqrt(r * r - d.norm_sqr())
        else:
            result = 0.0
        return result

    @ti.kernel
    def render():
        for i, j in depth:
            depth[i, j] = ray_sphere(pixel_ray(i, j))

    @ti.kernel
    def render_jacobian(jac: ti.types.ndarray(dtype=ti.f32, ndim=3)):
        for i, j in depth:
            v = pixel_ray(i, j)
            r = params[0]
            centre = vec3(params[1], params[2], params[3])
            s = centre.dot(v)
            d = centre - s * v
            by_r = 0.0
            by_centre = vec3(0.0)
            depth[i, j] = 0.0
            if r > d.norm():
                half_chord = ti.sqrt(r * r - d.norm_sqr())
                depth[i, j] = ti.abs(s) - half_chord
                by_r = -r / half_chord
                by_centre = ti.math.sign(s) * v + d / half_chord
            jac[i, j, 0] = by_r
            for k in ti.static(range(3)):
                jac[i, j, 1 + k] = by_centre[k]

    point = np.array([10.1, 10.1, 10.1, 100.1], np.float32)
    params.from_numpy(point)
    rays = pixel_rays(width, height, focal)
    return Program(params, depth, render, render_jacobian, models.sphere, (rays,), point)


def make_soft_spheres(count: int, needs_dual: bool = False, width: int = 320, height: int = 240) -> Program:
    """A sum over soft spheres, 320 x 240 pixels by 4 parameters each, with a loop over the spheres at run time."""
    focal = width / 1.6
    params = ti.field(ti.f32, shape=4 * count, needs_dual=needs_dual)
    image = ti.field(ti.f32, shape=(width, height), needs_dual=needs_dual)

    @ti.func
    def pixel_ray(i, j):
        return vec3((i - width / 2) / focal, (j - height / 2) / focal, 1.0).normalized()

    @ti.kernel
    def render():
        for i, j in image:
            v = pixel_ray(i, j)
            total = 0.0
            for n in range(count):
                r = params[4 * n]
                centre = vec3(params[4 * n + 1], params[4 * n + 2], params[4 * n + 3])
                s = centre.dot(v)
                d = centre - s * v
                total += ti.exp(-d.norm_sqr() / (r * r)) * 100.0 / ti.sqrt(s * s + 1.0)
            image[i, j] = total

    @ti.kernel
    def render_jacobian(jac: ti.types.ndarray(dtype=ti.f32, ndim=3)):
        for i, j in image:
            v = pixel_ray(i, j)
            total = 0.0
            for n in range(count):
                r = params[4 * n]
                centre = vec3(params[4 * n + 1], params[4 * n + 2], params[4 * n + 3])
                s = centre.dot(v)
                d = centre - s * v
                inverse = 1.0 / (r * r)
                q = d.norm_sqr() * inverse
                falloff = 1.0 / (s * s + 1.0)
                term = ti.exp(-q) * 100.0 * ti.sqrt(falloff)
                by_centre = -term * (2.0 * inverse * d + s * falloff * v)
                jac[i, j, 4 * n] = term * 2.0 * q / r
                for k in ti.static(range(3)):
                    jac[i, j, 4 * n + 1 + k] = by_centre[k]
                total += term
            image[i, j] = total

    random = np.random.default_rng(0)
    columns = [random.uniform(low, high, count) for low, high in ((5, 15), (-60, 60), (-40, 40), (80, 140))]
    point = np.stack(columns, axis=1).ravel().astype(np.float32)
    params.from_numpy(point)
    rays = pixel_rays(width, height, focal)
    return Program(params, image, render, render_jacobian, models.soft_spheres, (rays,), point)


def make_volume(needs_dual: bool = False, width: int = 320, height: int = 240) -> Program:
    """Emission and absorption along 32 samples per ray; the density of each depth is a parameter.

    All rays share the 32 densities, so that J is (width, height, 32) and each ray's row is what one ray of a volume
    renderer has by its own samples. Emission differs by ray and sample, as the colours of a radiance field do.
    """
    samples = 32
    params = ti.field(ti.f32, shape=samples, needs_dual=needs_dual)
    emission = ti.field(ti.f32, shape=(width, height, samples))
    length = ti.field(ti.f32, shape=(width, height))
    image = ti.field(ti.f32, shape=(width, height), needs_dual=needs_dual)

    @ti.kernel
    def render():
        for i, j in image:
            transmitted = 1.0
            total = 0.0
            for s in range(samples):
                alpha = 1.0 - ti.exp(-params[s] * length[i, j])
                total += transmitted * alpha * emission[i, j, s]
                transmitted *= 1.0 - alpha
            image[i, j] = total

    @ti.kernel
    def render_jacobian(jac: ti.types.ndarray(dtype=ti.f32, ndim=3)):
        for i, j in image:
            # d total / d density_s = length (T_{s+1} emission_s - light from behind s): what is behind s is known
            # when the ray is done, hence the second, cheap loop
            transmitted = 1.0
            total = 0.0
            for s in range(samples):
                alpha = 1.0 - ti.exp(-params[s] * length[i, j])
                total += transmitted * alpha * emission[i, j, s]
                transmitted *= 1.0 - alpha
                jac[i, j, s] = transmitted * emission[i, j, s] + total
            for s in range(samples):
                jac[i, j, s] = length[i, j] * (jac[i, j, s] - total)
            image[i, j] = total

    random = np.random.default_rng(1)
    point = random.uniform(0.02, 0.6, samples).astype(np.float32)
    colours = random.uniform(0, 1, (width, height, samples)).astype(np.float32)
    lengths = (0.3 / pixel_rays(width, height, width / 1.6)[..., 2]).astype(np.float32)
    params.from_numpy(point)
    emission.from_numpy(colours)
    length.from_numpy(lengths)
    return Program(params, image, render, render_jacobian, models.volume, (lengths, colours), point)


def make_springs(needs_dual: bool = False, side: int = 16) -> Program:
    """The forces in a cloth of side x side particles, by their positions: J is (n, 3, n, 3), nearly all of it zero."""
    count = side * side
    index = np.arange(count, dtype=np.int32).reshape(side, side)
    pairs = ((index[1:], index[:-1]), (index[:, 1:], index[:, :-1]), (index[1:, 1:], index[:-1, :-1]))
    ends = np.concatenate([np.stack([a.ravel(), b.ravel()], axis=1) for a, b in pairs])
    random = np.random.default_rng(2)
    rests = random.uniform(0.7, 1.3, len(ends)).astype(np.float32)
    stiffness, gravity = 40.0, -9.81
    position = ti.Vector.field(3, ti.f32, shape=count, needs_dual=needs_dual)
    force = ti.Vector.field(3, ti.f32, shape=count, needs_dual=needs_dual)
    spring = ti.Vector.field(2, ti.i32, shape=len(ends))
    rest = ti.field(ti.f32, shape=len(ends))

    @ti.kernel
    def compute_forces():
        for i in force:
            force[i] = vec3(0.0, 0.0, gravity)
        for e in spring:
            a, b = spring[e][0], spring[e][1]
            d = position[a] - position[b]
            length = d.norm()
            f = -stiffness * (length - rest[e]) / length * d
            force[a] += f
            force[b] -= f

    @ti.kernel
    def add_jacobian(jac: ti.types.ndarray(dtype=ti.f32, ndim=4)):
        for i in force:
            force[i] = vec3(0.0, 0.0, gravity)
        for e in spring:
            a, b = spring[e][0], spring[e][1]
            d = position[a] - position[b]
            length = d.norm()
            n = d / length
            f = -stiffness * (length - rest[e]) * n
            force[a] += f
            force[b] -= f
            along = stiffness * rest[e] / length
            across = stiffness - along
            for k, l in ti.static(ti.ndrange(3, 3)):
                block = -along * n[k] * n[l]
                if ti.static(k == l):
                    block -= across
                jac[a, k, a, l] += block
                jac[b, k, b, l] += block
                jac[a, k, b, l] -= block
                jac[b, k, a, l] -= block

    def compute_jacobian(jac: np.ndarray) -> None:
        jac.fill(0.0)
        add_jacobian(jac)

    x, y = np.mgrid[:side, :side]
    point = np.stack([x, y, np.zeros_like(x)], axis=-1).reshape(count, 3) + random.normal(0, 0.1, (count, 3))
    point = point.astype(np.float32)
    position.from_numpy(point)
    spring.from_numpy(ends)
    rest.from_numpy(rests)
    inputs = (ends, np.full_like(rests, stiffness), rests)
    return Program(position, force, compute_forces, compute_jacobian, models.spring, inputs, point.ravel())


def make_network(needs_dual: bool = False, batch: int = 16384) -> Program:
    """A 2-8-8-1 network with tanh on a batch of points, by its 105 weights."""
    params = ti.field(ti.f32, shape=105, needs_dual=needs_dual)
    points = ti.Vector.field(2, ti.f32, shape=batch)
    values = ti.field(ti.f32, shape=batch, needs_dual=needs_dual)

    @ti.kernel
    def evaluate():
        for i in values:
            x = points[i]
            h = ti.Vector([0.0] * 8)
            for j in ti.static(range(8)):
                h[j] = ti.tanh(params[16 + j] + params[2 * j] * x[0] + params[2 * j + 1] * x[1])
            y = params[104]
            for j in range(8):
                z = params[88 + j]
                for k in ti.static(range(8)):
                    z += params[24 + 8 * j + k] * h[k]
                y += params[96 + j] * ti.tanh(z)
            values[i] = y

    @ti.kernel
    def evaluate_jacobian(jac: ti.types.ndarray(dtype=ti.f32, ndim=2)):
        for i in values:
            x = points[i]
            h = ti.Vector([0.0] * 8)
            for j in ti.static(range(8)):
                h[j] = ti.tanh(params[16 + j] + params[2 * j] * x[0] + params[2 * j + 1] * x[1])
            y = params[104]
            jac[i, 104] = 1.0
            h_bar = ti.Vector([0.0] * 8)
            for j in range(8):
                z = params[88 + j]
                for k in ti.static(range(8)):
                    z += params[24 + 8 * j + k] * h[k]
                g = ti.tanh(z)
                y += params[96 + j] * g
                jac[i, 96 + j] = g
                z_bar = params[96 + j] * (1.0 - g * g)
                jac[i, 88 + j] = z_bar
                for k in ti.static(range(8)):
                    jac[i, 24 + 8 * j + k] = z_bar * h[k]
                    h_bar[k] += z_bar * params[24 + 8 * j + k]
            for j in ti.static(range(8)):
                a_bar = h_bar[j] * (1.0 - h[j] * h[j])
                jac[i, 16 + j] = a_bar
                jac[i, 2 * j] = a_bar * x[0]
                jac[i, 2 * j + 1] = a_bar * x[1]
            values[i] = y

    random = np.random.default_rng(3)
    point = random.normal(0, 0.7, 105).astype(np.float32)
    samples = random.uniform(-1, 1, (batch, 2)).astype(np.float32)
    params.from_numpy(point)
    points.from_numpy(samples)
    return Program(params, values, evaluate, evaluate_jacobian, models.network, (samples,), point)


def make_recurrence(needs_dual: bool = False, steps: int = 256, count: int = 4800) -> Program:
    """A number that each of 256 steps changes by a parameter of its own, from 4800 starts."""
    params = ti.field(ti.f32, shape=steps, needs_dual=needs_dual)
    starts = ti.field(ti.f32, shape=count)
    ends = ti.field(ti.f32, shape=count, needs_dual=needs_dual)

    @ti.kernel
    def run():
        for i in ends:
            x = starts[i]
            for n in range(steps):
                x += 0.01 * ti.sin(x * params[n])
            ends[i] = x

    @ti.kernel
    def run_jacobian(jac: ti.types.ndarray(dtype=ti.f32, ndim=2)):
        for i in ends:
            x = starts[i]
            for n in range(steps):
                jac[i, n] = x
                x += 0.01 * ti.sin(x * params[n])
            ends[i] = x
            x_bar = 1.0
            for back in range(steps):
                n = steps - 1 - back
                before = jac[i, n]
                slope = 0.01 * ti.cos(before * params[n]) * x_bar
                jac[i, n] = slope * before
                x_bar += slope * params[n]

    random = np.random.default_rng(4)
    point = random.uniform(0.5, 1.5, steps).astype(np.float32)
    samples = random.uniform(0.5, 1.5, count).astype(np.float32)
    params.from_numpy(point)
    starts.from_numpy(samples)
    return Program(params, ends, run, run_jacobian, models.recurrence, (samples,), point)


def run_forward_mode(program: Program) -> np.ndarray:
    """J by Taichi's forward mode, one seed and one launch per parameter, each column read to NumPy."""
    jac = np.empty((*program.outputs.shape, program.point.size), np.float32)
    for k in range(program.point.size):
        seed = [0.0] * program.point.size
        seed[k] = 1.0
        with ti.ad.FwdMode(loss=program.outputs, param=program.params, seed=seed):
            program.kernel()
        jac[..., k] = program.outputs.dual.to_numpy()
    return jac


def run_hand_derived(program: Program, out: np.ndarray | None = None) -> np.ndarray:
    """J by the hand-derived kernel, written into ``out`` or a new NumPy array."""
    jac = np.empty(program.jacobian_shape, np.float32) if out is None else out
    program.hand_kernel(jac)
    return jac


CASES: dict[str, Callable[..., Program]] = {
    "sphere": make_sphere,
    **{f"soft spheres, N = {count}": partial(make_soft_spheres, count) for count in (1, 4, 16, 64)},
    "volume": make_volume,
    "springs": make_springs,
    "network": make_network,
    "recurrence": make_recurrence,
}


def assert_same_jacobian(actual: np.ndarray, expected: np.ndarray, columns: int) -> None:
    """Compare two Jacobians of so many columns: within 1e-4 of each row's largest entry, where float32 can tell.

    At the silhouette of the sphere, r² - |d|² is a small difference of numbers near 100. Its float32 rounding, about
    1e-5, depends on how the compiler orders the operations; the derivative is the inverse of its square root, and so
    the relative error of that grows with the square of the derivative.
    """
    assert actual.shape == expected.shape
    assert actual.dtype == np.float32
    expected = expected.reshape(-1, columns)
    length = np.abs(expected).max(axis=-1, keepdims=True)
    tolerance = 1e-4 * np.maximum(1.0, (length / 10) ** 2) * np.maximum(length, 1e-2)
    np.testing.assert_allclose(actual.reshape(expected.shape) / tolerance, expected / tolerance, rtol=0, atol=1)
