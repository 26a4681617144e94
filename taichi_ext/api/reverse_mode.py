"""``kernel.grad()`` and ``ti.ad.Tape`` for kernels with derivatives of the user's own, by the adjoint of the kernel."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

import taichi_ext.program as ir
from taichi_ext import backend
from taichi_ext.analysis.changes import draws_random_numbers, read_containers, reads_target, written, written_containers
from taichi_ext.analysis.linearity import check_rules
from taichi_ext.analysis.same_values import ValueNumbers
from taichi_ext.api.inputs.options import Options
from taichi_ext.api.inputs.results import by_parameter
from taichi_ext.api.jacobian import prepared_form, transposed
from taichi_ext.api.runs.by_adjoint import products_by_adjoint
from taichi_ext.boundary.registry import RulesInUse
from taichi_ext.errors import UnsupportedError
from taichi_ext.record.recorder import record
from taichi_ext.runtime.memory.state import State
from taichi_ext.simplify import simplify
from taichi_ext.simplify.usage import all_values


class GradientLaunch:
    """Launches of the gradient of a kernel, for arguments of some types.

    As Taichi's own gradient kernels do, it adds ``y.grad * dy/dx`` to ``x.grad``, for all fields and arrays that the
    kernel reads and writes and that have a gradient.  That of an entry that the kernel stores to is 0 afterwards.  What
    the kernel stores is put back.

    Args:
        kernel: the kernel itself.
        args: arguments of these types.

    Raises:
        UnsupportedError: the kernel reads what it overwrites, or draws random numbers, or a derivative is not known.
    """

    def __init__(self, kernel: backend.Kernel, args: tuple[object, ...]) -> None:
        self._kernel, self._name = kernel, f"{backend.short_name(kernel)}.grad()"
        program = simplify(record(kernel, args, RulesInUse(takes_derivative=True)))
        check_rules(program)
        self._positions = {a.name: n for n, a in enumerate(backend.arguments(kernel))}
        self._written, self._read = written_containers(program.body), read_containers(program.body)
        self._real = [c for c in program.containers if c.dtype.is_real and c in self._read | self._written]
        stores = (s for s in ir.statements(program.body) if isinstance(s, ir.Assign))
        self._stored = {s.target.container for s in stores if isinstance(s.target, ir.Load)}
        entry = overwritten(program.body)
        if entry is not None:
            container, place = entry
            raise UnsupportedError(
                f"{ir.cited(place)}{self._name}: the kernel reads and writes {container.name}. When the gradient is "
                "computed, what it has read is not there any more. Write to another field, or use taichi_ext.vjp."
            )
        if draws_random_numbers(program.body):
            raise UnsupportedError(
                f"{self._name}: the kernel draws random numbers, which were others when it ran. Read them from a "
                "field, or use taichi_ext.vjp."
            )

    def __call__(self, args: tuple[object, ...]) -> None:
        """Add to the gradients."""
        objects = {c: args[self._positions[c.name]] if c.is_argument else c.object for c in self._real}
        grads: dict[ir.Container, Any] = {c: backend.gradient_of(x) for c, x in objects.items()}
        own = [c for c in self._real if grads[c] is not None]
        is_host = backend.is_host_arch()
        params = [c for c in own if is_host or c in self._read]
        outputs = [c for c in own if c in self._written]
        if not outputs or not params:
            return
        given, wanted = ([objects[c] for c in named] for named in (params, outputs))
        plan, call = prepared_form(self._kernel, given, wanted, args, Options(), "transpose")
        evaluation = plan.start(call, state=None if is_host else State())
        evaluation.prepared.is_checked = True  # some of the params may only be written
        cotangents = [np.asarray(backend.as_numpy(grads[c])).reshape(-1, 1) for c in outputs]
        if is_host:
            products = products_by_adjoint(evaluation, cotangents, restores=True)
            if products is None:
                raise UnsupportedError(evaluation.prepared.has_no_adjoint)
            rows = products.rows.T
        else:
            rows = transposed(evaluation, cotangents, None)
            evaluation.restore()
        for c, part in zip(params, by_parameter(rows, (1,), evaluation.layout), strict=True):
            backend.add_to(grads[c], part, is_added=c not in self._written)
        for c in self._stored.intersection(outputs).difference(params):
            backend.add_to(grads[c], np.zeros(()), is_added=False)


# Whether a kernel overwrites what it has read, so that it cannot run again on what it has left.

Found = tuple[ir.Container, ir.Place | None]


def overwritten(body: ir.Body) -> Found | None:
    """A container with entries that are read before they change, so that another run would read other numbers.

    An entry may be read after it was stored to in the same iteration, or by an earlier loop that reads no such entry.

    Returns:
        The container, and where it is read; None if there is none.
    """
    reading = _Reading(body)
    stages = [(written_containers((s,)), _sums((s,)), list(reading.exposed((s,), set()))) for s in body]
    for n, (own, _, exposed) in enumerate(stages):
        changed = own.union(*(later for later, _, _ in stages[n:]), *(sums for _, sums, _ in stages[:n]))
        for container, place in exposed:
            if container in changed:
                return container, place
    return None


def _sums(body: ir.Body) -> set[ir.Container]:
    """The containers that statements add to."""
    stores = (s for s in ir.statements(body) if isinstance(s, ir.Store) and not isinstance(s, ir.Assign))
    added = {s.target.container for s in stores if isinstance(s.target, ir.Load)}
    return added.union(*(s.writes for s in ir.statements(body) if isinstance(s, ir.Effect)))


class _Reading:
    """The entries that statements read from before them."""

    def __init__(self, body: ir.Body) -> None:
        self._changed = written(body)
        self._numbers = ValueNumbers()

    def exposed(self, body: ir.Body, stored: set[Hashable]) -> Iterator[Found]:
        """What is read; ``stored`` are names of the entries that the same iteration has stored to, and is extended."""
        for s in body:
            loads = [v for v in all_values(s) if isinstance(v, ir.Load)]
            target = s.target if isinstance(s, ir.Store) and isinstance(s.target, ir.Load) else None
            if target is not None and reads_target(s):
                loads.append(target)
            for load in loads:
                if self._name(load) not in stored:
                    yield load.container, s.place
            if isinstance(s, ir.Effect):
                yield from ((c, s.place) for c in s.writes)
            for block in ir.bodies(s):
                yield from self.exposed(block, set(stored))
            if target is not None and isinstance(s, ir.Assign):
                stored.add(self._name(target))

    def _name(self, load: ir.Load) -> Hashable:
        """A name that entries with the same indices share, where these do not change."""
        parts = [v for v in ir.children(load) if isinstance(v, ir.Value)]
        memory = {getattr(n, "local", getattr(n, "container", None)) for v in parts for n in ir.walk(v)}
        return id(load) if memory & self._changed else self._numbers.of(load)
