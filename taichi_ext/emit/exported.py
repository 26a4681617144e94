"""A kernel with tangents as a Python module of its own, which needs Taichi alone."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import taichi as ti

from taichi_ext import backend
from taichi_ext.emit.module import HEADER, factory
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import Program
from taichi_ext.record.arguments import annotation_text


@dataclass(frozen=True)
class TangentArray:
    """An array of tangents that a kernel takes behind the user's arguments.

    Attributes:
        name: of the argument.
        dtype: its type, as ``f32``.
        shape: rows and columns.
        output: the number of the output whose J it is; None where it is memory that the module makes.
        is_covered: whether the kernel writes all of it, whatever it holds.
        first_seed: the column from which on its rows are seeds; None where they are not.
        is_paired: whether the kernel takes two numbers of float32 as one of 64 bits.
    """

    name: str
    dtype: str
    shape: tuple[int, int]
    output: int | None
    is_covered: bool
    first_seed: int | None = None
    is_paired: bool = False

    @property
    def is_output(self) -> bool:
        return self.output is not None

    @property
    def size(self) -> int:
        return max(1, self.shape[0] * self.shape[1])

    @property
    def memory(self) -> str:
        """Memory for it, as text."""
        return f"ti.ndarray(ti.{'u64' if self.is_paired else self.dtype}, shape={self.size // (1 + self.is_paired)})"


def export(
    program: Program,
    tangents: list[TangentArray],
    known: Mapping[Any, tuple[str, tuple[int, ...]]],
    by_column: bool,
    title: str,
) -> str:
    """The text of a module that defines ``bind(...)``.

    Args:
        program: the kernel with tangents, which takes them as its last arguments.
        tangents: what those arguments are.
        known: the fields, by identity, and arrays, by name, whose shapes the kernel relies on: what messages call them,
            and the shapes.
        by_column: whether the columns of J lie together in memory.
        title: what is differentiated, by what.

    Raises:
        UnsupportedError: the kernel uses a Python object that has no text.
    """
    text, objects = factory(program)
    fields = {id(c.object) for c in program.containers if not c.is_argument}
    own = {t.name for t in tangents}
    given = [name for name, obj in objects.items() if id(obj) in fields or isinstance(obj, ti.SNode)]
    arguments = [a.name for a in program.arguments if a.value is not None and a.name not in own]
    labels = {name: known[id(objects[name])] for name in given if id(objects[name]) in known}
    labels |= {name: known[name] for name in arguments if name in known}
    module = _Module(tangents, given, arguments, labels, by_column)
    constants = [f"{name} = {_written(name, obj)}\n" for name, obj in objects.items() if name not in module.given]
    parts = [
        module.description(title, os.path.basename(program.file)),
        f"import contextlib as _contextlib\nimport math as _math\n{HEADER}",
        *constants,
    ]
    settings = backend.settings_text(program.has_vectors, text.count("\n"))
    functions = (text.replace("def make(", "def _make(", 1), module.bind(list(objects)), settings, _CHECKS)
    return "\n".join(parts) + "\n\n" + "\n\n".join(functions)


@dataclass(frozen=True)
class _Module:
    """The names in a module: arrays of tangents, fields, and arguments of the kernel; what is known of some of them."""

    tangents: list[TangentArray]
    given: list[str]
    arguments: list[str]
    labels: Mapping[str, tuple[str, tuple[int, ...]]]
    by_column: bool

    @property
    def outputs(self) -> list[TangentArray]:
        found = [(t.output, t) for t in self.tangents if t.output is not None]
        return [t for _, t in sorted(found, key=lambda pair: pair[0])]

    @property
    def names(self) -> str:
        return ", ".join(sorted({*self.given, *self.arguments}))

    def description(self, title: str, file: str) -> str:
        order = "column by column" if self.by_column else "row by row"
        arrays = (f"    {t.name}: {t.dtype}, {t.shape[0]} rows and {t.shape[1]} columns" for t in self.outputs)
        lines = [
            f'"""{title}',
            "",
            f"Written by taichi_ext from {file}; it needs Taichi alone.",
            "",
            f"    run = bind({', '.join(f'{n}={n}' for n in sorted({*self.given, *self.arguments}))})",
            f"    run({', '.join(t.name for t in self.outputs)})",
            "",
            *(f"    {name}: {self.labels[name][0]}" for name in sorted(self.labels)),
            *([""] if self.labels else []),
            f"The arrays of J are contiguous, {order}:",
            "",
            *arrays,
            '"""',
            "",
        ]
        return "\n".join(lines)

    def bind(self, objects: list[str]) -> str:
        """The text of ``bind``."""
        outputs = ", ".join(t.name for t in self.outputs)
        lines = [
            f"def bind({'*, ' if self.names else ''}{self.names}):",
            '    """A function that runs the kernel and fills the arrays of J, which it takes."""',
            *(f"    _check({name!r}, {name}, {self.labels[name][1]})" for name in sorted(self.labels)),
            f"    _kernel = _make({', '.join(objects)})",
            *(f"    {t.name} = {t.memory}" for t in self.tangents if not t.is_output),
            "",
            f"    def _run({outputs}):",
            *(f"        {t.name} = _flat({t.name!r}, {t.name}, {t.size})" for t in self.outputs),
            *(f"        {t.name}.fill(0)" for t in self.tangents if not t.is_covered),
            *(f"        {self.seed(t)}" for t in self.tangents if t.first_seed is not None),
            *(f'        {t.name} = {t.name}.view("uint64")' for t in self.outputs if t.is_paired),
            "        with _careful_compilation():",
            f"            return _kernel({', '.join([*self.arguments, *(t.name for t in self.tangents)])})",
            "",
            "    return _run",
            "",
        ]
        return "\n".join(lines)

    def seed(self, t: TangentArray) -> str:
        """The call that makes the rows of a parameter its seeds."""
        rows, columns = t.shape
        row, column = (1, rows) if self.by_column else (columns, 1)
        first = t.first_seed or 0
        return f"_seed({t.name}, {first * column}, {row + column}, {min(rows, columns - first)})"


def _written(name: str, obj: Any) -> str:
    """An object as an expression of a module that imports Taichi alone."""
    if isinstance(obj, backend.StructType):
        members = (f"{k}={_written(k, annotation_text(member))}" for k, member in obj.members.items())
        return f"ti.types.struct({', '.join(members)})"
    if isinstance(obj, str):
        return obj
    raise UnsupportedError(
        f"{name!r} ({type(obj).__name__}) is a Python object that the kernel uses and that has no text, so the kernel "
        "cannot be exported. Use fields, numbers, vectors and functions of Taichi in it."
    )


_CHECKS = textwrap.dedent("""\
    def _check(name, given, shape):
        own = (*given.shape, *given.element_shape) if isinstance(given, ti.Ndarray) else tuple(given.shape)
        if own != shape:
            raise ValueError(f"{name} has the shape {own}; the kernel was made for {shape}.")


    def _flat(name, array, size):
        if _math.prod(array.shape) != size:
            raise ValueError(f"{name} has {_math.prod(array.shape)} entries; the kernel writes {size}.")
        if isinstance(array, ti.Ndarray):
            return array
        flags = getattr(array, "flags", None)
        is_contiguous = array.is_contiguous() if flags is None else flags.c_contiguous
        if not is_contiguous:
            raise ValueError(f"{name} is not contiguous in memory; pass an array in C order.")
        return array.reshape(-1)


    def _seed(array, first, stride, count):
        for n in range(count):
            array[first + n * stride] = 1
""")
