"""Vectors, matrices and structs that a recorded kernel makes."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any

from taichi_ext import backend
from taichi_ext.backend import ti
from taichi_ext.errors import UnsupportedError
from taichi_ext.program import Const, FoldedConst, For, Local, Op, Tensor
from taichi_ext.program.values import I32
from taichi_ext.record.assignments import assign_to, declare
from taichi_ext.record.handles import Record, flattened, value_of, with_members
from taichi_ext.record.literals import as_value, convert, known_in, type_of
from taichi_ext.record.operations import cast, tensor, typed_tensor
from taichi_ext.record.recording import Frame, Recording
from taichi_ext.record.rewriter import RETURN_TYPE, rewrite
from taichi_ext.record.rules import find_rule, ruled_call, stop_arguments


def is_type(function: object) -> bool:
    """Whether a callable makes a value of a type."""
    kinds = (backend.MatrixType, backend.StructType, backend.DataType)
    return function in (ti.Vector, ti.Matrix, ti.Struct) or isinstance(function, kinds)


def construct(r: Recording, kind: Any, args: list[Any], keywords: dict[str, Any]) -> Any:
    """``ti.Vector``, ``ti.Matrix``, ``vec3(...)``, ``ti.f32(...)``, a struct type."""
    args = [value_of(a) for a in args]
    if isinstance(kind, backend.DataType):
        return scalar(r, kind, args[0])
    if kind is ti.Struct:
        return struct({**(args[0] if args else {}), **keywords})
    if kind in (ti.Vector, ti.Matrix):
        dtype = keywords.get("dt", args[1] if len(args) > 1 else None)
        rows = keywords.get("arr", args[0] if args else None)
        return tensor(rows, None if dtype is None else type_of(dtype))
    if isinstance(kind, backend.StructType):
        return struct_of_type(r, kind, args, keywords)
    shape = matrix_shape(kind)
    if len(args) == 1 and isinstance(args[0], Tensor) and args[0].shape == shape:
        return args[0]  # as in Taichi, the type of the entries stays
    flat = list(flattened(args))
    return typed_tensor(flat * math.prod(shape) if len(flat) == 1 else flat, shape, type_of(kind.dtype))


def scalar(r: Recording, dtype: object, x: object) -> object:
    """``ti.f32(x)``: a Python number becomes a literal of exactly this type."""
    kind = type_of(dtype)
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return Const(x, kind)
    if isinstance(x, FoldedConst):
        return known_in(x, kind, is_exact=True)
    return cast(r, x, dtype)


def matrix_shape(kind: Any) -> tuple[int, ...]:
    """The shape of a vector or matrix type."""
    return (kind.n,) if kind.ndim == 1 else (kind.n, kind.m)


def struct(members: dict[str, Any]) -> Record:
    """``ti.Struct``: a dictionary in it is a struct, a list a vector or matrix."""
    members = dict(members)
    methods = members.pop("__struct_methods", {})
    return Record({name: _member(m) for name, m in members.items()}, methods)


def _member(value: object) -> object:
    value = value_of(value)
    if isinstance(value, dict):
        return struct(value)
    if isinstance(value, (Tensor, Record)):
        return value
    return tensor(value) if isinstance(value, (list, tuple)) else as_value(value)


def struct_of_type(r: Recording, kind: Any, args: Sequence[object], keywords: Mapping[str, object]) -> Record:
    """A struct of a type declared by the user; missing members are 0."""
    if len(args) == 1 and isinstance(args[0], Record) and list(args[0].members) == list(kind.members):
        args = list(args[0].members.values())
    members: dict[str, Any] = {}
    for n, (name, dtype) in enumerate(kind.members.items()):
        value = value_of(args[n] if n < len(args) else keywords.get(name, 0))
        members[name] = typed(r, dtype, value)
    return Record(members, kind.methods, kind)


def typed(r: Recording, kind: Any, value: Any) -> object:
    """A value converted to a type: scalar, vector, matrix or struct."""
    value = value_of(value)
    if isinstance(kind, backend.StructType):
        if isinstance(value, (Record, dict)):
            given = value.members if isinstance(value, Record) else value
            return struct_of_type(r, kind, [], given)
        return struct_of_type(r, kind, [value], {})
    if isinstance(kind, backend.MatrixType):
        made = construct(r, kind, [value], {})
        dtype = type_of(kind.dtype)
        return Tensor(tuple(convert(e, dtype) for e in made.entries), made.shape)
    return cast(r, value, kind)


def rows(vectors: Any) -> Tensor:
    return tensor([list(flattened(v)) for v in value_of(vectors)])


def columns(vectors: Any) -> Tensor:
    given = [list(flattened(v)) for v in value_of(vectors)]
    return tensor([list(row) for row in zip(*given, strict=True)])


def diagonal(dim: int, val: object) -> Tensor:
    return tensor([[val if i == j else 0 for j in range(dim)] for i in range(dim)])


def constant(dtype: object, number: int, n: int, m: int | None = None) -> Tensor:
    """``ti.Matrix.zero``, ``ti.Matrix.one``."""
    shape = (n,) if m is None else (n, m)
    return typed_tensor([number] * math.prod(shape), shape, type_of(dtype))


def identity(dtype: object, n: int) -> Tensor:
    return typed_tensor([int(i == j) for i in range(n) for j in range(n)], (n, n), type_of(dtype))


def filled_like(r: Recording, x: object, number: int) -> Record | Tensor | Op:
    """``ti.zero``, ``ti.one``."""
    x = value_of(x)
    if isinstance(x, Record):
        return with_members(x, lambda _, member: filled_like(r, member, number))
    name = "one" if number else "zero"
    if isinstance(x, Tensor):
        return Tensor(tuple(Op(name, (e,), e.dtype, place=r.place()) for e in x.entries), x.shape)
    x = as_value(x)
    return Op(name, (x,), x.dtype, place=r.place())


# Functions that a recorded kernel calls: walked in place, their arguments bound.

MAX_DEPTH = 100
_LOOPS = (ast.For, ast.While)


def inline_call(r: Recording, func: backend.Func, args: Sequence[object], keywords: Mapping[str, object]) -> object:
    """A call of a ti.func or real function."""
    backend.note_function(func)
    try:
        given = backend.process_args(func, tuple(args), keywords)
    except backend.SyntaxFault as error:  # Taichi's message shows the values of the recorded kernel
        names = ", ".join(a.name for a in backend.arguments(func))
        passed = ", ".join([str(len(args)), *(f"{k}=" for k in keywords)])
        text = f"{func.func.__name__} takes the arguments ({names}); the call passes {passed}."
        raise UnsupportedError(text) from error
    bound = [_bind(r, func, a, v) for a, v in zip(backend.arguments(func), given, strict=True)]
    rule = find_rule(r, func)
    if rule is not None:
        return ruled_call(r, rule, func, bound)
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
        function, rewritten.source, scope, names=rewritten.names, arguments=bound, places=rewritten.places
    )
    r.frames.append(Frame(context, r.place(), _is_library(function)))
    try:
        with rewritten.borrowed_tree() as tree:
            if func.is_real_function and len(r.blocks) == 1 and any(isinstance(n, _LOOPS) for n in ast.walk(tree)):
                return _walk_serially(r, tree, context, kinds)
            return backend.walk(tree, context)
    finally:
        r.frames.pop()


def _is_library(function: object) -> bool:
    """Whether messages cite the call of a function, not its own lines: one of Taichi's, or of this package."""
    own = ("taichi_ext.boundary.", "taichi_ext.record.")
    return backend.is_library(function) or backend.module_of(function).startswith(own)


def _walk_serially(r: Recording, tree: Any, context: Any, kinds: tuple[Any, ...]) -> object:
    """Record a real function called at the top of a kernel: its loops are not the kernel's own parallel ones."""
    results = [declare(r, "result", typed(r, kind, 0), "temporary") for kind in kinds]
    once = Local("once", I32, (), "loop")
    r.open_block(For("range", (once,), (Const(1, I32),), (), place=r.place()))
    with backend.for_range(1):
        value = backend.walk(tree, context)
        values = [value] if len(kinds) == 1 else value or ()
        for result, v in zip(results, values, strict=True):
            assign_to(r, result, v)
    r.end_loop()
    if not kinds:
        return None
    return results[0] if len(kinds) == 1 else tuple(results)
