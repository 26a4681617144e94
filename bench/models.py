"""The timed programs as pure functions ``f(xp, params, *inputs)`` of NumPy, jax.numpy or torch, given as ``xp``.

Each computes an entry of the output (a pixel, a sample, a spring) from the flat parameters and that entry's own inputs.
Leading axes of the inputs broadcast, so the same text serves for one entry under ``vmap`` and for all at once.
"""

from __future__ import annotations

from typing import Any


def sphere(xp: Any, p: Any, ray: Any) -> Any:
    """Depth of a sphere with parameters (r, cx, cy, cz), 0 where the ray misses."""
    s = ray @ p[1:]
    d = p[1:] - s[..., None] * ray
    inside = p[0] * p[0] - (d * d).sum(-1)
    is_hit = inside > 0
    # the inner where keeps a 0 * inf out of the derivative, as users of these libraries must
    return xp.where(is_hit, xp.abs(s) - xp.sqrt(xp.where(is_hit, inside, 1.0)), 0.0)


def soft_spheres(xp: Any, p: Any, ray: Any) -> Any:
    """Sum over spheres with parameters (r, cx, cy, cz) each."""
    spheres = p.reshape(-1, 4)
    r, centre = spheres[:, 0], spheres[:, 1:]
    # as a product of matrices: with a sum over the axis, JAX 0.10.2's compiled jacfwd returns wrong numbers for N = 1
    s = ray @ centre.T
    d = centre - s[..., None] * ray[..., None, :]
    return (xp.exp(-(d * d).sum(-1) / (r * r)) * 100.0 / xp.sqrt(s * s + 1.0)).sum(-1)


def volume(xp: Any, p: Any, length: Any, emission: Any) -> Any:
    """Radiance along a ray through slabs of density p: sum_s T_s alpha_s emission_s.

    T is written as the exponential of a running sum: the running product, which the loop of the kernel has, costs
    these libraries more.
    """
    depth = p * length[..., None]
    before = xp.exp(depth - xp.cumsum(depth, -1))
    return (before * (1.0 - xp.exp(-depth)) * emission).sum(-1)


def recurrence(xp: Any, p: Any, start: Any) -> Any:
    """What a number has become after a small step for each parameter."""
    x = start
    for n in range(len(p)):
        x = x + 0.01 * xp.sin(x * p[n])
    return x


def network(xp: Any, p: Any, x: Any) -> Any:
    """A 2-8-8-1 network with tanh; parameters W1, b1, W2, b2, w3, b3 one after the other."""
    w1, b1, w2, b2, w3, b3 = p[:16].reshape(8, 2), p[16:24], p[24:88].reshape(8, 8), p[88:96], p[96:104], p[104]
    h1 = xp.tanh(x @ w1.T + b1)
    h2 = xp.tanh(h1 @ w2.T + b2)
    return h2 @ w3 + b3


def spring(xp: Any, d: Any, stiffness: Any, rest: Any) -> Any:
    """Force of a spring on one end by the vector to it from the other end."""
    length = xp.sqrt((d * d).sum(-1))
    return -(stiffness * (length - rest) / length)[..., None] * d
