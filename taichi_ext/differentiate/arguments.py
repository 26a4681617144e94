"""The arguments that a differentiated kernel takes behind the user's: shadows, and scratch memory for long rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taichi_ext.analysis.affine import atom_value
from taichi_ext.differentiate.build import add, cast, literal, multiply
from taichi_ext.differentiate.decisions import VALUES
from taichi_ext.differentiate.forms import Form, Row
from taichi_ext.program import I32, Argument, Container, Load, Local, Op, Program, Read, Type, Value

if TYPE_CHECKING:
    from taichi_ext.differentiate.forward import Forward


def shadow_argument(c: Container) -> Argument:
    """The argument of a kernel that is an array of the tangents' own."""
    return Argument(c.name, f"ti.types.ndarray(dtype=ti.{c.dtype}, ndim=1)", c)


def first_column_argument(local: Local) -> Argument:
    """The argument of a kernel that is the first column of the block that is computed."""
    return Argument(local.name, "ti.i32", Read(local))


class Arguments:
    """The arguments of one walk: what each is for, and the array."""

    def __init__(self, program: Program) -> None:
        self.given: list[tuple[Any, Container]] = []
        self.scratch_sizes: dict[Any, int] = {}
        self.first_column: Local | None = None
        self._scratch: dict[Any, Container] = {}
        self._taken = {a.name for a in program.arguments} | {c.name for c in program.containers}

    def add(self, what: Any, name: str, dtype: Type) -> Container:
        """A new array of one dimension, under a name that nothing else has."""
        argument = Container(self._unique(name if name.isidentifier() else "d_field"), dtype, 1, is_argument=True)
        self.given.append((what, argument))
        return argument

    def first_of_block(self) -> Read:
        """The first column of the block that is computed, which the kernel is given."""
        if self.first_column is None:
            self.first_column = Local(self._unique("first_column"), I32, (), "parameter")
        return Read(self.first_column)

    def _unique(self, name: str) -> str:
        unique, count = name, 1
        while unique in self._taken:
            unique, count = f"{name}_{count}", count + 1
        self._taken.add(unique)
        return unique

    def find(self, what: Any, name: str, dtype: Type) -> Container:
        """The array for that; a new one where there is none yet."""
        known = next((argument for key, argument in self.given if key == what), None)
        return self.add(what, name, dtype) if known is None else known

    def reserve_scratch(self, size: int, dtype: Type, forward: Forward) -> tuple[Container, Any]:
        """Memory for a row: the array, and where the row starts.

        There is a part for each thread, or for each iteration where those are fewer or threads have no number.
        """
        key = ("scratch", dtype.name)
        if key not in self._scratch:
            self._scratch[key] = self.add(key, f"scratch_{dtype.name}", dtype)
        parts, own = _part(forward)
        start = self.scratch_sizes.get(key, 0)
        self.scratch_sizes[key] = start + size * parts
        return self._scratch[key], add(multiply(own, size), start)


class GivenTangents:
    """The tangents of arguments and Python numbers that do not start as columns but are given: a row for each."""

    def __init__(self, forward: Forward) -> None:
        assert forward.seeds.values is not None
        dtype, self.rows = forward.seeds.values
        self.forward = forward
        self.shadow = forward.arguments.add(VALUES, "d_values", dtype)

    def entry(self, row: int, column: Any) -> Load:
        outer, length, inner = row, self.forward.columns, column
        if self.forward.seeds.by_column:
            outer, length, inner = column, self.rows, row
        index = add(multiply(outer, length), inner)
        return Load(self.shadow, (index if isinstance(index, Value) else literal(index, I32),))

    def form(self, row: int) -> Form:
        """The tangent of one number."""
        return {Row(self.shadow, row, self, row): 1}


def _part(forward: Forward) -> tuple[int, Any]:
    """Into how many parts scratch memory is cut, and the number of the iteration's own."""
    loop, seeds = forward.parallel_loop(), forward.seeds
    if loop is None:
        return 1, 0
    is_numbered = not seeds.is_host and all(not isinstance(a, Local) or a not in forward.changed for a in loop.atoms)
    iterations = loop.iterations if is_numbered else None
    if iterations is not None and (not seeds.threads or iterations < seeds.threads):
        assert loop.bounds is not None
        number: Any = 0
        for atom, (first, end) in zip(loop.atoms, loop.bounds, strict=True):
            number = add(multiply(number, end - first), add(cast(atom_value(atom), I32), -first))
        return iterations, number
    if not seeds.threads:
        forward.keep_order("rows are too long for local arrays, and threads have no numbers here")
        return 1, 0
    return seeds.threads, Op("global_thread_idx", (), I32)
