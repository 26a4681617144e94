"""Calls in a recorded kernel: the handler of each callable that a kernel names; plain Python functions are run."""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import inspect
import itertools
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any

import numpy as np

import taichi_ext.record.construct as construct
import taichi_ext.record.edges as edges
import taichi_ext.record.effects as effects
import taichi_ext.record.operations as operations
import taichi_ext.record.shapes as shapes
import taichi_ext.record.subscripts as subscripts
from taichi_ext import backend
from taichi_ext.backend import matrix_ops, ops, ti
from taichi_ext.errors import UnsupportedError, bound_arguments, raise_baked
from taichi_ext.program import FoldedConst, Load, Read, Tensor, Value
from taichi_ext.record.assignments import update_place
from taichi_ext.record.construct import inline_call
from taichi_ext.record.decompositions import decomposition
from taichi_ext.record.handles import (
    HANDLES,
    Callback,
    DynamicList,
    Record,
    VectorPlace,
    has_values,
    shape_of,
    value_of,
)
from taichi_ext.record.literals import COMPARISONS, NAME_OF, captured
from taichi_ext.record.operations import operate
from taichi_ext.record.recording import Recording
from taichi_ext.record.rewriter import BINARY, PYTHON_NAMES, RECORDER, Rewriter, copied
from taichi_ext.record.rules import marked, replaced, stopped
from taichi_ext.record.subscripts import attribute
from taichi_ext.record.variables import READS_PARAMETER

# Plain Python functions that a kernel calls: run while the kernel is recorded, on its values.
#
# Taichi runs them while it compiles, with expressions as arguments. Their control flow is Python's and stays unchanged;
# their operators, subscripts, attributes and calls become calls on the recorder.

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
            total = _operator("add", r, total, value)
        return total
    return NotImplemented


# --- the operations of a rewritten function


def _operator(name: str, r: Recording, *operands: Any) -> object:
    if not any(isinstance(x, HANDLES) for x in operands):
        return getattr(operator, f"__{PYTHON_NAMES.get(name, name)}__")(*operands)
    return r.library.matmul(*operands) if name == "matmul" else operate(r, name, *operands)


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
    if isinstance(target, (Read, Load, VectorPlace)):
        update_place(r, target, name, value)
        return target
    if isinstance(target, (Value, Tensor)):
        raise backend.SyntaxFault(f"cannot use a non-writable target as the first operand of {name!r}")
    if isinstance(value, HANDLES):
        return _operator(name, r, target, value)
    return getattr(operator, f"__i{PYTHON_NAMES.get(name, name)}__")(target, value)


def _item(r: Recording, base: Any, index: Any) -> object:
    given = index if isinstance(index, tuple) else (index,)
    return subscripts.load(r, base, given) if isinstance(base, HANDLES) else base[index]


def _attribute(r: Recording, base: object, name: str) -> object:
    if isinstance(base, HANDLES):
        return subscripts.attribute(r, base, name)
    return r.constants.read_attribute(base, name, getattr(base, name))


def _method(r: Recording, base: Any, name: str, /, *args: object, **keywords: object) -> object:
    if isinstance(base, HANDLES) or (isinstance(base, backend.Field) and name == "fill"):
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
    result = structure(r, function, args, keywords)
    if result is not NotImplemented:
        return result
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
    **{name: functools.partial(_operator, name) for name in (*BINARY.values(), "neg", "pos", "invert")},
    **{"compare": _compare, "augmented": _augmented, "load": _item, "attribute": _attribute, "method": _method},
    **{"call": _call, "slice": lambda r, *parts: slice(*parts), "spread": lambda r, values: list(value_of(values))},
}


# --- the source of a function, rewritten


@lru_cache(maxsize=1024)
def _rewritten(code: types.CodeType) -> types.CodeType:
    source = definition(code)
    if source is None:
        raise UnsupportedError(
            f"The Python function {code.co_name!r} is called in a kernel, and its source is not to be found, or has "
            f"several lambdas in one line. {_ADVICE}"
        )
    node = copied(source)
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
    nodes = [node for node in ast.walk(tree) if _starts(node) == (code.co_name, code.co_firstlineno)]
    return nodes[0] if len(nodes) == 1 else None


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


