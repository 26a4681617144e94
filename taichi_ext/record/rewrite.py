"""Functions rewritten for the recorder, and kept: their trees, sources, texts of places."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from taichi_ext import backend
from taichi_ext.errors import UnsupportedError
from taichi_ext.record.rewriter import Rewriter


def flat_tree(tree: ast.AST) -> tuple[Any, ...]:
    """A tree of any depth without recursion: each node's class, names of its parts, and these.

    A node or list among the parts is its number in a 1-tuple, a constant has its type: 1 and 1.0 are equal.
    """
    found: list[Any] = [tree]
    flat: list[tuple[Any, ...]] = []

    def part(value: object) -> object:
        if not isinstance(value, (ast.AST, list)):
            return type(value), value
        found.append(value)
        return (len(found) - 1,)

    for value in found:
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
