"""Energies for bench/hessian.py: sums over elements and dense ones, with their Hessians by hand and in JAX."""

# The annotations of a kernel are values that Taichi reads.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import taichi as ti
from scipy import sparse

MU, LAM = 1.0, 2.0  # of the neo-Hookean material
BLOCKS = ti.types.ndarray(dtype=ti.f64, ndim=2)


@dataclass
class Energy:
    """One program: a kernel that adds to ``energy``, and the same Hessian derived by hand, as blocks of a BSR array."""

    kernel: Callable[[], object]
    x: Any
    energy: Any  # None for the number that the kernel returns
    elements: np.ndarray | None = None  # the numbers of the vertices of each; None for a dense Hessian
    by_hand: Callable[[], object] | None = None
    blocks: np.ndarray | None = None
    places: tuple[np.ndarray, np.ndarray] | None = None  # of blocks: rows and columns
    gradient: Any = None  # by hand
    jax: Callable[[], Any] | None = None  # gives energy, gradient, and H: dense, or entries in the order of a CSR array

    def memory_by_hand(self) -> tuple[Any, Any]:
        """What a kernel by hand writes: the numbers of the blocks of each element, and the gradient."""
        n = self.x.shape[0]
        self.places, slots = _slots(self.elements, n)
        self.blocks, self.gradient = np.zeros((len(self.places[0]), 9)), ti.Vector.field(3, ti.f64, n)
        return slots, self.gradient

    def matrix_by_hand(self) -> Any:
        """H by hand, after a call."""
        rows, columns = self.places
        n = self.x.shape[0]
        starts = np.searchsorted(rows, np.arange(n + 1))
        return sparse.bsr_array((self.blocks.reshape(-1, 3, 3), columns, starts), shape=(3 * n, 3 * n)).tocsr()