# All that a kernel calls.

Handler = Callable[..., Any]  # takes a recording, and the arguments of the call
_OF_CONTAINERS = ("append", "extend", "insert", "update", "setdefault")  # methods that take values


def method(
    r: Recording, base: Any, name: str, args: list[object], keywords: dict[str, object], is_statement: bool
) -> object:
    """``base.name(*args)``."""
    if isinstance(base, DynamicList):
        return effects.list_method(r, base, name, args)
    if isinstance(base, Record):
        function = attribute(r, base, name)
        return call(r, function, args if name in base.members else [base, *args], keywords, is_statement)
    backend.check_not_ended(base, "The field whose method is called here")
    if isinstance(base, backend.Field) and name in ("append", "length", "deactivate"):
        container = r.container(backend.leaf_fields(base)[0])
        if backend.is_dynamic_cell(base, 0):
            return effects.list_method(r, DynamicList(base, container, ()), name, args)
    if type(base) in (list, dict) and name in _OF_CONTAINERS and _is_local(r, base):
        return getattr(base, name)(*args, **keywords)  # as Taichi does: a list or dict of Python's that holds values
    base = captured(base)
    if isinstance(base, (Tensor, VectorPlace)):
        if name == "get_shape":
            return base.shape
        if backend.is_matrix_expression_method(name):
            return call(r, getattr(matrix_ops, name), [base, *args], keywords, is_statement)
        raise AttributeError(f"a value of shape {base.shape} has no method {name!r}")
    if isinstance(base, Value):
        raise AttributeError(f"a scalar has no method {name!r}")
    function, bound = backend.native_attribute(r.context, base, name)
    return call(r, function, [base, *args] if bound else args, keywords, is_statement)


def _is_local(r: Recording, x: object) -> bool:
    """Whether a list or dict was made in the kernel, or function, and is reached by the name of a variable."""
    pending = [value for scope in r.context.local_scopes for value in scope.values()]
    while pending:
        value = pending.pop()
        if value is x:
            return True
        if isinstance(value, (list, tuple, dict)):
            pending += value.values() if isinstance(value, dict) else value
    return False


def call(
    r: Recording, function: Any, args: list[object], keywords: dict[str, object], is_statement: bool = False
) -> Any:
    """``function(*args, **keywords)``."""
    method = backend.bound(function)
    if method is not None and not isinstance(method[1], type):
        return call(r, method[0], [method[1], *args], keywords, is_statement)
    if isinstance(function, Callback):
        return call(r, function.function, [*args, *function.args], keywords, is_statement)
    if hasattr(function, "boundary_kind"):
        return primitive_call(r, function, args, keywords)
    try:
        function = _BY_CLASS.get(function, function)
        handler = _SPECIAL.get(function)
    except TypeError:  # it cannot be hashed
        handler = None
    args = [captured(a) for a in args]
    if handler is not None:
        args, keywords = _by_position(function, args, keywords)
        if handler is effects.atomic:
            name = function.__name__
            if is_statement and name in ("atomic_add", "atomic_sub"):  # the same as += and -=
                return update_place(r, effects.writable(args[0], name), name.removeprefix("atomic_"), args[1])
            return effects.atomic(r, name, *args, is_statement=is_statement)
        return handler(r, *args, **keywords)
    if construct.is_type(function):
        return construct.construct(r, function, args, keywords)
    func = backend.taichi_func(function)
    if func is not None:
        return inline_call(r, func, args, keywords)
    if is_python(function):
        return call_python(r, function, args, keywords)
    return _other(r, function, args, keywords, is_statement)


def _other(r: Recording, function: Any, args: list[object], keywords: dict[str, object], is_statement: bool) -> object:
    """A callable of Python or Taichi without a handler."""
    name = getattr(function, "__qualname__", None) or repr(function)
    if backend.is_library(function):
        return effects.opaque(r, function, args, keywords, is_statement)
    if not has_values(args) and not has_values(keywords):
        with backend.sealed(), r.constants.watching() as watched:
            result = function(*args, **keywords)
        if watched.may_read:
            raise UnsupportedError(READS_PARAMETER.format(repr(name)))
        return result
    operation = _OF_PYTHON_NUMBERS.get((function, len(args)))
    if operation is not None and all(isinstance(a, FoldedConst) or not has_values(a) for a in args):
        return operations.operate(r, operation, *args)
    structured = structure(r, function, tuple(args), keywords)
    if structured is NotImplemented and isinstance(function, np.ufunc):
        raise UnsupportedError(f"NumPy's {function.__name__} is called on a value of the kernel; use Taichi's.")
    if structured is NotImplemented:
        raise UnsupportedError(f"{name!r} is called on a value of the kernel. Write it as a @ti.func.")
    return structured


