"""Calls in a traced kernel: what each callable that a kernel names does with tangents."""

from __future__ import annotations

import builtins
import inspect
import operator
from collections.abc import Callable
from typing import Any

import taichi as ti

from taichi_ext import backend
from taichi_ext.backend import matrix_ops, ops
from taichi_ext.boundary import gradients
from taichi_ext.derivative import linalg
from taichi_ext.derivative.references import ByReference
from taichi_ext.derivative.rules import RULE_OF_FUNCTION
from taichi_ext.derivative.values import Scalar, StructValue, TensorValue, is_active, is_python_number, primal_of
from taichi_ext.errors import UnsupportedError, refuse_baked
from taichi_ext.record.known_calls import BY_CLASS, is_without_tangents
from taichi_ext.record.parallel_loops import is_arithmetic
from taichi_ext.tracing import atomics, edge_tracing, python_calls, rule_tracing, whole_fields
from taichi_ext.tracing.constructors import COMPARISONS, FROM_PARTS, cast, construct, select
from taichi_ext.tracing.containers import Ref
from taichi_ext.tracing.index_forms import Locals
from taichi_ext.tracing.local_variables import LocalStruct, LocalTensor
from taichi_ext.tracing.subscripts import DynamicCell, StructRef

CELL_METHODS = ("append", "length", "deactivate")  # of the lists of dynamic nodes


