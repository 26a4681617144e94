"""Functions that a recorded kernel calls: walked in place, their arguments bound."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import Const, For, Local
from taichi_ext.program.values import I32
from taichi_ext.record.assignments import assign_to, declare
from taichi_ext.record.construct import typed
from taichi_ext.record.operations import cast
from taichi_ext.record.recording import Frame, Recording
from taichi_ext.record.rewrite import RETURN_TYPE, rewrite
from taichi_ext.record.rules import find_rule, ruled_call, stop_arguments

MAX_DEPTH = 100


def inline_call(r: Recording, func: backend.Func, args: Sequence[object], keywords: Mapping[str, object]) -> object:
    """A call of a ti.func or real function."""
    backend.note_function(func)
    try:
        given = backend.process_args(func, tuple(args), keywords)
    except backend.SyntaxFault as error:  # Taichi's message shows the values of the recorded kernel
        names = ", ".join(a.name for a in backend.arguments(func))
        passed = ", ".join([str(len(args)), *(f"{k}=" for k in keywords)])
        raise UnsupportedError(
            f"{func.func.__name__} takes the arguments ({names}); the call passes {passed}."
        ) from error
    bound = [_bind(r, func, a, v) for a, v in zip(backend.arguments(func), given, strict=True)]
    rule = find_rule(r, func)
    if rule is not None:
        return ruled_call(r, rule, func, bound, lambda f, passed: walk_typed(r, f, passed))
    if func in r.stopped:
        bound = stop_arguments(r, bound)
    return walk_typed(r, func, bound)


def walk_typed(r: Recording, func: backend.Func, bound: Sequence[object]) -> Any:
    """Record a function in place; as in Taichi, its results are converted to annotated types of numbers only."""
    result: Any = walk_function(r, func, bound)
    kinds = func.return_type
    if kinds is None or result is None:
        return result
    pairs = zip([result] if len(kinds) == 1 else result, kinds, strict=True)
    typed_results = tuple(cast(r, value, kind) if backend.is_scalar_type(kind) else value for value, kind in pairs)
    return typed_results[0] if len(kinds) == 1 else typed_results


def _bind(r: Recording, func: backend.Func, argument: Any, value: object) -> object:
    """An argument: templates and references as they are, others as copies of the given type."""
    annotation = argument.annotation
    if backend.is_template(annotation) or backend.is_reference(annotation):
        return value
    if value is None or callable(value) or isinstance(value, (backend.Field, backend.AnyArray, str)):
        return value
    if backend.is_scalar_type(annotation):
        value = cast(r, value, annotation)
    elif func.is_real_function and isinstance(annotation, (backend.MatrixType, backend.StructType)):
        value = typed(r, annotation, value)
    return declare(r, argument.name, value, "argument")


def walk_function(r: Recording, func: backend.Func, bound: Sequence[object]) -> object:
    """Record a function in place."""
    function = func.func
    scope = {**backend.global_variables(function), **r.library.names}
    kinds = func.return_type or ()
    if func.is_real_function:
        scope.update({RETURN_TYPE.format(n): kind for n, kind in enumerate(kinds)})
    rewritten = rewrite(function, len(kinds) if func.is_real_function else None)
    if len(r.frames) > MAX_DEPTH:
        raise UnsupportedError(
            f"Calls of {function.__qualname__!r} nest deeper than {MAX_DEPTH}: its recursion does not end at compile "
            "time. Write it as a loop."
        )
    context = backend.make_context(
        function,
        rewritten.source,
        scope,
        names=rewritten.names,
        arguments=bound,
        places=rewritten.places,
        is_brief=True,
    )
    r.frames.append(Frame(context, r.place(), _is_library(function)))
    try:
        with rewritten.borrowed_tree() as tree:
            if func.is_real_function and len(r.blocks) == 1 and _has_loops(tree):
                return _walk_serially(r, tree, context, kinds)
            return backend.walk(tree, context)
    finally:
        r.frames.pop()


def _is_library(function: object) -> bool:
    """Whether messages cite the call of a function, not its own lines: one of Taichi's, or of this package."""
    own = ("taichi_ext.boundary.", "taichi_ext.record.")
    return backend.is_library(function) or backend.module_of(function).startswith(own)


def _has_loops(tree: ast.Module) -> bool:
    return any(isinstance(n, (ast.For, ast.While)) for n in ast.walk(tree))


def _walk_serially(r: Recording, tree: Any, context: Any, kinds: tuple[Any, ...]) -> object:
    """Record a real function called at the top of a kernel: its loops are not the kernel's own parallel ones."""
    results = [declare(r, "result", typed(r, kind, 0), "temporary") for kind in kinds]
    once = Local("once", I32, (), "loop")
    r.open_for(For("range", (once,), (Const(1, I32),), (), place=r.place()))
    with backend.for_range(1):
        value = backend.walk(tree, context)
        values = [value] if len(kinds) == 1 else value or ()
        for result, v in zip(results, values, strict=True):
            assign_to(r, result, v)
    r.end_loop()
    if not kinds:
        return None
    return results[0] if len(kinds) == 1 else tuple(results)
