"""Emitted text as a kernel: errors of Taichi in it cite the user's lines."""

from __future__ import annotations

import ast
import itertools
import linecache
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from taichi_ext import backend
from taichi_ext.emit.module import emit
from taichi_ext.program import Program

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


def build(program: Program, *, has_comments: bool = True) -> Emitted:
    """The kernel that a program describes; Taichi compiles it when it is first called."""
    text, objects, places = emit(program, has_comments=has_comments)
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
