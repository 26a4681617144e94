"""From the text of kernels to plain Python on cells and arrays, for the reference.

Every local becomes a cell that holds a value of its own, every operation that Python lacks a call of ``_R``, the
``Reference`` that the program runs on.
"""

import ast
from typing import Any

_OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
}
_COMPARISONS = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}


def to_python(text: str) -> ast.Module:
    """The program with its kernels and functions as plain Python on cells and arrays; other functions stay."""
    tree = ast.parse(text)
    functions = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}
    templates = {name: [annotation(a) == "ti.template()" for a in f.args.args] for name, f in functions.items()}
    tree.body = [
        Translator(templates).function(f) if isinstance(f, ast.FunctionDef) and f.decorator_list else f
        for f in tree.body
    ]
    return ast.fix_missing_locations(tree)


def annotation(argument: ast.arg) -> str:
    """The text of an argument's annotation."""
    return "" if argument.annotation is None else ast.unparse(argument.annotation)


def call(name: str, *args: ast.expr) -> ast.Call:
    """A call of a method of the reference."""
    return ast.Call(ast.Attribute(ast.Name("_R", ast.Load()), name, ast.Load()), list(args), [])


class Translator(ast.NodeTransformer):
    """Rewrites one function after the other."""

    def __init__(self, templates: dict[str, list[bool]]) -> None:
        self.templates = templates
        self.scopes: list[set[str]] = []
        self.temporaries = 0

    def function(self, node: ast.FunctionDef) -> ast.FunctionDef:
        names = [a.arg for a in node.args.args]
        self.scopes = [set(names)]
        prologue = [self.argument(a.arg) for a in node.args.args]
        for argument in node.args.args:
            argument.annotation = None
        node.body = [*prologue, *self.body(node.body)]
        node.decorator_list, node.returns = [], None
        return node

    def argument(self, name: str) -> ast.stmt:
        return self.bind(name, ast.Name(name, ast.Load()))

    def bind(self, name: str, value: ast.expr) -> ast.stmt:
        return ast.Assign([ast.Name(name, ast.Store())], call("cell", value))

    def body(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for statement in statements:
            new = self.visit(statement)
            result += new if isinstance(new, list) else [new]
        return result

    def block(self, statements: list[ast.stmt], *names: str) -> list[ast.stmt]:
        self.scopes.append(set(names))
        try:
            return self.body(statements)
        finally:
            self.scopes.pop()

    def is_local(self, name: str) -> bool:
        return any(name in scope for scope in self.scopes)

    # --- statements

    def store(self, target: ast.expr, value: ast.expr) -> list[ast.stmt]:
        if isinstance(target, ast.Name):
            if self.is_local(target.id):
                cell = ast.Attribute(ast.Name(target.id, ast.Load()), "v", ast.Store())
                return [ast.Assign([cell], call("copy", value))]
            self.scopes[-1].add(target.id)
            return [self.bind(target.id, call("copy", value))]
        if isinstance(target, ast.Subscript):
            return [ast.Expr(call("store", self.place(target.value), self.index(target.slice), value))]
        if isinstance(target, ast.Attribute):
            return [ast.Expr(call("store_part", self.place(target.value), ast.Constant(target.attr), value))]
        assert isinstance(target, ast.Tuple)
        self.temporaries += 1
        name = f"_t{self.temporaries}"
        count = ast.Constant(len(target.elts))
        result: list[ast.stmt] = [ast.Assign([ast.Name(name, ast.Store())], call("unpack", value, count))]
        for i, element in enumerate(target.elts):
            item = ast.Subscript(ast.Name(name, ast.Load()), ast.Constant(i), ast.Load())
            result += self.store(element, item)
        return result

    def visit_Assign(self, node: ast.Assign) -> Any:
        value = self.visit(node.value)
        if len(node.targets) == 1:
            return self.store(node.targets[0], value)
        self.temporaries += 1
        name = f"_t{self.temporaries}"
        result: list[ast.stmt] = [ast.Assign([ast.Name(name, ast.Store())], call("copy", value))]
        for target in node.targets:
            result += self.store(target, ast.Name(name, ast.Load()))
        return result

    def operator_name(self, operator: ast.operator) -> str:
        return _OPERATORS[type(operator)]

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        name = ast.Constant(self.operator_name(node.op))
        target = ast.parse(ast.unparse(node.target), mode="eval").body  # the same as something that is read
        value = call("binary", name, self.visit(target), self.visit(node.value))
        return self.store(node.target, value)

    def visit_If(self, node: ast.If) -> Any:
        node.test = self.visit(node.test)
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        return node

    def visit_While(self, node: ast.While) -> Any:
        node.test = self.visit(node.test)
        node.body = self.block(node.body)
        return node

    def visit_For(self, node: ast.For) -> Any:
        node.iter = call("loop", self.visit(node.iter))
        names = [n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)]
        node.body = self.block(node.body, *names)
        return node

    def visit_Return(self, node: ast.Return) -> Any:
        if node.value is not None:
            node.value = call("copy", self.visit(node.value))
        return node

    # --- expressions

    def index(self, node: ast.expr) -> ast.expr:
        elements = node.elts if isinstance(node, ast.Tuple) else [node]
        return ast.Tuple([self.visit(e) for e in elements], ast.Load())

    def place(self, node: ast.expr) -> ast.expr:
        """Memory that can be stored to."""
        if isinstance(node, ast.Name):
            return call("whole", node)
        if isinstance(node, ast.Subscript):
            return call("view", self.place(node.value), self.index(node.slice))
        assert isinstance(node, ast.Attribute)
        return call("part", self.place(node.value), ast.Constant(node.attr))

    def visit_Name(self, node: ast.Name) -> Any:
        if self.is_local(node.id):
            return ast.Attribute(ast.Name(node.id, ast.Load()), "v", ast.Load())
        return node

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        return call("load", self.visit(node.value), self.index(node.slice))

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if _is_module(node.value):
            return node
        return call("part", self.visit(node.value), ast.Constant(node.attr))

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        name = _OPERATORS.get(type(node.op))
        if name in (None, "add", "sub", "mul", "truediv"):
            return self.generic_visit(node)
        return call(name, self.visit(node.left), self.visit(node.right))  # type: ignore[arg-type]

    def visit_Compare(self, node: ast.Compare) -> Any:
        values = [self.visit(v) for v in (node.left, *node.comparators)]
        tests: list[ast.expr] = [
            call("compare", ast.Constant(_COMPARISONS[type(op)]), a, b)
            for op, a, b in zip(node.ops, values, values[1:], strict=False)
        ]
        return tests[0] if len(tests) == 1 else ast.BoolOp(ast.And(), tests)

    def visit_Call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Attribute) and not _is_module(node.func.value):
            name = ast.Constant(node.func.attr)
            return call("method", self.visit(node.func.value), name, *[self.visit(a) for a in node.args])
        text = ast.unparse(node.func)
        if text.startswith("ti.atomic_"):
            target = node.args[0]
            place = target if isinstance(target, ast.Name) and self.is_local(target.id) else self.place(target)
            return call("atomic", ast.Constant(text.removeprefix("ti.atomic_")), place, self.visit(node.args[1]))
        templates = self.templates.get(text, [])
        args: list[ast.expr] = []
        for n, argument in enumerate(node.args):
            by_reference = n < len(templates) and templates[n] and isinstance(argument, ast.Name)
            args.append(argument if by_reference else self.visit(argument))
        node.args = args
        node.keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords]
        return node


def _is_module(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("ti", "tm")
