"""Where the rows of locals lie: in a local array, in scratch memory, in J."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from taichi_ext.analysis.affine import atom_value
from taichi_ext.differentiate.facts.arguments import Arguments
from taichi_ext.differentiate.facts.facts import Facts
from taichi_ext.differentiate.forms.build import Builder, Coefficient, add, cast, element, literal, multiply
from taichi_ext.differentiate.forms.cursor import Cursor
from taichi_ext.differentiate.plan.storage_plan import Plan
from taichi_ext.program import I32, Load, Local, Op, Read, Type, Value


class RowMemory(Protocol):
    """Memory for the rows of one local."""

    is_local: bool  # a local array

    def entry(self, index: Coefficient) -> Read | Load:
        """One number."""
        ...


class LocalRow:
    """A row in a local array: the fastest to reach, slow to compile when it is long."""

    is_local = True

    def __init__(self, builder: Builder, name: str, size: int, dtype: Type) -> None:
        self.builder = builder
        self.array = builder.array(name, size, dtype)

    def entry(self, index: Coefficient) -> Read:
        return Read(self.array, (index if isinstance(index, Value) else int(index),))


class ScratchRow:
    """A row in an extra argument of the kernel; ``part`` is what ``scratch_part`` gives."""

    is_local = False

    def __init__(
        self,
        builder: Builder,
        arguments: Arguments,
        size: int,
        dtype: Type,
        part: tuple[int, Coefficient],
        *,
        is_filled: bool,
    ) -> None:
        self.builder = builder
        self.array, start = arguments.reserve_scratch(size, dtype, part)
        self.start = self.builder.keep(start, "start") if isinstance(start, Value) else start
        if not is_filled:
            self.builder.loop(size, lambda k: self.builder.assign(self.entry(k), literal(0, dtype)))

    def entry(self, index: Coefficient) -> Load:
        return element(self.array, add(self.start, index))


class PlacedRow:
    """A row of J itself, which an iteration of the parallel loop over all of an output writes to as it goes.

    Args:
        builder: where zeros are stored first, unless each entry is written.
        number: of the row.
        place: the entry of J by the number of a row and a column.
        columns: the length of the row.
    """

    is_local = False

    def __init__(
        self,
        builder: Builder,
        number: Value,
        place: Callable[[Coefficient, Coefficient], Load],
        columns: int,
        *,
        is_filled: bool,
    ) -> None:
        self.builder = builder
        self._place = place
        self.number = builder.keep(number, "row")
        if not is_filled:
            builder.loop(columns, lambda k: builder.assign(self.entry(k), 0))

    def entry(self, index: Coefficient) -> Load:
        return self._place(self.number, index)


def scratch_part(facts: Facts, cursor: Cursor, plan: Plan) -> tuple[int, Coefficient]:
    """Into how many parts scratch memory is cut, and the number of the iteration's own.

    There is a part for each thread, or for each iteration where those are fewer or threads have no number.
    """
    loop, seeds = cursor.parallel_loop, facts.seeds
    if loop is None:
        return 1, 0
    is_numbered = not seeds.is_host and all(not isinstance(a, Local) or a not in facts.changed for a in loop.atoms)
    iterations = loop.iterations if is_numbered else None
    if iterations is not None and (not seeds.threads or iterations < seeds.threads):
        assert loop.bounds is not None
        number: Coefficient = 0
        for atom, (first, end) in zip(loop.atoms, loop.bounds, strict=True):
            number = add(multiply(number, end - first), add(cast(atom_value(atom), I32), -first))
        return iterations, number
    if not seeds.threads:
        plan.keep_order(loop, "rows are too long for local arrays, and threads have no numbers here")
        return 1, 0
    return seeds.threads, Op("global_thread_idx", (), I32)
