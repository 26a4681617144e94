"""Programs with sparse Jacobians, float64: kernels on fields, and kernels derived by hand for the same CSR arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import taichi as ti

# ADBench's bundle adjustment: cameras, points, observations
BA_SIZES = {"ba1": (49, 7776, 31843), "ba2": (21, 11315, 36455), "ba3": (161, 48126, 182072),
            "ba4": (372, 47423, 204472), "ba5": (257, 65132, 225911)}  # fmt: skip
# rotation vector (3), centre (3), focal length, principal point (2), radial distortion (2)
CAMERA = (
    -0.758453, -1.109613, -0.845551, 34.556073, 39.676747, 53.881673, 419.194514, 5.864426, -8.51887, 0.087812, 0.002739
)  # fmt: skip
POINT, WEIGHT, SEEN = (7.203245, 0.001144, 3.023326), 0.417022, (271.760969, 834.209256)


@dataclass(frozen=True)
class SparseProgram:
    """One instance of a program.

    Attributes:
        kernel: computes outputs from params.
        params: the parameter fields.
        outputs: the output fields.
        by_hand: writes values, and the columns, of each block that is not empty, in the order of the CSR arrays.
        arrays: what it takes: (values, columns) for each of those blocks.
        blocks: the place of those blocks, (output, parameter).
        seen, rest, ends, slots: fields that models of other libraries take.
        data: arrays that they take.
    """

    kernel: Callable[[], None]
    params: list[Any]
    outputs: list[Any]
    by_hand: Callable[..., None] | None = None
    arrays: tuple[np.ndarray, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    seen: Any = None
    rest: Any = None
    ends: Any = None
    slots: Any = None
    data: Any = None


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


@ti.func
def turned_by(r, x, j):
    """The derivative of ``turned`` by entry j of the rotation vector, which is not zero."""
    angle = r.norm()
    v = r / angle
    c, s = ti.cos(angle), ti.sin(angle)
    e = ti.Vector([0.0, 0.0, 0.0])
    e[j] = 1.0
    dv = (e - v * v[j]) / angle
    along = (1 - c) * (dv * v.dot(x) + v * dv.dot(x)) + s * v[j] * v * v.dot(x)
    return -s * v[j] * x + c * v[j] * v.cross(x) + s * dv.cross(x) + along


def make_bundle_adjustment(name: str = "ba1", sizes: tuple[int, int, int] | None = None) -> SparseProgram:
    """Weighted reprojection errors, and the prior of the weights; cameras and points are drawn around ADBench's."""
    n, m, p = sizes or BA_SIZES[name]
    rng = np.random.default_rng(0)
    cameras, weights = ti.field(ti.f64, (n, 11)), ti.field(ti.f64, p)
    points = ti.Vector.field(3, ti.f64, m)
    places, seen = ti.Vector.field(2, ti.i32, p), ti.Vector.field(2, ti.f64, p)
    errors, priors = ti.Vector.field(2, ti.f64, p), ti.field(ti.f64, p)
    cameras.from_numpy(np.array(CAMERA) * (1 + 0.01 * rng.standard_normal((n, 11))))
    points.from_numpy(np.array(POINT) * (1 + 0.01 * rng.standard_normal((m, 3))))
    weights.from_numpy(WEIGHT * (1 + 0.01 * rng.standard_normal(p)))
    k = np.arange(p)
    places.from_numpy(np.stack([k % n, k % m], axis=1).astype(np.int32))
    seen.from_numpy(np.tile(np.array(SEEN), (p, 1)))

    @ti.kernel
    def kernel():
        for k in range(p):
            i, j = places[k][0], places[k][1]
            r = ti.Vector([cameras[i, 0], cameras[i, 1], cameras[i, 2]])
            centre = ti.Vector([cameras[i, 3], cameras[i, 4], cameras[i, 5]])
            y = turned(r, points[j] - centre)
            u = ti.Vector([y[0] / y[2], y[1] / y[2]])
            q = u.dot(u)
            d = 1 + cameras[i, 9] * q + cameras[i, 10] * q * q
            projected = u * d * cameras[i, 6] + ti.Vector([cameras[i, 7], cameras[i, 8]])
            errors[k] = weights[k] * (projected - seen[k])
            priors[k] = 1 - weights[k] * weights[k]

    A, I = ti.types.ndarray(dtype=ti.f64, ndim=3), ti.types.ndarray(dtype=ti.i32, ndim=3)
    B, K = ti.types.ndarray(dtype=ti.f64, ndim=1), ti.types.ndarray(dtype=ti.i32, ndim=1)

    @ti.kernel
    def by_hand(by_camera: A, c0: I, by_point: A, c1: I, by_weight: A, c2: I, prior: B, c3: K):
        for k in range(p):
            i, j = places[k][0], places[k][1]
            r = ti.Vector([cameras[i, 0], cameras[i, 1], cameras[i, 2]])
            centre = ti.Vector([cameras[i, 3], cameras[i, 4], cameras[i, 5]])
            x = points[j] - centre
            y = turned(r, x)
            u = ti.Vector([y[0] / y[2], y[1] / y[2]])
            q, f, w = u.dot(u), cameras[i, 6], weights[k]
            d = 1 + cameras[i, 9] * q + cameras[i, 10] * q * q
            slope = cameras[i, 9] + 2 * cameras[i, 10] * q
            projected = u * d * f + ti.Vector([cameras[i, 7], cameras[i, 8]])
            errors[k] = w * (projected - seen[k])
            priors[k] = 1 - w * w
            by_u = f * (d * ti.Matrix.identity(ti.f64, 2) + 2 * slope * u.outer_product(u))
            z = 1 / y[2]
            by_y = by_u @ ti.Matrix([[z, 0.0, -u[0] * z], [0.0, z, -u[1] * z]])
            for a in ti.static(range(3)):
                e = ti.Vector([0.0, 0.0, 0.0])
                e[a] = 1.0
                by_r, by_x = by_y @ turned_by(r, x, a), by_y @ turned(r, e)
                for b in ti.static(range(2)):
                    by_camera[k, b, a] = w * by_r[b]
                    by_camera[k, b, 3 + a] = -w * by_x[b]
                    by_point[k, b, a] = w * by_x[b]
            for b in ti.static(range(2)):
                by_camera[k, b, 6] = w * u[b] * d
                by_camera[k, b, 7] = w
                by_camera[k, b, 8] = w * f * u[b] * q
                by_camera[k, b, 9] = w * f * u[b] * q * q
                for a in ti.static(range(10)):
                    c0[k, b, a] = 11 * i + (a if a < 7 else 7 + b if a == 7 else a + 1)
                for a in ti.static(range(3)):
                    c1[k, b, a] = 3 * j + a
                by_weight[k, b, 0] = projected[b] - seen[k][b]
                c2[k, b, 0] = k
            prior[k] = -2 * w
            c3[k] = k

    def arrays(*shape):
        return np.zeros(shape), np.zeros(shape, np.int32)

    made = (*arrays(p, 2, 10), *arrays(p, 2, 3), *arrays(p, 2, 1), *arrays(p))
    blocks = ((0, 0), (0, 1), (0, 2), (1, 2))
    return SparseProgram(kernel, [cameras, points, weights], [errors, priors], by_hand, made, blocks, seen=seen)


