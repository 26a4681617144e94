"""What the blocks of one stage share while its adjoint is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import taichi_ext.program as ir
from taichi_ext.adjoint.contention import Contention
from taichi_ext.adjoint.stages import Stage
from taichi_ext.adjoint.tapes import MOST_LOCAL, AdjointArray, Tape
from taichi_ext.analysis.activity import Activity, carries_tangent
from taichi_ext.program import I32, Container, Load, Local, Read, Value
from taichi_ext.program.build import Coefficient, is_number

Weights = list[Coefficient]  # an adjoint: a number for each cotangent


def is_none(ws: Weights) -> bool:
    """Whether an adjoint is known to be 0."""
    return all(is_number(w, 0) for w in ws)


@dataclass(eq=False)
class Sweep:
    """The adjoint of one stage as it is made.

    Attributes:
        stage: in normal form.
        activity: the locals and containers of the stage that carry derivatives.
        tape: the stack of a thread.
        contention: how adjoints are added to.
        width: the number of cotangents, at most those that the arrays are for.
        is_guarded: whether a product of 0 with what is infinite or not a number is 0.
        is_again: whether the adjoint is differentiated again.
        is_fast: whether functions of the library may differ in their last bits.
        dirty: containers that an iteration may load from after a store to them.
        thread: the local with the number of the thread.
        active: locals of the adjoint program that have adjoints.
        local_arrays: the adjoints of local arrays.
        most_local: numbers of a loop's tape in local arrays.
    """

    stage: Stage
    activity: Activity
    arrays: Mapping[Container, AdjointArray]
    tape: Tape
    contention: Contention
    width: int
    dirty: frozenset[Container]
    own: dict[Container, Container]
    is_guarded: bool
    is_again: bool
    is_fast: bool
    thread: Local = field(default_factory=lambda: Local("thread", I32, (), "kept"))
    active: set[Local] = field(default_factory=set)
    local_arrays: dict[Local, list[Local]] = field(default_factory=dict)
    most_local: int = MOST_LOCAL

    def none(self) -> Weights:
        """The adjoint of what nothing is computed from."""
        return [0] * self.width

    def has(self, value: Value) -> bool:
        """Whether a value of the adjoint program has an adjoint."""
        return carries_tangent(value, self._is_active)

    def _is_active(self, v: Read | Load) -> bool:
        if isinstance(v, Read):
            return v.local in (self.local_arrays if v.index else self.active)
        return v.container in self.arrays and v.dtype.is_real


def substitution(env: Mapping[Local, Value]) -> Callable[[Value], Value]:
    """A function that gives values in terms of the locals of the adjoint program; those of arrays are read whole."""

    def change(v: Value) -> Value:
        if isinstance(v, Read):
            return Read(array_of(env, v.local), v.index, checks=v.checks) if v.index else env.get(v.local, v)
        return v.constant if isinstance(v, ir.FoldedConst) else v

    return lambda value: ir.rebuilt(value, change)


def array_of(env: Mapping[Local, Value], local: Local) -> Local:
    """The local array of the adjoint program for one of the stage."""
    new = env.get(local)
    return new.local if isinstance(new, Read) else local


def dirty_containers(body: ir.Body) -> frozenset[Container]:
    """The containers that an iteration may load from after a store to them."""
    stored: set[Container] = set()
    containers: set[Container] = set()
    for s in ir.statements(body):
        containers.update(s.contents.containers & stored)
        if isinstance(s, (ir.For, ir.While, ir.Store)):  # loops come back to their start
            stored.update(m for m in s.written if isinstance(m, Container))
    return frozenset(containers)