def method(tracer: Any, base: Any, name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
    """``base.name(*args)``."""
    if isinstance(base, ByReference):
        base = base.value()
    if isinstance(base, (LocalStruct, StructRef, StructValue)):
        if name in base.members:
            return call(tracer, base.members[name], args, keywords)
        if name not in base.methods:
            raise AttributeError(f"a struct with the members {list(base.members)} has no method {name!r}")
        return call(tracer, base.methods[name], [base, *args], keywords)
    backend.refuse_ended(base, "The field whose method is called here")
    if isinstance(base, backend.Field) and name in CELL_METHODS and backend.is_dynamic_cell(base, 0):
        base = DynamicCell(base, ())
    if isinstance(base, DynamicCell) and name in CELL_METHODS:
        return whole_fields.cell_method(tracer, base, name, args)
    if isinstance(base, (Ref, TensorValue, LocalTensor)):
        if name == "get_shape":
            return base.get_shape()
        if backend.is_matrix_expression_method(name) and (base.get_shape() or not isinstance(base, Ref)):
            return call(tracer, getattr(matrix_ops, name), [base, *args], keywords)
        raise AttributeError(f"a value of shape {base.get_shape()} has no method {name!r}")
    function, bound = backend.native_attribute(tracer.context, base, name)
    return call(tracer, function, [base, *args] if bound else args, keywords)


def call(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool = False) -> Any:
    """``function(*args, **keywords)``."""
    if inspect.ismethod(function):
        return call(tracer, function.__func__, [function.__self__, *args], keywords, is_statement)
    try:
        function = BY_CLASS.get(function, function)
        special = _SPECIAL.get(function)
    except TypeError:  # it cannot be hashed
        special = None
    if special is not None and function not in RULE_OF_FUNCTION and not is_arithmetic(function):
        tracer.refuse_pieces() if function in _PURE else tracer.note_effect()
    if special is not None:
        args, keywords = _by_position(function, args, keywords)
        return special(tracer, function, args, keywords, is_statement)
    is_type = function in (ti.Vector, ti.Matrix, ti.Struct) or isinstance(
        function, (backend.MatrixType, backend.StructType, type(ti.f32))
    )
    func = None if is_type else backend.taichi_func(function)
    if func is not None and (not backend.is_library(function) or _carries_tangent(tracer, [*args, *keywords.values()])):
        return _inline(tracer, func, args, keywords)
    if not is_type and python_calls.is_python(function):
        return python_calls.call_python(tracer, function, args, keywords)
    if is_arithmetic(function):
        tracer.note_work("sqrt", None)
    elif not is_type:
        tracer.refuse_pieces() if backend.module_of(function) == "taichi.math.mathimpl" else tracer.note_effect()
    values = [tracer.value_of(a) for a in args]
    named = {k: tracer.value_of(v) for k, v in keywords.items()}
    if is_active(values) or is_active(named):
        return _on_tangents(tracer, function, values, named, is_type)
    values, named = [primal_of(v) for v in values], primal_of(named)
    if is_type or func is not None or is_without_tangents(function):
        tracer.facts.has_random |= function in (ti.random, ti.randn)
        return backend.native_call(tracer.context, function, values, named)
    try:
        with backend.sealed(), tracer.watching() as watched:
            result = backend.native_call(tracer.context, function, values, named)
    except backend.SealedError:
        raise UnsupportedError(
            f"{_name(function)!r} adds statements to the kernel, and their derivatives are not known. Write them as a "
            "@ti.func."
        ) from None
    if watched.may_read:
        raise UnsupportedError(python_calls.READS_PARAMETER.format(repr(_name(function))))
    return result


def _on_tangents(tracer: Any, function: Any, values: list[Any], named: dict[str, Any], is_type: bool) -> Any:
    """A call of a type, or of a function of Python's own, on values of which some carry tangents."""
    if isinstance(function, type(ti.f32)):
        return cast(tracer, values[0], function)
    if is_type:
        return construct(tracer, function, values, named)
    found = python_calls.PythonScope(tracer).structure(function, tuple(values), named)
    if found is NotImplemented:
        raise UnsupportedError(
            f"{_name(function)!r} is called on a value with a tangent, and its derivative is not known. Write it as a "
            "@ti.func, or, if no derivative is wanted, pass a value without a tangent."
        )
    return found


def _by_position(function: Any, args: list[Any], keywords: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments that are given by name, by position where that is possible."""
    if not keywords:
        return args, keywords
    try:
        bound = inspect.signature(function).bind(*args, **keywords)
    except (TypeError, ValueError):  # no signature, or not such arguments: the call itself will tell
        return args, keywords
    return list(bound.args), bound.kwargs


def _carries_tangent(tracer: Any, args: list[Any]) -> bool:
    places = (ByReference, *Locals, Ref, StructRef, backend.Field, backend.AnyArray)
    return any(isinstance(a, places) for a in args) or is_active(args)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or repr(function)


def _inline(tracer: Any, func: Any, args: list[Any], keywords: dict[str, Any]) -> Any:
    given = backend.process_args(func, tuple(args), keywords)
    is_library = backend.is_library(func.func)
    bound = []
    for n, (argument, value) in enumerate(zip(func.arguments, given, strict=True)):
        key = (tracer.path, "argument", tracer.line(), func.func.__qualname__, n)
        tracer.note_origin(key, value)
        bound.append(_bind(tracer, key, argument.annotation, value, is_library))
    rule = tracer.resolve_rule(func)
    if rule is not None and tracer.is_reverse:
        names = [a.name for a in func.arguments]
        values = [primal_of(tracer.value_of(b)) for b in bound]
        return backend.call_with_rule(rule, lambda *v: primal_of(_run(tracer, func, list(v))), names, values)
    if rule is not None:
        return rule_tracing.call_with_rule(tracer, rule, func, bound, lambda passed: _run(tracer, func, passed))
    if func in tracer.without_rules:  # a rule that calls its own function gets the primal
        bound = [primal_of(tracer.value_of(b)) if is_active(tracer.value_of(b)) else b for b in bound]
    return _run(tracer, func, bound)


def _run(tracer: Any, func: Any, bound: list[Any]) -> Any:
    result = tracer.inline(func, bound)
    if func.return_type is not None and result is not None:
        types = func.return_type
        if len(types) == 1:
            return _returned(tracer, result, types[0])
        return tuple(_returned(tracer, r, t) for r, t in zip(result, types, strict=True))
    return result


def _returned(tracer: Any, value: Any, kind: Any) -> Any:
    if isinstance(kind, (backend.MatrixType, backend.StructType)):
        return value
    return cast(tracer, value, kind)


def _bind(tracer: Any, key: Any, annotation: Any, value: Any, is_library: bool) -> Any:
    """An argument of a ti.func: template arguments by reference, others by value.

    Taichi's own functions do not change what their arguments are computed from: there an expression is evaluated once.
    """
    if isinstance(annotation, ti.template) or backend.is_reference(annotation):
        if not isinstance(value, (Scalar, TensorValue)):
            return value
        return tracer.freeze(value, key) if is_library else ByReference(tracer, value)
    is_object = isinstance(value, (backend.Field, backend.AnyArray)) or callable(value) or isinstance(value, str)
    if is_object or value is None:
        return value
    value = tracer.value_of(value)
    if isinstance(annotation, type(ti.f32)):
        value = cast(tracer, value, annotation)
    return tracer.declare(key, value)


# --- callables with a meaning of their own ----------------------------------------------------------------------------


def _rule(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    rule = RULE_OF_FUNCTION[function]
    values = [tracer.value_of(a) for a in args]
    if not is_active(values) or (rule.kind == "constant" and not any(map(is_python_number, values))):
        tracer.note_work(rule.name, values[0])
        return function(*[primal_of(v) for v in values])
    return tracer.apply(rule, *values)


def _extremum(name: str) -> Callable[..., Any]:
    def evaluate(tracer: Any, function: Any, args: list[Any], keywords: Any, is_statement: bool) -> Any:
        result = args[-1]
        for a in reversed(args[:-1]):
            result = tracer.operate(name, a, result)
        return result

    return evaluate


def _named_rule(name: str) -> Callable[..., Any]:
    def evaluate(tracer: Any, function: Any, args: list[Any], keywords: Any, is_statement: bool) -> Any:
        if not is_active(tracer.value_of(args)):
            return backend.native_call(tracer.context, function, [tracer.primal(a) for a in args], {})
        return tracer.operate(name, *args)

    return evaluate


def _whole(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """``int(x)``."""
    if any(is_python_number(tracer.value_of(a)) for a in args):
        refuse_baked("A whole number")
    return _primal_only(tracer, function, args, keywords, is_statement)


def _primal_only(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    named = {k: tracer.primal(v) for k, v in keywords.items()}
    return backend.native_call(tracer.context, function, [tracer.primal(a) for a in args], named)


def _float(tracer: Any, function: Any, args: list[Any], keywords: Any, is_statement: bool) -> Any:
    if not is_active(tracer.value_of(args[0])):
        return _primal_only(tracer, function, args, {}, False)
    return cast(tracer, args[0], float)


def _cast(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    return cast(tracer, *args)


def _length(tracer: Any, function: Any, args: list[Any], keywords: Any, is_statement: bool) -> Any:
    if isinstance(args[0], (Ref, ByReference, TensorValue, LocalTensor)):
        return args[0].get_shape()[0]
    return backend.native_call(tracer.context, function, args, {})


def _select(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    return select(tracer, *args)


def _round(tracer: Any, function: Any, args: list[Any], keywords: Any, is_statement: bool) -> Any:
    return tracer.operate("round", args[0])


def _loop_config(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    tracer.pending_serial = bool(keywords.get("serialize", False)) or keywords.get("parallelize") == 1
    return function(*args, **keywords)


def _stop_grad(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> None:
    """``ti.stop_grad(field)``: what is read from the field in the rest of this block counts as constant."""
    container = tracer.container(args[0])
    if container is not None:
        tracer.block.stopped.add(container.key)
    function(*args, **keywords)


def matmul(tracer: Any, a: Any, b: Any) -> Any:
    if not is_active(tracer.value_of((a, b))):
        return matrix_ops.matmul(tracer.primal(a), tracer.primal(b))
    return call(tracer, matrix_ops.matmul, [a, b], {})


def _operator(name: str) -> Callable[..., Any]:
    """A function of the ``operator`` module: the same as the operator."""

    def evaluate(tracer: Any, function: Any, args: list[Any], keywords: Any, is_statement: bool) -> Any:
        return getattr(tracer, name)(*args)

    return evaluate


def _static_method(name: str) -> Callable[..., Any]:
    """``ti.Matrix.rows`` and the like."""

    def evaluate(tracer: Any, function: Any, args: list[Any], keywords: Any, is_statement: bool) -> Any:
        if not is_active(tracer.value_of([*args, *keywords.values()])):
            return _primal_only(tracer, function, args, keywords, is_statement)
        return FROM_PARTS[name](tracer, *[tracer.value_of(a) for a in args], **keywords)

    return evaluate


def _any_all(function_name: str) -> Callable[..., Any]:
    function = getattr(matrix_ops, function_name)

    def evaluate(tracer: Any, _: Any, args: list[Any], keywords: Any, is_statement: bool) -> Any:
        return function(tracer.primal(args[0]))

    return evaluate


_SPECIAL: dict[Any, Callable[..., Any]] = dict.fromkeys(RULE_OF_FUNCTION, _rule)
_SPECIAL.update(
    {
        builtins.max: _extremum("max"),
        builtins.min: _extremum("min"),
        ops.max: _extremum("max"),
        ops.min: _extremum("min"),
        builtins.abs: _named_rule("abs"),
        builtins.pow: _named_rule("pow"),
        builtins.round: _round,
        builtins.int: _whole,
        builtins.bool: _primal_only,
        builtins.float: _float,
        builtins.len: _length,
        builtins.print: _primal_only,
        builtins.any: _any_all("any"),
        builtins.all: _any_all("all"),
        ops.cast: _cast,
        ops.select: _select,
        ops.ifte: lambda tracer, f, args, keywords, is_statement: tracer.where(*args),
        ti.loop_config: _loop_config,
        ti.stop_grad: _stop_grad,
        ti.append: whole_fields.append,
        ti.deactivate: whole_fields.deactivate,
        ti.zero: _primal_only,
        ti.one: _primal_only,
        ti.math.isnan: _primal_only,
        ti.math.isinf: _primal_only,
    }
)
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "neg", "pos", "invert")
_SPECIAL.update({getattr(operator, name): _operator(name) for name in (*_ARITHMETIC, *COMPARISONS)})
_SPECIAL.update(linalg.SPECIAL)
_SPECIAL.update(
    {
        gradients.mark: rule_tracing.trace_mark,
        gradients.stop_gradient: rule_tracing.trace_stop,
        gradients.replace_gradient: rule_tracing.trace_replace,
    }
)
_SPECIAL.update({getattr(ti.Matrix, name): _static_method(name) for name in FROM_PARTS})
_SPECIAL.update(edge_tracing.SPECIAL)
_PURE = {*_SPECIAL} - {builtins.print, ti.append, ti.deactivate}  # calls without effects
_SPECIAL.update({kind.fill: whole_fields.fill_by_class for kind in (backend.ScalarField, backend.MatrixField)})
_SPECIAL.update(atomics.SPECIAL)
