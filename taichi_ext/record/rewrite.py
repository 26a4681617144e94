"""Rewrite a kernel's syntax tree into calls of the trace-time library; Python AST in, Python AST out.

Control flow stays as it is; operators, loads, stores, calls and comparisons become calls on ``<ad>``
(``tracer.Tracer``), each node at the position of the user's own, so that Taichi's errors and warnings cite the user's
line and text.  ``ti.static``, ``ti.grouped``, ``ti.ndrange`` and ``range`` are recognised by Taichi by their syntax and
stay as they are.
"""

from __future__ import annotations

import ast
import builtins
import copy
import pickle
import textwrap
import types
import weakref
from typing import Any

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError
from taichi_ext.record.names import TRACER, names_in, readable_text
from taichi_ext.record.nesting import plain_bound
from taichi_ext.record.returns import has_early_return, lower_returns
from taichi_ext.record.trees import Rewritten

BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.BitAnd: "bit_and",
    ast.BitOr: "bit_or",
    ast.BitXor: "bit_xor",
    ast.LShift: "shift_left",
    ast.RShift: "shift_right",
}
_ENTRIES = frozenset("xyzwrgbastpq")  # attributes that name one entry of a vector
_UNARY = {ast.USub: "neg", ast.UAdd: "pos", ast.Not: "logical_not", ast.Invert: "invert"}
COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}


_cache: weakref.WeakKeyDictionary[Any, dict[type, Rewritten]] = weakref.WeakKeyDictionary()
_shared: weakref.WeakValueDictionary[Any, Rewritten] = weakref.WeakValueDictionary()  # of functions made by one def


def rewrite(
    function: types.FunctionType, returned_values: int | None = None, rewriter: type[Rewriter] | None = None
) -> Rewritten:
    """The rewritten form of a kernel's or function's Python function.

    For a real function, ``returned_values`` is the number of its results; ``rewriter`` is the tracer's by default.
    """
    kind = Rewriter if rewriter is None else rewriter
    known = _cache.setdefault(function, {})
    if kind not in known:
        try:
            source = backend.source_of(function)
        except (OSError, TypeError) as error:
            code = getattr(function, "__code__", None)
            raise UnsupportedError(
                f"The source of {getattr(function, '__qualname__', function)!r} cannot be found"
                f"{f' (it was compiled from {code.co_filename})' if code else ''}. Differentiating a kernel needs its "
                "source: define it in a file, a notebook cell or an interactive session with source support."
            ) from error
        tree = ast.parse(textwrap.dedent("\n".join(source[1])))
        taken = names_in(tree)
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        if returned_values is not None and has_early_return(definition):
            lower_returns(definition, returned_values)
        kind(backend.global_variables(function)).rewrite_function(definition)
        _count_scopes(definition, 0)
        ast.fix_missing_locations(tree)
        names = frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
        text = readable_text(tree, taken) if kind is Rewriter else ""
        new = Rewritten(source, pickle.dumps(tree), text, names)
        known[kind] = _shared.setdefault((kind, source[0], source[2], new.pickled), new)
    return known[kind]


def _count_scopes(node: ast.AST, scopes: int) -> None:
    """Tell each walrus how many scopes Taichi opens between it and its statement: one per list of arguments."""
    for name, value in ast.iter_fields(node):
        opens = (isinstance(node, ast.Call) and name in ("args", "keywords")) or (
            isinstance(node, (ast.BoolOp, ast.Compare)) and name in ("values", "comparators")
        )
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            inner = 0 if isinstance(child, ast.stmt) else scopes + opens
            called = child.func if isinstance(child, ast.Call) else None
            if getattr(called, "attr", getattr(called, "id", "")).endswith("let_value"):
                assert isinstance(child, ast.Call)
                child.args.append(ast.copy_location(ast.Constant(value=inner), child))
            _count_scopes(child, inner)