def matmul(r: Recording, a: object, b: object) -> Any:
    """``a @ b``."""
    return call(r, matrix_ops.matmul, [a, b], {})


def _by_position(
    function: Any, args: list[object], keywords: dict[str, object]
) -> tuple[list[object], dict[str, object]]:
    """Arguments with those passed by name moved to their positions, where possible."""
    if not keywords:
        return args, keywords
    try:
        bound = inspect.signature(function).bind(*args, **keywords)
    except (TypeError, ValueError):  # no signature, or not such arguments: the call itself raises
        return args, keywords
    return list(bound.args), bound.kwargs


# --- callables with a handler -----------------------------------------------------------------------------------------


def _extremum(name: str) -> Handler:
    def evaluate(r: Recording, *args: object) -> Any:
        result = value_of(args[-1])
        for a in reversed(args[:-1]):
            result = operations.operate(r, name, a, result)
        return result

    return evaluate


def _operation(name: str) -> Handler:
    return lambda r, *args: operations.operate(r, name, *args)


def _conversion(kind: type) -> Handler:
    return lambda r, *args: operations.cast(r, args[0], kind) if has_values(args[0]) else kind(*args)


def _any_all(function: Callable[[Any], bool]) -> Handler:
    return lambda r, x: call(r, getattr(matrix_ops, function.__name__), [x], {}) if shape_of(x) else function(x)


def _loop_config(r: Recording, **keywords: Any) -> None:
    ti.loop_config(**keywords)
    r.loop.config = {**r.loop.config, **keywords}


def _fill(r: Recording, field: object, value: object) -> None:
    """``field.fill(value)``: a store to each entry."""
    if isinstance(field, backend.MatrixField):
        shape = construct.matrix_shape(field)
        given = value_of(value)
        if isinstance(given, (list, tuple)):
            value = operations.tensor(given)
        elif not isinstance(given, Tensor):
            value = operations.typed_tensor([given] * math.prod(shape), shape)
    call(r, backend.fill_function, [field, value], {}, True)


def _refusal(name: str, reason: str) -> Handler:
    def refuse(r: Recording, *args: object) -> None:
        raise UnsupportedError(f"{name!r} has no derivative here: {reason}.")

    return refuse


