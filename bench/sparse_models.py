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
    if jax is None:
        return None
    models = {"ba": _bundle_adjustment, "springs": _springs, "hand": _hand}
    model = next((models[start] for start in models if name.startswith(start)), None)
    if model is None:
        return None
    jax.config.update("jax_enable_x64", True)
    return model(program)


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


def _hand(program: SparseProgram) -> Callable[[], object]:
    data, (u, theta) = program.data, (jnp.array(field.to_numpy()) for field in program.params)
    most = int(np.diff(data["first"]).max())  # bones of a vertex
    at = np.minimum(data["first"][:-1, None] + np.arange(most), len(data["bone"]) - 1)
    is_bone = np.arange(most) < np.diff(data["first"])[:, None]
    bones, weights = data["bone"][at], np.where(is_bone, data["weight"][at], 0.0)
    base = np.concatenate([data["base"], np.ones((len(data["base"]), 1))], axis=1)

    def about(axis, angle):
        a, b = (axis + 1) % 3, (axis + 2) % 3
        c, s = jnp.cos(angle), jnp.sin(angle)
        return jnp.eye(4).at[a, a].set(c).at[b, b].set(c).at[b, a].set(s).at[a, b].set(-s)

    def residual(u, theta, corners, point):
        absolute, skin = [], []
        for b, parent in enumerate(data["parents"]):
            own = jnp.array(data["relative"][b])
            g, k = divmod(b - 2, 4)
            if 0 <= g < 5 and k < 3:
                own = own @ about(2, theta[7 + 4 * g]) if k == 0 else own
                own = own @ about(0, theta[6 + 4 * g + (k + 1 if k else 0)])
            absolute.append(own if parent < 0 else absolute[parent] @ own)
            skin.append(absolute[b] @ data["inverse"][b])
        turned = jnp.einsum("ckij,cj->cki", jnp.stack(skin)[jnp.array(bones)[corners]], jnp.array(base)[corners])
        places = (jnp.array(weights)[corners][:, :, None] * turned[:, :, :3]).sum(axis=1)
        p = jnp.array([u[0], u[1], 1 - u[0] - u[1]]) @ places
        return point - _turned(theta[:3], p) - theta[3:6]

    corners, points = jnp.array(data["corners"]), jnp.array(data["points"])
    by_all = jax.vmap(jax.jacfwd(residual, argnums=(0, 1)), in_axes=(0, None, 0, 0))
    row, column = np.nonzero(np.asarray(by_all(u, theta, corners, points)[1]).reshape(-1, len(theta)))

    @jax.jit
    def blocks(u, theta):
        by_place, by_pose = by_all(u, theta, corners, points)
        return by_place, by_pose.reshape(-1, len(theta))[row, column]

    return lambda: jax.block_until_ready(blocks(u, theta))
