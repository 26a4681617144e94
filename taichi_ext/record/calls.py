"""Calls in a recorded kernel: the handler of each callable that a kernel names."""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import taichi_ext.record.construct as construct
import taichi_ext.record.edges as edges
import taichi_ext.record.effects as effects
import taichi_ext.record.operations as operations
import taichi_ext.record.python_functions as python_functions
import taichi_ext.record.shapes as shapes
from taichi_ext import backend
from taichi_ext.backend import matrix_ops, ops, ti
from taichi_ext.errors import UnsupportedError, bound_arguments
from taichi_ext.program import FoldedConst, Tensor, Value
from taichi_ext.record.boundaries import replaced, stopped
from taichi_ext.record.construct import inline_call, walk_typed
from taichi_ext.record.decompositions import decomposition
from taichi_ext.record.handles import (
    Callback,
    DynamicList,
    Record,
    ScalarPlace,
    VectorPlace,
    has_values,
    shape_of,
    value_of,
)
from taichi_ext.record.literals import COMPARISONS, NAME_OF, captured
from taichi_ext.record.recording import Recording
from taichi_ext.record.rules import marked
from taichi_ext.record.subscripts import attribute
from taichi_ext.record.variables import READS_PARAMETER

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
    if isinstance(base, (Value, ScalarPlace)):
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
            return effects.atomic(r, function.__name__, *args, is_statement=is_statement)
        return handler(r, *args, **keywords)
    if construct.is_type(function):
        return construct.construct(r, function, args, keywords)
    func = backend.taichi_func(function)
    if func is not None:
        return inline_call(r, func, args, keywords)
    if python_functions.is_python(function):
        return python_functions.call_python(r, function, args, keywords)
    return _other(r, function, args, keywords, is_statement)


def _other(r: Recording, function: Any, args: list[object], keywords: dict[str, object], is_statement: bool) -> object:
    """A callable of Python or Taichi without a handler."""
    if backend.is_library(function):
        return effects.opaque(r, function, args, keywords, is_statement)
    if not has_values(args) and not has_values(keywords):
        with backend.sealed(), r.constants.watching() as watched:
            result = function(*args, **keywords)
        if watched.may_read:
            name = getattr(function, "__qualname__", None) or repr(function)
            raise UnsupportedError(READS_PARAMETER.format(repr(name)))
        return result
    operation = _OF_PYTHON_NUMBERS.get((function, len(args)))
    if operation is not None and all(isinstance(a, FoldedConst) or not has_values(a) for a in args):
        return operations.operate(r, operation, *args)
    found = python_functions.structure(r, function, tuple(args), keywords)
    if found is NotImplemented and isinstance(function, np.ufunc):
        raise UnsupportedError(f"NumPy's {function.__name__} is called on a value of the kernel; use Taichi's.")
    if found is NotImplemented:
        name = getattr(function, "__qualname__", None) or repr(function)
        raise UnsupportedError(f"{name!r} is called on a value of the kernel. Write it as a @ti.func.")
    return found


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


def _eig(r: Recording, matrix: object, dt: object = None) -> object:
    """Eigenvalues of a 2 x 2 matrix in complex form: Taichi's own algorithm is differentiated."""
    return call(r, backend.eig_function, [matrix, dt or backend.default_type(float)], {})


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
    ti.eig: _eig,
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
    given: dict[str, Any] = {
        k: tuple(map(value_of, v)) if k == "args" else value_of(v) for k, v in bound.arguments.items()
    }

    def call(func: Any, *args: object) -> Any:
        if isinstance(func, Callback):
            func, args = func.function, (*args, *func.args)
        method = backend.bound(func)
        if method is not None:
            func, args = method[0], (method[1], *args)
        known = backend.taichi_func(func)
        assert known is not None
        return inline_call(r, known, list(args), {})

    return _HANDLERS.get(kind, edges.edge)(r, call, function, given)


def _mark(r: Recording, _: edges.Call, function: object, given: dict[str, Any]) -> object:
    return marked(r, given["name"], given["value"], given["along"], lambda f, passed: walk_typed(r, f, passed))


_HANDLERS = {
    "mark": _mark,
    "stop_gradient": lambda r, call, function, given: stopped(r, given["value"]),
    "replace_gradient": lambda r, call, function, given: replaced(r, given["value"], given["surrogate"]),
    "sqrt_edge": edges.sqrt_edge,
    "boundary_term": edges.boundary_term,
    "level_at": shapes.level_at,
    "layers": shapes.mean_of_shapes,
    **{f.__name__: f for f in (shapes.pixel, shapes.probe, shapes.segment_edge, shapes.ray_level)},
    **{f.__name__: f for f in (shapes.add_edge, shapes.seen_together)},
    **{f.__name__: f for f in (shapes.shape_at, shapes.level_gradient)},
}
