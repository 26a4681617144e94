"""The launches of a pipeline, as far as they can be read from its Python code without running it."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from taichi_ext import backend
from taichi_ext.labels import is_library_module
from taichi_ext.record.python_source import definition

_MOST_CALLS = 300  # launches and calls of Python functions that are followed
_MOST_ITEMS = 64  # of a list that a loop goes over
_UNKNOWN = object()
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DEEPEST = 8  # calls in calls
_PLAIN_NODES = (ast.Expr, ast.For, ast.Pass, ast.Return, ast.Call, ast.keyword, ast.Name, ast.Attribute, ast.Constant)
_PLAIN_NODES = (*_PLAIN_NODES, ast.expr_context, ast.Nonlocal, ast.Global, ast.AugAssign, ast.operator)
_PLAIN = (types.FunctionType, staticmethod, classmethod, types.MemberDescriptorType)


@dataclass(frozen=True, eq=False)
class Coming:
    """A launch that is named in the code, with its arguments; numbers among them are placeholders."""

    kernel: backend.Kernel
    args: tuple[Any, ...]
    features: object  # key of its arguments; the kernel is compiled for each key


@dataclass(frozen=True, eq=False)
class Loop:
    """The kernels that a loop in Python launches in each round."""

    body: tuple[Any, ...]


def coming_launches(end: types.CodeType) -> list[object]:
    """The launches after the present one, in order: ``Coming`` and ``Loop``.

    For each running function, these are the launches after its current statement, and those of the whole outermost
    loop around it; ``end`` is the code that runs the pipeline.  Both branches of a condition count if its value is
    unknown.
    """
    reader, found = _Reader(), []
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not end:
        code = frame.f_code
        if not is_library_module(frame.f_globals.get("__name__") or ""):
            body = _body(code, code.co_filename)
            names = {**frame.f_builtins, **frame.f_globals, **backend.local_variables(frame)}
            found += reader.rest(body, frame.f_lineno, names)
        frame = frame.f_back
    return found


def only_launches(function: object, args: tuple[object, ...], outer: tuple[object, ...] = ()) -> bool:
    """Whether a function does nothing but launch kernels, with arrays and numbers as they are; False if not known."""
    if isinstance(function, types.MethodType):
        function, args = function.__func__, (function.__self__, *args)
    if not isinstance(function, types.FunctionType) or function in outer or len(outer) > _DEEPEST:
        return False
    names, body = _names_in(function, args, {}), _body(function.__code__, function.__code__.co_filename)
    nodes = [node for statement in body for node in ast.walk(statement)]
    if names is None or not nodes or not all(isinstance(node, _PLAIN_NODES) for node in nodes):
        return False
    for node in nodes:  # a counter, but no array
        counter = node.target if isinstance(node, ast.AugAssign) else ast.Constant(0)
        if not isinstance(counter, ast.Constant) and not isinstance(_Reader().value(counter, names), (int, float)):
            return False
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    known: dict[str, object] = {"range": range, **{k: v for k, v in names.items() if k not in stored}}
    reader = _Reader()
    if any(isinstance(node, ast.Attribute) and reader.value(node, known) is _UNKNOWN for node in nodes):
        return False  # a property, perhaps
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        callee = reader.value(call.func, known)
        if callee is not range and backend.primal_kernel(callee) is None:
            given = tuple(reader.value(a, known) for a in call.args)
            if call.keywords or not only_launches(callee, given, (*outer, function)):
                return False
    return True


def _names_in(
    function: types.FunctionType, args: tuple[object, ...], keywords: Mapping[str, object]
) -> dict[str, object] | None:
    """The objects that names in a function stand for when it is called; None for a call that is wrong."""
    try:
        given = inspect.signature(function).bind(*args, **keywords)
        given.apply_defaults()
        cells = zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True)
        return {**function.__globals__, **dict(cells), **given.arguments}
    except (TypeError, ValueError):  # a wrong call; a variable that is not assigned yet
        return None


@lru_cache(maxsize=1024)
def _body(code: types.CodeType, _file: str) -> list[ast.stmt]:  # codes of two files can be equal
    node = definition(code, getattr(code, "co_qualname", code.co_name))
    if isinstance(node, ast.Lambda):
        return [ast.copy_location(ast.Expr(node.body), node.body)]
    return [] if node is None else node.body


class _Reader:
    """Follows statements and calls, with the objects that names stand for."""

    def __init__(self) -> None:
        self._calls = 0
        self._open: list[types.CodeType] = []  # functions that are being followed

    def rest(self, body: list[ast.stmt], line: int, names: dict[str, object]) -> list[object]:
        """The launches of a block after the statement at a line."""
        place = next((n for n, s in enumerate(body) if s.lineno <= line <= (s.end_lineno or 0)), None)
        if place is None:
            return []
        now, found = body[place], []
        if isinstance(now, (ast.For, ast.While)):
            found = self.statement(now, names)
        else:
            if isinstance(now, (ast.Expr, ast.Assign, ast.Return)):
                loops = (node for node in ast.walk(now) if isinstance(node, _COMPREHENSIONS))
                found = [launch for node in loops for launch in self.statement(node, names)]
            blocks = [getattr(now, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(now, "handlers", [])]
            found += [launch for block in blocks for launch in self.rest(block, line, names)]
        return found + self.block(body[place + 1 :], names)

    def block(self, body: list[ast.stmt], names: dict[str, object]) -> list[Any]:
        return [launch for statement in body for launch in self.statement(statement, names)]

    def statement(self, node: ast.AST, names: dict[str, object]) -> list[object]:
        """The launches of a statement or expression; its assignments are noted by name."""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                return []
            case ast.For():
                return [*self.statement(node.iter, names), *self._loop(node, names)]
            case ast.While():
                return [Loop((*self.statement(node.test, names), *self.block(node.body, names)))]
            case _ if isinstance(node, _COMPREHENSIONS):
                return [Loop(tuple(self._parts(node, names)))]
            case ast.If() if (test := self.value(node.test, names)) is None or isinstance(test, (bool, int, float)):
                return self.block(node.body if test else node.orelse, names)
            case ast.Call():
                return [*self._parts(node, names), *self._call(node, names)]
            case ast.Assign():
                found = self.statement(node.value, names)
                for target in node.targets:
                    self._assign(target, node.value, names)
                return found
        return list(self._parts(node, names))

    def _parts(self, node: ast.AST, names: dict[str, object]) -> Iterator[object]:
        for part in ast.iter_child_nodes(node):
            yield from self.statement(part, names)

    def _loop(self, node: ast.For, names: dict[str, object]) -> list[Loop]:
        values = self.value(node.iter, names)
        if not isinstance(values, (list, tuple)) or not isinstance(node.target, ast.Name):
            return [Loop(tuple(self.block(node.body, names)))]
        found: list[Any] = []
        for value in values[:_MOST_ITEMS]:
            found += self.block(node.body, {**names, node.target.id: value})
        return [Loop(tuple(found))]

    def _assign(self, target: ast.expr, value: ast.expr, names: dict[str, object]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = self.value(value, names)
        elif isinstance(target, ast.Tuple):
            values = self.value(value, names)
            known = values if isinstance(values, tuple) and len(values) == len(target.elts) else None
            for n, part in enumerate(target.elts):
                if isinstance(part, ast.Name):
                    names[part.id] = _UNKNOWN if known is None else known[n]

    def _call(self, node: ast.Call, names: dict[str, Any]) -> list[Any]:
        function = self.value(node.func, names)
        self._calls += 1
        if function is _UNKNOWN or self._calls > _MOST_CALLS or any(isinstance(a, ast.Starred) for a in node.args):
            return []
        args = tuple(self.value(a, names) for a in node.args)
        keywords = {k.arg: self.value(k.value, names) for k in node.keywords if k.arg is not None}
        bound = backend.primal_kernel(function)
        if bound is not None:
            return _launch(bound[0], (*bound[1], *args), keywords)
        if isinstance(function, types.MethodType):
            function, args = function.__func__, (function.__self__, *args)
        if not isinstance(function, types.FunctionType) or is_library_module(backend.module_of(function)):
            return []
        return self._followed(function, args, keywords)

    def _followed(
        self, function: types.FunctionType, args: tuple[object, ...], keywords: Mapping[str, object]
    ) -> list[object]:
        """The kernels that a Python function launches."""
        code = function.__code__
        if code in self._open:
            return []
        names = _names_in(function, args, keywords)
        if names is None:
            return []
        self._open.append(code)
        found = self.block(_body(code, code.co_filename), names)
        self._open.pop()
        return found

    def value(self, node: ast.expr, names: dict[str, object]) -> Any:
        """The object that an expression evaluates to, if that follows from names and stored attributes."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return names.get(node.id, _UNKNOWN)
            case ast.Attribute():
                return _attribute(self.value(node.value, names), node.attr)
            case ast.Tuple() | ast.List():
                return tuple(self.value(e, names) for e in node.elts)
            case ast.Subscript():
                base, index = self.value(node.value, names), self.value(node.slice, names)
                is_item = type(base) in (list, tuple) and type(index) is int and -len(base) <= index < len(base)
                is_entry = type(base) is dict and isinstance(index, (str, int)) and index in base
                return base[index] if is_item or is_entry else _UNKNOWN
        return _UNKNOWN


def _attribute(owner: object, name: str) -> object:
    """An attribute that can be read without running code of the user's."""
    looking_up = type(owner).__getattribute__
    if owner is _UNKNOWN or not (backend.is_library(looking_up) or not backend.module_of(looking_up)):
        return _UNKNOWN
    stored = inspect.getattr_static(owner, name, _UNKNOWN)
    if stored is _UNKNOWN or (hasattr(type(stored), "__get__") and not isinstance(stored, _PLAIN)):
        return _UNKNOWN
    return getattr(owner, name)


def _launch(kernel: backend.Kernel, args: tuple[object, ...], keywords: Mapping[str, object]) -> list[Coming]:
    """A launch, with placeholders for unknown numbers; empty if the arguments are invalid or not known enough."""
    try:
        given = backend.process_args(kernel, args, keywords)
        unknown = [a.annotation for a, value in zip(backend.arguments(kernel), given, strict=True) if value is _UNKNOWN]
        if not all(map(backend.is_scalar_type, unknown)):
            return []
        given = tuple(0 if value is _UNKNOWN else value for value in given)
        return [Coming(kernel, given, backend.argument_features(kernel, given))]
    except Exception:  # the launch itself raises it, if it is made
        return []
