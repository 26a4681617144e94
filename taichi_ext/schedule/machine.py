"""Facts about the machine, and about where fields lie in its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from taichi_ext.analysis.loops import Extent, is_serialized, loop_bounds
from taichi_ext.program import Container, For, Local
from taichi_ext.simplify.usage import assigned_locals

LEAST_ITERATIONS = 512  # that Taichi gives to a thread of a CPU


@dataclass(frozen=True)
class Machine:
    """The inputs of decisions on loops, other than the program.

    Attributes:
        threads: of the CPU.
        is_checked: each iteration is watched or checked: loops stay whole.
        shapes: of the fields in one dense level without offsets, and of arrays: a loop over one visits all indices in
            the order of memory.
        extents: the indices of fields and arrays.
        is_fast: ``fast_math``: functions of the library may differ in their last bits.
        free: the first variables of the loops with loops in them that give the same in any order of their iterations.
    """

    threads: int
    is_checked: bool = False
    shapes: Mapping[Container, tuple[int, ...]] = field(default_factory=dict)
    extents: Mapping[Container, Extent] = field(default_factory=dict)
    free: frozenset[Local] = frozenset()
    is_fast: bool = False

    @property
    def least(self) -> int:
        """The iterations from which on all threads take part."""
        return LEAST_ITERATIONS * self.threads

    def domain(self, loop: For) -> tuple[int, ...] | None:
        """The shape that a parallel loop visits from zero on, in the order of memory; None where it is not known."""
        if is_serialized(loop):
            return None
        if any(v.shape for v in loop.variables) or set(loop.variables) & assigned_locals(loop.body):
            return None
        shape = self._shape(loop)
        return shape if shape is not None and len(shape) == len(loop.variables) and min(shape) > 0 else None

    def _shape(self, loop: For) -> tuple[int, ...] | None:
        if loop.kind == "field":
            (over,) = loop.domain
            return self.shapes.get(over) if isinstance(over, Container) else None
        bounds = loop_bounds(loop, self.extents)
        return None if bounds is None or any(first for first, _ in bounds) else tuple(end for _, end in bounds)
