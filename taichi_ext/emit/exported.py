"""A kernel with tangents as a Python module of its own, which needs Taichi alone."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from taichi_ext import backend
from taichi_ext.analysis.changes import written_containers
from taichi_ext.backend import ti
from taichi_ext.cached import cached_property
from taichi_ext.emit.exported_checks import CHECKS, IMPORTS
from taichi_ext.emit.module import factory
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import Container, Program, Read, Tensor
from taichi_ext.record.arguments import annotation_text

Labels = Mapping[str, tuple[str, tuple[int, ...]]]  # names in messages, and shapes, of fields and arrays


@dataclass(frozen=True)
class JacobianPart:
    """The J of one output with respect to one parameter: some columns of the output's array.

    Attributes:
        name: of the parameter in messages and the text, if it is not a field.
        field: the parameter, if it is a field.
        first: its first column.
        width: its number of columns.
        shape: of J.
    """

    name: str
    field: object
    first: int
    width: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TangentArray:
    """An array of tangents that a kernel takes behind the user's arguments.

    Attributes:
        name: of the argument.
        dtype: its type, as ``f32``.
        shape: rows and columns.
        output: the number of the output whose J it is; None where it is the tangents of something else.
        parts: the Js in it, by parameter.
        is_covered: whether the kernel writes all of it, whatever it holds.
        first_seed: the column from which on its rows are seeds; None where they are not.
    """

    name: str
    dtype: str
    shape: tuple[int, int]
    output: int | None
    parts: tuple[JacobianPart, ...]
    is_covered: bool
    first_seed: int | None = None

    @property
    def is_output(self) -> bool:
        return self.output is not None

    @property
    def size(self) -> int:
        return max(1, self.shape[0] * self.shape[1])

    @property
    def memory(self) -> str:
        """Memory for it, as text."""
        return f"ti.ndarray(ti.{self.dtype}, shape={self.size})"


def export(
    program: Program,
    tangents: list[TangentArray],
    known: Mapping[object, tuple[str, tuple[int, ...]]],
    by_column: bool,
    title: str,
) -> str:
    """The text of a module that defines ``bind(...)``.

    Args:
        program: the kernel with tangents, which takes them as its last arguments.
        tangents: the meaning of those arguments.
        known: the fields, by identity, and arrays, by name, whose shapes the kernel relies on: their names in messages
            and their shapes.
        by_column: whether the columns of J are contiguous in memory.
        title: the first line of the module's docstring, with outputs and parameters.

    Raises:
        UnsupportedError: the kernel uses a Python object that has no text.
    """
    text, objects, _ = factory(program)
    fields = {id(c.object) for c in program.containers if not c.is_argument}
    own = {t.name for t in tangents}
    given = [name for name, obj in objects.items() if id(obj) in fields or isinstance(obj, ti.SNode)]
    arguments = [a.name for a in program.arguments if a.value is not None and a.name not in own]
    labels = {name: known[id(objects[name])] for name in given if id(objects[name]) in known}
    labels |= {name: known[name] for name in arguments if name in known}
    names = {id(obj): name for name, obj in objects.items()}
    arrays = [c.name for c in program.containers if c.is_argument and c.name in arguments]
    checks = [*_checks_of_fields(program, names), *_checks_of_arguments(program, arguments, labels)]
    checks += _checks_of_memory(program, tangents, arrays)
    threads = backend.thread_count()
    if backend.is_host_arch() and (threads == 1 or "global_thread_idx" in text):
        checks.append(f"_threads({threads})")
    texts = dict(_texts(program, names, labels))
    module = _Module(tangents, given, arguments, texts, checks, arrays, by_column, names)
    constants = [f"{name} = {_written(name, obj)}\n" for name, obj in objects.items() if name not in module.given]
    parts = [
        module.description(title, os.path.basename(program.file)),
        IMPORTS,
        *constants,
    ]
    has_functions = "@ti.real_func" in text
    settings = backend.settings_text(program.hazards, text.count("\n"), has_functions=has_functions)
    copying = () if module.is_in_place else (_COPYING,)
    functions = (text.replace("def make(", "def _make(", 1), module.bind(list(objects)), settings, CHECKS, *copying)
    return "\n".join(parts) + "\n\n" + "\n\n".join(functions)


@dataclass(frozen=True)
class _Module:
    """The names in a module: arrays of tangents, fields, and arguments of the kernel; and facts about some of them."""

    tangents: list[TangentArray]
    given: list[str]
    arguments: list[str]
    texts: Mapping[str, str]  # their descriptions
    checks: list[str]  # calls that raise for unsuitable objects
    arrays: list[str]  # the arguments that are arrays
    by_column: bool
    objects: Mapping[int, str]  # the names of objects, by identity

    @property
    def outputs(self) -> list[TangentArray]:
        found = [(t.output, t) for t in self.tangents if t.output is not None]
        return [t for _, t in sorted(found, key=lambda pair: pair[0])]

    @property
    def numbers(self) -> list[str]:
        """The arguments that can be given at each call."""
        return [name for name in self.arguments if name not in self.arrays]

    @property
    def names(self) -> list[str]:
        return sorted({*self.given, *self.arguments})

    @property
    def is_in_place(self) -> bool:
        """Whether the kernel writes to the arrays of J that are given."""
        return not self.by_column and all(len(t.parts) == 1 for t in self.outputs)

    @cached_property
    def jacobians(self) -> list[tuple[str, TangentArray, JacobianPart]]:
        """The arrays of J that the function takes, by name."""
        found: dict[str, tuple[TangentArray, JacobianPart]] = {}
        taken = {*self.given, *self.arguments, *(t.name for t in self.tangents)}
        for t in self.outputs:
            for part in t.parts:
                name = t.name if self.is_in_place else f"{t.name}_by_{self.objects.get(id(part.field), part.name)}"
                while name in found or (name in taken and not self.is_in_place):
                    name += "_"
                found[name] = t, part
        return [(name, t, part) for name, (t, part) in found.items()]

    def description(self, title: str, file: str) -> str:
        arrays = (f"    {name}: {t.dtype}, of shape {part.shape}" for name, t, part in self.jacobians)
        lines = [
            f'"""{title}',
            "",
            f"Written by taichi_ext from {file}; it needs Taichi alone.",
            "",
            f"    run = bind({', '.join(f'{n}={n}' for n in self.names)})",
            f"    run({', '.join(name for name, _, _ in self.jacobians)})",
            "",
            *(f"    {name}: {self.texts.get(name, 'a node of the layout')}" for name in self.names),
            "",
            *([f"A call can take other numbers, by name: {', '.join(self.numbers)}.", ""] if self.numbers else []),
            "The arrays of J, in C order:",
            "",
            *arrays,
            '"""',
            "",
        ]
        return "\n".join(lines)

    def bind(self, objects: list[str]) -> str:
        """The text of ``bind``."""
        own = {t.name: t for t in self.tangents if not (t.is_output and self.is_in_place)}
        names = [name for name, _, _ in self.jacobians]
        numbers = [f"{name}={name}" for name in self.numbers]
        arguments = ", ".join([*self.arguments, *(t.name for t in self.tangents)])
        exist = f"_check_exist({_by_name(sorted(self.given))})"
        again = [
            f"if not _kernel._primal.{backend.COMPILED_TABLES[0]}:  # Taichi clears them where a tree is destroyed",
            f"    {exist}",
        ]
        lines = [
            f"def bind({', '.join(['*', *self.names] if self.names else [])}):",
            '    """A function that runs the kernel and fills the arrays of J, which it takes."""',
            *([f"    {exist}"] if self.given else []),
            *(f"    {check}" for check in self.checks),
            "    _program = _weakref.ref(ti.lang.impl.get_runtime().prog)",
            f"    _kernel = _make({', '.join(objects)})",
            *(f"    {t.name} = {t.memory}" for t in own.values()),
            *(f"    _copy_{t.name} = _copier(ti.{t.dtype})" for t in self.outputs if t.name in own),
            "",
            f"    def _run({', '.join([*names, *(['*', *numbers] if numbers else [])])}):",
            "        _check_not_ended(_program)",
            *(f"        {line}" for line in again if self.given),
            *(f"        {check}" for check in self.checks if check.startswith(("_number(", "_vector("))),
            *(f"        {name} = {self.jacobian(name, t, part)}" for name, t, part in self.jacobians),
            f"        _apart({_by_name(names)}, {_by_name(self.arrays)})",
            *(f"        {t.name}.fill(0)" for t in self.tangents if not t.is_covered),
            *(f"        {self.seed(t)}" for t in self.tangents if t.first_seed is not None),
            "        with _careful_compilation():",
            f"            _result = _kernel({arguments})",
            *(f"            {self.copy(name, t, part)}" for name, t, part in self.jacobians if t.name in own),
            "        return _result",
            "",
            "    return _run",
            "",
        ]
        return "\n".join(lines)

    def jacobian(self, name: str, t: TangentArray, part: JacobianPart) -> str:
        """The call that checks an array of J."""
        is_flat = self.is_in_place and len(part.shape) != 1
        return f"_jacobian({name!r}, {name}, {t.dtype!r}, {part.shape}, {is_flat})"

    def copy(self, name: str, t: TangentArray, part: JacobianPart) -> str:
        """The call that copies the columns of one parameter."""
        row, column = (1, t.shape[0]) if self.by_column else (t.shape[1], 1)
        return f"_copy_{t.name}({name}, {t.name}, {part.width}, {row}, {column}, {part.first})"

    def seed(self, t: TangentArray) -> str:
        """The call that makes the rows of a parameter its seeds."""
        rows, columns = t.shape
        row, column = (1, rows) if self.by_column else (columns, 1)
        first = t.first_seed or 0
        return f"_seed({t.name}, {first * column}, {row + column}, {min(rows, columns - first)})"


