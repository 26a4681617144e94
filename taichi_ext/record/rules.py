"""Values whose derivative is not that of their expression, in a recorded kernel; among them those with users' rules.

A rule is walked in place, on tangents that stand for those of its inputs.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

import taichi_ext.program as ir
from taichi_ext import backend
from taichi_ext.backend import Func
from taichi_ext.errors import InvalidRuleError, UnsupportedError, shown
from taichi_ext.program import Boundary, Local, Read, Tensor, Value, entries
from taichi_ext.record.assignments import declare, frozen
from taichi_ext.record.handles import Record, VectorPlace, group_of, shape_of, value_of, with_members
from taichi_ext.record.literals import as_value, described
from taichi_ext.record.recording import Recording


def statement(r: Recording, kind: str, given: Mapping[str, Any], values: Any, **options: object) -> Any:
    """Record a boundary; returns its results, of the structure of ``values``."""
    groups, locals_, results = results_of(kind, values)
    kept = {k: as_groups(v) for k, v in given.items() if v is not None}
    r.add(Boundary(kind, None, kept, groups, locals_, {}, options, place=r.place()))
    return results


def results_of(name: str, values: object) -> tuple[Any, tuple[Local, ...], Any]:
    """The values as groups, a local for each of their numbers, and these locals in the structure of the values."""
    locals_: list[Local] = []

    def result(x: Value) -> Value:
        locals_.append(Local(name if x.dtype.is_real else "kept", x.dtype, (), "temporary"))
        return Read(locals_[-1])

    results = by_number(result, values)
    return as_groups(values), tuple(locals_), results


def as_groups(x: object) -> Any:
    """A value, or several, as groups of a program."""
    if isinstance(x, tuple):
        return tuple(map(as_groups, x))
    return group_of(x) if isinstance(x, (Value, Tensor, Record)) else as_value(x)


def by_number(change: Callable[[Value], Value], value: object) -> object:
    """Apply a function of numbers to the numbers of a value."""
    if isinstance(value, (tuple, list)):
        return tuple(by_number(change, part) for part in value)
    if isinstance(value, Record):
        return with_members(value, lambda _, member: by_number(change, member))
    if isinstance(value, Tensor):
        return Tensor(tuple(map(change, value.entries)), value.shape)
    return change(as_value(value))


def stopped(r: Recording, value: object) -> object:
    return statement(r, "stop_gradient", {}, value)


def replaced(r: Recording, value: object, surrogate: object) -> object:
    """The value, with the tangent of another."""
    shapes = structure_of(value), structure_of(surrogate)
    if shapes[0] != shapes[1]:
        raise InvalidRuleError(
            f"replace_gradient: the value has shape {shapes[0]}, the surrogate {shapes[1]}; give both the same shape."
        )
    _check_real(as_groups(value), as_groups(surrogate))
    return statement(r, "replace_gradient", {"surrogate": surrogate}, value)


def _check_real(value: Any, surrogate: Any) -> None:
    """Raise if the derivative of a real number would be that of an integer, which has none."""
    if isinstance(value, tuple):
        for parts in zip(value, surrogate, strict=True):
            _check_real(*parts)
        return
    for own, other in zip(entries(value), entries(surrogate), strict=True):
        if other.dtype.is_real and not own.dtype.is_real:
            raise InvalidRuleError(
                f"replace_gradient: the value is of type {own.dtype.name}, which has no derivative; convert it to a "
                "real number first, as in replace_gradient(float(n), x)."
            )


def structure_of(x: object) -> object:
    """The shape of a value; of a struct those of its members by name, of several values those of each."""
    if isinstance(x, (tuple, list)):
        return tuple(map(structure_of, x))
    if isinstance(x, Record):
        return {name: structure_of(member) for name, member in x.members.items()}
    if isinstance(x, (Value, Tensor, int, float, np.generic)):
        return shape_of(x)
    return described(x)


class UserRule(Protocol):
    """A rule of a user."""

    name: str
    target: object
    target_name: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    place: str

    @property
    def taken(self) -> set[str]:
        """The arguments whose tangents it takes."""
        ...


class Rules(Protocol):
    """The rules that apply to one kernel."""

    takes_derivative: bool

    def rule_for(self, target: object) -> UserRule | None:
        """The rule of a function or mark."""

    def note_mark(self, name: str) -> None:
        """The kernel has a mark of this name."""


class NoRules:
    """No function and no mark has a rule."""

    takes_derivative = True

    def rule_for(self, target: object) -> None:
        return None

    def note_mark(self, name: str) -> None:
        pass


def find_rule(r: Recording, target: object) -> UserRule | None:
    """The rule of a function or mark, None while that rule itself is walked."""
    rule = r.rules.rule_for(target)
    return None if target in r.stopped else rule


def ruled_call(r: Recording, rule: UserRule, func: Func, bound: Sequence[object]) -> object:
    """A call of a function that has a rule: its body sees copies of the arguments."""
    inputs: dict[str, Any] = {}
    passed: list[Any] = []
    for argument, given in zip(backend.arguments(func), bound, strict=True):
        value = value_of(given)
        if not isinstance(value, (ir.Value, ir.Tensor, Record)):
            inputs[argument.name] = value
            passed.append(given)
            continue
        own = inputs[argument.name] = frozen(r, value, argument.name)
        if "auto" not in rule.parameters and argument.name in rule.taken:
            own = stopped(r, own)
        is_template = backend.is_template(argument.annotation)
        passed.append(own if is_template else declare(r, argument.name, own, "argument"))
    block = r.blocks[-1].statements
    before = len(block)
    automatic = value_of(r.library.walk(func, passed))
    if automatic is None:
        raise InvalidRuleError(
            f"The rule {rule.name!r} ({rule.place}) is for {rule.target_name!r}, which returns nothing, so that it has "
            "no tangent. Let the function return its result, and store it in the kernel."
        )
    if "auto" not in rule.parameters and rule.taken:
        _check_stores(rule, ir.statements(tuple(block[before:])))
    return apply_rule(r, rule, inputs, automatic)


def _check_stores(rule: UserRule, body: list[ir.Statement]) -> None:
    """Raise if a function stores values computed from arguments whose tangents only its rule takes."""
    for s in body:
        target = s.target if isinstance(s, ir.Store) and not isinstance(s.value, ir.Const) else None
        if isinstance(target, ir.Load) and target.dtype.is_real:
            raise UnsupportedError(
                f"The rule {rule.name!r} ({rule.place}) gives the tangent of the result of {rule.target_name!r}. The "
                f"function also stores to {target.container.name}, which would have no derivative with respect to "
                f"{', '.join(sorted(rule.taken))}. Store the function's result in the kernel, or let the rule take "
                "auto."
            )


def stop_arguments(r: Recording, bound: Sequence[object]) -> list[object]:
    """The arguments of a function that its own rule calls: without tangents."""
    values = [value_of(b) for b in bound]
    return [stopped(r, v) if isinstance(v, (ir.Value, ir.Tensor, Record)) else v for v in values]


def marked(r: Recording, name: str, value: object, along: Mapping[str, object]) -> object:
    """``mark``: its value, with the tangent that the rule of this name gives."""
    if not isinstance(name, str):
        raise InvalidRuleError(f"mark: the name is {shown(name)}; expected a string.")
    r.rules.note_mark(name)
    kept = {k: frozen(r, v, k) for k, v in along.items()}  # the kernel reads all of them
    rule = find_rule(r, name)
    if rule is None:
        return value
    allowed = {*along, *(f"d_{k}" for k in along), "out", "auto"}
    for parameter in rule.parameters:
        if parameter not in allowed:
            raise InvalidRuleError(
                f"The rule {rule.name!r} ({rule.place}) has a parameter {parameter!r}, which mark({name!r}, ...) does "
                f"not pass along; it can take {', '.join(sorted(allowed))}."
            )
    return apply_rule(r, rule, kept, value)


def apply_rule(r: Recording, rule: UserRule, inputs: Mapping[str, object], automatic: object) -> object:
    """Apply a rule; ``automatic`` is the result with autodiff's tangents, of the arguments that the rule leaves."""
    is_tuple = isinstance(automatic, (tuple, list))
    parts = tuple(frozen(r, p, "automatic") for p in (automatic if is_tuple else (automatic,)))
    whole = parts if is_tuple else parts[0]
    sources: dict[str, Any] = {}
    inner: dict[str, tuple[ir.Local, ...]] = {}
    bound: list[Any] = []
    for parameter in rule.parameters:
        if parameter == "out":
            bound.append(stopped(r, whole))
        elif parameter in inputs:
            value = inputs[parameter]
            is_value = isinstance(value, (ir.Value, ir.Tensor, Record))
            bound.append(declare(r, parameter, stopped(r, value), "argument") if is_value else value)
        else:
            value = whole if parameter == "auto" else inputs[parameter[2:]]
            tangent, inner[parameter], sources[parameter] = _tangent_of(r, parameter, value)
            bound.append(declare(r, parameter, tangent, "argument"))
    result = _walked(r, rule, bound)
    returned = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    check_shapes(rule, list(map(structure_of, parts)), None if result is None else list(map(structure_of, returned)))
    groups, locals_, results = results_of("ruled", whole)
    if sum(len(ir.entries(group)) for group in sources.get("auto", ())) == len(locals_):
        del sources["auto"]  # the values themselves, so that they are read once
    given = {**sources, "returned": as_groups(returned)}
    options = {"keeps_automatic": "auto" not in rule.parameters, "name": rule.name, "place": rule.place}
    r.add(ir.Boundary("rule", rule.target, given, groups, locals_, inner, options, place=r.place()))
    return results


