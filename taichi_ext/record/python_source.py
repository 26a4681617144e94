"""Plain Python functions rewritten so that their operators and calls also take values with tangents; AST in, code out.

Taichi runs a plain Python function while it compiles, with expressions as arguments. Its control flow is Python's
and stays unchanged; operators, subscripts, attributes and calls become calls on ``<py>``, which is a
``python_functions.PythonScope``.
"""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
import types
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from operator import or_
from typing import Any

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError
from taichi_ext.record.rewrite import copied
from taichi_ext.record.rewriter import BINARY, COMPARE

SCOPE = "<py>"
_NAME = "<function>"  # no function has this name, so names within keep their meaning
_UNARY = {ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "invert"}
_KEPT = frozenset(("super", "locals", "globals", "vars", "eval", "exec", "dir"))  # these look at the calling frame
_FUTURE = reduce(or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names))


def rewritten(
    function: types.FunctionType, scope: object, replaced: Callable[[types.FunctionType], Mapping[str, object]]
) -> Callable[..., object] | None:
    """The function with its operators and calls on ``scope``; None if its source cannot be found.

    ``replaced`` gives the names of its closure and module that have another value.
    """
    code = _rewritten_code(function.__code__, function.__qualname__)
    if code is None:
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells[SCOPE] = types.CellType(scope)
    other = replaced(function)
    cells.update({name: types.CellType(value) for name, value in other.items() if name in cells})
    closure = tuple(cells[name] for name in code.co_freevars)
    names = {**function.__globals__, **other} if other else function.__globals__
    made = types.FunctionType(code, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__ = function.__qualname__
    return made


def is_rewritten(function: types.FunctionType) -> bool:
    """Whether a function, or one around it, has been rewritten already."""
    return SCOPE in function.__code__.co_freevars


@lru_cache(maxsize=1024)
def _rewritten_code(code: types.CodeType, qualname: str) -> types.CodeType | None:
    node = definition(code, qualname)
    try:
        return None if node is None else _compiled(_Rewriter().of_definition(node), code, (SCOPE,))
    except RecursionError:
        raise UnsupportedError(
            f"{code.co_filename}:{code.co_firstlineno}: an expression or block of {qualname!r} nests deeper than "
            "Python can follow once its operations are watched for tangents. Compute parts of it in variables."
        ) from None


def definition(code: types.CodeType, qualname: str) -> Any:
    """The ``def`` or ``lambda`` that a code object was compiled from, without decorators, defaults and annotations."""
    tree = _module(code)
    if tree is None:
        return None
    found = [_alone(node, qualname) for node in _definitions(tree).get((code.co_name, code.co_firstlineno), ())]
    if len(found) > 1:  # several lambdas in one line
        found = [node for node in found if _is_same_code(code, _compiled(node, code, ()))]
    return found[0] if found else None


def _module(code: types.CodeType) -> ast.Module | None:
    try:
        lines, _ = inspect.findsource(code)
        return _parsed("".join(lines))
    except (OSError, TypeError, IndexError, SyntaxError):
        return None


@lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module:
    return backend.syntax_tree(text)


@lru_cache(maxsize=64)
def _imports(tree: ast.Module) -> list[Any]:
    """The names that a module imports: attributes of these are compiled in another way."""
    pending: list[Any] = list(tree.body)
    names: dict[str, None] = {}
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name.split(".")[0], None) for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While, ast.ExceptHandler)):
            pending += ast.iter_child_nodes(node)
    names.pop("*", None)
    return [ast.Import(names=[ast.alias(name=name)]) for name in names]


