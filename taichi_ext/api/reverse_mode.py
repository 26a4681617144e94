"""``kernel.grad()`` and ``ti.ad.Tape`` for kernels with edges, which Taichi's reverse mode cannot differentiate."""

# Fields and arrays of any kind are taken from a kernel that is known when it runs.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import numpy as np

from taichi_ext import backend
from taichi_ext.analysis.changes import read_containers, written_containers
from taichi_ext.api.products import vjp
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import Assign, Body, Container, Load, statements
from taichi_ext.record.recorder import record
from taichi_ext.simplify import simplify


def add_gradient(kernel: backend.Kernel, args: tuple[object, ...]) -> None:
    """For all fields and arrays of a kernel: ``x.grad += y.grad * dy/dx``, as Taichi's own gradient kernel does.

    The gradients of entries that the kernel stores to, rather than adds to, are set to 0.

    Raises:
        UnsupportedError: the kernel reads and writes the same field that has a gradient.
    """
    with backend.exclusive:
        program = simplify(record(kernel, args))
    body, names = program.body, {a.name: n for n, a in enumerate(backend.arguments(kernel))}
    objects = {c: args[names[c.name]] if c.is_argument else c.object for c in program.containers}
    grads = {c: backend.gradient_of(x) for c, x in objects.items() if c.dtype.is_real}
    read, written = read_containers(body), written_containers(body)
    params = [c for c in program.containers if c in read and grads.get(c) is not None]
    outputs = [c for c in program.containers if c in written and grads.get(c) is not None]
    both = [c.name for c in params if c in outputs]
    if both:
        raise UnsupportedError(
            f"{backend.short_name(kernel)}.grad(): the kernel reads and writes {both[0]}, whose gradient Taichi keeps "
            "only once. Write to another field, or use taichi_ext.vjp."
        )
    if not params or not outputs:
        return
    held = [(objects[c], backend.copy_of(objects[c])) for c in written]
    try:
        weights = [backend.as_numpy(grads[c]) for c in outputs]
        found = vjp(kernel, [objects[c] for c in params], [objects[c] for c in outputs], weights, args=args)
    finally:
        for x, copy in held:
            backend.put_back(x, copy)
    for c, gradient in zip(params, found, strict=True):
        backend.add_to(grads[c], np.asarray(backend.as_numpy(gradient)))
    for c in _stored(body) & set(outputs):
        backend.put_back(grads[c], 0 * backend.copy_of(grads[c]))


def _stored(body: Body) -> set[Container]:
    return {s.target.container for s in statements(body) if isinstance(s, Assign) and isinstance(s.target, Load)}
