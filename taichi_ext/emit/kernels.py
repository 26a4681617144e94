"""A program as the text of a module with one factory, and as the ordinary kernel that this makes."""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from taichi_ext import backend
from taichi_ext.backend import RUNTIME
from taichi_ext.emit.statements import Lines, Names
from taichi_ext.program import Place, Program

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
