"""The arguments of a differentiated kernel after the user's: shadows, and scratch memory for long rows."""

from __future__ import annotations

from dataclasses import dataclass

from taichi_ext.differentiate.facts.facts import Facts
from taichi_ext.differentiate.forms.forms import Form, Row
from taichi_ext.program import I32, Argument, Container, Load, Local, Program, Read, Type
from taichi_ext.program.build import Coefficient, add, element, multiply
from taichi_ext.program.keys import VALUES, Purpose, Scratch


def shadow_argument(c: Container) -> Argument:
    """The argument of a kernel for a shadow or scratch array."""
    return Argument(c.name, f"ti.types.ndarray(dtype=ti.{c.dtype}, ndim=1)", c)


def first_column_argument(local: Local) -> Argument:
    """The argument of a kernel for the first column of the computed block."""
    return Argument(local.name, "ti.i32", Read(local))


class Arguments:
    """The arguments of one walk: the purpose of each, and the array."""

    def __init__(self, program: Program) -> None:
        self.given: list[tuple[Purpose, Container]] = []
        self.scratch_sizes: dict[Scratch, int] = {}
        self.first_column: Local | None = None
        self._scratch: dict[Scratch, Container] = {}
        self._taken = {a.name for a in program.arguments} | {c.name for c in program.containers}

    def add(self, what: Purpose, name: str, dtype: Type) -> Container:
        """A new array of one dimension, with a unique name."""
        argument = Container(self._unique(name if name.isidentifier() else "d_field"), dtype, 1, is_argument=True)
        self.given.append((what, argument))
        return argument

    def first_of_block(self) -> Read:
        """The first column of the computed block, an argument of the kernel."""
        if self.first_column is None:
            self.first_column = Local(self._unique("first_column"), I32, (), "parameter")
        return Read(self.first_column)

    def _unique(self, name: str) -> str:
        unique, count = name, 1
        while unique in self._taken:
            unique, count = f"{name}_{count}", count + 1
        self._taken.add(unique)
        return unique

    def find(self, what: Purpose, name: str, dtype: Type) -> Container:
        """The array for a purpose; a new one if there is none yet."""
        known = next((argument for key, argument in self.given if key == what), None)
        return self.add(what, name, dtype) if known is None else known

    def reserve_scratch(self, size: int, dtype: Type, part: tuple[int, Coefficient]) -> tuple[Container, Coefficient]:
        """Memory for a row: the array, and the start of the row in it.

        Args:
            size: the length of the row.
            dtype: its type.
            part: the number of parts of the memory, and the number of the one to use.
        """
        key = Scratch(dtype.name)
        if key not in self._scratch:
            self._scratch[key] = self.add(key, f"scratch_{dtype.name}", dtype)
        parts, own = part
        start = self.scratch_sizes.get(key, 0)
        self.scratch_sizes[key] = start + size * parts
        return self._scratch[key], add(multiply(own, size), start)


@dataclass(frozen=True)
class ShadowMatrix:
    """An argument of one dimension as a matrix of tangents: a row for each number, a column for each column of J.

    It has one index: with two, Taichi keeps S[i, i] in a register while S[i, j] is stored to.
    """

    array: Container
    rows: int
    columns: int
    by_column: bool  # columns are contiguous in memory

    def entry(self, row: Coefficient, column: Coefficient) -> Load:
        """One tangent."""
        outer, length, inner = row, self.columns, column
        if self.by_column:
            outer, length, inner = column, self.rows, row
        return element(self.array, add(multiply(outer, length), inner))

    def row(self, number: int) -> Form:
        """The tangent of a number that does not change in the kernel."""
        return {Row(self.array, number, self, number): 1}


def given_tangents(facts: Facts, arguments: Arguments) -> ShadowMatrix | None:
    """The tangents of arguments and Python numbers if these have rows instead of columns; None otherwise."""
    if facts.seeds.values is None or not facts.seeds.arguments:
        return None
    dtype, rows = facts.seeds.values
    return ShadowMatrix(arguments.add(VALUES, "d_values", dtype), rows, facts.columns, facts.seeds.device.by_column)