class Rewriter(ast.NodeTransformer):
    """Turns a function into calls of the tracer."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope = scope
        self.locals: set[str] = set()
        self.loops = 0
        self.temporaries = 0

    # --- helpers

    def library(self, name: str, node: ast.AST, *args: ast.expr, keywords: Any = ()) -> ast.Call:
        """``<ad>.name(*args)`` at the position of node."""
        function = ast.Attribute(value=ast.Name(id=TRACER, ctx=ast.Load()), attr=name, ctx=ast.Load())
        call = ast.Call(func=function, args=list(args), keywords=list(keywords))
        for new in (function.value, function, call):
            ast.copy_location(new, node)
        return call

    def statement(self, name: str, node: ast.AST, *args: ast.expr) -> ast.Expr:
        return ast.copy_location(ast.Expr(value=self.library(name, node, *args)), node)

    def string(self, value: Any, node: ast.AST) -> ast.Constant:
        return ast.copy_location(ast.Constant(value=value), node)

    def static_name(self, node: ast.AST) -> str:
        return backend.resolves_to_static_call(node, self.scope)

    def body(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for statement in statements:
            new = self.visit(statement)
            result.extend(new if isinstance(new, list) else [new])
        return result

    # --- functions

    def rewrite_function(self, node: ast.FunctionDef) -> None:
        node.decorator_list = []
        node.args.defaults = []
        self.locals = {a.arg for a in node.args.args}
        for child in ast.walk(node):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                self.locals.add(child.id)
        node.body = [self.statement("begin", node), *self.body(node.body)]
        ast.copy_location(node.body[0], node)

    def visit_Return(self, node: ast.Return) -> Any:
        if node.value is None:
            return node
        value = node.value
        if isinstance(value, ast.Tuple):
            value = ast.copy_location(ast.Tuple(elts=[self.visit(e) for e in value.elts], ctx=ast.Load()), value)
        else:
            value = self.visit(value)
        node.value = self.library("result", node, value)
        return node

    # --- statements

    def visit_Assign(self, node: ast.Assign) -> Any:
        is_static = self.static_name(node.value) == "static"
        value = self.visit(node.value)
        if is_static:
            return self.statement("bind_static", node, self.targets(node.targets[0]), value)
        if len(node.targets) == 1:
            return self.assignment(node.targets[0], value, node)
        temporary = self.temporary()
        statements: list[ast.stmt] = [self.statement("let", node, self.string(temporary, node), value)]
        for target in node.targets:
            name = ast.copy_location(ast.Name(id=temporary, ctx=ast.Load()), node)
            statements.append(self.assignment(target, name, node))
        return statements

    def temporary(self) -> str:
        self.temporaries += 1
        return f"<value{self.temporaries}>"

    def targets(self, node: ast.expr) -> ast.expr:
        """The target names as constants: a name, or a tuple of names."""
        if isinstance(node, ast.Name):
            return self.string(node.id, node)
        if isinstance(node, (ast.Tuple, ast.List)) and all(isinstance(e, ast.Name) for e in node.elts):
            return self.string(tuple(e.id for e in node.elts), node)  # type: ignore[attr-defined]
        raise UnsupportedError("ti.static can only be assigned to names.")

    def assignment(self, target: ast.expr, value: ast.expr, node: ast.AST) -> ast.stmt:
        if isinstance(target, ast.Name):
            return self.statement("let", node, self.string(target.id, node), value)
        if isinstance(target, (ast.Tuple, ast.List)):
            if all(isinstance(e, ast.Name) for e in target.elts):
                return self.statement("unpack", node, self.targets(target), value)
            places = [self.place(e) for e in target.elts]
            group = ast.copy_location(ast.Tuple(elts=places, ctx=ast.Load()), target)
            return self.statement("unpack_to", node, group, value)
        return self.statement("store", node, *self.place_parts(target), value)

    def place(self, target: ast.expr) -> ast.expr:
        """Something that can be stored to, as a tuple (object, kind, index) or a name."""
        if isinstance(target, ast.Name):
            return self.string(target.id, target)
        return ast.copy_location(ast.Tuple(elts=self.place_parts(target), ctx=ast.Load()), target)

    def place_parts(self, target: ast.expr) -> list[ast.expr]:
        if isinstance(target, ast.Subscript):
            return [self.visit(target.value), self.index(target.slice)]
        if isinstance(target, ast.Attribute):
            return [self.visit(target.value), self.string(target.attr, target)]
        raise UnsupportedError(f"cannot assign to {ast.unparse(target)!r}")

    def index(self, node: ast.expr) -> ast.expr:
        """The indices of a subscript as a tuple."""
        elements = node.elts if isinstance(node, ast.Tuple) else [node]
        return ast.copy_location(ast.Tuple(elts=[self.visit(e) for e in elements], ctx=ast.Load()), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None:
            return node
        value = self.library("cast", node, self.visit(node.value), self.visit(node.annotation))
        return self.assignment(node.target, value, node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        operator = self.string(type(node.op).__name__, node)
        value = self.visit(node.value)
        name = BINARY[type(node.op)]
        if isinstance(node.target, ast.Name):
            target = self.string(node.target.id, node)
            return self.statement("update_local", node, target, operator, self.string(name, node), value)
        return self.statement("update", node, *self.place_parts(node.target), operator, self.string(name, node), value)

    def visit_If(self, node: ast.If) -> Any:
        is_static = self.static_name(node.test) == "static"
        node.test = self.visit(node.test) if is_static else self.library("condition", node.test, self.visit(node.test))
        node.body = self.body(node.body) if is_static else self.block(node.body, node)
        if node.orelse:
            node.orelse = self.body(node.orelse) if is_static else self.block(node.orelse, node)
        return node

    def block(self, statements: list[ast.stmt], node: ast.AST, *enter: ast.expr) -> list[ast.stmt]:
        return [self.statement("enter", node, *enter), *self.body(statements), self.statement("leave", node)]

    def visit_While(self, node: ast.While) -> Any:
        self.loops += 1
        number = self.string(self.loops, node)
        before = self.statement("before_loop", node, number)
        enter = self.library("enter", node.test, number)
        node.test = self.library("loop_condition", node.test, enter, self.visit(node.test))
        node.body = [*self.body(node.body), self.statement("leave", node)]
        return [before, node]

    def visit_For(self, node: ast.For) -> Any:
        decorator = self.static_name(node.iter)
        if decorator == "static":
            node.iter = self.visit(node.iter)
            node.body = self.body(node.body)
            return node
        self.loops += 1
        number = self.string(self.loops, node)
        node.iter = self.iterable(node.iter)
        before = self.statement("before_loop", node, number, *self.domain(node.iter))
        names = [n for n in ast.walk(node.target) if isinstance(n, ast.Name)]
        variables = [ast.copy_location(ast.Name(id=n.id, ctx=ast.Load()), n) for n in names]
        node.body = self.block(node.body, node, number, *variables)
        return [before, node]

    def iterable(self, node: ast.expr) -> ast.expr:
        """The iterator of a loop: its form stays, its bounds are plain values."""
        is_range = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"
        if isinstance(node, ast.Call) and (is_range or self.static_name(node) in ("ndrange", "grouped")):
            if self.static_name(node) == "grouped":
                node.args = [self.iterable(a) for a in node.args]
            else:
                node.args = [self.bound(a) for a in node.args]
            return node
        return node

    def domain(self, node: ast.expr) -> list[ast.expr]:
        """What tells the indices that a loop runs over: a field, or the bounds of a range; nothing where it is long."""
        if isinstance(node, ast.Call) and self.static_name(node) == "grouped":
            return self.domain(node.args[0]) if len(node.args) == 1 else []
        if isinstance(node, ast.Call):
            bounds = [plain_bound(a) for a in node.args]
            return [] if None in bounds else bounds  # type: ignore[return-value]
        return [copy.deepcopy(node)] if isinstance(node, (ast.Name, ast.Attribute)) else []

    def bound(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Tuple):
            return ast.copy_location(ast.Tuple(elts=[self.bound(e) for e in node.elts], ctx=ast.Load()), node)
        if isinstance(node, ast.Starred):
            node.value = self.visit(node.value)
            return node
        return node if isinstance(node, ast.Constant) else self.library("bound", node, self.visit(node))

    def visit_Continue(self, node: ast.Continue) -> Any:
        return [self.statement("interrupt", node), node]

    def visit_Break(self, node: ast.Break) -> Any:
        return [self.statement("interrupt", node), node]

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Constant):
            return node
        node.value = self.visit(node.value)
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
            called = node.value.func
            if isinstance(called.value, ast.Name) and called.value.id == TRACER and called.attr == "call":
                called.attr = "run"  # the result is not used
        return node

    def visit_Assert(self, node: ast.Assert) -> Any:
        text = ast.unparse(node.test)
        node.test = self.library("condition", node.test, self.visit(node.test))
        if node.msg is None:
            node.msg = self.string(text, node)
        elif not isinstance(node.msg, ast.Constant):
            node.msg = self.visit(node.msg)
        return node

    # --- expressions

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        if isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            node.right = self.plain(node.right)
            return node
        return self.library(BINARY[type(node.op)], node, self.visit(node.left), self.visit(node.right))

    def plain(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Tuple):
            return ast.copy_location(ast.Tuple(elts=[self.plain(e) for e in node.elts], ctx=ast.Load()), node)
        return self.library("primal", node, self.visit(node))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.operand, ast.Constant) and isinstance(node.op, ast.USub):
            return node
        return self.library(_UNARY[type(node.op)], node, self.visit(node.operand))

    def visit_Compare(self, node: ast.Compare) -> Any:
        if not all(type(op) in COMPARE for op in node.ops):
            return self.generic_visit(node)
        if len(node.ops) == 1:
            name = COMPARE[type(node.ops[0])]
            return self.library(name, node, self.visit(node.left), self.visit(node.comparators[0]))
        node.left = self.plain(node.left)
        node.comparators = [self.plain(c) for c in node.comparators]
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        node.values = [self.library("condition", v, self.visit(v)) for v in node.values]
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        if self.static_name(node.test) == "static":
            return self.generic_visit(node)
        return self.library("where", node, self.visit(node.test), self.visit(node.body), self.visit(node.orelse))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Any:
        return self.library("let_value", node, self.string(node.target.id, node), self.visit(node.value))

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        return self.library("load", node, self.visit(node.value), self.index(node.slice))

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        is_entry = isinstance(node.ctx, ast.Load) and node.attr in _ENTRIES and not self.is_module_attribute(node)
        self.generic_visit(node)
        return self.library("attribute", node, node.value, self.string(node.attr, node)) if is_entry else node

    def visit_Slice(self, node: ast.Slice) -> Any:
        parts = [self.string(None, node) if p is None else self.visit(p) for p in (node.lower, node.upper, node.step)]
        return self.library("slice", node, *parts)

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                part.value = self.library("primal", part.value, self.visit(part.value))
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        static = self.static_name(node)
        if static:
            node.args = [self.visit(a) for a in node.args]
            return node
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return node
        args = [self.visit(a) for a in node.args]
        keywords = [ast.copy_location(ast.keyword(arg=k.arg, value=self.visit(k.value)), k) for k in node.keywords]
        if isinstance(node.func, ast.Attribute) and not self.is_module_attribute(node.func):
            base = node.func.value
            if isinstance(base, ast.Constant) and isinstance(base.value, str):  # "...".format(...)
                node.args = [self.library("primal", a, a) for a in args]
                node.keywords = [
                    ast.copy_location(ast.keyword(arg=k.arg, value=self.library("primal", k.value, k.value)), k)
                    for k in keywords
                ]
                return node
            name = self.string(node.func.attr, node.func)
            return self.library("method", node, self.visit(base), name, *args, keywords=keywords)
        function = node.func if isinstance(node.func, (ast.Name, ast.Attribute)) else self.visit(node.func)
        return self.library("call", node, function, *args, keywords=keywords)

    def is_module_attribute(self, node: ast.Attribute) -> bool:
        """Whether ``a.b.c`` is a name in a module or class rather than an attribute of a value."""
        base: Any = node.value
        names: list[str] = []
        while isinstance(base, ast.Attribute):
            names.append(base.attr)
            base = base.value
        if not isinstance(base, ast.Name) or base.id in self.locals:
            return False
        obj = self.scope.get(base.id, getattr(builtins, base.id, None))
        for name in reversed(names):
            obj = getattr(obj, name, None)
        return isinstance(obj, (types.ModuleType, type))
