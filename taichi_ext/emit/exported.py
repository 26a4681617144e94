"""A kernel with tangents as a Python module of its own, which needs Taichi alone."""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taichi_ext import backend
from taichi_ext.backend import RUNTIME, ti
from taichi_ext.emit.statements import Lines, Names
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import Container, Place, Program
from taichi_ext.record.recorder import annotation_text

Tangents = tuple[str, int, int, int | None]  # type, rows, columns, the column from which on its rows are seeds
Part = tuple[int, int, int, tuple[int, ...]]  # number of an array of tangents, first column, columns; shape of J


def export(
    program: Program, tangents: Sequence[Tangents], parts: Mapping[str, Part], shapes: Mapping[str, object], title: str
) -> str:
    """The text of a module that defines ``bind(...)``.

    Args:
        program: the kernel with tangents.
        tangents: its last arguments, arrays of tangents.
        parts: the arrays of J that a call fills, by name: some columns of an array of tangents each.
        shapes: those of the user's arguments that are arrays, by name.
        title: the first line of the module's docstring, with outputs and parameters.

    Raises:
        UnsupportedError: the kernel uses a Python object that has no text.
    """
    text, objects, _ = factory(program)
    fields = {id(c.object): c for c in program.containers if not c.is_argument}
    given = [name for name, obj in objects.items() if id(obj) in fields or isinstance(obj, ti.SNode)]
    taken = {a.name: a.value for a in program.arguments if a.value is not None}
    arguments = dict(list(taken.items())[: len(taken) - len(tangents)])
    expected = {name: _of_field(fields[id(objects[name])]) for name in given if id(objects[name]) in fields}
    arrays = {name: c for name, c in arguments.items() if isinstance(c, Container)}
    expected |= {name: f"an array of {c.dtype.name}, shape {shapes[name]}" for name, c in arrays.items()}
    jacobians = {n: f"an array of {tangents[array][0]}, shape {shape}" for n, (array, _, _, shape) in parts.items()}
    constants = [f"{name} = {_written(name, obj)}\n" for name, obj in objects.items() if name not in given]
    count = backend.thread_count()
    is_shared = backend.is_host_arch() and (count == 1 or "global_thread_idx" in text)
    words = {
        "title": title,
        "file": os.path.basename(program.file),
        "names": ", ".join(f"{name}={name}" for name in (*given, *arguments)),
        "jacobians": ", ".join(jacobians),
        "lines": "\n".join(f"    {name}: {kind}" for name, kind in (expected | jacobians).items()),
        "runtime": RUNTIME.header,
        "star": "*, " * bool(given or arguments) + ", ".join((*given, *arguments)),
        "make": ", ".join(objects),
        "numbers": "".join(f", {name}={name}" for name in arguments if name not in arrays),
        "arguments": "".join(f"{name}, " for name in arguments),
    }
    tables = [
        f"_GIVEN = {expected!r}\n_JACOBIANS = {jacobians!r}",
        f"_TANGENTS = {list(tangents)!r}  # type, rows, columns, first seed",
        f"_PARTS = {list(parts.values())!r}  # array, first column, columns, shape of J",
        f"_BY_COLUMN, _MOST_THREADS = {backend.stores_by_column()}, {count if is_shared else None}\n\n",
    ]
    settings = backend.settings_text(program.hazards, text.count("\n"), has_functions="@ti.real_func" in text)
    make = text.replace("def make(", "def _make(", 1)
    return "\n".join((_HEAD.format(**words), *constants, *tables, make, "", settings, _CHECKS, _BIND.format(**words)))


def _of_field(c: Container) -> str:
    layout = "dense" if backend.is_dense(c.object) else "sparse"
    return f"a {layout} field of {c.dtype.name}, shape {c.shape}, entries of shape {c.element_shape}, first {c.offset}"


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


_HEAD = '''\
"""{title}

Written by taichi_ext from {file}; it needs Taichi alone.

    run = bind({names})
    run({jacobians})

{lines}
"""

import contextlib as _contextlib
import weakref as _weakref
from math import inf, nan

import numpy as _np
{runtime}
'''

