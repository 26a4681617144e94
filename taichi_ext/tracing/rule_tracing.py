"""How tracing applies a rule.

A rule t(x, d_x) is linear in its tangents.  It is traced once, with tangents that are zero and carry their own seeds.
The form of its result over those seeds gives the partials of the rule.  The tangent is then ``sum(partial * tangent)``,
as for any operation of the rule table.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from taichi_ext import backend
from taichi_ext.boundary.gradients import check_mark_name, mark, replace_gradient, stop_gradient
from taichi_ext.boundary.registry import GradientRule, registry
from taichi_ext.derivative.linear_form import Affine, Form, Seed, accumulate
from taichi_ext.derivative.values import (
    Scalar,
    StructValue,
    entries_of,
    is_active,
    is_tensor_like,
    linearize,
    make_tensor,
    members_of,
    primal_of,
    shape_of,
)
from taichi_ext.errors import InvalidRuleError
from taichi_ext.record.rules import check_shapes


def trace_mark(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """``mark`` in a kernel that the engine traces."""
    given = inspect.signature(mark).bind(*args, **keywords).arguments
    name, keywords = given["name"], given.get("along", {})
    check_mark_name(name)
    registry.note_mark(name)
    rule = tracer.resolve_rule(name)
    value = tracer.value_of(given["value"])
    if rule is None:
        return value
    if tracer.is_reverse:
        return backend.mark_with_rule(rule, primal_of(value), {k: tracer.primal(v) for k, v in keywords.items()})
    along = {k: tracer.freeze(v, (tracer.path, "mark", tracer.line(), k)) for k, v in keywords.items()}
    allowed = {*along, *(f"d_{k}" for k in along), "out", "auto"}
    for parameter in rule.parameters:
        if parameter not in allowed:
            raise InvalidRuleError(
                f"The rule {rule.name!r} ({rule.place}) has a parameter {parameter!r}, which mark({name!r}, ...) does "
                f"not pass along; it can take {', '.join(sorted(allowed))}."
            )
    automatic = tracer.freeze(value, (tracer.path, "marked", tracer.line()))
    return apply_rule(tracer, rule, along, automatic)


def trace_stop(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """``stop_gradient`` in a kernel that the engine traces."""
    value = primal_of(tracer.value_of(inspect.signature(stop_gradient).bind(*args, **keywords).args[0]))
    return backend.stop_gradient(value) if tracer.is_reverse else value


def trace_replace(tracer: Any, function: Any, args: list[Any], keywords: dict[str, Any], is_statement: bool) -> Any:
    """``replace_gradient`` in a kernel that the engine traces."""
    given = inspect.signature(replace_gradient).bind(*args, **keywords).arguments
    value, surrogate = tracer.value_of(given["value"]), tracer.value_of(given["surrogate"])
    if tracer.is_reverse:
        return function(primal_of(value), primal_of(surrogate))
    if not is_active(surrogate):
        return primal_of(value)
    if shape_of(value) != shape_of(surrogate):
        raise InvalidRuleError(
            f"replace_gradient: the value has shape {shape_of(value)}, the surrogate {shape_of(surrogate)}; give both "
            "the same shape."
        )
    pairs = zip(_entries(value), _entries(surrogate), strict=True)
    nodes = [Scalar(primal_of(v), form=lambda s=s: dict(linearize(tracer, s))) for v, s in pairs]
    return make_tensor(nodes, shape_of(value)) if is_tensor_like(value) else nodes[0]


def call_with_rule(tracer: Any, rule: GradientRule, func: Any, args: list[Any], inline: Callable[..., Any]) -> Any:
    """A call of a function that has a rule."""
    names = [a.name for a in func.arguments]
    frozen: dict[str, Any] = {}
    passed: list[Any] = []
    for name, arg in zip(names, args, strict=True):
        value = tracer.value_of(arg)
        if _is_value(value):
            frozen[name] = tracer.freeze(value, (tracer.path, "rule", tracer.line(), func.func.__qualname__, name))
            stops = "auto" not in rule.parameters and name in rule.taken
            passed.append(primal_of(frozen[name]) if stops else frozen[name])
        else:
            frozen[name] = value
            passed.append(arg)
    automatic = tracer.value_of(inline(passed))
    return apply_rule(tracer, rule, frozen, automatic)


def _is_value(x: Any) -> bool:
    return isinstance(x, (int, float, Scalar, StructValue, backend.Struct)) or backend.is_expr(x) or is_tensor_like(x)


def apply_rule(tracer: Any, rule: GradientRule, inputs: dict[str, Any], automatic: Any) -> Any:
    """``automatic`` is the result with the tangents of autodiff (of the arguments that the rule leaves to it)."""
    tracer.facts.used_rules.add(rule)
    if isinstance(automatic, (tuple, list)):
        parts = list(automatic)
    else:
        parts = [automatic]
    parts = [tracer.freeze(p, (tracer.path, "automatic", tracer.line(), n)) for n, p in enumerate(parts)]
    tangents: dict[Seed, Any] = {}  # the rule's own seeds, and the tangents that they stand for

    def tangent_of(value: Any) -> Any:
        is_struct = isinstance(value, StructValue)
        return _rebuilt(value, [seeded(entry, is_struct) for entry in _entries(value)])

    def seeded(entry: Any, is_member: bool) -> Any:
        dtype = backend.dtype_of(primal_of(entry))
        if is_member and not backend.is_real(dtype):
            return backend.constant(0, dtype)  # so that a struct of the same type can be made of it
        seed = Seed(Affine((), -1 - len(tangents)))
        tangents[seed] = entry
        zero = backend.constant(0, dtype if backend.is_real(dtype) else backend.f32)
        node = Scalar(zero, form={seed: 1}, is_tangent=True)
        node.variable = backend.variable(zero)
        return node

    is_tuple = isinstance(automatic, (tuple, list))
    bound: list[Any] = []
    for parameter in rule.parameters:
        if parameter == "out":
            bound.append(tuple(primal_of(p) for p in parts) if is_tuple else primal_of(parts[0]))
        elif parameter == "auto":
            bound.append(tuple(tangent_of(p) for p in parts) if is_tuple else tangent_of(parts[0]))
        elif parameter in inputs:
            bound.append(primal_of(inputs[parameter]))
        else:
            bound.append(tangent_of(inputs[parameter[2:]]))
    function = types.SimpleNamespace(func=rule.function, is_real_function=False, return_type=None)
    with tracer.without_rule(rule.target):
        result = tracer.value_of(tracer.inline(function, bound))
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    nothing = len(results) == 1 and results[0] is None
    returned = None if nothing else [None if r is None else _shape(r) for r in results]
    check_shapes(rule, [_shape(p) for p in parts], returned)
    keeps_automatic = "auto" not in rule.parameters
    finished = []
    for part, given in zip(parts, results, strict=True):
        pairs = list(zip(_entries(part), _entries(given), strict=True))
        _check_dependence(tracer, rule, pairs)
        nodes = [_combine(tracer, p, g, tangents, keeps_automatic) for p, g in pairs]
        finished.append(_rebuilt(part, nodes))
    return tuple(finished) if is_tuple else finished[0]


def _check_dependence(tracer: Any, rule: GradientRule, pairs: list[tuple[Any, Any]]) -> None:
    """Raise where the tangent of a result does not depend on the tangents of the arguments, and is not 0.

    Of a vector, matrix or struct, some entries may be 0; one that is computed is looked at while the kernel runs, in
    Taichi's debug mode.
    """
    real = [given for part, given in pairs if _is_real(part)]
    depends = [isinstance(given, Scalar) and given.is_tangent for given in real]
    for given, does in zip(real, depends, strict=True):
        literal = tracer.literals.get(id(given), (None, given))[1]
        is_number = isinstance(literal, (int, float))
        if does or (not is_number and any(depends) and not isinstance(given, Scalar)):
            message = f"the rule {rule.name!r} is not linear: it is not 0 where its tangents are 0"
            backend.assert_zero(primal_of(given), message)
        elif not tracer.facts.changed and not (is_number and literal == 0):
            raise InvalidRuleError(
                f"The rule {rule.name!r} ({rule.place}) returns a value that does not depend on its tangents, so it is "
                "not linear in them; return a combination of the d_... and auto, or 0.0."
            )


def _is_real(x: Any) -> bool:
    return backend.is_real(backend.dtype_of(primal_of(x)))


def _combine(tracer: Any, automatic: Any, given: Any, tangents: dict[Seed, Any], keeps_automatic: bool) -> Any:
    if not _is_real(automatic):
        return primal_of(automatic)
    form: Form = {}
    if keeps_automatic:
        accumulate(form, linearize(tracer, automatic))
    for leaf, partial in linearize(tracer, given).items():
        if leaf in tangents:
            weight = backend.variable(partial) if backend.is_expr(partial) else partial
            accumulate(form, linearize(tracer, tangents[leaf]), weight)
        else:  # the rule reads a field that carries a tangent of its own
            accumulate(form, {leaf: partial})
    primal = primal_of(automatic)
    node = Scalar(primal, form=form)
    node.variable = primal
    return node


def _entries(x: Any) -> list[Any]:
    """The numbers that a value consists of."""
    if isinstance(x, (StructValue, backend.Struct)):
        return [e for m in members_of(x).values() for e in _entries(m)]
    return entries_of(x) if is_tensor_like(x) else [x]


def _rebuilt(like: Any, entries: list[Any]) -> Any:
    """A value of the form of another, of the given numbers."""
    if isinstance(like, (StructValue, backend.Struct)):
        rest, members = list(entries), {}
        for name, member in members_of(like).items():
            count = len(_entries(member))
            members[name], rest = _rebuilt(member, rest[:count]), rest[count:]
        return StructValue(members, like.methods)
    return make_tensor(entries, shape_of(like)) if is_tensor_like(like) else entries[0]


def _shape(x: Any) -> Any:
    """The shape of a value, of a struct those of its members by name."""
    if isinstance(x, (StructValue, backend.Struct)):
        return {name: _shape(member) for name, member in members_of(x).items()}
    return shape_of(x)
