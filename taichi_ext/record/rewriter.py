"""The syntax tree of a kernel as calls of the recorder; Python AST in, Python AST out.

Control flow stays, as Taichi walks it, reported to the recorder; operators, loads, stores, calls and comparisons are
calls on ``<ad>`` (``recorder``). Each node is at the position of the user's own, so that Taichi's errors and
warnings cite the user's line and text. ``ti.static``, ``ti.grouped``, ``ti.ndrange`` and ``range`` stay as they are,
since Taichi recognises them by their syntax.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import textwrap
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError

RECORDER = "<ad>"  # the name of the recorder, which no user can write
# operators of Python by the kind of their node, as its module ``operator`` names them
OPERATORS = {"Add": "add", "Sub": "sub", "Mult": "mul", "Div": "truediv", "FloorDiv": "floordiv", "Mod": "mod"}
OPERATORS |= {"Pow": "pow", "MatMult": "matmul", "BitAnd": "and", "BitOr": "or", "BitXor": "xor"}
OPERATORS |= {"LShift": "lshift", "RShift": "rshift"}
_NAMES = {"and": "bit_and", "or": "bit_or", "xor": "bit_xor", "lshift": "shift_left", "rshift": "shift_right"}
BINARY = {getattr(ast, kind): _NAMES.get(name, name) for kind, name in OPERATORS.items()}  # as programs name them
PYTHON_NAMES = {own: name for name, own in _NAMES.items()}
_UNARY = {ast.USub: "neg", ast.UAdd: "pos", ast.Not: "logical_not", ast.Invert: "invert"}
COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}


class Rewriter(ast.NodeTransformer):
    """Turns a function into calls of the recorder; separate calls open and close blocks."""

    def __init__(self, scope: Mapping[str, object]) -> None:
        self.scope = scope
        self.locals: set[str] = set()
        self.temporaries = 0

    # --- helpers

    def library(self, name: str, node: ast.AST, *args: ast.expr, keywords: Any = ()) -> ast.Call:
        """``<ad>.name(*args)``, the function under one name: each node of a tree costs time."""
        function = ast.Name(id=f"{RECORDER}.{name}", ctx=ast.Load())
        call = ast.Call(func=function, args=list(args), keywords=list(keywords))
        return ast.copy_location(call, ast.copy_location(function, node))

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

    def visit_Return(self, node: ast.Return) -> object:
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

    def visit_Assign(self, node: ast.Assign) -> object:
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
            places = ast.Tuple(elts=[self.place(e) for e in target.elts], ctx=ast.Load())
            return self.statement("unpack", node, value, ast.copy_location(places, target))
        return self.statement("store", node, value, *self.place_parts(target))

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

    def visit_AnnAssign(self, node: ast.AnnAssign) -> object:
        if node.value is None:
            return node
        value = self.library("cast", node, self.visit(node.value), self.visit(node.annotation))
        return self.assignment(node.target, value, node)

    def visit_AugAssign(self, node: ast.AugAssign) -> object:
        value, name = self.visit(node.value), self.string(BINARY[type(node.op)], node)
        if isinstance(node.target, ast.Name):
            return self.statement("update_local", node, self.string(node.target.id, node), name, value)
        return self.statement("update", node, *self.place_parts(node.target), name, value)

    def visit_If(self, node: ast.If) -> object:
        if self.static_name(node.test) == "static":
            node.test, node.body, node.orelse = self.visit(node.test), self.body(node.body), self.body(node.orelse)
            return node
        node.test = self.library("if_", node.test, self.visit(node.test))
        node.body = [*self.body(node.body), self.statement("close", node)]
        if node.orelse:
            node.orelse = [self.statement("orelse", node), *self.body(node.orelse), self.statement("close", node)]
        return [node, self.statement("end_if", node)]

    def visit_With(self, node: ast.With) -> object:
        call: Any = node.items[0].context_expr
        kind = self.static_name(call)
        if kind == "checkpoint":
            return self.statement("call", node, call.func)  # an error
        return self.body(node.body) if kind in backend.SECTIONS else self.generic_visit(node)  # sections run in order

    def visit_While(self, node: ast.While) -> object:
        if self.static_name(node.test) == "graph_do_while":  # it ends where the flag is 0 after an iteration
            end: Any = backend.syntax_tree("if flag[None] == 0: break").body[0]
            end.test.left.value, node.test = node.test.args[0], ast.Constant(value=True)  # type: ignore[attr-defined]
            for part in (node.test, end, *ast.walk(end)):
                ast.copy_location(part, node)
            node.body.append(end)
        enter = self.library("enter_while", node.test)
        node.test = self.library("while_", node.test, enter, self.visit(node.test))
        node.body = [*self.body(node.body), self.statement("end_loop", node)]
        return node

    def visit_For(self, node: ast.For) -> object:
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
        """Make the loop that Taichi walks run over the domain from the library."""

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

    def visit_Continue(self, node: ast.Continue | ast.Break) -> object:
        return [self.statement("jump", node, self.string(type(node).__name__.lower(), node)), node]

    visit_Break = visit_Continue

    def visit_Expr(self, node: ast.Expr) -> object:
        if isinstance(node.value, ast.Constant):
            return node
        node.value = self.visit(node.value)
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(called, ast.Name) and called.id == f"{RECORDER}.call":
            called.id = f"{RECORDER}.run"  # the result is not used
        return node

    def visit_Assert(self, node: ast.Assert) -> object:
        message = self.string(ast.unparse(node.test), node) if node.msg is None else self.visit(node.msg)
        return self.statement("assert_", node, self.visit(node.test), message)

    # --- expressions

    def visit_BinOp(self, node: ast.BinOp) -> object:
        if isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            return self.library("percent", node, node.left, self.visit(node.right))
        return self.library(BINARY[type(node.op)], node, self.visit(node.left), self.visit(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> object:
        if isinstance(node.operand, ast.Constant) and isinstance(node.op, ast.USub):
            return node
        return self.library(_UNARY[type(node.op)], node, self.visit(node.operand))

    def visit_Compare(self, node: ast.Compare) -> object:
        if not all(type(op) in COMPARE for op in node.ops):
            return self.generic_visit(node)
        names = self.string(tuple(COMPARE[type(op)] for op in node.ops), node)
        return self.library("compare", node, names, self.visit(node.left), *map(self.visit, node.comparators))

    def visit_BoolOp(self, node: ast.BoolOp) -> object:
        kind = self.string("and" if isinstance(node.op, ast.And) else "or", node)
        return self.library("bool_op", node, kind, *map(self.visit, node.values))

    def visit_IfExp(self, node: ast.IfExp) -> object:
        if self.static_name(node.test) == "static":
            return self.generic_visit(node)
        return self.library("where", node, self.visit(node.test), self.visit(node.body), self.visit(node.orelse))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> object:
        return self.library("let_value", node, self.string(node.target.id, node), self.visit(node.value))

    def visit_Subscript(self, node: ast.Subscript) -> object:
        return self.library("load", node, self.visit(node.value), self.index(node.slice))

    def visit_Attribute(self, node: ast.Attribute) -> object:
        if not isinstance(node.ctx, ast.Load) or self.is_module_attribute(node):
            return node
        return self.library("attribute", node, self.visit(node.value), self.string(node.attr, node))

    def visit_Slice(self, node: ast.Slice) -> object:
        parts = [self.string(None, node) if p is None else self.visit(p) for p in (node.lower, node.upper, node.step)]
        return self.library("slice", node, *parts)

    def visit_Lambda(self, node: ast.Lambda) -> object:
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> object:
        template, values = "", []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                spec = ast.unparse(part.format_spec)[2:-1] if part.format_spec else ""
                template += "{:" + spec + "}" if spec else "{}"
                values.append(self.visit(part.value))
            else:
                assert isinstance(part, ast.Constant)
                assert isinstance(part.value, str)
                template += part.value.replace("{", "{{").replace("}", "}}")
        return self.library("format", node, self.string(template, node), *values)

    def visit_Call(self, node: ast.Call) -> object:
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
            if node.func.attr == "format" and isinstance(base, ast.Constant) and isinstance(base.value, str):
                return self.library("format", node, base, *args, keywords=keywords)
            name = self.string(node.func.attr, node.func)
            return self.library("method", node, self.visit(base), name, *args, keywords=keywords)
        function = node.func if isinstance(node.func, (ast.Name, ast.Attribute)) else self.visit(node.func)
        return self.library("call", node, function, *args, keywords=keywords)

    def visit_Starred(self, node: ast.Starred) -> object:
        node.value = self.library("spread", node, self.visit(node.value))
        return node

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


# Functions rewritten for the recorder, and kept: their trees, sources, texts of places.


def flat_tree(tree: ast.AST) -> tuple[Any, ...]:
    """A tree of any depth without recursion: each node's class, names of its parts, and these.

    A node or list among the parts is its number in a 1-tuple, a constant has its type: 1 and 1.0 are equal.
    """
    nodes: list[Any] = [tree]
    flat: list[tuple[Any, ...]] = []

    def part(value: object) -> object:
        if not isinstance(value, (ast.AST, list)):
            return type(value), value
        nodes.append(value)
        return (len(nodes) - 1,)

    for value in nodes:
        names, parts = (None, value) if isinstance(value, list) else (tuple(vars(value)), vars(value).values())
        flat.append((type(value), names, tuple(map(part, parts))))
    return tuple(flat)


def from_flat(flat: tuple[Any, ...]) -> Any:
    """A tree from its parts, as ``flat_tree`` gives them."""
    made: list[Any] = [kind.__new__(kind) for kind, _, _ in flat]
    for value, (_, names, parts) in zip(made, flat, strict=True):
        values = [made[p[0]] if len(p) == 1 else p[1] for p in parts]
        if names is None:
            value.extend(values)
        else:
            vars(value).update(zip(names, values, strict=True))
    return made[0]


def copied(tree: Any) -> Any:
    return from_flat(flat_tree(tree))


@dataclass(frozen=True)
class Rewritten:
    """A function ready to be recorded."""

    source: tuple[str, list[str], int]
    names: tuple[str, ...]  # of its parameters
    flat: tuple[Any, ...]  # of its tree, as ``flat_tree`` gives it
    places: dict[object, str] = field(default_factory=dict)  # texts of places in the source, as messages cite them

    free: list[Any] = field(default_factory=list)  # trees that have been walked, each with a list of its nodes

    def tree(self) -> ast.Module:
        """A fresh copy: Taichi writes into the tree that it walks."""
        return from_flat(self.flat)

    @contextlib.contextmanager
    def borrowed_tree(self) -> Iterator[ast.Module]:
        """A copy that may have been walked before: making one takes longer than most walks."""
        tree, nodes = self.free.pop() if self.free else (self.tree(), None)
        yield tree
        nodes = list(ast.walk(tree)) if nodes is None else nodes
        for node in nodes:
            node.__dict__.pop("ptr", None)  # left by Taichi; it refers to captures
            node.__dict__.pop("root", None)
        self.free.append((tree, nodes))


_cache: weakref.WeakKeyDictionary[Any, Rewritten] = weakref.WeakKeyDictionary()
_shared: weakref.WeakValueDictionary[Any, Rewritten] = weakref.WeakValueDictionary()  # of functions made by one def


def rewrite(function: types.FunctionType, returned_values: int | None = None) -> Rewritten:
    """The rewritten form of a kernel's or function's Python function.

    For a real function, ``returned_values`` is the number of its results.
    """
    if function not in _cache:
        try:
            source = backend.source_of(function)
        except (OSError, TypeError) as error:
            code = getattr(function, "__code__", None)
            raise UnsupportedError(
                f"The source of {getattr(function, '__qualname__', function)!r} cannot be found"
                f"{f' (it was compiled from {code.co_filename})' if code else ''}. Differentiating a kernel needs its "
                "source: define it in a file, a notebook cell or an interactive session with source support."
            ) from error
        tree = backend.syntax_tree(textwrap.dedent("\n".join(source[1])))
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        if returned_values is not None and has_early_return(definition):
            lower_returns(definition, returned_values)
        Rewriter(backend.global_variables(function)).rewrite_function(definition)
        _count_scopes(definition, 0)
        ast.fix_missing_locations(tree)
        new = Rewritten(source, tuple(inspect.signature(function).parameters), flat_tree(tree))
        _cache[function] = _shared.setdefault((source[0], source[2], new.flat), new)
    return _cache[function]


def _count_scopes(node: ast.AST, scopes: int) -> None:
    """Set the number of scopes that Taichi opens between each walrus and its statement: one per argument list."""
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


# Real functions may return from inside a branch or loop; inlined ones may not: rewrite such returns first.
#
# ``return e`` becomes ``<result0> = e; <returned> = 1``; following statements run only ``if <returned> == 0``, and
# loops are left. Users cannot write such names.

RESULT = "<result{}>"
RETURN_TYPE = "<return_type{}>"
_FLAG = "<returned>"


def has_early_return(function: ast.FunctionDef) -> bool:
    """Whether a return stands anywhere but at the end."""
    returns = [n for n in ast.walk(function) if isinstance(n, ast.Return)]
    return any(r is not function.body[-1] for r in returns)


def lower_returns(function: ast.FunctionDef, count: int) -> None:
    """Leave one return, at the end; ``count`` values are returned, of the types ``<return_type0>`` ..."""
    first, last, numbers = function.body[0], function.body[-1], range(count)
    start = [_parsed(f"{_FLAG} = 0", first)]
    start += [_parsed(f"{RESULT.format(n)} = {RETURN_TYPE.format(n)}(0.0)", first) for n in numbers]
    body = _block(function.body, count, in_loop=False)
    function.body = [*start, *body]
    if count:
        function.body.append(_parsed(f"return {', '.join(map(RESULT.format, numbers))}", last))


def _parsed(text: str, at: ast.stmt) -> Any:
    """A statement with names that users cannot write, at the position of another one."""
    (made,) = backend.syntax_tree(text.replace("<", "lt_").replace(">", "_gt")).body
    for node in ast.walk(made):
        if isinstance(node, ast.Name):
            node.id = node.id.replace("lt_", "<").replace("_gt", ">")
        if isinstance(node, (ast.stmt, ast.expr)):
            ast.copy_location(node, at)
    return made


def _is_returned(value: int, at: ast.stmt, body: list[ast.stmt]) -> ast.If:
    statement = _parsed(f"if {_FLAG} == {value}: pass", at)
    statement.body = body
    return statement


def _block(statements: list[ast.stmt], count: int, in_loop: bool) -> list[ast.stmt]:
    result: list[ast.stmt] = []
    for n, statement in enumerate(statements):
        if isinstance(statement, ast.Return):
            result += _assignment(statement, count)
            if in_loop:
                result.append(ast.copy_location(ast.Break(), statement))
            return result
        if not any(isinstance(n, ast.Return) for n in ast.walk(statement)):
            result.append(statement)
            continue
        if isinstance(statement, ast.If):
            statement.body = _block(statement.body, count, in_loop)
            statement.orelse = _block(statement.orelse, count, in_loop)
        elif isinstance(statement, (ast.For, ast.While)):
            statement.body = _block(statement.body, count, in_loop=True)
        else:
            raise UnsupportedError("A return stands in a statement that is neither a branch nor a loop.")
        result.append(statement)
        rest = _block(statements[n + 1 :], count, in_loop)
        if in_loop:
            result.append(_is_returned(1, statement, [ast.copy_location(ast.Break(), statement)]))
            result += rest
        elif rest:
            result.append(_is_returned(0, statement, rest))
        return result
    return result


def _assignment(statement: ast.Return, count: int) -> list[ast.stmt]:
    result = _parsed(f"({', '.join(map(RESULT.format, range(count)))}) = None", statement)
    result.value = statement.value
    return [*([] if statement.value is None else [result]), _parsed(f"{_FLAG} = 1", statement)]
