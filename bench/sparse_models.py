"""The same sparse Jacobians in JAX: forward mode of one residual at a time, and its entries put into CSR arrays."""

from collections.abc import Callable
from functools import partial

import numpy as np
from sparse_programs import SparseProgram

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    jax = None


def jax_model(name: str, program: SparseProgram) -> Callable[[], object] | None:
    """A call that computes all entries; None where there is no JAX, or no model."""
    if jax is None or not (name.startswith("ba") or name == "springs"):
        return None
    jax.config.update("jax_enable_x64", True)
    return _springs(program) if name == "springs" else _bundle_adjustment(program)


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


def _force(a, b, rest):
    d = b - a
    length = jnp.sqrt(d @ d)
    return (length - rest) / length * d


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
