"""The same sparse Jacobians in JAX: forward mode of one residual at a time, and its entries put into CSR arrays; asdex.

asdex finds the pattern of a whole JAX function, colours its columns, and evaluates one forward product for each colour.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from sparse_programs import SparseProgram

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    jax = None

try:
    import asdex
except ImportError:
    asdex = None


def jax_model(name: str, program: SparseProgram) -> Callable[[], object] | None:
    """A call that computes all entries; None where there is no JAX, or no model."""
    if jax is None or not (name.startswith("ba") or name == "springs"):
        return None
    jax.config.update("jax_enable_x64", True)
    return _springs(program) if name == "springs" else _bundle_adjustment(program)


def asdex_model(name: str, program: SparseProgram) -> Callable[[], object] | None:
    """A call that computes J as one matrix, pattern and colours found here; None where asdex is missing."""
    if asdex is None or jax is None or not (name.startswith("ba") or name == "springs"):
        return None
    jax.config.update("jax_enable_x64", True)
    function = _all_forces(program) if name == "springs" else _all_errors(program)
    point = jnp.concatenate([jnp.array(field.to_numpy()).reshape(-1) for field in program.params])
    compiled = jax.jit(asdex.jacobian_from_coloring(function, asdex.jacobian_coloring(function, point)))
    return lambda: jax.block_until_ready(compiled(point))


def leaves(found: object) -> list:
    """The arrays of what a model gives, in their order."""
    return jax.tree.leaves(found)


def _turned(r, x):
    angle = jnp.sqrt(r @ r)
    v = r / angle
    return x * jnp.cos(angle) + jnp.cross(v, x) * jnp.sin(angle) + v * (v @ x) * (1 - jnp.cos(angle))


def _error(camera, point, weight, seen):
    y = _turned(camera[:3], point - camera[3:6])
    u = y[:2] / y[2]
    q = u @ u
    return weight * (u * (1 + camera[9] * q + camera[10] * q * q) * camera[6] + camera[7:9] - seen)


def _bundle_adjustment(program: SparseProgram) -> Callable[[], object]:
    cameras, points, weights = (jnp.array(field.to_numpy()) for field in program.params)
    count, n, m = len(weights), len(cameras), len(points)
    k = np.arange(count)
    seen = jnp.array(program.seen.to_numpy())

    @jax.jit
    def blocks(cameras, points, weights):
        by_all = jax.vmap(jax.jacfwd(_error, argnums=(0, 1, 2)))
        return by_all(cameras[k % n], points[k % m], weights, seen), -2 * weights

    return lambda: jax.block_until_ready(blocks(cameras, points, weights))


def _all_errors(program: SparseProgram) -> Callable[[object], object]:
    """All outputs of bundle adjustment as one vector, of all parameters as one vector."""
    cameras, points, weights = (field.to_numpy() for field in program.params)
    seen, k = jnp.array(program.seen.to_numpy()), np.arange(len(weights))

    def residuals(z):
        a, b, w = jnp.split(z, np.cumsum([cameras.size, points.size]))
        a, b = a.reshape(cameras.shape)[k % len(cameras)], b.reshape(points.shape)[k % len(points)]
        return jnp.concatenate([jax.vmap(_error)(a, b, w, seen).reshape(-1), 1 - w * w])

    return residuals


def _force(a, b, rest):
    d = b - a
    length = jnp.sqrt(d @ d)
    return (length - rest) / length * d


def _all_forces(program: SparseProgram) -> Callable[[object], object]:
    rest, ends = jnp.array(program.rest.to_numpy()), program.ends.to_numpy()

    def forces(z):
        x = z.reshape(-1, 3)
        pull = jax.vmap(_force)(x[ends[:, 0]], x[ends[:, 1]], rest)
        return jnp.zeros_like(x).at[ends[:, 0]].add(pull).at[ends[:, 1]].add(-pull).reshape(-1)

    return forces


def _springs(program: SparseProgram) -> Callable[[], object]:
    x, rest = jnp.array(program.params[0].to_numpy()), jnp.array(program.rest.to_numpy())
    ends, slots = program.ends.to_numpy(), program.slots.to_numpy()
    count = len(program.arrays[0])

    @partial(jax.jit)
    def blocks(x):
        by_a, by_b = jax.vmap(jax.jacfwd(_force, argnums=(0, 1)))(x[ends[:, 0]], x[ends[:, 1]], rest)
        found = jnp.zeros((count, 3, 3))
        for slot, block in zip(slots.T, (by_a, by_b, -by_a, -by_b), strict=True):
            found = found.at[slot].add(block)
        return found

    return lambda: jax.block_until_ready(blocks(x))
