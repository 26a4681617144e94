"""Real functions may return from inside a branch or loop; inlined ones may not: rewrite such returns first.

``return e`` becomes ``<result0> = e; <returned> = 1``; following statements run only ``if <returned> == 0``, and loops
are left. Users cannot write such names.
"""

from __future__ import annotations

import ast

from taichi_ext.errors import UnsupportedError

RESULT = "<result{}>"
RETURN_TYPE = "<return_type{}>"
_FLAG = "<returned>"


def has_early_return(function: ast.FunctionDef) -> bool:
    """Whether a return stands anywhere but at the end."""
    returns = [n for n in ast.walk(function) if isinstance(n, ast.Return)]
    return any(r is not function.body[-1] for r in returns)


def lower_returns(function: ast.FunctionDef, count: int) -> None:
    """Leave one return, at the end; ``count`` values are returned, of the types ``<return_type0>`` ..."""
    start: list[ast.stmt] = [ast.Assign(targets=[_name(_FLAG, ast.Store())], value=ast.Constant(value=0))]
    for n in range(count):
        zero = ast.Call(func=_name(RETURN_TYPE.format(n)), args=[ast.Constant(value=0.0)], keywords=[])
        start.append(ast.Assign(targets=[_name(RESULT.format(n), ast.Store())], value=zero))
    body = _block(function.body, count, in_loop=False)
    results: list[ast.expr] = [_name(RESULT.format(n)) for n in range(count)]
    end = ast.Return(value=results[0] if count == 1 else ast.Tuple(elts=results, ctx=ast.Load()))
    for statement in start:
        _place(statement, function.body[0])
    _place(end, function.body[-1])
    function.body = [*start, *body, end] if count else [*start, *body]


def _name(name: str, context: ast.expr_context | None = None) -> ast.Name:
    return ast.Name(id=name, ctx=context or ast.Load())


def _place(node: ast.AST, at: ast.AST) -> None:
    for child in ast.walk(node):
        if isinstance(child, (ast.stmt, ast.expr)) and not hasattr(child, "lineno"):
            ast.copy_location(child, at)


def _returns(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Return) for n in ast.walk(node))


def _is_returned(value: int, at: ast.AST, body: list[ast.stmt]) -> ast.If:
    test = ast.Compare(left=_name(_FLAG), ops=[ast.Eq()], comparators=[ast.Constant(value=value)])
    statement = ast.If(test=test, body=body, orelse=[])
    _place(statement, at)
    return statement


def _block(statements: list[ast.stmt], count: int, in_loop: bool) -> list[ast.stmt]:
    result: list[ast.stmt] = []
    for n, statement in enumerate(statements):
        if isinstance(statement, ast.Return):
            result += _assignment(statement, count)
            if in_loop:
                leave = ast.Break()
                ast.copy_location(leave, statement)
                result.append(leave)
            return result
        if not _returns(statement):
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
            result.append(_is_returned(1, statement, [ast.Break()]))
            result += rest
        elif rest:
            result.append(_is_returned(0, statement, rest))
        return result
    return result


def _assignment(statement: ast.Return, count: int) -> list[ast.stmt]:
    new: list[ast.stmt] = []
    value = statement.value
    if value is not None and count == 1:
        new.append(ast.Assign(targets=[_name(RESULT.format(0), ast.Store())], value=value))
    elif value is not None:
        targets: list[ast.expr] = [_name(RESULT.format(n), ast.Store()) for n in range(count)]
        new.append(ast.Assign(targets=[ast.Tuple(elts=targets, ctx=ast.Store())], value=value))
    new.append(ast.Assign(targets=[_name(_FLAG, ast.Store())], value=ast.Constant(value=1)))
    for assignment in new:
        _place(assignment, statement)
    return new