_CHECKS = '''
def _kind(given):
    """The type, shape and layout of a field or array, as text, and its place in memory."""
    if isinstance(given, (ti.ScalarField, ti.MatrixField)):
        node, kinds = given.vars[0].ptr.snode(), ti._lib.core.SNodeType
        entries, first = (given.n, given.m)[: given.ndim] if isinstance(given, ti.MatrixField) else (), node.offset
        while node is not None and node.type in (kinds.root, kinds.dense, kinds.place):
            node = node.parent
        name = f"a {'dense' if node is None else 'sparse'} field of {given.dtype}, shape {tuple(given.shape)}"
        return f"{name}, entries of shape {entries}, first {tuple(first)}", id(given), 1
    if isinstance(given, ti.Ndarray):
        return f"an array of {given.dtype}, shape {(*given.shape, *given.element_shape)}", id(given), 1
    if isinstance(given, _np.ndarray) and not given.flags.writeable:
        return "read-only", id(given), 1
    if not isinstance(given, _np.ndarray):
        return f"of type {type(given).__name__}, no field or array of Taichi or NumPy", id(given), 1
    dtype = "u1" if given.dtype == bool else f"{given.dtype.kind}{8 * given.dtype.itemsize}"
    layout = "" if given.flags.c_contiguous and given.dtype.isnative else ", not contiguous in C order, or swapped"
    return f"an array of {dtype}, shape {given.shape}{layout}", given.__array_interface__["data"][0], given.nbytes


def _check(given, expected):
    """Raise unless objects are as expected, and no two of them are one or share memory."""
    spans = []
    for name, kind in expected.items():
        found, start, size = _kind(given[name])
        if found != kind:
            raise ValueError(f"{name} is {found}; the kernel was made for {kind}.")
        spans.append((start, start + size, name))
    spans.sort()
    for (_, end, name), (start, _, other) in zip(spans, spans[1:]):
        if start < end:
            raise ValueError(f"{name} shares memory with {other}; the kernel was made for memory of their own.")


def _by_row(array, rows, columns):
    return array.reshape(columns, rows).T if _BY_COLUMN else array.reshape(rows, columns)


def _memory(dtype, rows, columns, seeds):
    """An array of tangents: zeros, but for the seeds of a parameter."""
    array = _np.zeros(max(1, rows * columns), dtype[0] + str(int(dtype[1:]) // 8))
    if seeds is not None:
        n = _np.arange(min(rows, columns - seeds))
        _by_row(array, rows, columns)[n, seeds + n] = 1
    return array


def _give(jacobian, rows, first, width, shape):
    """Fill an array of J with columns of the rows of an output."""
    block = _np.ascontiguousarray(rows[:, first : first + width].reshape(shape))
    if isinstance(jacobian, ti.Ndarray):
        jacobian.from_numpy(block)
    else:
        jacobian[...] = block

'''
_BIND = '''
def bind({star}):
    """A function that runs the kernel, fills the arrays of J, which it takes, and returns the kernel's result."""
    _given = dict({names})
    _check(_given, _GIVEN)
    if _MOST_THREADS is not None and ti.cfg.cpu_max_num_threads > _MOST_THREADS:
        raise ValueError(f"The kernel was made for {{_MOST_THREADS}} threads: use ti.init(cpu_max_num_threads=...).")
    _program = _weakref.ref(ti.lang.impl.get_runtime().prog)
    _kernel = _make({make})

    def _run(*_jacobians{numbers}):
        if _program() is None or ti.lang.impl.get_runtime().prog is not _program():
            raise RuntimeError("ti.init or ti.reset was called since bind, which ended all fields; call bind again.")
        _check({{**_given, **dict(zip(_JACOBIANS, _jacobians, strict=True))}}, {{**_GIVEN, **_JACOBIANS}})
        _tangents = [_memory(*t) for t in _TANGENTS]
        with _careful_compilation():
            _result = _kernel({arguments}*_tangents)
        for _target, (_n, *_part) in zip(_jacobians, _PARTS):
            _give(_target, _by_row(_tangents[_n], *_TANGENTS[_n][1:3]), *_part)
        return _result

    return _run
'''


# A program as the text of a module with one factory, and as the ordinary kernel that this makes.

_numbers = itertools.count()


