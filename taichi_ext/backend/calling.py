"""Attributes and calls as Taichi evaluates them in a kernel; calls that are kept from adding statements."""

from __future__ import annotations

import ast
import contextlib
import re
import types
from collections.abc import Mapping
from typing import Any, TypedDict

from taichi_ext.backend.expressions import source_location
from taichi_ext.backend.runtime import ASTTransformer, ASTTransformerContext, mesh, sealed_with


def native_attribute(ctx: ASTTransformerContext, obj: Any, name: str) -> tuple[object, object]:
    """``obj.name`` as Taichi evaluates it in a kernel, and the object to pass first when it is called."""
    node: Any = ast.Attribute(value=ast.Constant(value=obj), attr=name, ctx=ast.Load(), **no_position())
    node.value.lineno = node.value.col_offset = node.value.end_col_offset = node.value.end_lineno = 1
    ASTTransformer.build_Attribute(ctx, node)
    return node.ptr, (node,) if hasattr(node, "caller") else ()


class Position(TypedDict):
    """The attributes of a node that give its position."""

    lineno: int
    col_offset: int
    end_lineno: int
    end_col_offset: int


def no_position() -> Position:
    """The attributes of a node that stands nowhere in the source."""
    return {"lineno": 1, "col_offset": 0, "end_lineno": 1, "end_col_offset": 0}


def native_call(ctx: ASTTransformerContext, function: object, args: Any, keywords: Mapping[str, object]) -> object:
    """``function(*args, **keywords)`` as Taichi evaluates it in a kernel."""
    match = re.search(r"line (\d+), in", source_location())
    line = int(match.group(1)) - ctx.lineno_offset if match else 1
    position: Position = {**no_position(), "lineno": line, "end_lineno": line}

    def constant_node(value: Any) -> ast.Constant:
        return ast.Constant(value=value, **position)

    name = getattr(function, "__name__", "function")
    node = ast.Call(
        func=ast.Name(id=name, ctx=ast.Load(), **position),  # by its name, which Taichi's warnings cite
        args=[constant_node(a) for a in args],
        keywords=[ast.keyword(arg=k, value=constant_node(v), **position) for k, v in keywords.items()],
        **position,
    )
    ctx.local_scopes.append({name: function})
    try:
        return ASTTransformer.build_Call(ctx, node)
    finally:
        ctx.local_scopes.pop()


def is_mesh_domain(x: object) -> bool:
    """Whether a loop over something is one over the elements of a mesh, or those next to an element."""
    return isinstance(x, (mesh.MeshElementField, mesh.MeshRelationAccessProxy))


def thread_functions(*modules: Any) -> list[object]:
    """The functions of modules such as ``ti.simt.warp``: of the threads of a GPU."""
    found = [(module, f) for module in modules for f in vars(module).values() if isinstance(f, types.FunctionType)]
    return [f for module, f in found if f.__module__ == module.__name__]


class SealedError(BaseException):
    """Raised where a function that is called sealed adds statements to the kernel: it may read or write anything."""


class _Seal:
    def __getattr__(self, name: str) -> object:
        raise SealedError


def sealed() -> contextlib.AbstractContextManager[None]:
    """Within the context, called functions may only compute expressions."""
    return sealed_with(_Seal())
