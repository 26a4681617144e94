"""The same Jacobians by JAX, torch.func, Warp and Dr.Jit, each in the way that suits it; those that are installed.

A peer's method is a function of no arguments that computes J from the parameters and returns it as a NumPy array.
Programs are those of programs.py; ``program.model`` is what JAX and torch differentiate.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import models
import numpy as np
from programs import Program

Method = Callable[[], np.ndarray]
# What jacfwd may hold at once: torch runs its columns in chunks of so many numbers per intermediate.
CHUNK = 50_000_000


def available() -> list[str]:
    """Names of the peers that are installed."""
    return [name for name in PEERS if importlib.util.find_spec(name) is not None]


def methods(name: str, program: Program) -> dict[str, Method]:
    """The Jacobian of a program by one peer, by method; empty where none suits it."""
    return PEERS[name](program)


# --- JAX


def _jax(program: Program) -> dict[str, Method]:
    import jax
    import jax.numpy as jnp

    device = jax.devices("cpu")[0]
    point, *inputs = (jax.device_put(_single(a), device) for a in (program.point, *program.inputs))
    model = program.model
    if model is models.spring:
        build = {
            "jacfwd": jax.jacfwd(lambda p, *inputs: _jax_forces(jnp, p, *inputs)),
            "jacrev": jax.jacrev(lambda p, *inputs: _jax_forces(jnp, p, *inputs)),
            "vmap(jacfwd) + scatter": lambda p, *inputs: _jax_blocks(jax, p, *inputs),
        }
    else:

        def by_entry(transform):
            function = transform(lambda p, *inputs: model(jnp, p, *inputs))
            for _ in range(_entry_axes(program)):
                function = jax.vmap(function, in_axes=(None,) + (0,) * len(inputs))
            return function

        build = {
            "jacfwd": jax.jacfwd(lambda p, *inputs: model(jnp, p, *inputs)),
            "vmap(grad)": by_entry(jax.grad),
        }

    def method(function):
        compiled = jax.jit(function)
        return lambda: np.asarray(compiled(point, *inputs)).reshape(program.jacobian_shape)

    return {f"JAX {name}": method(function) for name, function in build.items()}


def _jax_forces(jnp: Any, p: Any, ends: Any, stiffness: Any, rest: Any) -> Any:
    x = p.reshape(-1, 3)
    f = models.spring(jnp, x[ends[:, 0]] - x[ends[:, 1]], stiffness, rest)
    gravity = jnp.zeros_like(x).at[:, 2].set(-9.81)
    return gravity.at[ends[:, 0]].add(f).at[ends[:, 1]].add(-f)


def _jax_blocks(jax: Any, p: Any, ends: Any, stiffness: Any, rest: Any) -> Any:
    """What a person does who knows that a spring's 3 x 3 block is all there is: differentiate it, scatter it."""
    x = p.reshape(-1, 3)
    a, b = ends[:, 0], ends[:, 1]
    block = jax.vmap(jax.jacfwd(lambda d, k, r: models.spring(jax.numpy, d, k, r)))(x[a] - x[b], stiffness, rest)
    jac = jax.numpy.zeros((len(x), len(x), 3, 3), p.dtype)
    jac = jac.at[a, a].add(block).at[b, b].add(block).at[a, b].add(-block).at[b, a].add(-block)
    return jac.transpose(0, 2, 1, 3)


# --- torch.func