def _by_name(names: Iterable[str]) -> str:
    return f"{{{', '.join(f'{name!r}: {name}' for name in names)}}}"


def _texts(program: Program, names: Mapping[int, str], labels: Labels) -> Iterator[tuple[str, str]]:
    """Descriptions of fields and arguments, by name."""
    for c in program.containers:
        if not c.is_argument and id(c.object) in names:
            name = names[id(c.object)]
            known = labels[name][0] if name in labels else f"a field of shape {c.shape}"
            entries = f" with entries of shape {c.element_shape}" if c.element_shape else ""
            yield name, f"{known}{entries}, {c.dtype.name}"
    for a in program.arguments:
        shape = f", of shape {labels[a.name][1]}" if a.name in labels else ""
        text = annotation_text(a.annotation)
        if not isinstance(text, str):
            text = "a struct" if isinstance(text, backend.StructType) else "a field"
        yield a.name, f"{text}{shape}"


def _checks_of_fields(program: Program, names: Mapping[int, str]) -> Iterator[str]:
    """The calls that compare the fields with those that the kernel was made for."""
    fields = {names[id(c.object)]: c for c in program.containers if not c.is_argument and id(c.object) in names}
    for name, c in sorted(fields.items()):
        layout = "dense" if backend.is_dense(c.object) else "sparse"
        yield f"_field({name!r}, {name}, {c.dtype.name!r}, {c.shape}, {c.element_shape}, {c.offset}, {layout!r})"
    if len(fields) > 1:
        yield f"_distinct({_by_name(sorted(fields))})"


