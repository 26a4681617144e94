"""The Python code of a pipeline, rewritten so that its operations and stores are made through ``watch.WATCH``.

The code behaves as before: operators, subscripts and calls are done by functions that then look at their operands.
Names, control flow, attributes and positions in the source stay as they are.
"""

from __future__ import annotations

import ast
import sys
import types
from functools import lru_cache
from typing import Any

from taichi_ext.record.python_source import (
    KEPT,
    OWN_CODES,
    ScopeRewriter,
    compiled,
    definition,
    is_same_code,
    raise_too_deep,
)
from taichi_ext.record.trees import copied

_WATCH = "<watch of taichi_ext>"  # a constant that stands for the watch until the code is compiled
_KEPT_OF = ("sys", "inspect")  # modules whose functions look at frames


def rewritten_code(code: types.CodeType, qualname: str, watch: object) -> types.CodeType | None:
    """The code of a function, rewritten; None if its source cannot be found or has changed."""
    return _rewritten(code, code.co_filename, qualname, watch)  # codes of two files can be equal


@lru_cache(maxsize=1024)
def _rewritten(code: types.CodeType, file: str, qualname: str, watch: object) -> types.CodeType | None:
    node = definition(code, qualname)
    if node is None:
        return None
    try:
        if not is_same_code(code, compiled(copied(node), code, ())):
            return None
        made = compiled(_Rewriter().of_definition(node), code, ())
    except SyntaxError:
        return None
    except RecursionError:
        raise_too_deep(code, qualname)
    if made.co_freevars != code.co_freevars:
        return None
    made = _completed(made, watch, _path(made), qualname).replace(co_name=code.co_name)
    OWN_CODES[made] = code
    return made


def _path(code: types.CodeType) -> str:
    """The prefix of the qualified names of functions within a definition that was compiled alone."""
    return f"around.<locals>.{code.co_name}"


def _completed(code: types.CodeType, watch: object, path: str, qualname: str) -> types.CodeType:
    """The code, and the code of definitions in it, with the watch among the constants and with the original paths."""

    def constant(value: object) -> object:
        if isinstance(value, types.CodeType):
            return _completed(value, watch, path, qualname)
        if not isinstance(value, str):
            return value
        return watch if value == _WATCH else renamed(value)

    def renamed(text: str) -> str:
        return qualname + text[len(path) :] if text.startswith(path) else text

    code = code.replace(co_consts=tuple(map(constant, code.co_consts)))
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname=renamed(code.co_qualname))
    return code