@dataclass(frozen=True)
class Emitted:
    """An emitted kernel and its text."""

    kernel: Callable[..., object]  # takes the arguments of the user's kernel but for templates
    tree: ast.Module  # of the kernel alone; nodes keep their places in the text
    text: str
    places: dict[int, str]  # texts that messages cite instead of a line of the text
    hazards: frozenset[str]  # of the program

    def __call__(self, *args: object) -> Any:
        """Run it, compiled with settings that avoid Taichi's faults."""
        with backend.with_functions_in_key(), backend.careful_compilation(self.hazards):
            return self.kernel(*args)


def build(program: Program) -> Emitted:
    """The kernel that a program describes; Taichi compiles it when it is first called."""
    text, objects, places = emit(program)
    file = f"<{program.name} emitted {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"__name__": f"emitted_{program.name}"}
    tree = backend.syntax_tree(text)
    exec(compile(tree, file, "exec", dont_inherit=True), scope)
    kernel = scope["make"](**objects)
    weakref.finalize(kernel, linecache.cache.pop, file, None)
    make = tree.body[-1]
    assert isinstance(make, ast.FunctionDef)
    _assign_at_once(make.body[-2:-1])
    messages = {number: f"{place.message()}\n" for number, place in places.items()}
    return Emitted(kernel, ast.Module(make.body[-2:-1], []), text, messages, program.hazards)


def _assign_at_once(body: list[ast.stmt]) -> None:
    """Make ``target = value`` an assignment expression, where Taichi has one target only.

    Of a statement, which may have several, it makes a variable for the value, and another one for a new name. Its first
    passes go over the whole kernel for each declaration and each assignment.
    """
    for n, s in enumerate(body):
        match s:
            case ast.Assign(targets=[ast.Name() | ast.Subscript() as target]):
                value = ast.NamedExpr(target, s.value)  # type: ignore[arg-type]
                body[n] = ast.copy_location(ast.Expr(ast.copy_location(value, s)), s)
            case ast.FunctionDef() | ast.For() | ast.While():
                _assign_at_once(s.body)
            case ast.If():
                _assign_at_once(s.body)
                _assign_at_once(s.orelse)


Places = dict[int, Place]  # of the user's statements, by the numbers of lines of a text

HEADER = f"from math import inf, nan\n\n{RUNTIME.header}\n"


def emit(program: Program) -> tuple[str, dict[str, object], Places]:
    """The text of a program, and the objects that its factory takes.

    Returns:
        The text, which defines ``make(...)``; the objects by the names of its parameters; the places of its lines.
    """
    text, objects, places = factory(program)
    start = f'"""Generated from {os.path.basename(program.file)}."""\n\n{HEADER}\n\n'
    return start + text, objects, {start.count("\n") + number: place for number, place in places.items()}


def factory(program: Program) -> tuple[str, dict[str, object], Places]:
    """The text of ``make(...)`` and of the functions that it calls, see ``emit``."""
    names = Names({name for a in program.arguments if a.value is not None for name in _taken(a.name, a.annotation)})
    for container in program.containers:
        names.container(container)
    annotated = [(a.name, _annotation(names, a.annotation)) for a in program.arguments if a.value is not None]
    returns = [_annotation(names, kind) for kind in program.returns]
    lines = Lines(program, names, dict(annotated))
    lines.block(program.body)
    arrow = f" -> {returns[0]}" if len(returns) == 1 else f" -> ({', '.join(returns)})" if returns else ""
    functions = [f"{e.text}\n" for _, e in sorted(lines.expressions.elementary.items())]
    text = [
        *functions,
        f"def make({', '.join(names.objects)}):",
        *lines.functions,
        "    @ti.kernel",
        f"    def {program.name}({', '.join(f'{name}: {kind}' for name, kind in annotated)}){arrow}:",
        *lines.lines,
        "",
        f"    return {program.name}",
        "",
    ]
    first = sum(e.count("\n") + 1 for e in functions) + 2
    places = [*lines.places_of_functions, None, None, *lines.places]
    return "\n".join(text), dict(names.objects), {n: p for n, p in enumerate(places, first) if p is not None}


def _taken(name: str, annotation: object) -> Iterator[str]:
    """An argument's name and those of its members, which Taichi 1.7.4 takes for names of arguments, too."""
    yield name
    for member, kind in getattr(annotation, "members", {}).items():
        yield from _taken(member, kind)


def _annotation(names: Names, annotation: object) -> str:
    return annotation if isinstance(annotation, str) else names.object(annotation, "Struct")
