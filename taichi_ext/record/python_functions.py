"""Plain Python functions that a kernel calls: run while the kernel is recorded, on its values.

Taichi runs them while it compiles, with expressions as arguments. Their control flow is Python's and stays unchanged;
their operators, subscripts, attributes and calls become calls on the recorder.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import inspect
import itertools
import operator
import types
from functools import lru_cache, reduce
from typing import Any

import taichi_ext.record.subscripts as subscripts
from taichi_ext import backend
from taichi_ext.backend import ti
from taichi_ext.errors import UnsupportedError, raise_baked
from taichi_ext.program import FoldedConst, Tensor, Value
from taichi_ext.record.assignments import update_place
from taichi_ext.record.handles import HANDLES, ScalarPlace, VectorPlace, has_values, value_of
from taichi_ext.record.operations import operate
from taichi_ext.record.recording import Recording
from taichi_ext.record.rewriter import BINARY, PYTHON_NAMES, RECORDER, Rewriter, copied

_CONTAINERS = (list, tuple, dict, set, frozenset, str, range)
# Callables that only combine values into containers, or take them apart.
_STRUCTURE = (*_CONTAINERS, zip, enumerate, reversed, iter, next, slice, len, callable, id)
_STRUCTURE += (itertools.chain, itertools.product, itertools.permutations, itertools.combinations)
_OF_ANYTHING = (isinstance, type, print, repr, hasattr, issubclass)
_FUTURE = reduce(operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names))
_ADVICE = "Write it as a @ti.func."
_OF_FRAMES = frozenset(("super", "locals", "globals", "vars", "eval", "exec", "dir", "__class__"))


def is_python(function: object) -> bool:
    """Whether a callable is a plain Python function, or wraps one."""
    if isinstance(function, types.FunctionType):
        return not backend.is_known_in_kernels(function) and not backend.is_library(function)
    is_wrapper = isinstance(function, (functools.partial, functools._lru_cache_wrapper, types.MethodType))
    return is_wrapper or isinstance(inspect.getattr_static(type(function), "__call__", None), types.FunctionType)


def call_python(r: Recording, function: Any, args: list[object], keywords: dict[str, object]) -> object:
    """Call a plain Python function as Taichi does while it compiles."""
    if isinstance(function, functools.partial):
        return r.library.call(function.func, *function.args, *args, **{**function.keywords, **keywords})
    if isinstance(function, functools._lru_cache_wrapper):
        return r.library.call(function.__wrapped__, *args, **keywords)
    if isinstance(function, types.MethodType):
        return r.library.call(function.__func__, function.__self__, *args, **keywords)
    if not isinstance(function, types.FunctionType):
        return r.library.call(type(function).__call__, function, *args, **keywords)
    if f"{RECORDER}.call" in function.__globals__:  # defined in a function that has been rewritten
        return function(*args, **keywords)
    if not has_values([*args, *keywords.values()]):
        try:  # most such functions compute with numbers and indices
            with backend.sealed(), r.constants.watching() as watched:
                result = function(*args, **keywords)
            if not watched.may_read:
                return result
        except backend.SealedError:
            pass  # it reads or writes fields, or calls ti.funcs: that is recorded
    library = {f"{RECORDER}.{name}": functools.partial(f, r) for name, f in _FUNCTIONS.items()}
    names = {**backend.global_variables(function), **r.constants.replaced(function), **library}
    made = types.FunctionType(_rewritten(function.__code__), names, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    try:
        return made(*args, **keywords)
    except TypeError as error:
        raise UnsupportedError(f"{function.__qualname__}: {error}. {_ADVICE}") from error


def structure(r: Recording, function: Any, args: tuple[Any, ...], keywords: dict[str, object]) -> object:
    """The result of a callable of Python that combines values; NotImplemented for any other."""
    if any(function is f for f in _STRUCTURE) and not (function is len and args and isinstance(args[0], HANDLES)):
        return function(*args, **keywords)
    if function is sum:
        values: Any
        values, total = args[0], [*args[1:], *keywords.values(), 0][0]
        for value in values:
            total = _binary("add", r, total, value)
        return total
    return NotImplemented


# --- the operations of a rewritten function


def _binary(name: str, r: Recording, a: Any, b: Any) -> object:
    if not isinstance(a, HANDLES) and not isinstance(b, HANDLES):
        return getattr(operator, f"__{PYTHON_NAMES.get(name, name)}__")(a, b)
    return r.library.matmul(a, b) if name == "matmul" else operate(r, name, a, b)


def _unary(name: str, r: Recording, x: Any) -> object:
    return operate(r, name, x) if isinstance(x, HANDLES) else getattr(operator, name)(x)


def _compare(r: Recording, names: tuple[str, ...], *operands: object) -> object:
    result: object = True
    for name, a, b in zip(names, operands, operands[1:], strict=False):
        is_value = isinstance(a, HANDLES) or isinstance(b, HANDLES)
        result = operate(r, name, a, b) if is_value else getattr(operator, name)(a, b)
        if isinstance(result, bool) and (isinstance(a, FoldedConst) or isinstance(b, FoldedConst)):
            raise_baked("A choice")
        if not result:
            break
    return result


def _augmented(r: Recording, target: object, name: str, value: object) -> object:
    """``target += value``: changes a local in place; otherwise returns a new object."""
    if isinstance(target, (ScalarPlace, VectorPlace)):
        update_place(r, target, name, value)
        return target
    if isinstance(target, (Value, Tensor)):
        raise backend.SyntaxFault(f"cannot use a non-writable target as the first operand of {name!r}")
    if isinstance(value, HANDLES):
        return _binary(name, r, target, value)
    return getattr(operator, f"__i{PYTHON_NAMES.get(name, name)}__")(target, value)


def _item(r: Recording, base: Any, index: Any) -> object:
    return subscripts.load(r, base, index if isinstance(index, tuple) else (index,)) if _is_own(base) else base[index]


def _attribute(r: Recording, base: object, name: str) -> object:
    if _is_own(base):
        return subscripts.attribute(r, base, name)
    return r.constants.read_attribute(base, name, getattr(base, name))


def _is_own(base: object) -> bool:
    return isinstance(base, HANDLES)


def _method(r: Recording, base: Any, name: str, /, *args: object, **keywords: object) -> object:
    if _is_own(base) or (isinstance(base, backend.Field) and name == "fill"):
        return r.library.method(base, name, *args, **keywords)
    function = _attribute(r, base, name)
    if isinstance(base, _CONTAINERS) and isinstance(function, types.BuiltinMethodType):
        return function(*args, **keywords)
    return _call(r, function, *args, **keywords)


def _call(r: Recording, function: Any, /, *args: Any, **keywords: object) -> object:
    if function is ti.static:
        return args[0] if len(args) == 1 else args
    if any(function is f for f in _OF_ANYTHING):
        return function(*args, **keywords)
    found = structure(r, function, args, keywords)
    if found is not NotImplemented:
        return found
    is_builtin = getattr(builtins, getattr(function, "__name__", ""), None) is function
    if is_builtin and not has_values([*args, *keywords.values()]):
        return function(*args, **keywords)
    if is_builtin and function not in (abs, pow, len):
        raise UnsupportedError(
            f"Python's {function.__name__!r} is called on a value of the kernel in a plain Python function. Use "
            "Taichi's function of that name, or make the function a @ti.func."
        )
    return r.library.call(function, *args, **keywords)


_FUNCTIONS: dict[str, Any] = {
    **{name: functools.partial(_binary, name) for name in BINARY.values()},
    **{name: functools.partial(_unary, name) for name in ("neg", "pos", "invert")},
    **{"compare": _compare, "augmented": _augmented, "load": _item, "attribute": _attribute, "method": _method},
    **{"call": _call, "slice": lambda r, *parts: slice(*parts), "spread": lambda r, values: list(value_of(values))},
}


# --- the source of a function, rewritten


@lru_cache(maxsize=1024)
def _rewritten(code: types.CodeType) -> types.CodeType:
    found = definition(code)
    if found is None:
        raise UnsupportedError(
            f"The Python function {code.co_name!r} is called in a kernel, and its source is not to be found, or has "
            f"several lambdas in one line. {_ADVICE}"
        )
    node = copied(found)
    node.args.defaults, node.args.kw_defaults = [], [None] * len(node.args.kwonlyargs)
    if isinstance(node, ast.FunctionDef):
        node.decorator_list = []
    try:
        node: Any = _PythonRewriter({}).generic_visit(node)
        body = ast.Module(body=[ast.Expr(value=node) if isinstance(node, ast.Lambda) else node], type_ignores=[])
        flags = code.co_flags & _FUTURE | __future__.annotations.compiler_flag
        made = compile(ast.fix_missing_locations(body), code.co_filename, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, RecursionError) as error:  # nonlocal names, private names; very long expressions
        raise UnsupportedError(
            f"{code.co_filename}:{code.co_firstlineno}: {code.co_name!r} is called on values of a kernel, and uses "
            f"more of Python than can be followed there ({error}). {_ADVICE}"
        ) from error
    return next(c for c in made.co_consts if isinstance(c, types.CodeType))


@lru_cache(maxsize=1024)
def definition(code: types.CodeType) -> Any:
    """The ``def`` or ``lambda`` that a code object was compiled from; None if it is not to be found."""
    try:
        tree = _parsed("".join(inspect.findsource(code)[0]))
    except (OSError, TypeError, IndexError, SyntaxError):
        return None
    found = [node for node in ast.walk(tree) if _starts(node) == (code.co_name, code.co_firstlineno)]
    return found[0] if len(found) == 1 else None


@lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module:
    return backend.syntax_tree(text)


def _starts(node: Any) -> tuple[str, int] | None:
    """The name and first line of a function, as code objects have them."""
    if isinstance(node, ast.FunctionDef):
        return node.name, min(n.lineno for n in (node, *node.decorator_list))
    return ("<lambda>", node.lineno) if isinstance(node, ast.Lambda) else None


class _PythonRewriter(Rewriter):
    """Turns operators, subscripts, attributes and calls into calls; names and control flow stay."""

    visit_Return = visit_Assign = visit_AnnAssign = visit_If = visit_While = ast.NodeTransformer.generic_visit
    visit_For = visit_Expr = visit_Assert = visit_Continue = visit_Break = ast.NodeTransformer.generic_visit
    visit_BoolOp = visit_IfExp = visit_NamedExpr = visit_Lambda = visit_JoinedStr = ast.NodeTransformer.generic_visit

    def is_module_attribute(self, node: ast.Attribute) -> bool:
        return False

    def index(self, node: ast.expr) -> ast.expr:
        return self.visit(node)

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id in _OF_FRAMES:
            raise SyntaxError(node.id)
        return node

    def visit_Call(self, node: ast.Call) -> object:
        if isinstance(node.func, ast.Name):
            self.visit(node.func)
        return super().visit_Call(node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_Attribute(self, node: ast.Attribute) -> object:
        if not isinstance(node.ctx, ast.Load) or (node.attr.startswith("__") and not node.attr.endswith("__")):
            raise SyntaxError(f".{node.attr}")
        return super().visit_Attribute(node)

    def visit_Subscript(self, node: ast.Subscript) -> object:
        return super().visit_Subscript(node) if isinstance(node.ctx, ast.Load) else self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> object:
        return self.library(BINARY[type(node.op)], node, self.visit(node.left), self.visit(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> object:
        return self.generic_visit(node) if isinstance(node.op, ast.Not) else super().visit_UnaryOp(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> object:
        if not isinstance(node.target, ast.Name):
            raise SyntaxError(f"{ast.unparse(node.target)} is updated")
        before = ast.copy_location(ast.Name(id=node.target.id, ctx=ast.Load()), node.target)
        name = self.string(BINARY[type(node.op)], node)
        after = self.library("augmented", node, before, name, self.visit(node.value))
        return ast.copy_location(ast.Assign(targets=[node.target], value=after), node)