_REFUSED = {  # of Quadrants
    "atomic_exchange": "what it returns depends on the order of threads",
    "atomic_cas": "what it stores depends on the order of threads",
    "checkpoint": "the kernel may end there, and go on in another call",
}
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "invert")  # of the ``operator`` module
_SPECIAL: dict[Any, Handler] = {
    **{function: _operation(name) for function, name in NAME_OF.items()},
    **{getattr(operator, n): _operation(n) for n in (*COMPARISONS, *_ARITHMETIC)},
    **{f: _operation(f.__name__) for f in (builtins.abs, builtins.pow, builtins.round)},
    **{f: _extremum(n) for n in ("max", "min") for f in (getattr(builtins, n), getattr(ops, n))},
    **{f: _conversion(f) for f in (builtins.int, builtins.bool, builtins.float)},
    **{getattr(ops, f"atomic_{n}"): effects.atomic for n in ("add", "sub", "mul", "min", "max", "and", "or", "xor")},
    **{f: _any_all(f) for f in (builtins.any, builtins.all)},
    **{f: functools.partial(effects.kept_call, function=f) for f in effects.KEPT_CALLS},
    **{f: functools.partial(decomposition, function=f) for f in (ti.svd, ti.sym_eig)},
    operator.matmul: matmul,
    operator.pos: lambda r, x: value_of(x),
    # in complex form: Taichi's own algorithm for 2 x 2 matrices is differentiated
    ti.eig: lambda r, matrix, dt=None: call(r, backend.eig_function, [matrix, dt or backend.default_type(float)], {}),
    builtins.len: lambda r, x: shape_of(x)[0] if shape_of(x) else len(x),
    builtins.print: effects.print_,
    ops.cast: operations.cast,
    ops.bit_cast: operations.bit_cast,
    matrix_ops.cast: operations.cast,
    ops.select: _operation("select"),
    ops.ifte: operations.where,
    ops.random: effects.random,
    ti.randn: lambda r, dt=None: call(r, backend.randn_function, [dt or backend.default_type(float)], {}),
    ti.loop_config: _loop_config,
    **{f: (lambda r, x, *_: x) for f in (ti.assume_in_range, backend.loop_unique)},  # hints
    **{getattr(ti, n): _refusal(n, reason) for n, reason in _REFUSED.items() if hasattr(ti, n)},
    **{getattr(ti, n): (lambda r, x: value_of(x)) for n in ("volatile_load",) if hasattr(ti, n)},
    ti.stop_grad: effects.stop_grad,
    ti.zero: lambda r, x: construct.filled_like(r, x, 0),
    ti.one: lambda r, x: construct.filled_like(r, x, 1),
    ti.Matrix.identity: lambda r, *args: construct.identity(*args),
    ti.Matrix.zero: lambda r, dtype, *sizes: construct.constant(dtype, 0, *sizes),
    ti.Matrix.one: lambda r, dtype, *sizes: construct.constant(dtype, 1, *sizes),
    ti.Matrix.rows: lambda r, vectors: construct.rows(vectors),
    ti.Matrix.cols: lambda r, vectors: construct.columns(vectors),
    ti.Matrix.diag: lambda r, *args: construct.diagonal(*args),
    **{kind.fill: _fill for kind in (backend.ScalarField, backend.MatrixField)},
}
# Methods of matrices that are called on their class, and the functions for them.
_METHODS = (
    *("cast", "trace", "inverse", "normalized", "transpose", "determinant", "sum", "norm", "norm_inv", "norm_sqr"),
    *("max", "min", "any", "all", "fill", "dot", "cross", "outer_product"),
)
_BY_CLASS: dict[Any, Any] = {getattr(ti.Matrix, name): getattr(matrix_ops, name) for name in _METHODS}
_BY_CLASS |= {getattr(ti.Matrix, f"__{n}__"): getattr(operator, n) for n in (*_ARITHMETIC[:-2], "matmul", *COMPARISONS)}
# Functions of Python's math module with a number of arguments, on Python numbers that are parameters.
_OF_PYTHON_NUMBERS: dict[Any, str] = {
    **{(getattr(math, name), 1): name for name in ("sqrt", "exp", "log", "sin", "cos", "tan", "tanh", "asin", "acos")},
    (math.fabs, 1): "abs",
    (math.pow, 2): "pow",
    (math.atan2, 2): "atan2",
}


# The package's own functions, known by their attribute ``boundary_kind``.


def primitive_call(r: Recording, function: Any, args: Sequence[object], keywords: Mapping[str, object]) -> object:
    """A call of a function with custom derivatives."""
    kind = function.boundary_kind
    bound = bound_arguments(function, args, keywords)
    bound.apply_defaults()
    given: dict[str, Any] = {k: value_of(v) for k, v in bound.arguments.items()}

    def inner(func: object, *args: object) -> Any:
        return call(r, func, list(args), {})

    return _HANDLERS.get(kind, edges.edge)(r, inner, function, given)


_HANDLERS = {
    "mark": lambda r, call, function, given: marked(r, given["name"], given["value"], given["along"]),
    "stop_gradient": lambda r, call, function, given: stopped(r, given["value"]),
    "replace_gradient": lambda r, call, function, given: replaced(r, given["value"], given["surrogate"]),
    "boundary_term": edges.boundary_term,
    "level_at": edges.level_at,
    "layers": shapes.mean_of_shapes,
    **{f.__name__: f for f in (shapes.pixel, shapes.probe, shapes.segment_edge, shapes.ray_level, shapes.shape_at)},
    **{f.__name__: f for f in (shapes.add_edge, shapes.seen_together)},
}