def springs(nodes: int = 20_000, count: int = 90_000) -> Energy:
    """Springs between random points."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, nodes, count)
    ends = np.stack([first, (first + rng.integers(1, nodes, count)) % nodes], axis=1).astype(np.int32)
    rest = rng.uniform(0.5, 1.5, count)
    x, pairs = ti.Vector.field(3, ti.f64, nodes), ti.Vector.field(2, ti.i32, count)
    lengths, energy = ti.field(ti.f64, count), ti.field(ti.f64, ())
    x.from_numpy(rng.standard_normal((nodes, 3)))
    pairs.from_numpy(ends)
    lengths.from_numpy(rest)

    @ti.kernel
    def add_energy():
        for k in range(count):
            i, j = pairs[k][0], pairs[k][1]
            energy[None] += 0.5 * ((x[j] - x[i]).norm() - lengths[k]) ** 2

    program = Energy(add_energy, x, energy, ends)
    slots, gradient = program.memory_by_hand()

    @ti.kernel
    def by_hand(blocks: BLOCKS):
        for n, k in blocks:
            blocks[n, k] = 0.0
        for n in gradient:
            gradient[n] = ti.Vector([0.0, 0.0, 0.0])
        for k in range(count):
            i, j = pairs[k][0], pairs[k][1]
            d = x[j] - x[i]
            length = d.norm()
            energy[None] += 0.5 * (length - lengths[k]) ** 2
            pull = (length - lengths[k]) / length * d
            gradient[i] -= pull
            gradient[j] += pull
            ratio = lengths[k] / length
            for a, b in ti.static(ti.ndrange(3, 3)):
                v = ratio * d[a] * d[b] / (length * length) + (1 - ratio) * (1.0 if a == b else 0.0)
                blocks[slots[k][0], 3 * a + b] += v
                blocks[slots[k][1], 3 * a + b] -= v
                blocks[slots[k][2], 3 * a + b] -= v
                blocks[slots[k][3], 3 * a + b] += v

    program.by_hand = lambda: by_hand(program.blocks)
    program.jax = _in_jax(program, _spring_in_jax, (rest,))
    return program


def box(side: int) -> tuple[np.ndarray, np.ndarray]:
    """The points of a box of cells, and the six tetrahedra (Kuhn) of each cell."""
    numbers = np.arange((side + 1) ** 3).reshape((side + 1,) * 3)
    points = np.stack(np.meshgrid(*[np.arange(side + 1.0)] * 3, indexing="ij"), -1).reshape(-1, 3)
    cells = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)
    found = []
    for order in itertools.permutations(range(3)):
        offsets = np.zeros((4, 3), int)
        for k, axis in enumerate(order):
            offsets[k + 1] = offsets[k]
            offsets[k + 1, axis] += 1
        found.append(np.stack([numbers[tuple((cells + o).T)] for o in offsets], 1))
    corners = np.concatenate(found)
    is_turned = np.linalg.det(points[corners[:, 1:]] - points[corners[:, :1]]) < 0
    corners[is_turned, 2], corners[is_turned, 3] = corners[is_turned, 3].copy(), corners[is_turned, 2].copy()
    return points, corners.astype(np.int32)


def tetrahedra(side: int = 12) -> Energy:
    """Neo-Hookean tetrahedra of a box."""
    points, corners = box(side)
    n, m = len(points), len(corners)
    edges = (points[corners[:, 1:]] - points[corners[:, :1]]).transpose(0, 2, 1)
    inverses, volumes = np.linalg.inv(edges), np.abs(np.linalg.det(edges)) / 6
    x, energy = ti.Vector.field(3, ti.f64, n), ti.field(ti.f64, ())
    tets, rest, volume = ti.Vector.field(4, ti.i32, m), ti.Matrix.field(3, 3, ti.f64, m), ti.field(ti.f64, m)
    x.from_numpy(points + 0.05 * np.random.default_rng(0).standard_normal(points.shape))
    tets.from_numpy(corners)
    rest.from_numpy(inverses)
    volume.from_numpy(volumes)

    @ti.kernel
    def add_energy():
        for k in range(m):
            a, b, c, d = tets[k][0], tets[k][1], tets[k][2], tets[k][3]
            F = ti.Matrix.cols([x[b] - x[a], x[c] - x[a], x[d] - x[a]]) @ rest[k]
            log = ti.log(F.determinant())
            first = (F.transpose() @ F).trace()
            energy[None] += volume[k] * (0.5 * MU * (first - 3 - 2 * log) + 0.5 * LAM * log * log)

    program = Energy(add_energy, x, energy, corners)
    slots, gradient = program.memory_by_hand()

    @ti.kernel
    def by_hand(blocks: BLOCKS):
        for i, k in blocks:
            blocks[i, k] = 0.0
        for i in gradient:
            gradient[i] = ti.Vector([0.0, 0.0, 0.0])
        for k in range(m):
            a, b, c, d = tets[k][0], tets[k][1], tets[k][2], tets[k][3]
            B = rest[k]
            F = ti.Matrix.cols([x[b] - x[a], x[c] - x[a], x[d] - x[a]]) @ B
            log = ti.log(F.determinant())
            first = (F.transpose() @ F).trace()
            V = volume[k]
            energy[None] += V * (0.5 * MU * (first - 3 - 2 * log) + 0.5 * LAM * log * log)
            turned = F.inverse().transpose()
            b1 = ti.Vector([B[0, 0], B[0, 1], B[0, 2]])
            b2 = ti.Vector([B[1, 0], B[1, 1], B[1, 2]])
            b3 = ti.Vector([B[2, 0], B[2, 1], B[2, 2]])
            b0 = -b1 - b2 - b3
            P = MU * (F - turned) + LAM * log * turned
            gradient[a] += V * (P @ b0)
            gradient[b] += V * (P @ b1)
            gradient[c] += V * (P @ b2)
            gradient[d] += V * (P @ b3)
            bs = [b0, b1, b2, b3]
            ms = [turned @ b0, turned @ b1, turned @ b2, turned @ b3]
            s = MU - LAM * log
            for p, q in ti.static(ti.ndrange(4, 4)):
                dd = V * MU * bs[p].dot(bs[q])
                for i, j in ti.static(ti.ndrange(3, 3)):
                    v = V * (s * ms[q][i] * ms[p][j] + LAM * ms[p][i] * ms[q][j]) + (dd if i == j else 0.0)
                    blocks[slots[k][4 * p + q], 3 * i + j] += v

    program.by_hand = lambda: by_hand(program.blocks)
    program.jax = _in_jax(program, _tetrahedron_in_jax, (inverses, volumes))
    return program


def hexahedra(side: int = 12) -> Energy:
    """Trilinear hexahedra, neo-Hookean, with eight quadrature points in a loop: blocks of 24 x 24."""
    numbers = np.arange((side + 1) ** 3).reshape((side + 1,) * 3)
    points = np.stack(np.meshgrid(*[np.arange(side + 1.0)] * 3, indexing="ij"), -1).reshape(-1, 3)
    cells = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)
    offsets = np.array(list(itertools.product((0, 1), repeat=3)))
    corners = np.stack([numbers[tuple((cells + o).T)] for o in offsets], 1).astype(np.int32)
    places = 0.5 + np.array(list(itertools.product((-1, 1), repeat=3))) / (2 * np.sqrt(3))
    slopes = np.zeros((8, 8, 3))  # of the shape functions at the quadrature points
    for k, a in itertools.product(range(8), range(8)):
        factors = np.where(offsets[a] == 1, places[k], 1 - places[k])
        for axis in range(3):
            slopes[k, a, axis] = (2 * offsets[a][axis] - 1) * np.delete(factors, axis).prod()
    m = len(corners)
    x, energy = ti.Vector.field(3, ti.f64, len(points)), ti.field(ti.f64, ())
    cubes, slope = ti.Vector.field(8, ti.i32, m), ti.Vector.field(3, ti.f64, (8, 8))
    x.from_numpy(points + 0.03 * np.random.default_rng(0).standard_normal(points.shape))
    cubes.from_numpy(corners)
    slope.from_numpy(slopes)

    @ti.kernel
    def add_energy():
        for e in range(m):
            for k in range(8):
                F = ti.Matrix.zero(ti.f64, 3, 3)
                for a in ti.static(range(8)):
                    F += x[cubes[e][a]].outer_product(slope[k, a])
                log = ti.log(F.determinant())
                energy[None] += (0.5 * MU * ((F.transpose() @ F).trace() - 3 - 2 * log) + 0.5 * LAM * log * log) / 8

    return Energy(add_energy, x, energy, corners)


def picture(is_returned: bool = False) -> Energy:
    """The squared error of a picture of four blobs, with a place, a height and a width each; or that as a result."""
    width, height, blobs = 320, 240, 4
    rng = np.random.default_rng(0)
    p, energy, target = ti.field(ti.f64, 4 * blobs), ti.field(ti.f64, ()), ti.field(ti.f64, (width, height))
    p.from_numpy(rng.uniform(0.2, 0.8, 4 * blobs))
    wanted = rng.uniform(0, 1, (width, height))
    target.from_numpy(wanted)

    @ti.func
    def error(i, j):
        colour = 0.0
        for b in ti.static(range(blobs)):
            dx, dy = i / width - p[4 * b], j / height - p[4 * b + 1]
            colour += p[4 * b + 2] * ti.exp(-(dx * dx + dy * dy) / p[4 * b + 3] ** 2)
        return (colour - target[i, j]) ** 2

    @ti.kernel
    def add_energy():
        for i, j in target:
            energy[None] += error(i, j)

    @ti.kernel
    def sum_of_errors() -> ti.f64:
        total = 0.0
        for i, j in target:
            total += error(i, j)
        return total

    def in_jax(jnp: Any, q: Any) -> Any:
        rows, columns = jnp.arange(width)[:, None] / width, jnp.arange(height)[None] / height
        colour = sum(
            q[4 * b + 2] * jnp.exp(-((rows - q[4 * b]) ** 2 + (columns - q[4 * b + 1]) ** 2) / q[4 * b + 3] ** 2)
            for b in range(blobs)
        )
        return ((colour - wanted) ** 2).sum()

    program = Energy(sum_of_errors, p, None) if is_returned else Energy(add_energy, p, energy)
    program.jax = _dense_in_jax(program, in_jax)
    return program


def logistic(points: int = 10_000, count: int = 32) -> Energy:
    """Logistic regression with a loop over its weights."""
    rng = np.random.default_rng(0)
    w, rows, energy = ti.field(ti.f64, count), ti.field(ti.f64, (points, count)), ti.field(ti.f64, ())
    w.from_numpy(rng.standard_normal(count) / 4)
    features = rng.standard_normal((points, count))
    rows.from_numpy(features)

    @ti.kernel
    def add_energy():
        for i in range(points):
            s = 0.0
            for j in range(count):
                s += w[j] * rows[i, j]
            energy[None] += ti.log(1 + ti.exp(-s))

    program = Energy(add_energy, w, energy)
    program.jax = _dense_in_jax(program, lambda jnp, q: jnp.log(1 + jnp.exp(-(features @ q))).sum())
    return program


def _slots(elements: np.ndarray, nodes: int) -> tuple[tuple[np.ndarray, np.ndarray], Any]:
    """The rows and columns of the blocks, and which of them each pair of corners of an element is."""
    k = elements.shape[1]
    pairs = [elements[:, a].astype(np.int64) * nodes + elements[:, b] for a in range(k) for b in range(k)]
    known, numbers = np.unique(np.concatenate(pairs), return_inverse=True)
    slots = ti.Vector.field(k * k, ti.i32, len(elements))
    slots.from_numpy(np.ascontiguousarray(numbers.reshape(k * k, -1).T.astype(np.int32)))
    return (known // nodes, known % nodes), slots


def _spring_in_jax(jnp: Any, p: Any, rest: Any) -> Any:
    return 0.5 * (jnp.sqrt(((p[1] - p[0]) ** 2).sum()) - rest) ** 2


def _tetrahedron_in_jax(jnp: Any, p: Any, inverse: Any, volume: Any) -> Any:
    F = (p[1:] - p[0]).T @ inverse
    log = jnp.log(F[0] @ jnp.cross(F[1], F[2]))
    return volume * (0.5 * MU * ((F * F).sum() - 3 - 2 * log) + 0.5 * LAM * log * log)


def _jax() -> tuple[Any, Any] | None:
    """JAX in float64 on one thread, and its NumPy; None where it is not installed."""
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        return None
    jax.config.update("jax_enable_x64", True)
    return jax, jnp


def _dense_in_jax(program: Energy, energy: Callable[[Any, Any], Any]) -> Any:
    """Energy, gradient and ``jax.hessian``, in one compiled function; None without JAX."""
    found = _jax()
    if found is None:
        return None
    jax, jnp = found

    @jax.jit
    def compute(q: Any) -> Any:
        value, gradient = jax.value_and_grad(partial(energy, jnp))(q)
        return value, gradient, jax.hessian(partial(energy, jnp))(q)

    point = jnp.array(program.x.to_numpy())
    return lambda: jax.block_until_ready(compute(point))


def _in_jax(program: Energy, of_element: Callable[..., Any], given: tuple[np.ndarray, ...]) -> Any:
    """``vmap(hessian)`` and ``vmap(grad)`` of one element, added up in the entries of CSR arrays; None without JAX."""
    found = _jax()
    if found is None:
        return None
    jax, jnp = found
    elements, n = program.elements, program.x.shape[0]
    m, k = elements.shape
    rows = (3 * elements[:, :, None] + np.arange(3)).reshape(m, 3 * k)
    keys = rows[:, :, None].astype(np.int64) * 3 * n + rows[:, None, :]
    known, places = np.unique(keys.reshape(-1), return_inverse=True)
    entries, place, row = len(known), jnp.array(places.astype(np.int32)), jnp.array(rows.reshape(-1))
    corners, arrays = jnp.array(elements), tuple(map(jnp.array, given))

    def energy(p: Any, *rest: Any) -> Any:
        return of_element(jnp, p, *rest)

    @jax.jit
    def compute(x: Any) -> Any:
        p = x[corners]
        hessians = jax.vmap(jax.hessian(energy))(p, *arrays).reshape(-1)
        gradients = jax.vmap(jax.grad(energy))(p, *arrays).reshape(-1)
        values = jax.vmap(energy)(p, *arrays).sum()
        return values, jnp.zeros(3 * n).at[row].add(gradients), jnp.zeros(entries).at[place].add(hessians)

    point = jnp.array(program.x.to_numpy())
    return lambda: jax.block_until_ready(compute(point))