@lru_cache(maxsize=64)
def _definitions(tree: ast.Module) -> dict[tuple[str, int], list[Any]]:
    """The functions of a module by their name and first line, as code objects have them."""
    found: dict[tuple[str, int], list[Any]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            found.setdefault(("<lambda>", node.lineno), []).append(node)
        elif isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found.setdefault((node.name, first), []).append(node)
    return found


def _alone(node: Any, qualname: str) -> object:
    """A copy of a definition without defaults, decorators and annotations, private names written out."""
    node = copied(node)
    args = node.args
    args.defaults, args.kw_defaults = [], [None] * len(args.kwonlyargs)
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if arg is not None:
            arg.annotation = None
    if isinstance(node, ast.FunctionDef):
        node.decorator_list, node.returns, node.name = [], None, _NAME
        if hasattr(node, "type_params"):  # from Python 3.12 on; where they are used they are free names
            node.type_params = []  # pyright: ignore[reportAttributeAccessIssue]  # from Python 3.12 on
    owner = qualname.split(".")[-2].lstrip("_") if "." in qualname else ""
    if owner and not owner.endswith(">"):  # a class
        for child in ast.walk(node):
            for field in ("id", "attr", "arg", "name"):
                name = getattr(child, field, None)
                if isinstance(name, str) and name.startswith("__") and not name.endswith("__"):
                    setattr(child, field, f"_{owner}{name}")
    return node


def _compiled(node: object, code: types.CodeType, free: tuple[str, ...]) -> types.CodeType:
    """The code of a definition within a scope that has some names and the free names of ``code``."""
    is_lambda = isinstance(node, ast.Lambda)
    names = [ast.arg(arg=name) for name in (*free, *code.co_freevars)]
    around: Any = backend.syntax_tree("def around(): pass").body[0]
    around.args.args = names
    around.body = [ast.Expr(value=node) if is_lambda else node]
    module = _module(code)
    imports = [] if module is None else _imports(module)
    tree = ast.fix_missing_locations(ast.Module(body=[*imports, around], type_ignores=[]))
    found = compile(tree, code.co_filename, "exec", flags=code.co_flags & _FUTURE, dont_inherit=True)
    for name in ("around", "<lambda>" if is_lambda else _NAME):
        found = next(c for c in found.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
    return found


def _is_same_code(a: object, b: object) -> bool:
    if isinstance(a, str) and isinstance(b, str) and ".<locals>." in b:
        return a.split(".")[-1] == b.split(".")[-1]  # before Python 3.11, paths of inner functions are constants
    if not isinstance(a, types.CodeType) or not isinstance(b, types.CodeType):
        return type(a) is type(b) and a == b
    attributes = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars")
    is_alike = all(getattr(a, n) == getattr(b, n) for n in attributes)
    is_alike = is_alike and len(a.co_consts) == len(b.co_consts)
    return is_alike and all(map(_is_same_code, a.co_consts, b.co_consts))


class _Rewriter(ast.NodeTransformer):
    """Turns operations into calls of the functions of a scope."""

    scope = ast.Name(id=SCOPE, ctx=ast.Load())

    def of_definition(self, node: Any) -> Any:
        """A definition, its body rewritten."""
        if isinstance(node, ast.Lambda):
            node.body = self.visit(node.body)
        else:
            module = ast.Module(body=node.body, type_ignores=[])
            node.body = self.generic_visit(module).body  # pyright: ignore[reportAttributeAccessIssue]
        return ast.fix_missing_locations(node)

    def library(self, name: str, node: Any, *args: Any, keywords: Any = ()) -> Any:
        """A call of a function of the scope; arguments that are no nodes are constants."""
        nodes: list[Any] = [
            a if isinstance(a, ast.AST) else ast.copy_location(ast.Constant(value=a), node) for a in args
        ]
        function: Any = ast.Attribute(value=copy.copy(self.scope), attr=name, ctx=ast.Load())
        for new in (function, function.value):
            ast.copy_location(new, node)
            new.end_lineno, new.end_col_offset = new.lineno, new.col_offset  # whose last line a call has
        return ast.copy_location(ast.Call(func=function, args=nodes, keywords=list(keywords)), node)

    def index(self, node: Any) -> Any:
        if isinstance(node, ast.Slice):
            parts = [None if p is None else self.visit(p) for p in (node.lower, node.upper, node.step)]
            return self.library("slice", node, *parts)
        if isinstance(node, ast.Tuple):
            return ast.copy_location(ast.Tuple(elts=[self.index(e) for e in node.elts], ctx=ast.Load()), node)
        return self.visit(node)

    def visit_arguments(self, node: ast.arguments) -> object:
        node.defaults = [self.visit(e) for e in node.defaults]
        node.kw_defaults = [None if e is None else self.visit(e) for e in node.kw_defaults]
        return node  # annotations stay

    def visit_BinOp(self, node: ast.BinOp) -> object:
        return self.library("binary", node, BINARY[type(node.op)], self.visit(node.left), self.visit(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> object:
        if isinstance(node.op, ast.Not):
            return self.generic_visit(node)
        return self.library("unary", node, _UNARY[type(node.op)], self.visit(node.operand))

    def visit_Compare(self, node: ast.Compare) -> object:
        if not all(type(op) in COMPARE for op in node.ops):
            return self.generic_visit(node)
        names = tuple(COMPARE[type(op)] for op in node.ops)
        return self.library("compare", node, names, self.visit(node.left), *map(self.visit, node.comparators))

    def visit_Attribute(self, node: ast.Attribute) -> object:
        if not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        return self.library("attribute", node, self.visit(node.value), node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> object:
        if not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        return self.library("item", node, self.visit(node.value), self.index(node.slice))

    def visit_AugAssign(self, node: ast.AugAssign) -> object:
        name, value = BINARY[type(node.op)], self.visit(node.value)
        target = node.target
        if isinstance(target, ast.Name):
            before = ast.copy_location(ast.Name(id=target.id, ctx=ast.Load()), target)
            after = self.library("augmented", node, before, name, value)
            return ast.copy_location(ast.Assign(targets=[target], value=after), node)
        is_item = isinstance(target, ast.Subscript)
        place = self.index(target.slice) if is_item else target.attr
        kind = "augment_item" if is_item else "augment_attribute"
        call = self.library(kind, node, self.visit(target.value), place, name, value)
        return ast.copy_location(ast.Expr(value=call), node)

    def visit_Expr(self, node: ast.Expr) -> object:
        value = node.value
        if isinstance(value, ast.Call) and not isinstance(value.func, ast.Attribute):
            return ast.copy_location(ast.Expr(value=self.call("run", value)), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> object:
        return self.call("call", node)

    def call(self, name: str, node: ast.Call) -> Any:
        function = node.func
        if isinstance(function, ast.Name) and function.id in _KEPT:
            return self.generic_visit(node)
        args, keywords = ([self.visit(x) for x in given] for given in (node.args, node.keywords))
        if isinstance(function, ast.Attribute):
            base = self.visit(function.value)
            return self.library("method", node, base, function.attr, *args, keywords=keywords)
        return self.library(name, node, self.visit(function), *args, keywords=keywords)