def make_springs(nodes: int = 20000, edges: int = 90000) -> SparseProgram:
    """Forces of random springs: the rows of a node are written by all its springs."""
    rng = np.random.default_rng(0)
    x, force = ti.Vector.field(3, ti.f64, nodes), ti.Vector.field(3, ti.f64, nodes)
    ends, rest = ti.Vector.field(2, ti.i32, edges), ti.field(ti.f64, edges)
    x.from_numpy(rng.standard_normal((nodes, 3)))
    rest.from_numpy(rng.uniform(0.5, 1.5, edges))
    first = rng.integers(0, nodes, edges)
    pairs = np.stack([first, (first + rng.integers(1, nodes, edges)) % nodes], axis=1)
    ends.from_numpy(pairs.astype(np.int32))

    @ti.kernel
    def kernel():
        for k in range(edges):
            i, j = ends[k][0], ends[k][1]
            d = x[j] - x[i]
            length = d.norm()
            pull = (length - rest[k]) / length * d
            force[i] += pull
            force[j] -= pull

    keys = np.concatenate([pairs[:, a] * nodes + pairs[:, b] for a in (0, 1) for b in (0, 1)])
    known, places = np.unique(keys, return_inverse=True)
    slots = ti.Vector.field(4, ti.i32, edges)  # where the four blocks of a spring lie
    slots.from_numpy(places.reshape(4, edges).T.astype(np.int32))
    A = ti.types.ndarray(dtype=ti.f64, ndim=2)

    @ti.kernel
    def by_hand(blocks: A):
        for n, k in blocks:
            blocks[n, k] = 0.0
        for k in range(edges):
            i, j = ends[k][0], ends[k][1]
            d = x[j] - x[i]
            length = d.norm()
            pull = (length - rest[k]) / length * d
            force[i] += pull
            force[j] -= pull
            ratio = rest[k] / length
            for a, b in ti.static(ti.ndrange(3, 3)):
                v = ratio * d[a] * d[b] / (length * length) + (1 - ratio) * (1.0 if a == b else 0.0)
                blocks[slots[k][0], 3 * a + b] -= v
                blocks[slots[k][1], 3 * a + b] += v
                blocks[slots[k][2], 3 * a + b] += v
                blocks[slots[k][3], 3 * a + b] -= v

    return SparseProgram(kernel, [x], [force], by_hand, (np.zeros((len(known), 9)),), rest=rest, ends=ends, slots=slots)


