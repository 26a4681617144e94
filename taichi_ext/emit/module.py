"""A program as the text of a module with one factory, whose result is an ordinary kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator

from taichi_ext.backend import RUNTIME
from taichi_ext.emit.names import Names
from taichi_ext.emit.statements import Lines
from taichi_ext.program import Place, Program

Places = dict[int, Place]  # of the user's statements, by the numbers of lines of a text

HEADER = f"from math import inf, nan\n\n{RUNTIME.header}\n"


def emit(program: Program, *, has_comments: bool = True) -> tuple[str, dict[str, object], Places]:
    """The text of a program, and the objects that its factory takes.

    Args:
        program: the program.
        has_comments: write the user's file and line next to each statement.

    Returns:
        The text, which defines ``make(...)``; the objects by the names of its parameters; the places of its lines.
    """
    text, objects, places = factory(program, has_comments=has_comments)
    start = f'"""Generated from {os.path.basename(program.file)}."""\n\n{HEADER}\n\n'
    return start + text, objects, {start.count("\n") + number: place for number, place in places.items()}


def factory(program: Program, *, has_comments: bool = True) -> tuple[str, dict[str, object], Places]:
    """The text of ``make(...)`` and of the functions that it calls, see ``emit``."""
    names = Names({name for a in program.arguments if a.value is not None for name in _taken(a.name, a.annotation)})
    for container in program.containers:
        names.container(container)
    annotated = [(a.name, _annotation(names, a.annotation)) for a in program.arguments if a.value is not None]
    returns = [_annotation(names, kind) for kind in program.returns]
    lines = Lines(program, names, dict(annotated), has_comments)
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