def _checks_of_arguments(program: Program, arguments: Sequence[str], labels: Labels) -> Iterator[str]:
    """The calls that compare the arguments with those that the kernel was made for."""
    for a in program.arguments:
        if a.name not in arguments:
            continue
        if isinstance(a.value, Container) and a.name in labels:
            shape = labels[a.name][1]
            own = shape[: len(shape) - len(a.value.element_shape)]
            yield f"_array({a.name!r}, {a.name}, {a.value.dtype.name!r}, {own}, {a.value.element_shape})"
        elif isinstance(a.value, Read):
            yield f"_number({a.name!r}, {a.name}, {a.value.dtype.is_real})"
        elif isinstance(a.value, Tensor):
            yield f"_vector({a.name!r}, {a.name}, {a.value.shape})"


def _checks_of_memory(program: Program, tangents: Sequence[TangentArray], arrays: Sequence[str]) -> Iterator[str]:
    """The call that finds arrays with tangents, or that the kernel writes to, in the memory of another one."""
    own = {c.name for c in written_containers(program.body)} | {part.name for t in tangents for part in t.parts}
    if len(arrays) > 1:
        yield f"_apart({_by_name(n for n in arrays if n in own)}, {_by_name(n for n in arrays if n not in own)})"


def _written(name: str, obj: object) -> str:
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


_COPYING = textwrap.dedent("""\
    def _copier(dtype):
        @ti.kernel
        def copy(
            J: ti.types.ndarray(dtype=dtype),
            whole: ti.types.ndarray(ndim=1),
            width: int,
            row: int,
            column: int,
            first: int,
        ):
            for entry in ti.grouped(J):
                n = 0
                for d in ti.static(range(len(J.shape))):
                    n = n * J.shape[d] + entry[d]
                place = n // width * row + (first + n % width) * column
                J[entry] = whole[place]

        return copy
""")