def make_fluid(nodes: int = 4000) -> SparseProgram:
    """Accelerations of a fluid of particles: densities are sums over neighbours, and a field in between."""
    side = int(nodes**0.5)
    h, n = 1.3, side * side
    grid = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(-1, 2)
    places = grid + 0.2 * np.random.default_rng(0).random((n, 2))
    pairs = [np.flatnonzero(np.linalg.norm(places - p, axis=1) < 2 * h) for p in places]
    starts, neighbours, count = ti.field(ti.i32, n + 1), ti.field(ti.i32, sum(map(len, pairs))), ti.field(ti.i32, ())
    x, density, force = ti.Vector.field(2, ti.f64, n), ti.field(ti.f64, n), ti.Vector.field(2, ti.f64, n)
    x.from_numpy(places)
    starts.from_numpy(np.append(0, np.cumsum([len(p) for p in pairs])).astype(np.int32))
    neighbours.from_numpy(np.concatenate(pairs).astype(np.int32))
    count[None] = n

    @ti.func
    def weight(r):
        q, result = r / h, 0.0
        if q < 1:
            result = 1 - 1.5 * q * q + 0.75 * q * q * q
        elif q < 2:
            result = 0.25 * (2 - q) ** 3
        return result

    @ti.func
    def pressure(i):
        return (density[i] - 1) / density[i] ** 2

    @ti.kernel
    def kernel():
        for i in range(count[None]):
            total = 1.0
            for k in range(starts[i], starts[i + 1]):
                if neighbours[k] != i:
                    total += weight((x[i] - x[neighbours[k]]).norm())
            density[i] = total
        for i in range(count[None]):
            total = ti.Vector([0.0, 0.0])
            for k in range(starts[i], starts[i + 1]):
                j = neighbours[k]
                if j != i:
                    d = x[i] - x[j]
                    total -= (pressure(i) + pressure(j)) * weight(d.norm()) / (d.norm() + 1e-3) * d
            force[i] = total

    return SparseProgram(kernel, [x], [force])
