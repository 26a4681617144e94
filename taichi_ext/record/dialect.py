"""Rewriting for the recorder: as for the tracer, with all control flow, attributes and texts told to the library."""

from __future__ import annotations

import ast
from typing import Any

from taichi_ext.record.names import TRACER
from taichi_ext.record.rewrite import COMPARE, Rewriter


class RecordRewriter(Rewriter):
    """Turns a function into calls of the recorder; blocks are opened and closed by calls of their own."""

    def library(self, name: str, node: ast.AST, *args: ast.expr, keywords: Any = ()) -> ast.Call:
        """``<ad>.name(*args)``, the function under one name: each node of a tree costs time."""
        function = ast.Name(id=f"{TRACER}.{name}", ctx=ast.Load())
        call = ast.Call(func=function, args=list(args), keywords=list(keywords))
        return ast.copy_location(call, ast.copy_location(function, node))

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Constant):
            return node
        node.value = self.visit(node.value)
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(called, ast.Name) and called.id == f"{TRACER}.call":
            called.id = f"{TRACER}.run"  # the result is not used
        return node

    # --- branches and loops

    def visit_If(self, node: ast.If) -> Any:
        if self.static_name(node.test) == "static":
            return super().visit_If(node)
        node.test = self.library("if_", node.test, self.visit(node.test))
        node.body = [*self.body(node.body), self.statement("close", node)]
        if node.orelse:
            node.orelse = [self.statement("orelse", node), *self.body(node.orelse), self.statement("close", node)]
        return [node, self.statement("end_if", node)]

    def visit_While(self, node: ast.While) -> Any:
        enter = self.library("enter_while", node.test)
        node.test = self.library("while_", node.test, enter, self.visit(node.test))
        node.body = [*self.body(node.body), self.statement("end_loop", node)]
        return node

    def visit_For(self, node: ast.For) -> Any:
        kind = self.static_name(node.iter)
        if kind == "static":
            node.iter = self.visit(node.iter)
            node.body = self.body(node.body)
            return node
        call = node.iter if isinstance(node.iter, ast.Call) else None
        inner: Any = call.args[0] if call is not None and kind == "grouped" else None
        if call is not None and isinstance(call.func, ast.Name) and call.func.id == "range":
            kind = "range"
        elif kind == "grouped" and self.static_name(inner) == "ndrange":
            kind = "grouped ndrange"
        elif kind not in ("grouped", "ndrange"):
            kind = "field"
        bounds: list[ast.expr] = getattr(call, "args", [])
        bounds = {"field": [node.iter], "grouped ndrange": getattr(inner, "args", [])}.get(kind, bounds)
        before = self.statement("before_loop", node, self.string(kind, node), *map(self.visit, bounds))
        self._put_bounds(node, kind, call, inner, len(bounds))
        names = [self.string(n.id, n) for n in ast.walk(node.target) if isinstance(n, ast.Name)]
        enter = self.statement("enter_for", node, *names)
        node.body = [enter, *self.body(node.body), self.statement("end_loop", node)]
        return [before, node]

    def _put_bounds(self, node: ast.For, kind: str, call: Any, inner: Any, count: int) -> None:
        """Let the loop that Taichi walks run over what the library gives in place of the bounds."""

        def bound(*number: int) -> Any:
            return self.library("bound", node, *[self.string(n, node) for n in number])

        if kind == "range":
            call.args = [bound(n) for n in range(count)]
        elif kind in ("ndrange", "grouped ndrange"):
            over = call if kind == "ndrange" else inner
            over.args = [ast.copy_location(ast.Starred(value=bound(), ctx=ast.Load()), node)]
        elif kind == "grouped":
            call.args = [bound(0)]
        else:
            node.iter = bound(0)

    def visit_Continue(self, node: ast.Continue) -> Any:
        return [self.statement("jump", node, self.string("continue", node)), node]

    def visit_Break(self, node: ast.Break) -> Any:
        return [self.statement("jump", node, self.string("break", node)), node]

    def visit_Assert(self, node: ast.Assert) -> Any:
        message = self.string(ast.unparse(node.test), node) if node.msg is None else self.visit(node.msg)
        return self.statement("assert_", node, self.visit(node.test), message)

    # --- expressions

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        kind = self.string("and" if isinstance(node.op, ast.And) else "or", node)
        return self.library("bool_op", node, kind, *map(self.visit, node.values))

    def visit_Compare(self, node: ast.Compare) -> Any:
        if not all(type(op) in COMPARE for op in node.ops):
            return self.generic_visit(node)
        names = self.string(tuple(COMPARE[type(op)] for op in node.ops), node)
        return self.library("compare", node, names, self.visit(node.left), *map(self.visit, node.comparators))

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        if isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            return self.library("percent", node, node.left, self.visit(node.right))
        return super().visit_BinOp(node)

    def visit_Tuple(self, node: ast.Tuple) -> Any:
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if not isinstance(node.ctx, ast.Load) or self.is_module_attribute(node):
            return node
        return self.library("attribute", node, self.visit(node.value), self.string(node.attr, node))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        template, values = "", []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                spec = ast.unparse(part.format_spec)[2:-1] if part.format_spec else ""
                template += "{:" + spec + "}" if spec else "{}"
                values.append(self.visit(part.value))
            elif isinstance(part, ast.Constant):
                template += part.value.replace("{", "{{").replace("}", "}}")
        return self.library("format", node, self.string(template, node), *values)

    def visit_Call(self, node: ast.Call) -> Any:
        function = node.func
        is_text = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Constant)
        if is_text and isinstance(function.value.value, str) and function.attr == "format":  # type: ignore[union-attr]
            keywords = [ast.copy_location(ast.keyword(arg=k.arg, value=self.visit(k.value)), k) for k in node.keywords]
            return self.library("format", node, function.value, *map(self.visit, node.args), keywords=keywords)  # type: ignore[union-attr]
        return super().visit_Call(node)

    def visit_Starred(self, node: ast.Starred) -> Any:
        node.value = self.library("spread", node, self.visit(node.value))
        return node