def _torch(program: Program) -> dict[str, Method]:
    import torch
    from torch.func import grad, jacfwd, jacrev, jvp, vmap

    point, *inputs = (torch.from_numpy(_single(a)) for a in (program.point, *program.inputs))
    model = program.model
    if model is models.spring:

        def forces(p):
            ends, stiffness, rest = inputs
            x = p.reshape(-1, 3)
            f = models.spring(torch, x[ends[:, 0]] - x[ends[:, 1]], stiffness, rest)
            gravity = torch.tensor([0.0, 0.0, -9.81]).expand_as(x)
            return gravity.index_add(0, ends[:, 0], f).index_add(0, ends[:, 1], -f)

        build = {"jacfwd": lambda: jacfwd(forces)(point), "jacrev": lambda: jacrev(forces)(point)}
    else:
        rows = math.prod(program.outputs.shape)
        flat = [a.reshape(rows, *a.shape[_entry_axes(program) :]) for a in inputs]
        by_entry = vmap(grad(lambda p, *inputs: model(torch, p, *inputs)), in_dims=(None,) + (0,) * len(flat))
        chunk = max(1, min(point.numel(), CHUNK // (rows * point.numel())))

        def by_column():
            """What jacfwd does, in chunks of columns, without which it needs tens of gigabytes at P = 256."""
            push = vmap(lambda seed: jvp(lambda p: model(torch, p, *inputs), (point,), (seed,))[1], chunk_size=chunk)
            return push(torch.eye(point.numel())).movedim(0, -1)

        build = {
            "jacfwd": by_column,
            "vmap(grad)": lambda: by_entry(point, *flat),
        }

    def method(function):
        return lambda: function().numpy().reshape(program.jacobian_shape)

    return {f"torch {name}": method(function) for name, function in build.items()}


# --- Warp: a reverse pass whose parameters are repeated for each pixel, so that their adjoint is J


def _warp(program: Program) -> dict[str, Method]:
    if program.model not in (models.sphere, models.soft_spheres, models.volume):
        return {}
    import peer_warp
    import warp as wp

    wp.config.quiet = True

    rows, columns = math.prod(program.outputs.shape), program.point.size
    inputs = [
        wp.array(_single(a).reshape(rows, *a.shape[2:]), dtype=dtype, device="cpu")
        for a, dtype in zip(program.inputs, peer_warp.INPUTS[program.model.__name__], strict=True)
    ]
    kernel = peer_warp.KERNELS[program.model.__name__]
    params = wp.array(np.tile(program.point, (rows, 1)), dtype=float, device="cpu", requires_grad=True)
    image = wp.zeros(rows, dtype=float, device="cpu", requires_grad=True)
    ones = wp.ones(rows, dtype=float, device="cpu")

    def method():
        with wp.Tape() as tape:
            wp.launch(kernel, rows, inputs=[params, columns, *inputs], outputs=[image], device="cpu")
        params.grad.zero_()
        tape.backward(grads={image: ones})
        return params.grad.numpy().reshape(program.jacobian_shape)

    return {"Warp reverse": method}


# --- Dr.Jit: arrays with one lane per pixel; each parameter is such an array, and a reverse pass gives its J column


def _drjit(program: Program) -> dict[str, Method]:
    if program.model not in (models.sphere, models.soft_spheres, models.volume):
        return {}
    import drjit as dr
    import peer_drjit
    from drjit.llvm.ad import Float

    rows = math.prod(program.outputs.shape)
    function = peer_drjit.MODELS[program.model.__name__]
    inputs = [
        [Float(column) for column in np.ascontiguousarray(_single(a).reshape(rows, -1).T)] for a in program.inputs
    ]

    def method():
        params = [dr.opaque(Float, float(value)) for value in program.point]
        lanes = [p + dr.zeros(Float, rows) for p in params]
        for lane in lanes:
            dr.enable_grad(lane)
        dr.backward(function(lanes, *inputs))
        jac = np.empty((rows, len(lanes)), np.float32)
        gradients = [dr.grad(lane) for lane in lanes]
        dr.eval(gradients)
        for k, column in enumerate(gradients):
            jac[:, k] = column.numpy()
        return jac.reshape(program.jacobian_shape)

    return {"Dr.Jit reverse": method}


PEERS: dict[str, Callable[[Program], dict[str, Method]]] = {
    "jax": _jax,
    "torch": _torch,
    "warp": _warp,
    "drjit": _drjit,
}


def _entry_axes(program: Program) -> int:
    return len(program.outputs.shape)


def _single(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=np.int32 if array.dtype.kind == "i" else np.float32)