class _Rewriter(ScopeRewriter):
    scope, slicing = ast.Constant(value=_WATCH), ("operate", "slice")

    def __init__(self) -> None:
        self._count = 0  # names added by the rewriter

    # --- operators

    def visit_BinOp(self, node: ast.BinOp) -> object:
        if isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant):
            return node
        return self.library("operate", node, type(node.op).__name__, self.visit(node.left), self.visit(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> object:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) or isinstance(node.operand, ast.Constant):
            return node
        return self.library("operate", node, type(node.op).__name__, node.operand)

    def visit_AugAssign(self, node: ast.AugAssign) -> object:
        target, names = node.target, []

        def named(value: object) -> Any:
            self._count += 1
            name = ast.copy_location(ast.Name(id=f"<part {self._count}>", ctx=ast.Load()), node)
            names.append((name.id, value))
            return name

        if not isinstance(target, ast.Name):
            target.value = named(self.visit(target.value))
        if isinstance(target, ast.Subscript):
            target.slice = named(self.index(target.slice))
        old = copied(target)
        old.ctx = ast.Load()
        new = self.library("operate", node, f"{type(node.op).__name__}=", self.visit(old), self.visit(node.value))
        pairs = [*((ast.Name(id=name, ctx=ast.Store()), value) for name, value in names), (self.visit(target), new)]
        made: list[Any] = [ast.Assign(targets=[place], value=value) for place, value in pairs]
        made += [ast.Delete(targets=[ast.Name(id=name, ctx=ast.Del())]) for name, _ in names]
        return [ast.copy_location(statement, node) for statement in made]

    def visit_JoinedStr(self, node: ast.JoinedStr) -> object:
        return self.library("operate", node, "text", *map(self.visit, node.values))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> object:
        conversion = "" if node.conversion < 0 else chr(node.conversion)
        form = "" if node.format_spec is None else self.visit(node.format_spec)
        return self.library("operate", node, "formatted", self.visit(node.value), conversion, form)

    # --- parts, and stores to them

    def visit_Subscript(self, node: ast.Subscript) -> object:
        value = self.visit(node.value)
        if isinstance(node.ctx, ast.Load):
            return self.library("item", node, value, self.index(node.slice))
        node.slice = self.visit(node.slice)
        node.value = self.library("stored", node, value) if isinstance(node.ctx, ast.Store) else value
        return node

    def visit_Attribute(self, node: ast.Attribute) -> object:
        self.generic_visit(node)
        is_private = node.attr.startswith("__") and not node.attr.endswith("__")
        if isinstance(node.ctx, ast.Store):
            node.value = self.library("stored", node, node.value)
        if is_private or not isinstance(node.ctx, ast.Load):
            return node
        return self.library("part", node, node.value, node.attr)

    def visit_Assign(self, node: ast.Assign) -> object:
        self.generic_visit(node)
        if len(node.targets) == 1 and isinstance(node.targets[0], (ast.Tuple, ast.List)):
            node.value = self._each(node.value)
        return node

    def visit_For(self, node: Any) -> object:
        self.generic_visit(node)
        node.iter = node.iter if getattr(node, "is_async", False) else self._each(node.iter)
        return node

    visit_comprehension = visit_For

    def _each(self, node: object) -> Any:
        return node if isinstance(node, (ast.Tuple, ast.List)) else self.library("each", node, node)

    # --- calls

    def visit_Expr(self, node: ast.Expr) -> object:
        call = node.value
        if not isinstance(call, ast.Call) or self._is_kept(call):
            return self.generic_visit(node)
        self._visit_call(call)
        made = self.library("stated", call.func, call.func, *call.args, keywords=call.keywords)
        node.value = ast.copy_location(ast.Call(func=made, args=[], keywords=[]), call)
        return node

    def visit_Call(self, node: ast.Call) -> object:
        self._visit_call(node)
        if not self._is_kept(node):
            node.func = self.library("callee", node.func, node.func)
        elif isinstance(node.func, ast.Name) and node.func.id == "eval":
            return self.library("unseen", node, node)
        return node

    def _is_kept(self, node: ast.Call) -> bool:
        """Whether a call may look at the frame that makes it."""
        if isinstance(node.func, ast.Attribute):
            return isinstance(node.func.value, ast.Name) and node.func.value.id in _KEPT_OF
        return isinstance(node.func, ast.Name) and node.func.id in KEPT

    def _visit_call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):  # a method, whose owner is seen when it is called
            node.func.value = self.visit(node.func.value)
        else:
            node.func = self.visit(node.func)
        node.args = [self.visit(a) for a in node.args]
        node.keywords = [self.visit(k) for k in node.keywords]

    def visit_Starred(self, node: ast.Starred) -> object:
        self.generic_visit(node)
        node.value = self._each(node.value) if isinstance(node.ctx, ast.Load) else node.value
        return node

    # --- parts that are not executable code

    def visit_arg(self, node: ast.arg) -> object:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> object:
        node.target = self.visit(node.target)
        node.value = None if node.value is None else self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> object:
        node.decorator_list = [self.visit(d) for d in node.decorator_list]
        if node.decorator_list:  # perhaps a kernel, whose source Taichi reads itself
            return node
        node.args = self.visit(node.args)
        node.body = self.statements(node.body)
        return node

    def visit_match_case(self, node: ast.match_case) -> object:
        node.guard = None if node.guard is None else self.visit(node.guard)
        node.body = self.statements(node.body)
        return node