def _walked(r: Recording, rule: UserRule, bound: list[object]) -> object:
    function = types.SimpleNamespace(func=rule.function, is_real_function=False, return_type=None, arguments=())
    r.stopped.append(rule.target)
    try:
        return value_of(r.library.walk(function, bound))
    finally:
        r.stopped.pop()


def _tangent_of(r: Recording, name: str, value: object) -> tuple[object, tuple[ir.Local, ...], object]:
    """Tangents of a value: the argument of the rule, the locals, and the values in the order of the locals."""
    locals_: list[ir.Local] = []
    given: list[ir.Group] = []

    def made(x: object, label: str, is_member: bool) -> object:
        if isinstance(x, (tuple, list)):
            return tuple(made(e, f"{label}_{n}", is_member) for n, e in enumerate(x))
        if isinstance(x, Record):
            return with_members(x, lambda k, member: made(member, f"{label}_{k}", True))
        x = as_value(x) if not isinstance(x, ir.Tensor) else x
        if is_member and not x.dtype.is_real:  # so that a struct of the same type can be made of it
            zeros = tuple(ir.Const(0, x.dtype) for _ in ir.entries(x))
            return ir.Tensor(zeros, x.shape) if isinstance(x, ir.Tensor) else zeros[0]
        shape = x.shape if isinstance(x, ir.Tensor) else ()
        local = ir.Local(label, x.dtype if x.dtype.is_real else ir.F32, shape, "rule")
        r.add(ir.Declare(local, tuple(ir.Const(0.0, local.dtype) for _ in ir.entries(x)), place=r.place()))
        locals_.append(local)
        given.append(x)
        return VectorPlace(local, (), shape).value() if shape else ir.Read(local)

    tangent = made(value, name, False)
    return tangent, tuple(locals_), tuple(given)


def check_shapes(rule: UserRule, wanted: Sequence[object], given: Sequence[object] | None) -> None:
    """Raise unless a rule returns values of the shapes of its function's results; None means it returned nothing."""
    if wanted != given:
        shown, got = (shapes[0] if shapes and len(shapes) == 1 else shapes for shapes in (wanted, given))
        kind = "a value of shape" if not isinstance(got, str) else "a"
        returned = "nothing" if given is None else f"{kind} {got}"
        raise InvalidRuleError(
            f"The rule {rule.name!r} ({rule.place}) returns {returned}; the result of {rule.target_name!r} has "
            f"shape {shown}."
        )
