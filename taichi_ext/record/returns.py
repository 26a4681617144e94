"""Real functions may return from inside a branch or loop; inlined ones may not: rewrite such returns first.

``return e`` becomes ``<result0> = e; <returned> = 1``; following statements run only ``if <returned> == 0``, and loops
are left. Users cannot write such names.
"""

from __future__ import annotations

import ast
from typing import Any

from taichi_ext import backend
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


def _returns(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Return) for n in ast.walk(node))


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
