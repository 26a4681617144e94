"""Memory for the rows of locals: a local array, scratch memory, or J."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from taichi_ext.analysis.affine import atom_value
from taichi_ext.differentiate.facts.arguments import Arguments, ShadowMatrix
from taichi_ext.differentiate.facts.facts import Facts
from taichi_ext.differentiate.forms.build import Builder, Coefficient, add, cast, element, literal, multiply
from taichi_ext.differentiate.forms.cursor import Cursor
from taichi_ext.differentiate.plan.storage_plan import Plan
from taichi_ext.program import I32, Load, Local, Op, Read, Type, Value


@dataclass(frozen=True)
class RowMemory:
    """Memory for the rows of one local.

    Attributes:
        entry: gives one number.
        is_local: whether it is a local array.
    """

    entry: Callable[[Coefficient], Read | Load]
    is_local: bool = False


def local_row(builder: Builder, name: str, size: int, dtype: Type, *, is_filled: bool = False) -> RowMemory:
    """A row in a local array: fastest to access, but slow to compile if long."""
    array = builder.array(name, size, dtype, is_filled=is_filled)
    return RowMemory(lambda k: Read(array, (k if isinstance(k, Value) else int(k),)), is_local=True)


def scratch_row(
    builder: Builder, arguments: Arguments, size: int, dtype: Type, part: tuple[int, Coefficient], *, is_filled: bool
) -> RowMemory:
    """A row in an extra argument of the kernel; ``part`` is the result of ``scratch_part``."""
    array, start = arguments.reserve_scratch(size, dtype, part)
    start = builder.keep(start, "start")
    return _cleared(builder, size, dtype, RowMemory(lambda k: element(array, add(start, k))), is_filled=is_filled)


def placed_row(builder: Builder, number: Value, matrix: ShadowMatrix, *, is_filled: bool) -> RowMemory:
    """A row of J itself, written directly by an iteration of the parallel loop over all of an output."""
    number = builder.keep(number, "row")
    memory = RowMemory(lambda k: matrix.entry(number, k))
    return _cleared(builder, matrix.columns, matrix.array.dtype, memory, is_filled=is_filled)


def _cleared(builder: Builder, size: int, dtype: Type, memory: RowMemory, *, is_filled: bool) -> RowMemory:
    """Set a row to zero, unless each entry is written before it is read."""
    if not is_filled:
        builder.loop(size, lambda k: builder.assign(memory.entry(k), literal(0, dtype)))
    return memory


def scratch_part(facts: Facts, cursor: Cursor, plan: Plan) -> tuple[int, Coefficient]:
    """The number of parts of scratch memory, and the number of this iteration's part.

    There is a part for each thread, or for each iteration if those are fewer or threads cannot be numbered.
    """
    loop, seeds = cursor.parallel_loop, facts.seeds
    if loop is None:
        return 1, 0
    is_numbered = not seeds.device.is_host and all(
        not isinstance(a, Local) or a not in facts.changed for a in loop.atoms
    )
    iterations = loop.iterations if is_numbered else None
    if iterations is not None and (not seeds.device.threads or iterations < seeds.device.threads):
        assert loop.bounds is not None
        number: Coefficient = 0
        for atom, (first, end) in zip(loop.atoms, loop.bounds, strict=True):
            number = add(multiply(number, end - first), add(cast(atom_value(atom), I32), -first))
        return iterations, number
    if not seeds.device.threads:
        plan.keep_order(loop, "its locals have too many columns for local arrays, and threads have no numbers here")
        return 1, 0
    return seeds.device.threads, Op("global_thread_idx", (), I32)
